"""The paper's points in the long format of `figure.parquet`: figure, panel, series, x, y, unit."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sarathi_lab.experiment.bench import SEQ_LENS
from sarathi_lab.results.load import load_paper

KEYS = ["panel", "series", "x"]
PANELS_FIG_09 = {"1K_b18": "1K", "2K_b10": "2K", "3K_b6": "3K"}


def paper_points(figure: str, every: int = 1) -> pd.DataFrame:
    """Columns panel, series, x, y, unit; the names are those under which `figures` predicts the
    same points.

    `every` takes only each n-th point of a line.
    """
    points = _READERS[figure]()
    rank = points.groupby(["panel", "series"]).cumcount()
    return points[rank % every == 0]


def _fig03() -> pd.DataFrame:
    points = load_paper("fig03").rename(
        columns={"phase": "panel", "op": "series", "batch": "x", "ms_per_token": "y"}
    )
    points["series"] = points.series.replace({"ffn_ln1": "ffn", "ffn_ln2": "ffn"})
    return points.groupby(KEYS, as_index=False).y.sum().assign(unit="ms/token")


def _fig04() -> pd.DataFrame:
    names = {"phase": "panel", "batch": "x"}
    speed = load_paper("fig04a").rename(columns={**names, "seqlen": "series", "tokens_per_ms": "y"})
    intensity = load_paper("fig04b").rename(
        columns={**names, "op": "series", "flops_per_byte": "y"}
    )
    intensity = intensity[
        intensity.series != "attn"
    ]  # computed by the paper as if all requests were one product
    return pd.concat(
        [
            speed.assign(series=speed.series.astype(str), unit="tokens/ms"),
            intensity.assign(panel=intensity.panel + " intensity", unit="FLOP/B"),
        ]
    )[[*KEYS, "y", "unit"]]


def _fig07() -> pd.DataFrame:
    table = load_paper("fig07").rename(columns={"num_tokens": "x", "total_compute": "total"})
    return table.melt("x", var_name="series", value_name="y").assign(panel="", unit="ms")


def _fig08() -> pd.DataFrame:
    table = load_paper("fig08").rename(columns={"seqlen": "series", "batch": "x", "speedup": "y"})
    return table.assign(panel="", unit="ratio")


def _fig09() -> pd.DataFrame:
    table = load_paper("fig09").rename(columns={"pd_ratio": "x", "norm_throughput": "y"})
    return table.assign(
        panel=table.panel.map(PANELS_FIG_09), series="C=" + table.chunk.astype(str), unit="ratio"
    )


def _fig10() -> pd.DataFrame:
    table = load_paper("fig10").rename(columns={"batch": "x"})
    table["panel"] = table.seqlen + " C=" + table.chunk.astype(str)
    points = table.melt(
        ["panel", "system", "x"],
        ["preproj", "attn", "postproj", "ffn", "total"],
        var_name="operation",
        value_name="y",
    )
    return points.assign(series=points.system + " " + points.operation, unit="s")


def _fig11() -> pd.DataFrame:
    by_length = load_paper("fig11a").rename(columns={"norm_tp": "y"})
    by_length = by_length[by_length.series != "baseline"].assign(
        panel="a", x=by_length.seqlen.map(SEQ_LENS)
    )
    by_pd = load_paper("fig11b").rename(columns={"pd_ratio": "x", "norm_throughput": "y"})
    return pd.concat([by_length, by_pd.assign(panel="b")]).assign(unit="ratio")


def _fig12() -> pd.DataFrame:
    bubbles = (
        load_paper("fig12a")
        .rename(columns={"cdf": "x", "bubble_s": "y"})
        .assign(panel="a", unit="s")
    )
    completion = (
        load_paper("fig12b")
        .rename(columns={"num_requests": "x", "time_s": "y"})
        .assign(panel="b", unit="s")
    )
    ratios = fig12_ratios(pd.concat([bubbles, completion]))
    table = pd.DataFrame(
        {
            "panel": "ratios",
            "series": ratios.keys(),
            "x": 0.0,
            "y": ratios.values(),
            "unit": "ratio",
        }
    )
    return pd.concat([bubbles, completion, table])[[*KEYS, "y", "unit"]]


def fig12_ratios(points: pd.DataFrame) -> dict[str, float]:
    """The headlines of Fig 12 from its points: Orca's median bubble time over SARATHI's, and ratios
    of completion.
    """
    lines = {key: line.sort_values("x") for key, line in points.groupby(["panel", "series"])}
    median = {
        name: float(np.interp(0.5, lines["a", name].x, lines["a", name].y))
        for name in ("sarathi", "tp_pp_orca")
    }
    done = {
        name: float(lines["b", name].y.iloc[-1]) for name in ("sarathi", "tp_pp_orca", "tp_8rep")
    }
    return {
        "bubbles, orca / sarathi": median["tp_pp_orca"] / median["sarathi"],
        "completion, orca / sarathi": done["tp_pp_orca"] / done["sarathi"],
        "completion, replicas / sarathi": done["tp_8rep"] / done["sarathi"],
        "completion, orca / replicas": done["tp_pp_orca"] / done["tp_8rep"],
    }


def _fig13() -> pd.DataFrame:
    table = load_paper("fig13").rename(
        columns={"seqlen": "series", "chunk": "x", "speedup_vs_baseline": "y"}
    )
    return table.assign(unit="ratio")


def _table2() -> pd.DataFrame:
    table = load_paper("table2").rename(columns={"batch": "panel"})
    table["x"] = table.num_prefill_tokens + table.num_decode_tokens
    points = table.melt(
        ["panel", "x"], ["linear_ms", "attention_ms", "total_ms"], var_name="series", value_name="y"
    )
    return points.assign(series=points.series.str.removesuffix("_ms"), unit="ms")


def _table4() -> pd.DataFrame:
    table = load_paper("table4").rename(columns={"model": "panel"})
    table["x"] = table.seqlen.map(SEQ_LENS)
    points = table.melt(
        ["panel", "x"], ["decode_speedup", "throughput_gain"], var_name="series", value_name="y"
    )
    return points.assign(unit="ratio")


_READERS = {
    "fig03": _fig03,
    "fig04": _fig04,
    "fig07": _fig07,
    "fig08": _fig08,
    "fig09": _fig09,
    "fig10": _fig10,
    "fig11": _fig11,
    "fig12": _fig12,
    "fig13": _fig13,
    "table2": _table2,
    "table4": _table4,
}

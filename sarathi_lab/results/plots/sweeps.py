"""The picture of any sweep: medians of its runs, drawn by one grammar.

With one or two swept settings quantities are lines along a number, or points in rows of names
(`lines`); from three on, or with more colours than can be distinguished, heat maps (`maps`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from sarathi_lab.config.errors import UserError
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.intervals import level_of
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.choice import PlotAxes, choose_axes, choose_quantities
from sarathi_lab.results.plots.lines import draw_lines
from sarathi_lab.results.plots.maps import draw_maps
from sarathi_lab.results.plots.plot import UNSTEADY, UNSTEADY_RUNS, Look
from sarathi_lab.results.plots.sweep_rows import long_rows
from sarathi_lab.results.sweep_analysis import text, values_of

UNDECIDED = "undecided, as it may be the noise of these runs"
FIXED = ("batch", "pd_ratio", "seq_len", "chunk", "num_requests")  # sizes that the title names


def draw_sweep(
    runs: pd.DataFrame,
    *,
    x: str | None = None,
    hue: str | None = None,
    col: str | None = None,
    y: str | Sequence[str] | None = None,
    kind: str | None = None,
) -> Figure:
    """Draw a sweep by what it varied; what is not named is chosen.

    Args:
        runs: a row per run (`load_runs`).
        x: setting along x. A name may leave out its group, as `rate` for `workload.rate`.
        hue: setting with a colour a value; upwards in a heat map.
        col: setting with a panel a value.
        y: quantities, a panel each.
        kind: "line" or "heat".

    Raises:
        UserError: for an unknown name, a quantity without values, or a map of a single setting.
    """
    stated: Sequence[str] = y or []
    if isinstance(y, str):
        stated = [y]
    runs = analysis.with_short_devices(runs.reset_index(drop=True))
    comparable = _with_ratios(_with_devices_of_models(runs), stated)
    axes = choose_axes(comparable, x=x, hue=hue, col=col, kind=kind)
    quantities = [analysis.find_column(comparable, name) for name in stated]
    if not quantities:
        quantities = choose_quantities(comparable, axes)
    drawn = analysis.without_repeated(comparable, quantities)
    rows = long_rows(drawn, axes, quantities)
    num_values = rows.groupby("quantity")["value"].count()
    shown = [name for name in quantities if num_values.get(name, 0) > 0]
    for name in quantities:
        if name not in shown and (name in stated or not shown):
            raise UserError(f"y={name} has no value in these runs; name another quantity")
    if axes.kind == "heat":
        figure = draw_maps(rows, axes, shown, undecided=UNDECIDED)
    else:
        figure = draw_lines(rows, axes, shown, _mark_keys(drawn, rows, axes))
    return style.finished(figure, _title(runs))


def _with_devices_of_models(runs: pd.DataFrame) -> pd.DataFrame:
    """Name the device beside the model where each model ran on one of several devices."""
    if not {"model", "device"} <= set(runs):
        return runs
    num_devices = runs.groupby("model")["device"].nunique().max()
    if num_devices == 1 and runs["device"].nunique() > 1:
        return runs.assign(model=runs["model"] + ", " + runs["device"])
    return runs


def _with_ratios(runs: pd.DataFrame, stated: Sequence[str]) -> pd.DataFrame:
    """Add the ratios to the references of the sweep, and those among the `stated` quantities."""
    # A copy holds equal types together; to a table as read pandas adds columns with a warning each.
    with_ratios = runs.copy()
    with_ratios.attrs.clear()  # which each step would copy
    references = [f"throughput_vs_{policy}" for policy in analysis.references(with_ratios)]
    for name in [*references, *stated]:
        quantity, is_ratio, base = name.partition("_vs_")
        if is_ratio:
            with_ratios = analysis.relative(with_ratios, quantity, base)
    return with_ratios


def policies(runs: pd.DataFrame) -> Figure:
    """Draw latency and throughput of policies, the shortest gaps between tokens on top."""
    return draw_sweep(runs, x="policy", y=["tbt_p99", "ttft_p50", "ttft_p99", "throughput"])


# -- marks ---------------------------------------------------------------------------------------


def _mark_keys(runs: pd.DataFrame, rows: pd.DataFrame, axes: PlotAxes) -> list[Artist]:
    """Explain bars and hollow points, where there are any."""
    keys: list[Artist] = []
    if rows["is_unsteady"].any():
        unsteady = Look(UNSTEADY_RUNS, "black", dash="", marker=UNSTEADY)
        keys.append(unsteady.key())
    samples = _samples_in_words(runs, rows)
    if samples is not None:
        bar = Look(samples, "black", dash="", marker="|", size=12.0)
        keys.append(bar.key())
    has_point = rows[axes.x].notna()  # others are lines across
    if not rows.loc[has_point, "is_decided"].all():
        hollow = Look(f"hollow: {UNDECIDED}", "black", dash="", marker="o", is_hollow=True)
        keys.append(hollow.key())
    return keys


def _samples_in_words(runs: pd.DataFrame, rows: pd.DataFrame) -> str | None:
    """State what medians are of, and the one level of their intervals; None for single runs."""
    num_samples = rows["num_samples"]
    several = num_samples[num_samples > 1]
    if several.empty:
        return None
    swept = analysis.without_baselines(runs)
    repeated = []
    for name in analysis.SAMPLES:
        if name in swept and len(values_of(swept, name)) > 1:
            repeated.append(f"{name}s")
    samples = " and ".join(repeated) or "runs"
    number = int(several.min())
    return f"bars and bands: {level_of(number):.0%} intervals of medians of {number} {samples}"


# -- title -----------------------------------------------------------------------------------------


def _title(runs: pd.DataFrame) -> str:
    """Name model, device and the sizes that all runs share."""
    swept = analysis.without_baselines(runs)
    names = [_few_values(swept, "model")]
    dtypes = _few_values(swept, "dtype")
    if dtypes != "auto":  # replays leave it to the server's files
        names.append(dtypes)
    title = _joined(names)
    devices = _few_values(swept, "device")
    if devices:
        title_and_devices = filter(None, [title, devices])
        title = " on ".join(title_and_devices)
    elif "executor" in swept and (swept.executor == "simulated").all():
        title = _joined([title, "simulated"])
    sizes = []
    for name in FIXED:
        # Policies of servers have batches and chunks of their own.
        if name in runs and len(values_of(runs, name)) == 1:
            sizes.append(f"{style.short_name(name)} {text(runs[name].dropna().iloc[0])}")
    lines = [title, _joined(sizes)]
    return "\n".join(filter(None, lines))


def _joined(texts: Sequence[str]) -> str:
    return ", ".join(filter(None, texts))


def _few_values(runs: pd.DataFrame, name: str) -> str:
    """Return the one or two values of a label; "" for more, or without it."""
    if name not in runs or runs[name].nunique() > 2:
        return ""
    values = set(map(text, runs[name]))
    return " or ".join(sorted(values))

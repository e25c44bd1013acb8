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
    numbered = runs.reset_index(drop=True)
    runs = analysis.with_short_devices(numbered)
    of_models = _with_devices_of_models(runs)
    comparable = _with_ratios(of_models, stated)
    axes = choose_axes(comparable, x=x, hue=hue, col=col, kind=kind)
    quantities = [analysis.find_column(comparable, name) for name in stated]
    if not quantities:
        quantities = choose_quantities(comparable, axes)
    drawn = analysis.without_repeated(comparable, quantities)
    rows = long_rows(drawn, axes, quantities)
    shown = _with_values(rows, quantities)
    for name in quantities:
        is_needed = name in stated or not shown
        if is_needed and name not in shown:
            raise UserError(f"y={name} has no value in these runs; name another quantity")
    if axes.kind == "heat":
        figure = draw_maps(rows, axes, shown, undecided=UNDECIDED)
    else:
        keys = _mark_keys(drawn, rows, axes)
        figure = draw_lines(rows, axes, shown, keys)
    return style.finished(figure, _title(runs))


def _with_values(rows: pd.DataFrame, quantities: Sequence[str]) -> list[str]:
    """Return the quantities of which a row has a value, such as times above the noise."""
    with_value = rows.dropna(subset="value")
    present = set(with_value["quantity"])
    shown = []
    for name in quantities:
        if name in present:
            shown.append(name)
    return shown


def _with_devices_of_models(runs: pd.DataFrame) -> pd.DataFrame:
    """Name the device beside the model where each model ran on one of several devices."""
    if not {"model", "device"} <= set(runs):
        return runs
    num_devices = runs["device"].nunique()
    devices_of_model = runs.groupby("model")["device"]
    num_of_model = devices_of_model.nunique()
    if num_devices > 1 and num_of_model.max() == 1:
        model_and_device = runs["model"] + ", " + runs["device"]
        return runs.assign(model=model_and_device)
    return runs


def _with_ratios(runs: pd.DataFrame, stated: Sequence[str]) -> pd.DataFrame:
    """Add the ratios to the references of the sweep, and those among the `stated` quantities."""
    # A copy holds equal types together; to a table as read pandas adds columns with a warning each.
    with_ratios = runs.copy()
    with_ratios.attrs.clear()  # which each step would copy
    names = list(stated)
    for policy in analysis.references(with_ratios):
        names.append(f"throughput_vs_{policy}")
    for name in names:
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
        crosses = Look(UNSTEADY_RUNS, "black", dash="", marker=UNSTEADY)
        keys.append(crosses.key())
    samples = _samples_in_words(runs, rows)
    if samples is not None:
        bar = Look(samples, "black", dash="", marker="|", size=12.0)
        keys.append(bar.key())
    has_point = rows[axes.x].notna()  # others are lines across
    are_decided = rows["is_decided"][has_point]
    if not are_decided.all():
        label = f"hollow: {UNDECIDED}"
        hollow = Look(
            label,
            colour="black",
            dash="",
            marker="o",
            is_hollow=True,
        )
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
        if name in swept and swept[name].nunique() > 1:
            repeated.append(f"{name}s")
    samples = " and ".join(repeated) or "runs"
    number = int(several.min())
    level = level_of(number)
    return f"bars and bands: {level:.0%} intervals of medians of {number} {samples}"


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
        if name not in runs:
            continue
        values = values_of(runs, name)
        if len(values) == 1:
            label = style.short_name(name)
            sizes.append(f"{label} {values[0]}")
    lines = [title, _joined(sizes)]
    return "\n".join(filter(None, lines))


def _joined(texts: Sequence[str]) -> str:
    return ", ".join(filter(None, texts))


def _few_values(runs: pd.DataFrame, name: str) -> str:
    """Return the one or two values of a label; "" for more, or without it."""
    if name not in runs:
        return ""
    if runs[name].nunique() > 2:
        return ""
    texts = runs[name].map(text)
    in_order = sorted(texts.unique())
    return " or ".join(in_order)

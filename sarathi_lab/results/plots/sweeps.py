"""The picture of any sweep: medians of its runs, drawn by one grammar.

With one or two swept settings quantities are lines along a number, or points in rows of names
(`lines`); from three on, or with more colours than can be distinguished, heat maps (`maps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from sarathi_lab.config.errors import UserError
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.intervals import level_of
from sarathi_lab.results.metrics import CHUNK_RIDGES
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import scale_of
from sarathi_lab.results.plots.choice import MARGINAL, PlotAxes, choose_axes, choose_quantities
from sarathi_lab.results.plots.lines import draw_lines
from sarathi_lab.results.plots.maps import draw_maps
from sarathi_lab.results.plots.plot import UNSTEADY, UNSTEADY_RUNS, Look
from sarathi_lab.results.sweep_analysis import text, values_of
from sarathi_lab.results.table import UNITS, display_unit, is_share, less_is_better

VALUES = ["value", "low", "high"]
PERCENT = 100.0
MOST_ROUNDS = 0.5  # share of rounds or seeds that are not steady, from which a median is marked
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
    comparable = _with_ratios(runs, stated)
    axes = choose_axes(comparable, x=x, hue=hue, col=col, kind=kind)
    quantities = []
    for name in stated:
        quantity = analysis.find_column(comparable, name)
        _require_values(comparable, axes, quantity)
        quantities.append(quantity)
    if not quantities:
        quantities = choose_quantities(comparable, axes)
    drawn = analysis.without_repeated(comparable, quantities)
    rows = long_rows(drawn, axes, quantities)
    if axes.kind == "heat":
        undecided = _undecided_in_words(drawn)
        figure = draw_maps(rows, axes, quantities, undecided=undecided)
    else:
        notes = _mark_keys(drawn, rows, axes)
        figure = draw_lines(rows, axes, quantities, notes)
    return style.finished(figure, _title(drawn))


def _with_ratios(runs: pd.DataFrame, stated: Sequence[str]) -> pd.DataFrame:
    """Add the ratios to the references of the sweep, and those among the `stated` quantities."""
    with_ratios = runs.reset_index(drop=True)  # rows of concatenated tables may share a label
    # A copy holds equal types together; to a table as read pandas adds columns with a warning each.
    with_ratios = with_ratios.copy()
    with_ratios.attrs.clear()  # which each step would copy
    with_ratios = analysis.with_short_devices(with_ratios)
    references = [f"throughput_vs_{policy}" for policy in analysis.references(with_ratios)]
    for name in [*references, *stated]:
        quantity, is_ratio, base = name.partition("_vs_")
        if is_ratio:
            with_ratios = analysis.relative(with_ratios, quantity, base)
    return with_ratios


def _require_values(runs: pd.DataFrame, axes: PlotAxes, name: str) -> None:
    """Raise UserError if there is nothing to draw of the quantity `name`."""
    values = runs[name].dropna()
    if values.empty:
        raise UserError(f"y={name} has no value in these runs; name another quantity")
    # A map of a difference of times shows only what is above the noise.
    needs_positive = axes.kind == "heat" and name == MARGINAL
    if needs_positive and (values <= 0).all():
        raise UserError(f"y={name} is below the noise in all runs; name another quantity")


def policies(runs: pd.DataFrame) -> Figure:
    """Draw latency and throughput of policies, the shortest gaps between tokens on top."""
    return draw_sweep(runs, x="policy", y=["tbt_p99", "ttft_p50", "ttft_p99", "throughput"])


# -- rows and marks --------------------------------------------------------------------------------


def long_rows(runs: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str]) -> pd.DataFrame:
    """Return medians in their displayed units: a row per quantity and combination of settings.

    Beside them is the `heading` of the quantity, whether it `is_less_better`, and whether the runs
    are not steady (`is_unsteady`).
    """
    if "is_baseline" not in runs:
        runs = runs.assign(is_baseline=False)
    stated = [axes.x, axes.hue, axes.col, *axes.others, *axes.bound]
    settings = [setting for setting in stated if setting is not None]
    grouped_by = list(dict.fromkeys([*settings, "policy", "is_baseline"]))
    rows = analysis.medians(runs, grouped_by, *quantities)
    # A difference of times that may be equal.
    is_marginal = rows["quantity"] == MARGINAL
    is_below_noise = is_marginal & (rows["value"] <= 0)
    rows.loc[is_below_noise, VALUES] = math.nan
    is_single_run = rows["num_samples"] == 1
    rows.loc[is_single_run, ["low", "high"]] = math.nan
    groups_of_runs = analysis.group_keys(runs, grouped_by)
    groups_of_rows = analysis.group_keys(rows, grouped_by)
    share_unsteady = analysis.unsteady(runs).groupby(groups_of_runs).mean()
    is_unsteady = groups_of_rows.map(share_unsteady) >= MOST_ROUNDS
    displayed = _displayed(rows, runs, quantities)
    return displayed.assign(is_unsteady=is_unsteady)


def _displayed(rows: pd.DataFrame, runs: pd.DataFrame, quantities: Sequence[str]) -> pd.DataFrame:
    """Convert values from SI to the units that their headings state."""
    factors = {}
    headings = {}
    is_less_better = {}
    for name in quantities:
        quantity, _, _ = name.partition("_vs_")
        largest = float(runs[name].max())
        factor, heading = display_unit(name, largest)
        if is_share(name):
            factor = PERCENT
            heading += " [%]"
        is_less_better[name] = less_is_better(quantity)
        if quantity in UNITS:  # of others, such as a user's, nobody knows what is better
            arrow = "↓" if is_less_better[name] else "↑"
            heading += f" ({arrow}\N{NO-BREAK SPACE}better)"
        factors[name] = factor
        headings[name] = heading
    names = rows["quantity"]
    displayed = rows.assign(
        heading=names.map(headings),
        is_less_better=names.map(is_less_better),
    )
    factor_of_row = names.map(factors)
    displayed[VALUES] = rows[VALUES].mul(factor_of_row, axis=0)
    return displayed


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
        reason = _undecided_in_words(runs)
        hollow = Look(f"hollow: {reason}", "black", dash="", marker="o", is_hollow=True)
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
    level = level_of(number)
    label = f"bars and bands: {level:.0%} intervals of medians of {number} {samples}"
    if _has_cut_intervals(rows):
        label += ", cut at the axis"
    return label


def _has_cut_intervals(rows: pd.DataFrame) -> bool:
    """Return whether an interval leaves the axis of its quantity."""
    for quantity, of_quantity in rows.groupby("quantity"):
        scale = scale_of(of_quantity, str(quantity))
        has_interval = of_quantity["num_samples"] > 1
        with_interval = of_quantity[has_interval]
        lowest = with_interval["low"].min()
        highest = with_interval["high"].max()
        if lowest < scale.start or highest > scale.end:
            return True
    return False


def _undecided_in_words(runs: pd.DataFrame) -> str:
    """State why a ratio is undecided."""
    noise = analysis.noise(runs)
    if math.isnan(noise):
        return "undecided, as one run each has no measure of noise"
    if round(noise, 2) <= 1:
        return "undecided, as the interval includes 1"
    return f"undecided, within the noise (equal work differed by up to {noise:.2f} times)"


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
        if name in swept and len(values_of(swept, name)) == 1:
            sizes.append(_size(runs, swept, name))
    sizes.append(_ridge(swept))
    lines = [title, _joined(sizes)]
    return "\n".join(filter(None, lines))


def _joined(texts: Sequence[str]) -> str:
    return ", ".join(filter(None, texts))


def _ridge(runs: pd.DataFrame) -> str:
    """Name the tokens of a ridge, which the chunks of measured runs are told in; "" without it."""
    if CHUNK_RIDGES not in runs:
        return ""
    tokens = runs.chunk / runs[CHUNK_RIDGES]
    tokens = tokens.dropna()
    if tokens.empty:
        return ""
    return f"ridge {tokens.median():.0f} tokens"


def _size(runs: pd.DataFrame, swept: pd.DataFrame, name: str) -> str:
    """Name a size that all swept runs share, and the policies whose baselines have another."""
    label = style.short_name(name)
    if name == "num_requests" and _counts_a_part(swept):
        label = "requests counted"
    (shared_size,) = values_of(swept, name)
    swept_policies = map(str, swept["policy"].unique())
    policies_of_size = {shared_size: list(swept_policies)}
    baselines = runs.drop(index=swept.index)
    for policy, of_policy in baselines.groupby("policy", sort=False):
        for size in values_of(of_policy, name):
            policies_of_size.setdefault(size, []).append(str(policy))
    # Other sizes are of the workload, which baselines share.
    is_of_server = name in ("batch", "chunk")
    if not is_of_server or len(policies_of_size) == 1:
        return f"{label} {shared_size}"
    sizes = []
    for size, names in policies_of_size.items():
        policies_in_words = " and ".join(names)
        sizes.append(f"{size} of {policies_in_words}")
    return f"{label} {', '.join(sizes)}"


def _counts_a_part(runs: pd.DataFrame) -> bool:
    """Return whether metrics are of a part of the runs, such as the steady one."""
    return "window_start" in runs and bool(runs["window_start"].notna().any())


def _few_values(runs: pd.DataFrame, name: str) -> str:
    """Return the one or two values of a label; "" for more, or without it."""
    if name not in runs or runs[name].nunique() > 2:
        return ""
    values = set(map(text, runs[name]))
    return " or ".join(sorted(values))

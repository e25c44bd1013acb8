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
from sarathi_lab.results.table import UNITS, display_unit, less_is_better

VALUES = ["value", "low", "high"]
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
    runs = runs.reset_index(drop=True)  # rows of concatenated tables may share a label
    runs.attrs.clear()  # which each step would copy
    runs = analysis.with_short_devices(runs)
    stated = [y] if isinstance(y, str) else list(y or [])
    ratios = [f"throughput_vs_{name}" for name in analysis.references(runs)]
    for ratio in [*ratios, *stated]:
        quantity, is_ratio, base = ratio.partition("_vs_")
        if is_ratio:
            runs = analysis.relative(runs, quantity, base)
    axes = choose_axes(runs, x=x, hue=hue, col=col, kind=kind)
    quantities = [analysis.find_column(runs, name) for name in stated]
    for name in quantities:
        _require_values(runs, axes, name)
    if not quantities:
        quantities = choose_quantities(runs, axes)
    runs = analysis.without_repeated(runs, quantities)
    rows = long_rows(runs, axes, quantities)
    if axes.kind == "heat":
        figure = draw_maps(rows, axes, quantities, undecided=_undecided_in_words(runs))
    else:
        figure = draw_lines(rows, axes, quantities, _mark_keys(runs, rows, axes))
    return style.finished(figure, _title(runs))


def _require_values(runs: pd.DataFrame, axes: PlotAxes, name: str) -> None:
    """Raise UserError if there is nothing to draw of the quantity `name`."""
    values = runs[name].dropna()
    if values.empty:
        raise UserError(f"y={name} has no value in these runs; name another quantity")
    if axes.kind == "heat" and name == MARGINAL and not (values > 0).any():
        raise UserError(f"y={name} is below the noise in all runs; name another quantity")


def policies(runs: pd.DataFrame) -> Figure:
    """Draw latency and throughput of policies, the shortest gaps between tokens on top."""
    return draw_sweep(runs, x="policy", y=["tbt_p99", "ttft_p50", "ttft_p99", "throughput"])


# -- rows and marks --------------------------------------------------------------------------------


def long_rows(runs: pd.DataFrame, axes: PlotAxes, quantities: Sequence[str]) -> pd.DataFrame:
    """Return medians in their displayed units: a row per quantity and combination of settings, with
    the `heading` of the quantity, whether it `is_less_better` and whether the runs are not steady.
    """
    if "is_baseline" not in runs:
        runs = runs.assign(is_baseline=False)
    settings = [axes.x, axes.hue, axes.col, *axes.others, *axes.bound, "policy", "is_baseline"]
    by = list(dict.fromkeys(filter(None, settings)))
    rows = analysis.medians(runs, by, *quantities)
    # A difference of times that may be equal.
    is_below_noise = (rows["quantity"] == MARGINAL) & (rows["value"] <= 0)
    rows.loc[is_below_noise, VALUES] = math.nan
    factors = {}
    headings = {}
    is_less_better = {}
    for name in quantities:
        quantity, _, _ = name.partition("_vs_")
        is_less_better[name] = less_is_better(quantity)
        factors[name], headings[name] = display_unit(name, float(runs[name].max()))
        if quantity in UNITS:  # of others, such as a user's, nobody knows what is better
            arrow = "↓" if is_less_better[name] else "↑"
            headings[name] += f" ({arrow}\N{NO-BREAK SPACE}better)"
    rows[VALUES] = rows[VALUES].mul(rows["quantity"].map(factors), axis=0)
    rows.loc[rows["num_samples"] == 1, ["low", "high"]] = math.nan  # one run has no interval
    share_unsteady = analysis.unsteady(runs).groupby(analysis.group_keys(runs, by)).mean()
    share = analysis.group_keys(rows, by).map(share_unsteady)
    return rows.assign(
        heading=rows["quantity"].map(headings),
        is_less_better=rows["quantity"].map(is_less_better),
        is_unsteady=share >= MOST_ROUNDS,
    )


def _mark_keys(runs: pd.DataFrame, rows: pd.DataFrame, axes: PlotAxes) -> list[Artist]:
    """Explain bars and hollow points, where there are any."""
    keys: list[Artist] = []
    if rows["is_unsteady"].any():
        keys.append(Look(UNSTEADY_RUNS, "black", "", UNSTEADY).key())
    samples = _samples_in_words(runs, rows)
    if samples is not None:
        keys.append(Look(samples, "black", "", "|", size=12.0).key())
    has_point = rows[axes.x].notna()  # others are lines across
    if not rows.loc[has_point, "is_decided"].all():
        label = f"hollow: {_undecided_in_words(runs)}"
        keys.append(Look(label, "black", "", "o", is_hollow=True).key())
    return keys


def _samples_in_words(runs: pd.DataFrame, rows: pd.DataFrame) -> str | None:
    """State what medians are of, and the one level of their intervals; None for single runs."""
    several = rows.loc[rows["num_samples"] > 1, "num_samples"]
    if several.empty:
        return None
    swept = analysis.without_baselines(runs)
    repeated = []
    for name in analysis.SAMPLES:
        if name in swept and swept[name].nunique() > 1:
            repeated.append(f"{name}s")
    number = int(several.min())
    samples = f"{number} {' and '.join(repeated) or 'runs'}"
    label = f"bars and bands: {level_of(number):.0%} intervals of medians of {samples}"
    if _has_cut_intervals(rows):
        label += ", cut at the axis"
    return label


def _has_cut_intervals(rows: pd.DataFrame) -> bool:
    """Return whether an interval leaves the axis of its quantity."""
    for quantity, group in rows[rows["num_samples"] > 1].groupby("quantity"):
        scale = scale_of(rows[rows["quantity"] == quantity], str(quantity))
        if group["low"].min() < scale.start or group["high"].max() > scale.end:
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
    title = _few_values(swept, "model")
    dtypes = _few_values(swept, "dtype")
    if dtypes != "auto":  # replays leave it to the server's files
        title = ", ".join(filter(None, [title, dtypes]))
    devices = _few_values(swept, "device")
    if devices:
        title = " on ".join(filter(None, [title, devices]))
    elif "executor" in swept and (swept.executor == "simulated").all():
        title = ", ".join(filter(None, [title, "simulated"]))
    sizes = []
    for name in FIXED:
        if name in swept and len(values_of(swept, name)) == 1:
            sizes.append(_size(runs, swept, name))
    return "\n".join(filter(None, [title, ", ".join([*sizes, *_ridge(swept)])]))


def _ridge(runs: pd.DataFrame) -> list[str]:
    """Name the tokens of a ridge, which the chunks of measured runs are told in."""
    if CHUNK_RIDGES not in runs:
        return []
    ridges = (runs.chunk / runs[CHUNK_RIDGES]).dropna()
    return [f"ridge {ridges.median():.0f} tokens"] if len(ridges) else []


def _size(runs: pd.DataFrame, swept: pd.DataFrame, name: str) -> str:
    """Name a size that all swept runs share, and the policies whose baselines have another."""
    label = style.short_name(name)
    if name == "num_requests" and _counts_a_part(swept):
        label = "requests counted"
    (value,) = values_of(swept, name)
    policies: dict[str, list[str]] = {value: list(swept["policy"].unique())}
    for policy, group in runs.drop(index=swept.index).groupby("policy", sort=False):
        for other in values_of(group, name):
            policies.setdefault(other, []).append(str(policy))
    is_of_server = name in ("batch", "chunk") and len(policies) > 1
    if not is_of_server:
        return f"{label} {value}"
    parts = [f"{size} of {' and '.join(names)}" for size, names in policies.items()]
    return f"{label} {', '.join(parts)}"


def _counts_a_part(runs: pd.DataFrame) -> bool:
    """Return whether metrics are of a part of the runs, such as the steady one."""
    return "window_start" in runs and bool(runs["window_start"].notna().any())


def _few_values(runs: pd.DataFrame, name: str) -> str:
    """Return the one or two values of a label; "" for more, or without it."""
    if name not in runs or runs[name].nunique() > 2:
        return ""
    return " or ".join(sorted({text(value) for value in runs[name]}))

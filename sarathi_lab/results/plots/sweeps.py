"""Pictures of runs (`load.load_runs`, `comparison.load`). No measuring, no file access."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.columns import factor, heading
from sarathi_lab.results.comparison import ComparedRun
from sarathi_lab.results.plots.style import AXIS_NAMES, finished, marker, panels

# What may vary in a sweep, the best x axis first.
LABELS = ["pd_ratio", "seq_len", "batch", "chunk", "policy"]
LABELS += ["workload", "model", "dtype", "threads", "device", "seed"]
LINES = ("-", "--", "-.", ":")
LEGEND_LINE = 0.07  # height of a legend's line, of that of the axes
# Column of the iterations, factor and y label.
CURVES = (
    ("num_prefill_tokens", 1.0, "prompt tokens"),
    ("num_decode_tokens", 1.0, "decodes"),
    ("busy", 1e3, "iteration time [ms]"),
    ("num_waiting", 1.0, "requests waiting"),
)
NUM_MARKERS = 10
Lines = list[tuple[str, pd.DataFrame]]
LABEL_WIDTH = 52  # characters


def varying_labels(runs: pd.DataFrame) -> list[str]:
    """The labels in which the runs, baselines aside, differ; the best x axis first."""
    own = _own(runs)
    varying = [label for label in LABELS if label in own and own[label].nunique() > 1]
    if "threads" in varying and own.groupby("threads").device.nunique().max() == 1:
        varying.remove("device")  # its name differs by the number of threads only
    return varying


def sweep_overview(runs: pd.DataFrame) -> Figure:
    """Throughput, decode time, KV re-read and latency of all runs of a sweep."""
    varying = varying_labels(runs)
    x = next(iter(varying), "policy")
    figure, (top_left, top_right, bottom_left, bottom_right) = panels(2, 2, (10, 7))
    # Along P:D or lengths the work itself changes, and only ratios on the same requests say
    # something.
    is_same_work = x in ("chunk", "policy")
    shown = runs if is_same_work else relative(runs, "throughput", to="request_level")
    name = "throughput" if shown is runs else "throughput_vs_request_level"
    metric(shown, name, x=x, ax=top_left)
    decode_time(runs, x=x, ax=top_right)
    if x == "chunk":
        kv_reread(runs, ax=bottom_left)
    else:
        metric(runs, "kv_reread_factor", x=x, ax=bottom_left)
    latency(runs, x=x, ax=bottom_right)
    first = _own(runs).iloc[0]
    device = str(first["device"])
    device = device.rpartition(",")[0] + ")" if "threads" in varying else device
    return finished(figure, f"{first['model']}, {first['dtype']} on {device}")


def relative(runs: pd.DataFrame, name: str, *, to: str) -> pd.DataFrame:
    """`runs` with `<name>_vs_<to>` for every row, baselines too: divided by the baseline `to` on
    the same requests.

    Without such a baseline `runs` itself is returned.
    """
    base = runs[runs.is_baseline.astype(bool) & (runs.policy == to)]
    if base.empty or name not in runs:
        return runs
    keys = [label for label in LABELS if label in runs and label not in ("chunk", "policy")]
    keys = [label for label in keys if runs[label].notna().all()]
    divisor = base.groupby(keys)[name].mean().rename("_divisor")
    joined = runs.merge(divisor, left_on=keys, right_index=True, how="left")
    return joined.assign(**{f"{name}_vs_{to}": joined[name] / joined["_divisor"]})


def metric(runs: pd.DataFrame, name: str, *, x: str, ax: Axes) -> Axes:
    """A quantity against the label `x`: a line per series, dashed where the label is missing."""
    if name not in runs or runs[name].isna().all():
        return _empty(ax, f"no run has {heading(name)}")
    ticks, lines, levels = _grid(runs, x)
    for i, (series, rows) in enumerate(lines):
        _line(ax, rows, name, i, label=series, linestyle="" if x == "policy" else "-")
    for i, (series, rows) in enumerate(levels):
        if not math.isnan(level := rows[name].mean() * factor(name)):
            color = f"C{len(lines) + i}"
            ax.axhline(level, color=color, linestyle=LINES[1:][i % 3], label=series)
    return _finish(ax, ticks, x, heading(name))


def decode_time(runs: pd.DataFrame, *, x: str, ax: Axes) -> Axes:
    """Time per decode alone and piggybacked on a chunk, in ms per token (Table 2's comparison)."""
    kinds = {"decode_time_alone": ("alone", "--", "none")}
    kinds |= {"decode_time_marginal": ("piggybacked", "-", "full")}
    piggybacked = _own(runs).dropna(subset=list(kinds)) if {*kinds} <= {*runs} else runs.iloc[:0]
    if piggybacked.empty:
        return _empty(ax, "no run mixed chunks and decodes")
    ticks, lines, _ = _grid(piggybacked, x)
    for name, (words, linestyle, fill) in kinds.items():
        style = {"linestyle": "" if x == "policy" else linestyle, "fillstyle": fill}
        for i, (series, rows) in enumerate(lines):
            label = words if len(lines) == 1 else f"{words}, {series}"
            _line(ax, rows, name, i, label=label, **style)
    return _finish(ax, ticks, x, "time per decode [ms/token]")


def latency(runs: pd.DataFrame, *, x: str, ax: Axes) -> Axes:
    """P50 TTFT against P99 time between tokens, a point a run: down and left is better."""
    names = ["ttft_p50", "tbt_p99"]
    if not set(names) <= set(runs) or runs[names].dropna().empty:
        return _empty(ax, "no run has both TTFT and time between tokens")
    runs = runs.dropna(subset=names)
    has_distances = x != "policy"
    _, lines, levels = _grid(runs.assign(**{name: runs[name] * factor(name) for name in names}), x)
    for i, (series, rows) in enumerate(lines):
        rows, style = rows.sort_values("_x"), "o-" if has_distances else "o"
        ax.plot(rows.ttft_p50, rows.tbt_p99, style, color=f"C{i}", label=series)
        # Of many points along a line, its ends: it says what is between.
        ends = rows.iloc[[0, -1]] if has_distances and len(rows) >= 4 else rows
        for _, row in ends.iterrows():
            place = (row.ttft_p50, row.tbt_p99)
            ax.annotate(_text(row[x]), place, (4, 4), textcoords="offset points")
    for i, (series, rows) in enumerate(levels, start=len(lines)):
        ax.plot(rows.ttft_p50, rows.tbt_p99, "s", color=f"C{i}", label=series)
    ax.margins(0.12)
    ax.set(xlabel=heading("ttft_p50"), ylabel=heading("tbt_p99"))
    if has_distances:
        title = f"points: {AXIS_NAMES.get(x, x).split(' [')[0]}"
        ax.legend(title=title, fontsize="small", title_fontsize="small")
    return ax


def kv_reread(runs: pd.DataFrame, *, ax: Axes) -> Axes:
    """KV re-read factor against chunk size, beside (N+1)/2 for the N chunks that an uncontended
    prompt takes.

    With all decodes aboard a chunk has C - (B-1) prompt tokens; one without decodes is cut less or
    not at all.
    """
    own = _own(runs).dropna(subset=["chunk"])
    if own.empty:
        return _empty(ax, "no run has a chunk size")
    metric(own, "kv_reread_factor", x="chunk", ax=ax)
    chunks = sorted(own.chunk.unique())
    prompt_len = (own.num_prompt_tokens / own.num_requests).round()
    loads = sorted(set(zip(prompt_len, own.batch, strict=True)))
    for style, (tokens, batch) in zip((":", "-."), loads, strict=False):
        theory = [(math.ceil(tokens / (chunk - batch + 1)) + 1) / 2 for chunk in chunks]
        label = f"(N+1)/2, P={tokens:.0f}, B={batch}"
        ax.plot(range(len(chunks)), theory, color="black", linestyle=style, label=label)
    return _fit(ax)


def _line(ax: Axes, rows: pd.DataFrame, name: str, i: int, **style: Any) -> None:
    """The means of a quantity by place on the x axis, as the `i`-th series."""
    means = rows.groupby("_x")[name].mean() * factor(name)
    ax.plot(means.index, means, marker=marker(i), color=f"C{i}", **style)


def _grid(runs: pd.DataFrame, x: str) -> tuple[list[str], Lines, Lines]:
    """The ticks, and the runs to draw by series: lines, which have the label x, at `_x`, and levels
    without. Equal steps along x whatever its values: chunk sizes double, names have no distance.
    """
    others = [label for label in varying_labels(runs) if label not in (x, "policy")]
    if "is_baseline" in runs:  # own runs get C0
        runs = runs.sort_values("is_baseline", kind="stable")
    of_policies = x == "policy"
    series = ["" if of_policies else _series(run, others) for _, run in runs.iterrows()]
    ticks = list(dict.fromkeys(runs[x])) if of_policies else sorted(runs[x].dropna().unique())
    places = runs[x].map({value: place for place, value in enumerate(ticks)})
    frame = runs.assign(_series=series, _x=places)
    lines, levels = (
        [(str(name), rows) for name, rows in part.groupby("_series", sort=False)]
        for part in (frame[frame[x].notna()], frame[frame[x].isna()])
    )
    return [_text(tick) for tick in ticks], lines, levels


def _series(run: pd.Series, others: Sequence[str]) -> str:
    known = [f"{label}={_text(run[label])}" for label in others if pd.notna(run.get(label))]
    return ", ".join([str(run["policy"]), *known])


def _own(runs: pd.DataFrame) -> pd.DataFrame:
    if "is_baseline" not in runs or runs.is_baseline.all():
        return runs
    return runs[~runs.is_baseline.astype(bool)]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _finish(ax: Axes, ticks: Sequence[str], x: str, ylabel: str) -> Axes:
    ax.set_xticks(range(len(ticks)), ticks, rotation=20 if sum(map(len, ticks)) > 40 else 0)
    ax.margins(x=0.08)
    ax.set(xlabel=AXIS_NAMES.get(x, x), ylabel=ylabel)
    return _fit(ax)


def _fit(ax: Axes) -> Axes:
    """Fit the y axis to the data, from zero on, with a band for the legend."""
    ax.relim()
    ax.autoscale(axis="y")
    if ax.dataLim.y0 >= 0:
        ax.set_ylim(0.0, max(ax.get_ylim()[1], 1.05 * ax.dataLim.y1))
    entries = sum(bool(label) for label in ax.get_legend_handles_labels()[1])
    if entries:
        bottom, top = ax.get_ylim()
        band = min(0.05 + LEGEND_LINE * entries, 0.5)
        # Without room below the data, make some above.
        if ax.dataLim.y0 - bottom < band * (top - bottom):
            ax.set_ylim(top=bottom + (top - bottom) / (1 - band))
        ax.legend(fontsize="small")
    return ax


def _empty(ax: Axes, why: str) -> Axes:
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes)
    ax.set_axis_off()
    return ax


def curves(runs: Sequence[ComparedRun], x: str = "iteration") -> Figure:
    """What each run's iterations held and took, against `x`: "iteration", or "end" for the time."""
    shown = [curve for curve in CURVES if any(curve[0] in run.iterations for run in runs)]
    figure, axes = panels(len(shown), 1, (9, 1.9 * len(shown) + 0.8), sharex=True)
    for ax, (column, scale, words) in zip(axes, shown, strict=True):
        for i, run in enumerate(runs):
            if column in run.iterations and x in run.iterations:
                ax.plot(
                    run.iterations[x],
                    scale * run.iterations[column],
                    label=run.name,
                    linestyle=LINES[i % len(LINES)],
                    marker=marker(i),
                    markersize=4,
                    markevery=max(1, len(run.iterations) // NUM_MARKERS),
                    color=f"C{i}",  # the same in all axes, whichever columns the runs before have
                    # an iteration lasts until its end
                    drawstyle="steps-pre" if x == "end" else "default",
                )
        ax.set_ylabel(words)
    axes[-1].set_xlabel("time [s]" if x == "end" else x)
    return _with_legend(figure, axes[0])


def ratios(metrics: pd.DataFrame) -> Figure:
    """Ratios of `comparison.compared_metrics` as dots on a logarithmic axis; 1: the reference."""
    import seaborn as sns  # takes two seconds

    table = metrics.xs("ratio", axis="columns", level=1).dropna(how="all")
    long = table.melt(ignore_index=False, var_name="run", value_name="ratio").reset_index()
    figure, (ax,) = panels(1, 1, (8, 0.3 * len(table) + 1.6))
    markers = list(map(marker, range(table.shape[1])))
    sns.pointplot(
        long, x="ratio", y="metric", hue="run", linestyle="none", markers=markers, dodge=0.4, ax=ax
    )
    ax.axvline(1.0, color="black", linestyle=":")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="ratio to the reference", ylabel="")
    if ax.legend_ is not None:
        ax.legend_.remove()
    return _with_legend(figure, ax)


def _with_legend(figure: Figure, ax: Axes) -> Figure:
    """The legend of `ax` below all, wrapped: a single run is called by all its settings."""
    handles, labels = ax.get_legend_handles_labels()
    wrapped = [textwrap.fill(label, LABEL_WIDTH, break_on_hyphens=False) for label in labels]
    figure.legend(handles, wrapped, loc="outside lower center", ncols=2)
    return finished(figure)

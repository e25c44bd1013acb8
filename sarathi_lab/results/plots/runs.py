"""The picture of one run, iteration by iteration and request by request, and that of several."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.config.console import amount
from sarathi_lab.results.plots import style
from sarathi_lab.results.plots.axes import LOG_SCALE
from sarathi_lab.results.plots.plot import Look, PanelLayout, distribution, plot, styled
from sarathi_lab.results.serving_metrics import waits
from sarathi_lab.results.table import heading

# By column of the iterations the factor and the y label.
CURVES = {
    "num_prefill_tokens": (1.0, "prompt tokens"),
    "num_decode_tokens": (1.0, "decodes"),
    "busy": (1e3, "iteration time [ms]"),
    "num_waiting": (1.0, "requests waiting"),
}
STACKED = {  # columns of the iterations by what is upwards
    "tokens in the batch": {"num_prefill_tokens": "prompt tokens", "num_decode_tokens": "decodes"},
    "requests": {"num_running": "running", "num_waiting": "waiting"},
}
DASHES = ("-", "--", "-.", ":")
LABEL_WIDTH = 52  # characters
HEIGHT = 5.4  # inches, of one run's picture
PERCENTILES = {50: "--", 99: ":"}  # and the dash of their lines
DISTRIBUTIONS = ("ttft", "tbt")
SHARE = Look("", "C0", drawstyle="steps-post")


def draw_run(iterations: pd.DataFrame, requests: pd.DataFrame, title: str) -> Figure:
    """Draw a run's tokens and requests over time, and the distributions of its TTFT and TBT."""
    times = waits(requests)
    milliseconds = {}
    marks = []
    for name in DISTRIBUTIONS:
        seconds = pd.Series(times[name])
        milliseconds[name] = 1e3 * seconds.dropna()
        shares = distribution(milliseconds[name])
        in_panel = shares.assign(panel=name)
        marks.append(styled(in_panel, SHARE))
    panels = [*STACKED, *DISTRIBUTIONS]
    size = (style.WIDTH, HEIGHT)
    grid = PanelLayout(panels, columns=2, size=size)
    table = pd.concat(marks)
    figure, axes = plot(table, x="at", grid=grid)
    for label, columns in STACKED.items():
        ax = axes[label]
        _draw_over_time(ax, iterations, columns)
        ax.set_ylabel(label)
    for name in DISTRIBUTIONS:
        _label_distribution(axes[name], milliseconds[name], name)
    return style.finished(figure, title)


def _draw_over_time(ax: Axes, iterations: pd.DataFrame, columns: Mapping[str, str]) -> None:
    """Draw columns of the iterations on top of each other, each from its start to its end."""
    amounts = iterations[list(columns)]
    start_of_next = iterations["start"].shift(-1)
    end = iterations["end"].clip(upper=start_of_next)  # stages of a pipeline overlap
    started = amounts.set_axis(iterations["start"])
    ended = 0 * amounts.set_axis(end)
    # An iteration that begins as another ends has both rows at that time.
    steps = pd.concat([started, ended])
    by_time = steps.groupby(level=0)
    at_each_time = by_time.max()
    heights = at_each_time.to_numpy(float)
    names = list(columns.values())
    ax.stackplot(at_each_time.index, heights.T, step="post", labels=names)
    ax.legend(frameon=True)
    ax.set_xlabel("time [s]")
    last = iterations["end"].max()
    ax.set_xlim(0, last)
    ax.set_ylim(bottom=0)


def _label_distribution(ax: Axes, milliseconds: pd.Series, name: str) -> None:
    """Label the axes of a distribution, with lines at `PERCENTILES`."""
    heading_of_median = heading(f"{name}_p50")
    label = heading_of_median.replace(" P50", "")
    ax.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if milliseconds.empty:
        return
    for percent, dash in PERCENTILES.items():
        share = percent / 100
        value = float(milliseconds.quantile(share))
        percentile = f"P{percent}: {amount(value)} ms"
        ax.axvline(value, color="black", ls=dash, lw=1.0, label=percentile)
    low = float(milliseconds.min())
    high = float(milliseconds.max())
    if low > 0 and high > 3 * low:
        ax.set_xscale("log")
        ax.set_xlabel(f"{label}, {LOG_SCALE}")
        style.tick_in_steps(ax.xaxis)
    ax.legend(loc="best", frameon=True)


def curves(runs: Mapping[str, pd.DataFrame], x: str) -> Figure:
    """Draw the iterations of runs (tables by name) against `x`: "iteration", or "end" for time."""
    looks = _looks_of_runs(list(runs), x)
    lines = []
    panels = []
    # Column by column, so that the panels are in the order of `CURVES`.
    for column, (factor, _) in CURVES.items():
        for name, table in runs.items():
            if column not in table or x not in table:
                continue
            line = pd.DataFrame(
                {
                    "at": table[x],
                    "value": factor * table[column],
                    "panel": column,
                }
            )
            lines.append(styled(line, looks[name]))
            if column not in panels:
                panels.append(column)
    height = 1.9 * len(panels) + 0.5
    grid = PanelLayout(
        panels,
        columns=1,
        size=(9, height),
        shares={"sharex": True},
    )
    figure, axes = plot(pd.concat(lines), x="at", grid=grid)
    for column in panels:
        _, label = CURVES[column]
        axes[column].set_ylabel(label)
    x_label = x
    if x == "end":
        x_label = "time [s]"
    lowest = axes[panels[-1]]
    lowest.set_xlabel(x_label)
    keys = [look.key() for look in looks.values()]
    style.legend_below(figure, keys)
    return style.finished(figure)


def _looks_of_runs(names: Sequence[str], x: str) -> dict[str, Look]:
    """Return a look for each run, of which colours and dashes differ."""
    colours = style.colours(names)
    drawstyle = "default"
    if x == "end":
        drawstyle = "steps-pre"  # an iteration lasts until its end
    looks = {}
    for number, name in enumerate(names):
        turn = number % len(DASHES)
        looks[name] = Look(
            name=textwrap.fill(name, LABEL_WIDTH, break_on_hyphens=False),
            colour=colours[name],
            dash=DASHES[turn],
            marker=style.marker(number),
            size=4.0,
            drawstyle=drawstyle,
            is_thinned=True,
        )
    return looks

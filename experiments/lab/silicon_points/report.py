"""Errors of the simulated points, as tables and as a picture.

python experiments/lab/silicon_points/report.py    # the orders again, from results/points.csv.gz
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_lab.results.intervals import ends_of_share
from sarathi_lab.results.plots.files import save_figure
from sarathi_lab.results.plots.style import (
    WIDTH,
    finished,
    legend_below,
    marker,
    panels,
    tick_in_steps,
)

FOLDER = Path(__file__).parent / "results"
SERIES = ["gpu", "model", "backend", "weights"]
GROUPINGS = (SERIES, ["backend", "weights", "concurrency"], ["backend", "weights", "tp"])
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
LEVEL = "analytic"  # of the picture
GAP = 0.05  # of the slower time, from which a pair counts
# Columns of a comparison of two servers.
SCORES = ["pairs", "right", "called", "called_right", "share_low", "share_high"]
SCORES += ["rule_right", "rule_right_called"]
FEW = 10  # a series of fewer points gets no panel


def write_report(results: pd.DataFrame, num_points: int, reasons: Counter[str]) -> None:
    """Print coverage and errors, and write `errors.csv` and `points.png` beside the results."""
    table = with_errors(results)
    for level, of_level in table.groupby("cost_model"):
        print(f"\n{level}: {len(of_level)} points of {num_points}")
        for by in GROUPINGS:
            errors = summary(of_level, by)
            print("\n" + errors.to_string(index=False, float_format="{:.2f}".format))
    print("\nnot tried:")
    for reason, count in reasons.most_common():
        print(f"  {count:5} {reason}")
    errors = summary(table, ["cost_model", *SERIES])
    errors.to_csv(FOLDER / "errors.csv", index=False, float_format="%.3f")
    write_orders(table)
    of_picture = table[table.cost_model == LEVEL]
    if of_picture.groupby(SERIES).size().max() >= FEW:
        save_figure(picture(of_picture), FOLDER / "points.png")


def write_orders(table: pd.DataFrame) -> None:
    """Print which of two servers is faster, and write `orders.csv`."""
    orders_of_pairs = orders(pd.concat([table, by_measured_products(table)]))
    print("\nwhich of two servers is faster:\n" + orders_of_pairs.to_string(index=False))
    orders_of_pairs.to_csv(FOLDER / "orders.csv", index=False, float_format="%.4f")


def with_errors(results: pd.DataFrame) -> pd.DataFrame:
    """The results with relative errors; end to end is TTFT and what follows the first token."""
    table = results.copy()
    for whose in ("real", "sim", "spread"):
        table[f"{whose}_e2e"] = table[f"{whose}_ttft"] + (table.osl - 1) * table[f"{whose}_tpot"]
    for metric in METRICS:
        real = table[f"real_{metric}"]
        for whose in ("sim", "spread"):
            table[f"{whose}_{metric}_error"] = table[f"{whose}_{metric}"] / real - 1
    return table


def summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """By group: points, and of each metric the median and mean absolute error and the median error
    (bias); where users were spread, too, the bias then and the share of points between the two.
    """

    def row(group: pd.DataFrame) -> pd.Series:
        values: dict[str, float] = {"points": len(group)}
        for metric in METRICS:
            error = group[f"sim_{metric}_error"]
            values[f"{metric}_median"] = error.abs().median()
            values[f"{metric}_mean"] = error.abs().mean()
            values[f"{metric}_bias"] = error.median()
        spread = group.spread_ttft_error.dropna()
        values["ttft_spread_bias"] = spread.median()
        between = (group.spread_ttft <= group.real_ttft) & (group.real_ttft <= group.sim_ttft)
        values["ttft_between"] = between[spread.index].mean()
        return pd.Series(values)

    return table.groupby(by, dropna=False).apply(row, include_groups=False).reset_index()


def by_measured_products(table: pd.DataFrame) -> pd.DataFrame:
    """vLLM's times by its operation tables, other servers' by formula: the tables are vLLM's."""
    is_by_tables = table.cost_model == "profiled"
    is_of_vllm = table.backend == "vllm"
    return table[is_by_tables == is_of_vllm].assign(cost_model="vLLM's by tables")


def orders(table: pd.DataFrame) -> pd.DataFrame:
    """Of two servers on the same GPUs, model, lengths and users, by time: pairs that differ by more
    than `GAP`, and in how many the simulated one that is faster is the real one.

    A predicted gap of up to `GAP` is a tie, whose order is not called. The share of the called
    pairs that is right has an interval for which degree and lengths count once: the pairs of
    several numbers of users hang together. The rule without a simulator has one server as the
    faster at every point, the one that serves it best in hindsight.
    """
    setting = ["tp", "isl", "osl"]
    same = ["cost_model", *SERIES[:2], "weights", *setting, "concurrency"]
    matched = table.merge(table, on=same, suffixes=("", "_other")).query("backend < backend_other")
    rows = []
    for by, group in matched.groupby([*same[:4], "backend", "backend_other"]):
        for metric in METRICS:
            real, other = group[f"real_{metric}"], group[f"real_{metric}_other"]
            simulated, other_simulated = group[f"sim_{metric}"], group[f"sim_{metric}_other"]
            pairs = group[setting].assign(
                is_earlier=real < other,
                is_right=(real < other) == (simulated < other_simulated),
                is_called=relative_gap(simulated, other_simulated) > GAP,
            )
            rows.append([*by, metric, *scores(pairs[relative_gap(real, other) > GAP], setting)])
    columns = [*same[:4], "backend", "other", "metric", *SCORES]
    return pd.DataFrame(rows, columns=columns)


def relative_gap(times: pd.Series, others: pd.Series) -> pd.Series:
    """The difference over the longer of two times."""
    return (times - others).abs() / np.maximum(times, others)


def scores(pairs: pd.DataFrame, setting: list[str]) -> list[float]:
    """The values of `SCORES`."""
    called = pairs[pairs.is_called]
    num_settings = len(called[setting].drop_duplicates())
    low, high, _ = ends_of_share(called.is_right.mean(), num_settings)
    return [
        len(pairs),
        pairs.is_right.sum(),
        len(called),
        called.is_right.sum(),
        low,
        high,
        right_by_one_server(pairs),
        right_by_one_server(called),
    ]


def right_by_one_server(pairs: pd.DataFrame) -> int:
    """Count the pairs in which one of both servers, always the same, is the faster."""
    num_earlier = int(pairs.is_earlier.sum())
    return max(num_earlier, len(pairs) - num_earlier)


def picture(table: pd.DataFrame) -> Figure:
    """TTFT above, TPOT below."""
    shown = {}
    for metric in ("ttft", "tpot"):
        ratio = table[f"sim_{metric}"] / table[f"real_{metric}"]
        shown[f"{METRICS[metric]}, simulated / real"] = table.assign(ratio=ratio)
    return ratios(shown, "Simulated servers over measured ones")


def ratios(shown: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """A row for each of `shown`, tables with a column `ratio`, by what that is: over concurrency
    and by tensor parallelism, a column a series.
    """
    first_table = next(iter(shown.values()))
    names = [name for name, points in first_table.groupby(SERIES) if len(points) >= FEW]
    size = (WIDTH, 0.9 + 2.2 * len(shown))
    figure, axes = panels(len(shown), len(names), size, sharex=True, sharey="row")
    for row, (label, table) in enumerate(shown.items()):
        first_panel = row * len(names)
        axes_of_row = axes[first_panel : first_panel + len(names)]
        series = dict(list(table.groupby(SERIES)))
        for ax, name in zip(axes_of_row, names, strict=True):
            _panel(ax, series[name])
        axes_of_row[0].set_ylabel(label)
        if table.ratio.between(0.5, 2).all():  # too few decades for ticks
            axes_of_row[0].set_yscale("linear")
    for ax, (gpu, model, backend, weights) in zip(axes, names, strict=False):
        bits = 8 if weights == "fp8" else 16
        ax.set_title(f"{model}\n{backend}, {gpu}\n{bits}-bit", fontsize=8)
    for ax in axes[-len(names) :]:
        ax.set_xlabel("users")
    keys, _ = axes[0].get_legend_handles_labels()
    legend_below(figure, keys)
    return finished(figure, title)


def _panel(ax: Axes, table: pd.DataFrame) -> None:
    ax.axhline(1, color="0.3", linewidth=1)
    for i, tp in enumerate((1, 2, 4, 8)):
        points = table[table.tp == tp]
        x = points.concurrency * 2 ** (0.12 * (i - 1.5))  # apart, so that none hides another
        style = {"color": f"C{i}", "markersize": 4, "alpha": 0.7}
        ax.plot(x, points.ratio, marker(i), label=f"tp {tp}", **style)
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        tick_in_steps(axis)


if __name__ == "__main__":
    write_orders(with_errors(pd.read_csv(FOLDER / "points.csv.gz")))

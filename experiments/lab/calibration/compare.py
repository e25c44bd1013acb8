"""A simulated sweep beside the measured one: `compare.py MEASURED SIMULATED [--out FOLDER]`.

Leaves sweep.csv, a row a run and quantity (median of the rounds), and sweep.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import sarathi_lab as lab
from sarathi_lab.results.plots.style import WIDTH, finished, panels
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.results.table import factor, heading

QUANTITIES = ("throughput", "ttft_p50", "tbt_p50", "tbt_p99")
RUN = ["policy", "chunk"]
RATE = "workload.rate"  # of sweeps under load
APART = 0.1  # of the line between two runs, that measured and simulated points are moved


def quantities(folder: Path, run: list[str]) -> pd.DataFrame:
    """Return the medians over rounds by the settings of a run and quantity, baselines once."""
    runs = lab.load(str(folder)).runs
    chunk = pd.to_numeric(runs.get("chunk"))  # a baseline has none
    runs = runs.assign(chunk=chunk.fillna(0).astype(int))
    of_runs = runs.groupby(run)
    medians = of_runs[list(QUANTITIES)].median()
    return medians.stack().rename_axis([*run, "quantity"])


def compared(measured: Path, simulated: Path, run: list[str]) -> pd.DataFrame:
    """Return a row per run and quantity of both sweeps, with the simulation's error."""
    both = {
        "measured": quantities(measured, run),
        "simulated": quantities(simulated, run),
    }
    table = pd.DataFrame(both).dropna().reset_index()
    error = table.simulated / table.measured - 1
    return table.assign(error=error)


def _name(row: dict[str, Any]) -> str:
    """Return what the run is called: its policy, its chunk and its rate, as far as it has them."""
    name = str(row["policy"])
    if row["chunk"]:
        name += f" {row['chunk']}"
    if RATE in row:
        name += f" at {row[RATE]:g}/s"
    return name


def drawn(table: pd.DataFrame, title: str) -> Figure:
    """Draw each quantity of each run, measured and simulated."""
    figure, axes = panels(1, len(QUANTITIES), (1.4 * WIDTH, 3.4))
    first_panel = axes[0]
    for ax, quantity in zip(axes, QUANTITIES, strict=True):
        rows = table[table.quantity == quantity]
        _draw_quantity(ax, quantity, rows)
        names = [""] * len(rows)
        if ax is first_panel:
            names = list(map(_name, rows.to_dict("records")))
        ax.set_yticks(range(len(rows)), names)
    first_panel.legend(fontsize="small")
    return finished(figure, title)


def _draw_quantity(ax: Axes, quantity: str, rows: pd.DataFrame) -> None:
    """Draw a quantity from zero on: a line a run, the first one above."""
    lines = np.arange(len(rows))
    scale = factor(quantity)
    ax.plot(scale * rows.measured, lines - APART, "o", label="measured")
    ax.plot(scale * rows.simulated, lines + APART, "o", label="simulated")
    _, largest = ax.get_xlim()
    ax.set_xlim(0, 1.1 * largest)
    ax.set_xlabel(heading(quantity))
    ax.invert_yaxis()
    ax.locator_params(axis="x", nbins=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("simulated", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    runs = lab.load(str(options.measured)).runs
    run = RUN
    if RATE in runs and runs[RATE].notna().all():
        run = [*RUN, RATE]
    table = compared(options.measured, options.simulated, run)
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "sweep.csv", index=False, float_format="%.6g")
    figure = drawn(table, "A simulated sweep beside the measured one")
    figure.savefig(options.out / "sweep.png")
    show([table_of_errors(table, run), f"mean error: {mean_errors(table)}"])


def table_of_errors(table: pd.DataFrame, run: list[str]) -> DisplayTable:
    """Return the errors, a row a run and a column a quantity."""
    errors = table.pivot_table(index=run, columns="quantity", values="error", sort=False)
    in_order = errors[list(QUANTITIES)].reset_index()
    rows = in_order.rename(columns=heading)
    formats = {heading(name): "+.1%" for name in QUANTITIES}
    return DisplayTable(rows.to_dict("records"), left=run, formats=formats)


def mean_errors(table: pd.DataFrame) -> str:
    """Return the mean error of each quantity."""
    means = table.error.abs().groupby(table.quantity, sort=False).mean()
    errors = []
    for name, error in means.items():
        errors.append(f"{heading(str(name))} {error:.1%}")
    return ", ".join(errors)


if __name__ == "__main__":
    main()

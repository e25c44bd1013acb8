"""A simulated sweep beside the measured one: `compare.py MEASURED SIMULATED [--out FOLDER]`.

Leaves sweep.csv, a row a run and quantity (median of the rounds), and sweep.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

import sarathi_lab as lab
from sarathi_lab.results.plots.style import WIDTH, finished, panels
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.results.table import factor, heading

QUANTITIES = ("throughput", "ttft_p50", "tbt_p50", "tbt_p99")
RUN = ["policy", "chunk"]
RATE = "workload.rate"  # of sweeps under load


def quantities(folder: Path, run: list[str]) -> pd.DataFrame:
    """Return the medians over rounds by the settings of a run and quantity, baselines once."""
    runs = lab.load(str(folder)).runs
    runs = runs.assign(chunk=pd.to_numeric(runs.get("chunk")).fillna(0).astype(int))
    return runs.groupby(run)[list(QUANTITIES)].median().stack().rename_axis([*run, "quantity"])


def compared(measured: Path, simulated: Path, run: list[str]) -> pd.DataFrame:
    """Return a row per run and quantity of both sweeps, with the simulation's error."""
    both = {"measured": quantities(measured, run), "simulated": quantities(simulated, run)}
    table = pd.DataFrame(both).dropna().reset_index()
    return table.assign(error=table.simulated / table.measured - 1)


def _name(row: dict[str, Any]) -> str:
    """Return what the run is called: its policy, its chunk and its rate, as far as it has them."""
    name = str(row["policy"])
    if row["chunk"]:
        name += f" {row['chunk']}"
    if RATE in row:
        name += f" at {row[RATE]:g}/s"
    return name


def drawn(table: pd.DataFrame, where: str):
    """Draw each quantity of each run, measured and simulated."""
    figure, axes = panels(1, len(QUANTITIES), (1.4 * WIDTH, 3.4))
    for ax, name in zip(axes, QUANTITIES, strict=True):
        rows = table[table.quantity == name]
        names = list(map(_name, rows.to_dict("records")))
        for offset, kind in ((-0.1, "measured"), (0.1, "simulated")):
            places = [i + offset for i in range(len(rows))]
            ax.plot(factor(name) * rows[kind], places, "o", label=kind)
        ax.set_yticks(range(len(rows)), names if ax is axes[0] else [""] * len(rows))
        ax.set(xlabel=heading(name), xlim=(0, 1.1 * ax.get_xlim()[1]), ylim=ax.get_ylim()[::-1])
        ax.locator_params(axis="x", nbins=4)
    axes[0].legend(fontsize="small")
    return finished(figure, where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("simulated", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    columns = lab.load(str(options.measured)).runs.columns
    run = [*RUN, RATE] if RATE in columns else RUN
    table = compared(options.measured, options.simulated, run)
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "sweep.csv", index=False, float_format="%.6g")
    drawn(table, "A simulated sweep beside the measured one").savefig(options.out / "sweep.png")
    rows = table.pivot_table(index=run, columns="quantity", values="error", sort=False)[
        [*QUANTITIES]
    ]
    errors = rows.reset_index().rename(columns=heading).to_dict("records")
    means = table.error.abs().groupby(table.quantity, sort=False).mean()
    text = ", ".join(f"{heading(str(name))} {error:.1%}" for name, error in means.items())
    formats = {heading(name): "+.1%" for name in QUANTITIES}
    show([DisplayTable(errors, left=run, formats=formats), f"mean error: {text}"])


if __name__ == "__main__":
    main()

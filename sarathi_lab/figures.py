"""All figures of the paper as PNG and PDF, from recorded results: the paper's points, simulations, measurements.

`python -m sarathi_lab.figures`, or `make figures`; `notebooks/figures.ipynb` shows the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from sarathi_lab import recorded
from sarathi_lab.errors import require_one_of
from sarathi_lab.exits import exit_code
from sarathi_lab.paper import plots
from sarathi_lab.paper.figures import COLUMNS, FIGURES, PARTS, devices_of, paper, predict
from sarathi_lab.paper.headlines import QUESTIONS, headlines, verdict
from sarathi_lab.paths import EXPERIMENTS, REPOSITORY, make_folder
from sarathi_lab.plots_policies import policies
from sarathi_lab.plots_serving import TITLES
from sarathi_lab.plots_serving import draw as draw_serving
from sarathi_lab.report import console, print_place, progress_of

__all__ = ["FIGURES", "QUESTIONS", "SERVING", "headlines", "main", "points_of", "serving_points", "simulate", "verdict"]

SIMULATED = EXPERIMENTS / "paper" / "results" / "simulated.csv"
FORMATS = ("png", "pdf")
POLICIES = "policies"  # the experiment of that name: a figure for each device that it was recorded on
SERVING = tuple(TITLES)  # experiments of serving, which are drawn as soon as something is recorded
DRAWN_CURVES = 10  # each n-th of the thousand points of Fig 12's curves is recorded; more than can be seen apart


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    options = _parser().parse_args(args)
    return exit_code(lambda: _run(options), "the figures that were written are kept")


def points_of(*names: str) -> pd.DataFrame:
    """The points of figures (of all without names): the paper's, simulated and measured, as in `figure.parquet`.

    Measured ones have `low` and `high`, their interval. Raises UserError for an unknown name.
    """
    for name in names:
        require_one_of("figure", name, FIGURES)
    chosen = names or FIGURES
    simulated = pd.read_csv(SIMULATED, keep_default_na=False, dtype={"series": str})
    tables = [*map(paper, chosen), simulated[simulated.figure.isin(chosen)]]
    known = recorded.recorded()
    tables += [_measured(name) for name in chosen if name in known]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def serving_points(name: str) -> pd.DataFrame:
    """The recorded points of an experiment of serving, and the paper's where its folder has them (`plots_serving`)."""
    table = recorded.load(name)
    points = table.assign(device=table.device_name + ", " + table.model.astype(str))
    papers = EXPERIMENTS / name / "paper.csv"
    return pd.concat([points, pd.read_csv(papers)], ignore_index=True) if papers.is_file() else points


def simulate() -> pd.DataFrame:
    """All simulated points anew, about a minute; with progress."""
    jobs = [(part, device) for part in PARTS for device in devices_of(part)]
    tables = []
    with progress_of("predicting", len(jobs)) as advance:
        for part, device in jobs:
            tables.append(predict(part, device))
            advance(1)
    points = pd.concat(tables, ignore_index=True)
    rank = points.groupby(["figure", "device", "panel", "series"]).cumcount()
    return points[(points.figure != "fig12") | (rank % DRAWN_CURVES == 0)]


def _measured(figure: str) -> pd.DataFrame:
    """The recorded points of a figure by devices; what a device's own simulation gave is left to the paper's scale."""
    table = recorded.load(figure)
    table = table[~table.is_simulated]
    device = table.device + ", " + table.model.fillna("").astype(str)
    names = {"panel": table.panel.fillna("").astype(str), "series": table.series.astype(str)}
    found = table.assign(**names, device=device.str.removesuffix(", "), source="measured", uncertainty=float("nan"))
    return found[[*COLUMNS, "low", "high"]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab.figures",
        description="Draw the paper's figures as PNG and PDF: its points, simulated, and measured where recorded.",
    )
    parser.add_argument(
        "--only", action="append", metavar="FIGURE", help=f"one of {', '.join([*FIGURES, *SERVING, POLICIES])}"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "outputs" / "figures", help="where they go")
    parser.add_argument("--recompute", action="store_true", help="simulate anew, and record it, before drawing")
    return parser


def _run(options: argparse.Namespace) -> int:
    known = (*FIGURES, *(name for name in (*SERVING, POLICIES) if name in recorded.recorded()))
    chosen = options.only or known
    for name in chosen:
        require_one_of("--only", name, known)
    names = [name for name in chosen if name in FIGURES]
    make_folder(options.out, "--out")
    if options.recompute:
        simulate().to_csv(SIMULATED, index=False, float_format="%.5g")
        print_place("simulated", SIMULATED)
    points = points_of(*names) if names else points_of()[:0]
    with progress_of("drawing", len(chosen)) as advance:
        for name in chosen:
            for stem, figure in _draw(name, points):
                _write(stem, figure, options.out)
            advance(1)
    for row in headlines(points).to_dict("records"):
        said = f" ({row['verdict']})" if row["verdict"] else ""
        text = f"{row['figure']:7} {row['headline']}: {row['device']} {row['value']:.3g}{said}"
        console().print(text, highlight=False, soft_wrap=True)
    print_place("figures", options.out)
    return 0


def _draw(name: str, points: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """The pictures of a figure or experiment, each with its file's name; `points` are those of the paper's figures."""
    if name == POLICIES:
        for device, runs in recorded.load(POLICIES).groupby("device"):
            yield f"{POLICIES}-{device}", policies(runs)
    else:
        yield name, draw_serving(name, serving_points(name)) if name in SERVING else plots.draw(name, points)


def _write(name: str, figure: Figure, folder: Path) -> None:
    for ending in FORMATS:
        figure.savefig(folder / f"{name}.{ending}", dpi=150)


if __name__ == "__main__":
    sys.exit(main())

"""What a commit had recorded, and what is recorded now, in tables side by side.

    python tools/before_and_after.py COMMIT

Both sides are judged by today's rules: verdicts of claims on simulated GPUs, intervals without a
width, levels of one quantity that exclude each other, the mean errors against the paper's points,
the share of these within the intervals, and mean errors and orders of measured servers. Errors of
single kernels are recorded nowhere: `tools/cost_model/fit.py --silicon` prints them, by a package's
tables.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from sarathi_lab.config.csv_files import csv_files
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment.claims import VERDICTS, kind_of, verdicts
from sarathi_lab.experiment.registry import CATALOG, KEYS, PAPERS
from sarathi_lab.results.load import SIMULATED, load_paper

ERRORS = Path("sarathi/paper/results/errors.csv")
SERVERS = Path("lab/silicon_points/results")
PROFILED = "-profiled"
TYPES = {"panel": str, "series": str, "x": float}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT", help="with records in experiments/")
    commit = parser.parse_args().commit
    return exit_code(lambda: compare(commit), "nothing is written")


def compare(commit: str) -> int:
    """Print the tables of what `commit` had recorded and of what is recorded now."""
    with TemporaryDirectory() as folder:
        before = recorded_at(commit, Path(folder))
        sides = {commit[:12]: before, "now": EXPERIMENTS}
        judged = {name: verdicts(root) for name, root in sides.items()}
        counts = {name: counted(table) for name, table in judged.items()}
        print("Simulated claims by verdict (a claim once on each device)")
        print(pd.DataFrame(counts).fillna(0).astype(int).to_string())
        print("\nOf predicted values and medians over seeds")
        print(pd.DataFrame({name: widths(root) for name, root in sides.items()}).to_string())
        for name, table in judged.items():
            excluded = ", ".join(disjoint_levels(table)) or "none"
            print(f"\nLevels that exclude each other, {name}: {excluded}")
        print("\nMean error against the paper's points [%]")
        errors = {name: errors_of_paper(root) for name, root in sides.items()}
        print(pd.DataFrame(errors).to_string())
        print("\nShare of the paper's points within the interval of the prediction")
        shares = {name: coverage(tested_points(root)) for name, root in sides.items()}
        print(pd.concat(shares, axis=1).round(2).to_string())
        print("\nMean error of a token's time on measured servers [%]; pairs of servers in order")
        servers = {name: measured_servers(root) for name, root in sides.items()}
        print(pd.concat(servers, axis=1).to_string(na_rep="not recorded"))
    return 0


def recorded_at(commit: str, folder: Path) -> Path:
    """Write what `commit` has in experiments/ into a folder, and return its place. Raises
    UserError for what git can't read.
    """
    # A commit that begins with a dash is no option of git's.
    command = ["git", "archive", "--format=tar", "--end-of-options", commit, "experiments"]
    archive = subprocess.run(command, capture_output=True, check=False, cwd=EXPERIMENTS.parent)
    if archive.returncode:
        reason = " ".join(archive.stderr.decode().split()).removeprefix("fatal: ")
        raise UserError(f"{commit}: git has no records of it ({reason}); name a commit of git log")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "experiments"


def counted(judged: pd.DataFrame) -> pd.Series:
    """Return how often each verdict is given on simulated devices."""
    simulated = judged[judged.device.str.startswith(SIMULATED)]
    return simulated.verdict.map(kind_of).value_counts().reindex(VERDICTS)


def widths(root: Path) -> pd.Series:
    """Return how many recorded intervals there are, and how many have no width."""
    numbers = {"intervals": 0, "without a width": 0}
    for path in csv_files(root, f"*/*/results/{SIMULATED}*/*.csv"):
        table = pd.read_csv(path)
        if {"low", "high", "num_pairs"} <= set(table):
            numbers["intervals"] += int(table.low.notna().sum())
            numbers["without a width"] += int((table.high <= table.low).sum())
    return pd.Series(numbers)


def disjoint_levels(judged: pd.DataFrame) -> Iterator[str]:
    """Yield the claims whose intervals by formula and by tables exclude each other on a GPU."""
    for claim, rows in judged.groupby("id", sort=False):
        for first, second in combinations(rows.itertuples(), 2):
            if second.device != f"{first.device}{PROFILED}":
                continue
            if first.high < second.low or second.high < first.low:
                yield f"{claim} on {first.device.removeprefix(SIMULATED)}"


def errors_of_paper(root: Path) -> pd.Series:
    """Return the mean errors by row of the paper's figures and device, in percent."""
    table = pd.read_csv(root / ERRORS).set_index(["row", "device"])
    return (100 * table["mean"]).round(2)


def measured_servers(root: Path) -> pd.Series:
    """Return the mean errors of a token's time [%] by GPU, model, server and level, and how many
    pairs of two servers have the real order of it, such as "46 of 58".
    """
    folder = root / SERVERS
    errors = pd.read_csv(folder / "errors.csv")
    numbers = {}
    for row in errors.itertuples():
        key = (row.gpu, f"{row.model}, {row.backend}", row.cost_model)
        numbers[key] = f"{100 * row.tpot_mean:.1f}"
    if (folder / "orders.csv").is_file():
        orders = pd.read_csv(folder / "orders.csv").query("metric == 'tpot'")
        for row in orders.itertuples():
            key = (row.gpu, f"{row.model}, {row.backend} over {row.other}", row.cost_model)
            numbers[key] = f"{row.right} of {row.pairs}"
    return pd.Series(numbers)


def coverage(tested: pd.DataFrame) -> pd.DataFrame:
    """Return the number of points and the share within their intervals: by figure and device, and
    by level over all figures but the twelfth, whose points are of one run.
    """
    by_figure = tested.groupby(["figure", "device"]).is_within.agg(["size", "mean"])
    others = tested[tested.figure != "fig12"].assign(figure="all but fig12")
    by_level = others.groupby(["figure", "level"]).is_within.agg(["size", "mean"])
    return pd.concat([by_figure, by_level])


def tested_points(root: Path) -> pd.DataFrame:
    """Return the paper's points whose prediction has an interval: `figure`, `device`, `level`, and
    `is_within`. A point that the profile was made from, or that constants were fitted to, is no
    test of it.
    """
    tables = []
    for figure in PAPERS:
        paper = load_paper(figure)[[*KEYS, "y"]].astype(TYPES)
        for path in csv_files(root, f"*/{figure}/results/{SIMULATED}*/{figure}.csv"):
            device = path.parent.name.removeprefix(SIMULATED)
            if device.startswith("pipeline"):
                continue  # its iterations were measured, on a CPU
            level = PROFILED.removeprefix("-") if device.endswith(PROFILED) else "analytic"
            table = pd.read_csv(path, dtype=TYPES).fillna({"panel": ""})
            both = table.merge(paper, on=KEYS, suffixes=("", "_of_paper"))
            both = both[both.low < both.high]
            both = both.drop(used_points(figure, both, level, device))
            is_within = (both.low <= both.y_of_paper) & (both.y_of_paper <= both.high)
            labels = {"figure": figure, "device": device, "level": level}
            tables.append(pd.DataFrame({"is_within": is_within}).assign(**labels))
    return pd.concat(tables, ignore_index=True)


def used_points(figure: str, points: pd.DataFrame, level: str, device: str) -> pd.Index:
    """Return which points the level's profile was made from or constants were fitted to. Of a
    hardware file that was fitted to some points of a figure, these are all of its points.
    """
    used = points.index[:0]
    for row in CATALOG[figure].errors:
        if row.fitted == device:
            return points.index
        if level in (row.given, row.fitted):
            used = used.union(points.query(row.where).index)
    return used


if __name__ == "__main__":
    sys.exit(main())

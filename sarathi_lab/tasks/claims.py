"""The verdicts as people read them: in the terminal, and as the README's table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.console import console, print_place
from sarathi_lab.config.errors import UserError, exit_code, require_number
from sarathi_lab.config.paths import EXPERIMENTS as RECORDS
from sarathi_lab.config.paths import OUTPUTS, make_folder
from sarathi_lab.experiment.claims import in_words, load_claims, verdicts
from sarathi_lab.experiment.figures import FIGURES
from sarathi_lab.results.load import SIMULATED
from sarathi_lab.results.result import Shown, show

README = RECORDS / "README.md"
BEGIN, END = "<!-- claims: python -m sarathi_lab claims --readme -->", "<!-- end of claims -->"
PROFILED = "-profiled"
STYLES = {"holds": "green", "partly": "yellow", "fails": "red", "not measured": "dim"}


def print_verdicts(table: pd.DataFrame) -> None:
    """One block a device: each claim with what was expected, what was measured, and the verdict."""
    unbroken = ("expected", "measured", "verdict")
    for device, rows in table.groupby("device", sort=False):
        shown = [
            {
                "claim": row["claim"],
                "expected": row["expected"],
                "measured": in_words(row),
                "verdict": f"[{STYLES[row['verdict']]}]{row['verdict']}[/]",
                "note": row["note"],
            }
            for row in rows.to_dict("records")
        ]
        of = " by the cost model's own error" if str(device).startswith(SIMULATED) else ""
        title = f"On {device}, in brackets the 95 % interval{of}"
        left = tuple(shown[0])
        counts = rows.verdict.value_counts().items()
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        show([Shown(shown, left=left, unbroken=unbroken, title=title, markup=True), said])


def readme_table(table: pd.DataFrame) -> str:
    """The verdicts in Markdown: a row per claim, a column per measured device, and one for what is
    simulated.

    Of a simulated GPU the usual, analytic level is shown.
    """
    measured = [
        str(d)
        for d in dict.fromkeys(table.device)
        if d != "none" and not str(d).startswith(SIMULATED)
    ]
    lines = [f"| claim | source | expected | {' | '.join([*measured, 'simulated'])} |"]
    lines.append("|" + " --- |" * (len(measured) + 4))
    for _, rows in table.groupby("id", sort=False):
        first = rows.iloc[0]
        by_device = {str(row["device"]): row for row in rows.to_dict("records")}
        cells = [_cell(by_device.get(device)) for device in measured]
        simulated = sorted(
            d for d in by_device if d.startswith(SIMULATED) and not d.endswith(PROFILED)
        )
        cells.append(
            "; ".join(_cell(by_device[device], device) for device in simulated) or _cell(None)
        )
        lines.append(f"| {first.claim} | {first.source} | {first.expected} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Mapping[Hashable, Any] | None, device: str | None = None) -> str:
    if row is None or row["verdict"] == "not measured":
        return "not measured"
    where = f", {device.removeprefix(SIMULATED)}" if device is not None else ""
    return f"**{row['verdict']}**: {in_words(row)}{where}"


def write_readme(table: pd.DataFrame, path: Path = README) -> None:
    """Put the table between its marks. Raises UserError if the marks are gone."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(
            f"{path} has no place for the claims; put {BEGIN} and {END} on lines of their own"
        )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{readme_table(table)}\n{END}{after}")


OVERHEAD = 4.0  # seconds of an experiment beside its measuring, about: loading, warming up, writing
SIMULATED_SECONDS = {
    "fig12": 100.0,
    "fig09": 30.0,
    "fig11": 20.0,
}  # of two cores, about; the others take less
SIMULATED_USUALLY = 6.0
Job = tuple[str, bool]  # experiment, is simulated


@dataclass(frozen=True)
class Runs:
    """Runs of `names` (measured, simulated or both) that record into `results`, in about `seconds`
    of measuring.
    """

    names: Sequence[str]
    results: Path
    seconds: float | None
    is_measured: bool
    is_simulated: bool
    settings: Sequence[str] = ()  # of the measured runs, such as model=tiny

    def run(self) -> list[str]:
        """Run all; returns what failed. A failing experiment does not stop the others."""
        jobs = [(name, False) for name in self.names if self.is_measured]
        jobs += [(name, True) for name in self.names if self.is_simulated]
        failed, start = [], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sarathi-lab-") as folder:
            for number, job in enumerate(jobs):
                left = sum(self._expected(other) for other in jobs[number:])
                name = f"{job[0]}, {'simulated' if job[1] else 'measured'}"
                gone = time.monotonic() - start
                console().print(
                    f"\n[{number + 1}/{len(jobs)}] {name}; {gone:.0f} s gone, about {left:.0f} "
                    "s left",
                    style="bold",
                )
                if not self._one(job, Path(folder) / str(number)):
                    failed.append(name)
        return failed

    def _one(self, job: Job, folder: Path) -> bool:
        name, is_simulated = job
        arguments = [
            f"experiment={name}",
            "tracking=none",
            f"output={folder}",
            f"hydra.run.dir={folder}/run",
        ]
        arguments += [f"task.record={self.results.absolute()}"]
        run = import_module("sarathi_lab.run").main  # a layer above, as a shell would call it
        if is_simulated:
            return run([*arguments, "executor=simulated"]) == 0
        return run([*arguments, *self.settings, f"task.seconds={self._seconds_of(name):g}"]) == 0

    def _seconds_of(self, name: str) -> float:
        """Its share of the time, by what each experiment needs."""
        own = FIGURES[name].seconds
        if self.seconds is None:
            return own
        return max(0.5, self.seconds * own / sum(FIGURES[other].seconds for other in self.names))

    def _expected(self, job: Job) -> float:
        name, is_simulated = job
        if is_simulated:
            return SIMULATED_SECONDS.get(name, SIMULATED_USUALLY)
        return self._seconds_of(name) + OVERHEAD


FEW_MINUTES = 200.0  # seconds of measuring, for those who just want to see


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 1 if experiments failed, 2 for a mistake of the user's, 130
    for Ctrl-C.
    """
    return exit_code(
        lambda: _main(_parser().parse_args(args)), "experiments that finished are kept"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab claims",
        description="Print for every claim and device whether it holds. Reads what is recorded "
        "unless told to run.",
    )
    parser.add_argument(
        "--run", action="store_true", help="first measure on the device at hand, in a few minutes"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="first compute the same with cost models of GPUs"
    )
    parser.add_argument(
        "--only", action="append", choices=list(FIGURES), metavar="NAME", help="one experiment"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"of measuring in all, with --run (default {FEW_MINUTES:.0f})"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder of results (default: experiments, outputs/claims to run)",
    )
    parser.add_argument(
        "--readme", action="store_true", help="rewrite the README's table from experiments/"
    )
    parser.add_argument(
        "settings", nargs="*", help="settings of what is measured, such as model=120m"
    )
    return parser


def _main(options: argparse.Namespace) -> int:
    does_run = options.run or options.simulate
    results = (options.results or (OUTPUTS / "claims" if does_run else RECORDS)).absolute()
    if options.seconds is not None:
        require_number(
            "--seconds",
            options.seconds,
            above=0,
            fix=f"use the seconds in all, such as {FEW_MINUTES:.0f}",
        )
    _check(options, does_run, results)
    failed = _run(options, results) if does_run else []
    table = verdicts(results)
    print_verdicts(table)
    if does_run:
        print_place("results", results)
    if options.readme:
        write_readme(table)
    for name in failed:
        print(f"failed: {name}")
    return int(bool(failed))


def _check(options: argparse.Namespace, does_run: bool, results: Path) -> None:
    """Refuse what would have no effect."""
    for name, is_given in (
        ("--only", options.only),
        ("--seconds", options.seconds),
        ("settings", options.settings),
    ):
        if is_given and not does_run:
            raise UserError(f"{name} is for runs; add --run (measure) or --simulate, or drop it")
    if (options.seconds or options.settings) and not options.run:
        raise UserError("--seconds and settings are for measuring; add --run, or drop them")
    if options.readme and results != RECORDS:
        raise UserError(
            f"--readme shows what is recorded, not {os.path.relpath(results)}; add --results "
            "experiments"
        )


def _run(options: argparse.Namespace, results: Path) -> list[str]:
    make_folder(results, "--results")
    claimed = {claim.experiment for claim in load_claims()}
    is_record = results == RECORDS
    names = options.only or [name for name in FIGURES if is_record or name in claimed]
    seconds = options.seconds or (None if is_record else FEW_MINUTES)
    return Runs(names, results, seconds, options.run, options.simulate, options.settings).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m sarathi_lab.claims`: which claims hold on which device, by the recorded results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sarathi_lab.claims.claim import load_claims
from sarathi_lab.claims.runs import Runs
from sarathi_lab.claims.show import print_verdicts, write_readme
from sarathi_lab.claims.verdicts import verdicts
from sarathi_lab.errors import UserError, require_number
from sarathi_lab.exits import exit_code
from sarathi_lab.experiment.experiments import EXPERIMENTS
from sarathi_lab.paths import EXPERIMENTS as RECORDS
from sarathi_lab.paths import REPOSITORY, make_folder
from sarathi_lab.report import print_place

FEW_MINUTES = 200.0  # seconds of measuring, for those who just want to see


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 1 if experiments failed, 2 for a mistake of the user's, 130 for Ctrl-C."""
    return exit_code(lambda: _main(_parser().parse_args(args)), "experiments that finished are kept")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab.claims",
        description="Print for every claim and device whether it holds. Reads what is recorded unless told to run.",
    )
    parser.add_argument("--run", action="store_true", help="first measure on the device at hand, in a few minutes")
    parser.add_argument("--simulate", action="store_true", help="first compute the same with cost models of GPUs")
    parser.add_argument("--only", action="append", choices=list(EXPERIMENTS), metavar="NAME", help="one experiment")
    parser.add_argument("--seconds", type=float, help=f"of measuring in all, with --run (default {FEW_MINUTES:.0f})")
    parser.add_argument("--results", type=Path, help="folder of results (default: experiments, outputs/claims to run)")
    parser.add_argument("--readme", action="store_true", help="rewrite the README's table from experiments/")
    parser.add_argument("settings", nargs="*", help="settings of what is measured, such as model=120m")
    return parser


def _main(options: argparse.Namespace) -> int:
    does_run = options.run or options.simulate
    results = (options.results or (REPOSITORY / "outputs" / "claims" if does_run else RECORDS)).absolute()
    if options.seconds is not None:
        require_number("--seconds", options.seconds, above=0, fix=f"use the seconds in all, such as {FEW_MINUTES:.0f}")
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
    for name, is_given in (("--only", options.only), ("--seconds", options.seconds), ("settings", options.settings)):
        if is_given and not does_run:
            raise UserError(f"{name} is for runs; add --run (measure) or --simulate, or drop it")
    if (options.seconds or options.settings) and not options.run:
        raise UserError("--seconds and settings are for measuring; add --run, or drop them")
    if options.readme and results != RECORDS:
        raise UserError(f"--readme shows what is recorded, not {os.path.relpath(results)}; add --results experiments")


def _run(options: argparse.Namespace, results: Path) -> list[str]:
    make_folder(results, "--results")
    claimed = {claim.experiment for claim in load_claims()}
    is_record = results == RECORDS
    names = options.only or [name for name in EXPERIMENTS if is_record or name in claimed]
    seconds = options.seconds or (None if is_record else FEW_MINUTES)
    return Runs(names, results, seconds, options.run, options.simulate, options.settings).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

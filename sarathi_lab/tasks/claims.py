"""Verdicts on claims: in the terminal, in experiments/README.md, and after a run of experiments."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from sarathi_lab.config.console import console, print_place, typed
from sarathi_lab.config.errors import UserError, exit_code, require_number
from sarathi_lab.config.paths import EXPERIMENTS as RECORDS
from sarathi_lab.config.paths import OUTPUTS, make_folder
from sarathi_lab.experiment.claims import (
    NOT_MEASURED,
    VERDICTS,
    in_words,
    kind_of,
    load_claims,
    verdicts,
)
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results.load import SIMULATED
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.tasks.claim_tables import blocks, write_page

COLOURS = ("green", "green", "green", "yellow", "red", "red", "cyan", "dim")
STYLES = dict(zip(VERDICTS, COLOURS, strict=True))
SHOWN = ["claim", "expected", "measured", "verdict", "note"]
SHORT = ["verdict", "measured", "expected", "claim"]
FEW_MINUTES = 200.0  # seconds of measuring, for those who just want to see
COSTS = "costs.csv"  # in the results: what each experiment took, in a separate process
JOB = ["experiment", "how"]  # how: "simulated" or "measured"
Command = Callable[[Sequence[str]], int]  # runs a command line; returns its exit code


def print_verdicts(table: pd.DataFrame, *, is_long: bool = False) -> None:
    """Print a block for each device, a line for each claim with a result on it: verdict, measured
    and expected value; `is_long` adds intervals, notes and claims that were not measured.
    """
    for device, rows in table.groupby("device", sort=False):
        counts = rows.verdict.value_counts().items()
        summary = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        rows = rows if is_long else rows[rows.verdict != NOT_MEASURED]
        values = [in_words(row) for row in rows.to_dict("records")]
        styled = "[" + rows.verdict.map(kind_of).map(STYLES) + "]" + rows.verdict + "[/]"
        values = values if is_long else [value.partition(" (")[0] for value in values]
        names = SHOWN if is_long else SHORT
        rows = rows.assign(measured=values)
        shown = rows.assign(verdict=styled)[names].to_dict("records")
        machines = table.attrs.get("names", {}).get(device)
        title = f"Recorded on {machines}" if machines else f"On {device}"
        if is_long:
            title += ", in brackets the interval and its level"
        if is_long and str(device).startswith(SIMULATED):
            title += " over seeds, else the cost model's error"
        unbroken = SHOWN[1:4] if is_long else SHORT[:-1]  # a claim is wrapped
        show([DisplayTable(shown, SHOWN, unbroken=unbroken, title=title, markup=True), summary])


def main(args: Sequence[str], run: Command) -> int:
    """Return 0, 1 if experiments failed, 2 for a user's mistake, 130 for Ctrl-C."""
    options = _parser().parse_args(args)
    return exit_code(lambda: _main(options, run), "experiments that finished are kept")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("claims"),
        description="Print for every claim and device whether it holds, from what is recorded; "
        "with --run or --simulate after running the experiments.",
    )
    add = parser.add_argument
    text = "first measure on the device at hand, in a few minutes"
    add("--run", action="store_true", help=text)
    text = "first compute the same with cost models of GPUs"
    add("--simulate", action="store_true", help=text)
    names = list(CATALOG)
    text = "one experiment, such as fig08; may be repeated"
    add("--only", action="append", choices=names, metavar="NAME", help=text)
    add("--device", metavar="TEXT", help="devices whose name has this text, such as cpu or h100")
    add("--long", action="store_true", help="also intervals, notes, and claims not measured")
    text = f"of measuring in all, with --run (default {FEW_MINUTES:.0f})"
    add("--seconds", type=float, help=text)
    text = "folder of results (default: experiments, outputs/claims to run)"
    add("--results", type=Path, help=text)
    add("--resume", action="store_true", help="leave out what has finished in --results")
    text = "rewrite the tables of the documents from experiments/"
    add("--readme", action="store_true", help=text)
    add("settings", nargs="*", help="settings of what is measured, such as model=120m")
    return parser


def _main(options: argparse.Namespace, run: Command) -> int:
    does_run = options.run or options.simulate
    results = (options.results or (OUTPUTS / "claims" if does_run else RECORDS)).absolute()
    if options.seconds is not None:
        fix = f"use the seconds in all, such as {FEW_MINUTES:.0f}"
        require_number("--seconds", options.seconds, above=0, fix=fix)
    for name in ("--seconds", "--resume", "settings"):
        needs_run = name in ("--seconds", "settings")
        if getattr(options, name.strip("-")) and not (options.run if needs_run else does_run):
            fix = "--run (measure)" if needs_run else "--run (measure) or --simulate"
            raise UserError(f"{name} is for runs; add {fix}, or drop it")
    if options.readme and results != RECORDS:
        what = f"what is recorded, not {os.path.relpath(results)}"
        raise UserError(f"--readme shows {what}; add --results experiments")
    failed = _run_all(options, results, run) if does_run else []
    table = verdicts(results)
    print_verdicts(_selected(table, options), is_long=options.long)
    if does_run:
        table.to_csv(results / "verdicts.csv", index=False, float_format="%.6g")
        print_place("results", results)
    if options.readme:
        for block in blocks(table):
            write_page(*block)
    for name in failed:
        print(f"failed: {name}")
    return int(bool(failed))


def _judging(names: Sequence[str], table: pd.DataFrame) -> list[str]:
    """Return the experiments that judge what a figure of the paper claims, such as fig09's."""
    numbers = [name.removeprefix("fig").lstrip("0") for name in names if name.startswith("fig")]
    experiments = []
    for number in numbers:
        is_of_figure = table.source.str.contains(rf"Fig {number}(?!\d)")
        experiments += list(table.experiment[is_of_figure].unique())
    return experiments


def _selected(table: pd.DataFrame, options: argparse.Namespace) -> pd.DataFrame:
    """Return the rows of the experiments and devices that were asked for. Raises UserError."""
    chosen = table[table.experiment.isin(options.only)] if options.only else table
    if chosen.empty and not (options.run or options.simulate):
        named = " ".join(options.only)
        with_claims = _judging(options.only, table) or list(table.experiment.unique())
        raise UserError(f"--only {named} has no claim; use one of {', '.join(with_claims)}")
    if options.device:
        chosen = chosen[chosen.device.str.contains(options.device, regex=False)]
        if chosen.empty:
            known = ", ".join(table.device.unique())
            raise UserError(f"--device {options.device} is in no device's name; use one of {known}")
    return chosen


def _has_engine(name: str) -> bool:
    """Return whether the engine that an experiment is measured on is installed; print if not."""
    if "executor=vllm" not in CATALOG[name].measured or find_spec("vllm") is not None:
        return True
    console().print(f"{name} is left out: it is measured with executor=vllm, which is not here")
    return False


def _run_all(options: argparse.Namespace, results: Path, run: Command) -> list[str]:
    """Run and record experiments; return those that failed, which do not stop the others."""
    make_folder(results, "--results")
    needed = {claim.experiment: list(claim.settings) for claim in load_claims()}
    is_record, costs = results == RECORDS, results / COSTS
    names = options.only or [name for name in CATALOG if is_record or name in needed]
    seconds = {n: CATALOG[n].seconds for n in names if not CATALOG[n].is_simulated}
    if not seconds and options.run:
        raise UserError(f"{', '.join(names)}: simulated only; use --simulate in place of --run")
    if seconds and (total := options.seconds or (None if is_record else FEW_MINUTES)):
        share = total / sum(seconds.values())  # by what each experiment needs
        seconds = {name: max(0.5, share * each) for name, each in seconds.items()}
    jobs = [(name, "measured") for name in seconds if options.run and _has_engine(name)]
    if options.simulate:
        jobs += [(name, "simulated") for name in names]
    if options.resume and costs.is_file():
        done = set(pd.read_csv(costs)[JOB].itertuples(index=False, name=None))
        jobs = [job for job in jobs if job not in done]
    failed = []
    with tempfile.TemporaryDirectory(prefix="sarathi-lab-") as folder:
        for number, (name, how) in enumerate(jobs, 1):
            console().print(f"\n[{number}/{len(jobs)}] {name}, {how}", style="bold")
            settings = ["executor=simulated", *CATALOG[name].simulated]
            if how == "measured":
                settings = [*CATALOG[name].measured, *options.settings]
                settings.append(f"task.seconds={seconds[name]:g}")
            fixed = [f"experiment={name}", "tracking=none", f"task.record={results}"]
            fixed += [] if is_record else needed.get(name, [])
            place, start = f"{folder}/{name}-{how}", time.monotonic()
            if run([*fixed, f"output={place}", f"hydra.run.dir={place}/run", *settings]):
                failed.append(f"{name}, {how}")
            elif not is_record:
                took = pd.DataFrame([[name, how, round(time.monotonic() - start, 1)]])
                header = [*JOB, "seconds"] if not costs.exists() else False
                took.to_csv(costs, mode="a", header=header, index=False)
    return failed

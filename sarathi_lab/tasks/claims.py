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

from sarathi_lab.config.console import console, print_place, progress_of, typed
from sarathi_lab.config.errors import UserError, exit_code, require_number, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS as RECORDS
from sarathi_lab.config.paths import OUTPUTS, make_folder
from sarathi_lab.experiment.claims import (
    FAILS,
    NOT_MEASURED,
    VERDICTS,
    Claim,
    Verdicts,
    in_words,
    load_claims,
    verdicts,
)
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.tasks.claim_tables import blocks, ids_by_verdict, write_page

BY_CLAIM = ["device", "measured", "verdict"]
VERDICTS_PAGE = "docs/explanation/intervals.md"
FEW_MINUTES = 200.0  # seconds of measuring, for those who just want to see
COSTS = "costs.csv"  # in the results: what each experiment took, in a separate process
JOB = ["experiment", "how"]  # how: `SIMULATED` or `MEASURED`
Job = tuple[str, str]
SIMULATED = "simulated"
MEASURED = "measured"
EXAMPLE = "fig10"  # an experiment with claims
Command = Callable[[Sequence[str]], int]  # runs a command line; returns its exit code


def print_summary(table: Verdicts) -> None:
    """Print how many claims have which verdict, by where they were judged, and which fail."""
    by_evidence = ids_by_verdict(table)
    counts = []
    for verdict in VERDICTS:
        row: dict[str, object] = {"verdict": verdict}
        for evidence, ids in by_evidence.items():
            row[evidence] = len(ids[verdict])
        counts.append(row)
    num_claims = table["id"].nunique()
    by_verdict = DisplayTable(
        counts,
        title=f"{num_claims} claims by verdict and by where they were judged",
        left=["verdict"],
        unbroken=["verdict"],
    )
    show([by_verdict])
    _print_failing(table)
    command = typed("claims")
    show(
        [
            "a claim may have several verdicts, as kernels and cards differ",
            f"one claim or experiment: {command} NAME, such as {command} {EXAMPLE}",
            f"all verdicts: {command} --long; what they mean: {VERDICTS_PAGE}",
        ]
    )


def _print_failing(table: Verdicts) -> None:
    """Print the claims that fail anywhere, and on which devices."""
    fails = table[table["verdict"] == FAILS]
    failing = []
    for (name, claim), rows in fails.groupby(["id", "claim"]):
        devices = ", ".join(rows["device"])
        failing.append({"name": name, "claim": claim, "fails on": devices})
    if not failing:
        return
    table_of_failing = DisplayTable(
        failing,
        title="Claims that fail",
        left=list(failing[0]),
        unbroken=["name"],
    )
    show([table_of_failing])


def print_verdicts(table: Verdicts, *, is_long: bool) -> None:
    """Print a block for each claim, a line for each device; `is_long` adds notes, and devices on
    which it was not measured.
    """
    shown = table
    columns = [*BY_CLAIM, "note"]
    if not is_long:
        shown = table[table["verdict"] != NOT_MEASURED]
        columns = BY_CLAIM
    if shown.empty:
        show(["not measured on any device"])
    for _, rows in shown.groupby("id", sort=False):
        first = rows.iloc[0]
        origin = f"{first['expected']}; {first['source']}"
        title = f"{first['id']}: {first['claim']} ({origin})"
        lines = []
        for row in rows.to_dict("records"):
            line = {**row, "measured": in_words(row)}
            lines.append({name: line[name] for name in columns})
        table_of_claim = DisplayTable(lines, columns, unbroken=BY_CLAIM, title=title)
        show([table_of_claim])
    show([f"what a verdict means: {VERDICTS_PAGE}"])


def main(args: Sequence[str], run: Command) -> int:
    """Return 0, 1 if experiments failed, 2 for a user's mistake, 130 for Ctrl-C."""
    options = _options(args)
    return exit_code(lambda: _main(options, run), "experiments that finished are kept")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("claims"),
        description="Count recorded claims by verdict and name those that fail; with "
        "names print the verdict on each device. --run and --simulate run the experiments first.",
    )
    add = parser.add_argument
    text = "first measure on the device at hand, in a few minutes"
    add("--run", action="store_true", help=text)
    text = "first compute the same with cost models of GPUs"
    add("--simulate", action="store_true", help=text)
    text = "the same as NAME; may be repeated"
    add("--only", action="append", default=[], metavar="NAME", help=text)
    add("--long", action="store_true", help="all verdicts with notes, and what was not measured")
    text = f"of measuring in all, with --run (default {FEW_MINUTES:.0f})"
    add("--seconds", type=float, help=text)
    text = "folder of results (default: experiments, outputs/claims to run)"
    add("--results", type=Path, help=text)
    add("--resume", action="store_true", help="leave out what has finished in --results")
    text = "rewrite the tables of the documents from experiments/"
    add("--readme", action="store_true", help=text)
    text = "a claim or an experiment; with --run also settings of what is measured (model=120m)"
    add("names", nargs="*", metavar="NAME", help=text)
    return parser


def _options(args: Sequence[str]) -> argparse.Namespace:
    """Read the arguments: those with a value are settings, the others name what is shown."""
    options = _parser().parse_args(args)
    arguments: list[str] = options.names
    options.settings = []
    options.names = []
    for argument in arguments:
        if "=" in argument:
            options.settings.append(argument)
        else:
            options.names.append(argument)
    options.names += options.only
    return options


def _main(options: argparse.Namespace, run: Command) -> int:
    is_running = options.run or options.simulate
    default = OUTPUTS / "claims" if is_running else RECORDS
    results = (options.results or default).absolute()
    claims = load_claims()
    _check(options, results, claims)
    failed = []
    if is_running:
        failed = _run_all(options, results, run)
    elif not load.recorded(results):
        raise UserError(
            f"--results {options.results} has no recorded results; leave --results out, or add "
            "--simulate or --run to fill it"
        )
    judged: Sequence[Claim] = claims
    if not (is_running or options.readme):
        judged = _asked_for(claims, options.names)
    with progress_of("judging", len(judged), "claims") as advance:
        table = verdicts(results, judged, advance)
    is_of_lab = results == RECORDS
    if options.names or options.long or not is_of_lab:
        # A run judges all claims, and shows those that were named.
        shown = _asked_for(claims, options.names)
        is_shown = table["id"].isin([claim.id for claim in shown])
        print_verdicts(table[is_shown], is_long=options.long)
    else:
        print_summary(table)
    if is_running:
        table.to_csv(results / "verdicts.csv", index=False, float_format="%.6g")
        print_place("results", results)
    if options.readme:
        for block in blocks(table):
            write_page(*block)
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


def _check(options: argparse.Namespace, results: Path, claims: Sequence[Claim]) -> None:
    """Raise UserError for unknown names, and for what has no effect on a command that only prints,
    or simulates.
    """
    if options.seconds is not None:
        advice = f"use the seconds in all, such as {FEW_MINUTES:.0f}"
        require_number("--seconds", options.seconds, above=0, fix=advice)
    is_running = options.run or options.simulate
    without_effect = []
    if options.seconds and not options.run:
        without_effect.append("--seconds")
    if not options.run:
        without_effect += options.settings
    if options.resume and not is_running:
        without_effect.append("--resume")
    if without_effect:
        stated = " ".join(without_effect)
        raise UserError(f"{stated} is for runs; add --run (measure), or drop it")
    # Any experiment can be run; what is only printed needs a claim.
    experiments = list(CATALOG)
    if not is_running:
        experiments = [claim.experiment for claim in claims]
    names_of_claims = [claim.id for claim in claims]
    valid = dict.fromkeys(names_of_claims + experiments)
    for name in options.names:
        require_one_of("NAME", name, valid)
    # The documents have what is recorded, whatever was run elsewhere.
    if options.readme and results != RECORDS:
        folder = os.path.relpath(results)
        raise UserError(f"--readme shows what is recorded, not {folder}; add --results experiments")


def _asked_for(
    claims: Sequence[Claim],
    names: Sequence[str],
) -> Sequence[Claim]:
    """Return the claims that are named, by themselves or by their experiment; all without names."""
    if not names:
        return claims
    chosen = []
    for claim in claims:
        if claim.id in names or claim.experiment in names:
            chosen.append(claim)
    return chosen


def _run_all(options: argparse.Namespace, results: Path, run: Command) -> list[str]:
    """Run and record experiments; return those that failed, which do not stop the others."""
    make_folder(results, "--results")
    is_record = results == RECORDS
    # Settings that make an experiment as small as its claims allow: a record has its full size.
    settings = {claim.experiment: list(claim.settings) for claim in load_claims()}
    names = _experiments(options.names)
    if not names:
        names = [name for name in CATALOG if is_record or name in settings]
    seconds = _seconds(options, names, is_record=is_record)
    costs = results / COSTS
    jobs = _jobs(options, names, costs)
    failed = []
    with tempfile.TemporaryDirectory(prefix="sarathi-lab-") as folder:
        for number, (name, how) in enumerate(jobs, 1):
            progress = f"{number}/{len(jobs)}"
            console().print(f"\n[{progress}] {name}, {how}", style="bold")
            output = f"{folder}/{name}-{how}"  # which goes: `record` keeps what counts
            line = [
                f"experiment={name}",
                "tracking=none",
                f"task.record={results}",
            ]
            if not is_record:
                line += settings.get(name, [])
            line += [f"output={output}", f"hydra.run.dir={output}/run"]
            line += CATALOG[name].settings_of(how)
            if how == MEASURED:
                # After the experiment's: of equal settings Hydra takes the last.
                line += options.settings
                line.append(f"task.seconds={seconds[name]:g}")
            start = time.monotonic()
            exit_status = run(line)
            if exit_status:
                failed.append(f"{name}, {how}")
            elif not is_record:  # a repository keeps no times of machines
                took = time.monotonic() - start
                _add_cost(costs, name, how, took)
    return failed


def _experiments(names: Sequence[str]) -> list[str]:
    """Return the experiments of these names, and those that named claims are read from."""
    experiment_of = {claim.id: claim.experiment for claim in load_claims()}
    experiments = [experiment_of.get(name, name) for name in names]
    return list(dict.fromkeys(experiments))


def _seconds(
    options: argparse.Namespace, names: Sequence[str], *, is_record: bool
) -> dict[str, float]:
    """Return the seconds to measure each experiment for, by what it needs."""
    seconds = {}
    for name in names:
        experiment = CATALOG[name]
        if not experiment.is_simulated:
            seconds[name] = experiment.seconds
    in_all = options.seconds
    if in_all is None and not is_record:
        in_all = FEW_MINUTES
    if not seconds or in_all is None:
        return seconds
    share = in_all / sum(seconds.values())

    return {name: max(0.5, share * needed) for name, needed in seconds.items()}


def _jobs(
    options: argparse.Namespace,
    names: Sequence[str],
    costs: Path,
) -> list[Job]:
    """List what is run: the experiment, and how. Raises UserError if nothing can be."""
    jobs = []
    if options.run:
        for name in names:
            if _is_measurable(name):
                jobs.append((name, MEASURED))
    if options.simulate:
        for name in names:
            jobs.append((name, SIMULATED))
    if not jobs:
        listed = ", ".join(names)
        raise UserError(f"{listed} can't be measured here; use --simulate")
    # What has finished has a cost; records have none, and begin anew.
    if options.resume and costs.is_file():
        table = pd.read_csv(costs)
        finished = set(table[JOB].itertuples(index=False, name=None))
        jobs = [job for job in jobs if job not in finished]
    return jobs


def _is_measurable(name: str) -> bool:
    """Return whether an experiment is ever measured, and its engine is installed; print if not."""
    experiment = CATALOG[name]
    if experiment.is_simulated:
        return False
    if "executor=vllm" not in experiment.measured or find_spec("vllm") is not None:
        return True
    console().print(f"{name} is left out: it is measured with executor=vllm, which is not here")
    return False


def _add_cost(costs: Path, name: str, how: str, seconds: float) -> None:
    """Add what an experiment took to the table of costs."""
    cost = {"experiment": name, "how": how, "seconds": round(seconds, 1)}
    row = pd.DataFrame([cost])
    is_first = not costs.exists()
    row.to_csv(costs, mode="a", header=is_first, index=False)

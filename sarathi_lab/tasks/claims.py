"""The verdicts as people read them: in the terminal, and as the README's table."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.console import console, print_place
from sarathi_lab.config.errors import UserError, exit_code, require_number
from sarathi_lab.config.paths import EXPERIMENTS as RECORDS
from sarathi_lab.config.paths import OUTPUTS, make_folder
from sarathi_lab.experiment.claims import in_words, load_claims, verdicts
from sarathi_lab.experiment.figures import FIGURES
from sarathi_lab.results import load
from sarathi_lab.results.load import SIMULATED
from sarathi_lab.results.result import DisplayTable, show

README = RECORDS / "README.md"
BEGIN, END = "<!-- claims: python -m sarathi_lab claims --readme -->", "<!-- end of claims -->"
BEGIN_MAP, END_MAP = BEGIN.replace("claims:", "map:"), "<!-- end of map -->"
AFTER = "after_sarathi"  # the folder of experiments on what came after SARATHI
PROFILED = "-profiled"
STYLES = {"holds": "green", "partly": "yellow", "fails": "red"}
STYLES |= {"undecided": "cyan", "not measured": "dim"}
FEW_MINUTES = 200.0  # seconds of measuring, for those who just want to see
OVERHEAD = 4.0  # seconds of an experiment beside its measuring, about: loading, warming up, writing
SIMULATED_USUALLY = 6.0  # seconds, where nothing is recorded
COSTS = RECORDS / "costs.csv"  # what each experiment took, in a process of its own
JOB = ["experiment", "how"]  # how: "simulated" or "measured"
Command = Callable[[Sequence[str]], int]  # runs a command line; returns its exit code
Job = tuple[str, str]


def print_verdicts(table: pd.DataFrame) -> None:
    """One block a device: each claim with what was expected, what was measured, and the verdict."""
    columns = ["claim", "expected", "measured", "verdict", "note"]
    for device, rows in table.groupby("device", sort=False):
        told = rows.assign(
            measured=[in_words(row) for row in rows.to_dict("records")],
            verdict="[" + rows.verdict.map(STYLES) + "]" + rows.verdict + "[/]",
        )[columns].to_dict("records")
        machines = table.attrs.get("names", {}).get(device)
        where = f"Recorded on {machines}" if machines else f"On {device}"
        title = f"{where}, in brackets the interval and its level"
        if str(device).startswith(SIMULATED):
            title += " over seeds, else the cost model's own error"
        counts = rows.verdict.value_counts().items()
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        show([DisplayTable(told, columns, unbroken=columns[1:4], title=title, markup=True), said])


def readme_table(table: pd.DataFrame) -> str:
    """The verdicts in Markdown: a row per claim, a column per device, one for the simulated."""
    devices = measured_devices(table)
    lines = [f"| claim | source | expected | {' | '.join([*devices, 'simulated'])} |"]
    lines.append("|" + " --- |" * (len(devices) + 4))
    for _, rows in table[~_is_after(table)].groupby("id", sort=False):
        first, cells = rows.iloc[0], recorded_cells(rows, devices)
        lines.append(f"| {first.claim} | {first.source} | {first.expected} | {' | '.join(cells)} |")
    return "\n".join(lines)


def map_table(table: pd.DataFrame, root: str = "") -> str:
    """What came after SARATHI in Markdown: each claim, its source, the gain claimed, what was found
    on which device, and under which conditions; `root` leads to `experiments/`.
    """
    lines = ["| experiment | claim | source | claimed | found | conditions |", "|" + " --- |" * 6]
    conditions = {claim.id: claim.caveat for claim in load_claims()}
    for name, rows in table[_is_after(table)].groupby("id", sort=False):
        first, known = rows.iloc[0], rows[rows.verdict != "not measured"]
        devices = measured_devices(known)
        *cells, simulated = recorded_cells(known, devices)
        found = [f"{device} {cell}" for device, cell in zip(devices, cells, strict=True)]
        where = f"[{first.experiment}]({root}{AFTER}/{first.experiment}/README.md)"
        told = (first.claim, first.source, first.expected, "; ".join([*found, simulated]))
        lines.append(f"| {where} | {' | '.join(told)} | {conditions[str(name)]} |")
    return "\n".join(lines)


def _is_after(table: pd.DataFrame) -> pd.Series:
    return table.experiment.map(load.group_of) == AFTER


def measured_devices(table: pd.DataFrame) -> list[str]:
    """Those that are no simulations."""
    devices = dict.fromkeys(map(str, table.device))
    return [one for one in devices if one != "none" and not one.startswith(SIMULATED)]


def recorded_cells(rows: pd.DataFrame, devices: Sequence[str]) -> list[str]:
    """The verdicts on one claim in Markdown: on each of `devices`, and on all simulated ones."""
    found = {str(row["device"]): row for row in rows.to_dict("records")}
    return [*(_cell(found.get(device)) for device in devices), _simulated(found) or _cell(None)]


def _cell(row: Mapping[Hashable, Any] | None) -> str:
    if row is None or row["verdict"] == "not measured":
        return "not measured"
    return f"**{row['verdict']}**: {in_words(row)}"


def _simulated(found: Mapping[str, Mapping[Hashable, Any]]) -> str:
    """The simulated devices by verdict, each with its value, once where it has two levels."""
    told: dict[str, list[str]] = {}
    for device in sorted(found):
        base = device.removesuffix(PROFILED)
        if device.startswith(SIMULATED) and (device == base or base not in found):
            words = f"{base.removeprefix(SIMULATED)} {in_words(found[device])}"
            told.setdefault(found[device]["verdict"], []).append(words)
    return "; ".join(f"**{verdict}**: {', '.join(words)}" for verdict, words in told.items())


def write_readme(table: pd.DataFrame, path: Path = README) -> None:
    """Put the tables between their marks. Raises UserError if the marks are gone."""
    write_block(path, BEGIN, END, readme_table(table))
    write_block(path, BEGIN_MAP, END_MAP, map_table(table))


def write_block(path: Path, begin: str, end: str, block: str) -> None:
    """Replace what is between two marks in a file. Raises UserError if one is gone."""
    text = path.read_text()
    if begin not in text or end not in text:
        raise UserError(
            f"{path} has no place for the claims; put {begin} and {end} on lines of their own"
        )
    before, _, rest = text.partition(begin)
    path.write_text(f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}")


def main(args: Sequence[str], run: Command) -> int:
    """Returns 0, 1 if experiments failed, 2 for a mistake of the user's, 130 for Ctrl-C."""
    options = _parser().parse_args(args)
    return exit_code(lambda: _main(options, run), "experiments that finished are kept")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab claims",
        description="Print for every claim and device whether it holds. Reads what is recorded "
        "unless told to run.",
    )
    add = parser.add_argument
    text = "first measure on the device at hand, in a few minutes"
    add("--run", action="store_true", help=text)
    text = "first compute the same with cost models of GPUs"
    add("--simulate", action="store_true", help=text)
    names = list(FIGURES)
    add("--only", action="append", choices=names, metavar="NAME", help="one experiment")
    text = f"of measuring in all, with --run (default {FEW_MINUTES:.0f})"
    add("--seconds", type=float, help=text)
    text = "folder of results (default: experiments, outputs/claims to run)"
    add("--results", type=Path, help=text)
    add("--resume", action="store_true", help="leave out what has finished in --results")
    text = "rewrite the README's table from experiments/"
    add("--readme", action="store_true", help=text)
    add("settings", nargs="*", help="settings of what is measured, such as model=120m")
    return parser


def _main(options: argparse.Namespace, run: Command) -> int:
    does_run = options.run or options.simulate
    results = (options.results or (OUTPUTS / "claims" if does_run else RECORDS)).absolute()
    if options.seconds is not None:
        fix = f"use the seconds in all, such as {FEW_MINUTES:.0f}"
        require_number("--seconds", options.seconds, above=0, fix=fix)
    for name in ("--only", "--seconds", "--resume", "settings"):
        if getattr(options, name.strip("-")) and not does_run:
            raise UserError(f"{name} is for runs; add --run (measure) or --simulate, or drop it")
    if (options.seconds or options.settings) and not options.run:
        raise UserError("--seconds and settings are for measuring; add --run, or drop them")
    if options.readme and results != RECORDS:
        raise UserError(
            f"--readme shows what is recorded, not {os.path.relpath(results)}; add --results "
            "experiments"
        )
    failed = _run_all(options, results, run) if does_run else []
    table = verdicts(results)
    print_verdicts(table)
    if does_run:
        table.to_csv(results / "verdicts.csv", index=False, float_format="%.6g")
        print_place("results", results)
    if options.readme:
        write_readme(table)
    for name in failed:
        print(f"failed: {name}")
    return int(bool(failed))


def _run_all(options: argparse.Namespace, results: Path, run: Command) -> list[str]:
    """Run and record experiments; returns those that failed, which do not stop the others."""
    make_folder(results, "--results")
    needed = {claim.experiment: list(claim.settings) for claim in load_claims()}
    is_record = results == RECORDS
    names = options.only or [name for name in FIGURES if is_record or name in needed]
    measured = [name for name in names if not FIGURES[name].is_simulated]
    seconds = {name: FIGURES[name].seconds for name in measured}
    if not seconds and options.run:
        raise UserError(f"{', '.join(names)}: simulated only; use --simulate in place of --run")
    if seconds and (total := options.seconds or (None if is_record else FEW_MINUTES)):
        share = total / sum(seconds.values())  # by what each experiment needs
        seconds = {name: max(0.5, share * own) for name, own in seconds.items()}
    costs = load_costs().seconds
    jobs: dict[Job, float] = {}  # with about their seconds
    if options.run:
        jobs |= {(name, "measured"): own + OVERHEAD for name, own in seconds.items()}
    if options.simulate:
        jobs |= {
            (one, "simulated"): costs.get((one, "simulated"), SIMULATED_USUALLY)
            for one in names
            if not FIGURES[one].is_measured_only
        }
    done = load_costs(results / COSTS.name).index if options.resume else ()
    jobs = {job: about for job, about in jobs.items() if job not in done}
    with tempfile.TemporaryDirectory(prefix="sarathi-lab-") as folder:

        def run_one(job: Job) -> int:
            name, how = job
            aside = f"{folder}/{name}-{how}"
            own = ["executor=simulated", *FIGURES[name].simulated]
            if how == "measured":
                own = list(options.settings)
                own += [] if FIGURES[name].is_measured_only else [f"task.seconds={seconds[name]:g}"]
            fixed = [f"experiment={name}", "tracking=none", f"task.record={results}"]
            fixed += [] if is_record else needed.get(name, [])
            start = time.monotonic()
            code = run([*fixed, f"output={aside}", f"hydra.run.dir={aside}/run", *own])
            if code == 0 and not is_record:
                _add_cost(results / COSTS.name, job, time.monotonic() - start)
            return code

        return take_turns(jobs, run_one)


def take_turns(jobs: Mapping[Job, float], run: Callable[[Job], int]) -> list[str]:
    """Run each of `jobs`, with about the seconds that it takes, and say how far this is; returns
    those that failed, which do not stop the others.
    """
    failed, start, left = [], time.monotonic(), sum(jobs.values())
    for number, (job, seconds) in enumerate(jobs.items(), 1):
        name = ", ".join(job)
        times = f"{time.monotonic() - start:.0f} s gone, about {left:.0f} s left"
        console().print(f"\n[{number}/{len(jobs)}] {name}; {times}", style="bold")
        left -= seconds
        if run(job):
            failed.append(name)
    return failed


def _add_cost(path: Path, job: Job, seconds: float) -> None:
    row = pd.DataFrame([[*job, round(seconds, 1)]], columns=[*JOB, "seconds"])
    row.to_csv(path, mode="a", header=not path.exists(), index=False)


def load_costs(path: Path = COSTS) -> pd.DataFrame:
    """What experiments took, by `JOB`: `device`, `seconds` of the whole command, and the bytes of
    `memory` of its largest process; empty where there is no such file.
    """
    if path.is_file():
        return pd.read_csv(path).set_index(JOB)
    return pd.DataFrame(columns=[*JOB, "device", "seconds", "memory"]).set_index(JOB)

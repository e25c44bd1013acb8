"""Verdicts on claims: in the terminal, in experiments/README.md, and after a run of experiments."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from sarathi_lab.config.console import console, print_place, progress_of, typed
from sarathi_lab.config.errors import UserError, exit_code, nearest_name, require_number, suggestion
from sarathi_lab.config.paths import EXPERIMENTS as RECORDS
from sarathi_lab.config.paths import OUTPUTS, make_folder
from sarathi_lab.experiment.claims import (
    FAILS,
    NOT_MEASURED,
    VERDICTS,
    Claim,
    figure_pattern,
    in_words,
    load_claims,
    verdicts,
)
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load
from sarathi_lab.results.load import SIMULATED
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.results.table import Row
from sarathi_lab.tasks.claim_tables import blocks, ids_by_verdict, write_page

SHOWN = ["claim", "expected", "measured", "verdict", "note"]
SHORT = ["verdict", "measured", "expected", "claim"]
BY_CLAIM = ["device", "measured", "verdict"]
VERDICTS_PAGE = "docs/explanation/intervals.md"
FEW_MINUTES = 200.0  # seconds of measuring, for those who just want to see
COSTS = "costs.csv"  # in the results: what each experiment took, in a separate process
JOB = ["experiment", "how"]  # how: "simulated" or `MEASURED`
MEASURED = "measured"
EXAMPLE = "fig10"  # an experiment with claims
Command = Callable[[Sequence[str]], int]  # runs a command line; returns its exit code


def print_summary(table: pd.DataFrame) -> None:
    """Print how many claims have which verdict, by where they were judged, and which fail."""
    by_evidence = ids_by_verdict(table)
    counts = []
    for verdict in VERDICTS:
        counted: dict[str, object] = {"verdict": verdict}
        for evidence, ids in by_evidence.items():
            counted[evidence] = len(ids[verdict])
        counts.append(counted)
    title = f"{table['id'].nunique()} claims by verdict and by where they were judged"
    shown = [DisplayTable(counts, title=title, left=["verdict"], unbroken=["verdict"])]
    failing = []
    sentences = dict(zip(table["id"], table["claim"], strict=True))
    for name, places in _failing(by_evidence).items():
        failing.append({"name": name, "what is claimed": sentences[name], "fails on": places})
    if failing:
        texts = ["name", "what is claimed", "fails on"]
        shown.append(DisplayTable(failing, title="Claims that fail", left=texts, unbroken=["name"]))
    show([*shown, "a claim may have several verdicts, as kernels and cards differ"])
    command = typed("claims")
    show(
        [
            f"one claim or experiment: {command} NAME, such as {command} {EXAMPLE}",
            f"all verdicts: {command} -v; what they mean: {VERDICTS_PAGE}",
        ]
    )


def _failing(by_evidence: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, str]:
    """Return the claims that fail somewhere, and where."""
    failing: dict[str, list[str]] = {}
    for evidence, ids in by_evidence.items():
        for claim in ids[FAILS]:
            failing.setdefault(claim, []).append(evidence)
    return {claim: "; ".join(fails_on) for claim, fails_on in failing.items()}


def print_verdicts(table: pd.DataFrame, *, is_long: bool = False) -> None:
    """Print the verdicts that `table` has, in blocks of devices, or of claims where they are fewer.

    `is_long` adds intervals, notes and claims that were not measured.
    """
    if is_long:
        _print_by_device(table, is_long=True)
        return
    measured = table[table["verdict"] != NOT_MEASURED]
    if measured.empty:
        show(["not measured on any device"])
    elif measured["claim"].nunique() < measured["device"].nunique():
        _print_by_claim(measured)
    else:
        _print_by_device(measured, is_long=False)
    show([f"what a verdict means: {VERDICTS_PAGE}"])


def _print_by_device(table: pd.DataFrame, *, is_long: bool) -> None:
    """Print a block for each device, a line for each claim: verdict, measured and expected."""
    machines = table.attrs.get("names", {})
    columns = SHOWN if is_long else SHORT
    unbroken = [name for name in columns if name not in ("claim", "note")]  # these are wrapped
    for device, rows in table.groupby("device", sort=False):
        lines = [_line(row, columns, has_interval=is_long) for row in rows.to_dict("records")]
        title = _title(str(device), machines.get(device), is_long=is_long)
        counts = []
        for verdict, count in rows.verdict.value_counts().items():
            counts.append(f"{count} {verdict}")
        summary = ", ".join(counts)
        verdicts_on = DisplayTable(lines, SHOWN, unbroken=unbroken, title=title)
        show([verdicts_on, summary])


def _print_by_claim(table: pd.DataFrame) -> None:
    """Print a block for each claim, a line for each device."""
    for claim, rows in table.groupby("claim", sort=False):
        first = rows.to_dict("records")[0]
        title = f"{first['id']}: {claim} ({first['expected']}; {first['source']})"
        lines = [_line(row, BY_CLAIM, has_interval=True) for row in rows.to_dict("records")]
        show([DisplayTable(lines, BY_CLAIM, unbroken=BY_CLAIM, title=title)])


def _line(row: Row, columns: Sequence[str], *, has_interval: bool) -> dict[str, object]:
    """Return what is shown of a claim on a device."""
    value = in_words(row)
    if not has_interval:
        value, _, _ = value.partition(" (")
    # A claim is asked for by its name, which a column of its own would leave no width for.
    claim = f"{row['id']}: {row['claim']}"
    shown = {**row, "claim": claim, "measured": value}
    return {name: shown[name] for name in columns}


def _title(device: str, machines: str | None, *, is_long: bool) -> str:
    title = f"On {device}"
    if machines:
        title = f"Recorded on {machines}"
    if not is_long:
        return title
    title += ", in brackets the interval and its level"
    if device.startswith(SIMULATED):
        title += " over seeds, else of the cost model's errors"
    return title


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
    names = list(CATALOG)
    text = "one experiment by its name; may be repeated"
    add("--only", action="append", choices=names, metavar="NAME", help=text)
    add("--device", metavar="TEXT", help="devices whose name has this text, such as cpu or h100")
    add("-v", "--verbose", action="store_true", help="the verdicts on all claims and devices")
    add("--long", action="store_true", help="also intervals, notes, and claims not measured")
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
    options.names = []
    options.settings = []
    for argument in arguments:
        if "=" in argument:
            options.settings.append(argument)
        else:
            options.names.append(argument)
    # What is no experiment is a claim, or a mistake (`_check_claims`).
    experiments = [name for name in options.names if name in CATALOG]
    if experiments:
        options.only = [*(options.only or []), *experiments]
    options.claims = [name for name in options.names if name not in CATALOG]
    return options


def _main(options: argparse.Namespace, run: Command) -> int:
    is_running = options.run or options.simulate
    default = OUTPUTS / "claims" if is_running else RECORDS
    results = (options.results or default).absolute()
    _check(options, results)
    failed = _run_all(options, results, run) if is_running else []
    if not is_running and not load.recorded(results):
        raise UserError(
            f"--results {options.results} has no recorded results; leave --results out, or add "
            "--simulate or --run to fill it"
        )
    if not is_running:
        _require_claims(options)
    claims: Sequence[Claim] = load_claims()
    if not (is_running or options.readme):
        claims = _asked_for(claims, options)
    with progress_of("judging", len(claims), "claims") as advance:
        table = verdicts(results, claims, advance)
    is_narrowed = options.only or options.claims or options.device
    if is_narrowed or is_running or options.verbose or options.long:
        print_verdicts(_selected(table, options), is_long=options.long)
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


def _check(options: argparse.Namespace, results: Path) -> None:
    """Raise UserError for what has no effect on a command that only prints, or simulates."""
    if options.seconds is not None:
        advice = f"use the seconds in all, such as {FEW_MINUTES:.0f}"
        require_number("--seconds", options.seconds, above=0, fix=advice)
    is_measuring = options.run
    if options.seconds and not is_measuring:
        raise UserError("--seconds is for runs; add --run (measure), or drop it")
    is_running = options.run or options.simulate
    if options.resume and not is_running:
        raise UserError("--resume is for runs; add --run (measure) or --simulate, or drop it")
    if options.settings and not is_measuring:
        settings = " ".join(options.settings)
        raise UserError(f"{settings} is for runs; add --run (measure), or drop it")
    _check_claims(options.claims, is_running=is_running)
    # The documents have what is recorded, whatever was run elsewhere.
    if options.readme and results != RECORDS:
        folder = os.path.relpath(results)
        raise UserError(f"--readme shows what is recorded, not {folder}; add --results experiments")


def _check_claims(names: Sequence[str], *, is_running: bool) -> None:
    """Raise UserError for what names no claim, and for a claim where experiments are run."""
    claims = load_claims()
    ids = [claim.id for claim in claims]
    # What is only printed needs a claim; any experiment can be run.
    experiments = list(CATALOG) if is_running else [claim.experiment for claim in claims]
    valid = [*ids, *experiments]
    for name in names:
        if name not in ids:
            similar = suggestion(name, valid)
            nearest = nearest_name(name, [*ids, *CATALOG])
            if nearest is not None and nearest not in valid:
                similar = f" (did you mean {nearest}, which has no claim?)"
            raise UserError(
                f"{name} is no claim or experiment{similar}; use one of {', '.join(ids)}"
            )
        if is_running:
            raise UserError(f"{name} is a claim, and experiments are run; use --only EXPERIMENT")


def _judging(name: str, claims: Sequence[Claim]) -> list[str]:
    """Return the experiments that judge what a figure of the paper claims, such as fig09's."""
    pattern = figure_pattern(name)
    if pattern is None:
        return []
    experiments = [claim.experiment for claim in claims if re.search(pattern, claim.source)]
    return list(dict.fromkeys(experiments))


def _require_claims(options: argparse.Namespace) -> None:
    """Raise UserError for an experiment that was asked for and has no claim."""
    claims = load_claims()
    with_claims = list(dict.fromkeys(claim.experiment for claim in claims))
    for name in options.only or []:
        if name not in with_claims:
            as_typed = name if name in options.names else f"--only {name}"
            experiments = _judging(name, claims) or with_claims
            raise UserError(f"{as_typed} has no claim; use one of {', '.join(experiments)}")


def _asked_for(claims: Sequence[Claim], options: argparse.Namespace) -> list[Claim]:
    """Return the claims that are named, by themselves or by their experiment; all without names."""
    if not (options.only or options.claims):
        return list(claims)
    experiments = options.only or []
    return [
        claim for claim in claims if claim.experiment in experiments or claim.id in options.claims
    ]


def _selected(table: pd.DataFrame, options: argparse.Namespace) -> pd.DataFrame:
    """Return the rows of the experiments and devices that were asked for. Raises UserError."""
    chosen = table
    if options.only or options.claims:
        is_of_experiment = table.experiment.isin(options.only or [])
        chosen = table[is_of_experiment | table.id.isin(options.claims)]
    if options.device:
        chosen = chosen[chosen.device.str.contains(options.device, regex=False)]
        if chosen.empty:
            devices = ", ".join(table.device.unique())
            raise UserError(
                f"--device {options.device} is in no device's name; use one of {devices}"
            )
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
    is_record = results == RECORDS
    # Settings that make an experiment as small as its claims allow: a record has its full size.
    settings = {claim.experiment: list(claim.settings) for claim in load_claims()}
    names = options.only or [name for name in CATALOG if is_record or name in settings]
    seconds = _seconds(options, names, is_record=is_record)
    costs = results / COSTS
    jobs = _jobs(options, names, seconds, costs)
    failed = []
    with tempfile.TemporaryDirectory(prefix="sarathi-lab-") as folder:
        for number, (name, how) in enumerate(jobs, 1):
            console().print(f"\n[{number}/{len(jobs)}] {name}, {how}", style="bold")
            output = f"{folder}/{name}-{how}"  # which goes: `record` keeps what counts
            line = [f"experiment={name}", "tracking=none", f"task.record={results}"]
            if not is_record:
                line += settings.get(name, [])
            line += [f"output={output}", f"hydra.run.dir={output}/run"]
            line += CATALOG[name].settings_of(how)
            if how == MEASURED:
                line += [*options.settings, f"task.seconds={seconds[name]:g}"]
            start = time.monotonic()
            exit_status = run(line)
            if exit_status:
                failed.append(f"{name}, {how}")
            elif not is_record:  # a repository keeps no times of machines
                _add_cost(costs, name, how, time.monotonic() - start)
    return failed


def _seconds(
    options: argparse.Namespace, names: Sequence[str], *, is_record: bool
) -> dict[str, float]:
    """Return the seconds to measure each experiment for. Raises UserError if none is measured."""
    seconds = {}
    for name in names:
        if not CATALOG[name].is_simulated:
            seconds[name] = CATALOG[name].seconds
    if not seconds and options.run:
        raise UserError(f"{', '.join(names)}: simulated only; use --simulate in place of --run")
    in_all = options.seconds
    if in_all is None and not is_record:
        in_all = FEW_MINUTES
    if not seconds or in_all is None:
        return seconds
    share = in_all / sum(seconds.values())  # by what each experiment needs
    return {name: max(0.5, share * needed) for name, needed in seconds.items()}


def _jobs(
    options: argparse.Namespace, names: Sequence[str], measurable: Iterable[str], costs: Path
) -> list[tuple[str, str]]:
    """List what is run: the experiment, and how."""
    jobs = []
    if options.run:
        for name in measurable:
            if _has_engine(name):
                jobs.append((name, MEASURED))
    if options.simulate:
        for name in names:
            jobs.append((name, "simulated"))
    # What has finished has a cost; records have none, and begin anew.
    if options.resume and costs.is_file():
        finished = set(pd.read_csv(costs)[JOB].itertuples(index=False, name=None))
        jobs = [job for job in jobs if job not in finished]
    return jobs


def _add_cost(costs: Path, name: str, how: str, seconds: float) -> None:
    """Add what an experiment took to the table of costs."""
    row = pd.DataFrame([[name, how, round(seconds, 1)]], columns=[*JOB, "seconds"])
    row.to_csv(costs, mode="a", header=not costs.exists(), index=False)

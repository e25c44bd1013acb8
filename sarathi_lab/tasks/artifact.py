"""`python -m sarathi_lab artifact`: all that the claims need, run on this machine, and ARTIFACT.md,
which says what each of them takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from sarathi_lab.config.console import print_place
from sarathi_lab.config.errors import exit_code, require_one_of
from sarathi_lab.config.paths import OUTPUTS, REPOSITORY, make_folder
from sarathi_lab.config.sweep_record import as_command
from sarathi_lab.executor.torch.device import device_description, resolve_device
from sarathi_lab.experiment.claims import Claim, load_claims, verdicts
from sarathi_lab.experiment.figures import FIGURES
from sarathi_lab.experiment.registry import A6000
from sarathi_lab.results import load
from sarathi_lab.tasks.claims import (
    COSTS,
    JOB,
    OVERHEAD,
    Job,
    load_costs,
    measured_devices,
    print_verdicts,
    recorded_cells,
    take_turns,
    write_block,
)
from sarathi_lab.tasks.report import write_report

DOCUMENT = REPOSITORY / "ARTIFACT.md"
RESULTS = OUTPUTS / "artifact"
HOW = ("simulated", "measured")
KEPT = "what finished is kept; the same command goes on"


def main(args: Sequence[str]) -> int:
    """Returns 0, 1 if experiments failed, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab artifact",
        description="Run every experiment that a claim is read from, simulated and measured on "
        "this machine's device; write the verdicts and a page. Called again, it goes on.",
    )
    text = "one experiment, such as fig08, or that of a claim; may be repeated"
    parser.add_argument("--only", action="append", metavar="NAME", help=text)
    parser.add_argument("--how", choices=HOW, help="simulate or measure only")
    text = "where results are kept (default: %(default)s)"
    parser.add_argument("--results", type=Path, default=RESULTS, help=text)
    text = "run nothing; rewrite ARTIFACT.md from the claims, what is recorded and what it took"
    parser.add_argument("--document", action="store_true", help=text)
    options = parser.parse_args(args)
    return exit_code(lambda: _main(options), KEPT)


def _main(options: argparse.Namespace) -> int:
    if options.document:
        write_block(DOCUMENT, BEGIN, END, document(verdicts()))
        return 0
    claims, results = load_claims(), options.results
    experiments = {claim.id: claim.experiment for claim in claims}
    for name in options.only or ():
        require_one_of("--only", name, [*dict.fromkeys(experiments.values()), *experiments])
    chosen = {experiments.get(name, name) for name in options.only or experiments}
    make_folder(results, "--results")
    done = load_costs(results / COSTS.name)
    jobs = [job for job in _jobs(FIGURES) if job[0] in chosen]
    left = [job for job in jobs if job not in done.index and options.how in (None, job[1])]
    order = sorted(left, key=_seconds)  # so that most is there soon
    failed = take_turns({job: _seconds(job) for job in order}, partial(_run, results=results))
    found = verdicts(results, [claim for claim in claims if claim.experiment in chosen])
    print_verdicts(found)
    found.to_csv(results / "verdicts.csv", index=False, float_format="%.6g")
    print_place("table", results / "verdicts.csv")
    if load.recorded(results):
        print_place("report", write_report(results))
    for words in failed:
        print(f"failed: {words}")
    return int(bool(failed))


def _jobs(names: Iterable[str]) -> list[Job]:
    """What is run of experiments: not everything can be measured, or simulated apart."""
    both = ((name, how) for how in HOW for name in names)
    lacks = {"simulated": "is_measured_only", "measured": "is_simulated"}
    return [job for job in both if not getattr(FIGURES[job[0]], lacks[job[1]])]


def _seconds(job: Job) -> float:
    """What a job took where that was recorded, else what is planned."""
    costs = load_costs().seconds
    return float(costs[job]) if job in costs.index else FIGURES[job[0]].seconds + OVERHEAD


def command(job: Job, results: Path = RESULTS) -> list[str]:
    """The arguments that run a job, as far as its claims need it, and record its results."""
    name, how = job
    own = [one for claim in load_claims() if claim.experiment == name for one in claim.settings]
    settings = ["executor=simulated", *FIGURES[name].simulated] if how == "simulated" else []
    aside = [f"task.record={results}", "tracking=none"]
    return [f"experiment={name}", *settings, *dict.fromkeys(own), *aside]


def _run(job: Job, results: Path) -> int:
    """Run a job in a process of its own and keep what it took; returns its exit code."""
    folder = results / load.group_of(job[0]) / job[0] / "runs" / job[1]
    arguments = [*command(job, results), f"hydra.run.dir={folder}"]
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "sarathi_lab.run", *arguments])
    try:
        _, status, usage = os.wait4(process.pid, 0)  # which subprocess has no name for
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        process.wait()
    if process.returncode == 0:
        device = resolve_device("auto" if job[1] == "measured" else "cpu")
        where, took = device_description(device, os.cpu_count()), time.monotonic() - start
        row = [*job, where, round(took, 1), 1024 * usage.ru_maxrss]
        path = results / COSTS.name
        table = pd.DataFrame([row], columns=[*JOB, *load_costs(path).columns])
        table.to_csv(path, mode="a", header=not path.exists(), index=False)
    return process.returncode


# -- the document ----------------------------------------------------------------------------------

BEGIN = "<!-- artifact: python -m sarathi_lab artifact --document -->"
END = "<!-- end of artifact -->"


def document(found: pd.DataFrame) -> str:
    """The block of ARTIFACT.md: what everything takes, and a part for each experiment that claims
    are read from, with the verdicts `found` of what is recorded.
    """
    costs, claims = load_costs(), load_claims()
    names = [name for name in FIGURES if name in {claim.experiment for claim in claims}]
    jobs = _jobs(names)
    took = {how: sum(_seconds(job) for job in jobs if job[1] == how) / 60 for how in HOW}
    words = " and ".join(f"{minutes:.0f} minutes {how}" for how, minutes in took.items())
    most = f"{costs.memory.max() / 1e9:.1f} GB"
    parts = [f"Together about {words}, at most {most}, on {costs.device.mode()[0]}.\n"]
    for name in names:
        own = [claim for claim in claims if claim.experiment == name]
        parts.append(_part(name, own, found, costs))
    return "\n".join(parts).strip()


def _part(name: str, claims: Sequence[Claim], found: pd.DataFrame, costs: pd.DataFrame) -> str:
    """An experiment's question, its claims and its commands, in Markdown."""
    lines = [f"## {name}", "", FIGURES[name].question, ""]
    devices = measured_devices(found)
    lines.append(f"| claim | source | expected | within | {' | '.join(devices)} | simulated |")
    lines.append("|" + " --- |" * (len(devices) + 5))
    for claim in claims:
        cells = [f"`{claim.id}`: {claim.claim}", claim.source]
        cells += [f"{claim.direction} {claim.expected:g}", f"{claim.tolerance:.0%}"]
        cells += recorded_cells(found[found.id == claim.id], devices)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| command | device | minutes | GB |", "| --- | --- | --- | --- |"]
    papers = " and ".join(f"{on.hardware} ({on.model})" for on in FIGURES[name].papers or [A6000])
    for how, device in (("simulated", f"simulated {papers}"), ("measured", "the one at hand")):
        if (job := (name, how)) not in _jobs([name]):
            continue
        minutes, gigabytes = f"{_seconds(job) / 60:.1f} (planned)", "not taken"
        if job in costs.index:
            minutes = f"{float(costs.seconds[job]) / 60:.1f}"
            gigabytes = f"{float(costs.memory[job]) / 1e9:.1f}"
        lines.append(f"| `{as_command(command(job))}` | {device} | {minutes} | {gigabytes} |")
    return "\n".join([*lines, ""])

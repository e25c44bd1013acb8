"""The task `validate`: a real server's run beside its replay, as it was run and otherwise."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import counted, print_words
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.extensions.replay.cases import Case, Replay, case_of
from sarathi_lab.extensions.replay.comparison import (
    REAL,
    ReplayedLoad,
    loads_display,
    mean_of,
    over_time,
    part_table,
    replay_errors,
    validation_display,
    validation_table,
)
from sarathi_lab.extensions.replay.iteration_log import predicted, schedule_table
from sarathi_lab.extensions.replay.picture import picture
from sarathi_lab.extensions.replay.real_run import RealRun, read_runs
from sarathi_lab.extensions.replay.run_config import AUTO, names_model, server_of
from sarathi_lab.extensions.replay.settings import OF_WORKLOAD, SETTINGS
from sarathi_lab.results import metrics
from sarathi_lab.results.conclusion import caution_of_replay
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import first_of_sweep, print_cautions
from sarathi_lab.results.result import ITERATIONS, REQUESTS, DisplayTable, Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.serve import run_once

FORMATS = {
    "real": ".4g",
    "simulated": ".4g",
    "error": "+.1%",
}
AS_RUN = "as_run"  # the baseline beside REAL
Notes = list[DisplayTable | str]


class Validate(Task):
    """Replay of the run in the folder or file `run` with the simulator's scheduler and cost model,
    as it was run and, if they are named, with other settings.

    Model, GPU, host, policy, sizes and arrivals are those of the run's files, of the server's `log`
    and of the command line `server` that started it. What none of them states is taken from the
    user, else it is the server's default, which a source with all arguments states, too; what the
    user states otherwise than a file is the setting of a further replay. Only hardware, host, model
    and dtype are then those of both. `chunk` and `batch` are the server's, in any case; `stated`
    has the settings of the command line (see `settings`).
    """

    has_runs = True
    follows_tables = True
    reads = (
        *("executor", "hardware", "host", "model", "dtype", "policy"),
        *SETTINGS,
        *OF_WORKLOAD,
    )

    def __init__(
        self,
        run: str | None = None,
        log: str | None = None,
        server: str | None = None,
        chunk: int | None = None,
        batch: int | None = None,
        stated: Sequence[str] = (),
    ) -> None:
        self._run = run
        self._log = log
        self._server = server
        self._sizes: dict[str, object] = {"chunk": chunk, "batch": batch}
        for name, value in (("task.chunk", chunk), ("task.batch", batch)):
            if value is not None:
                require_int(name, value, 1, "use the server's, such as 2048 and 256")

    def check(self, cfg: DictConfig) -> list[Case]:
        if not self._run:
            raise UserError("task=validate needs a run of a real server; add task.run=FILE")
        # What is named here need not be in a file.
        settings = {name: size for name, size in self._sizes.items() if size is not None}
        for group in ("hardware", "host"):
            if cfg[group].name != AUTO:
                settings[group] = cfg[group].name
        if names_model(cfg):
            settings["model"] = cfg.model.get("name") or "named"
        runs = read_runs(self._run, self._log, self._server, settings)
        return cases_of(cfg, runs)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        cases: list[Case] = context.prepared or self.check(cfg)
        print_cases(cases, context)
        first = cases[0].as_run
        baselines = Baselines(first, cfg, context)
        if first.run.requests.empty:
            result = compare_schedules(cases[0], baselines)
        else:
            result = compare_loads(cases, baselines)
        # The labels are of the replay that the summary is of.
        replay = cases[0].what_if or first
        engine = replay.engine
        labels = {
            **labels_of(
                replay,
                policy=engine.policy.name,
                is_baseline=False,
                name=context.name,
            ),
            "chunk": engine.policy.budget,
            "batch": engine.batch_size,
            "baselines": baselines.folders(),
        }
        tags = ["validate", first.spec.name, first.backend.device_name]
        return replace(result, labels=labels, tags=tags)


def cases_of(cfg: DictConfig, runs: Sequence[RealRun]) -> list[Case]:
    """Prepare the replays of all loads but those that can't be simulated, which the first one
    names. Raises UserError if that is all of them.
    """
    cases = list[Case]()
    cautions = list[str]()
    for run in runs:
        try:
            cases.append(case_of(cfg, run))
        except UserError as error:
            if len(cautions) + 1 == len(runs):
                raise
            cautions.append(f"load {run.name} is left out: {error}")
    if cautions:
        # Told with the first load, which is described as a whole.
        first = cases[0].run
        cases[0] = case_of(cfg, replace(first, cautions=[*first.cautions, *cautions]))
    return cases


def print_cases(cases: Sequence[Case], context: RunContext) -> None:
    """Print what is replayed, how, and what of the run is not."""
    first = cases[0].as_run
    headline = f"\nreplaying {first.run.source}: {place_of(first)}"
    lines = first.describe()
    if len(cases) > 1:
        lines.append(f"and {counted(len(cases) - 1, 'more load')}, whose settings are found alike")
    for case in cases[1:]:
        lines += [f"of {case.run.name}: {caution}" for caution in case.run.cautions]
    if context.is_brief:
        # The runs of a sweep replay the same, and the line that ends each has its settings.
        lines = first_of_sweep(lines, context)
    if not context.is_brief or first_of_sweep([headline], context):
        print_words(headline, style="bold")
    print_cautions(first.backend.cautions(first.spec), context)
    for line in lines:
        print_words(f"  {line}")
    if cases[0].changed and not context.is_brief:
        print_words(f"  what if, as you state: {', '.join(cases[0].changed)}")


def place_of(replay: Replay) -> str:
    """Name the model and the devices of a replay."""
    return f"{replay.spec.name} on {replay.backend.device_name}"


def labels_of(replay: Replay, **others: object) -> dict[str, object]:
    """Return the labels of a replay in tables of results."""
    return {
        "workload": Path(replay.run.source).name,
        "workload.arrivals": "recorded" if replay.loop is None else "users",
        **dict.fromkeys(("pd_ratio", "seq_len")),
        "model": replay.spec.name,
        "device": replay.backend.device_name,
        "executor": "simulated",
        **provenance(),
        **others,
    }


@dataclass(frozen=True)
class Baselines:
    """Where the results of a run as it was are kept, for all runs of a command to compare with:
    `REAL` as measured, and `AS_RUN` as the `first` load's replay.
    """

    first: Replay
    cfg: DictConfig
    context: RunContext

    def folder(self, name: str) -> Path:
        """Return the folder of a baseline."""
        key = json.dumps([name, self.first.config], sort_keys=True)
        content = key.encode()
        digest = hashlib.sha256(content).hexdigest()
        short_digest = digest[:8]
        return self.context.baselines_dir / f"{name}-{short_digest}"

    def folders(self) -> dict[str, str]:
        """Return the folders, relative to the run's, of the baselines that are kept."""
        folders = {}
        for name in (REAL, AS_RUN):
            if self.folder(name).is_dir():
                folders[name] = os.path.relpath(self.folder(name), self.context.run_dir)
        return folders

    def keep(self, name: str, work: Callable[[], Result]) -> Path:
        """Keep what `work` returns as a baseline, unless it is kept; return its folder."""
        folder = self.folder(name)
        executor = "server" if name == REAL else "simulated"
        labels = labels_of(
            self.first,
            policy=name,
            is_baseline=True,
            executor=executor,
        )
        context = replace(
            self.context,
            run_dir=folder,
            name=f"baseline {name}",
            varied={},
            policy=name,
        )
        return run_once(lambda: replace(work(), labels=labels, config={}), self.cfg, context)


def compare_loads(cases: Sequence[Case], baselines: Baselines) -> Result:
    """Compare the requests of all loads with their replays."""
    context = baselines.context
    others = list[ReplayedLoad]()
    if any(case.what_if for case in cases):
        loads = _loads_as_run(cases, baselines)
        others = [(case.what_if or case.as_run).load() for case in cases]
    else:
        loads = [case.as_run.load() for case in cases]
    real = mean_of([load.real for load in loads])
    simulated = mean_of([load.simulated for load in loads])
    changed = mean_of([load.simulated for load in others]) if others else None
    measured = {name: value for name, value in real.items() if not math.isnan(value)}
    recorded = [ReplayedLoad(case.run, case.run.logged, case.run.requests) for case in cases]
    baselines.keep(REAL, lambda: Result(tables_of(recorded), summary=measured))
    summary = changed or simulated
    compared = metrics.compare(summary, measured, REAL)
    # A run alone, as it was run, has no replay to be compared with.
    if others or context.swept:
        compared |= metrics.compare(summary, simulated, AS_RUN)
    table = validation_table(real, simulated, changed)
    errors = {f"error/{name}": error for name, error in replay_errors(table).items()}
    parts = part_table(loads, others)
    tables = {
        "validation": table,
        "parts": parts,
        **tables_of(others or loads),
    }
    tables |= _tables_of_one(loads)
    notes: Notes = []
    # The runs of a sweep have the same replay of the run as it was.
    if not context.is_brief or first_of_sweep([str(baselines.folder(AS_RUN))], context):
        notes = _notes(loads, tables, is_brief=context.is_brief)
    caution = caution_of_replay(errors)
    if caution and not context.is_brief:  # a sweep concludes with it
        notes.append(caution)
    return Result(
        tables=tables,
        figures={"validation": picture(loads, parts, others, _title(cases[0]))},
        summary={
            **summary,
            **compared,
            **errors,
        },
        shown=notes,
    )


def _loads_as_run(cases: Sequence[Case], baselines: Baselines) -> list[ReplayedLoad]:
    """Replay the loads as they were run, once in a sweep, as a baseline of it."""

    def work() -> Result:
        loads = [case.as_run.load() for case in cases]
        return Result(tables_of(loads), summary=mean_of([load.simulated for load in loads]))

    # Read back in any case: another job of the sweep may have made it.
    folder = baselines.keep(AS_RUN, work)
    iterations = pd.read_parquet(folder / ITERATIONS)
    requests = pd.read_parquet(folder / REQUESTS)
    loads = []
    for number, case in enumerate(cases):
        load = ReplayedLoad(
            case.run,
            iterations[iterations.load == number].reset_index(drop=True),
            requests[requests.load == number].reset_index(drop=True),
        )
        loads.append(load)
    return loads


def _tables_of_one(loads: Sequence[ReplayedLoad]) -> dict[str, pd.DataFrame]:
    """Return the use of the server over time and its schedule, where one load has recorded them."""
    tables = dict[str, pd.DataFrame]()
    if len(loads) > 1:
        return tables
    (load,) = loads
    if len(load.run.timeline):
        tables["over_time"] = over_time(load)
    if len(load.run.logged):
        seconds = load.iterations.end - load.iterations.start
        tables["schedule"] = schedule_table(
            load.run.logged, load.iterations.assign(seconds=seconds)
        )
    return tables


def _notes(
    loads: Sequence[ReplayedLoad], tables: dict[str, pd.DataFrame], *, is_brief: bool
) -> Notes:
    """Return what the terminal shows of a replay."""
    table = tables["validation"]
    if is_brief:  # what only one run has is in the sweep's own table
        table = table.drop(columns=["what_if", "change"], errors="ignore")
    notes: Notes = [validation_display(table)]
    if len(loads) > 1:
        notes.append(loads_display(tables["parts"]))
    if "schedule" in tables:
        notes.append(display(tables["schedule"], "batch", "quantity", "unit"))
    return notes


def compare_schedules(case: Case, baselines: Baselines) -> Result:
    """Compare the logged iterations with simulated ones of the same batches."""
    logged = case.run.logged
    times = predicted(logged, (case.what_if or case.as_run).executor())
    table = schedule_table(logged, times)
    num_tokens = logged.num_prefill_tokens.sum() + logged.num_decode_tokens.sum()
    real = logged.seconds.sum()
    simulated = times.seconds.sum()
    measured = {"duration": real, "throughput": num_tokens / real}
    requests = case.run.requests
    baselines.keep(REAL, lambda: Result({ITERATIONS: logged, REQUESTS: requests}, summary=measured))
    return Result(
        tables={
            ITERATIONS: logged.assign(simulated=times.seconds),
            REQUESTS: requests,
            "schedule": table,
        },
        summary={
            "duration": simulated,
            "throughput": num_tokens / simulated,
            "error/iteration_time": simulated / real - 1,
        },
        shown=[display(table, "batch", "quantity", "unit")],
    )


def _title(case: Case) -> str:
    run = case.run
    server = f"{server_of(run)} {run.version}".rstrip()
    title = f"{place_of(case.as_run)}: {server}, real and simulated"
    if not case.changed:
        return title
    return f"{title}\nwhat if (as run): {', '.join(case.changed)}"


def display(table: pd.DataFrame, *keys: str) -> DisplayTable:
    """Return a table as the terminal shows it, by its `keys`."""
    return DisplayTable(table.to_dict("records"), list(keys), formats=FORMATS)


def tables_of(loads: Sequence[ReplayedLoad]) -> dict[str, pd.DataFrame]:
    """Return the ledger's tables of all loads, which are numbered."""
    iterations = []
    requests = []
    for number, load in enumerate(loads):
        iterations.append(load.iterations.assign(load=number))
        requests.append(load.requests.assign(load=number))
    return {
        ITERATIONS: pd.concat(iterations, ignore_index=True),
        REQUESTS: pd.concat(requests, ignore_index=True),
    }

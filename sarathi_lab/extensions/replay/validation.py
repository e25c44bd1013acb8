"""The task `validate`: a real server's run beside its replay, as it was run and otherwise."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import print_words
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.extensions.replay.cases import Case, Replay, case_of
from sarathi_lab.extensions.replay.comparison import (
    Load,
    errors_of_longest,
    mean_errors,
    mean_of,
    over_time,
    part_table,
    parts_display,
    picture,
    validation_display,
    validation_table,
    worst_part,
)
from sarathi_lab.extensions.replay.iteration_log import predicted, schedule_table, shared
from sarathi_lab.extensions.replay.real_run import RealRun, Stated, read_runs
from sarathi_lab.extensions.replay.run_config import AUTO, server_of
from sarathi_lab.extensions.replay.settings import OF_WORKLOAD, SETTINGS
from sarathi_lab.results import metrics
from sarathi_lab.results.conclusion import caution_of_replay
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import first_of_sweep, print_cautions
from sarathi_lab.results.result import ITERATIONS, REQUESTS, DisplayTable, Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.serve import run_once

FORMATS = {"real": ".4g", "simulated": ".4g", "error": "+.1%"}
REAL, AS_RUN = "real", "as_run"  # baselines


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
        settings = dict(self._sizes)
        for group in ("hardware", "host"):
            if cfg[group].name != AUTO:
                settings[group] = cfg[group].name
        is_model_of_run = "path" in cfg.model and cfg.model.path is None
        if not is_model_of_run:
            settings["model"] = cfg.model.get("name") or "named"
        runs = read_runs(self._run, Stated(self._log, self._server, settings))
        return cases_of(cfg, runs)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        cases: list[Case] = context.prepared or self.check(cfg)
        print_cases(cases, context)
        comparison = Comparison(cases, cfg, context)
        first = comparison.first
        compare = comparison.of_loads
        if first.run.requests.empty:
            compare = comparison.of_schedules
        result = compare()
        # The labels are of the replay that the summary is of.
        replay = cases[0].what_if or first
        engine = replay.engine
        labels = {
            **labels_of(replay, policy=engine.policy.name, is_baseline=False, name=context.name),
            "chunk": engine.policy.budget,
            "batch": engine.batch_size,
            "baselines": comparison.baselines(),
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
    # Told with the first load, which is described as a whole.
    first = cases[0].as_run
    run_with_cautions = replace(first.run, cautions=[*first.run.cautions, *cautions])
    cases[0] = replace(cases[0], as_run=replace(first, run=run_with_cautions))
    return cases


def print_cases(cases: Sequence[Case], context: RunContext) -> None:
    """Print what is replayed, how, and what of the run is not."""
    first = cases[0].as_run
    headline = f"\nreplaying {first.run.source}: {place_of(first)}"
    lines = first.describe()
    if len(cases) > 1:
        more_loads = "1 more load, with its settings"
        if len(cases) > 2:
            more_loads = f"{len(cases) - 1} more loads, each with its settings"
        lines.append(f"and {more_loads}")
    for case in cases[1:]:
        lines += [f"of {case.run.name}: {caution}" for caution in case.run.cautions]
    if context.is_brief:
        # The runs of a sweep replay the same, and the line that ends each has its settings.
        for line in first_of_sweep([headline], context):
            print_words(line, style="bold")
        print_cautions([*first.backend.cautions(first.spec), *lines], context)
        return
    print_words(headline, style="bold")
    print_cautions(first.backend.cautions(first.spec), context)
    for line in lines:
        print_words(f"  {line}")
    if cases[0].changed:
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
class Comparison:
    """Cases of one run, to be replayed, and where the results of a command's runs are kept."""

    cases: Sequence[Case]
    cfg: DictConfig
    context: RunContext

    @property
    def first(self) -> Replay:
        """The first load as it was run."""
        return self.cases[0].as_run

    def of_loads(self) -> Result:
        """Compare the requests of all loads with their replays."""
        has_changes = any(case.what_if for case in self.cases)
        if has_changes:
            loads = self._loads_as_run()
            others = [(case.what_if or case.as_run).load() for case in self.cases]
        else:
            loads = [case.as_run.load() for case in self.cases]
            others = []
        real = mean_of([load.real for load in loads])
        simulated = mean_of([load.simulated for load in loads])
        changed = None
        summary = simulated
        if has_changes:
            changed = mean_of([load.simulated for load in others])
            summary = changed
        measured = {name: value for name, value in real.items() if value == value}  # but NaN
        self._keep_recorded(measured)
        compared = metrics.compare(summary, measured, REAL)
        # A run alone, as it was run, has no replay to be compared with.
        if has_changes or self.context.swept:
            compared |= metrics.compare(summary, simulated, AS_RUN)
        table = validation_table(real, simulated, changed)
        parts = part_table(loads, others)
        errors = {}
        for name, error in {**mean_errors(table), **errors_of_longest(table)}.items():
            errors[f"error/{name}"] = error
        tables = {"validation": table, "parts": parts, **tables_of(others or loads)}
        notes: list[DisplayTable | str] = [validation_display(self._without_what_if(table))]
        if len(loads) > 1:
            notes.append(parts_display(parts))
        notes.append(worst_part(parts))
        if len(loads) == 1:
            more_tables, more_notes = self._of_one_load(loads[0])
            tables |= more_tables
            notes += more_notes
        caution = caution_of_replay(errors)
        if caution and not self.context.is_brief:  # a sweep concludes with it
            notes.append(caution)
        return Result(
            tables=tables,
            figures={"validation": picture(loads, parts, others, self._title())},
            summary=summary | compared | errors,
            shown=notes if self._is_first() else [],
        )

    def _without_what_if(self, table: pd.DataFrame) -> pd.DataFrame:
        """Leave out of a sweep's table what only one of its runs has: the sweep's own compares."""
        if not self.context.is_brief:
            return table
        return table.drop(columns=["what_if", "change"], errors="ignore")

    def _is_first(self) -> bool:
        """Return whether no run of this sweep has shown this replay of the run as it was."""
        if not self.context.is_brief:
            return True
        return bool(first_of_sweep([str(self._folder(AS_RUN))], self.context))

    def _of_one_load(self, load: Load) -> tuple[dict[str, pd.DataFrame], list[DisplayTable | str]]:
        """Compare the use of the server over time and its iterations, where they are recorded."""
        run = load.run
        tables = dict[str, pd.DataFrame]()
        notes = list[DisplayTable | str]()
        if len(run.timeline):
            tables["over_time"] = over_time(run, load.iterations)
        if len(run.logged):
            seconds = load.iterations.end - load.iterations.start
            schedule = load.iterations.assign(seconds=seconds)
            tables["schedule"] = schedule_table(run.logged, schedule)
            share = shared(run.logged, schedule)
            notes.append(display(tables["schedule"], "batch", "quantity", "unit"))
            notes.append(
                f"  {share:.0%} of the logged iterations have the tokens of a simulated one"
            )
        return tables, notes

    def of_schedules(self) -> Result:
        """Compare the logged iterations with simulated ones of the same batches."""
        (case,) = self.cases
        logged = case.run.logged
        times = predicted(logged, (case.what_if or case.as_run).executor())
        table = schedule_table(logged, times)
        num_tokens = logged.num_prefill_tokens.sum() + logged.num_decode_tokens.sum()
        real = logged.seconds.sum()
        simulated = times.seconds.sum()
        measured = {"duration": real, "throughput": num_tokens / real}
        tables = {ITERATIONS: logged, REQUESTS: case.run.requests}
        self._keep(lambda: Result(tables, summary=measured), REAL)
        logged_and_simulated = logged.assign(simulated=times.seconds)
        return Result(
            tables={**tables, "schedule": table, ITERATIONS: logged_and_simulated},
            summary={
                "duration": simulated,
                "throughput": num_tokens / simulated,
                "error/iteration_time": simulated / real - 1,
            },
            shown=[display(table, "batch", "quantity", "unit")],
        )

    def baselines(self) -> dict[str, str]:
        """Return the folders, relative to the run's, of the baselines that are kept."""
        folders = {name: self._folder(name) for name in (REAL, AS_RUN)}
        return {
            name: os.path.relpath(folder, self.context.run_dir)
            for name, folder in folders.items()
            if folder.is_dir()
        }

    def _title(self) -> str:
        run = self.first.run
        server = f"{server_of(run)} {run.version}".rstrip()
        title = f"{place_of(self.first)}: {server}, real and simulated"
        changed = self.cases[0].changed
        if not changed:
            return title
        return f"{title}\nwhat if (as run): {', '.join(changed)}"

    def _keep_recorded(self, measured: dict[str, float]) -> None:
        """Keep what was measured as a baseline of a command's runs."""
        recorded = [Load(case.run, case.run.logged, case.run.requests) for case in self.cases]
        self._keep(lambda: Result(tables_of(recorded), summary=measured), REAL)

    def _loads_as_run(self) -> list[Load]:
        """Replay the loads as they were run, once in a sweep, as a baseline of it."""

        def work() -> Result:
            loads = [case.as_run.load() for case in self.cases]
            return Result(tables_of(loads), summary=mean_of([load.simulated for load in loads]))

        # Read back in any case: another job of the sweep may have made it.
        folder = self._keep(work, AS_RUN)
        iterations = pd.read_parquet(folder / ITERATIONS)
        requests = pd.read_parquet(folder / REQUESTS)
        loads = []
        for number, case in enumerate(self.cases):
            of_load = [
                table[table.load == number].reset_index(drop=True)
                for table in (iterations, requests)
            ]
            loads.append(Load(case.run, *of_load))
        return loads

    def _keep(self, work: Callable[[], Result], name: str) -> Path:
        """Keep what `work` returns as the baseline `name`; return its folder."""
        folder = self._folder(name)
        executor = "server" if name == REAL else "simulated"
        labels = labels_of(self.first, policy=name, is_baseline=True, executor=executor)
        context = replace(
            self.context, run_dir=folder, name=f"baseline {name}", varied={}, policy=name
        )
        return run_once(lambda: replace(work(), labels=labels, config={}), self.cfg, context)

    def _folder(self, name: str) -> Path:
        key = json.dumps([name, self.first.config], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.context.baselines_dir / f"{name}-{digest[:8]}"


def display(table: pd.DataFrame, *keys: str) -> DisplayTable:
    """Return a table as the terminal shows it, by its `keys`."""
    return DisplayTable(table.to_dict("records"), list(keys), formats=FORMATS)


def tables_of(loads: Sequence[Load]) -> dict[str, pd.DataFrame]:
    """Return the ledger's tables of all loads, which are numbered."""
    numbered = list(enumerate(loads))
    iterations = [load.iterations.assign(load=number) for number, load in numbered]
    requests = [load.requests.assign(load=number) for number, load in numbered]
    return {
        ITERATIONS: pd.concat(iterations, ignore_index=True),
        REQUESTS: pd.concat(requests, ignore_index=True),
    }

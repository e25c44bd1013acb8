"""The task `validate`: a recorded run of a real server beside its simulated replay, as it was run
and with other settings.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import print_words
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.extensions.replay.cases import Case, Replay, case_of
from sarathi_lab.extensions.replay.comparison import (
    Load,
    mean_errors,
    mean_of,
    over_time,
    part_table,
    picture,
    validation_table,
    worst_part,
)
from sarathi_lab.extensions.replay.iteration_log import predicted, schedule_table, shared
from sarathi_lab.extensions.replay.real_run import Stated, read_runs
from sarathi_lab.extensions.replay.run_config import AUTO, server_of
from sarathi_lab.extensions.replay.settings import OF_WORKLOAD, SETTINGS
from sarathi_lab.results import metrics
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import print_cautions
from sarathi_lab.results.result import ITERATIONS, REQUESTS, DisplayTable, Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.serve import run_once

NUMBERS = ("real", "simulated", "what_if")
FORMATS = {**dict.fromkeys(NUMBERS, ".4g"), "error": "+.1%", "change": "+.1%"}
FORMATS |= {f"{one} {whose}": ".3g" for one in ("ttft", "latency") for whose in NUMBERS[:2]}
REAL, AS_RUN = "real", "as_run"  # baselines


class Validate(Task):
    """Replay of the run in the folder or file `run` with the simulator's scheduler and cost model,
    as it was run and, if they are named, with other settings.

    Model, GPU, host, policy, sizes and arrivals are those of the run's files, of the server's `log`
    and of the command line `server` that started it. What none of them states is taken from the
    user, else it is the server's default; what the user states otherwise than a file is the setting
    of a further replay. Only hardware, host, model and dtype are then those of both. `chunk` and
    `batch` are the server's, in any case; `stated` has the settings of the command line (see
    `settings`).
    """

    has_runs = True
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
        self._place = run
        self._log = log
        self._server = server
        self._given: dict[str, Any] = {"chunk": chunk, "batch": batch}
        for name, value in (("task.chunk", chunk), ("task.batch", batch)):
            if value is not None:
                require_int(name, value, 1, "use the server's, such as 2048 and 256")

    def check(self, cfg: DictConfig) -> list[Case]:
        if not self._place:
            raise UserError("task=validate needs a run of a real server; add task.run=FILE")
        named = {group: cfg[group].name for group in ("hardware", "host")}
        given = self._given | {key: name for key, name in named.items() if name != AUTO}
        if not ("path" in cfg.model and cfg.model.path is None):
            given["model"] = cfg.model.get("name") or "named"
        stated = Stated(self._log, self._server, given)
        return [case_of(cfg, run) for run in read_runs(self._place, stated)]

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        cases: list[Case] = context.prepared or self.check(cfg)
        first = cases[0].as_run
        where = f"{first.spec.name} on {first.backend.device_name}"
        print_words(f"\nreplaying {first.run.source}: {where}", style="bold")
        print_cautions(first.backend.cautions(first.spec), context)
        for line in first.describe():
            print_words(f"  {line}")
        if changed := cases[0].changed:
            print_words(f"  what if, as you state: {', '.join(changed)}")
        if len(cases) > 1:
            print_words(f"  and {len(cases) - 1} more loads, each with its settings")
        for case in cases[1:]:
            for caution in case.run.cautions:
                print_words(f"  of {case.run.name}: {caution}")
        compare = _schedules if first.run.requests.empty else _loads
        result = compare(cases, cfg, context, where)
        this = (cases[0].what_if or first).engine
        labels = _labels(
            cases[0].what_if or first, policy=this.policy.name, is_baseline=False, name=context.name
        )
        labels |= {"chunk": this.policy.budget, "batch": this.batch_size}
        labels["baselines"] = _places(first, context)
        tags = ["validate", first.spec.name, first.backend.device_name]
        return replace(result, labels=labels, tags=tags)


def _labels(replay: Replay, **more: Any) -> dict[str, Any]:
    return {
        "workload": Path(replay.run.source).name,
        "workload.arrivals": "recorded" if replay.loop is None else "users",
        **dict.fromkeys(("pd_ratio", "seq_len")),
        "model": replay.spec.name,
        "device": replay.backend.device_name,
        "executor": "simulated",
        **provenance(),
        **more,
    }


def _loads(cases: Sequence[Case], cfg: DictConfig, context: RunContext, where: str) -> Result:
    """Compare the requests of all loads with their replays."""
    first, run, is_changed = cases[0].as_run, cases[0].run, any(case.what_if for case in cases)
    loads = _kept_as_run(cases, cfg, context) if is_changed else [x.as_run.load() for x in cases]
    others = [(x.what_if or x.as_run).load() for x in cases] if is_changed else []
    real, simulated = mean_of([x.real for x in loads]), mean_of([x.simulated for x in loads])
    summary = mean_of([x.simulated for x in others]) if is_changed else simulated
    measured = {name: value for name, value in real.items() if value == value}
    recorded = [Load(case.run, case.run.logged, case.run.requests) for case in cases]
    _keep(lambda: Result(_tables(recorded), summary=measured), REAL, first, cfg, context)
    compared = metrics.compare(summary, measured, REAL)
    compared |= metrics.compare(summary, simulated, AS_RUN) if is_changed or context.swept else {}
    table = validation_table(real, simulated, summary if is_changed else None)
    parts = part_table(loads, others)
    tables = {"validation": table, "parts": parts, **_tables(others or loads)}
    notes: list[DisplayTable | str] = [_display(table, "metric", "quantile", "unit")]
    if len(loads) > 1:
        shown = parts[["load", *(name for name in parts if name in FORMATS)]]
        notes.append(_display(shown, "load"))
    notes.append(worst_part(parts))
    iterations = loads[0].iterations
    if len(loads) == 1 and len(run.timeline):
        tables["over_time"] = over_time(run, iterations)
    if len(run.logged) and len(loads) == 1:
        schedule = iterations.assign(seconds=iterations.end - iterations.start)
        tables["schedule"] = schedule_table(run.logged, schedule)
        share = shared(run.logged, schedule)
        notes.append(_display(tables["schedule"], "batch", "quantity", "unit"))
        notes.append(f"  {share:.0%} of the logged iterations have the tokens of a simulated one")
    title = f"{where}: {server_of(run)} {run.version}".rstrip() + ", real and simulated"
    errors = {f"error/{name}": error for name, error in mean_errors(table).items()}
    return Result(
        tables=tables,
        figures={"validation": picture(loads, parts, others, title)},
        summary=summary | compared | errors,
        shown=notes,
    )


def _schedules(cases: Sequence[Case], cfg: DictConfig, context: RunContext, where: str) -> Result:
    """Compare the logged iterations with simulated ones of the same batches."""
    (case,) = cases
    logged = case.run.logged
    times = predicted(logged, (case.what_if or case.as_run).executor())
    table = schedule_table(logged, times)
    num_tokens = logged.num_prefill_tokens.sum() + logged.num_decode_tokens.sum()
    real, simulated = logged.seconds.sum(), times.seconds.sum()
    measured = {"duration": real, "throughput": num_tokens / real}
    tables = {ITERATIONS: logged, REQUESTS: case.run.requests}
    _keep(lambda: Result(tables, summary=measured), REAL, case.as_run, cfg, context)
    return Result(
        tables={**tables, "schedule": table, ITERATIONS: logged.assign(simulated=times.seconds)},
        summary={
            "duration": simulated,
            "throughput": num_tokens / simulated,
            "error/iteration_time": simulated / real - 1,
        },
        shown=[_display(table, "batch", "quantity", "unit")],
    )


def _display(table: pd.DataFrame, *keys: str) -> DisplayTable:
    return DisplayTable(table.to_dict("records"), list(keys), formats=FORMATS)


def _kept_as_run(cases: Sequence[Case], cfg: DictConfig, context: RunContext) -> list[Load]:
    """Replay the loads as they were run, once in a sweep, as a baseline of it."""

    def work() -> Result:
        loads = [case.as_run.load() for case in cases]
        return Result(_tables(loads), summary=mean_of([x.simulated for x in loads]))

    folder = _keep(work, AS_RUN, cases[0].as_run, cfg, context)
    tables = [pd.read_parquet(folder / name) for name in (ITERATIONS, REQUESTS)]
    return [
        Load(case.run, *(table[table.load == i].reset_index(drop=True) for table in tables))
        for i, case in enumerate(cases)
    ]


def _keep(
    work: Callable[[], Result], name: str, replay: Replay, cfg: DictConfig, context: RunContext
) -> Path:
    """Keep what `work` returns as the baseline `name` of a command's runs; return its folder."""
    folder = _folder(name, replay, context)
    executor = "server" if name == REAL else "simulated"
    labels = _labels(replay, policy=name, is_baseline=True, executor=executor)
    context = replace(context, run_dir=folder, name=f"baseline {name}", varied={}, policy=name)
    return run_once(lambda: replace(work(), labels=labels, config={}), cfg, context)


def _folder(name: str, replay: Replay, context: RunContext) -> Path:
    key = hashlib.sha256(json.dumps([name, replay.config], sort_keys=True).encode())
    return context.baselines_dir / f"{name}-{key.hexdigest()[:8]}"


def _places(replay: Replay, context: RunContext) -> dict[str, str]:
    """Return the folders, relative to the run's, of the baselines that are kept."""
    folders = {name: _folder(name, replay, context) for name in (REAL, AS_RUN)}
    return {
        name: os.path.relpath(folder, context.run_dir)
        for name, folder in folders.items()
        if folder.is_dir()
    }


def _tables(loads: Sequence[Load]) -> dict[str, pd.DataFrame]:
    """Return the ledger's tables of all loads, which are numbered."""
    tables = {ITERATIONS: [one.iterations for one in loads], REQUESTS: [x.requests for x in loads]}
    return {
        name: pd.concat([one.assign(load=i) for i, one in enumerate(some)], ignore_index=True)
        for name, some in tables.items()
    }

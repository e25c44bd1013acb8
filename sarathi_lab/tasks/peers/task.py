"""The task `peers`: other engines on the same model and the same requests as the lab's, side by
side.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config import console
from sarathi_lab.config.errors import (
    RunError,
    UserError,
    require_int,
    require_number,
    require_one_of,
)
from sarathi_lab.config.instantiate import build, load_option, resolved
from sarathi_lab.config.paths import CONF, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch.device import require_threads
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.peers.checkpoint import ensure_checkpoint, require_llama
from sarathi_lab.tasks.peers.engines import OURS, PEERS, Engine, our_engine
from sarathi_lab.tasks.peers.loads import LOADS
from sarathi_lab.tasks.peers.measure import Conditions, Outcome, Subject, measure, table_of
from sarathi_lab.tasks.peers.show import print_table

DTYPES = ("float32", "bfloat16")  # that all engines have


@dataclass(frozen=True)
class Peers:
    """Times `peers` and the lab on `workloads` of `models` in `dtypes`, in turns, and compares
    greedy tokens.

    `python` names the interpreter of the environment that has a peer (None: this one). `timeout` is
    in seconds, for each answer. `checkpoints` keeps the models; None makes them anew. Raises
    UserError for settings that name nothing.
    """

    reads: ClassVar[tuple[str, ...]] = ("policy", "executor", "chunk", "batch", "seed", "cache")
    has_runs: ClassVar[bool] = False
    peers: Sequence[str] = tuple(PEERS)
    python: Mapping[str, str | None] = field(default_factory=dict)
    models: Sequence[str] = ("30m",)
    dtypes: Sequence[str] = ("float32",)
    workloads: Sequence[str] = tuple(LOADS)
    repetitions: int = 3
    threads: int | None = None
    timeout: float = 900.0
    checkpoints: str | None = None

    def __post_init__(self) -> None:
        models = sorted(
            path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "auto"
        )
        _require_list("task.peers", self.peers, tuple(PEERS), may_be_empty=True)
        _require_list("task.models", self.models, models)
        _require_list("task.dtypes", self.dtypes, DTYPES)
        _require_list("task.workloads", self.workloads, tuple(LOADS))
        require_int("task.repetitions", self.repetitions, 1, "use a small number such as 3")
        require_number("task.timeout", self.timeout, above=0, fix="use seconds such as 900")
        self._check_interpreters()
        require_threads("task.threads", self.threads)

    def check(self, cfg: DictConfig) -> None:
        """Refuse models, policies and executors that can't be compared."""
        longest = max(LOADS[name].total_len for name in self.workloads)
        batch = require_int(
            "batch", cfg.batch, 1, "use the number of sequences to serve at a time, such as 8"
        )
        require_int(
            "chunk",
            cfg.chunk,
            batch,
            f"use tokens of one iteration from batch={batch}, such as 256",
        )
        require_int(
            "cache.block_size", cfg.cache.block_size, 1, "use a number of tokens such as 16"
        )
        build(cfg.policy).validate(batch, longest)
        for name in self.models:
            spec = load_option("model", name)
            require_llama(spec)
            if longest > spec.max_position:
                raise UserError(
                    f"task.models: {name} ends at {spec.max_position} tokens, {longest} are "
                    "needed; drop it"
                )
        _check_executor(cfg)
        if self.checkpoints is not None:
            make_folder(Path(self.checkpoints), "task.checkpoints")

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Measure, print, write peers.parquet, peers.csv and repetitions.csv, and log them."""
        tracker: Tracker = build(cfg.tracking)
        place.run_dir.mkdir(parents=True, exist_ok=True)
        conditions = self._conditions(cfg)
        _announce(place.name, conditions)
        engines = self._engines(cfg)
        tables: list[pd.DataFrame] = []
        repetitions: list[dict[str, Any]] = []
        with (
            tracker.run(
                name=place.name,
                group=place.group,
                job_type="peers",
                tags=self._tags(),
                config={"task": "peers", "settings": resolved(cfg)},
            ) as tracked,
            self._folder() as folder,
        ):
            for subject in self._subjects(Path(folder), int(cfg.seed)):
                outcomes = self._measured(engines, subject, conditions, place.run_dir)
                tables.append(table_of(outcomes, subject))
                repetitions += _repetitions(outcomes, subject)
                # Written at once: a later model may be interrupted.
                table = _write(
                    place.run_dir,
                    pd.concat(tables, ignore_index=True),
                    repetitions,
                    conditions,
                    cfg,
                )
            tracked.log_summary(_summary(table))
            tracked.log_tables(place.run_dir)
        print_table(table)
        console.print_place("results", place.run_dir)
        failed = table[(table.peer == OURS) & (table.error != "")]
        if len(failed):
            raise RunError(
                f"the lab's own engine failed: {failed.error.iloc[0]}; see "
                f"{place.run_dir / 'workers'}"
            )

    def _check_interpreters(self) -> None:
        for peer, python in self.python.items():
            require_one_of("task.python", peer, PEERS)
            if python is not None and not os.access(python, os.X_OK):
                raise UserError(
                    f"task.python.{peer}={python} can't be run; name the interpreter of the "
                    "environment that has "
                    f"{peer}, such as /path/to/env/bin/python, or null for this one"
                )

    def _engines(self, cfg: DictConfig) -> list[tuple[Engine, str]]:
        """Ours first, then every variant of the peers, each with its interpreter."""
        nodes = {
            name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("policy", "executor")
        }
        options = {**nodes, "block_size": cfg.cache.block_size}
        policy = build(cfg.policy)
        variant = policy.name if policy.budget is None else f"{policy.name} chunk={policy.budget}"
        peers = [
            (engine, self.python.get(peer) or sys.executable)
            for peer in self.peers
            for engine in PEERS[peer]
        ]
        return [(our_engine(variant, options), sys.executable), *peers]

    def _conditions(self, cfg: DictConfig) -> Conditions:
        from sarathi_lab.executor.torch.device import num_threads

        return Conditions(
            num_threads(self.threads),
            cfg.batch,
            cfg.chunk,
            cfg.seed,
            self.repetitions,
            self.timeout,
        )

    def _folder(self) -> AbstractContextManager[str]:
        if self.checkpoints is not None:
            return nullcontext(self.checkpoints)
        return tempfile.TemporaryDirectory(prefix="sarathi-peers-")

    def _subjects(self, folder: Path, seed: int) -> list[Subject]:
        specs = {name: load_option("model", name) for name in self.models}
        places = {name: ensure_checkpoint(spec, folder, seed) for name, spec in specs.items()}
        return [
            _subject(specs[name], places[name], dtype)
            for name in self.models
            for dtype in self.dtypes
        ]

    def _measured(
        self,
        engines: Sequence[tuple[Engine, str]],
        subject: Subject,
        conditions: Conditions,
        run_dir: Path,
    ) -> list[Outcome]:
        out = console.console()
        out.print(f"  {subject.model} in {subject.dtype}")
        loads = [LOADS[name] for name in self.workloads]
        num_runs = len(engines) * len(loads) * (self.repetitions + 1)
        with console.progress_of("measuring", num_runs, "runs") as advance:
            return measure(
                engines,
                subject,
                loads,
                conditions,
                logs=run_dir / "workers",
                own_python=sys.executable,
                say=lambda line: out.print(f"    {line}", soft_wrap=True),
                advance=advance,
            )

    def _tags(self) -> list[str]:
        return ["peers", *self.models, *self.dtypes]


def _require_list(
    name: str, values: object, valid: Sequence[str], *, may_be_empty: bool = False
) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str) or not (values or may_be_empty):
        raise UserError(f"{name}={values} is not a list of names; write {name}=[{valid[0]}]")
    for value in values:
        require_one_of(name, value, valid)
    if len(set(values)) < len(values):
        raise UserError(f"{name}={list(values)} names one twice; drop it")


def _check_executor(cfg: DictConfig) -> None:
    """Peers run on the CPU, in the dtypes of the task."""
    if "device" not in cfg.executor:
        raise UserError(
            "executor=simulated serves no requests; use executor=torch to be compared with engines"
        )
    if cfg.executor.device not in ("auto", "cpu"):
        raise UserError(
            f"executor.device={cfg.executor.device} has no effect: task=peers compares on the "
            "CPU; drop it"
        )
    if cfg.executor.dtype != "auto":
        raise UserError(
            f"executor.dtype={cfg.executor.dtype} has no effect on task=peers; use "
            f"task.dtypes=[{cfg.executor.dtype}]"
        )
    if cfg.executor.threads is not None:
        raise UserError(
            f"executor.threads={cfg.executor.threads} has no effect on task=peers; use "
            "task.threads="
            f"{cfg.executor.threads}, which all engines take"
        )
    if cfg.cache.num_blocks is not None:
        raise UserError(
            f"cache.num_blocks={cfg.cache.num_blocks} has no effect on task=peers: caches hold "
            "a whole batch; drop it"
        )
    if cfg.cache.dtype != "auto":
        raise UserError(
            f"cache.dtype={cfg.cache.dtype} has no effect on task=peers: all engines keep the "
            "model's own type; drop it"
        )
    build(cfg.executor)


def _subject(spec: ModelSpec, directory: Path, dtype: str) -> Subject:
    return Subject(
        spec.name, directory, spec.vocab_size, spec.kv_bytes_per_token(DTYPE_BYTES[dtype]), dtype
    )


def _announce(name: str, conditions: Conditions) -> None:
    out = console.console()
    out.print(f"\n{name}", style="bold")
    out.print(
        f"  on the CPU with {conditions.threads} threads, at most {conditions.batch} requests "
        "at a time, iterations "
        f"of {conditions.chunk} tokens; medians of {conditions.repetitions} repetitions in turns",
        soft_wrap=True,
    )


def _repetitions(outcomes: Sequence[Outcome], subject: Subject) -> list[dict[str, Any]]:
    return [
        {
            "peer": outcome.engine.peer,
            "variant": outcome.engine.variant,
            "model": subject.model,
            "dtype": subject.dtype,
            "workload": outcome.load.name,
            "repetition": repetition,
            "seconds": seconds,
        }
        for outcome in outcomes
        for repetition, seconds in enumerate(outcome.seconds)
    ]


def _write(
    folder: Path,
    table: pd.DataFrame,
    repetitions: list[dict[str, Any]],
    conditions: Conditions,
    cfg: DictConfig,
) -> pd.DataFrame:
    """`table` with what holds for all of it, as written."""
    import torch

    from sarathi_lab.executor.torch.device import device_description

    device = device_description(torch.device("cpu")).rpartition(",")[0] + ")"
    table = table.assign(
        device=device,
        threads=conditions.threads,
        batch=conditions.batch,
        chunk=conditions.chunk,
        git_commit=provenance()["git_commit"],
    )
    table.to_parquet(folder / "peers.parquet", index=False)
    table.to_csv(folder / "peers.csv", index=False)
    pd.DataFrame(repetitions).to_csv(folder / "repetitions.csv", index=False)
    OmegaConf.save(OmegaConf.create(resolved(cfg)), folder / "config.yaml")
    return table


def _summary(table: pd.DataFrame) -> dict[str, float]:
    """`seconds/...`, `ratio/...` and `agreement/...` by engine, model, dtype and workload."""
    found: dict[str, float] = {}
    for row in table[table.error == ""].to_dict("records"):
        label = (
            f"{row['peer']} {row['variant']}".rstrip()
            + f", {row['model']} {row['dtype']} {row['workload']}"
        )
        found |= {f"{name}/{label}": float(row[name]) for name in ("seconds", "ratio", "agreement")}
    return found

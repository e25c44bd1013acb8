"""The task `peers`: other engines on the same model and the same requests as the lab's, side by
side.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import flag, number, whole
from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import RunError, UserError, require_int, require_list, require_one_of
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.paths import CONF, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch import device as devices
from sarathi_lab.model.spec import DTYPE_BYTES
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.peers import measure
from sarathi_lab.tasks.peers.checkpoint import ensure_checkpoint, require_llama
from sarathi_lab.tasks.peers.engines import OURS, PEERS, Engine, our_engine
from sarathi_lab.tasks.peers.measure import SCENARIOS, Conditions, Subject

DTYPES = ("float32", "bfloat16")  # that all engines have
LABELS = ["peer", "variant", "model", "dtype", "workload"]  # what tells engines and loads apart
WITHOUT_EFFECT = {  # settings, and what to do instead
    "executor.dtype": "; use task.dtypes=[{}]",
    "executor.threads": "; use task.threads={}, which all engines take",
    "cache.num_blocks": ": caches hold a whole batch; drop it",
    "cache.dtype": ": all engines keep the model's own type; drop it",
}


@dataclass(frozen=True)
class Peers(Task):
    """Times `peers` and the lab on the scenarios `workloads` of `models` in `dtypes`, and compares
    greedy tokens.

    `python` names the interpreter of the environment that has a peer (None: this one). `timeout` is
    in seconds, for each answer. `checkpoints` keeps the models; None makes them anew. With
    `random_weights` every engine makes weights of its own, and tokens are not compared.
    """

    reads = ("policy", "executor", "device", "chunk", "batch", "seed", "cache")
    peers: Sequence[str] = tuple(PEERS)
    python: Mapping[str, str | None] = field(default_factory=dict)
    models: Sequence[str] = ("30m",)
    dtypes: Sequence[str] = ("float32",)
    workloads: Sequence[str] = ("A", "B")
    repetitions: int = whole(3, minimum=1, fix="use a small number such as 3")
    threads: int | None = None
    timeout: float = number(900.0, above=0, fix="use seconds such as 900")
    checkpoints: str | None = None
    random_weights: bool = flag(False)

    def __post_init__(self) -> None:
        models = (path.stem for path in (CONF / "model").glob("*.yaml"))
        lists = {
            "peers": tuple(PEERS),
            "models": sorted(model for model in models if model != "auto"),
            "dtypes": DTYPES,
            "workloads": tuple(SCENARIOS),
        }
        for name, valid in lists.items():
            values, setting = getattr(self, name), f"task.{name}"
            if name == "peers" and values in ([], ()):
                continue  # the lab alone
            complaint = f"is not a list of names; write {setting}=[{valid[0]}]"
            each = partial(require_one_of, valid=valid)
            require_list(setting, values, complaint, each, twice="names one twice; drop it")
        super().__post_init__()
        for peer, python in self.python.items():
            require_one_of("task.python", peer, PEERS)
            if python is not None and not os.access(python, os.X_OK):
                raise UserError(
                    f"task.python.{peer}={python} can't be run; name the interpreter of the "
                    f"environment that has {peer}, such as /path/to/env/bin/python, or null for "
                    "this one"
                )
        devices.require_threads("task.threads", self.threads)

    def check(self, cfg: DictConfig) -> None:
        """Refuse models, policies and executors that can't be compared."""
        longest = max(SCENARIOS[name].total_len for name in self.workloads)
        sequences = "use the number of sequences to serve at a time, such as 8"
        batch = require_int("batch", cfg.batch, 1, sequences)
        tokens = f"use tokens of one iteration from batch={batch}, such as 256"
        require_int("chunk", cfg.chunk, batch, tokens)
        fix = "use a number of tokens such as 16"
        require_int("cache.block_size", cfg.cache.block_size, 1, fix)
        build(cfg.policy).validate(batch, longest)
        for name in self.models:
            spec = load_option("model", name)
            require_llama(spec)
            if longest > spec.max_position:
                raise UserError(
                    f"task.models: {name} ends at {spec.max_position} tokens, {longest} are "
                    "needed; drop it"
                )
        if "device" not in cfg.executor:
            raise UserError(
                "executor=simulated serves no requests; use executor=torch to be compared with "
                "engines"
            )
        devices.resolve_device(cfg.executor.device)
        for name, fix in WITHOUT_EFFECT.items():
            if (value := OmegaConf.select(cfg, name)) not in (None, "auto"):
                raise UserError(f"{name}={value} has no effect on task=peers{fix.format(value)}")
        build(cfg.executor)
        if self.checkpoints is not None:
            make_folder(Path(self.checkpoints), "task.checkpoints")

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The table of engines and scenarios, with every repetition behind it."""
        run_dir = make_folder(context.run_dir, "the run's folder")
        given = Conditions(
            devices.num_threads(self.threads),
            cfg.batch,
            cfg.chunk,
            cfg.seed,
            self.repetitions,
            self.timeout,
            str(devices.resolve_device(cfg.executor.device)),
        )
        where = f"on {given.device}"
        if given.device == "cpu":
            where = f"on the CPU with {given.threads} threads"
        console().print(f"\n{context.name}", style="bold")
        console().print(
            f"  {where}, at most {given.batch} requests at a time, iterations of {given.chunk} "
            f"tokens; medians of {given.repetitions} repetitions in turns",
            soft_wrap=True,
        )
        engines, tables = self._engines(cfg), []
        with self._folder() as folder:
            for subject in self._subjects(Path(folder), int(cfg.seed)):
                own = self._measured(engines, subject, given, run_dir).assign(
                    device=devices.device_description(torch.device(given.device), given.threads),
                    threads=given.threads,
                    batch=given.batch,
                    chunk=given.chunk,
                    git_commit=provenance()["git_commit"],
                )
                tables.append(own)
                # Written at once: a later model may be interrupted.
                whole = pd.concat(tables, ignore_index=True).drop(columns="runs")
                whole.to_csv(run_dir / "peers.csv", index=False)
        runs = pd.concat(tables)[[*LABELS, "runs"]].rename(columns={"runs": "seconds"})
        runs = runs.explode("seconds").dropna(subset="seconds").astype({"seconds": float})
        runs.insert(len(LABELS), "repetition", runs.groupby(LABELS, sort=False).cumcount())
        return Result(
            tables={"peers.parquet": whole, "peers": whole, "repetitions": runs},
            summary=_summary(whole),
            shown=list(_shown(whole)),
            tags=["peers", *self.models, *self.dtypes],
            error=_own_error(whole, run_dir),
        )

    def _engines(self, cfg: DictConfig) -> list[Engine]:
        """Ours first, then every variant of the peers."""
        nodes = {
            name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("policy", "executor")
        }
        policy = build(cfg.policy)
        variant = policy.name if policy.budget is None else f"{policy.name} chunk={policy.budget}"
        peers = [
            replace(engine, python=self.python.get(peer) or sys.executable)
            for peer in self.peers
            for engine in PEERS[peer]
        ]
        return [our_engine(variant, {**nodes, "block_size": cfg.cache.block_size}), *peers]

    def _folder(self) -> AbstractContextManager[str]:
        if self.checkpoints is not None:
            return nullcontext(self.checkpoints)
        return tempfile.TemporaryDirectory(prefix="sarathi-peers-")

    def _subjects(self, folder: Path, seed: int) -> Iterator[Subject]:
        for name in self.models:
            spec, has_weights = load_option("model", name), not self.random_weights
            directory = ensure_checkpoint(spec, folder, seed, has_weights=has_weights)
            for dtype in self.dtypes:
                kv_bytes = spec.kv_bytes_per_token(DTYPE_BYTES[dtype])
                yield Subject(name, directory, spec.vocab_size, kv_bytes, dtype, has_weights)

    def _measured(
        self, engines: Sequence[Engine], subject: Subject, given: Conditions, run_dir: Path
    ) -> pd.DataFrame:
        out, logs = console(), run_dir / "workers"
        out.print(f"  {subject.model} in {subject.dtype}")
        scenarios = [SCENARIOS[name] for name in self.workloads]
        num_runs = len(engines) * len(scenarios) * (self.repetitions + 1)

        def log(line: str) -> None:
            out.print(f"    {line}", soft_wrap=True)

        with progress_of("measuring", num_runs, "runs") as progress:
            work = (engines, subject, scenarios, given, logs, log, progress)
            return measure.table_of(measure.Comparison(*work).measure(), subject)


def _own_error(table: pd.DataFrame, run_dir: Path) -> RunError | None:
    failed = table[(table.peer == OURS) & (table.error != "")]
    if failed.empty:
        return None
    return RunError(
        f"the lab's own engine failed: {failed.error.iloc[0]}; see {run_dir / 'workers'}"
    )


def _summary(table: pd.DataFrame) -> dict[str, float]:
    """`seconds/...`, `ratio/...` and `agreement/...` by engine, model, dtype and workload."""
    return {
        f"{name}/{_engine(row)}, {row['model']} {row['dtype']} {row['workload']}": float(row[name])
        for row in table[table.error == ""].to_dict("records")
        for name in ("seconds", "ratio", "agreement")
        if not pd.isna(row[name])
    }


# -- what people see -------------------------------------------------------------------------------

TEXT = ("engine", "model", "dtype", "load")


def _shown(table: pd.DataFrame) -> Iterator[Shown | str]:
    """A line per engine and scenario, what failed, and engines whose tokens should have been ours
    and are not.
    """
    whole = table[table.error == ""].sort_values(["model", "dtype", "workload"], kind="stable")
    title = "Seconds for all requests of a load (x ours: above 1, ours is faster)"
    yield Shown([_cells(row) for row in whole.to_dict("records")], TEXT, title=title)
    failed = table[table.error != ""]
    for row in failed.drop_duplicates(["peer", "variant", "model", "dtype", "error"]).to_dict(
        "records"
    ):
        yield f"  {_engine(row)}, {row['model']} {row['dtype']}: {row['error']}"
    for row in table[(table.dtype == "float32") & (table.agreement < 1)].to_dict("records"):
        where = f"{row['model']} {row['workload']} in float32"
        yield f"  {_engine(row)}, {where}: {1 - row['agreement']:.1%} of its tokens are not ours"


def _cells(row: Mapping[Any, Any]) -> dict[str, str]:
    agreement = "-" if pd.isna(row["agreement"]) else f"{row['agreement']:.1%}"
    return {
        "engine": _engine(row),
        "model": row["model"],
        "dtype": row["dtype"],
        "load": row["workload"],
        "median\n[s]": f"{row['seconds']:.2f}",
        "q20-q80\n[s]": f"{row['q20']:.2f}-{row['q80']:.2f}",
        "repeti-\ntions": str(row["repetitions"]),
        "tokens/s": f"{row['throughput']:.0f}",
        "x ours": "-" if pd.isna(row["ratio"]) else f"{row['ratio']:.2f}x",
        "same\ntokens": "yes" if row["agreement"] == 1 else agreement,
    }


def _engine(row: Mapping[Any, Any]) -> str:
    return f"{row['peer']} {row['variant']}".rstrip()

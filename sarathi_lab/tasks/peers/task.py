"""The task `peers`: other engines beside the lab's, on the same model and the same requests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import flag, listed, number, one_of, whole
from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import RunError, UserError, require_int, require_one_of
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.paths import CONF, make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.torch import device as devices
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.peers import engines
from sarathi_lab.tasks.peers.engines import OURS, PEERS, Engine, our_engine
from sarathi_lab.tasks.peers.measure import SCENARIOS, Comparison, Subject, table_of

PREFIX = "sarathi-peers-"
NODES = ("policy", "executor")  # that our own worker builds
MODELS = sorted(path.stem for path in CONF.glob("model/*.yaml") if path.stem != "auto")
LABELS = ["peer", "variant", "model", "dtype", "workload"]  # what tells engines and loads apart
WITHOUT_EFFECT = {  # settings, and what to do instead
    "executor.dtype": "; use task.dtypes=[{}]",
    "executor.threads": "; use task.threads={}, which all engines take",
    "cache.num_blocks": ": caches hold a whole batch; drop it",
    "cache.dtype": ": all engines keep the model's own type; drop it",
}


def _some(name: str, default: Iterable[str], known: Iterable[str], **rest: Any) -> Any:
    """A field that holds a list of `known` names."""
    valid = tuple(known)
    each = partial(require_one_of, valid=valid)
    complaint = f"is not a list of names; write task.{name}=[{valid[0]}]"
    twice = "names one twice; drop it"
    return listed(tuple(default), each=each, complaint=complaint, twice=twice, **rest)


@dataclass(frozen=True)
class Peers(Task):
    """Times `peers` and the lab on the scenarios `workloads` of `models` in `dtypes`, and compares
    greedy tokens; its settings: `conf/task/peers.yaml`.
    """

    reads = ("policy", "executor", "device", "chunk", "batch", "seed", "cache")
    peers: Sequence[str] = _some("peers", PEERS, PEERS, may_be_empty=True)
    python: Mapping[str, str | None] = field(default_factory=dict)
    models: Sequence[str] = _some("models", ["30m"], MODELS)
    dtypes: Sequence[str] = _some("dtypes", ["float32"], engines.ALL)
    workloads: Sequence[str] = _some("workloads", ["A", "B"], SCENARIOS)
    repetitions: int = whole(3, minimum=1, fix="use a small number such as 3")
    threads: int | None = None
    isa: str = one_of("auto", valid=("auto", "avx2"))
    timeout: float = number(900.0, above=0, fix="use seconds such as 900")
    checkpoints: str | None = None
    random_weights: bool = flag(False)

    def __post_init__(self) -> None:
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
        fix = "use the number of sequences to serve at a time, such as 8"
        batch = require_int("batch", cfg.batch, 1, fix)
        fix = f"use tokens of one iteration from batch={batch}, such as 256"
        require_int("chunk", cfg.chunk, batch, fix)
        fix = "use a number of tokens such as 16"
        require_int("cache.block_size", cfg.cache.block_size, 1, fix)
        build(cfg.policy).validate(batch, longest)
        for name in self.models:
            spec = load_option("model", name)
            engines.require_llama(spec)
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
        run_dir = make_folder(context.run_dir, "the run's folder")
        device = devices.resolve_device(cfg.executor.device)
        given: dict[str, Any] = {
            "threads": devices.num_threads(self.threads),
            **{name: int(cfg[name]) for name in ("batch", "chunk", "seed")},
            "repetitions": self.repetitions,
            "timeout": self.timeout,
            "device": str(device),
            "is_avx2": self.isa == "avx2",
        }
        out, threads = console(), given["threads"]
        isa = None if self.isa == "auto" else f"all limited to {self.isa}"
        where = f"on the CPU, threads: {threads}" if device.type == "cpu" else f"on {device}"
        sizes = f"at most {cfg.batch} requests at a time, iterations of {cfg.chunk} tokens"
        turns = f"medians of {self.repetitions} repetitions in turns"
        out.print(f"\n{context.name}", style="bold")
        out.print(f"  {where}, {sizes}; {turns}", soft_wrap=True)
        engines, tables = self._engines(cfg), []
        kept = self.checkpoints
        with nullcontext(kept) if kept else TemporaryDirectory(prefix=PREFIX) as folder:
            for subject in self._subjects(Path(folder), int(cfg.seed)):
                out.print(f"  {subject.model} in {subject.dtype}")
                own = self._measured(engines, subject, given, run_dir / "workers").assign(
                    device=devices.device_description(device, threads, isa),
                    threads=threads,
                    batch=cfg.batch,
                    chunk=cfg.chunk,
                    git_commit=provenance()["git_commit"],
                )
                tables.append(own)
                # Written at once: a later model may be interrupted.
                table = pd.concat(tables, ignore_index=True).drop(columns="runs")
                table.to_csv(run_dir / "peers.csv", index=False)
        runs = pd.concat(tables)[[*LABELS, "runs"]].rename(columns={"runs": "seconds"})
        runs = runs.explode("seconds").dropna(subset="seconds").astype({"seconds": float})
        runs.insert(len(LABELS), "repetition", runs.groupby(LABELS, sort=False).cumcount())
        failure = next(iter(table[(table.peer == OURS) & (table.error != "")].error), "")
        why = f"the lab's own engine failed: {failure}; see {run_dir / 'workers'}"
        named = table.assign(engine=(table.peer + " " + table.variant).str.rstrip())
        return Result(
            tables={"peers.parquet": table, "peers": table, "repetitions": runs},
            summary={
                f"{name}/{row['engine']}, {row['model']} {row['dtype']} {row['workload']}": value
                for row in named[table.error == ""].to_dict("records")
                for name in ("seconds", "ratio", "agreement")
                if not pd.isna(value := row[name])
            },
            shown=list(_shown(named)),
            tags=["peers", *self.models, *self.dtypes],
            error=RunError(why) if failure else None,
        )

    def _engines(self, cfg: DictConfig) -> list[Engine]:
        """Ours first, then every variant of the peers."""
        options: dict[str, Any] = {
            name: OmegaConf.to_container(cfg[name], resolve=True) for name in NODES
        }
        options["block_size"] = cfg.cache.block_size
        if self.isa != "auto":
            options["executor"]["isa"] = self.isa
        policy = build(cfg.policy)
        variant = policy.name if policy.budget is None else f"{policy.name} chunk={policy.budget}"
        peers = [
            replace(engine, python=self.python.get(peer) or sys.executable)
            for peer in self.peers
            for engine in PEERS[peer]
        ]
        return [our_engine(variant, options), *peers]

    def _subjects(self, folder: Path, seed: int) -> Iterator[Subject]:
        for name in self.models:
            spec, has_weights = load_option("model", name), not self.random_weights
            directory = engines.ensure_checkpoint(spec, folder, seed, has_weights=has_weights)
            for dtype in self.dtypes:
                kv_bytes = spec.kv_bytes_per_token(devices.DTYPES[dtype].itemsize)
                yield Subject(name, directory, spec.vocab_size, kv_bytes, dtype, has_weights)

    def _measured(
        self, engines: Sequence[Engine], subject: Subject, given: dict[str, Any], logs: Path
    ) -> pd.DataFrame:
        scenarios = [SCENARIOS[name] for name in self.workloads]
        num_runs = len(engines) * len(scenarios) * (self.repetitions + 1)

        def log(line: str) -> None:
            console().print(f"    {line}", soft_wrap=True)

        with progress_of("measuring", num_runs, "runs") as progress:
            compared = Comparison(
                engines, subject, scenarios, logs, log, **given, progress=progress
            )
            return table_of(compared.measure(), subject)


def _shown(table: pd.DataFrame) -> Iterator[Shown | str]:
    """A line per engine and scenario, what failed, and whose tokens should be ours and are not."""
    whole = table[table.error == ""].sort_values(["model", "dtype", "workload"], kind="stable")
    title = "Seconds for all requests of a load (x ours: above 1, ours is faster)"
    left = ("engine", "model", "dtype", "load")
    yield Shown([_cells(row) for row in whole.to_dict("records")], left, title=title)
    failed = table[table.error != ""].drop_duplicates(["engine", "model", "dtype", "error"])
    for row in failed.to_dict("records"):
        yield f"  {row['engine']}, {row['model']} {row['dtype']}: {row['error']}"
    for row in table[(table.dtype == "float32") & (table.agreement < 1)].to_dict("records"):
        where = f"{row['engine']}, {row['model']} {row['workload']} in float32"
        yield f"  {where}: {1 - row['agreement']:.1%} of its tokens are not ours"


def _cells(row: Mapping[Any, Any]) -> dict[str, str]:
    agreement = "-" if pd.isna(row["agreement"]) else f"{row['agreement']:.1%}"
    return {
        **{name: row[name] for name in ("engine", "model", "dtype")},
        "load": row["workload"],
        "median\n[s]": f"{row['seconds']:.2f}",
        "q20-q80\n[s]": f"{row['q20']:.2f}-{row['q80']:.2f}",
        "repeti-\ntions": str(row["repetitions"]),
        "tokens/s": f"{row['throughput']:.0f}",
        "x ours": "-" if pd.isna(row["ratio"]) else f"{row['ratio']:.2f}x",
        "same\ntokens": "yes" if row["agreement"] == 1 else agreement,
    }

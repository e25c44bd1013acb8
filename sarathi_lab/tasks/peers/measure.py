"""Runs several engines on the same requests in turns, and makes the table of their times and
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.tasks.peers.engines import OURS, Engine, environment_of
from sarathi_lab.tasks.peers.loads import Load
from sarathi_lab.tasks.peers.process import Worker, WorkerError

# Threads of the last engine go on spinning for a while before they sleep (vLLM's for a second), and
# would take the next one's cores.
SETTLE = 1.5
NOT_INSTALLED = "not installed"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Conditions:
    """What is the same for all engines: sizes in tokens and sequences, `timeout` in seconds for
    each answer.
    """

    threads: int
    batch: int
    chunk: int
    seed: int
    repetitions: int
    timeout: float


@dataclass
class Outcome:
    """What one engine did with one load."""

    engine: Engine
    load: Load
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] | None = None
    error: str = ""


@dataclass(frozen=True)
class Subject:
    """One model in one dtype, as files that all engines read."""

    model: str
    directory: Path
    vocab_size: int
    kv_bytes_per_token: int
    dtype: str


def measure(
    engines: Sequence[tuple[Engine, str]],
    subject: Subject,
    loads: Sequence[Load],
    conditions: Conditions,
    logs: Path,
    own_python: str,
    say: Say,
    advance: Callable[[int], None] = lambda num_runs: None,
) -> list[Outcome]:
    """Load every engine (with the interpreter beside it), then run them in turns; one outcome per
    engine and load.

    All stay loaded, so that a machine whose speed changes is slow for all. An engine that fails is
    out from there on. `advance` is told of every run, done or left out.
    """
    outcomes = [Outcome(engine, load) for load in loads for engine, _ in engines]
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine, python in engines:
            own = [outcome for outcome in outcomes if outcome.engine is engine]
            if not engine.is_installed(python):
                _fail(own, NOT_INSTALLED)
                say(f"{engine.name}: not installed for {python} (pip install {engine.install})")
                continue
            log = logs / f"{engine.name.replace(' ', '-')}-{subject.model}-{subject.dtype}.log"
            command = [python, str(engine.script)]
            worker = Worker(command, environment_of(python, own_python, conditions.threads), log)
            stack.callback(worker.close)
            if _load(
                worker, own, _settings(engine, subject, loads, conditions), conditions.timeout, say
            ):
                workers[engine.name] = worker
        for load in loads:
            _take_turns(workers, outcomes, load, subject, conditions, say, advance)
    return outcomes


def table_of(outcomes: Sequence[Outcome], subject: Subject) -> pd.DataFrame:
    """A row per outcome.

    Seconds are medians, `throughput` is prompt and output tokens over them, `ratio` they over ours,
    and `agreement` the share of tokens like ours.
    """
    ours = {outcome.load.name: outcome for outcome in outcomes if outcome.engine.peer == OURS}
    rows = [_row(outcome, subject, ours.get(outcome.load.name)) for outcome in outcomes]
    return pd.DataFrame(rows)


def agreement(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of equal tokens at equal places of equally long outputs."""
    return float(np.mean(np.asarray(tokens) == np.asarray(others)))


def _settings(
    engine: Engine, subject: Subject, loads: Sequence[Load], conditions: Conditions
) -> Mapping[str, Any]:
    longest = max(load.total_len for load in loads)
    kv_bytes = conditions.batch * (longest + 128) * subject.kv_bytes_per_token
    return {
        "op": "load",
        "model_dir": str(subject.directory.absolute()),
        "dtype": subject.dtype,
        "threads": conditions.threads,
        "batch": conditions.batch,
        "chunk": conditions.chunk,
        "longest": longest,
        "kv_gib": -(-kv_bytes // 2**30),
        **engine.options,
    }


def _load(
    worker: Worker, own: Sequence[Outcome], settings: Mapping[str, Any], timeout: float, say: Say
) -> bool:
    name = own[0].engine.name
    start = time.monotonic()
    try:
        version = str(worker.ask(settings, timeout)["version"])
    except WorkerError as error:
        worker.kill()
        _fail(own, str(error))
        say(f"{name}: {error}")
        return False
    for outcome in own:
        outcome.version = version
    say(f"{name}: {version}, loaded in {time.monotonic() - start:.0f} s")
    return True


def _take_turns(
    workers: dict[str, Worker],
    outcomes: Sequence[Outcome],
    load: Load,
    subject: Subject,
    conditions: Conditions,
    say: Say,
    advance: Callable[[int], None],
) -> None:
    """One round to warm up, which counts for the tokens alone, then the repetitions."""
    prompts = load.prompts(subject.vocab_size, conditions.seed)
    message = {"op": "run", "prompts": prompts, "output_len": load.output_len}
    for repetition in range(conditions.repetitions + 1):
        for outcome in (each for each in outcomes if each.load is load):
            advance(1)
            worker = workers.get(outcome.engine.name)
            if worker is None:
                continue
            time.sleep(SETTLE)
            try:
                _take(outcome, worker.ask(message, conditions.timeout), is_warm_up=repetition == 0)
            except WorkerError as error:
                workers.pop(outcome.engine.name).kill()
                _fail(
                    [
                        each
                        for each in outcomes
                        if each.engine is outcome.engine and not each.seconds
                    ],
                    str(error),
                )
                outcome.error = str(error)
                say(f"{outcome.engine.name}: {error}")


def _take(outcome: Outcome, answer: Mapping[str, Any], *, is_warm_up: bool) -> None:
    """Keep an answer. Raises WorkerError unless it is the work that was asked for."""
    load, tokens = outcome.load, answer["tokens"]
    lengths = {len(ids) for ids in tokens}
    if len(tokens) != load.num_requests or lengths != {load.output_len}:
        raise WorkerError(
            f"answered {len(tokens)} requests with {sorted(lengths)} tokens, "
            f"{load.num_requests} with "
            f"{load.output_len} were asked for"
        )
    if outcome.tokens is None:
        outcome.tokens = tokens
    if not is_warm_up:
        outcome.seconds.append(float(answer["seconds"]))


def _fail(outcomes: Sequence[Outcome], error: str) -> None:
    for outcome in outcomes:
        outcome.error = error


def _row(outcome: Outcome, subject: Subject, ours: Outcome | None) -> dict[str, Any]:
    seconds = (
        [] if outcome.error else outcome.seconds
    )  # what an engine did before it failed is not compared
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8)) if seconds else [float("nan")] * 3
    is_comparable = bool(seconds) and ours is not None and not ours.error
    return {
        "peer": outcome.engine.peer,
        "variant": outcome.engine.variant,
        "version": outcome.version,
        "model": subject.model,
        "dtype": subject.dtype,
        "workload": outcome.load.name,
        "seconds": middle,
        "q20": low,
        "q80": high,
        "repetitions": len(seconds),
        "throughput": outcome.load.num_requests * outcome.load.total_len / middle,
        "ratio": middle / np.median(ours.seconds) if is_comparable and ours else float("nan"),
        "agreement": agreement(outcome.tokens or [], ours.tokens or [])
        if is_comparable and ours
        else float("nan"),
        "error": outcome.error,
    }

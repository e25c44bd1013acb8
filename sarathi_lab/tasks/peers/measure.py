"""Runs several engines on the same requests, and makes the table of their times and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.tasks.peers.engines import OURS, Engine, Worker, WorkerError, environment_of
from sarathi_lab.workload.base import random_prompt

# Threads of the last engine go on spinning for a while before they sleep (vLLM's for a second), and
# would take the next one's cores.
SETTLE = 1.5
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Scenario:
    """What all engines are asked for: `num_requests` prompts of `prompt_len` seeded random tokens,
    all there at the start, each answered by exactly `output_len`.
    """

    name: str
    num_requests: int
    prompt_len: int
    output_len: int

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.output_len

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        sizes = (self.prompt_len, vocab_size, seed)
        found = (random_prompt(i, *sizes) for i in range(self.num_requests))
        return [prompt.tolist() for prompt in found if prompt is not None]


# "gpu" is the campaign's.
SIZES = {"A": (16, 512, 64), "B": (8, 1024, 16), "gpu": (32, 960, 64), "dry": (2, 24, 4)}
SCENARIOS = {name: Scenario(name, *sizes) for name, sizes in SIZES.items()}


@dataclass(frozen=True)
class Subject:
    """A model in a dtype, as files; without weights, each engine makes random ones of its own."""

    model: str
    directory: Path
    vocab_size: int
    kv_bytes_per_token: int
    dtype: str
    has_weights: bool = True


@dataclass
class Outcome:
    """What one engine did with one scenario."""

    engine: Engine
    scenario: Scenario
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] | None = None
    error: str = ""


@dataclass
class Comparison:
    """Engines at work on `scenarios` with one model; outcomes are there from the start.

    `timeout` is in seconds for each answer, `device` as torch names it. `log` is told lines,
    `progress` of every run, done or left out.
    """

    engines: Sequence[Engine]
    subject: Subject
    scenarios: Sequence[Scenario]
    logs: Path
    log: Callable[[str], None]
    threads: int
    batch: int
    chunk: int
    seed: int
    repetitions: int
    timeout: float
    device: str = "cpu"
    is_avx2: bool = False  # whether all are limited to AVX2
    progress: Callable[[int], None] = lambda num_runs: None

    def __post_init__(self) -> None:
        self.outcomes = [Outcome(e, scenario) for scenario in self.scenarios for e in self.engines]

    def measure(self) -> list[Outcome]:
        """Load the engines and run them; one that fails is out from there on.

        On a CPU all stay loaded and take turns, so that a machine whose speed changes is slow for
        all. On a GPU, whose memory they would share, they come one after the other.
        """
        each = [[engine] for engine in self.engines]
        for engines in [self.engines] if self.device == "cpu" else each:
            with ExitStack() as stack:
                workers = {engine.name: self._load(engine, stack) for engine in engines}
                for scenario in self.scenarios:
                    self._take_turns(workers, scenario)
        return self.outcomes

    def _load(self, engine: Engine, stack: ExitStack) -> Worker | None:
        name, subject = engine.name, self.subject
        if not engine.is_installed():
            self._fail(engine, NOT_INSTALLED)
            self.log(f"{name}: not installed for {engine.python} (pip install {engine.install})")
            return None
        if (kind := self.device.partition(":")[0]) not in engine.devices:
            self._fail(engine, f"installed; not run on {kind} here")
            return None
        if subject.dtype not in engine.dtypes:
            self._fail(engine, f"installed; not run in {subject.dtype} here")
            return None
        if self.is_avx2 and engine.avx2 is None:
            self._fail(engine, "installed; not known to keep to AVX2 where there is more")
            return None
        path = self.logs / f"{name.replace(' ', '-')}-{subject.model}-{subject.dtype}.log"
        environment = environment_of(engine.python, self.device, self.threads)
        if self.is_avx2:
            environment |= engine.avx2 or {}
        worker = Worker([engine.python, str(engine.script)], environment, path)
        stack.callback(worker.close)
        longest = max(scenario.total_len for scenario in self.scenarios)
        kv_bytes = self.batch * (longest + 128) * subject.kv_bytes_per_token
        message = {
            "op": "load",
            "model_dir": str(subject.directory.absolute()),
            "has_weights": subject.has_weights,
            "dtype": subject.dtype,
            "device": self.device,
            "threads": self.threads,
            "batch": self.batch,
            "chunk": self.chunk,
            "longest": longest,
            "kv_gib": -(-kv_bytes // 2**30),
            **engine.options,
        }
        start = time.monotonic()
        try:
            version = str(worker.ask(message, self.timeout)["version"])
        except WorkerError as error:
            worker.kill()
            self._fail(engine, str(error))
            self.log(f"{name}: {error}")
            return None
        for outcome in self.outcomes:
            if outcome.engine is engine:
                outcome.version = version
        self.log(f"{name}: {version}, loaded in {time.monotonic() - start:.0f} s")
        return worker

    def _take_turns(self, workers: dict[str, Worker | None], scenario: Scenario) -> None:
        """One round to warm up, which counts for the tokens alone, then the repetitions."""
        prompts = scenario.prompts(self.subject.vocab_size, self.seed)
        message = {"op": "run", "prompts": prompts, "output_len": scenario.output_len}
        own = [outcome for outcome in self.outcomes if outcome.scenario is scenario]
        mine = [outcome for outcome in own if outcome.engine.name in workers]
        for repetition in range(self.repetitions + 1):
            for outcome in mine:
                self.progress(1)
                engine = outcome.engine
                worker = workers[engine.name]
                if worker is None:
                    continue
                if self.device == "cpu":
                    time.sleep(SETTLE)
                try:
                    answer = worker.ask(message, self.timeout)
                    _take(outcome, answer, is_warm_up=repetition == 0)
                except WorkerError as error:
                    worker.kill()
                    workers[engine.name] = None
                    outcome.error = str(error)
                    self._fail(engine, str(error))
                    self.log(f"{engine.name}: {error}")

    def _fail(self, engine: Engine, error: str) -> None:
        """Of the engine, whatever it has not finished."""
        for outcome in self.outcomes:
            if outcome.engine is engine and not outcome.seconds:
                outcome.error = error


def _take(outcome: Outcome, answer: dict[str, Any], *, is_warm_up: bool) -> None:
    """Keep an answer. Raises WorkerError unless it is the work that was asked for."""
    scenario, tokens = outcome.scenario, answer["tokens"]
    lengths = {len(ids) for ids in tokens}
    if len(tokens) != scenario.num_requests or lengths != {scenario.output_len}:
        raise WorkerError(
            f"answered {len(tokens)} requests with {sorted(lengths)} tokens, "
            f"{scenario.num_requests} with {scenario.output_len} were asked for"
        )
    if outcome.tokens is None:
        outcome.tokens = tokens
    if not is_warm_up:
        outcome.seconds.append(float(answer["seconds"]))


def table_of(outcomes: Sequence[Outcome], subject: Subject) -> pd.DataFrame:
    """A row per outcome, with `runs`, the seconds of its repetitions.

    Seconds are medians, `throughput` is prompt and output tokens over them, `ratio` they over ours,
    and `agreement` the share of tokens like ours. What failed has none of them.
    """
    ours = {own.scenario.name: own for own in outcomes if own.engine.peer == OURS}
    return pd.DataFrame([_row(own, subject, ours.get(own.scenario.name)) for own in outcomes])


def _row(outcome: Outcome, subject: Subject, ours: Outcome | None) -> dict[str, Any]:
    engine, scenario = outcome.engine, outcome.scenario
    seconds = [] if outcome.error else outcome.seconds
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8)) if seconds else [np.nan] * 3
    ratio = agreement = np.nan
    if seconds and ours is not None and not ours.error:
        ratio = middle / np.median(ours.seconds)
        if subject.has_weights:
            agreement = float(np.mean(np.asarray(outcome.tokens) == np.asarray(ours.tokens)))
    return {
        "peer": engine.peer,
        "variant": engine.variant,
        "version": outcome.version,
        "model": subject.model,
        "dtype": subject.dtype,
        "workload": scenario.name,
        "seconds": middle,
        "q20": low,
        "q80": high,
        "repetitions": len(seconds),
        "throughput": scenario.num_requests * scenario.total_len / middle,
        "ratio": ratio,
        "agreement": agreement,
        "error": outcome.error,
        "runs": outcome.seconds,
    }

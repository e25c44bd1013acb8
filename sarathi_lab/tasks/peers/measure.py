"""Runs several engines on the same requests, and makes the table of their times and tokens."""

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
from sarathi_lab.tasks.peers.process import Worker, WorkerError
from sarathi_lab.tasks.peers.scenarios import Scenario

# Threads of the last engine go on spinning for a while before they sleep (vLLM's for a second), and
# would take the next one's cores.
SETTLE = 1.5
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Conditions:
    """What is the same for all engines: sizes in tokens and sequences, `timeout` in seconds for
    each answer, `device` as torch names it.
    """

    threads: int
    batch: int
    chunk: int
    seed: int
    repetitions: int
    timeout: float
    device: str = "cpu"


@dataclass(frozen=True)
class Subject:
    """One model in one dtype, as files that all engines read; without weights, each makes random
    ones of its own and their tokens are not compared.
    """

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

    `log` is told lines, `progress` of every run, done or left out.
    """

    engines: Sequence[Engine]
    subject: Subject
    scenarios: Sequence[Scenario]
    conditions: Conditions
    logs: Path
    log: Callable[[str], None]
    progress: Callable[[int], None] = lambda num_runs: None

    def __post_init__(self) -> None:
        self.outcomes = [
            Outcome(engine, scenario) for scenario in self.scenarios for engine in self.engines
        ]

    def measure(self) -> list[Outcome]:
        """Load the engines and run them; one that fails is out from there on.

        On a CPU all stay loaded and take turns, so that a machine whose speed changes is slow for
        all. On a GPU, whose memory they would share, they come one after the other.
        """
        together = (
            [self.engines] if self.conditions.device == "cpu" else [[e] for e in self.engines]
        )
        for engines in together:
            with ExitStack() as stack:
                workers = {engine.name: self._load(engine, stack) for engine in engines}
                for scenario in self.scenarios:
                    self._take_turns(workers, scenario)
        return self.outcomes

    def _load(self, engine: Engine, stack: ExitStack) -> Worker | None:
        own = [outcome for outcome in self.outcomes if outcome.engine is engine]
        name, device = engine.name, self.conditions.device
        if not engine.is_installed():
            _fail(own, NOT_INSTALLED)
            self.log(f"{name}: not installed for {engine.python} (pip install {engine.install})")
            return None
        if (kind := device.partition(":")[0]) not in engine.devices:
            _fail(own, f"installed; not run on {kind} here")
            return None
        path = self.logs / f"{name.replace(' ', '-')}-{self.subject.model}-{self.subject.dtype}.log"
        environment = environment_of(engine.python, device, self.conditions.threads)
        worker = Worker([engine.python, str(engine.script)], environment, path)
        stack.callback(worker.close)
        start = time.monotonic()
        try:
            version = str(worker.ask(self._settings(engine), self.conditions.timeout)["version"])
        except WorkerError as error:
            worker.kill()
            _fail(own, str(error))
            self.log(f"{name}: {error}")
            return None
        for outcome in own:
            outcome.version = version
        self.log(f"{name}: {version}, loaded in {time.monotonic() - start:.0f} s")
        return worker

    def _settings(self, engine: Engine) -> Mapping[str, Any]:
        longest = max(scenario.total_len for scenario in self.scenarios)
        kv_bytes = self.conditions.batch * (longest + 128) * self.subject.kv_bytes_per_token
        return {
            "op": "load",
            "model_dir": str(self.subject.directory.absolute()),
            "has_weights": self.subject.has_weights,
            "dtype": self.subject.dtype,
            "device": self.conditions.device,
            "threads": self.conditions.threads,
            "batch": self.conditions.batch,
            "chunk": self.conditions.chunk,
            "longest": longest,
            "kv_gib": -(-kv_bytes // 2**30),
            **engine.options,
        }

    def _take_turns(self, workers: dict[str, Worker | None], scenario: Scenario) -> None:
        """One round to warm up, which counts for the tokens alone, then the repetitions."""
        prompts = scenario.prompts(self.subject.vocab_size, self.conditions.seed)
        message = {"op": "run", "prompts": prompts, "output_len": scenario.output_len}
        mine = [
            outcome
            for outcome in self.outcomes
            if outcome.scenario is scenario and outcome.engine.name in workers
        ]
        for repetition in range(self.conditions.repetitions + 1):
            for outcome in mine:
                self.progress(1)
                worker = workers[outcome.engine.name]
                if worker is None:
                    continue
                if self.conditions.device == "cpu":
                    time.sleep(SETTLE)
                try:
                    answer = worker.ask(message, self.conditions.timeout)
                    _take(outcome, answer, is_warm_up=repetition == 0)
                except WorkerError as error:
                    worker.kill()
                    workers[outcome.engine.name] = None
                    own = [o for o in self.outcomes if o.engine is outcome.engine]
                    _fail([outcome, *(o for o in own if not o.seconds)], str(error))
                    self.log(f"{outcome.engine.name}: {error}")


def _take(outcome: Outcome, answer: Mapping[str, Any], *, is_warm_up: bool) -> None:
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


def _fail(outcomes: Sequence[Outcome], error: str) -> None:
    for outcome in outcomes:
        outcome.error = error


def table_of(outcomes: Sequence[Outcome], subject: Subject) -> pd.DataFrame:
    """A row per outcome.

    Seconds are medians, `throughput` is prompt and output tokens over them, `ratio` they over ours,
    and `agreement` the share of tokens like ours. What failed has none of them.
    """
    ours = {outcome.scenario.name: outcome for outcome in outcomes if outcome.engine.peer == OURS}
    rows = [_row(outcome, subject, ours.get(outcome.scenario.name)) for outcome in outcomes]
    return pd.DataFrame(rows)


def _row(outcome: Outcome, subject: Subject, ours: Outcome | None) -> dict[str, Any]:
    seconds = [] if outcome.error else outcome.seconds
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8)) if seconds else [np.nan] * 3
    ratio = agreement = np.nan
    if seconds and ours is not None and not ours.error:
        ratio = middle / np.median(ours.seconds)
        if subject.has_weights:
            agreement = float(np.mean(np.asarray(outcome.tokens) == np.asarray(ours.tokens)))
    return {
        "peer": outcome.engine.peer,
        "variant": outcome.engine.variant,
        "version": outcome.version,
        "model": subject.model,
        "dtype": subject.dtype,
        "workload": outcome.scenario.name,
        "seconds": middle,
        "q20": low,
        "q80": high,
        "repetitions": len(seconds),
        "throughput": outcome.scenario.num_requests * outcome.scenario.total_len / middle,
        "ratio": ratio,
        "agreement": agreement,
        "error": outcome.error,
    }

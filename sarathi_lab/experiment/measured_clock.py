"""A clock that asks the device: batches are timed on the real executor, requests are served."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.backend import WARM_UP_TOKENS
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment.clock import THROUGHPUT, Clock, Estimate, Times, counted
from sarathi_lab.experiment.measured_cost import MeasuredCostModel
from sarathi_lab.experiment.scenario import Scenario, Served, serve
from sarathi_lab.results.intervals import summary

WARM_UP_DECODES = 4


class DeviceClock(Clock):
    """A device's: every batch and scenario is measured once in a round, the first of each kind
    after a warm-up that does not count.

    What cache or memory are too small for is not a number; `reason` says why.
    """

    cost: MeasuredCostModel

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        super().__init__(MeasuredCostModel(executor, seed=seed, say=self._leave_out))
        self.executor = executor
        self.reason: str | None = None
        self.runs: defaultdict[Scenario, list[Served]] = defaultdict(list)
        self._now: dict[Scenario, Served | None] = {}
        self._too_large: set[Scenario] = set()
        self._prepared: tuple[int, int | None, int] | None = None
        self._is_warm = False

    def start_round(self) -> None:
        """Serve anew whatever is asked for from now on."""
        self._now.clear()

    def start_unit(self) -> None:
        """Time batches anew whatever is asked for from now on."""
        self.cost.forget()

    def batch(self, *batches: Batch) -> Times:
        if not self._is_warm:
            self._is_warm = True
            super().batch(*batches)
            self.cost.forget()
        return super().batch(*batches)

    def request(self, scenario: Scenario) -> Times:
        """By counting batches: operations can't be told apart while requests are served."""
        return counted(self, scenario)

    def gain(self, scenario: Scenario) -> Estimate:
        return self.over(scenario.baseline, scenario, THROUGHPUT)

    def served(self, scenario: Scenario) -> Served | None:
        if scenario not in self._now:
            if not self.runs and not self._too_large:
                self._run(replace(scenario, num_decodes=WARM_UP_DECODES))
            self._now[scenario] = self._run(scenario)
            if (found := self._now[scenario]) is not None:
                self.runs[scenario].append(found)
        return self._now[scenario]

    def _run(self, scenario: Scenario) -> Served | None:
        if scenario in self._too_large:
            return None
        executor, reason = self.executor, "the cache is too small"
        sizes = {"num_blocks": executor.num_blocks, "block_size": executor.block_size}
        try:
            self._prepare(scenario)
            vocab_size = executor.model.spec.vocab_size
            if (found := serve(executor, scenario, **sizes, vocab_size=vocab_size)) is not None:
                return found
        except RunError as error:
            reason = str(error)
            while executor.num_in_flight:
                executor.collect()
        self._too_large.add(scenario)
        self._leave_out(f"{scenario}: {reason}")
        return None

    def _leave_out(self, text: str) -> None:
        self.reason = text.partition(": ")[2]

    def _prepare(self, scenario: Scenario) -> None:
        """Warm up for the scenario's batch, chunk and lengths, as the engine does before a run:
        graphs are recorded.
        """
        wanted = (scenario.batch_size, scenario.chunk, scenario.longest)
        if wanted != self._prepared:
            self.executor.warm_up(
                batch_size=scenario.batch_size,
                chunk_tokens=scenario.chunk or WARM_UP_TOKENS,
                longest=scenario.longest,
                is_fixed=scenario.chunk is not None,
            )
            self._prepared = wanted

    def serving_rows(self, model: str) -> list[dict[str, object]]:
        """One row per scenario and quantity: milliseconds a request, and the share of time that the
        device was idle.
        """
        rows: list[dict[str, object]] = []
        for scenario, runs in self.runs.items():
            labels = {
                "model": model,
                "policy": scenario.policy,
                "chunk": scenario.chunk,
                "prompt_len": scenario.prompt_len,
                "num_decodes": scenario.num_decodes,
                "batch": scenario.batch_size,
                "iterations": runs[0].num_iterations,
            }
            times = summary([1e3 * run.seconds_per_request for run in runs], "ms")
            idle = summary([run.idle_share for run in runs], "ratio")
            rows.append({**labels, "quantity": "time per request", **times})
            rows.append({**labels, "quantity": "idle share", **idle})
        return rows


WARM_UPS = 2


def sample(
    work: Callable[[], object], device: torch.device, seconds: float, most: int = 200
) -> list[float]:
    """Seconds of each repetition of `work`, for about `seconds` (at least 3, at most `most`
    repetitions).

    On a GPU they are launched without waits in between and timed by events on the device.
    """
    for _ in range(WARM_UPS):
        work()
    start = time.perf_counter()
    _once(work, device)
    first = time.perf_counter() - start
    repetitions = max(3, min(most, int(seconds / max(first, 1e-7))))
    if device.type != "cuda":
        return [_once(work, device) for _ in range(repetitions)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _once(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

"""The device's own clock: what figures ask for is run and served on the executor."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np

from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.torch.backend import WARM_UP_TOKENS
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment.clock import Clock, Estimate
from sarathi_lab.experiment.measured_cost import TOO_SMALL, MeasuredCostModel
from sarathi_lab.experiment.scenario import Scenario, Served, Times, serve
from sarathi_lab.experiment.work import WorkSum
from sarathi_lab.results import load
from sarathi_lab.results.intervals import summary

WARM_UP_DECODES = 4


class DeviceClock(Clock):
    """A device's: every batch and scenario is measured once in a round, the first of each kind
    after a warm-up that does not count; what cache or memory are too small for is not a number.
    """

    cost: MeasuredCostModel

    def __init__(self, executor: TorchExecutor) -> None:
        super().__init__(MeasuredCostModel(executor))
        self.executor = executor
        self.runs: defaultdict[Scenario, list[Served]] = defaultdict(list)
        self._now: dict[Scenario, Served | None] = {}
        self._too_large: set[Scenario] = set()
        self._prepared: dict[str, int] = {}
        self._is_warm = False

    def start_round(self) -> None:
        """Serve anew whatever is asked for from now on."""
        self._now.clear()

    def times(self, work: WorkSum) -> Times:
        if not self._is_warm:
            self._is_warm = True
            super().times(work)
            self.cost.forget()
        return super().times(work)

    def saving(self, alone: WorkSum, both: WorkSum, without: WorkSum) -> Estimate:
        """On a CPU the medians of turns: a difference of two times that were taken apart is what
        other processes did to one of them.
        """
        if not self.cost.is_shared:
            return super().saving(alone, both, without)
        batches = [batch for work in (alone, both, without) for batch in work.batches]
        whole, more, less = self.cost.alternated(batches).T
        return Estimate(float(np.median(whole))).over(Estimate(float(np.median(more - less))))

    def keys_read(self, work: WorkSum) -> float:
        placed = map(self.cost.placed, work.batches)
        return sum(math.nan if own is None else self.cost.probe.keys_read(own) for own in placed)

    def served(self, scenario: Scenario) -> Served | None:
        if scenario not in self._now:
            if not self.runs and not self._too_large:
                self._run(replace(scenario, num_decodes=WARM_UP_DECODES))
            self._now[scenario] = found = self._run(scenario)
            if found is not None:
                self.runs[scenario].append(found)
        return self._now[scenario]

    def _run(self, scenario: Scenario) -> Served | None:
        if scenario in self._too_large:
            return None
        executor, reason, found = self.executor, TOO_SMALL, None
        cache = {"num_blocks": executor.num_blocks, "block_size": executor.block_size}
        wanted = {"batch_size": scenario.batch_size, "longest": scenario.longest}
        wanted["chunk_tokens"] = scenario.chunk or WARM_UP_TOKENS
        wanted["max_tokens"] = scenario.chunk or scenario.longest + scenario.batch_size
        try:
            if wanted != self._prepared:  # as the engine does before a run: graphs are recorded
                executor.warm_up(**wanted)
                self._prepared = wanted
            found = serve(executor, scenario, **cache, vocab_size=self.cost.spec.vocab_size)
        except RunError as error:
            reason = str(error)
            while executor.num_in_flight:
                executor.collect()
        if found is None:
            self._too_large.add(scenario)
            self.cost.reason = reason
        return found

    def serving_rows(self, model: str) -> list[dict[str, object]]:
        """A row per scenario and quantity: milliseconds a request, shares of idle and replayed."""
        rows: list[dict[str, object]] = []
        of_scenario = ("policy", "chunk", "prompt_len", "num_decodes")
        for scenario, runs in self.runs.items():
            labels = {"model": model, **{name: getattr(scenario, name) for name in of_scenario}}
            labels |= {"batch": scenario.batch_size, "iterations": runs[0].num_iterations}
            for quantity, samples, unit in (
                ("time per request", [1e3 * run.seconds_per_request for run in runs], "ms"),
                ("idle share", [run.idle_share for run in runs], "ratio"),
                (load.REPLAYED, [run.replayed_share for run in runs], "ratio"),
            ):
                rows.append({**labels, "quantity": quantity, **summary(samples, unit)})
        return rows

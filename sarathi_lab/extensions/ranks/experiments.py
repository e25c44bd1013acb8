"""Bubbles of a real pipeline, beside those of the simulated one with the same stages' times: Fig 12
with processes of this machine as stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from sarathi_lab.config.console import progress_of
from sarathi_lab.engine import loop
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor, Sizes, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.experiment.cases import Point, Round, Samples
from sarathi_lab.experiment.clock import Estimate
from sarathi_lab.experiment.measure import Measured, Session, measure
from sarathi_lab.experiment.pipeline import completion_time, workload
from sarathi_lab.experiment.registry import Figure, Ints, figure
from sarathi_lab.experiment.registry import Sizes as SizesOf
from sarathi_lab.experiment.scenario import BLOCK_SIZE, Room
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Policy, Sarathi
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.workload.base import random_prompt

MEASURED, SIMULATED = "measured", "simulated"
BUBBLES, COMPLETION, IDLE, ERROR = "bubbles", "completion", "idle share", "simulated / measured"
TIMED = 6  # micro-batches of a composition whose times count
CALIBRATING = 10**6  # seed of requests that nothing is measured of
WATERMARK = 1.05  # of blocks, for policies that leave some free


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a batch on each stage: over its number of tokens interpolated between `knots`, and
    linear in the query-key pairs of prompts, the context of decodes and the tokens emitted; those
    of sending linear in tokens. Fitted to what the stages took side by side, and to sends into a
    stage that waits.
    """

    knots: Sequence[int]
    weights: np.ndarray  # [stages, features]
    sending: tuple[float, float]  # seconds, and seconds a token

    @classmethod
    def fit(cls, timed: Sequence[tuple[Batch, Sequence[float], float]]) -> StageTimes:
        """Of batches with the seconds of each stage, and those of sending; by least squares of
        relative errors, no part below zero.
        """
        batches = [batch for batch, _, _ in timed]
        knots = sorted({batch.num_tokens for batch in batches})
        rows = np.array([_features(batch, knots) for batch in batches])
        seconds = np.array([stages for _, stages, _ in timed])  # [batches, stages]
        weights = [nnls(rows / stage[:, None], np.ones(len(rows)))[0] for stage in seconds.T]
        tokens = np.array([[1.0, batch.num_tokens] for batch in batches])
        fixed, each = nnls(tokens, np.array([sent for _, _, sent in timed]))[0]
        return cls(knots, np.array(weights), (float(fixed), float(each)))

    def stage_times(self, batch: Batch) -> list[float]:
        found: list[float] = (self.weights @ _features(batch, self.knots)).tolist()
        return found

    def send_time(self, batch: Batch) -> float:
        return self.sending[0] + self.sending[1] * batch.num_tokens


def _features(batch: Batch, knots: Sequence[int]) -> np.ndarray:
    hats = [np.interp(batch.num_tokens, knots, row) for row in np.eye(len(knots))]
    beyond = max(1.0, batch.num_tokens / knots[-1])  # in proportion
    others = [batch.prefill_query_key_pairs, batch.decode_kv_tokens, batch.num_emits]
    return np.array([*(beyond * hat for hat in hats), *others])


class StageBench:
    """A pipeline of `stages` processes with `spec`, its stages' times, and requests for it."""

    def __init__(
        self, backend: TorchBackend, spec: ModelSpec, stages: int, sizes: Mapping[str, Any]
    ) -> None:
        self.spec, self.stages, self._sizes = spec, stages, sizes
        longest, batch = sizes["longest"], sizes["batch"]
        self._blocks = math.ceil(WATERMARK * stages * batch * -(-longest // BLOCK_SIZE))
        room = Sizes(self._blocks, BLOCK_SIZE, batch, longest, longest + batch)
        self.executor: Executor = backend.build(spec, None, room)
        self.times = StageTimes.fit([self._timed(one) for one in self._compositions()])
        self.turnaround = self._turnaround()

    def serve(self, executor: Executor, policy: Policy, requests: Sequence[Request]) -> Ledger:
        sizes = (self._sizes["batch"], self._blocks, BLOCK_SIZE, self._sizes["longest"])
        return loop.serve(requests, EngineConfig(policy, *sizes, self.stages), executor)

    def simulated(self) -> PipelineExecutor:
        times = self.times
        return PipelineExecutor(
            self.stages, times.stage_times, times.send_time, turnaround=self.turnaround
        )

    def requests(self, num_requests: int, seed: int) -> list[Request]:
        """Those of Fig 12 in this size, with tokens."""
        shortest, longest = self._sizes["shortest"], self._sizes["longest"]
        without = workload(num_requests, seed, shortest, longest)
        size = self.spec.vocab_size
        return [
            replace(one, prompt_token_ids=random_prompt(one.request_id, one.prompt_len, size, seed))
            for one in without
        ]

    def _compositions(self) -> Iterator[Mapping[str, Any]]:
        """Batches from which a stage's time can be fitted."""
        longest, batch = self._sizes["longest"], self._sizes["batch"]
        decodes = sorted({1, 2, batch // 2, batch} - {0})
        for number in decodes:
            for context in (2, longest // 2, longest - 1):
                yield {"num_decodes": number, "context": context}
        tokens = 8
        while tokens < longest:
            for start in (0, longest - 1 - tokens):
                for emits in (False, True):
                    yield {"prefill_tokens": tokens, "start": start, "emits": emits}
            riders = {"num_decodes": batch - 1, "context": longest // 2}
            yield {"prefill_tokens": tokens, **riders}
            tokens *= 2
        yield {"prefill_tokens": longest - 1}

    def _timed(self, composition: Mapping[str, Any]) -> tuple[Batch, list[float], float]:
        """A composition, its seconds on each stage while all are at work, and those of sending it
        to a stage that waits; means, as they add up to a completion.
        """
        at_work = self._spans(composition, TIMED + 2 * (self.stages - 1), self.stages)
        at_work = at_work[self.stages - 1 : self.stages - 1 + TIMED]
        seconds = (at_work[:, :, 1] - at_work[:, :, 0]).mean(axis=0)
        alone = self._spans(composition, 1 + TIMED, 1)
        sent = (alone[1:, 1:, 0] - alone[1:, :-1, 1]).mean()  # the first send takes longer
        return self._made(composition), seconds.tolist(), float(sent)

    def _spans(self, composition: Mapping[str, Any], number: int, most: int) -> np.ndarray:
        """When each stage worked on each of `number` equal batches, `most` of them in flight;
        [batches, stages, 2].
        """
        executor, found = self.executor, list[StepResult]()
        executor.start()
        for batch in [self._made(composition) for _ in range(number)]:
            if executor.num_in_flight == most:
                found.append(executor.collect())
            executor.submit(batch)
        while executor.num_in_flight:
            found.append(executor.collect())
        return np.array([result.stages for result in found])

    def _made(self, composition: Mapping[str, Any]) -> Batch:
        return make_batch(**composition, blocks=BlockManager(self._blocks, BLOCK_SIZE))

    def _turnaround(self) -> float:
        """Seconds from when the first stage and a place are free to when it begins a micro-batch:
        to hear that one is done, and to schedule. Of a run of other requests than those measured.
        """
        requests = self.requests(2 * self.stages * self._sizes["batch"], CALIBRATING)
        stages = self.serve(self.executor, Orca(), requests).stages()
        spans = stages[["start", "end"]].to_numpy().reshape(-1, self.stages, 2)
        free = np.maximum(spans[self.stages - 1 : -1, 0, 1], spans[: -self.stages, -1, 1])
        return float((spans[self.stages :, 0, 0] - free).mean())


@dataclass(frozen=True)
class StageFigure(Figure):
    """An experiment whose stages are processes, each of one thread on a CPU."""

    is_measured_only = True

    def check(self, backend: Any, spec: ModelSpec, sizes: SizesOf) -> None:
        """Refuse models that do not fit."""
        for stages in sizes["stages"]:
            tokens = stages * sizes["batch"] * (sizes["longest"] + BLOCK_SIZE)
            _pipelined(backend, stages).check(spec, tokens)

    def room_on(self, backend: Any, spec: ModelSpec, sizes: SizesOf) -> Room:
        """Return none, as each number of stages has another engine."""
        return Room()

    def measure(self, session: Session) -> Measured:
        samples: Samples = {}
        with progress_of(f"measuring {self.name}", self.seconds, "s") as advance:
            for stages in sorted(session.sizes["stages"], reverse=True):  # reuses the processes
                backend = _pipelined(session.backend, stages)
                bench = StageBench(backend, session.spec, stages, session.sizes)
                rounds = [Round(self.make, session.sizes, session.seed)]
                samples |= measure(rounds, bench, most=session.sizes["num_seeds"], advance=advance)
        table = session.table(self.name, samples, is_series=False)
        device = f"{_pipelined(session.backend, 1).device_name} a stage"
        return {"": table.assign(device_name=device)}


def _pipelined(backend: Any, stages: int) -> TorchBackend:
    threads: dict[str, Any] = {} if backend.uses_gpus else {"threads": backend.threads or 1}
    return replace(backend, pipeline_parallel=stages, **threads)


@figure(
    StageFigure,
    question="Do equal chunks close the bubbles of a real pipeline?",
    seconds=430,
    max_spread=0.3,
    look=PlotSpec(
        "Orca over SARATHI on stages that are processes of one machine",
        "stages",
        "orca / sarathi",
        panels={BUBBLES: "median bubble time of a request", COMPLETION: "completion"},
        left_out=(IDLE, ERROR),
        is_by_device=True,  # each has simulated series beside measured ones
        columns=2,
    ),
)
def real_bubbles(
    bench: StageBench,
    seed: int,
    *,
    models: Sequence[str],
    stages: Ints,
    shortest: int,
    longest: int,
    batch: int,
    chunk: int,
    num_requests: Ints,
    num_seeds: int,
) -> Iterator[Point]:
    """Ratios of median bubble time and of completion, Orca over SARATHI, of one set of requests on
    one of `stages` with one of `models`; each policy's idle share of its stages by cause, and its
    simulated completion over the measured one. `num_seeds` sets are that many pairs.
    """
    requests = bench.requests(num_requests[models.index(bench.spec.name)], seed)
    policies: Sequence[Policy] = (Sarathi(chunk=chunk), Orca())
    times: dict[tuple[str, str], tuple[float, float]] = {}
    for policy in policies:
        for kind, executor in ((MEASURED, bench.executor), (SIMULATED, bench.simulated())):
            ledger = bench.serve(executor, policy, requests)
            table = ledger.requests()
            bubble = float(np.median(table.bubble_time))
            times[policy.name, kind] = bubble, completion_time(table.finish_time)
            yield from _idle(bench, policy.name, kind, ledger)
        ratio = times[policy.name, SIMULATED][1] / times[policy.name, MEASURED][1]
        yield _point(bench, ERROR, f"{policy.name}, completion", ratio, MEASURED)
    for place, panel in enumerate((BUBBLES, COMPLETION)):
        for kind in (MEASURED, SIMULATED):
            ratio = times["orca", kind][place] / times["sarathi", kind][place]
            yield _point(bench, panel, kind, ratio, kind)


def _idle(bench: StageBench, policy: str, kind: str, ledger: Ledger) -> Iterator[Point]:
    """Of the seconds of all stages, those of bubbles by cause."""
    stages, bubbles = ledger.stages(), ledger.bubbles()
    whole = bench.stages * float(stages.end.max() - stages.start.min())
    seconds = (bubbles.end - bubbles.start).groupby(bubbles.cause).sum()
    for cause in ("PB1", "PB2", "PB3", "starved"):
        share = float(seconds.get(cause, 0.0)) / whole
        yield _point(bench, IDLE, f"{policy}, {cause}, {kind}", share, kind)._replace(kind="share")


def _point(bench: StageBench, panel: str, series: str, value: float, kind: str) -> Point:
    name = bench.spec.name
    labels = (("model", name), ("how", kind))
    x, y = float(bench.stages), Estimate(value)
    return Point(panel, f"{name}, {series}", x, y, labels=labels)

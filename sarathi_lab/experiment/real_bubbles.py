"""Bubbles of a real pipeline: Fig 12 with stages that report when they worked, and beside it the
simulated pipeline with stages that take as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sarathi_lab.engine import loop
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Backend, Executor
from sarathi_lab.engine.executor import Sizes as BuildSizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.experiment.pipeline import completion_time, ratios_of_requests, workload
from sarathi_lab.experiment.points import Estimate, Part, Point, Samples, keep, table_of
from sarathi_lab.experiment.registry import (
    Experiment,
    Measured,
    MeasuredJob,
    SimulatedJob,
    Sizes,
    experiment,
)
from sarathi_lab.experiment.scenario import BLOCK_SIZE, Room
from sarathi_lab.experiment.stage_times import StageTimes
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Policy, Sarathi
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.workload.base import random_prompt

if TYPE_CHECKING:
    import pandas as pd


MEASURED, SIMULATED = "measured", "simulated"
BUBBLES, COMPLETION, IDLE, ERROR = "bubbles", "completion", "idle share", "simulated / measured"
CALIBRATING = 10**6  # seed of requests that stages' times are fitted to, and nothing else
TWO_STAGES = ("executor.pipeline_parallel=2",)
LARGEST_BLOCK = 32  # tokens, of vLLM's attention on a CPU
WATERMARK = 1.05  # of blocks, for policies that leave some free


@dataclass(frozen=True)
class PipelineBench:
    """A pipeline with a model, by how its times are known: measured, simulated or both."""

    spec: ModelSpec
    engine: EngineConfig
    executors: Mapping[str, Executor]

    @property
    def num_stages(self) -> int:
        return self.engine.num_micro_batches

    def serve(self, how: str, policy: Policy, requests: Sequence[Request]) -> Ledger:
        engine = replace(self.engine, policy=policy)
        return loop.serve(requests, engine, self.executors[how])

    def requests(self, num_requests: int, seed: int, lengths: tuple[int, int]) -> list[Request]:
        """Return those of Fig 12 in this size, with tokens."""
        drawn = workload(num_requests, seed, *lengths)
        vocab_size = self.spec.vocab_size
        requests = []
        for request in drawn:
            token_ids = random_prompt(request.request_id, request.prompt_len, vocab_size, seed)
            requests.append(replace(request, prompt_token_ids=token_ids))
        return requests

    def with_simulation(self, sizes: Sizes) -> PipelineBench:
        """Add the simulated pipeline whose stages take as long as the measured ones, by runs of
        other requests under both policies, which also warm up.
        """
        # Other requests than those compared: the simulation must not be fitted to its own test.
        lengths = (sizes["shortest"], sizes["longest"])
        requests = self.requests(sizes["num_requests"], CALIBRATING, lengths)
        ledgers = []
        for policy in _policies(sizes["chunk"]):
            ledgers.append(self.serve(MEASURED, policy, requests))
        times = StageTimes.fit(ledgers)
        simulated = PipelineExecutor(
            self.num_stages,
            times.stage_times,
            times.send_time,
            turnarounds=times.turnarounds,
        )
        return replace(self, executors={**self.executors, SIMULATED: simulated})


def _policies(chunk: int) -> list[Policy]:
    return [Sarathi(chunk=chunk), Orca()]


@dataclass(frozen=True)
class StagedExperiment(Experiment):
    """An experiment on all stages of a pipeline, measured or simulated."""

    is_of_stages = True

    def parts(self, spec: ModelSpec, sizes: Sizes) -> list[Part]:
        seeds = range(sizes["num_seeds"])
        return [Part(self.make, sizes=sizes, seed=seed) for seed in seeds]

    def room(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> Room:
        """Return the room of the micro-batches of all stages at their longest, so that nothing is
        evicted.
        """
        batch = sizes["batch"]
        longest = sizes["longest"]
        num_sequences = backend.num_stages * batch
        blocks_each = math.ceil(longest / LARGEST_BLOCK)
        num_blocks = math.ceil(WATERMARK * num_sequences * blocks_each)
        return Room(
            kv_tokens=num_blocks * LARGEST_BLOCK,
            batch_size=batch,
            longest=longest,
            batch_tokens=longest + batch,  # of Orca: a whole prompt with decodes
        )

    def measure(self, job: MeasuredJob) -> Measured:
        from sarathi_lab.experiment.measure import (  # torch takes seconds
            loaded,
            measure,
            measured_table,
        )

        sizes = job.sizes
        num_stages = job.backend.num_stages
        with loaded(job) as (executor, advance):
            engine = _engine(sizes, num_stages, executor.num_blocks, executor.block_size)
            bench = PipelineBench(job.spec, engine, {MEASURED: executor})
            samples = measure(
                [Part(self.make, sizes=sizes, seed=job.seed)],
                bench.with_simulation(sizes),
                seconds=job.seconds,
                max_rounds=sizes["num_seeds"],
                advance=advance,
            )
        return {"": measured_table(job, samples, is_series=False)}

    def bench(self, job: SimulatedJob) -> PipelineBench:
        backend = job.backend
        num_stages = backend.num_stages
        num_blocks = self.room(backend, job.spec, job.sizes).kv_tokens // BLOCK_SIZE
        engine = _engine(job.sizes, num_stages, num_blocks, BLOCK_SIZE)
        build_sizes = BuildSizes(num_blocks, BLOCK_SIZE, engine.batch_size)
        executor = backend.build(job.spec, None, build_sizes)
        return PipelineBench(job.spec, engine, {SIMULATED: executor})

    def table(self, points_of_parts: Sequence[Sequence[Point]]) -> pd.DataFrame:
        """Return medians over the sets of requests, and how far the sets differ."""
        samples: Samples = {}
        for points in points_of_parts:
            keep(samples, points)
        return table_of(self.name, samples, math.inf, is_series=False)


def _engine(sizes: Sizes, num_stages: int, num_blocks: int, block_size: int) -> EngineConfig:
    longest = sizes["longest"]
    return EngineConfig(Orca(), sizes["batch"], num_blocks, block_size, longest, num_stages)


@experiment(
    StagedExperiment,
    question="Do equal chunks close the bubbles of a real pipeline?",
    seconds=150,
    max_spread=0.3,
    simulated=TWO_STAGES,
    measured=("executor=vllm", *TWO_STAGES, "executor.eager=true"),
    look=PlotSpec(
        "Orca over SARATHI on the stages of a real pipeline",
        y="orca / sarathi",
        kind="bar",
        panels={BUBBLES: "median bubble time of a request", COMPLETION: "completion"},
        left_out=(IDLE, ERROR),
        is_by_device=True,  # each has simulated series beside measured ones
        columns=2,
    ),
)
def real_bubbles(
    bench: PipelineBench,
    seed: int,
    *,
    shortest: int,
    longest: int,
    batch: int,
    chunk: int,
    num_requests: int,
    num_seeds: int,
) -> Iterator[Point]:
    """Serve one set of requests by Orca and by SARATHI.

    Yields the ratios of median bubble time and of completion, Orca over SARATHI; each policy's idle
    share of the stages, by cause; and its simulated completion over the measured one. `num_seeds`
    is the number of sets. The policies take turns in which one is served first.
    """
    requests = bench.requests(num_requests, seed, (shortest, longest))
    policies = _policies(chunk)
    # In turn, so that a machine that slows down favours none.
    if seed % 2:
        policies.reverse()
    tables: dict[tuple[str, str], pd.DataFrame] = {}
    for policy in policies:
        for how in bench.executors:
            ledger = bench.serve(how, policy, requests)
            tables[how, policy.name] = ledger.requests()
            yield from _idle_shares(bench, how, policy, ledger)

    for how in bench.executors:
        sarathi = tables[how, "sarathi"]
        bubbles, completion = ratios_of_requests(sarathi, baseline=tables[how, "orca"])
        yield _point(bench, BUBBLES, how, bubbles, how)
        yield _point(bench, COMPLETION, how, completion, how)
    if MEASURED not in bench.executors:
        return
    for policy in policies:
        measured = completion_time(tables[MEASURED, policy.name].finish_time)
        simulated = completion_time(tables[SIMULATED, policy.name].finish_time)
        ratio = simulated / measured
        yield _point(bench, ERROR, f"{policy.name}, completion", ratio, MEASURED)


def _idle_shares(bench: PipelineBench, how: str, policy: Policy, ledger: Ledger) -> Iterator[Point]:
    """Yield the share of all stages' seconds that are bubbles, by cause."""
    stages = ledger.stages()
    elapsed = stages.end.max() - stages.start.min()
    of_all_stages = bench.num_stages * float(elapsed)
    bubbles = ledger.bubbles()
    idle = bubbles.end - bubbles.start
    seconds_by_cause = idle.groupby(bubbles.cause).sum()
    for cause in ("PB1", "PB2", "PB3", "starved"):  # section 3.3
        seconds = float(seconds_by_cause.get(cause, 0.0))
        series = f"{policy.name}, {cause}, {how}"
        point = _point(bench, IDLE, series, seconds / of_all_stages, how)
        yield point._replace(kind="share")


def _point(bench: PipelineBench, panel: str, series: str, value: float, how: str) -> Point:
    model = bench.spec.name
    return Point(
        panel,
        f"{model}, {series}",
        x=float(bench.num_stages),
        y=Estimate(float(value)),
        labels=(("model", model), ("how", how)),
    )

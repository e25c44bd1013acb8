"""Fig 12: bubbles and completion of GPT-3 on 64 A100, SARATHI and Orca on a pipeline beside
replicas without one.

Set-up of section 5.3: a backlog of 10,000 requests of 1K to 4K tokens (Zipf 0.4) at P:D = 10 on 8
stages of 8 devices with micro-batches of 27, or on 8 replicas of 8 devices with batches of 11.

On a real device whole iterations of its model are measured, and a pipeline of equal stages is
simulated with these times; sending takes none. Replicas are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sarathi_lab.engine import loop
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Backend, Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.executor.simulated.hardware import Hardware, Parallel
from sarathi_lab.executor.simulated.iteration_table import IterationTable
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.points import Estimate, Part, Point
from sarathi_lab.experiment.registry import (
    Experiment,
    Measured,
    MeasuredJob,
    Platform,
    SimulatedJob,
    Sizes,
    experiment,
)
from sarathi_lab.experiment.scenario import BLOCK_SIZE, Room, batch
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Policy, Sarathi
from sarathi_lab.results.load import SIMULATED
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.workload.synthetic import Zipf

if TYPE_CHECKING:
    from sarathi_lab.experiment.measured_iterations import Limits

NUM_REQUESTS = 10_000
# The prompt in an iteration of the pipeline, its tokens and those cached before them: SARATHI's
# chunk, or Orca's whole prompt.
TYPICAL_PROMPT = {"sarathi": (230, 1000), "tp_pp_orca": (2000, 0)}
COMPLETED = 0.9981  # the last of the paper's points is the 9,981st of 10,000 requests
SHORTEST, LONGEST = 1024, 4096
PIPELINES = ("sarathi", "tp_pp_orca")
BUBBLES, COMPLETION = "bubbles, orca / sarathi", "completion, orca / sarathi"
# Seconds of an iteration of the paper's code base beside its operations: Fig 3's "others", what
# chunks lose in Fig 13b beyond Fig 7, and between them the geometric mean.
FIXED_COSTS = (2.3e-3, 4.8e-3, 10e-3)
StageTimes = Callable[[CostModel], Callable[[Batch], Sequence[float]]]


@dataclass(frozen=True)
class System:
    """A policy on `replicas` copies of the model, each spread over `parallel`."""

    policy: Policy
    batch_size: int
    parallel: Parallel
    replicas: int = 1
    longest: int = LONGEST

    def serve(self, requests: Sequence[Request], executor: Executor) -> Ledger:
        """Serve `requests` on one replica with room for all micro-batches at the longest length."""
        stages = self.parallel.pipeline
        num_blocks = self.batch_size * stages * -(-self.longest // BLOCK_SIZE)
        engine = EngineConfig(
            policy=self.policy,
            batch_size=self.batch_size,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=self.longest,
            num_micro_batches=stages,
        )
        return loop.serve(requests, engine, executor)


# Under the names of the paper's points.
SYSTEMS: Mapping[str, System] = {
    "sarathi": System(Sarathi(chunk=256), 27, Parallel(8, 8)),
    "tp_pp_orca": System(Orca(), 27, Parallel(8, 8)),
    "tp_8rep": System(Orca(), 11, Parallel(8, 1), replicas=8),
}


def serve(
    name: str,
    spec: ModelSpec,
    hardware: Hardware,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    stage_times: StageTimes = lambda cost: cost.stage_times,
) -> list[Ledger]:
    """The ledgers of a system's replicas; another `stage_times` tries other costs of stages. Raises
    UserError for no requests.
    """
    system = SYSTEMS[name]
    cost = make_cost_model("analytic", spec, hardware, hardware.dtype_bytes, system.parallel)
    requests = workload(num_requests, seed)
    ledgers = []
    for replica in range(system.replicas):
        executor = PipelineExecutor(system.parallel.pipeline, stage_times(cost), cost.send_time)
        of_replica = requests[replica :: system.replicas]
        ledgers.append(system.serve(of_replica, executor))
    return ledgers


def workload(
    num_requests: int, seed: int, shortest: int = SHORTEST, longest: int = LONGEST
) -> Sequence[Request]:
    """The requests of section 5.3, all waiting from the start."""
    lengths = Zipf(
        min_len=shortest,
        max_len=longest,
        theta=0.4,
        pd_ratio=10.0,
        num_requests=num_requests,
        seed=seed,
    )
    return lengths.generate(None).requests


def completion_time(finish_times: Sequence[float] | pd.Series) -> float:
    """Seconds until all but the last few requests are done, 9,981 of the paper's 10,000."""
    in_order = np.sort(finish_times)
    num_completed = round(COMPLETED * len(in_order))
    return float(in_order[num_completed - 1])


def requests_of(ledgers: Sequence[Ledger]) -> pd.DataFrame:
    """Return the requests of all replicas."""
    return pd.concat([ledger.requests() for ledger in ledgers])


def at_points(requests: Mapping[str, pd.DataFrame], points: pd.DataFrame) -> pd.DataFrame:
    """Return what the `requests` of each system have where the paper has its `points`: rows with y.

    Panel "a" is the CDF of a request's bubble time: seconds (y) by the share of requests. Panel "b"
    is the time (seconds) at which x requests were done, stretched to the paper's number of them.
    """
    rows = []
    for (panel, series), line in points.groupby(["panel", "series"]):
        table = requests[str(series)]
        num_requests = len(table)
        done = np.arange(1, num_requests + 1)
        if panel == "a":
            y = np.interp(line.x, done / num_requests, np.sort(table.bubble_time))
        else:
            stretch = NUM_REQUESTS / num_requests
            finish_times = np.sort(table.finish_time)
            y = np.interp(line.x, done * stretch, finish_times * stretch)
        abscissae = line[["panel", "series", "x"]]
        rows.append(abscissae.assign(y=y))
    return pd.concat(rows, ignore_index=True)


def ratios(points: pd.DataFrame) -> dict[str, float]:
    """Orca's median bubble time over SARATHI's, and ratios of completion, from curves of Fig 12."""
    lines = {}
    for key, line in points.groupby(["panel", "series"]):
        lines[key] = line.sort_values("x")
    median = {}
    for name in PIPELINES:
        bubbles = lines["a", name]
        median[name] = float(np.interp(0.5, bubbles.x, bubbles.y))
    done = {}
    for name in SYSTEMS:
        completion = lines["b", name]
        done[name] = float(completion.y.iloc[-1])
    return {
        BUBBLES: median["tp_pp_orca"] / median["sarathi"],
        COMPLETION: done["tp_pp_orca"] / done["sarathi"],
        "completion, replicas / sarathi": done["tp_8rep"] / done["sarathi"],
        "completion, orca / replicas": done["tp_pp_orca"] / done["tp_8rep"],
    }


def predicted(
    on: tuple[ModelSpec, Hardware], seed: int, *, paper: pd.DataFrame, every: int
) -> Iterator[Point]:
    """Predict Fig 12 by the cost model at the points of `paper`, with each n-th of its requests.

    Serving the 10,000 requests in every draw would take too long. A time has the relative error of
    one iteration that is typical of its policy, and a ratio has the errors of two such iterations.
    """
    spec, hardware = on
    num_requests = NUM_REQUESTS // every
    requests = {}
    for name in SYSTEMS:
        ledgers = serve(name, spec, hardware, num_requests, seed)
        requests[name] = requests_of(ledgers)
    of_lines = paper[paper.panel != "ratios"]
    curves = at_points(requests, of_lines)
    # An error is an estimate whose value is 1. Its product with a time is that time, with draws.
    errors = _typical_errors(spec, hardware)
    errors["tp_8rep"] = errors["tp_pp_orca"]  # replicas run Orca, too
    for panel, series, x, y in curves.itertuples(index=False, name=None):
        yield Point(panel, series, x, errors[series] * y, "s")
    error_of_ratio = errors["tp_pp_orca"] / errors["sarathi"]
    for name, ratio in ratios(curves).items():
        yield Point("ratios", name, 0.0, error_of_ratio * ratio)
    if not hardware.layer_host_time:  # its file has no costs of the paper's code base
        for point in _at_fixed_costs(on, num_requests, seed):
            yield point._replace(y=error_of_ratio * point.y.value)


def _at_fixed_costs(
    on: tuple[ModelSpec, Hardware], num_requests: int, seed: int
) -> Iterator[Point]:
    """Yield the ratios of the pipelines at each of the `FIXED_COSTS` of an iteration (x, in
    milliseconds), which show how much hangs on it.
    """
    spec, hardware = on
    for seconds in FIXED_COSTS:
        device = replace(hardware, iteration_overhead=seconds)
        requests = {}
        for name in PIPELINES:
            (ledger,) = serve(name, spec, device, num_requests, seed)  # of one replica
            requests[name] = ledger.requests()
        for point in _orca_over_sarathi(requests["sarathi"], requests["tp_pp_orca"]):
            yield point._replace(x=1e3 * seconds)


def _typical_errors(spec: ModelSpec, hardware: Hardware) -> dict[str, Estimate]:
    """Return by policy the seconds of its typical iteration over those without an error."""
    parallel = SYSTEMS["sarathi"].parallel
    cost = make_cost_model("analytic", spec, hardware, hardware.dtype_bytes, parallel)
    bench = CostBench(cost)
    errors = {}
    for name, (tokens, start) in TYPICAL_PROMPT.items():
        work = batch(prefill_tokens=tokens, start=start, num_decodes=26, context=2000)
        typical = bench.seconds(work)
        errors[name] = typical * (1 / typical.value)
    return errors


def ratios_of_requests(requests: pd.DataFrame, baseline: pd.DataFrame) -> tuple[float, float]:
    """Return the median bubble time and the completion time of a baseline's requests over those of
    the same `requests` under another policy.
    """
    bubbles = requests.bubble_time.median()
    bubbles_of_baseline = baseline.bubble_time.median()
    completion = completion_time(requests.finish_time)
    completion_of_baseline = completion_time(baseline.finish_time)
    return float(bubbles_of_baseline / bubbles), completion_of_baseline / completion


def _orca_over_sarathi(sarathi: pd.DataFrame, orca: pd.DataFrame) -> Iterator[Point]:
    values = ratios_of_requests(sarathi, orca)
    for series, ratio in zip((BUBBLES, COMPLETION), values, strict=True):
        yield Point("ratios", series, 0.0, Estimate(ratio))


@dataclass(frozen=True)
class PipelineExperiment(Experiment):
    """Pipelines simulated with iterations that a cost model predicts, or a device measures."""

    def paper_sizes(self, every: int = 1, stated: Sizes | None = None) -> Sizes:
        return {"paper": self.paper_points(), "every": every}

    def parts(self, spec: ModelSpec, sizes: Sizes) -> list[Part]:
        return [Part(predicted, sizes=sizes, seed=0)]

    def check_simulated(self, backend: SimulatedBackend, spec: ModelSpec, sizes: Sizes) -> None:
        for parallel in dict.fromkeys(system.parallel for system in SYSTEMS.values()):
            of_system = replace(
                backend,
                tensor_parallel=parallel.tensor,
                pipeline_parallel=parallel.pipeline,
            )
            super().check_simulated(of_system, spec, sizes)

    def bench(self, job: SimulatedJob) -> tuple[ModelSpec, Hardware]:
        return job.spec, job.backend.hardware

    def room(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> Room:
        needed = _limits(sizes).sizes
        return Room(
            kv_tokens=needed.num_blocks * needed.block_size,
            batch_size=needed.batch_size,
            longest=sizes["longest"],
            batch_tokens=needed.max_batch_tokens or 0,
        )

    def measure(self, job: MeasuredJob) -> Measured:
        from sarathi_lab.experiment.measure import (  # torch takes seconds
            loaded,
            measure,
            measured_table,
        )
        from sarathi_lab.experiment.measured_iterations import grid_of, table_of, time_iterations

        sizes = job.sizes
        limits = _limits(sizes)
        grid = grid_of(limits)
        with loaded(job) as (executor, advance):
            timings = time_iterations(
                executor,
                [composition.make() for composition in grid],
                limits,
                num_blocks=executor.num_blocks,
                block_size=executor.block_size,
                vocab_size=job.spec.vocab_size,
                seconds=job.seconds,
                advance=advance,
                seed=job.seed,
            )
        iterations = IterationTable(table_of(grid, timings.rows))
        rounds = [Part(self.make, sizes=sizes, seed=job.seed)]
        samples = measure(rounds, iterations, max_rounds=sizes["num_seeds"])
        table = measured_table(job, samples, is_series=False)
        how = f"simulated pipeline of {sizes['stages']} stages, times measured on "
        return {"": table.assign(device_name=how + table.device_name)}

    def folder_of(self, device: str) -> str:
        return f"{SIMULATED}pipeline-{device}"


def _limits(sizes: Sizes) -> Limits:
    """Return the iterations to measure: of up to a full batch of the longest prompts."""
    from sarathi_lab.experiment.measured_iterations import Limits  # torch takes seconds

    return Limits(sizes["batch"], sizes["longest"])


@experiment(
    PipelineExperiment,
    question="Do equal chunks close the bubbles of a pipeline?",
    seconds=25,
    papers=[Platform("gpt3-175b", "a100_2023"), Platform("gpt3-175b", "a100_fig12")],
    look=PlotSpec(
        "Fig 12: GPT-3 on 64 GPUs, bubbles and completion",
        "requests done",
        "time [s]",
        legend="system",
        panels={"a": "a: bubbles of a request", "b": "b: completion"},
        ys={"a": "share of requests"},
        xs={"a": "bubble time of a request [s]"},
        left_out=("ratios",),
        swapped=("a",),
        names={"sarathi": "SARATHI, TP 8, PP 8"},
    ),
)
def fig12(
    iterations: IterationTable,
    seed: int,
    *,
    shortest: int,
    longest: int,
    batch: int,
    chunk: int,
    num_requests: int,
    num_seeds: int,
    stages: int,
) -> Iterator[Point]:
    """Ratios of median bubble time and of completion, Orca over SARATHI, of one set of requests on
    `stages` stages of measured iterations; `num_seeds` sets are that many pairs.
    """

    def stage_times(micro_batch: Batch) -> list[float]:
        return [iterations.seconds(micro_batch) / stages] * stages

    def requests(policy: Policy) -> pd.DataFrame:
        system = System(policy, batch, Parallel(1, stages), longest=longest)
        backlog = workload(num_requests, seed, shortest, longest)
        executor = PipelineExecutor(stages, stage_times)
        return system.serve(backlog, executor).requests()

    yield from _orca_over_sarathi(requests(Sarathi(chunk=chunk)), requests(Orca()))

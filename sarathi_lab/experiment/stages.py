"""Fig 12 on a device of one's own: measured iterations become the stages of a pipeline that is
simulated.

The iterations of a model are measured by operation on the device, for some seconds, and
interpolated for every batch. A pipeline of `NUM_STAGES` stages, each with an equal share of the
layers, is then simulated with these times; sending takes none. So the times are measured, the
pipeline is not. Replicas, which need tensor parallelism, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.pipeline import PipelineExecutor
from sarathi_lab.executor.simulated.profile import Profile, ProfiledCostModel
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.profiling import (
    Shape,
    blocks_needed,
    calibration_shapes,
    measure_profile,
)
from sarathi_lab.experiment.measure import Samples
from sarathi_lab.experiment.pipeline import completion_time
from sarathi_lab.policy import Orca, Policy, Sarathi
from sarathi_lab.workload.synthetic import Zipf

NUM_STAGES = 4
BLOCK_SIZE = 16  # tokens
PD_RATIO, THETA = 10.0, 0.4  # as section 5.3 has them
BUBBLES, COMPLETION = (
    "bubbles, orca / sarathi",
    "completion, orca / sarathi",
)  # the names of the paper's points


@dataclass(frozen=True)
class Load12:
    """Requests of `shortest` to `longest` tokens, micro-batches of `batch` sequences, chunks of
    `chunk` tokens.
    """

    shortest: int
    longest: int
    batch: int
    chunk: int
    num_requests: int
    num_seeds: int  # sets of requests, each served under both policies: a pair


LOADS = {"paper": Load12(1024, 4096, 27, 256, 1000, 5), "small": Load12(256, 1024, 8, 128, 200, 7)}
LOADS["dry"] = Load12(16, 64, 2, 16, 12, 3)


def shapes_of(load: Load12) -> list[Shape]:
    """What has to be measured for `load`: iterations of up to its longest prompt."""
    return [
        shape
        for shape in calibration_shapes(load.batch, load.longest)
        if shape.total_tokens <= load.longest
    ]


def kv_tokens(load: Load12) -> int:
    """Tokens of cache that the measurement needs."""
    return blocks_needed(shapes_of(load), BLOCK_SIZE) * BLOCK_SIZE


def fig12_samples(
    executor: TorchExecutor,
    load: Load12,
    seconds: float,
    advance: Callable[[float], None],
    seed: int = 0,
) -> Samples:
    """Ratios of median bubble time and of completion, Orca over SARATHI, one sample a set of
    requests.
    """
    measured = measure_profile(executor, shapes_of(load), seconds, advance)
    cost = ProfiledCostModel(Profile(measured.table, "of this run"))
    policies: dict[str, Policy] = {"sarathi": Sarathi(chunk=load.chunk), "orca": Orca()}
    samples: Samples = {("fig12", "ratios", name, 0.0): [] for name in (BUBBLES, COMPLETION)}
    for number in range(load.num_seeds):
        served = {
            name: _serve(policy, load, cost, seed + number) for name, policy in policies.items()
        }
        for i, name in enumerate((BUBBLES, COMPLETION)):
            samples["fig12", "ratios", name, 0.0].append(served["orca"][i] / served["sarathi"][i])
    return samples


def _serve(policy: Policy, load: Load12, cost: ProfiledCostModel, seed: int) -> tuple[float, float]:
    """Median bubble time of a request, and when nearly all are done, in seconds."""
    lengths = Zipf(
        num_requests=load.num_requests,
        pd_ratio=PD_RATIO,
        seed=seed,
        min_len=load.shortest,
        max_len=load.longest,
        theta=THETA,
    )
    blocks = BlockManager(load.batch * NUM_STAGES * -(-load.longest // BLOCK_SIZE), BLOCK_SIZE)
    scheduler = Scheduler(
        policy,
        blocks,
        batch_size=load.batch,
        max_model_len=load.longest,
        num_micro_batches=NUM_STAGES,
    )

    def stage_times(batch: Batch) -> list[float]:
        return [cost.iteration_time(batch) / NUM_STAGES] * NUM_STAGES

    ledger = Ledger()
    run_engine(
        lengths.generate(None).requests,
        scheduler,
        PipelineExecutor(NUM_STAGES, stage_times),
        ledger,
    )
    requests = ledger.requests()
    return float(np.median(requests.bubble_time)), completion_time(requests.finish_time)

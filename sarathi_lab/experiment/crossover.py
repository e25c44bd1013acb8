"""The map of loads and chunks on which chunked prefill gains, is neutral or loses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.experiment.bench import Bench, CostBench
from sarathi_lab.experiment.grid import Map
from sarathi_lab.experiment.points import Parts, Point, part
from sarathi_lab.experiment.registry import Ints, Platform, SimulatedJob, Sizes, experiment
from sarathi_lab.experiment.scenario import Scenario, lengths
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Sarathi
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results.plots.spec import PlotSpec


class CacheBench(CostBench):
    """A cost model's bench that has no room for a batch that exceeds the device's cache.

    Args:
        cost: Seconds of a batch.
        kv_tokens: Tokens of the cache.
        state_tokens: What the states of a sequence take of it, as tokens.
        window: What layers with a window take of it.
    """

    def __init__(
        self,
        cost: CostModel,
        kv_tokens: int,
        state_tokens: int,
        window: CachedWindow | None = None,
    ) -> None:
        super().__init__(cost)
        self.kv_tokens = kv_tokens
        # It holds none: it only counts the blocks, of one token each, that a request takes.
        self._blocks = BlockManager(0, 1, state_blocks=state_tokens, window=window)

    def holds(self, scenario: Scenario) -> bool:
        tokens = scenario.batch_size * self._blocks.blocks_for(scenario.longest)
        return tokens <= self.kv_tokens


@dataclass(frozen=True)
class LoadMap(Map):
    """An experiment of many loads, of which a device runs those that fit its cache."""

    shares_bench: ClassVar[bool] = False

    def check_simulated(self, backend: SimulatedBackend, spec: ModelSpec, sizes: Sizes) -> None:
        if backend.composes_kernels:
            raise UserError(
                f"executor.cost_model={backend.cost_model} has times at measured sizes only, and "
                f"{self.name} serves batches of any; use executor.cost_model=profiled"
            )
        super().check_simulated(backend, spec, sizes)

    def bench(self, job: SimulatedJob) -> CacheBench:
        sizes = job.sizes
        # The cache is what weights and the largest batch of tokens leave of the memory.
        largest = Sarathi(max(sizes["chunks"]))
        setup = setup_of(largest, max(sizes["batches"]), max(sizes["seq_lens"]))
        backend = job.backend
        kv_tokens = backend.kv_blocks(job.spec, 1, setup)
        cost = super().bench(job).cost
        state_tokens = backend.state_tokens(job.spec)
        window = backend.window_in_cache(job.spec, None)
        return CacheBench(cost, kv_tokens, state_tokens, window)


@experiment(
    LoadMap,
    question="Where does chunked prefill pay?",
    papers=[
        Platform("13b", "a6000"),
        Platform("33b", "a100"),
        Platform("13b", "h100"),
        Platform("llama3-8b", "h100"),
        Platform("13b", "h200"),
        Platform("llama3-8b", "h200"),
        Platform("yi-34b", "h200"),
        Platform("nemotron-h-56b", "h200"),
        Platform("nemotron-3-nano-30b-a3b", "h200"),
        Platform("llama3-8b", "b200"),
        Platform("qwen3-30b-a3b", "b200"),
        Platform("qwen3-next-80b-a3b", "b200"),
        Platform("deepseek-v3", "b200", 8),
    ],
    look=PlotSpec(
        "Gain in steady throughput over request-level batching [%]",
        "chunk [tokens]",
        kind="heat",
        is_by_device=True,
        prefix="P + D = ",
        left_out=("* over Orca",),
    ),
)
def crossover(
    spec: ModelSpec,
    *,
    pd_ratios: Sequence[float],
    seq_lens: Ints,
    batches: Ints,
    chunks: Ints,
    min_decodes: int = 1,
) -> Parts:
    """SARATHI's throughput over that of request-level batching and of Orca, by chunk, for equal
    requests in the steady state; decodes ride in batches of `min_decodes` at least.
    """
    if max(chunks) < min(batches):
        raise UserError(
            f"task.sizes: chunks {list(chunks)} are all below the batches {list(batches)}; name a "
            "chunk of at least a batch"
        )
    for seq_len, batch, pd_ratio in itertools.product(seq_lens, batches, pd_ratios):
        size = (*lengths(seq_len, pd_ratio), batch)
        scenarios = {}
        for chunk in chunks:
            # A batch of decodes fills a smaller chunk, and no prompt is ever served.
            if chunk >= batch:
                policy = Sarathi(chunk, min_decodes)
                policy.validate(batch, seq_len)
                scenarios[chunk] = Scenario(policy, *size)
        yield part(_gains, str(seq_len), f"B={batch} P:D={pd_ratio:g}", scenarios)


def _gains(
    bench: Bench, panel: str, series: str, scenarios: Mapping[int, Scenario]
) -> Iterator[Point]:
    """Yield the gains of one load with each chunk, over both baselines."""
    for chunk, scenario in scenarios.items():
        if bench.holds(scenario):
            orca = replace(scenario, policy="orca_best")
            yield Point(panel, series, chunk, bench.gain(scenario))
            yield Point(f"{panel} over Orca", series, chunk, bench.gain(scenario, orca))

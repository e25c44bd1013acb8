"""The task `crossover`: where chunked prefill gains, is neutral or loses, as a table and a map;
simulated, or measured with executor=torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, one_of, refuse_unread, whole
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import make_folder
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import kv_capacity
from sarathi_lab.experiment.advisor import BASELINES, PolicyOfChunk
from sarathi_lab.experiment.scenario import Scenario, lengths, request_times
from sarathi_lab.extensions.advice import cost_of, policy_of_chunk
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Sarathi
from sarathi_lab.results.intervals import FEWEST_PAIRS, LEVEL, ends_of_median
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import print_device
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import Task

NEUTRAL = 0.02  # gains and losses up to this share are neutral
OUTCOMES, UNDECIDED = ("loses", "neutral", "gains"), "undecided"
VERBS = {"gains": "gain", "neutral": "neutral", "loses": "lose", UNDECIDED: UNDECIDED}
LOAD = ["pd_ratio", "seq_len", "batch"]
CELL = [*LOAD, "chunk", "baseline"]
Loads = Sequence[tuple[float, int, int]]  # P:D, P + D, batch
RequestSeconds = Callable[[Scenario], float]


def _axis(example: int, minimum: int | None = 1) -> Any:
    """Make the field of a list such as the `example`'s; without `minimum`, of fractions."""
    fix = f"use a list such as [{example},{2 * example}]"
    number = partial(require_number, above=0, fix=fix)
    each = number if minimum is None else partial(require_int, minimum=minimum, fix=fix)
    twice = f"names a value twice; {fix}"
    return listed(each=each, complaint=f"names nothing to map; {fix}", twice=twice)


@dataclass(frozen=True)
class Crossover(Task):
    """Map of the policy's gain over P:D, P + D (tokens), batch and chunk (tokens); a device is
    measured in `rounds` of the whole map.
    """

    reads = ("policy", "executor", "model", "hardware", "device", "dtype", "seed")
    pd_ratios: Sequence[float] = _axis(10, minimum=None)
    seq_lens: Sequence[int] = _axis(1024, minimum=2)
    batches: Sequence[int] = _axis(8)
    chunks: Sequence[int] = _axis(256)
    baseline: str = one_of(valid=BASELINES)
    rounds: int = whole(
        FEWEST_PAIRS,
        minimum=1,
        fix=f"use {FEWEST_PAIRS}, the fewest that decide a cell, or more",
    )

    def check(self, cfg: DictConfig) -> None:
        backend, _, kv_tokens = _subject(cfg)
        if isinstance(backend, SimulatedBackend):
            why = ": executor=simulated computes each cell once; drop it, or use executor=torch"
            refuse_unread(self, ["rounds"], why, "task.")
        policy_of, loads = policy_of_chunk(cfg), self._loads(kv_tokens)
        if not loads:
            raise UserError(
                f"task.batches={self.batches} of task.seq_lens={self.seq_lens} tokens exceed the "
                f"cache of {kv_tokens} tokens beside the weights; name smaller ones, or take "
                "another hardware"
            )
        cells = [(*load, chunk) for load in loads for chunk in self.chunks if chunk >= load[2]]
        if not cells:
            raise UserError(
                f"task.chunks={self.chunks} are all below the batches that fit, "
                f"{sorted({load[2] for load in loads})}; name a chunk of at least the batch"
            )
        for _, length, batch, chunk in cells:
            policy_of(chunk).validate(batch, length)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        from sarathi_lab.extensions.crossover.picture import (
            crossover_map,
        )  # matplotlib takes a second

        backend, spec, kv_tokens = _subject(cfg)
        is_simulated = isinstance(backend, SimulatedBackend)
        print_device(context, spec, backend, build(cfg.policy).name)
        loads, policy = self._loads(kv_tokens), policy_of_chunk(cfg)
        num_loads = len(loads) * (1 if is_simulated else self.rounds)
        with progress_of("mapping", num_loads, "loads") as progress:
            gains = partial(gains_of, loads, self.chunks, policy=policy, on_load=progress)
            if is_simulated:
                operation_times = cost_of(cfg)[2].operation_times
                table = gains(lambda one: sum(request_times(operation_times, one).values()))
            else:
                path = make_folder(context.run_dir, "the run's folder") / "crossover.csv"
                labels = {"model": spec.name, "dtype": backend.dtype_name}
                labels |= {"device": backend.device_name, "git_commit": provenance()["git_commit"]}
                largest = [
                    Scenario(policy(max(self.chunks)), *_scenario_of(load)) for load in loads
                ]
                for rounds in _measured(self.rounds, backend, spec, largest, gains):
                    table = over_rounds(rounds).assign(**labels)
                    table.to_csv(path, index=False)  # kept if the run is interrupted
        counts = table.groupby(["baseline", "outcome"]).size()
        dtype = "" if is_simulated else f" in {backend.dtype_name}"
        title = f"{spec.name}{dtype} on {backend.device_name}"
        device = backend.hardware.name if is_simulated else backend.device_name
        return Result(
            tables={"crossover": table},
            figures={"crossover": crossover_map(table, title, baseline=self.baseline)},
            summary={
                f"{o}_vs_{b}": float(counts.get((b, o), 0))
                for b in BASELINES
                for o in (OUTCOMES if is_simulated else VERBS)
            },
            shown=_describe(table, kv_tokens),
            labels={"device": device},
            tags=["crossover", device],
        )

    def _loads(self, kv_tokens: float) -> Loads:
        return loads_that_fit(self.pd_ratios, self.seq_lens, self.batches, kv_tokens)


def loads_that_fit(
    pd_ratios: Sequence[float], seq_lens: Sequence[int], batches: Sequence[int], kv_tokens: float
) -> Loads:
    """List the loads of which a batch of whole sequences fits `kv_tokens` tokens."""
    return [
        (pd_ratio, seq_len, batch)
        for pd_ratio, seq_len, batch in itertools.product(pd_ratios, seq_lens, batches)
        if batch * (sum(lengths(seq_len, pd_ratio)) + 1) <= kv_tokens
    ]


def gains_of(
    loads: Loads,
    chunks: Sequence[int],
    request_seconds: RequestSeconds,
    *,
    policy: PolicyOfChunk = Sarathi,
    on_load: Callable[[int], None] = lambda num_loads: None,
) -> pd.DataFrame:
    """Compute the gain of `policy` over each baseline: a row per load, chunk (from its batch) and
    baseline, with the columns `CELL`, gain (ratio of steady throughputs less 1) and outcome
    ("gains" above 2 %, "loses" below -2 %, else "neutral").
    """
    rows = []
    for load in loads:
        size = _scenario_of(load)
        baselines = {name: request_seconds(Scenario(one, *size)) for name, one in BASELINES.items()}
        for chunk in (chunk for chunk in chunks if chunk >= load[2]):
            seconds = request_seconds(Scenario(policy(chunk), *size, chunk))
            rows += [(*load, chunk, name, base / seconds - 1) for name, base in baselines.items()]
        on_load(1)
    table = pd.DataFrame(rows, columns=[*CELL, "gain"])
    return table.assign(outcome=_outcome(table.gain))


def _scenario_of(load: tuple[float, int, int]) -> tuple[int, int, int]:
    """Compute prompt length, decodes and batch of a load."""
    pd_ratio, seq_len, batch = load
    return (*lengths(seq_len, pd_ratio), batch)


def over_rounds(rounds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Combine maps of the same cells, measured in turn, into one of median gains.

    Further columns: the median's interval (`low`, `high`, `confidence`) and the `samples`. A cell
    is "undecided" where the interval spans several outcomes, or does not reach `LEVEL`. Rounds
    count as independent: a whole map lies between two samples of a cell.
    """
    gains = np.array([table.gain for table in rounds]).T
    ends = pd.DataFrame([ends_of_median(cell, is_series=False) for cell in gains])
    low, high = _outcome(ends.low), _outcome(ends.high)
    is_decided = (low == high) & (ends.confidence >= LEVEL)
    samples = [" ".join(f"{gain:.6g}" for gain in cell) for cell in gains]
    outcome = low.astype(str).where(is_decided, UNDECIDED)
    table = rounds[0][CELL].assign(gain=np.median(gains, axis=1), outcome=outcome)
    return table.assign(**ends, samples=samples)


def _outcome(gain: pd.Series) -> pd.Series:
    return pd.cut(gain, [-math.inf, -NEUTRAL, NEUTRAL, math.inf], labels=list(OUTCOMES))


def at_best_chunk(table: pd.DataFrame) -> pd.DataFrame:
    """Select the rows with the best chunk, one per load and baseline."""
    return table.loc[table.groupby(["baseline", *LOAD]).gain.idxmax()]


def _measured(
    num_rounds: int,
    backend: Any,
    spec: ModelSpec,
    largest: Sequence[Scenario],
    gains: Callable[[RequestSeconds], pd.DataFrame],
) -> Iterator[list[pd.DataFrame]]:
    """Measure rounds of the map on the device; yield all so far after each."""
    from sarathi_lab.executor.torch.steal_corrected_clock import exclude_stolen_time
    from sarathi_lab.experiment.measure import DeviceClock, load_executor
    from sarathi_lab.experiment.scenario import Room
    from sarathi_lab.tasks.subjects import BLOCK_SIZE

    blocks = max(scenario.blocks(BLOCK_SIZE) for scenario in largest)
    longest = max(scenario.longest for scenario in largest)
    batch_size = max(scenario.batch_size for scenario in largest)
    room = Room(BLOCK_SIZE * blocks, batch_size, longest + 1)
    clock = DeviceClock(load_executor(backend, spec, room))

    def request_seconds(scenario: Scenario) -> float:
        served = clock.served(scenario)
        return math.nan if served is None else served.seconds_per_request

    rounds = []
    with exclude_stolen_time(clock.executor):
        for number in range(num_rounds):
            clock.start(number)
            rounds.append(gains(request_seconds))
            yield rounds


def _subject(cfg: DictConfig) -> tuple[Any, ModelSpec, int]:
    """Return the device, the model with random weights, and the cache's tokens beside them."""
    if isinstance(build(cfg.executor), SimulatedBackend):
        backend, spec, _ = cost_of(cfg)
        size = backend.dtype_bytes, backend.parallel
        return backend, spec, int(kv_capacity(spec, backend.hardware, *size))
    from sarathi_lab.tasks.subjects import BLOCK_SIZE, measured_subject  # torch takes seconds

    device, spec, checkpoint = measured_subject(cfg, "crossover")
    if checkpoint is not None:
        raise UserError(f"task=crossover takes random weights; drop model.path={cfg.model.path}")
    device.check(spec, BLOCK_SIZE)
    return device, spec, BLOCK_SIZE * device.kv_blocks(spec, BLOCK_SIZE)


def _describe(table: pd.DataFrame, kv_tokens: int) -> list[str]:
    """Count the outcomes by baseline, with the best and worst cell."""
    num_loads = len(table[LOAD].drop_duplicates())
    lines = []
    for name, cells in table.groupby("baseline", sort=False):
        lines.append(
            f"  over {name}: {len(cells)} cells of {num_loads} loads that fit a cache of "
            f"{kv_tokens} tokens: {_counts(cells)}; with the best chunk of each load "
            f"{_counts(at_best_chunk(cells))}"
        )
        for which, index in (("best", cells.gain.argmax()), ("worst", cells.gain.argmin())):
            cell = cells.iloc[int(index)]
            lines.append(
                f"    {which} {cell.gain:+.1%} at P:D {cell.pd_ratio:g}, P + D {cell.seq_len}, "
                f"batch {cell.batch}, chunk {cell.chunk}"
            )
    return lines


def _counts(cells: pd.DataFrame) -> str:
    counts = cells.outcome.value_counts()
    shown = [outcome for outcome in VERBS if outcome in OUTCOMES or outcome in counts]
    return ", ".join(f"{counts.get(outcome, 0)} {VERBS[outcome]}" for outcome in shown)

"""The task `crossover`: where chunked prefill gains, is neutral or loses, as a table and a map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, one_of
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.advisor import BASELINES, PolicyOfChunk
from sarathi_lab.experiment.scenario import Scenario, lengths, request_times
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy, Sarathi
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results.report import print_device
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import Task

NEUTRAL = 0.02  # gains and losses up to this share are neutral
VERBS = {"loses": "lose", "neutral": "neutral", "gains": "gain"}
LOAD = ["pd_ratio", "seq_len", "batch"]
Loads = Sequence[tuple[float, int, int]]  # P:D, P + D, batch


def _axis(example: int, minimum: int | None = 1) -> Any:
    """Make the field of a list such as the `example`'s; without `minimum`, of fractions."""
    fix = f"use a list such as [{example},{2 * example}]"
    number = partial(require_number, above=0, fix=fix)
    each = number if minimum is None else partial(require_int, minimum=minimum, fix=fix)
    twice = f"names a value twice; {fix}"
    return listed(each=each, complaint=f"names nothing to map; {fix}", twice=twice)


def cost_of(cfg: DictConfig) -> tuple[SimulatedBackend, ModelSpec, Predictor]:
    """The device, the model, and the device's cost model of it. Raises UserError without one."""
    backend = build(cfg.executor)
    if not isinstance(backend, SimulatedBackend):
        raise UserError(
            f"executor={backend.name} has no cost model to predict with; use executor=simulated"
        )
    if backend.num_stages > 1:
        raise UserError(
            f"executor.pipeline_parallel={backend.num_stages} is not predicted: this is for one "
            "batch at a time; use 1"
        )
    spec, _ = resolve_model(cfg, backend)
    return backend, spec, backend.predictor(spec)


def policy_of_chunk(cfg: DictConfig) -> PolicyOfChunk:
    """The policy by its chunk. Raises UserError for one that cuts no prompts, or names a chunk."""
    policy: Policy = build(cfg.policy)
    field = policy.budget_field
    if field is None:
        raise UserError(
            f"policy={policy.name} has no chunk to choose; use policy=sarathi or "
            "policy=sarathi_serve"
        )
    if policy.budget != cfg.chunk:  # `chunk` itself is refused, as the tasks don't read it
        raise UserError(
            f"policy.{field}={policy.budget} has no effect; drop it, and name chunks by "
            "task.chunks=[256,512]"
        )
    return policy.with_budget


@dataclass(frozen=True)
class Crossover(Task):
    """Map of the policy's gain over P:D, P + D (tokens), batch and chunk (tokens), in the steady
    state of equal requests; the picture is over `baseline`.
    """

    reads = ("policy", "executor", "model", "hardware", "dtype")
    pd_ratios: Sequence[float] = _axis(10, minimum=None)
    seq_lens: Sequence[int] = _axis(1024, minimum=2)
    batches: Sequence[int] = _axis(8)
    chunks: Sequence[int] = _axis(256)
    baseline: str = one_of(valid=BASELINES)

    def check(self, cfg: DictConfig) -> tuple[Loads, int]:
        """Return the loads whose batch of whole sequences fits the cache, and its tokens."""
        backend, spec, _ = cost_of(cfg)
        setup = setup_of(
            policy_of_chunk(cfg)(max(self.chunks)), max(self.batches), max(self.seq_lens)
        )
        kv_tokens = backend.kv_blocks(spec, 1, setup)
        states = backend.state_tokens(spec)
        loads = loads_that_fit(self.pd_ratios, self.seq_lens, self.batches, kv_tokens, states)
        if not loads:
            raise UserError(
                f"task.batches={self.batches} of task.seq_lens={self.seq_lens} tokens exceed the "
                f"cache of {kv_tokens} tokens beside the weights; name smaller ones, or take "
                "another hardware"
            )
        policy_of = policy_of_chunk(cfg)
        cells = [(*load, chunk) for load in loads for chunk in self.chunks if chunk >= load[2]]
        if not cells:
            raise UserError(
                f"task.chunks={self.chunks} are all below the batches that fit, "
                f"{sorted({load[2] for load in loads})}; name a chunk of at least the batch"
            )
        for _, length, batch, chunk in cells:
            policy_of(chunk).validate(batch, length)
        return loads, kv_tokens

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        from sarathi_lab.extensions.crossover.picture import (
            crossover_map,
        )  # matplotlib takes a second

        loads, kv_tokens = context.prepared or self.check(cfg)
        backend, spec, predictor = cost_of(cfg)
        print_device(context, spec, backend, build(cfg.policy).name)

        def request_seconds(scenario: Scenario) -> float:
            return sum(request_times(predictor.operation_times, scenario).values())

        with progress_of("mapping", len(loads), "loads") as progress:
            policy = policy_of_chunk(cfg)
            table = gains_of(loads, self.chunks, request_seconds, policy=policy, on_load=progress)
        counts = table.groupby(["baseline", "outcome"], observed=False).size()
        title, device = f"{spec.name} on {backend.device_name}", backend.hardware.name
        return Result(
            tables={"crossover": table},
            figures={"crossover": crossover_map(table, title, self.baseline)},
            summary={
                f"{outcome}_vs_{baseline}": float(counts[baseline, outcome])
                for baseline in BASELINES
                for outcome in VERBS
            },
            shown=_describe(table, kv_tokens),
            labels={"device": device},
            tags=["crossover", device],
        )


def loads_that_fit(
    pd_ratios: Sequence[float],
    seq_lens: Sequence[int],
    batches: Sequence[int],
    kv_tokens: float,
    state_tokens: int = 0,
) -> Loads:
    """List the loads of which a batch of whole sequences fits `kv_tokens` tokens, with states as
    large as the cache of `state_tokens` each.
    """
    return [
        (pd_ratio, seq_len, batch)
        for pd_ratio, seq_len, batch in itertools.product(pd_ratios, seq_lens, batches)
        if batch * (sum(lengths(seq_len, pd_ratio)) + 1 + state_tokens) <= kv_tokens
    ]


def gains_of(
    loads: Loads,
    chunks: Sequence[int],
    request_seconds: Callable[[Scenario], float],
    *,
    policy: PolicyOfChunk = Sarathi,
    on_load: Callable[[int], None] = lambda num_loads: None,
) -> pd.DataFrame:
    """Compute the gain of `policy` over each baseline: a row per load, chunk (from its batch) and
    baseline, with the gain (ratio of steady throughputs less 1) and outcome ("gains" above 2 %,
    "loses" below -2 %, else "neutral").
    """
    rows = []
    for pd_ratio, seq_len, batch in loads:
        size = (*lengths(seq_len, pd_ratio), batch)
        baselines = {name: request_seconds(Scenario(one, *size)) for name, one in BASELINES.items()}
        for chunk in (chunk for chunk in chunks if chunk >= batch):
            seconds = request_seconds(Scenario(policy(chunk), *size, chunk))
            load = (pd_ratio, seq_len, batch, chunk)
            rows += [(*load, name, base / seconds - 1) for name, base in baselines.items()]
        on_load(1)
    table = pd.DataFrame(rows, columns=[*LOAD, "chunk", "baseline", "gain"])
    edges = [-math.inf, -NEUTRAL, NEUTRAL, math.inf]
    return table.assign(outcome=pd.cut(table.gain, edges, labels=list(VERBS)))


def _describe(table: pd.DataFrame, kv_tokens: int) -> list[str]:
    """Count the outcomes by baseline, with the best and worst cell."""
    num_loads = len(table[LOAD].drop_duplicates())
    lines = []
    for name, cells in table.groupby("baseline", sort=False):
        best_chunks = cells.loc[cells.groupby(LOAD).gain.idxmax()]
        lines.append(
            f"  over {name}: {len(cells)} cells of {num_loads} loads that fit a cache of "
            f"{kv_tokens} tokens: {_counts(cells)}; with the best chunk of each load "
            f"{_counts(best_chunks)}"
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
    return ", ".join(f"{counts[outcome]} {VERBS[outcome]}" for outcome in reversed(VERBS))

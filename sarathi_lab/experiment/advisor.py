"""The recommended chunk, by prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import pandas as pd

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import Orca, Policy, RequestLevel, Sarathi
from sarathi_lab.results import metrics
from sarathi_lab.results.serving_metrics import Slo, is_met, latency
from sarathi_lab.results.steady import steady_part

BASELINES: Mapping[str, Policy] = {"request_level": RequestLevel(), "orca": Orca()}
AS_GOOD = 0.01  # a throughput that is less than this share below the best is as good

IterationTime = Callable[[Batch], float]  # seconds of one iteration
PolicyOfChunk = Callable[[int], Policy]


class Advice(NamedTuple):
    """The recommended chunk with its reasons."""

    chunk: int  # tokens of an iteration, decodes included
    table: pd.DataFrame  # of all predictions
    objective: str
    do_not_chunk: str | None = None  # why whole prompts are better, if so


@dataclass(frozen=True)
class Prediction:
    """Simulation of `requests` on `engine` under any policy; without `slo`, whose bounds are in
    seconds, only throughput counts.
    """

    requests: Sequence[Request]
    engine: EngineConfig
    iteration_time: IterationTime
    baselines: Sequence[str] = tuple(BASELINES)
    slo: Slo | None = None

    @property
    def all_wait(self) -> bool:
        """Whether all requests are there from the start."""
        return not any(request.arrival_time for request in self.requests)

    def serve(self, policy: Policy) -> Ledger:
        num_layers = getattr(self.iteration_time, "num_layers", None)
        executor = SimulatedExecutor(self.iteration_time, num_layers=num_layers)
        return serve(self.requests, replace(self.engine, policy=policy), executor)

    def row(self, policy: Policy) -> dict[str, float]:
        """Predict throughput (tokens/s), kv_reread_factor, tbt_p50 and tbt_p99 (seconds; NaN if no
        request has two tokens) and, with an objective, slo_met: of the steady part, where there is
        one, as of a run.
        """
        ledger = self.serve(policy)
        iterations, requests = ledger.iterations(), ledger.requests()
        rates = metrics.throughput(requests, float(iterations.end.max()))
        part = steady_part(requests, self.engine.num_slots) if self.all_wait else None
        if part is not None:
            rates = part.throughput(requests)
            iterations, requests = part.spans(iterations), part.requests(requests)
        waits = latency(requests)
        read, computed = iterations.prefill_kv_tokens, iterations.num_prefill_tokens
        return {
            "throughput": rates["throughput"],
            "kv_reread_factor": read.sum() / computed.sum(),
            **{name: waits.get(name, math.nan) for name in ("tbt_p50", "tbt_p99")},
            **({} if self.slo is None else {"slo_met": is_met(requests, self.slo)}),
        }

    @cached_property
    def baseline_rows(self) -> Mapping[str, Mapping[str, float]]:
        return {name: self.row(BASELINES[name]) for name in self.baselines}

    def table(self, chunks: Iterable[int], policy: PolicyOfChunk = Sarathi) -> pd.DataFrame:
        """Predict each chunk under `policy`: a row per chunk, ascending.

        Columns, by the names of METRICS.md: chunk (tokens), throughput, its ratios to the
        baselines, the others of `row`, is_as_good (throughput within 1 % of the best row's, among
        those that meet the objective) and is_best. Raises UserError as `Scheduler` does, for a
        chunk below the batch or requests that do not fit.
        """
        rows = []
        for chunk in sorted(set(chunks)):
            row = self.row(policy(chunk))
            throughput = row.pop("throughput")
            ratios = {
                f"throughput_vs_{name}": throughput / baseline["throughput"]
                for name, baseline in self.baseline_rows.items()
            }
            rows.append({"chunk": chunk, "throughput": throughput, **ratios, **row})
        return _marked(pd.DataFrame(rows))


def candidates(requests: Sequence[Request], batch_size: int, tile: int) -> list[int]:
    """List the first chunks to predict (tokens), ascending from the batch: multiples of `tile`.

    Powers of two times the tile (section 4.4), up to the first that holds the longest prompt whole
    beside the decodes; and the neighbours of (P:D) (B - 1), at which prefills and decodes run out
    together (the optimum P:D = C / (B - 1) of section 4.3.3).
    """
    prompts = [request.prompt_len for request in requests]
    doublings = max(0, math.ceil(math.log2((max(prompts) + batch_size - 1) / tile)))
    num_tiles = {2**i for i in range(doublings + 1)}
    pd_ratio = sum(prompts) / sum(request.output_len for request in requests)
    balanced = pd_ratio * (batch_size - 1) / tile
    num_tiles |= {n for n in (math.floor(balanced), math.ceil(balanced)) if 1 <= n < 2**doublings}
    return sorted(n * tile for n in num_tiles if n * tile >= batch_size)


def advise(
    prediction: Prediction,
    tile: int,
    *,
    policy: PolicyOfChunk = Sarathi,
    chunks: Sequence[int] | None = None,
) -> Advice:
    """Choose the chunk of the highest throughput for `policy`, among those that meet the objective
    of `prediction` if any does.

    It is one of `chunks`, if given. Else it is resolved to a `tile`: the gaps beside the best of
    `candidates` are halved until they are a tile wide. Among the chunks within 1 % of the best, the
    lowest P99 time between tokens decides, then the smallest chunk.
    """
    tables: list[pd.DataFrame] = []
    untried = list(chunks or candidates(prediction.requests, prediction.engine.batch_size, tile))
    while untried:
        tables.append(prediction.table(untried, policy))
        tried = pd.concat(tables, ignore_index=True)
        untried = _halfway(tried, tile) if chunks is None else []
    table = _marked(tried.sort_values("chunk", ignore_index=True))
    best = table[table.is_as_good].sort_values(["tbt_p99", "chunk"]).iloc[0]
    objective = "the most tokens/s"
    if (slo := prediction.slo) is not None:
        under = f"under slo={slo.name} ({slo.describe()})"
        missed = "" if _eligible(table).slo_met.all() else ", which no chunk meets"
        objective = f"{objective} {under}{missed}"
    return Advice(int(best.chunk), table, objective, _whole_is_better(prediction, best))


def _whole_is_better(prediction: Prediction, best: pd.Series) -> str | None:
    """Explain why whole prompts are better than the row `best`; None if they are not. The rule is
    that among chunks, with the baselines, which cut nothing, as further candidates.
    """
    longest = max(request.prompt_len for request in prediction.requests)
    for name, baseline in prediction.baseline_rows.items():
        ratio, gap = baseline["throughput"] / best.throughput, baseline["tbt_p99"]
        is_better = ratio * (1 - AS_GOOD) > 1 or (ratio >= 1 - AS_GOOD and gap <= best.tbt_p99)
        if is_better and baseline.get("slo_met", True):
            return (
                f"{name}, which keeps prompts whole, serves {ratio:.2f} times the tokens/s of the "
                f"best chunk, {best.chunk:.0f} tokens; P99 between tokens is {1e3 * gap:.0f} "
                f"against {1e3 * best.tbt_p99:.0f} ms"
            )
    if best.chunk >= longest:
        return f"a chunk of {best.chunk:.0f} holds the longest prompt, {longest} tokens, whole"
    return None


def _eligible(table: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that meet the objective; all if there is none, or none meets it."""
    met = table.loc[table.slo_met] if "slo_met" in table else table
    return table if met.empty else met


def _halfway(table: pd.DataFrame, tile: int) -> list[int]:
    """List multiples of `tile` halfway between the best chunk and its neighbours, if any."""
    met, tried = _eligible(table), sorted(table.chunk)
    best = int(met.chunk.iloc[met.throughput.argmax()])
    place = tried.index(best)
    neighbours = tried[max(0, place - 1) : place + 2]
    return [(best + other) // (2 * tile) * tile for other in neighbours if abs(best - other) > tile]


def _marked(table: pd.DataFrame) -> pd.DataFrame:
    throughput = _eligible(table).throughput
    good = throughput[throughput >= (1 - AS_GOOD) * throughput.max()].index
    best = throughput[throughput == throughput.max()].index
    return table.assign(is_as_good=table.index.isin(good), is_best=table.index.isin(best))

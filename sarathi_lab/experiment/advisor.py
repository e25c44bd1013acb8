"""The recommended chunk, by prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.policy import Orca, Policy, RequestLevel, Sarathi
from sarathi_lab.results import metrics
from sarathi_lab.results.objective import outcome
from sarathi_lab.results.serving_metrics import Slo, latency
from sarathi_lab.results.steady import steady_part

BASELINES: Mapping[str, Policy] = {"request_level": RequestLevel(), "orca": Orca()}
AS_GOOD = 0.01  # a throughput that is less than this share below the best is as good
CLOSE = 0.1  # share of a chunk to which it is found where a bound is crossed

IterationTime = Callable[[Batch], float]  # seconds of one iteration
PolicyOfChunk = Callable[[int], Policy]
Row = pd.Series | Mapping[Any, Any]  # of a table of predictions


class Advice(NamedTuple):
    """The recommended chunk with its reasons."""

    chunk: int  # tokens of an iteration, decodes included
    table: pd.DataFrame  # of all predictions
    objective: str
    do_not_chunk: str | None = None  # why whole prompts are better, if so


def serve_by(
    iteration_time: IterationTime, requests: Sequence[Request], engine: EngineConfig
) -> Ledger:
    """Serve `requests` on a virtual clock that `iteration_time` advances."""
    return serve(requests, engine, SimulatedExecutor(iteration_time))


@dataclass(frozen=True)
class Prediction:
    """Simulation of `requests` on `engine` under any policy by `run`; without `slo`, whose bounds
    are in seconds, only throughput counts.
    """

    requests: Sequence[Request]
    engine: EngineConfig
    run: Callable[[EngineConfig], Ledger]
    baselines: Sequence[str] = tuple(BASELINES)
    slo: Slo | None = None

    def serve(self, policy: Policy) -> Ledger:
        return self.run(replace(self.engine, policy=policy))

    def row(self, policy: Policy) -> dict[str, float]:
        """Predict throughput (tokens/s), kv_reread_factor, tbt_p50 and tbt_p99 (seconds; NaN if no
        request has two tokens) and, with an objective, what `outcome` returns: of the steady part,
        where there is one, as of a run.
        """
        ledger = self.serve(policy)
        iterations, requests = ledger.iterations(), ledger.requests()
        rates = metrics.throughput(requests, float(iterations.end.max()))
        all_wait = not requests.arrival_time.any()
        part = steady_part(requests, self.engine.num_slots) if all_wait else None
        if part is not None:
            rates = part.throughput(requests)
            iterations, requests = part.spans(iterations), part.requests(requests)
        waits = latency(requests)
        read, computed = iterations.prefill_kv_tokens, iterations.num_prefill_tokens
        return {
            "throughput": rates["throughput"],
            "kv_reread_factor": read.sum() / computed.sum(),
            **{name: waits.get(name, math.nan) for name in ("tbt_p50", "tbt_p99")},
            **({} if self.slo is None else outcome(requests, self.slo)),
        }

    @cached_property
    def baseline_rows(self) -> Mapping[str, Mapping[str, float]]:
        return {name: self.row(BASELINES[name]) for name in self.baselines}

    def table(self, chunks: Iterable[int], policy: PolicyOfChunk = Sarathi) -> pd.DataFrame:
        """Predict each chunk under `policy`: a row per chunk, ascending.

        Columns, by the names of metrics.md: chunk (tokens), throughput, its ratios to the
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
        return marked(pd.DataFrame(rows))


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
    unit: int = 1,
) -> Advice:
    """Choose the chunk of the highest throughput for `policy`, among those that meet the objective
    of `prediction` if any does; else the one that comes nearest to it.

    It is one of `chunks`, if given. Else it is a multiple of `unit`, found from `candidates` on:
    where neighbours differ in a bound that they meet, to a tenth of the chunk; and beside the best
    to a `tile`. Among the chunks within 1 % of the best, `choose` decides.
    """
    if chunks is not None:
        table = prediction.table(chunks, policy)
    else:
        first = candidates(prediction.requests, prediction.engine.batch_size, tile)
        table = _first_table(prediction, first, policy)
        table = _refined(prediction, table, tile, unit, policy)
        largest = first[-1]
        is_missed = "slo_met" in table and not table.slo_met.any()
        if is_missed and largest > table.chunk.max():
            # The largest chunk misses bounds between tokens, but maybe no others.
            table = _with_rows(table, prediction.table([largest], policy))
            table = _refined(prediction, table, tile, unit, policy)
    table = marked(table)
    best = choose(table)
    objective = "the most tokens/s"
    if (slo := prediction.slo) is not None:
        missed = "" if best.slo_met else ", which no chunk meets"
        objective = f"{objective} under {slo.name} ({slo.describe()}){missed}"
    return Advice(int(best.chunk), table, objective, _whole_is_better(prediction, best))


def _refined(
    prediction: Prediction, table: pd.DataFrame, tile: int, unit: int, policy: PolicyOfChunk
) -> pd.DataFrame:
    """Predict chunks between those of `table` until none is left to try."""
    while untried := _untried(table, tile, unit, prediction.slo):
        table = _with_rows(table, prediction.table(untried, policy))
    return table


def _first_table(
    prediction: Prediction, chunks: Sequence[int], policy: PolicyOfChunk
) -> pd.DataFrame:
    """Predict `chunks` (ascending), but where requests arrive over time under an objective from the
    middle one on: up to the first that keeps up with the arrivals and misses a bound of times
    between tokens, which larger ones miss, too; and down to the first that misses none of these but
    keeps requests waiting, as smaller ones do.
    """
    slo = prediction.slo
    if slo is None or not any(request.arrival_time for request in prediction.requests):
        return prediction.table(chunks, policy)
    middle = len(chunks) // 2
    table = prediction.table(chunks[middle : middle + 1], policy)
    for chunk in chunks[middle + 1 :]:
        largest = table.iloc[-1]
        if largest.is_steady and largest.gap_bounds_missed:
            break
        table = _with_rows(table, prediction.table([chunk], policy))
    for chunk in reversed(chunks[:middle]):
        smallest = table.iloc[0]
        if not smallest.gap_bounds_missed and (smallest.bounds_missed or not smallest.is_steady):
            break
        table = _with_rows(table, prediction.table([chunk], policy))
    return table


def _with_rows(table: pd.DataFrame, more: pd.DataFrame) -> pd.DataFrame:
    both = pd.concat([table, more], ignore_index=True)
    return both.sort_values("chunk", ignore_index=True)


def choose(table: pd.DataFrame) -> pd.Series:
    """Choose among marked rows, of one policy or of several: of those that are as good as the best
    the one with the least P99 between tokens, under an objective the one whose worst requests are
    farthest within its bounds, then the smallest chunk. Where none meets the objective, the steady
    one that misses the fewest bounds, by the least; where none is steady, one of the shortest
    stalls (`outcome`'s classes), as tokens/s alone would crown what lets requests wait longest
    between tokens, then of the fewest such bounds missed and the most tokens/s. Of equal rows the
    first is chosen.
    """
    if "slo_met" not in table:
        return _least(table[table.is_as_good], "tbt_p99")
    if table.slo_met.any():
        return _least(table[table.is_as_good], "worst_use")
    steady = table[table.is_steady.astype(bool)]
    if steady.empty:
        served = table.assign(not_served=-table.throughput)
        ordered = ("stall_class", "gap_bounds_missed", "not_served")
        return _least(served, *ordered).drop("not_served")
    return _least(steady, "bounds_missed", "bound_use")


def _least(table: pd.DataFrame, *columns: str) -> pd.Series:
    """Return the row that is least in `columns`, then the one that cuts no prompt by its settings
    (`is_whole`, where there is that column), then the one of the smallest chunk.
    """
    is_cut = ~table.is_whole.astype(bool) if "is_whole" in table else False
    by = [*columns, "is_cut", "chunk"]
    ordered = table.assign(is_cut=is_cut).sort_values(by, kind="stable")
    return ordered.iloc[0].drop("is_cut")


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


def _untried(table: pd.DataFrame, tile: int, unit: int, slo: Slo | None) -> list[int]:
    """List the chunks to predict next, between those of `table` (ascending)."""
    if slo is None:
        return _halfway(table, tile)
    between = _crossings(table, unit, slo)
    if between:
        return between
    # Where requests arrive over time, all chunks that keep up serve as much: nothing to look for.
    met = _eligible(table)
    is_less = met.throughput < (1 - AS_GOOD) * met.throughput.max()
    return _halfway(table, tile) if table.slo_met.any() and is_less.any() else []


def _crossings(table: pd.DataFrame, unit: int, slo: Slo) -> list[int]:
    """List the chunks between neighbours where the objective may be met, or a bound of times
    between tokens is crossed, unless they are `CLOSE`.
    """
    rows = table.to_dict("records")
    between = []
    for low, high in pairwise(rows):
        missed = _missed(low, slo), _missed(high, slo)
        # A bound that both miss is missed between them, too.
        may_be_met = missed[0] != missed[1] and missed[0].isdisjoint(missed[1])
        if may_be_met or low["gap_bounds_missed"] != high["gap_bounds_missed"]:
            between += _between(int(low["chunk"]), int(high["chunk"]), unit)
    return between


def _missed(row: Row, slo: Slo) -> set[str]:
    """Return the bounds that a run misses, and "steady" where it does not keep up."""
    missed = {name for name, bound in slo.bounds.items() if row[slo.quantity_of(name)] > bound}
    return missed if row["is_steady"] else {*missed, "steady"}


def _between(low: int, high: int, unit: int) -> list[int]:
    """Return a chunk near the geometric mean of two, none if they are `CLOSE`: a multiple of
    `unit`, and of the largest power of two of it that is fine enough, so that it is no odd number.
    """
    if high <= (1 + CLOSE) * low:
        return []
    step = unit
    while 2 * step <= CLOSE * low:
        step *= 2
    middle = round(math.sqrt(low * high) / step) * step
    return [middle] if low < middle < high else []


def _halfway(table: pd.DataFrame, tile: int) -> list[int]:
    """List multiples of `tile` halfway between the best chunk and its neighbours, if any."""
    eligible = _eligible(table)
    tried = table.chunk.tolist()
    best = int(eligible.chunk.iloc[eligible.throughput.argmax()])
    position = tried.index(best)
    neighbours = tried[max(0, position - 1) : position + 2]
    halfway = [(best + other) // (2 * tile) * tile for other in neighbours]
    return [chunk for chunk in halfway if chunk not in tried]


def marked(table: pd.DataFrame) -> pd.DataFrame:
    """Mark the rows that are as good as the best, and the best, in throughput: of those that meet
    the objective, if any does.
    """
    throughput = _eligible(table).throughput
    good = throughput[throughput >= (1 - AS_GOOD) * throughput.max()].index
    best = throughput[throughput == throughput.max()].index
    return table.assign(is_as_good=table.index.isin(good), is_best=table.index.isin(best))

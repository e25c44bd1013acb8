"""What a run with a chunk gives on a device, predicted by simulation, and which chunk is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd

from sarathi_lab.engine.arrivals import Arrivals
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.objective import outcome
from sarathi_lab.results.serving_metrics import Slo, gaps, quantiles
from sarathi_lab.results.steady import steady_part

AS_GOOD = 0.01  # a throughput that is less than this share below the best is as good
CLOSE = 0.1  # share of a chunk to which it is found where a bound is crossed

Row = pd.Series | Mapping[Any, Any]  # what one run gives, by the names of metrics.md


class BestChunk(NamedTuple):
    """The recommended chunk (tokens of an iteration, decodes included), and what it is best by."""

    chunk: int
    table: pd.DataFrame  # of all predictions
    objective: str


def predict(
    requests: Iterable[Request] | Arrivals,
    engine: EngineConfig,
    executor: Executor,
    slo: Slo | None = None,
) -> dict[str, float]:
    """Serve requests in a simulation: what a policy with its chunk gives on a device.

    Args:
        requests: What is served, or how it arrives.
        engine: The policy with its chunk, the sequences and the cache.
        executor: The simulated device.
        slo: The objective in seconds; None without bounds.

    Raises:
        UserError: For a chunk below the batch, or requests that do not fit.
    """
    ledger = serve(requests, engine, executor)
    return quantities_of_run(ledger, engine, slo)


def quantities_of_run(
    ledger: Ledger, engine: EngineConfig, slo: Slo | None = None
) -> dict[str, float]:
    """Return what tells a policy and its chunk from others by a run.

    Args:
        ledger: The record of the run.
        engine: What ran.
        slo: The objective in seconds; None without bounds.

    Returns:
        throughput (tokens/s), kv_reread_factor, tbt_p50 and tbt_p99 (seconds; NaN if no request has
        two tokens) and, with an objective, what `outcome` returns. All are of the part between
        filling and draining, where there is one.
    """
    read = ("prefill_kv_tokens", "num_prefill_tokens")
    iterations = ledger.columns_of_iterations("start", "end", *read)
    served = ledger.requests()
    last_end = float(iterations.end.max())
    rates = throughput(served, last_end)
    part = None
    all_wait = not served.arrival_time.any()
    if all_wait:
        # All wait from the start: what fills and drains the batch would count as the policy's.
        part = steady_part(served, engine.num_slots)
    if part is not None:
        rates = part.throughput(served)
        iterations = part.spans(iterations)
        served = part.requests(served)
    between_tokens = quantiles("tbt", gaps(served), (0.5, 0.99))
    num_read = iterations.prefill_kv_tokens.sum()
    num_prefilled = iterations.num_prefill_tokens.sum()
    row = {
        "throughput": rates["throughput"],
        "kv_reread_factor": num_read / num_prefilled,
        "tbt_p50": between_tokens.get("tbt_p50", math.nan),
        "tbt_p99": between_tokens.get("tbt_p99", math.nan),
    }
    if slo is not None:
        row |= outcome(served, slo)
    return row


def candidates(requests: Sequence[Request], batch_size: int, tile: int) -> list[int]:
    """List the first chunks to predict (tokens), ascending from the batch: multiples of `tile`.

    Powers of two times the tile (section 4.4), up to the first that holds the longest prompt whole
    beside the decodes; and the neighbours of (P:D) (B - 1), at which prefills and decodes run out
    together (the optimum P:D = C / (B - 1) of section 4.3.3).
    """
    prompt_lens = [request.prompt_len for request in requests]
    output_lens = [request.output_len for request in requests]
    num_decodes = batch_size - 1
    largest = max(prompt_lens) + num_decodes
    chunk = tile
    chunks = {chunk}
    while chunk < largest:
        chunk *= 2
        chunks.add(chunk)
    pd_ratio = sum(prompt_lens) / sum(output_lens)
    num_balanced_tiles = pd_ratio * num_decodes / tile
    below = math.floor(num_balanced_tiles)
    above = math.ceil(num_balanced_tiles)
    for num_tiles in (below, above):
        balanced = num_tiles * tile
        if tile <= balanced < chunk:
            chunks.add(balanced)
    # A batch of decodes fills a smaller chunk, and no prompt is ever served.
    return [chunk for chunk in sorted(chunks) if chunk >= batch_size]


@dataclass
class ChunkSearch:
    """A search among chunks, each of which is predicted once.

    Attributes:
        predict: What a run with a chunk gives.
        slo: The objective; None without bounds.
        tile: Tokens to which the best chunk is found.
        unit: Tokens of which chunks are multiples where a bound is crossed.
        rows: What was predicted, by chunk.
    """

    predict: Callable[[int], Row]
    slo: Slo | None = None
    tile: int = 1
    unit: int = 1
    rows: dict[int, Row] = field(default_factory=dict)
    is_thorough: bool = field(default=True, init=False)  # see `search`

    @property
    def table(self) -> pd.DataFrame:
        """A row for each chunk, ascending."""
        rows = []
        for chunk in sorted(self.rows):
            row = self.rows[chunk]
            rows.append({"chunk": chunk, **row})
        return marked(pd.DataFrame(rows))

    def among(self, chunks: Iterable[int]) -> BestChunk:
        """Choose among `chunks`."""
        self._add(chunks)
        return self._best()

    def search(self, first: Sequence[int], *, arrive: bool, is_thorough: bool = True) -> BestChunk:
        """Choose among the chunks that are found from the `first` on (ascending): to a tenth where
        neighbours differ in a bound that they meet, and to a tile beside the best.

        Args:
            first: Chunks to begin with.
            arrive: Whether requests arrive over time.
            is_thorough: Whether each bound is found to a tenth; else only where the best chunk is
                beside it.
        """
        self.is_thorough = is_thorough
        if arrive and self.slo is not None:
            self._add_from_the_middle(first)
        else:
            self._add(first)
        self._refine()
        # The largest chunk misses bounds between tokens, but maybe no others.
        if self.slo is not None and not self.table.slo_met.any():
            largest = first[-1:]
            self._add(largest)
            self._refine()
        return self._best()

    def _best(self) -> BestChunk:
        table = self.table
        row = choose(table)
        objective = "the most tokens/s"
        if self.slo is not None:
            objective += f" under {self.slo.name} ({self.slo.describe()})"
            if not row.slo_met:
                objective += ", which no chunk meets"
        return BestChunk(int(row.chunk), table, objective)

    def _add(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if chunk not in self.rows:
                self.rows[chunk] = self.predict(chunk)

    def _add_from_the_middle(self, chunks: Sequence[int]) -> None:
        """Predict chunks up to the first that keeps up with the arrivals and misses a bound between
        tokens, which larger ones miss, too, or only has longer stalls than the chunk before; and
        down to the first that misses none of these but keeps requests waiting, as smaller ones do.
        """
        middle = len(chunks) // 2
        smaller = None
        for chunk in chunks[middle:]:
            self._add([chunk])
            row = self.rows[chunk]
            only_stalls = smaller is not None and _only_stalls(row, smaller)
            is_too_large = row["gap_bounds_missed"] or only_stalls
            if row["is_steady"] and is_too_large:
                break
            smaller = row
        for chunk in reversed(chunks[:middle]):
            # It may be another policy's best chunk, which was tried before.
            next_larger = min(tried for tried in self.rows if tried > chunk)
            row = self.rows[next_larger]
            keeps_waiting = row["bounds_missed"] or not row["is_steady"]
            if keeps_waiting and not row["gap_bounds_missed"]:
                break
            self._add([chunk])
        self._add_below_one_in_doubt(chunks)

    def _add_below_one_in_doubt(self, chunks: Sequence[int]) -> None:
        """Predict the next smaller chunk where it is in doubt whether the smallest so far keeps up.

        It is where that one is within its bounds, but not steady: a short run does not show whether
        its requests wait for ever longer.
        """
        smallest = min(self.rows)
        row = self.rows[smallest]
        is_in_doubt = not row["bounds_missed"] and not row["is_steady"]
        if not is_in_doubt:
            return
        smaller = [chunk for chunk in chunks if chunk < smallest]
        next_smaller = smaller[-1:]
        self._add(next_smaller)

    def _refine(self) -> None:
        while untried := self._untried():
            self._add(untried)

    def _untried(self) -> list[int]:
        """List the chunks to predict next, between those of the table."""
        table = self.table
        if self.slo is None:
            return self._beside_best(table)
        crossings = self._crossings(self.slo, table)
        if crossings or not table.slo_met.any():
            return crossings
        # Where requests arrive over time, all chunks that keep up serve as much.
        return self._beside_best(table, only_slower=True)

    def _beside_best(self, table: pd.DataFrame, *, only_slower: bool = False) -> list[int]:
        """List multiples of the tile halfway from the best chunk to the next ones in the table, or
        only to those of them that give fewer tokens/s.
        """
        tried = table.chunk.tolist()
        eligible = _eligible(table)
        # By position, the first of equal ones: labels of rows may differ from positions.
        fastest = int(eligible.throughput.to_numpy().argmax())
        best = int(eligible.chunk.iloc[fastest])
        least_as_good = (1 - AS_GOOD) * self.rows[best]["throughput"]
        position = tried.index(best)
        first = max(0, position - 1)
        neighbours = tried[first : position + 2]
        untried = []
        for neighbour in neighbours:
            rate = self.rows[neighbour]["throughput"]
            is_slower = rate < least_as_good
            if only_slower and not is_slower:
                continue
            halfway = (best + neighbour) // 2
            chunk = halfway // self.tile * self.tile
            if chunk not in tried:
                untried.append(chunk)
        return untried

    def _crossings(self, slo: Slo, table: pd.DataFrame) -> list[int]:
        """List the chunks between neighbours where the objective may be met, or a bound of times
        between tokens is crossed, unless they are `CLOSE`.
        """
        chunks = []
        pairs = list(pairwise(sorted(self.rows)))
        if not self.is_thorough and table.slo_met.any():
            best = int(choose(table).chunk)
            pairs = [pair for pair in pairs if best in pair]
        for low, high in pairs:
            row = self.rows[low]
            next_row = self.rows[high]
            missed = _missed(row, slo)
            next_missed = _missed(next_row, slo)
            # A bound that both miss is missed between them, too.
            both_miss = missed & next_missed
            may_be_met = missed != next_missed and not both_miss
            is_crossed = row["gap_bounds_missed"] != next_row["gap_bounds_missed"]
            if may_be_met or is_crossed:
                chunks += _between(low, high, self.unit)
        return chunks


def _only_stalls(row: Row, smaller: Row) -> bool:
    """Return whether a chunk stalls requests beyond a bound between tokens and longer than a
    `smaller` one, and serves no more.
    """
    is_beyond_bound = bool(row["stall_class"])
    is_longer = row["request_gap_p99"] > smaller["request_gap_p99"]
    most_as_good = (1 + AS_GOOD) * smaller["throughput"]
    serves_more = row["throughput"] > most_as_good
    return is_beyond_bound and is_longer and not serves_more


def _missed(row: Row, slo: Slo) -> set[str]:
    """Return the bounds that a run misses, and "steady" where it does not keep up."""
    missed = set(missed_bounds(row, slo))
    if not row["is_steady"]:
        missed.add("steady")
    return missed


def is_overloaded(row: Row) -> bool:
    """Return whether requests surely come faster in a run than they are served."""
    return not row["is_steady"] and not row["is_too_short"]


def missed_bounds(row: Row, slo: Slo) -> list[str]:
    """List the bounds of an objective that a run misses, by their names in `slo`."""
    missed = []
    for name, bound in slo.bounds.items():
        value = row[slo.quantity_of(name)]
        if value > bound:
            missed.append(name)
    return missed


def _between(low: int, high: int, unit: int) -> list[int]:
    """Return a chunk near the geometric mean of two, none if they are `CLOSE`: a multiple of
    `unit`, and of the largest power of two of it that is fine enough, so that it is no odd number.
    """
    if high <= (1 + CLOSE) * low:
        return []
    step = unit
    while 2 * step <= CLOSE * low:
        step *= 2
    mean = math.sqrt(low * high)
    num_steps = round(mean / step)
    middle = num_steps * step
    # Rounded to a step, it may have come to one of the two.
    if low < middle < high:
        return [middle]
    return []


def marked(table: pd.DataFrame) -> pd.DataFrame:
    """Mark the rows that are as good as the best (`is_as_good`) in throughput: of those that meet
    the objective, if any does.
    """
    rates = _eligible(table).throughput
    least = (1 - AS_GOOD) * rates.max()
    as_good = rates[rates >= least].index
    is_as_good = table.index.isin(as_good)
    return table.assign(is_as_good=is_as_good)


def _eligible(table: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that meet the objective; all if there is none, or none meets it."""
    if "slo_met" not in table:
        return table
    is_met = table.slo_met.astype(bool)
    if is_met.any():
        return table[is_met]
    return table


def choose(table: pd.DataFrame) -> pd.Series:
    """Choose among marked rows, of one policy or of several.

    Without an objective: of those that are as good as the best the one with the least P99 between
    tokens. Where some meet it: of these the one whose worst requests are farthest within its
    bounds. Where none does: the steady one that misses the fewest bounds, by the least. Where none
    is steady: one of the shortest stalls (`outcome`'s classes), as tokens/s alone would crown what
    lets requests wait longest between tokens, then of the fewest such bounds missed and the most
    tokens/s. Of equal ones whole prompts go first (`is_whole`, where there is that column), then
    the smallest chunk, then the first row.
    """
    if "slo_met" not in table:
        fast = table[table.is_as_good]
        order = ranked(fast, "tbt_p99")
    elif table.slo_met.any():
        fast = table[table.is_as_good]
        order = ranked(fast, "worst_use")
    elif table.is_steady.any():
        steady = table[table.is_steady.astype(bool)]
        order = ranked(steady, "bounds_missed", "bound_use")
    else:
        order = ranked(table, "stall_class", "gap_bounds_missed", "not_served")
    return order.iloc[0]


def ranked(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return the rows ascending by `columns`; equal ones have whole prompts first, then the
    smallest chunk. The column `not_served` puts the most tokens/s first.
    """
    ranks = table.assign(not_served=-table.throughput, is_cut=True)
    if "is_whole" in table:
        is_whole = table.is_whole.astype(bool)
        ranks["is_cut"] = ~is_whole
    order = [*columns, "is_cut", "chunk"]
    # Stable, so that of rows equal in all of these the first is chosen.
    ranks = ranks.sort_values(order, kind="stable")
    return table.loc[ranks.index]

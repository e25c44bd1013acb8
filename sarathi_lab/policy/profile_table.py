"""Times of an iteration by tokens, decodes and context, as Ascend's dynamic batch reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import readable
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch

COLUMNS = ("chunk_size", "p_len", "d_num", "ctx_len", "cost")
SMALLEST_CONTEXT = 128  # tokens


class Row(NamedTuple):
    """An iteration of `chunk_size` tokens, `d_num` of them decodes at `ctx_len`; `cost` in ms."""

    chunk_size: int
    d_num: int
    ctx_len: int
    cost: float


@dataclass(frozen=True)
class ProfileTable:
    """Rows in any order."""

    rows: tuple[Row, ...]

    def budget(self, context: float, num_decodes: int, slo: float) -> int | None:
        """The most tokens of an iteration within `slo` milliseconds, beside `num_decodes` decodes
        of `context` tokens.

        Both are rounded up to what the table has, of the rows within `slo`; None if it has nothing
        there.
        """
        chunk_sizes, contexts, counts = _within(self, slo)
        at, by = bisect_left(contexts, context), bisect_left(counts, num_decodes)
        if at == len(contexts) or by == len(counts):
            return None
        return chunk_sizes.get((contexts[at], counts[by]))

    def frame(self) -> pd.DataFrame:
        """vLLM-Ascend's columns; p_len is the prompt's tokens, cost in milliseconds."""
        table = pd.DataFrame(self.rows, columns=list(Row._fields))
        return table.assign(p_len=table.chunk_size - table.d_num)[list(COLUMNS)]

    def __repr__(self) -> str:
        return f"ProfileTable({len(self.rows)} rows)"


def make_profile_table(
    iteration_time: Callable[[Batch], float], batch_size: int, max_model_len: int
) -> ProfileTable:
    """The table that `iteration_time` (seconds of a batch) predicts, up to `batch_size` decodes of
    `max_model_len`.

    An iteration is decodes and the first tokens of one prompt. Chunk sizes are 2^k and 3 * 2^k
    tokens from 16, up to two of the longest sequences; numbers of decodes and contexts are powers
    of two.
    """
    largest = max(2048, 2 * max_model_len)
    sizes = [size << k for k in range(largest.bit_length()) for size in (16, 24)]
    chunk_sizes = sorted(size for size in sizes if size <= largest)
    shapes = [
        (chunk_size, d_num, ctx_len)
        for ctx_len in _doublings(SMALLEST_CONTEXT, max_model_len)
        for d_num in _doublings(1, batch_size)
        for chunk_size in chunk_sizes
        if chunk_size > d_num
    ]

    def cost(chunk_size: int, d_num: int, ctx_len: int) -> float:
        batch = make_batch(prefill_tokens=chunk_size - d_num, num_decodes=d_num, context=ctx_len)
        return 1e3 * iteration_time(batch)

    return ProfileTable(tuple(Row(*shape, cost(*shape)) for shape in shapes))


@lru_cache(maxsize=8)
def read_profile_table(path: str) -> ProfileTable:
    """The table in the CSV file `path`. Raises UserError if there is none."""
    needed = list(Row._fields)
    fix = f"use a CSV file with the columns {', '.join(needed)}, such as task=profile_table writes"
    with readable(f"profile_table={path}", fix, KeyError):
        table = pd.read_csv(Path(path))
        rows = tuple(
            Row(int(c), int(d), int(x), float(ms))
            for c, d, x, ms in table[needed].itertuples(index=False)
        )
    if not rows:
        raise UserError(f"profile_table={path} has no rows; write one by task=profile_table")
    return ProfileTable(rows)


@lru_cache(maxsize=64)
def _within(
    table: ProfileTable, slo: float
) -> tuple[dict[tuple[int, int], int], list[int], list[int]]:
    """The largest chunk within `slo` by (context, decodes), and those two, each ascending."""
    chunk_sizes: dict[tuple[int, int], int] = {}
    for row in table.rows:
        if row.cost <= slo:
            key = row.ctx_len, row.d_num
            chunk_sizes[key] = max(row.chunk_size, chunk_sizes.get(key, 0))
    contexts, counts = ({key[i] for key in chunk_sizes} for i in (0, 1))
    return chunk_sizes, sorted(contexts), sorted(counts)


def _doublings(start: int, end: int) -> list[int]:
    """`start` times powers of two, up to the first that is not below `end`."""
    values = [start]
    while values[-1] < end:
        values.append(2 * values[-1])
    return values

"""Sizes of an iteration's tensors, exact or of a padded shape, and CUDA graphs by shape."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from sarathi_kernels.attention.plan import TILE_ROWS, choose_tile_rows, plan_parts, room_for_parts
from sarathi_lab.engine.request import Batch
from sarathi_lab.model.roofline import TILE
from sarathi_lab.model.spec import ModelSpec

# Part-filled tiles that a padded shape has room for: so many prompts may share its tokens.
EXTRA_TILES = 8
LARGEST_GRAPH = 512  # decodes; larger batches keep the device busy enough without a graph
# Tokens of a batch with prompts. At peak (989 TFLOP/s) an H100 takes 0.42 ms for the products of
# so many in a layer of hidden size 2,048: about what launching its kernels takes the host.
LARGEST_HYBRID = 4096
ITERATIONS = 64  # for which a plan of parts is reused; contexts grow by a token in each
# Tokens: up to here hybrid shapes are in steps of half a tile, beyond of a whole one.
FINE_HYBRID = 512


@dataclass(frozen=True)
class Shape:
    """Sizes of one iteration's tensors, padding included; `max_blocks` of the block table."""

    num_tokens: int
    num_emits: int
    tile_rows: int
    num_sequences: int = 0
    num_decodes: int = 0
    num_tiles: int = 0
    max_blocks: int = 0
    num_parts: int = 0

    @property
    def num_reductions(self) -> int:
        """Decodes whose contexts may be split: none where there is no room for more parts."""
        return self.num_decodes if self.num_parts > self.num_decodes else 0


@dataclass(frozen=True)
class Limits:
    """Model, cache and multiprocessors, which bound every batch; `num_sms` is 0 without kernels."""

    spec: ModelSpec
    block_size: int
    num_sms: int

    def exact(self, batch: Batch) -> Shape:
        """Return the shape of `batch` without padding; a chunk of one token is a decode."""
        contexts = [start + num_tokens for _, start, num_tokens, _, _ in batch.chunks]
        num_decodes = num_tiles = tile_rows = num_parts = 0
        if self.num_sms > 0:  # plain torch and C++ attend without a plan
            lengths = [num_tokens for _, _, num_tokens, _, _ in batch.chunks]
            num_decodes = lengths.count(1)
            tile_rows = self.tile_rows(batch.num_tokens - num_decodes)
            num_tiles = _num_tiles(lengths, tile_rows)
            decoded = [end for end, length in zip(contexts, lengths, strict=True) if length == 1]
            num_parts = self.num_parts(num_decodes, max(decoded, default=0))
        return Shape(
            num_tokens=batch.num_tokens,
            num_sequences=len(batch),
            num_emits=batch.num_emits,
            num_decodes=num_decodes,
            num_tiles=num_tiles,
            max_blocks=-(-max(contexts) // self.block_size),
            tile_rows=tile_rows,
            num_parts=num_parts,
        )

    def tile_rows(self, num_prompt_tokens: int) -> int:
        return choose_tile_rows(num_prompt_tokens, self.spec.num_heads, self.num_sms)

    def num_parts(self, num_decodes: int, longest: int) -> int:
        """Return the room for the parts that contexts of decodes are cut into."""
        return room_for_parts(num_decodes, self.spec.num_kv_heads, longest, self.num_sms)


class Parts:
    """Parts of contexts of decodes, planned once for many iterations of the same decodes, in which
    the last parts grow by a token.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_iterations_left = 0  # of this plan
        self._expected: tuple[object, ...] = ()  # decodes, contexts and room that continue it
        self._parts = self._reductions = np.zeros((0, 0), dtype=np.int32)
        self._are_last = np.zeros(0, dtype=bool)

    def of(
        self, decodes: NDArray[np.int64], kv_lens: NDArray[np.int64], shape: Shape
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return `parts` and `reductions` (see AttentionPlan) of the sequences `decodes` of those
        with `kv_lens` cached tokens, within the room of `shape`.
        """
        contexts = kv_lens[decodes]
        room = (shape.num_parts, shape.num_reductions)
        asked = (decodes.tobytes(), contexts.tobytes(), room)
        if self._num_iterations_left and asked == self._expected:
            # Each context has a token more, at the end of its last part.
            self._parts[:, 2] += self._are_last
            self._num_iterations_left -= 1
        else:
            spec = self._limits.spec
            max_parts = shape.num_parts if shape.num_reductions else 0
            self._parts, self._reductions = plan_parts(
                decodes,
                contexts,
                spec.num_kv_heads,
                self._limits.num_sms,
                max_parts,
                spec.sliding_window,
            )
            sequences = self._parts[:, 0]
            self._are_last = self._parts[:, 2] == kv_lens[sequences]
            self._num_iterations_left = ITERATIONS
        one_token_later = contexts + 1
        self._expected = (decodes.tobytes(), one_token_later.tobytes(), room)
        return self._parts, self._reductions


class PaddedShapes:
    """Few shapes that batches of a run are padded to: `all`, the largest of a kind first, as its
    memory serves the next. Batches that fit none keep their exact shape.

    Decode-only batches take the next of `bucket_sizes` up to `batch_size` sequences, with drafts of
    up to `num_drafts` tokens others of as many sequences; those with prompts the next of
    `hybrid_sizes` up to `max_tokens` tokens, with room for decodes only if they have some: else
    each layer would launch its empty parts. `longest`, the most tokens of a sequence, is rounded up
    to a power of two, so that runs of similar lengths share graphs.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        batch_size: int,
        max_tokens: int,
        longest: int,
        num_drafts: int = 0,
    ) -> None:
        self._limits = limits
        self._longest = 1 << (longest - 1).bit_length()
        self._rows = 1 + num_drafts  # of logits of a sequence, at most
        buckets = bucket_sizes(batch_size)
        self._decodes = [self._padded(n, n, n, 0, TILE, num_emits=n) for n in buckets]
        self._drafts = [self._drafted(n) for n in buckets] if num_drafts else []
        self._hybrids: list[Shape] = []
        self._prompts: list[Shape] = []
        for size in hybrid_sizes(max_tokens):
            rows = limits.tile_rows(size)
            count = min(batch_size, size)  # of sequences
            num_tiles = -(-size // rows) + EXTRA_TILES
            if num_drafts:
                num_tiles += count  # each sequence's drafts begin a tile
            self._hybrids.append(self._padded(size, count, count, num_tiles, rows))
            self._prompts.append(self._padded(size, count, 0, num_tiles, rows))
        kinds = (self._hybrids, self._prompts, self._drafts, self._decodes)
        self.all = [shape for kind in kinds for shape in reversed(kind)]

    def _padded(
        self,
        num_tokens: int,
        num_sequences: int,
        num_decodes: int,
        num_tiles: int,
        tile_rows: int,
        num_emits: int | None = None,
    ) -> Shape:
        return Shape(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_emits=num_emits or min(num_tokens, num_sequences * self._rows),
            num_decodes=num_decodes,
            num_tiles=num_tiles,
            max_blocks=-(-self._longest // self._limits.block_size),
            tile_rows=tile_rows,
            num_parts=self._limits.num_parts(num_decodes, self._longest),
        )

    def _drafted(self, num_sequences: int) -> Shape:
        """Return the shape of decodes any of which may have drafts: a tile each, if it has."""
        rows = TILE_ROWS[0]
        num_tiles = num_sequences * -(-self._rows // rows)
        num_tokens = num_sequences * self._rows
        return self._padded(num_tokens, num_sequences, num_sequences, num_tiles, rows)

    def choose(self, batch: Batch) -> Shape:
        """Return the padded shape for `batch`, or the exact one if it fits none."""
        if batch.num_prefills:
            has_decodes = any(num_tokens == 1 for _, _, num_tokens, _, _ in batch.chunks)
            shapes = self._hybrids if has_decodes else self._prompts
        else:
            shapes = self._drafts if batch.num_draft_tokens else self._decodes
        first = bisect_left(shapes, batch.num_tokens, key=attrgetter("num_tokens"))
        # Few drafts leave tokens of a shape empty, not sequences: then a larger one may fit.
        last = len(shapes) if batch.num_draft_tokens else first + 1
        for shape in shapes[first:last]:
            if self._fits(batch, shape):
                return shape
        return self._limits.exact(batch)

    def _fits(self, batch: Batch, shape: Shape) -> bool:
        """Return whether `shape` fits `batch` beyond its number of tokens."""
        if len(batch) > shape.num_sequences or batch.num_emits > shape.num_emits:
            return False
        if shape.num_tiles == 0:
            return max(map(_start, batch.chunks)) < self._longest
        contexts = [start + num_tokens for _, start, num_tokens, _, _ in batch.chunks]
        if max(contexts) > self._longest:
            return False
        lengths = (chunk.num_tokens for chunk in batch.chunks)
        return _num_tiles(lengths, shape.tile_rows) <= shape.num_tiles


_start = attrgetter("start")


def _num_tiles(lengths: Iterable[int], tile_rows: int) -> int:
    """Count the tiles of chunks of such lengths; a chunk of one token is a decode."""
    return sum(-(-num_tokens // tile_rows) for num_tokens in lengths if num_tokens > 1)


def hybrid_sizes(max_tokens: int) -> list[int]:
    """Return 64, 128, … 512, 640, 768, … up to `max_tokens`, which is the last; none beyond
    LARGEST_HYBRID. Padding to the next adds no tile of `TILE` rows to matrix products.
    """
    largest = min(max_tokens, LARGEST_HYBRID)
    half_tile = TILE // 2
    fine = range(half_tile, min(largest, FINE_HYBRID), half_tile)
    coarse = range(FINE_HYBRID, largest, TILE)
    return [*fine, *coarse, largest]


def bucket_sizes(batch_size: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24, … up to `batch_size`, the last; none beyond LARGEST_GRAPH."""
    largest = min(batch_size, LARGEST_GRAPH)
    sizes = (1, 2, 4, 8, *range(16, largest, 8))
    smaller = [size for size in sizes if size < largest]
    return [*smaller, largest]


class NoGraphs:
    """Launches of each operation by itself; the base of recorders of work by shape, or by any other
    key.
    """

    def capture(self, key: Hashable, work: Callable[[], object]) -> None:
        """Record `work`, which must have run once before."""

    def replay(self, key: Hashable) -> bool:
        """Replay the work of `key`; return False if none is recorded."""
        return False

    def drop(self, key: Hashable) -> None:
        """Discard the record of `key`, if any."""


class CudaGraphs(NoGraphs):
    """CUDA graphs; intermediate results share one memory pool, so only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Hashable, work: Callable[[], object]) -> None:
        graph = torch.cuda.CUDAGraph()
        # The outer context: torch keeps its stream current where a capture fails.
        current = torch.cuda.stream(torch.cuda.current_stream())
        with current, torch.cuda.graph(graph, pool=self._pool), _without_collector():
            work()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> bool:
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph.replay()
        return True

    def drop(self, key: Hashable) -> None:
        self._graphs.pop(key, None)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep finalisers of cycles, such as one that unlocks host memory, out of a capture, which they
    would void.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

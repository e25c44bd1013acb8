"""What a decode costs alone and piggybacked on a chunk: the paper's central comparison (Table 2,
Fig 8).

Measured by paired probes on the executor, after the run: the run's fullest hybrid batch is taken
apart and run as chunk alone, decodes alone and both together, back to back, so that drift of the
machine cancels.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState

MIN_REPETITIONS = 3
MAX_REPETITIONS = 15


@dataclass(frozen=True)
class Composition:
    """A hybrid batch in a few numbers (tokens): one chunk at an offset, and decodes of equal
    context.
    """

    chunk_tokens: int
    chunk_start: int
    chunk_emits: bool
    num_decodes: int
    decode_context: int


@dataclass(frozen=True)
class DecodeCost:
    """Seconds per decode token: `alone` in a decode-only batch, `marginal` in the hybrid batch.

    `marginal` is (hybrid - same chunk alone) / num_decodes, the median over paired repetitions; on
    a noisy machine it can come out negative, which says that it is below the noise.
    """

    alone: float
    marginal: float
    composition: Composition


def fullest_hybrid(iterations: pd.DataFrame) -> Composition | None:
    """The fullest mix of one chunk and decodes in a run, at its median contexts; None if never
    mixed.

    The most decodes beside a chunk (the paper's B - 1); of the chunks seen there the most frequent,
    then the largest.
    """
    hybrids = iterations[(iterations.num_prefills == 1) & (iterations.num_decode_tokens > 0)]
    if hybrids.empty:
        return None
    num_decodes = int(hybrids.num_decode_tokens.max())
    fullest = hybrids[hybrids.num_decode_tokens == num_decodes]
    chunk_tokens = int(fullest.num_prefill_tokens.mode().max())
    same = fullest[fullest.num_prefill_tokens == chunk_tokens]
    return Composition(
        chunk_tokens=chunk_tokens,
        chunk_start=int((same.prefill_kv_tokens - same.num_prefill_tokens).median()),
        chunk_emits=bool((same.num_emits > same.num_decode_tokens).mean() > 0.5),
        num_decodes=num_decodes,
        decode_context=int(np.median(same.decode_kv_tokens / same.num_decode_tokens)),
    )


def measure_decode_cost(
    executor: Executor,
    composition: Composition,
    *,
    num_blocks: int,
    block_size: int,
    seconds: float = 1.5,
) -> DecodeCost:
    """Run the three batches in turn until `seconds` of wall time are spent (at least 3, at most 15
    times each).
    """
    composition = _fitted(composition, num_blocks, block_size)
    probe = _Probe(executor, composition, BlockManager(num_blocks, block_size))
    alone: list[float] = []
    marginal: list[float] = []
    deadline = time.monotonic() + seconds
    while len(alone) < MIN_REPETITIONS or (
        time.monotonic() < deadline and len(alone) < MAX_REPETITIONS
    ):
        chunk = probe.time(with_chunk=True, with_decodes=False)
        hybrid = probe.time(with_chunk=True, with_decodes=True)
        decodes = probe.time(with_chunk=False, with_decodes=True)
        alone.append(decodes / composition.num_decodes)
        marginal.append((hybrid - chunk) / composition.num_decodes)
    return DecodeCost(median(alone), median(marginal), composition)


def decode_iteration(
    executor: Executor,
    num_decodes: int,
    context: int,
    *,
    num_blocks: int,
    block_size: int,
    repetitions: int = 5,
) -> float:
    """Median seconds of `num_decodes` decodes in an iteration that each see `context` tokens, or as
    many as fit; on a pipeline from the first stage to the last.
    """
    context = max(2, min(context, num_blocks // num_decodes * block_size))
    blocks = BlockManager(num_blocks, block_size)
    decodes = [_decode(context, blocks) for _ in range(num_decodes)]
    seconds = []
    for _ in range(repetitions + 1):  # the first warms up
        batch = Batch()
        for decode in decodes:
            batch.add(decode, 1)
        result = _run(executor, batch)
        seconds.append(result.end - result.start)
    return median(seconds[1:])


def _run(executor: Executor, batch: Batch) -> StepResult:
    """One iteration of a batch that can then be run again."""
    executor.submit(batch)
    result = executor.collect()
    for part in batch.chunks:
        part.sequence.in_flight = False
    return result


def _fitted(composition: Composition, num_blocks: int, block_size: int) -> Composition:
    """The composition with contexts shortened to what the cache holds: medians may never have been
    there together.
    """
    most_for_chunk = (
        num_blocks - composition.num_decodes
    ) * block_size  # a block for each decode at least
    chunk_start = min(composition.chunk_start, most_for_chunk - composition.chunk_tokens)
    chunk_blocks = -(-(chunk_start + composition.chunk_tokens) // block_size)
    most_for_decode = (num_blocks - chunk_blocks) // composition.num_decodes * block_size
    return replace(
        composition,
        chunk_start=chunk_start,
        decode_context=max(2, min(composition.decode_context, most_for_decode)),
    )


class _Probe:
    """Builds the same batch again and again over the same cache blocks."""

    def __init__(self, executor: Executor, composition: Composition, blocks: BlockManager) -> None:
        self.executor = executor
        chunk_end = composition.chunk_start + composition.chunk_tokens
        prompt_len = chunk_end if composition.chunk_emits else chunk_end + 1
        self.chunk_tokens = composition.chunk_tokens
        self.chunk = _sequence(prompt_len, composition.chunk_start, blocks, holds=chunk_end)
        context = composition.decode_context  # includes the token being decoded
        self.decodes = [_decode(context, blocks) for _ in range(composition.num_decodes)]

    def time(self, *, with_chunk: bool, with_decodes: bool) -> float:
        """Seconds of one iteration of the chosen parts; on a pipeline, of a stage."""
        batch = Batch()
        for decode in self.decodes if with_decodes else ():
            batch.add(decode, 1)
        if with_chunk:
            batch.add(self.chunk, self.chunk_tokens)
        return _run(self.executor, batch).busy


def _decode(context: int, blocks: BlockManager) -> SequenceState:
    """A sequence whose next token sees `context` tokens, its own included."""
    decode = _sequence(context - 1, context - 1, blocks, holds=context)
    decode.output_token_ids.append(0)  # the pending token
    return decode


def _sequence(
    prompt_len: int, num_computed: int, blocks: BlockManager, holds: int
) -> SequenceState:
    request = Request(0, 0.0, prompt_len, 2, np.zeros(prompt_len, dtype=np.int32))
    sequence = SequenceState(request, order=0)
    sequence.num_computed = num_computed
    if not blocks.grow(sequence, holds):
        raise RuntimeError(
            f"no cache blocks for a probe of {holds} tokens, though the run held such a batch"
        )
    return sequence

"""Cost of a decode alone and piggybacked on a chunk: the paper's main comparison (Table 2, Fig 8).

Measured after the run by paired probes on the executor: the chunk of the run's fullest hybrid
batch, its decodes, and both together run back to back, so that drift of the machine cancels.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import pandas as pd

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch, make_sequence, run_once
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch

REPETITIONS = 5
MIN_REPETITIONS, MAX_REPETITIONS = 3, 15


@dataclass(frozen=True)
class Composition:
    """One chunk at an offset, and decodes of equal context [tokens], the current one included."""

    chunk_tokens: int
    chunk_start: int
    chunk_emits: bool
    num_decodes: int
    decode_context: int


@dataclass(frozen=True)
class DecodeCost:
    """Seconds per decode token: `alone` in a decode-only batch, `marginal` in the hybrid batch.

    `marginal` is (hybrid - same chunk alone) / num_decodes, the median over paired repetitions; a
    negative value is below the noise.
    """

    alone: float
    marginal: float
    composition: Composition


def fullest_hybrid(iterations: pd.DataFrame) -> Composition | None:
    """Return the mix of one chunk with the most decodes (the paper's B - 1) in a run, the most
    frequent and then largest such chunk, at median contexts; None if there is none, or with drafts.
    """
    hybrids = iterations[(iterations.num_prefills == 1) & (iterations.num_decode_tokens > 0)]
    if hybrids.empty or "num_draft_tokens" in iterations:
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
    """Run the three batches in turn for `seconds` of wall time (3 to 15 times each); on a pipeline
    a stage's time counts.
    """
    composition = _fitted(composition, num_blocks, block_size)
    blocks = BlockManager(num_blocks, block_size)
    tokens, emits = composition.chunk_tokens, composition.chunk_emits
    chunk = make_sequence(composition.chunk_start, tokens, emits=emits, blocks=blocks)
    decodes = [
        make_sequence(composition.decode_context - 1, is_decode=True, blocks=blocks)
        for _ in range(composition.num_decodes)
    ]

    def busy(num_decodes: int, chunk_tokens: int) -> float:
        batch = Batch()
        for decode in decodes[:num_decodes]:
            batch.add(decode, 1)
        if chunk_tokens:
            batch.add(chunk, chunk_tokens)
        return run_once(executor, batch).busy

    alone, marginal = [], []
    deadline = time.monotonic() + seconds
    for repetition in range(MAX_REPETITIONS):
        if repetition >= MIN_REPETITIONS and time.monotonic() >= deadline:
            break
        alone_chunk, hybrid = busy(0, tokens), busy(len(decodes), tokens)
        alone.append(busy(len(decodes), 0) / len(decodes))
        marginal.append((hybrid - alone_chunk) / len(decodes))
    return DecodeCost(median(alone), median(marginal), composition)


def decode_iteration(
    executor: Executor, num_decodes: int, context: int, *, num_blocks: int, block_size: int
) -> float:
    """Return the median seconds of an iteration of `num_decodes` decodes at `context` tokens, or as
    many as fit; on a pipeline from the first stage to the last.
    """
    context = max(2, min(context, num_blocks // num_decodes * block_size))
    blocks = BlockManager(num_blocks, block_size)
    batch = make_batch(num_decodes=num_decodes, context=context, blocks=blocks)
    results = [run_once(executor, batch) for _ in range(REPETITIONS + 1)]  # the first warms up
    return median(result.end - result.start for result in results[1:])


def _fitted(composition: Composition, num_blocks: int, block_size: int) -> Composition:
    """Shorten contexts to fit the cache together, as medians may not have occurred at once."""
    num_decodes, tokens = composition.num_decodes, composition.chunk_tokens
    most_for_chunk = (num_blocks - num_decodes) * block_size  # a block for each decode at least
    chunk_start = min(composition.chunk_start, most_for_chunk - tokens)
    chunk_blocks = -(-(chunk_start + tokens) // block_size)
    most_for_decode = (num_blocks - chunk_blocks) // num_decodes * block_size
    decode_context = max(2, min(composition.decode_context, most_for_decode))
    return replace(composition, chunk_start=chunk_start, decode_context=decode_context)

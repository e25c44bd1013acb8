"""Cost of a decode alone and piggybacked on a chunk: the paper's main comparison (Table 2, Fig 8).

Measured after the run by paired probes on the executor: the chunk of the run's fullest hybrid
batch, its decodes, and both together run back to back, so that drift of the machine cancels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

import numpy as np

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.single_iteration import SingleIteration, single_iteration
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.results.table import Iterations

REPETITIONS = 5
MIN_REPETITIONS = 3
MAX_REPETITIONS = 15
Item = tuple[SequenceState, int]  # of a batch: how many tokens of the sequence it computes


class Mix(TypedDict):
    """Arguments of `make_batch`: a chunk, and decodes beside it."""

    prefill_tokens: int
    start: int
    emits: bool
    num_decodes: int
    context: int


@dataclass(frozen=True)
class DecodeCost:
    """Seconds per decode token: `alone` in a decode-only batch, `marginal` in the hybrid batch with
    `num_decodes` beside a chunk of `num_chunk_tokens`.

    `marginal` is (hybrid - same chunk alone) / num_decodes, the median over paired repetitions; a
    negative value is below the noise. `host_share` is the largest median of the three batches'
    (`SingleIteration.host_share`); None where times are simulated.
    """

    alone: float
    marginal: float
    num_decodes: int
    num_chunk_tokens: int
    host_share: float | None = None


def fullest_hybrid(iterations: Iterations) -> Mix | None:
    """Return the mix of one chunk with the most decodes (the paper's B - 1) in a run, the most
    frequent and then largest such chunk, at median contexts; None if there is none, or with drafts.
    """
    has_one_chunk = iterations.num_prefills == 1
    has_decodes = iterations.num_decode_tokens > 0
    hybrids = iterations[has_one_chunk & has_decodes]
    if hybrids.empty or "num_draft_tokens" in iterations:
        return None
    # With the most decodes their cost stands out most from the noise of a difference.
    num_decodes = int(hybrids.num_decode_tokens.max())
    fullest = hybrids[hybrids.num_decode_tokens == num_decodes]
    chunk_tokens = int(fullest.num_prefill_tokens.mode().max())
    same = fullest[fullest.num_prefill_tokens == chunk_tokens]
    # A chunk's keys and values are read with those before it.
    starts = same.prefill_kv_tokens - same.num_prefill_tokens
    # Each decode emits a token; one more is that of a prompt's last chunk.
    emits = same.num_emits > same.num_decode_tokens
    contexts = same.decode_kv_tokens / same.num_decode_tokens
    return {
        "prefill_tokens": chunk_tokens,
        "start": int(starts.median()),
        "emits": bool(emits.mean() > 0.5),
        "num_decodes": num_decodes,
        "context": int(np.median(contexts)),
    }


def measure_decode_cost(
    executor: Executor,
    sizes: Mix,
    *,
    num_blocks: int,
    block_size: int,
    seconds: float = 1.5,
) -> DecodeCost:
    """Run the three batches in turn, 3 to 15 times in `seconds`; of a pipeline a stage counts."""
    sizes = _fitted(sizes, num_blocks, block_size)
    blocks = BlockManager(num_blocks, block_size)
    hybrid_batch = make_batch(**sizes, blocks=blocks)
    items = [(chunk.sequence, chunk.num_tokens) for chunk in hybrid_batch.chunks]
    for sequence, _ in items:
        # `make_batch` marked them as on their way, but each is run several times.
        sequence.in_flight = False
    *decode_items, _ = items  # the prompt's chunk is the last

    def timed(chosen: Sequence[Item]) -> SingleIteration:
        batch = Batch()
        for sequence, num_tokens in chosen:
            batch.add(sequence, num_tokens)
        return single_iteration(executor, batch)

    chunks: list[SingleIteration] = []
    hybrids: list[SingleIteration] = []
    decodes: list[SingleIteration] = []
    deadline = time.monotonic() + seconds
    for repetition in range(MAX_REPETITIONS):
        if repetition >= MIN_REPETITIONS and time.monotonic() >= deadline:
            break
        # In turn, not one kind after the other, so that a drift of the clock meets all alike.
        chunks.append(timed(items[-1:]))
        hybrids.append(timed(items))
        decodes.append(timed(decode_items))
    added = []
    for hybrid, chunk in zip(hybrids, chunks, strict=True):
        added.append(hybrid.seconds - chunk.seconds)
    host_share = None
    if executor.num_blocks is not None:
        host_shares = map(_host_share, (chunks, hybrids, decodes))
        host_share = max(host_shares)
    num_decodes = len(decode_items)
    return DecodeCost(
        alone=median(decode.seconds for decode in decodes) / num_decodes,
        marginal=median(added) / num_decodes,
        num_decodes=num_decodes,
        num_chunk_tokens=sizes["prefill_tokens"],
        host_share=host_share,
    )


def _host_share(timings: Sequence[SingleIteration]) -> float:
    return median(iteration.host_share for iteration in timings)


def decode_iteration(
    executor: Executor,
    num_decodes: int,
    context: int,
    *,
    num_blocks: int,
    block_size: int,
) -> float:
    """Return the median seconds of an iteration of `num_decodes` decodes at `context` tokens, or as
    many as fit; on a pipeline from the first stage to the last.
    """
    most_for_decode = num_blocks // num_decodes * block_size
    # A decode has at least a prompt's token and its own.
    context = max(2, min(context, most_for_decode))
    blocks = BlockManager(num_blocks, block_size)
    batch = make_batch(num_decodes=num_decodes, context=context, blocks=blocks)
    seconds = []
    for _ in range(REPETITIONS + 1):
        iteration = single_iteration(executor, batch)
        result = iteration.result
        took = iteration.seconds
        if result.stages:  # whose `seconds` are of one stage
            took = result.end - result.start
        seconds.append(took)
    return median(seconds[1:])  # the first warms up


def slo_reference(slo: Slo, engine: EngineConfig, executor: Executor) -> float | None:
    """Return the decode iteration that a relative objective refers to (seconds), of at most the
    engine's batch and length; None for bounds in seconds. Runs a few iterations.
    """
    if not slo.is_relative:
        return None
    assert engine.max_model_len is not None
    return decode_iteration(
        executor,
        min(slo.decode_batch, engine.batch_size),
        min(slo.decode_context, engine.max_model_len - 1),  # which a last token follows
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
    )


def slo_in_seconds(slo: Slo, engine: EngineConfig, executor: Executor) -> Slo:
    """Return the objective with its relative bound in this device's seconds."""
    return slo.resolved(slo_reference(slo, engine, executor))


def _fitted(sizes: Mix, num_blocks: int, block_size: int) -> Mix:
    """Shorten contexts to fit the cache together, as medians may not have occurred at once."""
    num_decodes = sizes["num_decodes"]
    tokens = sizes["prefill_tokens"]
    most_for_chunk = (num_blocks - num_decodes) * block_size  # a block for each decode at least
    latest_start = most_for_chunk - tokens
    start = min(sizes["start"], latest_start)
    chunk_blocks = -(-(start + tokens) // block_size)
    most_for_decode = (num_blocks - chunk_blocks) // num_decodes * block_size
    context = min(sizes["context"], most_for_decode)
    return {
        **sizes,
        "start": start,
        "context": max(2, context),  # a prompt's token and its own
    }

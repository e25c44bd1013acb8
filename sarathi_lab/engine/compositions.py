"""Sequences and batches of given shapes, for probes, predictions and the paper's tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor, StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState


def make_sequence(
    start: int,
    num_tokens: int = 1,
    *,
    is_decode: bool = False,
    emits: bool = False,
    order: int = 0,
    token_ids: NDArray[np.int32] | None = None,
    blocks: BlockManager | None = None,
) -> SequenceState:
    """Make a sequence with `start` tokens computed, about to take `num_tokens` more.

    A decode takes its newest generated token; a prompt is unfinished, or ends there with `emits`.
    With `blocks` it holds cache for all tokens, which are zeros or the prompt's `token_ids`. Raises
    RuntimeError if blocks are short.
    """
    end = start + num_tokens
    prompt_len = start if is_decode else end + (not emits)
    if blocks is not None and token_ids is None:
        token_ids = np.zeros(prompt_len, dtype=np.int32)
    sequence = SequenceState(Request(order, 0.0, prompt_len, 2, token_ids), order)
    sequence.num_computed = start
    if is_decode:
        sequence.output_token_ids.append(0)  # the pending token
    if blocks is not None and not blocks.grow(sequence, end):
        raise RuntimeError(f"no free cache blocks for a sequence of {end} tokens")
    return sequence


def make_batch(
    *,
    prefill_tokens: int = 0,
    start: int = 0,
    num_prefills: int = 1,
    num_decodes: int = 0,
    context: int = 1,
    emits: bool = False,
    blocks: BlockManager | None = None,
) -> Batch:
    """Make a batch of decodes with `context` tokens each (their new one included, as in the paper),
    then `num_prefills` chunks of `prefill_tokens` tokens at offset `start`; see `make_sequence`.
    """
    batch = Batch()
    for order in range(num_decodes):
        decode = make_sequence(context - 1, is_decode=True, order=order, blocks=blocks)
        batch.add(decode, 1)
    for order in range(num_decodes, num_decodes + num_prefills if prefill_tokens else 0):
        prompt = make_sequence(start, prefill_tokens, emits=emits, order=order, blocks=blocks)
        batch.add(prompt, prefill_tokens)
    return batch


def run_once(executor: Executor, batch: Batch) -> StepResult:
    """Run one iteration of `batch`, which can be run again afterwards."""
    executor.submit(batch)
    result = executor.collect()
    for chunk in batch.chunks:
        chunk.sequence.in_flight = False
    return result


def rehearse(
    executor: Executor, num_blocks: int, block_size: int, batch_size: int, chunk_tokens: int
) -> None:
    """Run a chunk at the start of a prompt, one at an offset and `batch_size` single tokens, as
    far as the cache holds them.
    """
    half = max(1, min(chunk_tokens, num_blocks * block_size // 2))
    blocks = BlockManager(num_blocks, block_size)
    if 2 * half <= num_blocks * block_size:
        prompt = make_sequence(0, 2 * half, emits=True, blocks=blocks)
        for start in (0, half):
            prompt.num_computed = start
            batch = Batch()
            batch.add(prompt, half)
            run_once(executor, batch)
        blocks.free(prompt)
    num_prefills = min(batch_size, num_blocks)
    singles = make_batch(prefill_tokens=1, num_prefills=num_prefills, emits=True, blocks=blocks)
    run_once(executor, singles)

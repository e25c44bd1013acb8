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
    spare: int = 0,
) -> SequenceState:
    """Make a sequence with `start` tokens computed, about to take `num_tokens` more.

    A decode takes its newest generated token; a prompt is unfinished, or ends there with `emits`.
    With `blocks` it holds cache for all tokens, which are zeros or the prompt's `token_ids`, and
    for `spare` ones to decode after them (`again`). Raises RuntimeError if blocks are short.
    """
    end = start + num_tokens
    prompt_len = _prompt_len(start, end, is_decode, emits)
    if blocks is not None and token_ids is None:
        token_ids = np.zeros(prompt_len, dtype=np.int32)
    sequence = SequenceState(Request(order, 0.0, prompt_len, 2 + spare, token_ids), order)
    sequence.num_computed = start
    if is_decode:
        sequence.output_token_ids.append(0)  # the pending token
    if blocks is not None and not blocks.grow(sequence, end + spare):
        raise RuntimeError(f"no free cache blocks for a sequence of {end} tokens")
    return sequence


def _prompt_len(start: int, end: int, is_decode: bool, emits: bool) -> int:
    """Return the tokens of the prompt of a sequence that computes tokens `start` to `end`."""
    if is_decode:
        return start
    if emits:
        return end
    return end + 1  # what is computed is not the last of the prompt


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
    """Make a batch of equal decodes, then equal chunks; see `make_sequence`.

    Args:
        prefill_tokens: Tokens of a chunk; 0: no chunks.
        start: Tokens of its prompt before it.
        num_prefills: Number of chunks.
        num_decodes: Number of decodes.
        context: Tokens of each, its new one included, as in the paper.
        emits: Chunks are the last of their prompts.
        blocks: Where sequences get their cache; None: they have none.
    """
    batch = Batch()
    for order in range(num_decodes):
        decode = make_sequence(context - 1, is_decode=True, order=order, blocks=blocks)
        batch.add(decode, 1)
    if prefill_tokens == 0:
        return batch
    for order in range(num_decodes, num_decodes + num_prefills):
        prompt = make_sequence(start, prefill_tokens, emits=emits, order=order, blocks=blocks)
        batch.add(prompt, prefill_tokens)
    return batch


def placed(
    batch: Batch,
    blocks: BlockManager,
    random: np.random.Generator,
    vocab_size: int,
    *,
    spare: int = 0,
) -> Batch | None:
    """Return `batch` on sequences with cache `blocks` and random tokens, `spare` ones to decode
    included; None if it does not fit.
    """
    copy = Batch()
    for order, chunk in enumerate(batch.chunks):
        end = chunk.start + chunk.num_tokens
        more = spare if chunk.is_decode else 0
        if not blocks.can_hold(end + more):
            return None
        prompt_len = _prompt_len(chunk.start, end, chunk.is_decode, chunk.emits_token)
        sequence = make_sequence(
            chunk.start,
            chunk.num_tokens,
            is_decode=chunk.is_decode,
            emits=chunk.emits_token,
            order=order,
            token_ids=random.integers(0, vocab_size, prompt_len, dtype=np.int32),
            blocks=blocks,
            spare=more,
        )
        copy.add(sequence, chunk.num_tokens)
    return copy


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


def again(result: StepResult) -> Batch:
    """Return the batch of `result` for the next iteration: prompts as they were, decodes one token
    further, as executors know them, or back at their first token once nothing is `spare`.
    """
    batch = Batch()
    token_ids = iter(result.token_ids)
    for sequence, _, num_tokens, is_decode, emits in result.batch.chunks:
        sequence.in_flight = False
        token = next(token_ids, 0) if emits else 0
        output = sequence.output_token_ids
        if is_decode and len(output) + 1 < sequence.request.output_len:
            sequence.num_computed += 1
            output.append(token)
        elif is_decode:
            sequence.num_computed -= len(output) - 1
            del output[1:]
        batch.add(sequence, num_tokens)
    return batch

"""What the model says of given tokens (teacher forcing), cut and batched as a run would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.executor import TorchExecutor

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Cuts:
    """How a text is prefilled: a first chunk of `offset` tokens (0: none), then chunks of `chunk`.

    With `prefix_hit` its first half, in whole blocks, is found in the prefix cache, where another
    sequence that has computed it in one piece left it, and its chunks begin behind.
    """

    chunk: int
    offset: int = 0
    prefix_hit: bool = False

    def of(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Start and number of tokens of each chunk of the tokens `start` to `length`."""
        size = self.offset or self.chunk
        while start < length:
            num_tokens = min(size, length - start)
            yield start, num_tokens
            start, size = start + num_tokens, self.chunk


def blocks_needed(length: int, num_mates: int, block_size: int) -> int:
    """Cache blocks for a text of `length` tokens, the one whose prefix it shares, and its mates."""
    return (2 + num_mates) * -(-length // block_size)


@torch.inference_mode()
def teacher_forced_logits(
    executor: TorchExecutor, tokens: Tokens, cuts: Cuts, mates: Sequence[Tokens] = ()
) -> Tensor:
    """Logits [rows, vocab_size] in float32 behind each token that no prefix hit spared.

    Every batch also has the next token of each of the `mates`, texts of at least the same length
    that have been prefilled to their first half, as a decode beside the chunk. Raises ValueError
    if the cache does not hold `blocks_needed`.
    """
    blocks = BlockManager(executor.num_blocks, executor.block_size, shares_prefixes=cuts.prefix_hit)
    half = len(tokens) // 2
    decodes = [_sequence(mate, number + 1, blocks) for number, mate in enumerate(mates)]
    for decode in decodes:
        _compute(executor, decode, half)
    if blocks.prefix is not None:
        num_tokens = half // executor.block_size * executor.block_size
        if num_tokens == 0:
            size = executor.block_size
            raise ValueError(f"the first half of {len(tokens)} tokens has no whole block of {size}")
        other = _sequence(tokens[:num_tokens], -1, blocks)
        _compute(executor, other, num_tokens)
        blocks.prefix.publish(other)
    text = _sequence(tokens, 0, blocks)
    rows = []
    for first, num_tokens in cuts.of(text.num_computed, len(tokens)):
        text.num_computed, text.in_flight = first, False
        batch = Batch()
        for decode in decodes:
            decode.in_flight = False
            batch.add(decode, 1)
        batch.add(text, num_tokens)
        rows.append(_logits(executor, batch, num_tokens))
        for decode in decodes:
            decode.num_computed = min(decode.num_computed + 1, len(tokens) - 1)
    return torch.cat(rows)


def _sequence(tokens: Tokens, number: int, blocks: BlockManager) -> SequenceState:
    request = Request(number, 0.0, len(tokens), 1, tokens)
    sequence = blocks.look_up(SequenceState(request, order=number))
    if not blocks.admit(sequence, len(tokens)):
        raise ValueError(
            f"the cache does not hold {len(tokens)} more tokens; it takes `blocks_needed`"
        )
    return sequence


def _compute(executor: TorchExecutor, sequence: SequenceState, num_tokens: int) -> None:
    batch = Batch()
    batch.add(sequence, num_tokens)
    _logits(executor, batch, 1)
    sequence.num_computed, sequence.in_flight = num_tokens, False


def _logits(executor: TorchExecutor, batch: Batch, num_rows: int) -> Tensor:
    """Of the last `num_rows` rows of `batch`."""
    inputs = executor.packed(batch)
    rows = torch.arange(batch.num_tokens - num_rows, batch.num_tokens, device=executor.model.device)
    return executor.model(replace(inputs, emit_rows=rows), executor.cache).float()

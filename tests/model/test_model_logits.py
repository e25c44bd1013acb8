"""The decoder against transformers: teacher-forced logits, however the prompt is cut and whoever
shares the batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import DEVICE, FAMILIES, make_checkpoint

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model

BLOCK_SIZE = 4
PROMPT_LEN = 21
# Sizes of the chunks, repeated until the prompt is done.
CHUNKINGS = {
    "whole": [PROMPT_LEN],
    "one at a time": [1],
    "a block and one": [5],
    "mixed": [1, 7, 4, 2],
}


class Driver:
    """Feeds chunks of known tokens and collects the logits of every position that ends a chunk."""

    def __init__(
        self, model: Transformer, num_blocks: int = 64, block_order: list[int] | None = None
    ) -> None:
        self.model = model
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.executor = TorchExecutor(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        if block_order is not None:  # as a sequence that has held all of them leaves them
            ended = self.sequence(np.zeros(num_blocks * BLOCK_SIZE, dtype=np.int32))
            assert self.blocks.grow(ended, num_blocks * BLOCK_SIZE)
            ended.block_ids[:] = block_order[::-1]
            self.blocks.free(ended)
            assert self.blocks.empty == block_order
        self.cache = self.executor.cache
        self.cache.keys.fill_(float("nan"))  # whoever reads what was never written shows it
        self.cache.values.fill_(float("nan"))

    def sequence(self, token_ids: np.ndarray) -> SequenceState:
        return SequenceState(Request(0, 0.0, len(token_ids), 1, token_ids), order=0)

    @torch.inference_mode()
    def step(self, *parts: tuple[SequenceState, int]) -> list[torch.Tensor]:
        """Run one batch; the logits after each part's last token, in the order of the parts."""
        batch = Batch()
        for sequence, num_tokens in parts:
            assert self.blocks.grow(sequence, sequence.num_computed + num_tokens)
            batch.add(sequence, num_tokens)
        inputs = self.executor.packed(batch)
        every_end = [segment.start + segment.num_queries - 1 for segment in inputs.attention]
        logits = self.model(
            dataclasses.replace(inputs, emit_rows=torch.tensor(every_end, device=DEVICE)),
            self.cache,
        )
        for sequence, num_tokens in parts:
            sequence.in_flight = False
            sequence.num_computed += num_tokens
        return list(logits.cpu())


@pytest.fixture(scope="module", params=[*FAMILIES])
def pair(request, tmp_path_factory):
    """(transformers' model, ours) for one family."""
    directory = tmp_path_factory.mktemp("checkpoint")
    theirs = make_checkpoint(request.param, directory)
    spec, found = AutoModel(str(directory)).resolve("unused")
    return theirs, load_model(spec, found, DEVICE, torch.float32, seed=0)


def prompt(seed: int, length: int = PROMPT_LEN) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, length, dtype=np.int32)


def expected(theirs: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """Teacher-forced logits of every position, [num_tokens, vocab]."""
    with torch.inference_mode():
        return theirs(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_every_chunking_gives_transformers_logits(pair, chunking):
    theirs, ours = pair
    token_ids = prompt(1)
    reference = expected(theirs, token_ids)
    driver = Driver(ours)
    sequence = driver.sequence(token_ids)
    sizes = CHUNKINGS[chunking]
    step = 0
    while sequence.num_pending:
        (logits,) = driver.step((sequence, min(sizes[step % len(sizes)], sequence.num_pending)))
        torch.testing.assert_close(
            logits, reference[sequence.num_computed - 1], rtol=1e-4, atol=1e-4
        )
        step += 1


def test_mixed_batches_over_scattered_blocks(pair):
    """Chunks and single tokens of several sequences in one batch, no two blocks of a sequence side
    by side.
    """
    theirs, ours = pair
    prompts = [prompt(seed, length) for seed, length in ((2, 21), (3, 9), (4, 14))]
    references = [expected(theirs, token_ids) for token_ids in prompts]
    driver = Driver(ours, block_order=list(range(0, 64, 2)) + list(range(63, 0, -2)))
    first, second, third = (driver.sequence(token_ids) for token_ids in prompts)
    plan = [
        [(first, 6)],
        [(first, 1), (second, 5)],
        [(first, 1), (second, 1), (third, 13)],
        [(second, 1), (third, 1), (first, 5)],
        [(first, 8), (second, 2)],
    ]
    for parts in plan:
        for (sequence, _), logits in zip(parts, driver.step(*parts), strict=True):
            reference = references[(first, second, third).index(sequence)][
                sequence.num_computed - 1
            ]
            torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4)
    assert not first.num_pending
    assert not second.num_pending
    assert not third.num_pending


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.12), (torch.float16, 0.02)])
def test_half_precision_stays_close(tmp_path, dtype, tolerance):
    theirs = make_checkpoint("llama gqa, llama3 rope", tmp_path)
    spec, found = AutoModel(str(tmp_path)).resolve("unused")
    driver = Driver(load_model(spec, found, DEVICE, dtype, seed=0))
    token_ids = prompt(5)
    sequence = driver.sequence(token_ids)
    driver.step((sequence, 8))
    (logits,) = driver.step((sequence, sequence.num_pending))
    reference = expected(theirs, token_ids)[-1]
    error = (logits.float() - reference).norm() / reference.norm()
    assert 1e-6 < error < tolerance

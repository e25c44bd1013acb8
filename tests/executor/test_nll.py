"""Half precision against float32 by the likelihood of given tokens: what greedy tokens hide, a
shifted chunk shows.

Bounds are on the largest difference of any token, three times what rounding alone gave (0.0174 for
bfloat16, 0.0025 for float16, 1.4e-6 for float32 in C++, on a CPU). A chunk whose positions are off
by one moves one by 0.28.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_library import needs_library

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.shapes import Limits
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
LENGTH = 64
CHUNKS = (1, 7, 15, 16, 17, 33, 63)  # before, at and behind the edges of blocks, and decodes
BOUNDS = {torch.bfloat16: 0.06, torch.float16: 0.008}
NATIVE_BOUNDS = {torch.float32: 5e-6, torch.bfloat16: BOUNDS[torch.bfloat16]}
ATTENTION_WEIGHT = 4.0  # of its output beside the rest: random attention is too even to be missed
SPEC = ModelSpec(
    name="toy",
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    ffn_size=96,
    vocab_size=113,
)
TOKENS = np.random.default_rng(5).integers(0, SPEC.vocab_size, LENGTH + 1, dtype=np.int32)


def model_of(dtype: torch.dtype, device: torch.device = CPU) -> Transformer:
    """The same weights in any dtype, on any device."""
    reference = load_model(SPEC, None, CPU, torch.float32, seed=3)
    for name, weight in reference.named_parameters():
        if "out_proj" in name:
            weight.mul_(ATTENTION_WEIGHT)
    model = load_model(SPEC, None, device, dtype, seed=3)
    for weight, value in zip(model.parameters(), reference.parameters(), strict=True):
        weight.copy_(value)
    return model


@torch.inference_mode()
def negative_log_likelihoods(model: Transformer, chunk: int, *, uses_kernels: bool) -> np.ndarray:
    """Of every next token, [LENGTH], the text going through the engine's inputs in chunks of
    `chunk` tokens.
    """
    blocks = BlockManager(12, BLOCK_SIZE)
    blocks.grow(
        SequenceState(Request(9, 0.0, 40, 1), order=0), 40
    )  # so that the text's blocks do not begin at zero
    sequence = SequenceState(Request(0, 0.0, LENGTH, 1, TOKENS[:LENGTH]), order=1)
    blocks.grow(sequence, LENGTH)
    limits = Limits(SPEC, BLOCK_SIZE, num_sms=132) if uses_kernels else None
    executor = TorchExecutor(model, num_blocks=12, block_size=BLOCK_SIZE, limits=limits)
    executor.cache.keys.fill_(float("nan"))
    executor.cache.values.fill_(float("nan"))
    losses = []
    for start in range(0, LENGTH, chunk):
        num_tokens = min(chunk, LENGTH - start)
        batch = Batch()
        sequence.num_computed, sequence.in_flight = start, False
        batch.add(sequence, num_tokens)
        inputs = replace(
            executor.packed(batch), emit_rows=torch.arange(num_tokens, device=model.device)
        )
        logits = model(inputs, executor.cache).float()
        targets = torch.from_numpy(TOKENS[start + 1 : start + num_tokens + 1].astype(np.int64)).to(
            model.device
        )
        losses.append(
            torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu().numpy()
        )
    return np.concatenate(losses)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """Of the whole text at once, in float32 and plain torch."""
    return negative_log_likelihoods(model_of(torch.float32), LENGTH, uses_kernels=False)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_chunk_size_keeps_the_likelihood(reference, dtype, chunk):
    losses = negative_log_likelihoods(model_of(dtype), chunk, uses_kernels=False)
    assert np.abs(losses - reference).max() < BOUNDS[dtype]


@needs_library
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", NATIVE_BOUNDS, ids=str)
def test_the_cpp_keeps_the_likelihood(reference, dtype, chunk):
    model = model_of(dtype)
    backend.use_native(model)
    losses = negative_log_likelihoods(model, chunk, uses_kernels=False)
    assert np.abs(losses - reference).max() < NATIVE_BOUNDS[dtype]


@pytest.mark.parametrize("chunk", [7, 17, 63])
def test_kernels_keep_the_likelihood(reference, chunk, kernels_device):
    """Chunks from within a block, and one token alone; those of whole blocks are
    test_kernel_executor's. Triton's interpreter multiplies bfloat16 wrongly.
    """
    for dtype in BOUNDS if kernels_device.type == "cuda" else [torch.float16]:
        model = model_of(dtype, kernels_device)
        backend.use_triton(model, "series")
        losses = negative_log_likelihoods(model, chunk, uses_kernels=True)
        assert np.abs(losses - reference).max() < BOUNDS[dtype]


def test_the_bound_catches_a_chunk_that_is_one_off(reference, monkeypatch):
    """The gate can fail: positions shifted by one from the second chunk on."""
    packed = TorchExecutor.packed

    def shifted(self, batch):
        inputs = packed(self, batch)
        return replace(inputs, positions=inputs.positions + (batch.chunks[0].start > 0))

    monkeypatch.setattr(TorchExecutor, "packed", shifted)
    losses = negative_log_likelihoods(model_of(torch.float32), 16, uses_kernels=False)
    assert np.abs(losses - reference).max() > max(BOUNDS.values())

"""Models small enough for every kernel to run them on a CPU, the torch executor around them, and
requests with tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from checkpoints import DEVICE, make_checkpoint

from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.shapes import CudaGraphs, Limits, NoGraphs
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model

BLOCK_SIZE = 16
HEADS = {"num_attention_heads": 2, "hidden_size": 128}  # of 64, which the kernels take
LENGTHS = [(19, 6), (7, 9), (12, 3), (5, 1), (23, 5)]  # of prompts and outputs
# Heads of 64, which all kernels take.
SPEC = ModelSpec(
    name="toy",
    num_layers=2,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    ffn_size=96,
    vocab_size=97,
)


def requests_with_tokens(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    vocab_size: int = 97,
    arrivals: Sequence[float] | None = None,
    seed: int = 11,
) -> list[Request]:
    """Requests of (prompt_len, output_len) with random tokens, at time 0 unless `arrivals` says."""
    rng = np.random.default_rng(seed)
    times = arrivals or [0.0] * len(lengths)
    return [
        Request(i, time, p, d, rng.integers(0, vocab_size, p, dtype=np.int32))
        for i, ((p, d), time) in enumerate(zip(lengths, times, strict=True))
    ]


def model_on(kind: str) -> Transformer:
    model = load_model(SPEC, None, DEVICE, torch.float32, seed=0)
    if kind == "native":
        backend.use_native(model)
    elif kind == "triton":
        backend.use_triton(model, "series")
    return model


def executor_of(
    model: Transformer,
    kind: str,
    num_blocks: int,
    block_size: int = BLOCK_SIZE,
) -> TorchExecutor:
    """Triton's with two batches in flight, the others one at a time."""
    with_kernels = {"limits": Limits(SPEC, block_size, chip_of(DEVICE).num_sms), "capacity": 2}
    return TorchExecutor(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        **(with_kernels if kind == "triton" else {}),
    )


def make_family(family: str, directory: Path) -> Path:
    """Save a random checkpoint of `checkpoints.FAMILIES`; return its directory."""
    settings = {**HEADS, "head_dim": 64} if family == "qwen3" else HEADS
    make_checkpoint(family, directory, **settings)
    return directory


def load_family(directory: Path, device: torch.device = DEVICE) -> Transformer:
    spec, found = AutoModel(str(directory)).resolve("unused")
    return load_model(spec, found, device, torch.float32, seed=0)


def on_kernels(
    model: Transformer, *, capacity: int = 2, num_blocks: int = 40, graphs: bool | NoGraphs = True
) -> TorchExecutor:
    """An executor as the torch backend makes it for a GPU, or with `graphs` of its own."""
    if isinstance(graphs, bool):
        graphs = CudaGraphs() if graphs and model.device.type == "cuda" else NoGraphs()
    return TorchExecutor(
        model,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        limits=Limits(model.spec, BLOCK_SIZE, chip_of(model.device).num_sms),
        capacity=capacity,
        graphs=graphs,
    )

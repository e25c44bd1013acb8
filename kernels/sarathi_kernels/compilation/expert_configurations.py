"""The launches of mixtures of experts that are compiled for every chip, as in `configurations.py`;
apart from those, so that a change of the one leaves the other's recorded rows as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_kernels.experts.mixture import mixture_of_experts
from sarathi_kernels.runtime.chip import Chip
from sarathi_kernels.runtime.launch import Launch, recorded


@dataclass(frozen=True)
class ExpertBatch:
    """So many tokens of an iteration, and the experts of one layer of a model."""

    model: str
    hidden_size: int
    size: int
    num_experts: int
    top_k: int
    num_tokens: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.model}, {self.num_tokens} tokens"


# Few rows for each expert, and more than the largest tile has: between them lies the third tile.
DECODES = ExpertBatch("Qwen3-30B-A3B", 2048, 768, 128, 8, 32)
CHUNK = ExpertBatch("Mixtral-8x7B", 4096, 14336, 8, 2, 543)
BATCHES = (DECODES, CHUNK)
OTHERS = (
    ExpertBatch("Qwen3-30B-A3B", 2048, 768, 128, 8, 543),
    ExpertBatch("Qwen3-30B-A3B", 2048, 768, 128, 8, 543, torch.float32),
)


def record_experts(chip: Chip, *, quick: bool = False) -> list[Launch]:
    """What one layer launches on `chip` for sizes that no batch of `record_expert_batches` has."""
    batches = () if quick else OTHERS
    return [launch for batch in batches for launch in launches_of(batch, chip)]


def record_expert_batches(chip: Chip, *, quick: bool = False) -> list[tuple[str, Launch]]:
    """What one layer launches on `chip` for each of BATCHES; `quick` leaves the largest tile."""
    batches = BATCHES[1:] if quick else BATCHES
    return [(str(batch), launch) for batch in batches for launch in launches_of(batch, chip)]


def launches_of(batch: ExpertBatch, chip: Chip) -> list[Launch]:
    """Those of its experts; the number of tokens chooses a tile, and makes no other difference."""

    def meta(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=batch.dtype, device="meta")

    experts, hidden, size = batch.num_experts, batch.hidden_size, batch.size
    tokens = meta(batch.num_tokens, hidden), meta(batch.num_tokens, experts)
    weights = meta(experts, 2 * size, hidden), meta(experts, hidden, size)
    with recorded(chip) as recording:
        mixture_of_experts(*tokens, *weights, top_k=batch.top_k, normalised=True)
    return recording.launches

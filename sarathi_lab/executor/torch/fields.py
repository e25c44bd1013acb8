"""Layout of a packed batch: the tensors that the model reads, in one buffer of int32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sarathi_lab.executor.torch.shapes import Shape

ALIGNMENT = 32  # int32 elements: kernels are compiled for aligned pointers, once only if all are

Flat = TypeVar("Flat", Tensor, NDArray[np.int32])


@dataclass(frozen=True)
class Fields(Generic[Flat]):
    """Tensors on the device, or arrays on the host, that describe the tokens and sequences of one
    batch; `PackedInputs` and `AttentionPlan` say what they mean.
    """

    # By token:
    token_ids: Flat
    positions: Flat
    slots: Flat
    feed_rows: Flat
    # By token that is sampled:
    emit_rows: Flat
    # By sequence:
    query_starts: Flat
    kv_lens: Flat
    block_table: Flat
    # By program of the attention kernels:
    tiles: Flat
    decodes: Flat
    parts: Flat
    reductions: Flat


class Place(NamedTuple):
    """Where a field lies in the buffer, and its shape."""

    name: str
    elements: slice
    shape: tuple[int, ...]


class Layout:
    """Places of the fields of a batch of `shape`, in a buffer of `size` elements."""

    def __init__(self, shape: Shape) -> None:
        by_token = (shape.num_tokens,)
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": by_token,
            "positions": by_token,
            "slots": by_token,
            "feed_rows": by_token,
            "emit_rows": (shape.num_emits,),
            "query_starts": (shape.num_sequences + 1,),
            "kv_lens": (shape.num_sequences,),
            "decodes": (shape.num_decodes,),
            "tiles": (shape.num_tiles, 2),
            "parts": (shape.num_parts, 4),
            "reductions": (shape.num_reductions, 3),
            "block_table": (shape.num_sequences, shape.max_blocks),
        }
        self.size = 0
        self._places: list[Place] = []
        for name, lengths in shapes.items():
            end = self.size + math.prod(lengths)
            elements = slice(self.size, end)
            self._places.append(Place(name, elements, lengths))
            self.size = math.ceil(end / ALIGNMENT) * ALIGNMENT

    def fields(self, buffer: Flat) -> Fields[Flat]:
        """Return the fields of a flat tensor or array, each in its shape."""
        views = {}
        for name, elements, shape in self._places:
            view = buffer[elements]
            if len(shape) > 1:
                view = view.reshape(shape)
            views[name] = view
        return Fields(**views)


layout_of = lru_cache(maxsize=256)(Layout)

"""Passes of prompts through groups of layers by torch, with hidden states kept between two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.torch.packing import Halfway, PartialInputs
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import KVCache, Transformer


@dataclass(frozen=True)
class LayeredInputs(PartialInputs):
    """Inputs of all tokens of a layered `batch`, and of its decodes alone for the layers `outside`
    its group; None without decodes.
    """

    batch: Batch = field(kw_only=True)
    outside: PackedInputs | None = field(kw_only=True)

    def logits(self, model: Transformer, cache: KVCache, halfway: Halfway) -> Tensor:
        batch, layers, num_layers = self.batch, self.batch.layers, model.spec.num_layers
        assert layers is not None, "the batch is layered"
        hidden, update = self._entering(model, cache, layers.start, dict(halfway))
        halfway.clear()  # others were preempted since and start over
        update = model.pass_layers(hidden, update, self, cache, layers)
        if layers.stop == num_layers:
            return model.logits(hidden, update, self.emit_rows)
        prompts = batch.chunks[batch.num_decodes :]  # behind the decodes
        lengths = [batch.num_decode_tokens, *(chunk.num_tokens for chunk in prompts)]
        (hidden, *states), (update, *updates) = hidden.split(lengths), update.split(lengths)
        kept = zip(states, updates, strict=True)
        halfway |= zip((chunk.sequence for chunk in prompts), kept, strict=True)
        if self.outside is None:
            return hidden.new_empty(0, model.spec.vocab_size)
        after = range(layers.stop, num_layers)
        update = model.pass_layers(hidden, update, self.outside, cache, after)
        return model.logits(hidden, update, self.outside.emit_rows)

    def _entering(
        self, model: Transformer, cache: KVCache, start: int, halfway: Halfway
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and updates of all tokens before layer `start`."""
        batch = self.batch
        with model.operations.range("embedding"):
            hidden = model.embedding(self.token_ids[: batch.num_decode_tokens if start else None])
        if start == 0:
            return hidden, None
        both = [halfway[chunk.sequence] for chunk in batch.chunks[batch.num_decodes :]]
        if self.outside is not None:
            update = model.pass_layers(hidden, None, self.outside, cache, range(start))
            both.insert(0, (hidden, update))
        states, updates = zip(*both, strict=True)
        return torch.cat(states), torch.cat(updates)


def packed_apart(
    batch: Batch, num_layers: int, packed: Callable[[Batch], PackedInputs]
) -> LayeredInputs:
    """Pack `batch` by the function that packs a batch for all layers."""
    parts = {layers == batch.layers: part for layers, part in batch.passes(num_layers)}
    decodes = parts.get(False)
    outside = packed(decodes) if decodes and decodes.chunks else None
    return LayeredInputs(**vars(packed(parts[True])), batch=batch, outside=outside)

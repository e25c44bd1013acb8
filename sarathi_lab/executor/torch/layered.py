"""Passes of prompts through groups of layers; hidden states between two groups are kept here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import KVCache, Transformer


@dataclass(frozen=True)
class LayeredInputs(PackedInputs):
    """Inputs of all tokens of a layered `batch`, and of its decodes alone for the layers `outside`
    its group; None without decodes.
    """

    batch: Batch = field(kw_only=True)
    outside: PackedInputs | None = field(kw_only=True)


def packed_apart(
    batch: Batch, num_layers: int, packed: Callable[[Batch], PackedInputs]
) -> LayeredInputs:
    """Pack `batch` by the function that packs a batch for all layers."""
    parts = {layers == batch.layers: part for layers, part in batch.passes(num_layers)}
    decodes = parts.get(False)
    outside = packed(decodes) if decodes and decodes.chunks else None
    return LayeredInputs(**vars(packed(parts[True])), batch=batch, outside=outside)


class Passes:
    """Passes of inputs through the model; `LayeredInputs` layer by layer. For each prompt halfway
    they keep hidden states and pending updates, both [num_tokens, hidden_size].
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.halfway: dict[SequenceState, tuple[Tensor, Tensor]] = {}

    def start(self) -> None:
        self.halfway.clear()

    def __call__(self, inputs: PackedInputs) -> Tensor:
        """Return the logits of emitting rows, [num_emits, vocab_size]."""
        if not isinstance(inputs, LayeredInputs):
            logits: Tensor = self.model(inputs, self.cache)
            return logits
        model, batch, layers = self.model, inputs.batch, inputs.batch.layers
        assert layers is not None, "the batch is layered"
        hidden, update = self._entering(inputs, layers.start)
        update = model.pass_layers(hidden, update, inputs, self.cache, layers)
        if layers.stop == model.spec.num_layers:
            return model.logits(hidden, update, inputs.emit_rows)
        prompts = batch.chunks[batch.num_decodes :]  # behind the decodes
        lengths = [batch.num_decode_tokens, *(chunk.num_tokens for chunk in prompts)]
        (hidden, *states), (update, *updates) = hidden.split(lengths), update.split(lengths)
        kept = zip(states, updates, strict=True)
        self.halfway |= zip((chunk.sequence for chunk in prompts), kept, strict=True)
        if inputs.outside is None:
            return hidden.new_empty(0, model.spec.vocab_size)
        after = range(layers.stop, model.spec.num_layers)
        update = model.pass_layers(hidden, update, inputs.outside, self.cache, after)
        return model.logits(hidden, update, inputs.outside.emit_rows)

    def _entering(self, inputs: LayeredInputs, start: int) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and updates of all tokens before layer `start`."""
        model, batch = self.model, inputs.batch
        halfway, self.halfway = self.halfway, {}  # others were preempted since and start over
        num_entering = batch.num_decode_tokens if start else None
        with model.operations.range("embedding"):
            hidden = model.embedding(inputs.token_ids[:num_entering])
        if start == 0:
            return hidden, None
        prompts = batch.chunks[batch.num_decodes :]
        both = [halfway[chunk.sequence] for chunk in prompts]
        if inputs.outside is not None:
            before = range(start)
            update = model.pass_layers(hidden, None, inputs.outside, self.cache, before)
            both.insert(0, (hidden, update))
        states, updates = zip(*both, strict=True)
        return torch.cat(states), torch.cat(updates)

"""Batches whose prompts pass the layers in groups: what is between two groups is kept here."""

from __future__ import annotations

import torch
from torch import Tensor

from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import KVCache, Transformer


class LayeredPasses:
    """Runs batches with `Batch.layers` one layer after another, whatever the model's `whole_pass`.

    Of each prompt that is halfway it keeps the hidden states and what is still to be added to them,
    each [num_tokens, hidden_size], until the next group of layers.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self._halfway: dict[SequenceState, tuple[Tensor, Tensor]] = {}

    def start(self) -> None:
        self._halfway.clear()

    def logits(self, batch: Batch, inside: PackedInputs, outside: PackedInputs | None) -> Tensor:
        """The logits of all that emit, [num_emits, vocab_size], from the inputs of `Batch.apart`,
        whose prompts come behind the decodes; `outside` is None without decodes.
        """
        model, layers = self.model, batch.layers
        assert layers is not None, "its prompts pass some layers alone"
        hidden, update = self._entering(batch, layers.start, inside, outside)
        within = range(layers.start, layers.stop)
        update = model.pass_layers(hidden, update, inside, self.cache, within)
        if layers.is_last:
            return model.logits(hidden, update, inside.emit_rows)
        first = batch.num_decode_tokens
        lengths = [first, *(chunk.num_tokens for chunk in batch.chunks[first:])]
        (hidden, *halfway), (update, *updates) = hidden.split(lengths), update.split(lengths)
        for chunk, *kept in zip(batch.chunks[first:], halfway, updates, strict=True):
            self._halfway[chunk.sequence] = kept[0], kept[1]
        if outside is None:
            return hidden.new_empty(0, model.spec.vocab_size)
        after = range(layers.stop, layers.num)
        update = model.pass_layers(hidden, update, outside, self.cache, after)
        return model.logits(hidden, update, outside.emit_rows)

    def _entering(
        self, batch: Batch, start: int, inside: PackedInputs, outside: PackedInputs | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states and updates of all tokens in front of layer `start`."""
        model = self.model
        # The others were preempted since, and begin anew.
        self._halfway = {one: kept for one, kept in self._halfway.items() if one.layers_passed}
        num_decodes = batch.num_decode_tokens
        with model.operations.range("embedding"):
            hidden = model.embedding(inside.token_ids[: None if start == 0 else num_decodes])
        if start == 0:
            return hidden, None
        kept = [self._halfway.pop(chunk.sequence) for chunk in batch.chunks[num_decodes:]]
        if outside is not None:
            update = model.pass_layers(hidden, None, outside, self.cache, range(start))
            kept.insert(0, (hidden, update))
        states, updates = zip(*kept, strict=True)
        return torch.cat(states), torch.cat(updates)

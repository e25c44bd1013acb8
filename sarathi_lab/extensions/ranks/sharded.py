"""The transformer of one rank: its part of the weights, and what it exchanges with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sarathi_lab.extensions.ranks.parts import Interval, Part
from sarathi_lab.model.checkpoint import stored_tensors
from sarathi_lab.model.operations import NAN_TOKEN, PackedInputs
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.tensor_names import Source, parameter_sources
from sarathi_lab.model.transformer import KVCache, Transformer
from sarathi_lab.model.weights import by_projection, draw, in_8_bits, opened, untied


class Exchange(Protocol):
    """Exchanges of a rank with those that share its layers, and with neighbouring stages."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of the stage, in place."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks of the stage, [ranks, ...]."""

    def receive(self, num_tokens: int) -> Tensor:
        """The hidden states [num_tokens, hidden_size] that the stage before sends."""

    def send(self, hidden: Tensor) -> None:
        """Hand them to the next stage."""


class ShardedTransformer(Transformer):
    """A `Transformer` of one part's shapes. The first stage embeds, the last one has the logits of
    its share of the vocabulary; the others return none, [0, vocab_size].

    Token ids are equal to those of one device wherever the two largest logits of a row differ by
    more than the rounding of sums in another order; equal logits go to the lowest id, as there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        part: Part,
        exchange: Exchange,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(part.spec(spec), device, dtype)
        self.part = part
        self._exchange = exchange
        self._is_summed = False
        self.vocabulary = part.vocabulary(spec)
        if part.ranks.pipeline > 1:
            if not part.is_first:
                del self.embedding
            if not part.is_last:
                del self.lm_head, self.final_norm

    def share_sums(self) -> None:
        """Let products by rows be summed over ranks, and tokens be chosen of all shares of the
        vocabulary; after weights were packed if they are.

        Summed is what attention and what the whole feed-forward block of a layer returns, that of
        all experts at once. Sums are equal to the bit on all ranks, and so what routers choose.
        """
        exchange, shares = self._exchange, self.part.ranks.tensor > 1
        if not self.part.is_last:
            self.operations.greedy = _no_tokens  # type: ignore[method-assign]
        elif shares:
            greedy = _Greedy(exchange, self.vocabulary[0])
            self.operations.greedy = greedy  # type: ignore[method-assign]
        for layer in self.layers if shares and not self._is_summed else ():
            for module in (layer, layer.get_submodule("out_proj")):
                module.register_forward_hook(lambda *args: exchange.sum(args[-1]))
        self._is_summed = True

    def forward(self, inputs: PackedInputs, cache: KVCache) -> Tensor:
        with self.operations.range("embedding"):
            if self.part.is_first:
                hidden = self._embedded(inputs.token_ids)
            else:
                hidden = self._exchange.receive(len(inputs.token_ids))
        update = self.pass_layers(hidden, None, inputs, cache, range(self.spec.num_layers))
        if self.part.is_last:
            return self.logits(hidden, update, inputs.emit_rows)
        hidden += update
        self._exchange.send(hidden)
        return hidden.new_empty((0, self.spec.vocab_size))

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Sum the rows of all ranks' tables: each looks up its ids and adds zeros for others."""
        if self.part.ranks.tensor == 1:
            found: Tensor = self.embedding(token_ids)
            return found
        first, end = self.vocabulary
        is_other = (token_ids < first) | (token_ids >= end)
        found = self.embedding((token_ids - first).masked_fill(is_other, 0))
        return self._exchange.sum(found.masked_fill_(is_other[:, None], 0.0))


def _no_tokens(logits: Tensor) -> Tensor:
    """Of a stage that has no logits."""
    return torch.empty(0, dtype=torch.int64, device=logits.device)


class _Greedy:
    """The likeliest token of all ranks' shares of the vocabulary, the lowest id of equal ones."""

    def __init__(self, exchange: Exchange, first: int) -> None:
        self._exchange = exchange
        self._first = first

    def __call__(self, logits: Tensor) -> Tensor:
        largest, ids = logits.max(dim=-1)
        # Both in one tensor: 64 bits hold every logit and every id.
        local = torch.stack([largest.double(), (ids + self._first).double()], dim=-1)
        found = self._exchange.gather(local)  # [ranks, num_emits, 2], by ids
        best = found[..., 0].max(dim=0)  # the first of equal ones; NaN if there is one
        chosen = found[..., 1].gather(0, best.indices[None])[0].long()
        return chosen.masked_fill_(best.values.isnan(), NAN_TOKEN)


def load_part(
    spec: ModelSpec,
    directory: Path | None,
    part: Part,
    exchange: Exchange,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> ShardedTransformer:
    """The model of `part`, from a checkpoint of which its slices alone are read, or the slices of
    the random weights that one device has. UserError as of `weights.load_model`.
    """
    spec.require_runnable()
    model = ShardedTransformer(spec, part, exchange, device, dtype)
    if directory is None:
        _fill_at_random(model, spec, seed)
    else:
        _fill_from(model, spec, directory)
    in_8_bits(model)
    return model.eval()


def _fill_at_random(model: ShardedTransformer, spec: ModelSpec, seed: int) -> None:
    """Draw every parameter of the whole model, one at a time, so that all parts draw the same."""
    generator = torch.Generator(model.device).manual_seed(seed)
    whole = Transformer(spec, torch.device("meta"), model.dtype)
    for name, parameter in whole.named_parameters():
        full = torch.empty(parameter.shape, device=model.device, dtype=model.dtype)
        draw(full, name, spec, generator)
        for local in model.part.names(name, spec):
            cuts = model.part.cuts(name, spec)
            target = model.get_parameter(local)
            target.copy_(full if cuts is None else _cut(full, *cuts))
            if not model.part.adds_bias(name):
                target.zero_()


def _cut(full: Tensor, dim: int, intervals: Sequence[Interval]) -> Tensor:
    return torch.cat([full.narrow(dim, first, end - first) for first, end in intervals], dim=dim)


def _fill_from(model: ShardedTransformer, spec: ModelSpec, directory: Path) -> None:
    stored = stored_tensors(directory)
    files = opened(stored)

    def view(tensor: str) -> Any:
        return files[tensor].get_slice(tensor)

    for name, sources in parameter_sources(directory, spec, stored):
        head = sources[0]
        if head.tied and model.part.is_last and head.tensor in stored:
            _check_tied(model, view(head.tensor), head.tensor, directory)
        cuts = model.part.cuts(name, spec)
        for local in model.part.names(name, spec):
            target = model.get_parameter(local)
            if not model.part.adds_bias(name):
                target.zero_()
                continue
            # Experts that are stored one by one are filled so.
            targets = [target] if target.ndim == len(sources[0].shape) else list(target)
            count = len(sources) // len(targets)
            for i, one in enumerate(targets):
                of = sources[i * count : (i + 1) * count]
                _join(one, cuts[0] if cuts else 0, _slices(of, view, cuts, spec, model.part))


def _join(target: Tensor, dim: int, tensors: Iterable[Tensor]) -> None:
    """Fill `target` with tensors one after the other."""
    at = 0
    for one in tensors:
        target.narrow(dim, at, one.shape[dim]).copy_(one)
        at += one.shape[dim]


def _slices(
    sources: Sequence[Source],
    view: Callable[[str], Any],
    cuts: tuple[int, Sequence[Interval]] | None,
    spec: ModelSpec,
    part: Part,
) -> Iterator[Tensor]:
    """Read the slices of a part from the tensors that fill a parameter, and nothing else."""
    offset = 0
    for source in sources:
        stored = view(source.tensor)
        if source.interleaved:  # (q, k, v) of each head
            share, rows = part.ranks.tensor, source.shape[0]
            tensor = stored[rows * part.tensor // share : rows * (part.tensor + 1) // share]
            yield by_projection(tensor, spec.num_heads // share)
        elif cuts is None:
            yield stored[:]
        else:
            dim, intervals = cuts
            size = source.shape[dim]
            before = (slice(None),) * (len(source.shape) + dim)
            inside = (cut for cut in intervals if offset <= cut[0] < offset + size)
            yield from (stored[(*before, slice(a - offset, b - offset))] for a, b in inside)
            offset += size


def _check_tied(model: ShardedTransformer, stored: Any, tensor: str, directory: Path) -> None:
    """Raise UserError for a tied output head that differs from the embedding."""
    local = model.get_parameter("embedding.weight" if model.part.is_first else "lm_head.weight")
    first, end = model.vocabulary
    if not torch.equal(stored[first:end].to(local), local):
        raise untied(tensor, directory)

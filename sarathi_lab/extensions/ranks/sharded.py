"""Part of a model that one rank computes, a stage of its layers, and of these a share of the heads,
of the FFN and of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3); and its transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sarathi_lab.extensions.ranks.group import Group
from sarathi_lab.model.degrees import Degrees, kv_heads_of_device, refuse_kv_heads, uneven
from sarathi_lab.model.operations import NAN_TOKEN, PackedInputs
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import KVCache, Transformer
from sarathi_lab.model.weights import fillers, in_8_bits

Interval = tuple[int, int]  # first, and one behind the last


@dataclass(frozen=True)
class Ranks(Degrees):
    """Degrees of parallelism of processes; the ranks of a stage have consecutive numbers."""

    def part(self, rank: int) -> Part:
        return Part(self, *divmod(rank, self.tensor))

    def check(self, spec: ModelSpec) -> None:
        """Raise UserError unless `spec` splits into parts of equal work."""
        if self.num_devices == 1:
            return
        name = f"of model {spec.name}"
        if spec.num_layers % self.pipeline:
            raise uneven("pipeline", self.pipeline, spec.num_layers, f"layers {name}")
        shares = {
            "heads": spec.num_heads,
            "columns of an expert" if spec.num_experts else "columns of the FFN": spec.ffn_size,
            "columns of the shared expert": spec.shared_expert_size,
        }
        for what, number in shares.items():
            if number % self.tensor:
                raise uneven("tensor", self.tensor, number, f"{what} {name}")
        refused = refuse_kv_heads(self.tensor, spec.num_heads, spec.num_kv_heads, name)
        if refused is not None:
            raise refused


@dataclass(frozen=True)
class Part:
    """Part of rank number `tensor` in `stage`."""

    ranks: Ranks
    stage: int
    tensor: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.ranks.pipeline - 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The shapes of this part; where there are fewer KV heads than ranks, each has one."""
        share = self.ranks.tensor
        first, end = self.vocabulary(spec)
        return replace(
            spec,
            num_layers=spec.num_layers // self.ranks.pipeline,
            num_heads=spec.num_heads // share,
            num_kv_heads=kv_heads_of_device(spec.num_kv_heads, share),
            ffn_size=spec.ffn_size // share,
            shared_expert_size=spec.shared_expert_size // share,
            vocab_size=end - first,
        )

    def layers(self, spec: ModelSpec) -> range:
        count = spec.num_layers // self.ranks.pipeline
        return range(self.stage * count, (self.stage + 1) * count)

    def share(self, count: int) -> Interval:
        """Return which of `count` things this part has, at least one."""
        first, end = ((self.tensor + i) * count // self.ranks.tensor for i in (0, 1))
        return first, max(first + 1, end)

    def vocabulary(self, spec: ModelSpec) -> Interval:
        """Its token ids."""
        return self.share(spec.vocab_size)

    def names(self, name: str, spec: ModelSpec) -> list[str]:
        """Return the names of a parameter of the whole model in this part, none if it lacks it."""
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            layers = self.layers(spec)
            return [f"layers.{int(number) - layers.start}.{rest}"] if int(number) in layers else []
        if name == "embedding.weight":
            is_head = spec.tie_embeddings and self.is_last and not self.is_first
            return [name] if self.is_first else ["lm_head.weight"] if is_head else []
        is_here = self.is_last and not (name == "lm_head.weight" and spec.tie_embeddings)
        return [name] if is_here else []

    def cuts(self, name: str, spec: ModelSpec) -> tuple[int, Sequence[Interval]] | None:
        """The dimension, counted from the last, in which a parameter of the whole model is cut, and
        what this part has of it, one after the other; None for all of it, as of a router.
        """
        heads, kv_heads = (spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size)
        ffn, shared, tokens = (spec.ffn_size, 1), (spec.shared_expert_size, 1), (spec.vocab_size, 1)
        num_halves = 1 + spec.gated_ffn
        # Number and width of what is shared, of each section of the rows or columns.
        rows = {
            "embedding": [tokens],
            "lm_head": [tokens],
            "qkv_proj": [heads, kv_heads, kv_heads],
            "ffn_up": [ffn] * num_halves,
            "gate_up": [ffn] * num_halves,
            "shared_up": [shared] * num_halves,
        }
        columns = {"out_proj": [heads], "ffn_down": [ffn], "down": [ffn], "shared_down": [shared]}
        module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[-1]
        is_bias = name.endswith("bias")
        sections = rows.get(module) or ([] if is_bias else columns.get(module, []))
        if self.ranks.tensor == 1 or not sections:
            return None
        intervals, begin = [], 0
        for count, width in sections:
            first, end = self.share(count)
            intervals.append((begin + width * first, begin + width * end))
            begin += count * width
        return -1 if is_bias or module in columns else -2, intervals

    def adds_bias(self, name: str) -> bool:
        """Return whether this part adds a bias: one of those that sum their products does."""
        return self.tensor == 0 or not name.endswith(("out_proj.bias", "ffn_down.bias"))


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
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(part.spec(spec), device, dtype)
        self.part = part
        self._group = group
        self.vocabulary = part.vocabulary(spec)
        if part.ranks.pipeline > 1:
            if not part.is_first:
                del self.embedding
            if not part.is_last:
                del self.lm_head, self.final_norm

    def share_sums(self) -> None:
        """Let products by rows be summed over ranks; after weights were packed if they are.

        Summed is what attention and what the whole feed-forward block of a layer returns, that of
        all experts at once. Sums are equal to the bit on all ranks, and so what routers choose.
        """
        for layer in self.layers if self.part.ranks.tensor > 1 else ():
            for module in (layer, layer.get_submodule("out_proj")):
                module.register_forward_hook(lambda *args: self._group.sum(args[-1]))

    def forward(self, inputs: PackedInputs, cache: KVCache) -> Tensor:
        with self.operations.range("embedding"):
            if self.part.is_first:
                hidden = self._embedded(inputs.token_ids)
            else:
                size = (len(inputs.token_ids), self.spec.hidden_size)
                hidden = torch.empty(size, device=self.device, dtype=self.dtype)
                self._group.receive_into(hidden)
        update = self.pass_layers(hidden, inputs, cache)
        if self.part.is_last:
            return self.logits(hidden, update, inputs.emit_rows)
        hidden += update
        self._group.send(hidden)
        return hidden.new_empty((0, self.spec.vocab_size))

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Sum the rows of all ranks' tables: each looks up its ids and adds zeros for others."""
        if self.part.ranks.tensor == 1:
            found: Tensor = self.embedding(token_ids)
            return found
        first, end = self.vocabulary
        is_other = (token_ids < first) | (token_ids >= end)
        found = self.embedding((token_ids - first).masked_fill(is_other, 0))
        return self._group.sum(found.masked_fill_(is_other[:, None], 0.0))

    def greedy(self, logits: Tensor) -> Tensor:
        """Choose of all ranks' shares, the lowest id of equal ones; nothing in other stages."""
        if not self.part.is_last:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        if self.part.ranks.tensor == 1:
            return super().greedy(logits)
        largest, ids = logits.max(dim=-1)
        # Both in one tensor: 64 bits hold every logit and every id.
        local = torch.stack([largest.double(), (ids + self.vocabulary[0]).double()], dim=-1)
        found = self._group.gather(local)  # [ranks, num_emits, 2], by ids
        best = found[..., 0].max(dim=0)  # the first of equal ones; NaN if there is one
        chosen = found[..., 1].gather(0, best.indices[None])[0].long()
        return chosen.masked_fill_(best.values.isnan(), NAN_TOKEN)


def load_part(
    spec: ModelSpec,
    directory: Path | None,
    part: Part,
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> ShardedTransformer:
    """Load the model of `part`: of each parameter of its layers its slices of what one device has.
    UserError as of `weights.load_model`.
    """
    spec.require_runnable()
    model = ShardedTransformer(spec, part, group, device, dtype)
    whole = dict(Transformer(spec, torch.device("meta"), dtype).named_parameters())
    for name, fill in fillers(spec, directory, whole, seed, device):
        names = part.names(name, spec)
        if names or directory is None:  # all parts draw the same
            fill(full := torch.empty(whole[name].shape, device=device, dtype=dtype))
        for target in map(model.get_parameter, names):
            target.copy_(_cut(full, part.cuts(name, spec)))
            if not part.adds_bias(name):
                target.zero_()
    in_8_bits(model)
    return model.eval()


def _cut(full: Tensor, cuts: tuple[int, Sequence[Interval]] | None) -> Tensor:
    if cuts is None:
        return full
    dim, intervals = cuts
    return torch.cat([full.narrow(dim, first, end - first) for first, end in intervals], dim=dim)

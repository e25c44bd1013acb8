"""Part of a model that one rank computes: a stage of its layers, and of these a share of the heads,
of the FFN and of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_lab.model.parts import Degrees, uneven
from sarathi_lab.model.spec import ModelSpec

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
        if self.tensor > 1 and self.tensor % spec.num_kv_heads and spec.num_kv_heads % self.tensor:
            raise uneven("tensor", self.tensor, spec.num_kv_heads, f"KV heads {name}")


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
            num_kv_heads=max(1, spec.num_kv_heads // share),
            ffn_size=spec.ffn_size // share,
            shared_expert_size=spec.shared_expert_size // share,
            vocab_size=end - first,
        )

    def layers(self, spec: ModelSpec) -> range:
        count = spec.num_layers // self.ranks.pipeline
        return range(self.stage * count, (self.stage + 1) * count)

    def vocabulary(self, spec: ModelSpec) -> Interval:
        """Its token ids."""
        share, size = self.ranks.tensor, spec.vocab_size
        return size * self.tensor // share, size * (self.tensor + 1) // share

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
        share = self.ranks.tensor
        if share == 1:
            return None
        module, kind = name.split(".")[-2:]
        rows = -1 if kind == "bias" else -2
        if module in ("embedding", "lm_head"):
            return rows, [self.vocabulary(spec)]
        q = self._share(spec.q_size)
        width = spec.shared_expert_size if module.startswith("shared") else spec.ffn_size
        raised = self._share(width)
        if module == "qkv_proj":
            head = spec.head_size
            kv_heads = max(1, spec.num_kv_heads // share)
            first = self.tensor * spec.num_kv_heads // share * head
            kv = (first, first + kv_heads * head)
            return rows, [q, _moved(kv, spec.q_size), _moved(kv, spec.q_size + spec.kv_size)]
        if module in ("ffn_up", "shared_up") or kind == "gate_up":
            return rows, [raised, *([_moved(raised, width)] if spec.gated_ffn else [])]
        if (module in ("ffn_down", "shared_down") and kind == "weight") or kind == "down":
            return -1, [raised]
        if module == "out_proj" and kind == "weight":
            return -1, [q]
        return None

    def _share(self, size: int) -> Interval:
        """Return the interval of this part in `size` rows."""
        share = size // self.ranks.tensor
        return self.tensor * share, (self.tensor + 1) * share

    def adds_bias(self, name: str) -> bool:
        """Return whether this part adds a bias: one of those that sum their products does."""
        return self.tensor == 0 or not name.endswith(("out_proj.bias", "ffn_down.bias"))


def _moved(interval: Interval, by: int) -> Interval:
    return interval[0] + by, interval[1] + by

"""One rank's part of a model: a stage of its layers, and of these a share of the heads, of the FFN
and of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_lab.config.checked import check_fields, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.model.spec import ModelSpec

Interval = tuple[int, int]  # first, and one behind the last


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism of one copy of a model. UserError for one below 1."""

    tensor: int = whole(  # devices that share every layer, by heads and columns
        1,
        name="executor.tensor_parallel",
        minimum=1,
        fix="use the number of devices that share a layer, such as 2",
    )
    pipeline: int = whole(  # stages that share the layers
        1, name="executor.pipeline_parallel", minimum=1, fix="use the number of stages, such as 2"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def description(self) -> str:
        """The devices in words, tensor by pipeline: "8 x 8 devices"."""
        return f"{self.tensor} x {self.pipeline} devices"


@dataclass(frozen=True)
class Ranks(Degrees):
    """The processes of a real device; a stage's ranks have consecutive numbers."""

    def part(self, rank: int) -> Part:
        return Part(self, *divmod(rank, self.tensor))

    def leader(self, stage: int) -> int:
        """The rank that speaks for a stage."""
        return stage * self.tensor

    def named(self, rank: int) -> str:
        """Such as "rank 3 (stage 1 of 2, part 1 of 2 of its layers)"."""
        stage, tensor = divmod(rank, self.tensor)
        places = [f"stage {stage} of {self.pipeline}"] if self.pipeline > 1 else []
        places += [f"part {tensor} of {self.tensor} of its layers"] if self.tensor > 1 else []
        return f"rank {rank} ({', '.join(places)})"

    def check(self, spec: ModelSpec) -> None:
        """Raise UserError unless `spec` comes apart into parts of equal work."""
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


def uneven(kind: str, degree: int, number: int, what: str, most: int = 64) -> UserError:
    """That a degree does not divide `number`; what does is named up to `most`."""
    valid = ", ".join(str(n) for n in range(1, min(number, most) + 1) if number % n == 0)
    return UserError(
        f"executor.{kind}_parallel={degree} does not divide the {number} {what}; use one of {valid}"
    )


@dataclass(frozen=True)
class Part:
    """What rank number `tensor` of those that share `stage` has."""

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
        """What this part calls a parameter of the whole model; nothing if it lacks it."""
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            layers = self.layers(spec)
            return [f"layers.{int(number) - layers.start}.{rest}"] if int(number) in layers else []
        if name == "embedding.weight":
            is_head = spec.tie_embeddings and self.is_last and not self.is_first
            return [name] if self.is_first else ["lm_head.weight"] if is_head else []
        is_own = self.is_last and not (name == "lm_head.weight" and spec.tie_embeddings)
        return [name] if is_own else []

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
        q = self._own(spec.q_size)
        width = spec.shared_expert_size if module.startswith("shared") else spec.ffn_size
        raised = self._own(width)
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

    def _own(self, size: int) -> Interval:
        """Its share of as many."""
        share = size // self.ranks.tensor
        return self.tensor * share, (self.tensor + 1) * share

    def adds_bias(self, name: str) -> bool:
        """Whether it is this part that adds a bias; of those that sum their products one does."""
        return self.tensor == 0 or not name.endswith(("out_proj.bias", "ffn_down.bias"))


def _moved(interval: Interval, by: int) -> Interval:
    return interval[0] + by, interval[1] + by

"""Shapes of a model, and the FLOPs and bytes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol, get_args

from sarathi_lab.config.checked import check_fields, flag, number, one_of, share, whole
from sarathi_lab.config.errors import UserError

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeKind = Literal["linear", "llama3"]
KvDtype = Literal["auto", "int8", "fp8"]
WeightDtype = Literal["auto", "fp8", "int8"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_DTYPES = ("auto", "fp8")  # of executor.weights; int8 comes with dtype=int8
SCALE_BYTES = 4  # of the float32 beside an output channel of int8 weights
KV_SCALE_BYTES = 4  # of the float32 beside every head of 8-bit keys or values
FIX = "correct the model's settings"
_count = partial(whole, maximum=2**31 - 1, fix=FIX)  # token ids and kernels' sizes have 32 bits
_size = partial(_count, minimum=1)
MAX_LAYERS = 10**4  # a hundred times the deepest models
MAX_PARAMS = 10**13  # ten times the largest models; sums over tokens fit into 64 bits


class Work(Protocol):
    """Sums that determine cost: of a `Batch`, or, as arrays, of a table of iterations."""

    num_prefill_tokens: Any
    num_decode_tokens: Any
    prefill_kv_tokens: Any
    decode_kv_tokens: Any
    prefill_query_key_pairs: Any
    num_emits: Any


@dataclass(frozen=True)
class Linear:
    """`count` matrix products [tokens, in_features] x [in_features, out_features]."""

    name: str
    in_features: int
    out_features: int
    count: int
    has_bias: bool = False

    @property
    def num_params(self) -> int:
        return self.in_features * self.out_features * self.count


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling: "linear" divides all frequencies by `factor`, "llama3" only the low ones.
    Raises UserError for impossible values.
    """

    kind: RopeKind = one_of(valid=get_args(RopeKind))
    factor: float = number(minimum=1, fix=FIX)
    low_freq_factor: float = number(1.0, above=0, fix=FIX)
    high_freq_factor: float = number(4.0, above=0, fix=FIX)
    original_max_position: int = _size(8192)

    def __post_init__(self) -> None:
        check_fields(self, "rope_scaling: ")
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}; {FIX}"
            )


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of one decoder-only transformer. Raises UserError for impossible ones.

    `gated_ffn` and `norm="rms"` make the Llama block; without the gate and with `norm="layer"` and
    biases it is SARATHI's plain block (section 2.1: FFN H -> 4H -> H with GeLU, 12 H^2 parameters a
    layer). FLOPs and bytes count the whole context, even with a `sliding_window`.

    With `num_experts` the FFN of a layer is a mixture: a router chooses `experts_per_token` of them
    for each token, and `ffn_size` is the width of one. Their outputs are weighted by the softmax
    over all, which `normalise_experts` scales to sum to one over those chosen. Every token passes
    the shared expert of `shared_expert_size`, times the sigmoid of a gate (Qwen2-MoE).
    """

    name: str
    num_layers: int = _size(maximum=MAX_LAYERS)
    hidden_size: int = _size()
    num_heads: int = _size()
    num_kv_heads: int = _size()
    ffn_size: int = _size()
    vocab_size: int = _size()
    head_size: int = _size()
    max_position: int = _size(4096)
    norm: Norm = one_of("rms", valid=get_args(Norm))
    norm_eps: float = number(1e-5, above=0, fix=FIX)
    gated_ffn: bool = flag(True)
    activation: Activation = one_of("silu", valid=get_args(Activation))
    qkv_bias: bool = flag(False)
    out_bias: bool = flag(False)
    ffn_bias: bool = flag(False)
    qk_norm: bool = flag(False)
    rope_theta: float = number(10000.0, minimum=1, fix=FIX)
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = share(1.0, fix=FIX)  # of each head that is rotated, from its start
    sliding_window: int | None = _size(None)
    tie_embeddings: bool = flag(False)
    num_experts: int = _count(0, minimum=0)  # 0: one FFN for all tokens
    experts_per_token: int = _count(0, minimum=0)
    shared_expert_size: int = _count(0, minimum=0)  # 0: none
    normalise_experts: bool = flag(True)
    simulation_only: bool = flag(False)
    # of the cache: as the rest, or 8 bits with a scale
    kv_dtype: KvDtype = one_of("auto", valid=get_args(KvDtype))
    # of the layers' products: as the rest, or 8 bits; int8 is the output head's too
    weight_dtype: WeightDtype = one_of("auto", valid=get_args(WeightDtype))

    def __post_init__(self) -> None:
        model = f"model {self.name}:"
        check_fields(self, f"{model} ")
        if complaint := self._complaint():
            raise UserError(f"{model} {complaint}; {FIX}")

    def _complaint(self) -> str | None:
        """Describe a contradiction between fields that are valid one by one."""
        scaling, num_rotated = self.rope_scaling, self.rotary_size + self.rotary_size % 2
        is_mixture = 0 < self.experts_per_token <= self.num_experts
        experts = ("num_experts", "experts_per_token", "shared_expert_size")
        has_experts = any(getattr(self, name) for name in experts)
        rotated = f"rotates {self.rotary_size} entries, which must be pairs within the head"
        heads, rotary = ("num_heads", "num_kv_heads"), ("rotary_fraction", "head_size")
        for names, is_wrong, reason in (
            (("name",), not isinstance(self.name, str) or not self.name, "is not a name"),
            (("rope_scaling",), not isinstance(scaling, RopeScaling | None), "is no RopeScaling"),
            (heads, self.num_heads % self.num_kv_heads, "does not divide num_heads"),
            (rotary, not 0 < num_rotated <= self.head_size, rotated),
            (experts, has_experts and not is_mixture, "needs experts_per_token up to num_experts"),
        ):
            if is_wrong:
                return ", ".join(f"{name}={getattr(self, name)}" for name in names) + f" {reason}"
        if self.num_params > MAX_PARAMS:
            return f"it would have {self.num_params:.1e} parameters, of {MAX_PARAMS:.0e} at most"
        return None

    def require_runnable(self) -> None:
        """Raise UserError for a shape for simulation only."""
        has_known_experts = self.gated_ffn and not self.ffn_bias and self.activation == "silu"
        reason = "is for simulation only" if self.simulation_only else ""
        if self.num_experts and not has_known_experts:
            reason = "has experts without SiLU and a gate, or with biases, which are only simulated"
        if reason:
            raise UserError(
                f"model {self.name} {reason}; add executor=simulated or take another model"
            )

    # -- shapes ------------------------------------------------------------------------------------

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of one token's keys in one layer; the values are as wide."""
        return self.num_kv_heads * self.head_size

    @property
    def rotary_size(self) -> int:
        """Entries of each head that carry the position."""
        return int(self.head_size * self.rotary_fraction)

    @cached_property
    def layer_linears(self) -> tuple[Linear, ...]:
        """The matrix products over all tokens of a batch, summed over layers (`count`)."""
        hidden, count = self.hidden_size, self.num_layers
        attention = (
            Linear("qkv_proj", hidden, self.q_size + 2 * self.kv_size, count, self.qkv_bias),
            Linear("out_proj", self.q_size, hidden, count, self.out_bias),
        )
        if not self.num_experts:
            return (*attention, *self._ffn("ffn", self.ffn_size, count, self.ffn_bias))
        router = Linear("router", hidden, self.num_experts, count)
        if not self.shared_expert_size:
            return (*attention, router)
        shared = self._ffn("shared", self.shared_expert_size, count)
        return (*attention, router, *shared, Linear("shared_gate", hidden, 1, count))

    @cached_property
    def expert_linears(self) -> tuple[Linear, ...]:
        """The products of all experts, each over the tokens that chose it; none without experts."""
        count = self.num_layers * self.num_experts
        return self._ffn("ffn", self.ffn_size, count) if self.num_experts else ()

    def _ffn(self, name: str, width: int, count: int, has_bias: bool = False) -> tuple[Linear, ...]:
        hidden, rows = self.hidden_size, width * (1 + self.gated_ffn)
        return (
            Linear(f"{name}_up", hidden, rows, count, has_bias),
            Linear(f"{name}_down", width, hidden, count, has_bias),
        )

    @cached_property
    def lm_head(self) -> Linear:
        """The logits, computed only for rows that emit a token."""
        return Linear("lm_head", self.hidden_size, self.vocab_size, 1)

    @cached_property
    def num_linear_params(self) -> int:
        """Parameters of the layers' products, of which unchosen experts are not read."""
        return sum(linear.num_params for linear in (*self.layer_linears, *self.expert_linears))

    @cached_property
    def num_expert_params(self) -> int:
        """Parameters of the experts that a router chooses among."""
        return sum(linear.num_params for linear in self.expert_linears)

    def share_of_experts(self, num_tokens: Any) -> Any:
        """Compute the mean share of a layer's experts that so many tokens choose at random."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens

    @cached_property
    def num_params(self) -> int:
        """All matrices: layers, embedding and, unless tied, output head; no norms and biases."""
        heads = 1 if self.tie_embeddings else 2
        return self.num_linear_params + heads * self.lm_head.num_params

    # -- bytes -------------------------------------------------------------------------------------

    def linear_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one parameter of the layers' products, not of the embedding."""
        return dtype_bytes if self.weight_dtype == "auto" else 1

    def head_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one parameter of the output head."""
        return 1 if self.weight_dtype == "int8" else dtype_bytes

    @property
    def _scale_bytes(self) -> int:
        """Bytes of the scales of all products in int8."""
        linears = (*self.layer_linears, self.lm_head) if self.weight_dtype == "int8" else ()
        return sum(SCALE_BYTES * linear.out_features * linear.count for linear in linears)

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all matrices and scales; a head in int8 is stored even if tied."""
        layers = self.num_linear_params * self.linear_bytes(dtype_bytes) + self._scale_bytes
        has_head = self.weight_dtype == "int8" or not self.tie_embeddings
        heads = dtype_bytes + has_head * self.head_bytes(dtype_bytes)
        return layers + self.lm_head.num_params * heads

    def kv_head_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one token's keys in one head: d_head entries, or d_head bytes and a scale."""
        if self.kv_dtype == "auto":
            return self.head_size * dtype_bytes
        return self.head_size + KV_SCALE_BYTES

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one token: 2 L n_kv kv_head_bytes (819,200 B for the paper's 13B)."""
        return 2 * self.num_layers * self.num_kv_heads * self.kv_head_bytes(dtype_bytes)

    def kv_read_bytes(self, work: Work, dtype_bytes: int) -> Any:
        """KV bytes that attention must read once, re-reads of a prompt's earlier chunks included
        (SARATHI, section 4.3.2).
        """
        num_tokens = work.prefill_kv_tokens + work.decode_kv_tokens
        return num_tokens * self.kv_bytes_per_token(dtype_bytes)

    def weight_read_bytes(self, work: Work, dtype_bytes: int) -> Any:
        """Weight bytes of one iteration: the layers', and the output head's if a row emits."""
        head = (work.num_emits > 0) * self.lm_head.num_params * self.head_bytes(dtype_bytes)
        head += self._scale_bytes
        if not self.num_experts:
            return self.num_linear_params * self.linear_bytes(dtype_bytes) + head
        others = (self.num_linear_params - self.num_expert_params) * self.linear_bytes(dtype_bytes)
        return others + self.expert_read_bytes(work, dtype_bytes) + head

    def expert_read_bytes(self, work: Work, dtype_bytes: int) -> Any:
        """Expert weights among these bytes. Where prompts pass only a `layer_share` of the layers,
        decodes alone choose in the others.
        """
        decodes, share = work.num_decode_tokens, getattr(work, "layer_share", 1.0)
        chosen = share * self.share_of_experts(work.num_prefill_tokens / share + decodes)
        chosen += (1 - share) * self.share_of_experts(decodes)
        return chosen * self.num_expert_params * self.linear_bytes(dtype_bytes)

    def min_bytes(self, work: Work, dtype_bytes: int) -> Any:
        """Least memory traffic of one iteration: weights read, KV read, new KV written."""
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        written = num_tokens * self.kv_bytes_per_token(dtype_bytes)
        read = self.weight_read_bytes(work, dtype_bytes) + self.kv_read_bytes(work, dtype_bytes)
        return read + written

    def flops(self, work: Work) -> Any:
        """All FLOPs of one iteration that no implementation can avoid: 2 per parameter and token in
        the layers (of the experts of those chosen) and per emitting row in the output head, and
        4 L n_heads d_head per causal query-key pair, the products for scores and values.
        """
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        params = self.num_linear_params
        if self.num_experts:
            unused = self.num_experts - self.experts_per_token
            params -= self.num_expert_params * unused // self.num_experts
        linear = 2 * (params * num_tokens + self.lm_head.num_params * work.num_emits)
        pairs = work.prefill_query_key_pairs + work.decode_kv_tokens
        return linear + 4 * self.num_layers * self.q_size * pairs


def _degree(kind: str) -> Any:
    fix = "use the number of devices that share a layer, or of stages, such as 2"
    return whole(1, name=f"executor.{kind}_parallel", minimum=1, fix=fix)


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism of one copy of a model. UserError for one below 1."""

    tensor: int = _degree("tensor")  # devices that share every layer, by heads and columns
    pipeline: int = _degree("pipeline")  # stages that share the layers

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def description(self) -> str:
        """The devices in words, tensor by pipeline: "8 x 8 devices"."""
        return f"{self.tensor} x {self.pipeline} devices"


def uneven(kind: str, degree: int, number: int, what: str, most: int = 64) -> UserError:
    """Make the error of a degree that does not divide `number`; valid ones are named to `most`."""
    valid = ", ".join(str(n) for n in range(1, min(number, most) + 1) if number % n == 0)
    return UserError(
        f"executor.{kind}_parallel={degree} does not divide the {number} {what}; use one of {valid}"
    )

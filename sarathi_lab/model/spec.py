"""What a model is made of, and the FLOPs and bytes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
KvDtype = Literal["auto", "int8", "fp8"]
WeightDtype = Literal["auto", "fp8"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_SCALE_BYTES = 4  # the float32 that stands beside every head of 8-bit keys or values
SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads"),
    *("ffn_size", "vocab_size", "head_size"),
)


class Work(Protocol):
    """The sums that cost depends on: of a `Batch`, or, as arrays, of a table of iterations."""

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

    @property
    def num_params(self) -> int:
        return self.in_features * self.out_features * self.count


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling: "linear" divides all frequencies by `factor`, "llama3" only the low ones."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of one decoder-only transformer. Raises UserError for impossible ones.

    `gated_ffn` and `norm="rms"` make the Llama block; without the gate and with `norm="layer"` and
    biases it is SARATHI's plain block (section 2.1: FFN H -> 4H -> H with GeLU, 12 H^2 parameters a
    layer). FLOPs and bytes count the whole context, also where a `sliding_window` spares some.

    With `num_experts` the FFN of a layer is a mixture (simulation only): a router chooses
    `experts_per_token` of them for each token, and `ffn_size` is the width of one.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    head_size: int
    max_position: int = 4096
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    gated_ffn: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # share of each head that is rotated, from its start
    sliding_window: int | None = None
    tie_embeddings: bool = False
    num_experts: int = 0  # 0: one FFN for all tokens
    experts_per_token: int = 0
    simulation_only: bool = False
    kv_dtype: KvDtype = "auto"  # of the cache: as the rest, or 8 bits with a scale
    weight_dtype: WeightDtype = "auto"  # of the layers' products: as the rest, or 8 bits

    def __post_init__(self) -> None:
        model, fix = f"model {self.name}:", "correct the model's settings"
        for name in SIZES:
            require_int(f"{model} {name}", getattr(self, name), 1, fix)
        for name, kind in (
            *(("norm", Norm), ("activation", Activation)),
            *(("kv_dtype", KvDtype), ("weight_dtype", WeightDtype)),
        ):
            require_one_of(f"{model} {name}", getattr(self, name), get_args(kind))
        for name in ("rotary_fraction", "rope_theta", "norm_eps"):
            require_number(f"{model} {name}", getattr(self, name), above=0, fix=fix)
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{model} num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; correct the model file"
            )
        if self.num_experts and not (
            0 < self.experts_per_token <= self.num_experts and self.simulation_only
        ):
            raise UserError(
                f"{model} num_experts={self.num_experts} needs experts_per_token from 1 to it, and "
                f"simulation_only: true; {fix}"
            )

    def require_runnable(self) -> None:
        """Raise UserError for a shape that exists for simulation only."""
        if self.simulation_only:
            raise UserError(
                f"model {self.name} is for simulation only; add executor=simulated or take "
                "another model"
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
            Linear("qkv_proj", hidden, self.q_size + 2 * self.kv_size, count),
            Linear("out_proj", self.q_size, hidden, count),
        )
        if self.num_experts:
            return (*attention, Linear("router", hidden, self.num_experts, count))
        return (*attention, *self._ffn(count))

    @cached_property
    def expert_linears(self) -> tuple[Linear, ...]:
        """The products of all experts, each over the tokens that chose it; none without experts."""
        return self._ffn(self.num_layers * self.num_experts) if self.num_experts else ()

    def _ffn(self, count: int) -> tuple[Linear, ...]:
        hidden, ffn = self.hidden_size, self.ffn_size
        return (
            Linear("ffn_up", hidden, ffn * (2 if self.gated_ffn else 1), count),
            Linear("ffn_down", ffn, hidden, count),
        )

    @cached_property
    def lm_head(self) -> Linear:
        """The logits, computed only for rows that emit a token."""
        return Linear("lm_head", self.hidden_size, self.vocab_size, 1)

    @cached_property
    def num_linear_params(self) -> int:
        """Parameters of the layers' products, what an iteration reads whatever its batch but for
        experts that nobody chose.
        """
        return sum(linear.num_params for linear in (*self.layer_linears, *self.expert_linears))

    @cached_property
    def num_expert_params(self) -> int:
        """Those of them that are experts'."""
        return sum(linear.num_params for linear in self.expert_linears)

    def share_of_experts(self, num_tokens: Any) -> Any:
        """Share of a layer's experts that so many tokens choose in the mean, each at random."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens

    @cached_property
    def num_params(self) -> int:
        """All matrices: layers, embedding and, unless tied, output head; no norms and biases."""
        heads = 1 if self.tie_embeddings else 2
        return self.num_linear_params + heads * self.lm_head.num_params

    # -- bytes -------------------------------------------------------------------------------------

    def linear_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one parameter of the layers' products; embedding and output head keep theirs."""
        return dtype_bytes if self.weight_dtype == "auto" else 1

    def weight_bytes(self, dtype_bytes: int) -> int:
        heads = self.num_params - self.num_linear_params
        return self.num_linear_params * self.linear_bytes(dtype_bytes) + heads * dtype_bytes

    def kv_head_bytes(self, dtype_bytes: int) -> int:
        """One token's keys in one head: d_head entries, or as many bytes and a scale in 8 bits."""
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
        """Weights that one iteration reads: the layers' once, the output head's if a row emits."""
        head = (work.num_emits > 0) * self.lm_head.num_params * dtype_bytes
        if not self.num_experts:
            return self.num_linear_params * self.linear_bytes(dtype_bytes) + head
        chosen = self.share_of_experts(work.num_prefill_tokens + work.num_decode_tokens)
        experts = self.num_expert_params
        read = self.num_linear_params - experts + chosen * experts
        return read * self.linear_bytes(dtype_bytes) + head

    def min_bytes(self, work: Work, dtype_bytes: int) -> Any:
        """Least memory traffic of one iteration: weights read, KV read, new KV written."""
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        written = num_tokens * self.kv_bytes_per_token(dtype_bytes)
        read = self.weight_read_bytes(work, dtype_bytes) + self.kv_read_bytes(work, dtype_bytes)
        return read + written

    # -- FLOPs -------------------------------------------------------------------------------------

    def linear_flops(self, work: Work) -> Any:
        """2 per parameter and token in the layers (of the experts of those chosen), and per
        emitting row in the output head.
        """
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        params = self.num_linear_params
        if self.num_experts:
            unused = self.num_experts - self.experts_per_token
            params -= self.num_expert_params * unused // self.num_experts
        return 2 * (params * num_tokens + self.lm_head.num_params * work.num_emits)

    def attention_flops(self, work: Work) -> Any:
        """4 L n_heads d_head per causal query-key pair: the products for scores and values."""
        pairs = work.prefill_query_key_pairs + work.decode_kv_tokens
        return 4 * self.num_layers * self.q_size * pairs

    def flops(self, work: Work) -> Any:
        """All FLOPs of one iteration that no implementation can avoid."""
        return self.linear_flops(work) + self.attention_flops(work)

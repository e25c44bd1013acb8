"""Parts of a model's layers, and what is computed in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

from sarathi_lab.config.checked import check_fields, flag, one_of, whole
from sarathi_lab.config.errors import UserError

FIX = "correct the model's settings"
count_field = partial(whole, maximum=2**31 - 1, fix=FIX)  # token ids and kernels' sizes: 32 bits
size_field = partial(count_field, minimum=1)
Rule = Literal["gated_delta", "mamba2"]
# Products of [key_size] by [key_size, value_size] for a token in a head, by rule: both write to the
# state and read the output from it; the delta rule first reads what the state has for the key.
PRODUCTS = {"gated_delta": 3, "mamba2": 2}
GATES = {"gated_delta": 2, "mamba2": 1}  # of a head: decay and strength, or step size


class Work(Protocol):
    """Sums that determine cost: of a `Batch`, or, as arrays, of a table of iterations."""

    num_prefills: Any
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
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): in each layer the
    cache has `rank` values of a token, which all heads share, and `rope_size` rotated ones.

    Prompts are computed with latents expanded to each head's keys (`ModelSpec.head_size`, of which
    `rope_size` are rotated) and values (`value_size`), also those of earlier chunks; decodes attend
    to the latents, the expansion being absorbed into queries and outputs: vLLM's two forms
    (`mla_attention.py`). Queries pass `query_rank`. Raises UserError for impossible sizes.
    """

    rank: int = size_field()
    rope_size: int = size_field()
    query_rank: int = size_field()
    value_size: int = size_field()

    def __post_init__(self) -> None:
        check_fields(self, "layers.latent.")

    @property
    def cached_size(self) -> int:
        """Values of a token in one layer's cache."""
        return self.rank + self.rope_size

    def linears(self, hidden: int, num_heads: int, head_size: int, count: int) -> list[Linear]:
        """List the products of `count` layers."""
        return [
            Linear("latent_down", hidden, self.query_rank + self.cached_size, count),
            Linear("query_up", self.query_rank, num_heads * head_size, count),
            Linear("latent_up", self.rank, self.expanded_size(num_heads, head_size), count),
            Linear("out_proj", num_heads * self.value_size, hidden, count),
        ]

    def expanded_size(self, num_heads: int, head_size: int) -> int:
        """Values of a token's keys and values, but the rotated ones, in all heads of a layer."""
        return num_heads * (head_size - self.rope_size + self.value_size)

    def expanded_flops(self, head_size: int) -> int:
        """FLOPs of one head and query-key pair of prompts: 2 (d_qk + d_v)."""
        return 2 * (head_size + self.value_size)

    @property
    def absorbed_flops(self) -> int:
        """FLOPs of one head and query-key pair of decodes: 2 (2 rank + d_rope)."""
        return 2 * (self.cached_size + self.rank)


@dataclass(frozen=True)
class LinearAttention:
    """`num_layers` layers of linear attention, whose cache is a state of constant size: in each of
    `num_heads` [key_size, value_size], and the last `conv_size` - 1 inputs of a convolution over
    queries, keys (of `num_key_heads`) and values.

    `rule` is the gated delta rule (arXiv 2412.06464; Qwen3-Next) or Mamba-2's (arXiv 2405.21060;
    `num_key_heads` are its groups, `key_size` its state size). Kernels take `chunk` tokens of a
    prompt at once. `state_bytes` is of an element of the states; None: as the rest of the cache.
    Raises UserError for impossible sizes.
    """

    num_layers: int = size_field()
    num_heads: int = size_field()
    num_key_heads: int = size_field()
    key_size: int = size_field()
    value_size: int = size_field()
    rule: Rule = one_of("gated_delta", valid=get_args(Rule))
    conv_size: int = size_field(4)
    chunk: int = size_field(64)
    state_bytes: int | None = size_field(None)

    def __post_init__(self) -> None:
        check_fields(self, "layers.linear.")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.inner_size

    @property
    def state_size(self) -> int:
        """Elements of one layer's states of a sequence, without the convolution's."""
        return self.inner_size * self.key_size

    def sequence_bytes(self, dtype_bytes: int) -> int:
        """Bytes of a sequence's states in one layer."""
        inputs = (self.conv_size - 1) * self.num_channels
        return self.state_size * (self.state_bytes or dtype_bytes) + inputs * dtype_bytes

    @property
    def token_flops(self) -> int:
        """FLOPs of a token in one layer, recurrently: products with the state and convolution;
        decays are not counted.
        """
        products = PRODUCTS[self.rule] * self.state_size
        return 2 * (products + self.conv_size * self.num_channels)

    @property
    def chunk_flops(self) -> int:
        """FLOPs of a token in one layer in chunks: with the chunk's other tokens, and the state."""
        within = self.num_key_heads * self.key_size + self.inner_size
        if self.rule == "gated_delta":
            within = self.num_heads * (3 * self.key_size + 2 * self.value_size)
        return 2 * (self.chunk * within + PRODUCTS[self.rule] * self.state_size)

    def linears(self, hidden: int) -> list[Linear]:
        """List the products of all layers; an output gate is as wide as the values."""
        width = self.num_channels + self.inner_size + GATES[self.rule] * self.num_heads
        return [
            Linear("state_in", hidden, width, self.num_layers),
            Linear("state_out", self.inner_size, hidden, self.num_layers),
        ]


@dataclass(frozen=True)
class Layers:
    """What the layers of a model have, if they are not alike: so many have `attention`, so many an
    `ffn` (None: all), others `linear` attention. Raises UserError for impossible ones.

    Of the layers with experts the first `dense` have one FFN of `dense_ffn_size` instead. An
    `output_gate` is as wide as the queries. With `latent` attention, `ModelSpec.num_kv_heads` is
    `num_heads`.
    """

    attention: int | None = size_field(None)
    ffn: int | None = size_field(None)
    dense: int = count_field(0, minimum=0)
    dense_ffn_size: int = count_field(0, minimum=0)
    shared_gate: bool = flag(True)  # of a shared expert
    output_gate: bool = flag(False)
    latent: Latent | None = None
    linear: LinearAttention | None = None

    def __post_init__(self) -> None:
        check_fields(self, "layers.")
        for name, kind in (("latent", Latent), ("linear", LinearAttention)):
            if not isinstance(value := getattr(self, name), kind | None):
                raise UserError(f"layers.{name}={value} is no {kind.__name__}; {FIX}")

    @property
    def description(self) -> str:
        kinds = [("latent", self.latent), ("linear", self.linear)]
        named = " and ".join(name for name, of in kinds if of)
        return f"{named} attention" if named else "layers that are not alike"

    def complaint(self, spec: Any) -> str | None:
        """Describe a contradiction with the other fields of `spec`, a `ModelSpec`."""
        for name in ("attention", "ffn"):
            if ((count := getattr(self, name)) or 0) > spec.num_layers:
                return f"layers.{name}={count} exceeds num_layers={spec.num_layers}"
        linear = self.linear.num_layers if self.linear else 0
        if (attention := spec.num_attention_layers) + linear > spec.num_layers:
            return f"layers.linear.num_layers={linear} exceeds {spec.num_layers} - {attention}"
        if self.dense > spec.num_ffn_layers:
            return f"layers.dense={self.dense} exceeds layers.ffn={spec.num_ffn_layers}"
        if bool(self.dense) != bool(self.dense_ffn_size) or (self.dense and not spec.num_experts):
            return f"layers.dense={self.dense} needs layers.dense_ffn_size and num_experts"
        if self.latent and spec.num_kv_heads != spec.num_heads:
            return f"num_kv_heads={spec.num_kv_heads} is not num_heads, which share the latents"
        return None

    def attention_flops(self, spec: Any, work: Work) -> tuple[Any, Any]:
        """Compute the FLOPs of attention of `spec` for prompts and for decodes: 4 L n_heads d_head
        per causal query-key pair, the products for scores and values; latent attention's two forms,
        with the context of each chunk expanded again; and of linear attention, a constant a token.
        """
        per_head = spec.num_attention_layers * spec.num_heads
        prompts = decodes = 4 * per_head * spec.head_size
        expanded: Any = 0
        if latent := self.latent:
            prompts = per_head * latent.expanded_flops(spec.head_size)
            decodes = per_head * latent.absorbed_flops
            size = latent.rank * latent.expanded_size(spec.num_heads, spec.head_size)
            context = work.prefill_kv_tokens - work.num_prefill_tokens
            expanded = 2 * spec.num_attention_layers * size * context
        token = self.linear.num_layers * self.linear.token_flops if self.linear else 0
        return (
            prompts * work.prefill_query_key_pairs + expanded + token * work.num_prefill_tokens,
            decodes * work.decode_kv_tokens + token * work.num_decode_tokens,
        )


ALIKE = Layers()

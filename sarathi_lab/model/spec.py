"""Shapes of a model, and the FLOPs and bytes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, get_args

from sarathi_lab.config.checked import check_fields, flag, instance, number, one_of, share, text
from sarathi_lab.config.errors import UserError
from sarathi_lab.model.layers import (
    ALIKE,
    FIX,
    AmountT,
    AttentionFlops,
    AttentionReads,
    CachedWindow,
    HeadSizes,
    Layers,
    Linear,
    Window,
    Work,
    count_field,
    size_field,
)
from sarathi_lab.model.quantisation import STORED, Quantisation, kind_of_product

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeKind = Literal["linear", "llama3"]
KvDtype = Literal["auto", "int8", "fp8"]
StoredDtype = Literal["auto", "fp8", "int8", "w8a8", "int4", "mxfp4", "nvfp4"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_SCALE_BYTES = 4  # of the float32 beside every head of 8-bit keys or values
MAX_LAYERS = 10**4  # a hundred times the deepest models
MAX_PARAMS = 10**13  # ten times the largest models; sums over tokens fit into 64 bits


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling: "linear" divides all frequencies by `factor`, "llama3" only the low ones.
    Raises UserError for impossible values.
    """

    kind: RopeKind = one_of(valid=get_args(RopeKind))
    factor: float = number(minimum=1, fix=FIX)
    low_freq_factor: float = number(1.0, above=0, fix=FIX)
    high_freq_factor: float = number(4.0, above=0, fix=FIX)
    original_max_position: int = size_field(8192)

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
    layer). FLOPs and bytes count the whole context, even with a `sliding_window`; those of
    `layers.window` count what it leaves.

    With `num_experts` the FFN of a layer is a mixture: a router chooses `experts_per_token` of them
    for each token, and `ffn_size` is the width of one. Their outputs are weighted by the softmax
    over all, which `normalise_experts` scales to sum to one over those chosen. Every token passes
    the shared expert of `shared_expert_size`, times the sigmoid of a gate (Qwen2-MoE).

    `layers` counts those with each part, if they are not alike, and a checkpoint's `quantisation`
    has the bytes of their weights: both for simulation, as is what the formulas leave `uncounted`.
    """

    name: str = text(fix=FIX)
    num_layers: int = size_field(maximum=MAX_LAYERS)
    hidden_size: int = size_field()
    num_heads: int = size_field()
    num_kv_heads: int = size_field()
    ffn_size: int = size_field()
    vocab_size: int = size_field()
    head_size: int = size_field()
    max_position: int = size_field(4096)
    norm: Norm = one_of("rms", valid=get_args(Norm))
    norm_eps: float = number(1e-5, above=0, fix=FIX)
    gated_ffn: bool = flag(True)
    activation: Activation = one_of("silu", valid=get_args(Activation))
    qkv_bias: bool = flag(False)
    out_bias: bool = flag(False)
    ffn_bias: bool = flag(False)
    qk_norm: bool = flag(False)
    rope_theta: float = number(10000.0, minimum=1, fix=FIX)
    rope_scaling: RopeScaling | None = instance(None, kind=RopeScaling, fix=FIX)
    rotary_fraction: float = share(1.0, fix=FIX)  # of each head that is rotated, from its start
    sliding_window: int | None = size_field(None)
    tie_embeddings: bool = flag(False)
    num_experts: int = count_field(0, minimum=0)  # 0: one FFN for all tokens
    experts_per_token: int = count_field(0, minimum=0)
    shared_expert_size: int = count_field(0, minimum=0)  # 0: none
    normalise_experts: bool = flag(True)
    layers: Layers = instance(ALIKE, kind=Layers, fix=FIX)
    simulation_only: bool = flag(False)
    # of the cache: as the rest, or 8 bits with a scale
    kv_dtype: KvDtype = one_of("auto", valid=get_args(KvDtype))
    # of the layers' products: as the rest, or in fewer bits, of which engines have 8
    weight_dtype: StoredDtype = one_of("auto", valid=get_args(StoredDtype))
    quantisation: Quantisation | None = instance(None, kind=Quantisation, fix=FIX)
    # in which its authors publish them, for advice where neither of these states fewer bits
    usual_weights: StoredDtype = one_of("auto", valid=get_args(StoredDtype))
    published_dtype: str = one_of("auto", valid=("auto", *DTYPE_BYTES))  # of its file's elements
    # parts of the model, by the fields of config.json that have them
    uncounted: Sequence[str] = instance((), kind=tuple, fix=FIX)

    def __post_init__(self) -> None:
        model = f"model {self.name}:"
        check_fields(self, f"{model} ")
        for contradiction in chain(self._contradictions(), self._contradictions_of_layers()):
            raise UserError(f"{model} {contradiction}; {FIX}")

    def _contradictions(self) -> Iterator[str]:
        """Describe contradictions between fields that are valid one by one."""
        if self.num_heads % self.num_kv_heads:
            heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            yield f"{heads} does not divide num_heads"
        num_rotated = self.rotary_size + self.rotary_size % 2
        if not 0 < num_rotated <= self.head_size:
            yield (
                f"rotary_fraction={self.rotary_fraction}, head_size={self.head_size} rotates "
                f"{self.rotary_size} entries, which must be pairs within the head"
            )
        has_experts = self.num_experts or self.experts_per_token or self.shared_expert_size
        if has_experts and not 0 < self.experts_per_token <= self.num_experts:
            yield (
                f"num_experts={self.num_experts}, experts_per_token={self.experts_per_token}, "
                f"shared_expert_size={self.shared_expert_size} needs experts_per_token up to "
                "num_experts"
            )
        stored = self.quantisation
        if stored is not None and stored.of == "experts" and not self.num_experts:
            yield "num_experts=0 has none of the experts that the quantisation is of"

    def _contradictions_of_layers(self) -> Iterator[str]:
        """Describe contradictions between `layers` and the other fields."""
        layers = self.layers
        num_attention = self.num_attention_layers
        limits = [
            ("attention", num_attention, self.num_layers),
            ("ffn", self.num_ffn_layers, self.num_layers),
            ("dense", layers.dense, self.num_ffn_layers),
        ]
        if layers.window is not None:
            limits.append(("window.num_layers", layers.window.num_layers, num_attention))
        if layers.linear is not None and not layers.parallel:
            num_others = self.num_layers - num_attention
            limits.append(("linear.num_layers", layers.linear.num_layers, num_others))
        for name, count, limit in limits:
            if count > limit:
                yield f"layers.{name}={count} exceeds {limit}"
        has_dense = layers.dense > 0
        has_dense_size = layers.dense_ffn_size > 0
        if has_dense != has_dense_size or (has_dense and not self.num_experts):
            yield f"layers.dense={layers.dense} needs layers.dense_ffn_size and num_experts"
        if layers.latent is not None and self.num_kv_heads != self.num_heads:
            yield f"num_kv_heads={self.num_kv_heads} is not num_heads, which share the latents"
        if layers.latent is not None and layers.window is not None:
            yield "layers.window is not counted with layers.latent"
        if layers.latent is None and layers.index is not None:
            yield "layers.index needs layers.latent"
        if self.num_params > MAX_PARAMS:
            yield f"it would have {self.num_params:.1e} parameters, of {MAX_PARAMS:.0e} at most"

    def require_runnable(self) -> None:
        """Raise UserError for a shape that the lab's model does not compute."""
        has_known_experts = self.gated_ffn and not self.ffn_bias and self.activation == "silu"
        reason = "is for simulation only" if self.simulation_only else ""
        if self.num_experts and not has_known_experts:
            reason = "has experts without SiLU and a gate, or with biases, which are only simulated"
        if self.layers != ALIKE:
            reason = f"has {self.layers.description}, which is only simulated"
        if reason:
            raise UserError(
                f"model {self.name} {reason}; add executor=simulated or take another model"
            )

    @property
    def has_formulas(self) -> bool:
        """Whether FLOPs and bytes read are known, and not only sizes (`StoredSpec`)."""
        return True

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.num_params / 1e6:,.0f}M parameters"

    def unquantised(self) -> ModelSpec:
        """Return the same with weights and cache in the run's type."""
        return replace(self, kv_dtype="auto", weight_dtype="auto", quantisation=None)

    def of_part(self, num_parts: int) -> ModelSpec:
        """Return what each of so many devices holds, the layers divided among them."""
        return replace(self, num_layers=-(-self.num_layers // num_parts))

    # -- shapes ------------------------------------------------------------------------------------

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of one token's keys in one layer; the values are as wide."""
        return self.num_kv_heads * self.head_size

    @cached_property
    def heads(self) -> HeadSizes:
        """Heads of the attention layers without a window."""
        layers = self.layers
        return HeadSizes(
            self.num_heads,
            self.num_kv_heads,
            key_size=self.head_size,
            value_size=layers.value_size or self.head_size,
            has_value_product=layers.value_product,
        )

    @cached_property
    def window_heads(self) -> HeadSizes:
        """Heads of the attention layers with a window."""
        window = self.layers.window
        if window is None or window.heads is None:
            return self.heads
        return window.heads

    @property
    def rotary_size(self) -> int:
        """Entries of each head that carry the position."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention to cached keys and values, in a window or without one."""
        return self.layers.attention or self.num_layers

    @property
    def num_windowed_layers(self) -> int:
        """Layers with attention in a window."""
        window = self.layers.window
        return 0 if window is None else window.num_layers

    @property
    def num_full_layers(self) -> int:
        """Layers with attention to the whole context."""
        return self.num_attention_layers - self.num_windowed_layers

    @property
    def num_index_layers(self) -> int:
        """Layers with an index that selects what attention sees."""
        index = self.layers.index
        if index is None:
            return 0
        return index.num_layers or self.num_attention_layers

    @cached_property
    def attention_window(self) -> Window | None:
        """The window in which work is counted, or what stands for the tokens that an index selects:
        as many as there are, up to a number.
        """
        index = self.layers.index
        if index is not None:
            return Window(self.num_attention_layers, index.size)
        compressed = self.layers.compressed
        if compressed is not None:
            return Window(self.num_attention_layers, compressed.seen_tokens)
        return self.layers.window

    @cached_property
    def cached_window(self) -> CachedWindow | None:
        """The room in a cache of the layers with a window; None if there are none. Where an index
        selects from whole contexts, these stay in the cache. Where all layers have a window, whole
        contexts are counted too, though vLLM frees what has left it.
        """
        window = self.attention_window
        if window is None:
            return None
        num_full = self.num_full_layers
        has_whole_contexts = window is not self.layers.window  # of an index or a compressed cache
        if num_full == 0 or has_whole_contexts:
            return CachedWindow(window, 0.0)
        # A layer's room, by that of one without a window.
        size = self.window_heads.cached_size / self.heads.cached_size
        if window.num_layers < num_full:
            return CachedWindow(window, size * window.num_layers / num_full)
        # Groups of as many layers as the whole context has: the last may have empty places.
        num_groups = math.ceil(window.num_layers / num_full)
        return CachedWindow(window, size * num_groups)

    def window_in_cache(self, pool: float | None) -> CachedWindow | None:
        """Return `cached_window` in a server whose windows have a `pool` (None: have not)."""
        cached = self.cached_window
        if cached is None or cached.share == 0:
            return cached
        return replace(cached, pool=pool)

    @property
    def cached_values(self) -> float:
        """Entries of a token's keys and values in the mean layer that writes some, without latents
        (`Latent.cached_size`).
        """
        full = self.num_full_layers * self.heads.cached_size
        windowed = self.num_windowed_layers * self.window_heads.cached_size
        return (full + windowed) / self.num_attention_layers

    @property
    def num_ffn_layers(self) -> int:
        """Layers with an FFN or experts."""
        return self.layers.ffn or self.num_layers

    @property
    def num_expert_layers(self) -> int:
        if not self.num_experts:
            return 0
        return self.num_ffn_layers - self.layers.dense

    @property
    def num_sublayers(self) -> int:
        """Attentions of either kind and FFNs of all layers, each with a norm before it."""
        linear = self.layers.linear
        num_linear = 0 if linear is None else linear.num_layers
        return self.num_attention_layers + num_linear + self.num_ffn_layers

    @property
    def activations(self) -> list[tuple[int, int]]:
        """Width and number of the FFNs that all tokens pass."""
        ffns = [(self.ffn_size, self.num_ffn_layers)]
        if self.num_experts:
            layers = self.layers
            dense = (layers.dense_ffn_size, layers.dense)
            shared = (self.shared_expert_size, self.num_expert_layers)
            ffns = [dense, shared]
        return [(width, count) for width, count in ffns if width]

    @cached_property
    def layer_linears(self) -> tuple[Linear, ...]:
        """The matrix products over all tokens of a batch, summed over layers (`count`)."""
        layers = self.layers
        linears = list(self._attention_linears())
        if layers.linear is not None:
            linears += layers.linear.linears(self.hidden_size)
        if not self.num_experts:
            linears += self._ffn("ffn", self.ffn_size, self.num_ffn_layers, self.ffn_bias)
            return tuple(linears)
        if layers.dense:
            linears += self._ffn("dense", layers.dense_ffn_size, layers.dense)
        count = self.num_expert_layers
        linears.append(Linear("router", self.hidden_size, self.num_experts, count))
        if self.shared_expert_size:
            linears += self._ffn("shared", self.shared_expert_size, count)
            if layers.shared_gate:
                linears.append(Linear("shared_gate", self.hidden_size, 1, count))
        return tuple(linears)

    def _attention_linears(self) -> Iterable[Linear]:
        hidden = self.hidden_size
        layers = self.layers
        if layers.compressed:
            return layers.compressed.linears(hidden, self.heads, self.num_attention_layers)
        if layers.latent:
            count = self.num_attention_layers
            products = layers.latent.linears(hidden, self.num_heads, self.head_size, count)
            if layers.index is not None:
                rank = layers.latent.query_rank
                products += layers.index.linears(hidden, rank, self.num_index_layers)
            return products
        if self.window_heads is self.heads:
            return self._products_of("", self.heads, self.num_attention_layers)
        full = self._products_of("", self.heads, self.num_full_layers)
        windowed = self._products_of("window_", self.window_heads, self.num_windowed_layers)
        return full + windowed

    def _products_of(self, prefix: str, heads: HeadSizes, num_layers: int) -> list[Linear]:
        """List the products of layers with `heads`."""
        hidden = self.hidden_size
        queries = heads.query_size * (1 + self.layers.output_gate)
        width = queries + heads.projected_size
        return [
            Linear(
                f"{prefix}qkv_proj",
                hidden,
                width,
                num_layers,
                self.qkv_bias,
            ),
            Linear(
                f"{prefix}out_proj",
                heads.output_size,
                hidden,
                num_layers,
                self.out_bias,
            ),
        ]

    @cached_property
    def expert_linears(self) -> tuple[Linear, ...]:
        """The products of all experts, each over the tokens that chose it; none without experts."""
        if not self.num_experts:
            return ()
        return self._ffn("ffn", self.ffn_size, self.num_expert_layers * self.num_experts)

    def _ffn(
        self,
        name: str,
        width: int,
        count: int,
        has_bias: bool = False,
    ) -> tuple[Linear, ...]:
        hidden = self.hidden_size
        num_rows = 2 * width if self.gated_ffn else width
        up = Linear(
            f"{name}_up",
            hidden,
            num_rows,
            count,
            has_bias,
        )
        down = Linear(
            f"{name}_down",
            width,
            hidden,
            count,
            has_bias,
        )
        return up, down

    @cached_property
    def lm_head(self) -> Linear:
        """The logits, computed only for rows that emit a token."""
        return Linear("lm_head", self.hidden_size, self.vocab_size, 1)

    @cached_property
    def num_linear_params(self) -> int:
        """Parameters of the layers' products, of which unchosen experts are not read."""
        over_all_tokens = sum(linear.num_params for linear in self.layer_linears)
        return over_all_tokens + self.num_expert_params

    @cached_property
    def num_expert_params(self) -> int:
        """Parameters of the experts that a router chooses among."""
        return sum(linear.num_params for linear in self.expert_linears)

    def share_of_experts(self, num_tokens: AmountT) -> AmountT:
        """Compute the mean share of a layer's experts that so many tokens choose at random."""
        # An expert is left out only if every token leaves it out.
        return 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens

    @cached_property
    def num_params(self) -> int:
        """All matrices: layers, embedding and, unless tied, output head; no norms and biases."""
        tables = self.lm_head.num_params
        if not self.tie_embeddings:
            tables += self.lm_head.num_params
        return self.num_linear_params + tables

    # -- bytes -------------------------------------------------------------------------------------

    @property
    def stored(self) -> Quantisation | None:
        """How the weights of the layers' products are stored; None: in the run's type."""
        return STORED.get(self.weight_dtype, self.quantisation)

    def linear_bytes(self, dtype_bytes: int) -> float:
        """Bytes of one parameter of the products over all tokens, not of the embedding; the mean
        where they differ.
        """
        if self.stored is None or self.stored.of != "parts":
            return self.product_bytes("qkv_proj", dtype_bytes)  # as all others
        num_params = 0
        num_bytes = 0.0
        for linear in self.layer_linears:
            num_params += linear.num_params
            num_bytes += linear.num_params * self.product_bytes(linear.name, dtype_bytes)
        return num_bytes / num_params

    def product_bytes(self, name: str, dtype_bytes: int) -> float:
        """Bytes of one parameter of the product `name` among `layer_linears`."""
        if self.stored is None:
            return dtype_bytes
        part = self.stored.part(kind_of_product(name))
        return part.mean_bytes(dtype_bytes)

    def expert_bytes(self, dtype_bytes: int) -> float:
        """Bytes of one parameter of the experts that a router chooses among."""
        if self.stored is None:
            return dtype_bytes
        part = self.stored.part("experts")
        return part.mean_bytes(dtype_bytes)

    def head_bytes(self, dtype_bytes: int) -> float:
        """Bytes of one parameter of the output head."""
        stored = self.stored
        if self.tie_embeddings or stored is None:
            return dtype_bytes
        return stored.head_bytes or dtype_bytes

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all matrices; a tied output head is stored once."""
        num_params = self.lm_head.num_params
        tables: float = num_params * dtype_bytes
        if not self.tie_embeddings:
            tables += num_params * self.head_bytes(dtype_bytes)
        layers = self.layer_weight_bytes(dtype_bytes)
        return layers + math.ceil(tables)

    def layer_weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the layers' matrices."""
        experts = self.num_expert_params * self.expert_bytes(dtype_bytes)
        return math.ceil(self._other_bytes(dtype_bytes) + experts)

    def _other_bytes(self, dtype_bytes: int) -> float:
        """Bytes of the layers' matrices but the experts."""
        num_params = self.num_linear_params - self.num_expert_params
        return num_params * self.linear_bytes(dtype_bytes)

    def kv_head_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one token's keys in one head: d_head entries, or d_head bytes and a scale."""
        if self.kv_dtype == "auto":
            return self.head_size * dtype_bytes
        return self.head_size + KV_SCALE_BYTES

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values that one token writes: 2 L n_kv kv_head_bytes (819,200 B for the paper's
        13B), or L (rank + d_rope) latent ones; L counts layers with a cache of tokens.
        """
        layers = self.layers
        if layers.compressed is not None:
            entry_bytes = self.kv_head_bytes(dtype_bytes)
            return math.ceil(layers.compressed.token_bytes(entry_bytes))
        full = self.num_full_layers * self.kv_layer_bytes(dtype_bytes)
        window_bytes = self._heads_bytes(self.window_heads, dtype_bytes)
        written = full + self.num_windowed_layers * window_bytes
        if layers.index is not None:
            written += self.num_index_layers * layers.index.cached_bytes
        return written

    def kv_layer_bytes(self, dtype_bytes: int) -> int:
        """Keys and values of one token in one layer without a window, without an index's key."""
        latent = self.layers.latent
        if latent is None:
            return self._heads_bytes(self.heads, dtype_bytes)
        value_bytes = dtype_bytes if self.kv_dtype == "auto" else 1
        return latent.cached_size * value_bytes

    def _heads_bytes(self, heads: HeadSizes, dtype_bytes: int) -> int:
        """Keys and values of one token in one layer with `heads`."""
        if self.kv_dtype == "auto":
            return heads.cached_size * dtype_bytes
        return heads.cached_size + 2 * heads.num_kv_heads * KV_SCALE_BYTES

    def cache_bytes_per_token(self, dtype_bytes: int, pool: float | None = None) -> float:
        """Bytes that each further token of a context takes of a cache, beside what `cached_window`
        and states take of it; with its part of a `pool` for windows.
        """
        cached_window = self.cached_window
        every = self.kv_bytes_per_token(dtype_bytes)
        if cached_window is None or cached_window.share == 0:
            return every
        full = self.num_full_layers * self.kv_layer_bytes(dtype_bytes)
        if pool is None:
            return full
        return full + pool * (every - full)

    def state_bytes(self, dtype_bytes: int) -> int:
        """States of one sequence in the layers with linear attention, or its part of a compressed
        cache that does not grow.
        """
        compressed = self.layers.compressed
        if compressed is not None:
            entry_bytes = self.kv_head_bytes(dtype_bytes)
            return compressed.sequence_bytes(self.num_attention_layers, entry_bytes)
        linear = self.layers.linear
        if linear is None:
            return 0
        return linear.num_layers * linear.sequence_bytes(dtype_bytes)

    def state_tokens(self, dtype_bytes: int) -> int:
        """Tokens whose cache is as large as the states of one sequence."""
        token_bytes = self.cache_bytes_per_token(dtype_bytes)
        return math.ceil(self.state_bytes(dtype_bytes) / token_bytes)

    def kv_read_bytes(self, work: Work[AmountT], dtype_bytes: int) -> AmountT:
        """KV bytes that attention reads, earlier chunks of a prompt included (section 4.3.2)."""
        reads = self._attention_reads(dtype_bytes)
        num_bytes = (work.prefill_kv_tokens + work.decode_kv_tokens) * reads.token
        # Tables of iterations have no sums of windows unless their model has some.
        if reads.window_token:
            in_window = work.window_prefill_kv_tokens + work.window_decode_kv_tokens
            num_bytes = num_bytes + in_window * reads.window_token
        compressed = self.layers.compressed
        if compressed is not None:
            num_sequences = work.num_prefills + work.num_decode_tokens
            num_local = num_sequences * compressed.window + work.num_prefill_tokens
            num_bytes = num_bytes + num_local * reads.local_token
        return num_bytes

    def _attention_reads(self, dtype_bytes: int) -> AttentionReads:
        layers = self.layers
        if layers.compressed is not None:
            entry_bytes = self.kv_head_bytes(dtype_bytes)
            return layers.compressed.reads(self.num_attention_layers, entry_bytes)
        layer_bytes = self.kv_layer_bytes(dtype_bytes)
        if layers.index is not None:
            # Keys of the index of all tokens, and the latents of those that it selects.
            index_bytes = self.num_index_layers * layers.index.cached_bytes
            return AttentionReads(index_bytes, self.num_attention_layers * layer_bytes)
        window_bytes = self._heads_bytes(self.window_heads, dtype_bytes)
        return AttentionReads(
            token=self.num_full_layers * layer_bytes,
            window_token=self.num_windowed_layers * window_bytes,
        )

    def weight_read_bytes(self, work: Work[AmountT], dtype_bytes: int) -> AmountT:
        """Weight bytes of one iteration: the layers', and the output head's if a row emits."""
        # The head is read whole, however many rows emit.
        has_emits = work.num_emits > 0
        head_bytes = self.head_bytes(dtype_bytes)
        head = has_emits * self.lm_head.num_params * head_bytes
        others = self._other_bytes(dtype_bytes)
        if not self.num_experts:
            return others + head
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        chosen = self.share_of_experts(num_tokens)
        experts = chosen * self.num_expert_params * self.expert_bytes(dtype_bytes)
        return others + experts + head

    def min_bytes(self, work: Work[AmountT], dtype_bytes: int) -> AmountT:
        """Least memory traffic of one iteration: weights read, KV read, new KV written, and each
        sequence's states read and written.
        """
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        written = num_tokens * self.kv_bytes_per_token(dtype_bytes)
        weights = self.weight_read_bytes(work, dtype_bytes)
        read = self.kv_read_bytes(work, dtype_bytes)
        moved = weights + read + written
        if self.layers.linear is None:
            return moved
        # A sequence's states are read and written once, whatever its tokens.
        num_sequences = work.num_prefills + work.num_decode_tokens
        return moved + 2 * num_sequences * self.state_bytes(dtype_bytes)

    def flops(self, work: Work[AmountT]) -> AmountT:
        """All FLOPs of one iteration that no implementation can avoid: 2 per parameter and token in
        the layers (of the experts of those chosen) and per emitting row in the output head, and
        those of `attention_flops`.
        """
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        num_params = self.num_linear_params
        if self.num_experts:
            # A token passes whole experts, so that the division below is exact.
            num_unused = self.num_experts - self.experts_per_token
            num_params -= self.num_expert_params * num_unused // self.num_experts
        head = self.lm_head.num_params * work.num_emits
        products = 2 * (num_params * num_tokens + head)
        prompts, decodes = self.attention_flops(work)
        return products + (prompts + decodes)

    def attention_flops(self, work: Work[AmountT]) -> tuple[AmountT, AmountT]:
        """Compute the FLOPs of attention for prompts and for decodes: those of each causal
        query-key pair, and of linear attention a constant a token.
        """
        of_prompts, of_decodes = self._attention_flops
        prompts = of_prompts.pair * work.prefill_query_key_pairs
        decodes = of_decodes.pair * work.decode_kv_tokens
        if of_prompts.window_pair:  # else the work may have no sums of windows
            prompts = prompts + of_prompts.window_pair * work.window_pairs
            decodes = decodes + of_decodes.window_pair * work.window_decode_kv_tokens
        if of_prompts.earlier_token:
            earlier = work.prefill_kv_tokens - work.num_prefill_tokens
            prompts = prompts + of_prompts.earlier_token * earlier
        token_flops = of_prompts.token
        linear = self.layers.linear
        if linear is not None:
            token_flops += linear.num_layers * linear.token_flops
        if token_flops:
            prompts = prompts + token_flops * work.num_prefill_tokens
            decodes = decodes + token_flops * work.num_decode_tokens
        return prompts, decodes

    @cached_property
    def _attention_flops(self) -> tuple[AttentionFlops, AttentionFlops]:
        """For prompts and for decodes, without linear attention."""
        layers = self.layers
        latent = layers.latent
        num_heads = self.num_full_layers * self.num_heads  # of all layers
        if layers.compressed is not None:
            flops = layers.compressed.flops(self.heads, self.num_attention_layers)
            return flops, flops
        if latent is None:
            # 4 L n_heads d_head a pair, the products for scores and values.
            flops = AttentionFlops(
                pair=self.num_full_layers * self.heads.pair_flops,
                window_pair=self.num_windowed_layers * self.window_heads.pair_flops,
            )
            return flops, flops
        absorbed = num_heads * latent.absorbed_flops
        if layers.index is not None:
            # The index scores all pairs; attention sees what it selects, in the absorbed form also
            # for prompts, as each of their tokens sees others.
            score = self.num_index_layers * layers.index.pair_flops
            flops = AttentionFlops(score, absorbed)
            return flops, flops
        # Prompts attend to expanded keys and values, 2 (d_qk + d_v) a pair, decodes to the latents.
        pair = num_heads * 2 * (self.head_size + latent.value_size)
        # Only latents are cached: each chunk expands those of the chunks before it again.
        expansion_size = latent.rank * latent.expanded_size(self.num_heads, self.head_size)
        expansion = 2 * self.num_attention_layers * expansion_size
        return AttentionFlops(pair, earlier_token=expansion), AttentionFlops(absorbed)

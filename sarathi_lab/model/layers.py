"""Parts of a model's layers, and what is computed in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar, get_args

from sarathi_lab.config.checked import check_fields, flag, instance, one_of, whole
from sarathi_lab.config.errors import UserError

if TYPE_CHECKING:  # which takes a second to import
    import pandas as pd

FIX = "correct the model's settings"
count_field = partial(whole, maximum=2**31 - 1, fix=FIX)  # token ids and kernels' sizes: 32 bits
size_field = partial(count_field, minimum=1)
Rule = Literal["gated_delta", "kda", "mamba2"]
WindowKind = Literal["sliding", "chunked"]
# What is counted: a number of one iteration, or a column of a table of iterations.
AmountT = TypeVar("AmountT", float, "pd.Series")
AmountT_co = TypeVar("AmountT_co", float, "pd.Series", covariant=True)
# Products of [key_size] by [key_size, value_size] for a token in a head, by rule: both write to the
# state and read the output from it; the delta rule first reads what the state has for the key.
PRODUCTS = {"gated_delta": 3, "kda": 3, "mamba2": 2}
# Of a head: decay and strength, or step size.
GATES = {"gated_delta": 2, "kda": 1, "mamba2": 1}
INDEX_SCALE_BYTES = 4  # of a token's key in a cache of an `Index`, whose values have 8 bits


class Work(Protocol[AmountT_co]):
    """Sums that determine cost: of a `Batch`, or, as columns, of a table of iterations."""

    @property
    def num_prefills(self) -> AmountT_co: ...
    @property
    def num_prefill_tokens(self) -> AmountT_co: ...
    @property
    def num_decode_tokens(self) -> AmountT_co: ...
    @property
    def prefill_kv_tokens(self) -> AmountT_co: ...
    @property
    def decode_kv_tokens(self) -> AmountT_co: ...
    @property
    def prefill_query_key_pairs(self) -> AmountT_co: ...
    @property
    def num_emits(self) -> AmountT_co: ...

    # Of a layer with a `Window`; tables of other models lack them.
    @property
    def window_pairs(self) -> AmountT_co: ...
    @property
    def window_prefill_kv_tokens(self) -> AmountT_co: ...
    @property
    def window_decode_kv_tokens(self) -> AmountT_co: ...


class WindowSums(NamedTuple):
    """What attention in a window computes and reads, by the names of `Work`."""

    window_pairs: int  # causal query-key pairs of prompts
    window_prefill_kv_tokens: int
    window_decode_kv_tokens: int


class AttentionFlops(NamedTuple):
    """FLOPs of attention in all layers."""

    pair: float  # of a query-key pair of the whole context
    window_pair: float = 0  # of one within the window
    token: float = 0  # of a token that is computed
    earlier_token: float = 0  # of a token of a prompt's earlier chunks


class AttentionReads(NamedTuple):
    """Bytes that attention in all layers reads of the cache."""

    token: float  # of a token of the whole context
    window_token: float = 0  # of one within the window
    local_token: float = 0  # of one in the windows beside a compressed cache


def capped_sum(count: int, first: int, step: int, cap: int) -> int:
    """Sum the smaller of `first` + k `step` and `cap` over k from 0 to `count` - 1."""
    steps_to_cap = -((first - cap) // step)  # rounded up
    num_below = min(count, max(0, steps_to_cap))
    num_capped = count - num_below
    pairs_of_steps = num_below * (num_below - 1) // 2
    growing = num_below * first + step * pairs_of_steps
    return growing + num_capped * cap


@dataclass(frozen=True)
class HeadSizes:
    """Heads of one kind of attention layers. Raises UserError for impossible ones.

    Attributes:
        num_heads: Of queries.
        num_kv_heads: Of keys and values.
        key_size: Entries of a query or key.
        value_size: Entries of a value.
        has_value_product: Whether values are computed by a product of their own; else from the keys
            (Gemma 4).
    """

    num_heads: int = size_field()
    num_kv_heads: int = size_field()
    key_size: int = size_field()
    value_size: int = size_field()
    has_value_product: bool = flag(True)

    def __post_init__(self) -> None:
        check_fields(self, "layers.heads.")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"layers.heads: num_kv_heads={self.num_kv_heads} does not divide "
                f"num_heads={self.num_heads}; {FIX}"
            )

    @property
    def query_size(self) -> int:
        """Width of a token's queries."""
        return self.num_heads * self.key_size

    @property
    def projected_size(self) -> int:
        """Width of the product that makes a token's keys and values."""
        values = self.value_size if self.has_value_product else 0
        return self.num_kv_heads * (self.key_size + values)

    @property
    def cached_size(self) -> int:
        """Entries of a token in the cache of a layer."""
        return self.num_kv_heads * (self.key_size + self.value_size)

    @property
    def output_size(self) -> int:
        """Width of attention's output before its last product."""
        return self.num_heads * self.value_size

    @property
    def pair_flops(self) -> int:
        """FLOPs of all heads for a query-key pair: the products for scores and values."""
        return 2 * self.num_heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class Window:
    """`num_layers` of the attention layers in which a token sees at most `size` tokens, itself
    included: the newest ("sliding"), or those since the last multiple of `size` ("chunked", as in
    Llama 4). `heads` are theirs where the other layers have different ones. Raises UserError for
    impossible sizes.
    """

    num_layers: int = size_field()
    size: int = size_field()
    kind: WindowKind = one_of("sliding", valid=get_args(WindowKind))
    heads: HeadSizes | None = instance(None, kind=HeadSizes, fix=FIX)

    def __post_init__(self) -> None:
        check_fields(self, "layers.window.")

    def sums(self, chunks: Iterable[tuple[object, int, int, bool, bool]]) -> WindowSums:
        """Sum what attention in the window computes and reads for `chunks` (of anything, their
        start, tokens, whether they decode, and a further flag).
        """
        pairs = prefill_kv_tokens = decode_kv_tokens = 0
        before = self.size - 1  # the most tokens that one sees before itself
        for _, start, num_tokens, is_decode, _ in chunks:
            if not is_decode:
                pairs += self.pairs(start, num_tokens)
                prefill_kv_tokens += self.kv_tokens(start, num_tokens)
            elif start <= before:  # inlined, as most chunks of a run are decodes
                decode_kv_tokens += start + num_tokens
            elif self.kind == "sliding":
                decode_kv_tokens += before + num_tokens
            else:
                decode_kv_tokens += self.kv_tokens(start, num_tokens)
        return WindowSums(pairs, prefill_kv_tokens, decode_kv_tokens)

    def pieces(self, start: int, num_tokens: int) -> list[tuple[int, int]]:
        """Cut `num_tokens` tokens behind `start` others into chunks (start, tokens) that attend
        within themselves: where a chunked window begins. A sliding one cuts nothing.
        """
        if self.kind == "sliding":
            return [(start, num_tokens)]
        pieces = []
        end = start + num_tokens
        while start < end:
            behind = start % self.size
            piece = min(end - start, self.size - behind)
            pieces.append((behind, piece))
            start += piece
        return pieces

    def pairs(self, start: int, num_tokens: int) -> int:
        """Count the causal query-key pairs of `num_tokens` tokens behind `start` others."""
        num_pairs = 0
        for behind, number in self.pieces(start, num_tokens):
            # The first token sees `behind` others and itself, each next one more, up to the window.
            num_pairs += capped_sum(number, behind + 1, 1, self.size)
        return num_pairs

    def kv_tokens(self, start: int, num_tokens: int) -> int:
        """Count the cached tokens that `num_tokens` tokens behind `start` others read, themselves
        included.
        """
        num_read = 0
        for behind, number in self.pieces(start, num_tokens):
            num_read += min(behind, self.size - 1) + number
        return num_read


@dataclass(frozen=True)
class CachedWindow:
    """The room that layers with a `window` take in a cache, by vLLM's hybrid cache manager.

    It puts the layers of each kind into groups of equally many, and gives blocks of one pool to
    each group; those that have left the window come back. So a token within the window takes
    `share` times the room that it has in the layers without one: 0 where whole contexts stay in the
    cache, and only what attention sees is limited.

    With a `pool`, as in SGLang (`swa_full_tokens_ratio`), layers with a window have blocks of their
    own instead, so many for each block of the others.
    """

    window: Window
    share: float
    pool: float | None = None

    @property
    def share_of_blocks(self) -> float:
        """The share where all layers have blocks of one pool."""
        return self.share if self.pool is None else 0.0

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of `block_size` tokens that a window touches at most."""
        return -(-(self.window.size - 1) // block_size) + 1


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
    (`mla_attention.py`). Queries pass `query_rank`, or none (None: DeepSeek-V2-Lite). Raises
    UserError for impossible sizes.
    """

    rank: int = size_field()
    rope_size: int = size_field()
    query_rank: int | None = size_field(optional=True)
    value_size: int = size_field()

    def __post_init__(self) -> None:
        check_fields(self, "layers.latent.")

    @property
    def cached_size(self) -> int:
        """Values of a token in one layer's cache."""
        return self.rank + self.rope_size

    def linears(
        self,
        hidden: int,
        num_heads: int,
        head_size: int,
        count: int,
    ) -> list[Linear]:
        """List the products of `count` layers."""
        down_size = self.cached_size
        query_input = hidden
        if self.query_rank is not None:
            down_size += self.query_rank
            query_input = self.query_rank
        expanded = self.expanded_size(num_heads, head_size)
        return [
            Linear("latent_down", hidden, down_size, count),
            Linear("query_up", query_input, num_heads * head_size, count),
            Linear("latent_up", self.rank, expanded, count),
            Linear("out_proj", num_heads * self.value_size, hidden, count),
        ]

    def expanded_size(self, num_heads: int, head_size: int) -> int:
        """Values of a token's keys and values, but the rotated ones, in all heads of a layer."""
        return num_heads * (head_size - self.rope_size + self.value_size)

    @property
    def absorbed_flops(self) -> int:
        """FLOPs of one head and query-key pair of decodes: 2 (2 rank + d_rope)."""
        return 2 * (self.cached_size + self.rank)


@dataclass(frozen=True)
class Index:
    """An index that selects the `size` tokens which attention to latents sees (sparse attention of
    DeepSeek-V3.2, arXiv 2512.02556, section 2.1): `num_heads` of queries [key_size] score one key
    of each token, which has 8 bits in the cache. So many layers have one (None: all); others see
    what that of a layer before them selects. Raises UserError for impossible sizes.
    """

    num_heads: int = size_field()
    key_size: int = size_field()
    size: int = size_field()
    num_layers: int | None = size_field(None)

    def __post_init__(self) -> None:
        check_fields(self, "layers.index.")

    @property
    def cached_bytes(self) -> int:
        """Bytes of a token in one layer's cache."""
        return self.key_size + INDEX_SCALE_BYTES

    @property
    def pair_flops(self) -> int:
        """FLOPs of a query-key pair, of all pairs of a context."""
        return 2 * self.num_heads * self.key_size

    def linears(self, hidden: int, query_rank: int | None, count: int) -> list[Linear]:
        """List the products of `count` layers: of queries, of keys and of the heads' weights."""
        return [
            Linear("index_up", query_rank or hidden, self.num_heads * self.key_size, count),
            Linear("index_down", hidden, self.key_size + self.num_heads, count),
        ]


@dataclass(frozen=True)
class CompressedCache:
    """Attention of DeepSeek-V4: in each layer to the newest `window` tokens, and in most to entries
    that stand for several older ones. Keys and values are one vector of a head's size, which all
    heads share.

    Of `sparse_layers` an entry stands for `sparse_rate` tokens, and attention sees the entries that
    an index selects, of `index_size` at most; in `heavy_layers` it stands for `heavy_rate` tokens,
    and attention sees all. The index has `index_heads` of queries [index_key_size], and a key an
    entry, which has 8 bits here. Queries pass `query_rank`; heads of each of `output_groups` leave
    by `output_rank` entries. `streams` are the residuals that each attention and FFN mixes. Raises
    UserError for impossible sizes.
    """

    window: int = size_field()
    sparse_layers: int = count_field(minimum=0)
    heavy_layers: int = count_field(minimum=0)
    index_size: int = size_field()
    index_heads: int = size_field()
    index_key_size: int = size_field()
    query_rank: int = size_field()
    output_groups: int = size_field()
    output_rank: int = size_field()
    streams: int = size_field(1)
    sparse_rate: int = size_field(4)
    heavy_rate: int = size_field(128)

    def __post_init__(self) -> None:
        check_fields(self, "layers.compressed.")

    @property
    def index(self) -> Index:
        """The index of a layer, over entries instead of tokens."""
        return Index(self.index_heads, self.index_key_size, self.index_size)

    @property
    def seen_tokens(self) -> int:
        """Tokens that the entries stand for which an index selects at most."""
        return self.index_size * self.sparse_rate

    def token_bytes(self, entry_bytes: int) -> float:
        """Bytes that each token adds to the caches of all layers, by those of an entry."""
        entry_and_key = entry_bytes + self.index.cached_bytes
        sparse = self.sparse_layers * entry_and_key / self.sparse_rate
        heavy = self.heavy_layers * entry_bytes / self.heavy_rate
        return sparse + heavy

    def sequence_bytes(self, num_layers: int, entry_bytes: int) -> int:
        """Bytes of a sequence in all layers whatever its length: the windows, and tokens that no
        entry stands for yet, with their gates; in sparse layers two series of two entries' tokens.
        """
        windows = num_layers * self.window
        heavy = 2 * self.heavy_rate
        sparse = 4 * 2 * self.sparse_rate
        waiting = self.heavy_layers * heavy + self.sparse_layers * sparse
        return (windows + waiting) * entry_bytes

    def linears(self, hidden: int, heads: HeadSizes, count: int) -> list[Linear]:
        """List the products of `count` layers: of attention, of entries and gates, of the index and
        its entries, and of the streams' coefficients.
        """
        index_width = self.index_heads + 4 * self.index_key_size
        grouped = heads.query_size // self.output_groups
        products = [
            Linear("latent_down", hidden, self.query_rank + heads.key_size, count),
            Linear("query_up", self.query_rank, heads.query_size, count),
            Linear("out_groups", grouped, self.output_groups * self.output_rank, count),
            Linear("out_proj", self.output_groups * self.output_rank, hidden, count),
        ]
        if self.sparse_layers:
            index_queries = self.index_heads * self.index_key_size
            products += [
                Linear("sparse_down", hidden, 4 * heads.key_size, self.sparse_layers),
                Linear("index_up", self.query_rank, index_queries, self.sparse_layers),
                Linear("index_down", hidden, index_width, self.sparse_layers),
            ]
        if self.heavy_layers:
            products.append(Linear("heavy_down", hidden, 2 * heads.key_size, self.heavy_layers))
        if self.streams > 1:
            width = self.streams * (2 + self.streams)
            products.append(Linear("mixing", self.streams * hidden, width, 2 * count))
        return products

    def flops(self, heads: HeadSizes, num_layers: int) -> AttentionFlops:
        """Return the FLOPs of attention in all layers: to a whole window of each query, to entries
        that an index scores and selects, and to all entries of others.
        """
        scored = self.sparse_layers * self.index.pair_flops / self.sparse_rate
        heavy = self.heavy_layers * heads.pair_flops / self.heavy_rate
        return AttentionFlops(
            pair=scored + heavy,
            window_pair=self.sparse_layers * heads.pair_flops / self.sparse_rate,
            token=num_layers * heads.pair_flops * self.window,
        )

    def reads(self, num_layers: int, entry_bytes: int) -> AttentionReads:
        """Return the bytes that attention in all layers reads: windows, keys of the index, and
        entries: those that it selects, and all of others.
        """
        keys = self.sparse_layers * self.index.cached_bytes / self.sparse_rate
        heavy = self.heavy_layers * entry_bytes / self.heavy_rate
        return AttentionReads(
            token=keys + heavy,
            window_token=self.sparse_layers * entry_bytes / self.sparse_rate,
            local_token=num_layers * entry_bytes,
        )


@dataclass(frozen=True)
class LinearAttention:
    """`num_layers` layers of linear attention, whose cache is a state of constant size: in each of
    `num_heads` [key_size, value_size], and the last `conv_size` - 1 inputs of a convolution over
    queries, keys (of `num_key_heads`) and values.

    `rule` is the gated delta rule (arXiv 2412.06464; Qwen3-Next), that with a decay for each entry
    of a key (arXiv 2510.26692; Kimi Linear), Mamba-2's (arXiv 2405.21060; `num_key_heads` are its
    groups, `key_size` its state size). Gates pass `gate_rank` entries, or none. Kernels take
    `chunk` tokens of a prompt at once. `state_bytes` is of an element of the states; None: as the
    rest of the cache. Raises UserError for impossible sizes.
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
    gate_rank: int | None = size_field(None)

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
        element_bytes = self.state_bytes or dtype_bytes
        num_inputs = (self.conv_size - 1) * self.num_channels
        return self.state_size * element_bytes + num_inputs * dtype_bytes

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
        if self.rule == "mamba2":
            within = self.num_key_heads * self.key_size + self.inner_size
        else:
            within_head = 3 * self.key_size + 2 * self.value_size
            within = self.num_heads * within_head
        with_state = PRODUCTS[self.rule] * self.state_size
        return 2 * (self.chunk * within + with_state)

    def linears(self, hidden: int) -> list[Linear]:
        """List the products of all layers."""
        gates = self.inner_size  # of the output, as wide as the values
        if self.rule == "kda":
            gates += self.num_heads * self.key_size  # decays of the keys' entries
        gate_width = gates
        products = list[Linear]()
        if self.gate_rank is not None:
            # Decays and the output gate are made from a vector of the rank each.
            gate_width = 2 * self.gate_rank
            products.append(Linear("state_gates", self.gate_rank, gates, self.num_layers))
        gates_of_heads = GATES[self.rule] * self.num_heads
        width = self.num_channels + gates_of_heads + gate_width
        return [
            Linear("state_in", hidden, width, self.num_layers),
            Linear("state_out", self.inner_size, hidden, self.num_layers),
            *products,
        ]


@dataclass(frozen=True)
class Layers:
    """What the layers of a model have, if they are not alike: so many have `attention`, so many an
    `ffn` (None: all), others `linear` attention. Raises UserError for impossible ones.

    Of the layers with experts `dense` have one FFN of `dense_ffn_size` instead. An `output_gate` is
    as wide as the queries. With `latent` attention, `ModelSpec.num_kv_heads` is `num_heads`, and an
    `index` may select what it sees. Some of the attention layers have a `window`. Values of
    attention have `value_size` entries (None: as the keys), and maybe no `value_product`. Layers
    that are `parallel` have both kinds of attention side by side (Falcon-H1). A `compressed` cache
    stands for keys and values of all attention layers.
    """

    attention: int | None = size_field(None)
    ffn: int | None = size_field(None)
    dense: int = count_field(0, minimum=0)
    dense_ffn_size: int = count_field(0, minimum=0)
    shared_gate: bool = flag(True)  # of a shared expert
    output_gate: bool = flag(False)
    latent: Latent | None = instance(None, kind=Latent, fix=FIX)
    linear: LinearAttention | None = instance(None, kind=LinearAttention, fix=FIX)
    window: Window | None = instance(None, kind=Window, fix=FIX)
    parallel: bool = flag(False)
    index: Index | None = instance(None, kind=Index, fix=FIX)
    value_size: int | None = size_field(None)
    value_product: bool = flag(True)
    compressed: CompressedCache | None = instance(None, kind=CompressedCache, fix=FIX)

    def __post_init__(self) -> None:
        check_fields(self, "layers.")

    @property
    def description(self) -> str:
        is_there = {
            "latent": self.latent is not None,
            "linear": self.linear is not None,
            "windowed": self.window is not None,
            "compressed": self.compressed is not None,
        }
        names = [name for name, has_layers in is_there.items() if has_layers]
        if not names:
            return "layers that are not alike"
        return f"{' and '.join(names)} attention"


ALIKE = Layers()

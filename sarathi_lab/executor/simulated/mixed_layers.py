"""Latent, windowed and linear attention, of models whose layers are not alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations, prefills
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import (
    AttentionTimes,
    CallTimes,
    Chunks,
    Heads,
    overlapped,
)
from sarathi_lab.model.degrees import kv_heads_of_device
from sarathi_lab.model.layers import CompressedCache, Index, Latent, LinearAttention, Window

DECODE_HEADS = 64  # heads of a decode's query tile, which read the latents once
SELECTING_KERNELS = 4  # scores, their largest ones, attention and its merging
KERNELS = 5  # of a prompt's chunks, where no table has them: sums, states, their order, outputs


@dataclass(eq=False)
class LatentTimes:
    """Seconds of one layer's `latent` attention on one device of `formula`, by the hardware's
    figures for it (`Hardware.latent`).

    Prompts attend to keys and values of each head, of which those of earlier chunks are expanded
    from the cache again, and merged with the chunk's attention without a time for it. Decodes read
    the latents, and compute 2 rank + d_rope products a head and pair meanwhile; their queries and
    outputs are as wide as the latents in each head.
    """

    formula: AnalyticOperations
    latent: Latent

    def __post_init__(self) -> None:
        formula = self.formula
        spec = formula.spec
        latent = self.latent
        heads = formula.heads.num_heads
        hardware = replace(formula.hardware, **formula.hardware.latent)
        head_size = (spec.head_size + latent.value_size) // 2  # the mean of keys and values
        self._prompts = AttentionTimes(
            hardware,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=head_size,
            kv_head_bytes=head_size * formula.dtype_bytes,
        )
        # Heads of one tile read the latents once, as if they shared a KV head.
        tiles = math.ceil(heads / DECODE_HEADS)
        latent_bytes = spec.kv_layer_bytes(formula.dtype_bytes)
        self._decodes = AttentionTimes(
            hardware,
            num_heads=heads,
            num_kv_heads=tiles,
            head_size=head_size,
            kv_head_bytes=latent_bytes / 2 / tiles,  # half, as they count for keys and for values
        )
        self._expanded_size = latent.expanded_size(heads, spec.head_size)
        rate = hardware.flops_per_second * hardware.attention_efficiency
        self._pair_time = heads * latent.absorbed_flops / rate
        # Queries and outputs of latent size, written by one kernel and read by another.
        query_size = heads * (latent.cached_size + latent.rank)
        query_bytes = query_size * formula.dtype_bytes
        self._query_time = 2 * query_bytes / hardware.memory_rate
        # Mean relative error of held-out calls, NaN without a fit.
        self.error: float = math.nan
        fit = "without a fit to"
        if formula.hardware.latent:
            self.error = formula.hardware.latent["uncertainty"]["attention"]
            fit = "by figures fitted to"
        self.caution = f"latent attention {fit} measured calls, none of which had a context"

    def prefill(self, chunks: Chunks) -> float:
        """Compute the seconds of `chunks` (start, num_tokens)."""
        seconds = self._prompts.prefill(chunks)
        context = sum(start for start, _ in chunks)
        if context:
            rank = self.latent.rank
            seconds += self.formula.layer_product_time(context, rank, self._expanded_size)
        return seconds

    def times(self, batch: Batch) -> CallTimes:
        """Compute the seconds of prefills and of decodes."""
        prefill = self.prefill(prefills(batch))
        decode = self.decode(batch.num_decodes, batch.decode_kv_tokens)
        return prefill, decode

    def decode(self, num_sequences: int, kv_tokens: int) -> float:
        """Compute the seconds of `num_sequences` decodes that see `kv_tokens` in total."""
        reading = self._decodes.decode(num_sequences, kv_tokens)
        moving = num_sequences * self._query_time
        return moving + overlapped(kv_tokens * self._pair_time, reading)


class Roofline(NamedTuple):
    """Seconds of computing with one pair of tokens, and of reading one token meanwhile."""

    pair_time: float
    read_time: float

    def seconds(self, num_pairs: int, num_read: int) -> float:
        return overlapped(num_pairs * self.pair_time, num_read * self.read_time)


NO_WORK = Roofline(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class SparseTimes:
    """Seconds of the mean layer's attention to a part of a context: rooflines, as nothing was
    measured.

    An index scores all pairs; each query attends to what it selects, and to a whole window of the
    newest tokens. A decode reads its window, and all that its index scores.

    Attributes:
        launches: Seconds of launching the kernels.
        window: Tokens of a window that each query attends to; 0: none.
        local: Work on these tokens.
        context: Work on all tokens of a context: by the index, and where layers attend to all.
        selection: As many tokens as the index selects, taken as a window.
        selected: Work on these.
        caution: Source of the times.
    """

    launches: float
    window: int = 0
    local: Roofline = NO_WORK
    context: Roofline
    selection: Window
    selected: Roofline
    caution: str
    error: ClassVar[float] = math.nan

    def times(self, batch: Batch) -> CallTimes:
        """Compute the seconds of prefills and of decodes."""
        selected = self.selection.sums(batch.chunks)
        prefill = 0.0
        if batch.num_prefills:
            num_tokens = batch.num_prefill_tokens
            in_windows = batch.num_prefills * self.window + num_tokens
            local = self.local.seconds(num_tokens * self.window, in_windows)
            pairs = batch.prefill_query_key_pairs
            context = self.context.seconds(pairs, batch.prefill_kv_tokens)
            pairs = selected.window_pairs
            seeing = self.selected.seconds(pairs, pairs)
            prefill = self.launches + local + context + seeing
        decode = 0.0
        if batch.num_decodes:
            in_windows = batch.num_decodes * self.window
            local = self.local.seconds(in_windows, in_windows)
            pairs = batch.decode_kv_tokens
            context = self.context.seconds(pairs, pairs)
            pairs = selected.window_decode_kv_tokens
            seeing = self.selected.seconds(pairs, pairs)
            decode = self.launches + local + context + seeing
        return prefill, decode


def selected_times(formula: AnalyticOperations, latent: Latent, index: Index) -> SparseTimes:
    """Make the seconds of `latent` attention to the tokens that an `index` selects, on one device
    of `formula`.

    The index, whose heads are on every device, scores in the layers that have one. Then each token
    gathers the latents of the selected ones, and attends to them in the absorbed form.
    """
    spec = formula.spec
    hardware = formula.hardware
    rate = hardware.flops_per_second * hardware.attention_efficiency
    value_bytes = formula.dtype_bytes
    if spec.kv_dtype != "auto":
        value_bytes = 1
    index_share = spec.num_index_layers / spec.num_attention_layers
    pair_flops = formula.heads.num_heads * latent.absorbed_flops
    scoring_time = index_share * index.pair_flops / rate
    key_time = index_share * index.cached_bytes / hardware.kv_rate
    latent_time = latent.cached_size * value_bytes / hardware.kv_rate
    return SparseTimes(
        launches=SELECTING_KERNELS * hardware.kernel_launch,
        context=Roofline(scoring_time, key_time),
        selection=Window(spec.num_attention_layers, index.size),
        selected=Roofline(pair_flops / rate, latent_time),
        caution="attention to what an index selects: a roofline, no fit",
    )


def compressed_times(formula: AnalyticOperations, compressed: CompressedCache) -> SparseTimes:
    """Make the seconds of attention to a `compressed` cache, on one device of `formula`.

    In sparse layers an index, whose heads are on every device, scores all entries, and each query
    gathers those that it selects; in heavy layers it attends to all.
    """
    spec = formula.spec
    hardware = formula.hardware
    num_layers = spec.num_attention_layers
    sparse = compressed.sparse_layers / num_layers / compressed.sparse_rate
    heavy = compressed.heavy_layers / num_layers / compressed.heavy_rate
    rate = hardware.flops_per_second * hardware.attention_efficiency
    pair_time = spec.heads.pair_flops / formula.parallel.tensor / rate
    entry_time = spec.kv_head_bytes(formula.dtype_bytes) / hardware.kv_rate
    scoring_time = sparse * compressed.index.pair_flops / rate
    key_time = sparse * compressed.index.cached_bytes / hardware.kv_rate
    return SparseTimes(
        launches=SELECTING_KERNELS * hardware.kernel_launch,
        window=compressed.window,
        local=Roofline(pair_time, entry_time),
        context=Roofline(scoring_time + heavy * pair_time, key_time + heavy * entry_time),
        selection=Window(num_layers, compressed.seen_tokens),
        selected=Roofline(sparse * pair_time, sparse * entry_time),
        caution="attention to a compressed cache: a roofline, no fit",
    )


class WindowTimes:
    """Seconds of one layer's attention in a `window` on one device of `formula`, by the figures of
    its attention to the whole context: kernels pass over the tiles that the window leaves out.
    """

    def __init__(self, formula: AnalyticOperations, window: Window) -> None:
        heads = formula.heads
        kv_head_bytes: float = formula.attention.kv_head_bytes
        own = window.heads
        if own is not None:
            tensor = formula.parallel.tensor
            num_kv_heads = kv_heads_of_device(own.num_kv_heads, tensor)
            mean_size = (own.key_size + own.value_size) // 2  # of keys and values
            heads = Heads(own.num_heads // tensor, num_kv_heads, mean_size)
            kv_head_bytes *= mean_size / formula.heads.head_size
        # Chunked windows cut prompts into pieces (`times`); sliding ones bound the keys of tiles.
        bound = window.size if window.kind == "sliding" else None
        self._window = window
        self._times = AttentionTimes(formula.hardware, *heads, kv_head_bytes, bound)

    def times(self, batch: Batch) -> CallTimes:
        """Compute the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        window = self._window
        chunks: list[tuple[int, int]] = []
        for start, num_tokens in prefills(batch):
            chunks += window.pieces(start, num_tokens)
        decode_kv_tokens = window.sums(batch.chunks).window_decode_kv_tokens
        in_one_call = self._times.hardware.hybrid_call
        return self._times.times(chunks, batch.num_decodes, decode_kv_tokens, in_one_call)


@dataclass(eq=False)
class LinearTimes:
    """Seconds of one layer's linear attention and its convolution, split by heads over `tensor`
    devices.

    The gated delta rule by the hardware's figures (`Hardware.linear`): a head of a sequence takes
    one `chunk` of a prompt after another, `step` seconds each, on an SM, while tokens and states
    move. Mamba-2's, and any without such figures, by a roofline of its chunks. Decodes read and
    write their states.
    """

    linear: LinearAttention
    hardware: Hardware
    dtype_bytes: int
    tensor: int = 1

    def __post_init__(self) -> None:
        self.is_fitted = self.linear.rule == "gated_delta" and "step" in self.hardware.linear
        # Mean relative error of held-out calls, NaN without a fit.
        self.error = self.hardware.linear["uncertainty"] if self.is_fitted else math.nan

    def prefill(self, chunks: Chunks) -> float:
        """Compute the seconds of `chunks` (start, num_tokens)."""
        linear = self.linear
        lengths = [num_tokens for _, num_tokens in chunks]
        num_tokens = sum(lengths)
        # Pieces of each prompt's chunk, as the kernel cuts it.
        num_pieces = [math.ceil(length / linear.chunk) for length in lengths]
        channels = linear.num_channels + linear.inner_size
        moving = self._moving_time(num_tokens * channels * self.dtype_bytes)
        memory = moving + self._states_time(len(lengths))
        computing = overlapped(self._compute(num_pieces), memory)
        return self._launch + self._convolution_time(num_tokens) + computing

    @property
    def _launch(self) -> float:
        """Seconds of launching a prompt's kernels."""
        if self.is_fitted:
            return self.hardware.linear["launch"]
        return KERNELS * self.hardware.kernel_launch

    def _compute(self, num_pieces: Sequence[int]) -> float:
        """Compute the seconds of the pieces of prompts: without a fit at the rate of products.

        With one an SM takes one piece of a head after another. The pieces of one sequence wait for
        each other, so the longest sequence bounds the time from below, as do all pieces shared
        equally among the SMs.
        """
        hardware = self.hardware
        if self.is_fitted:
            num_heads = self.linear.num_heads / self.tensor  # of a device
            pieces_on_sm = sum(num_pieces) * num_heads / hardware.num_sms
            return hardware.linear["step"] * max(*num_pieces, pieces_on_sm)
        num_tokens = sum(num_pieces) * self.linear.chunk  # in whole pieces
        flops = num_tokens * self.linear.chunk_flops / self.tensor
        rate = hardware.flops_per_second * hardware.matmul_efficiency
        return flops / rate

    def _convolution_time(self, num_tokens: int) -> float:
        """Compute the seconds in which the convolution reads and writes its channels."""
        hardware = self.hardware
        efficiency = hardware.linear.get("conv_efficiency", hardware.memory_efficiency)
        token_bytes = self.linear.num_channels * self.dtype_bytes
        num_bytes = 2 * num_tokens * token_bytes / self.tensor
        return num_bytes / (hardware.bytes_per_second * efficiency)

    def decode(self, num_sequences: int) -> float:
        """Compute the seconds of one token of each of `num_sequences`."""
        without_fit = 2 * self.hardware.kernel_launch
        launch = self.hardware.linear.get("decode_launch", without_fit)
        return launch + self._states_time(num_sequences)

    def _states_time(self, num_sequences: int) -> float:
        state_bytes = self.linear.sequence_bytes(self.dtype_bytes)
        return self._moving_time(2 * num_sequences * state_bytes)

    def _moving_time(self, num_bytes: float) -> float:
        """Compute the seconds of moving `num_bytes`, split over the devices."""
        return num_bytes / self.tensor / self.hardware.memory_rate


class MixedOperations(AnalyticOperations):
    """Operations of layers that are not alike, of which a layer is the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.spec.layers
        self._latent: LatentTimes | SparseTimes | None = None
        self._linear: LinearTimes | None = None
        self._window: WindowTimes | None = None
        if layers.compressed:
            self._latent = compressed_times(self, layers.compressed)
        elif layers.latent and layers.index:
            self._latent = selected_times(self, layers.latent, layers.index)
        elif layers.latent:
            self._latent = LatentTimes(self, layers.latent)
        if self._latent:
            self.uncertainty["attention"] = self._latent.error
        if layers.linear:
            tensor = self.parallel.tensor
            self._linear = LinearTimes(layers.linear, self.hardware, self.dtype_bytes, tensor)
            self.uncertainty["linear attention"] = self._linear.error
        if layers.window:
            self._window = WindowTimes(self, layers.window)

    @property
    def caution(self) -> str:
        """Source of the times."""
        sources = ["a layer's time is the mean of layers that are not alike"]
        if self._latent:
            sources.append(self._latent.caution)
        if self._window:
            sources.append("attention in a window by the figures of that to whole contexts, no fit")
        if self._linear:
            fit = "fitted to measured calls" if self._linear.is_fitted else "a roofline, no fit"
            sources.append(f"linear attention of {self._linear.linear.rule}: {fit}")
        return "; ".join(sources)

    def attention_times(self, batch: Batch) -> CallTimes:
        """Compute the mean layer's seconds of prompts and of decodes, in separate calls; linear
        attention counts among them.
        """
        spec = self.spec
        if self._latent is None:
            prefill, decode = super().attention_times(batch)
        else:
            prefill, decode = self._latent.times(batch)
        full_share = spec.num_full_layers / spec.num_layers
        prefill *= full_share
        decode *= full_share
        if self._window:
            num_windowed = spec.num_attention_layers - spec.num_full_layers
            window_share = num_windowed / spec.num_layers
            window_prefill, window_decode = self._window.times(batch)
            prefill += window_share * window_prefill
            decode += window_share * window_decode
        if self._linear:
            linear_share = self._linear.linear.num_layers / spec.num_layers
            if batch.num_prefills:
                prefill += linear_share * self._linear.prefill(prefills(batch))
            if batch.num_decodes:
                decode += linear_share * self._linear.decode(batch.num_decodes)
        return prefill, decode

"""Latent, windowed and linear attention, of models whose layers are not alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations, prefills
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import AttentionTimes, Heads, overlapped
from sarathi_lab.model.degrees import kv_heads_of_device
from sarathi_lab.model.layers import (
    CompressedCache,
    HeadSizes,
    Index,
    Latent,
    LinearAttention,
    Window,
)

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

    def prefill(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Compute the seconds of `chunks` (start, num_tokens)."""
        chunks = list(chunks)
        seconds = self._prompts.prefill(chunks)
        context = sum(start for start, _ in chunks)
        if context:
            rank = self.latent.rank
            seconds += self.formula.layer_product_time(context, rank, self._expanded_size)
        return seconds

    @property
    def error(self) -> float:
        """Mean relative error of held-out calls, NaN without a fit."""
        errors = self.formula.hardware.latent.get("uncertainty", {})
        return float(errors.get("attention", math.nan))

    @property
    def caution(self) -> str:
        """Source of the times."""
        fit = "by figures fitted to" if self.formula.hardware.latent else "without a fit to"
        return f"latent attention {fit} measured calls, none of which had a context"

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes."""
        prefill = 0.0
        if batch.num_prefills:
            prefill = self.prefill(prefills(batch))
        decode = self.decode(batch.num_decodes, batch.decode_kv_tokens)
        return prefill, decode

    def decode(self, num_sequences: int, kv_tokens: int) -> float:
        """Compute the seconds of `num_sequences` decodes that see `kv_tokens` in total."""
        reading = self._decodes.decode(num_sequences, kv_tokens)
        moving = num_sequences * self._query_time
        return moving + overlapped(kv_tokens * self._pair_time, reading)


class SelectedTimes:
    """Seconds of one layer's `latent` attention to the tokens that an `index` selects, on one
    device of `formula`: a roofline, as nothing was measured.

    The index, whose heads are on every device, scores all pairs, and decodes read its keys of all
    tokens, in the layers that have one. Then each token of prompts and decodes gathers the latents
    of the selected ones, and attends to them in the absorbed form.
    """

    error = math.nan
    caution = "attention to what an index selects: a roofline, no fit"

    def __init__(self, formula: AnalyticOperations, latent: Latent, index: Index) -> None:
        spec = formula.spec
        hardware = formula.hardware
        rate = hardware.flops_per_second * hardware.attention_efficiency
        value_bytes = formula.dtype_bytes
        if spec.kv_dtype != "auto":
            value_bytes = 1
        self._launches = SELECTING_KERNELS * hardware.kernel_launch
        # What an index selects is as many tokens as a window of its size has.
        self._selected = Window(spec.num_attention_layers, index.size)
        # Of scoring a pair, and of reading a token's key, in the layers that have an index.
        share = spec.num_index_layers / spec.num_attention_layers
        self._score_time = share * index.pair_flops / rate
        self._key_time = share * index.cached_bytes / hardware.kv_rate
        # Of attending to a selected token, and of gathering its latents.
        pair_flops = formula.heads.num_heads * latent.absorbed_flops
        self._pair_time = pair_flops / rate
        self._latent_time = latent.cached_size * value_bytes / hardware.kv_rate

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes."""
        selected = self._selected.sums(batch.chunks)
        prefill = 0.0
        if batch.num_prefills:
            prefill = self._seconds(
                pairs=batch.prefill_query_key_pairs,
                kv_tokens=batch.prefill_kv_tokens,
                selected_pairs=selected.window_pairs,
            )
        decode = 0.0
        if batch.num_decodes:
            decode = self._seconds(
                pairs=batch.decode_kv_tokens,
                kv_tokens=batch.decode_kv_tokens,
                selected_pairs=selected.window_decode_kv_tokens,
            )
        return prefill, decode

    def _seconds(self, *, pairs: int, kv_tokens: int, selected_pairs: int) -> float:
        reading = kv_tokens * self._key_time
        scoring = overlapped(pairs * self._score_time, reading)
        gathering = selected_pairs * self._latent_time
        attending = overlapped(selected_pairs * self._pair_time, gathering)
        return self._launches + scoring + attending


class CompressedTimes:
    """Seconds of the mean layer's attention to a `compressed` cache, on one device of `formula`: a
    roofline, as nothing was measured.

    Each query attends to a whole window; in sparse layers an index, whose heads are on every
    device, scores all entries, and each query gathers those that it selects; in heavy layers it
    attends to all. A decode reads its window, and its sequence's entries.
    """

    error = math.nan
    caution = "attention to a compressed cache: a roofline, no fit"

    def __init__(self, formula: AnalyticOperations, compressed: CompressedCache) -> None:
        spec = formula.spec
        hardware = formula.hardware
        num_layers = spec.num_attention_layers
        sparse = compressed.sparse_layers / num_layers / compressed.sparse_rate
        heavy = compressed.heavy_layers / num_layers / compressed.heavy_rate
        rate = hardware.flops_per_second * hardware.attention_efficiency
        pair_time = spec.heads.pair_flops / formula.parallel.tensor / rate
        entry_time = spec.kv_head_bytes(formula.dtype_bytes) / hardware.kv_rate
        self._launches = SELECTING_KERNELS * hardware.kernel_launch
        self._seen = Window(num_layers, compressed.seen_tokens)
        self._window = compressed.window
        # Of a token of a window: computed with, and read.
        self._local_times = (pair_time, entry_time)
        # Of a token of the whole context: scored or attended to, and read.
        self._context_times = (
            sparse * compressed.index.pair_flops / rate + heavy * pair_time,
            sparse * compressed.index.cached_bytes / hardware.kv_rate + heavy * entry_time,
        )
        # Of a token within those that the index selects.
        self._selected_times = (sparse * pair_time, sparse * entry_time)

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes."""
        selected = self._seen.sums(batch.chunks)
        prefill = 0.0
        if batch.num_prefills:
            num_tokens = batch.num_prefill_tokens
            prefill = self._launches + sum(
                (
                    self._local(num_tokens, batch.num_prefills * self._window + num_tokens),
                    _seconds(
                        self._context_times, batch.prefill_query_key_pairs, batch.prefill_kv_tokens
                    ),
                    _seconds(self._selected_times, selected.window_pairs, selected.window_pairs),
                )
            )
        decode = 0.0
        if batch.num_decodes:
            num_seen = selected.window_decode_kv_tokens
            decode = self._launches + sum(
                (
                    self._local(batch.num_decodes, batch.num_decodes * self._window),
                    _seconds(self._context_times, batch.decode_kv_tokens, batch.decode_kv_tokens),
                    _seconds(self._selected_times, num_seen, num_seen),
                )
            )
        return prefill, decode

    def _local(self, num_queries: int, num_read: int) -> float:
        return _seconds(self._local_times, num_queries * self._window, num_read)


def _seconds(times: tuple[float, float], num_pairs: int, num_read: int) -> float:
    """Compute the seconds of pairs and of tokens read meanwhile, by the `times` of one of each."""
    pair_time, read_time = times
    return overlapped(num_pairs * pair_time, num_read * read_time)


class WindowTimes:
    """Seconds of one layer's attention in a `window` on one device of `formula`, by the figures of
    its attention to the whole context: kernels pass over the tiles that the window leaves out.
    """

    def __init__(self, formula: AnalyticOperations, window: Window) -> None:
        heads = formula.heads
        kv_head_bytes: float = formula.attention.kv_head_bytes
        if window.heads is not None:
            heads = _heads_of_device(window.heads, formula.parallel.tensor)
            kv_head_bytes *= heads.head_size / formula.heads.head_size
        # Chunked windows cut prompts into pieces (`times`); sliding ones bound the keys of tiles.
        bound = None
        if window.kind == "sliding":
            bound = window.size
        self._window = window
        self._hardware = formula.hardware
        self._times = AttentionTimes(formula.hardware, *heads, kv_head_bytes, bound)

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        window = self._window
        chunks: list[tuple[int, int]] = []
        if batch.num_prefills:
            for start, num_tokens in prefills(batch):
                chunks += window.pieces(start, num_tokens)
        decode_kv_tokens = window.sums(batch.chunks).window_decode_kv_tokens
        prefill = self._times.prefill(chunks)
        decode = self._times.decode(batch.num_decodes, decode_kv_tokens)
        if self._hardware.hybrid_call and prefill and decode:
            both = self._times.hybrid(chunks, batch.num_decodes, decode_kv_tokens)
            return prefill, max(0.0, both - prefill)
        return prefill, decode


def _heads_of_device(heads: HeadSizes, tensor: int) -> Heads:
    """Return a window's own heads on one of `tensor` devices, of the mean size of keys and
    values.
    """
    num_kv_heads = kv_heads_of_device(heads.num_kv_heads, tensor)
    head_size = (heads.key_size + heads.value_size) // 2
    return Heads(heads.num_heads // tensor, num_kv_heads, head_size)


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
    is_fitted: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_fitted = self.linear.rule == "gated_delta" and "step" in self.hardware.linear

    @property
    def error(self) -> float:
        """Mean relative error of held-out calls, NaN without a fit."""
        return self.hardware.linear["uncertainty"] if self.is_fitted else math.nan

    def prefill(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Compute the seconds of `chunks` (start, num_tokens)."""
        lengths = [num_tokens for _, num_tokens in chunks]
        num_tokens = sum(lengths)
        if self.is_fitted:
            compute = self._fitted_compute(lengths)
        else:
            compute = self._roofline_compute(lengths)
        channels = self.linear.num_channels + self.linear.inner_size
        moving = self._moving_time(num_tokens * channels * self.dtype_bytes)
        memory = moving + self._states_time(len(lengths))
        convolution = self._convolution_time(num_tokens)
        return self._launch + convolution + overlapped(compute, memory)

    @property
    def _launch(self) -> float:
        """Seconds of launching a prompt's kernels."""
        if self.is_fitted:
            return self.hardware.linear["launch"]
        return KERNELS * self.hardware.kernel_launch

    def _num_pieces(self, lengths: Iterable[int]) -> list[int]:
        """Count the pieces, chunks of the kernel (`LinearAttention.chunk`), of each prompt's chunk
        of `lengths` tokens.
        """
        return [math.ceil(length / self.linear.chunk) for length in lengths]

    def _fitted_compute(self, lengths: Iterable[int]) -> float:
        """Compute the seconds of a kernel in which an SM takes one piece of a head after another.

        The pieces of one sequence wait for each other, so the longest sequence bounds the time from
        below, as do all pieces shared equally among the SMs.
        """
        pieces_of_sequences = self._num_pieces(lengths)
        num_heads = self.linear.num_heads / self.tensor  # of a device
        pieces_on_sm = sum(pieces_of_sequences) * num_heads / self.hardware.num_sms
        num_steps = max(*pieces_of_sequences, pieces_on_sm)
        return self.hardware.linear["step"] * num_steps

    def _roofline_compute(self, lengths: Iterable[int]) -> float:
        """Compute the seconds of all pieces at the rate of products."""
        rate = self.hardware.flops_per_second * self.hardware.matmul_efficiency
        num_tokens = sum(self._num_pieces(lengths)) * self.linear.chunk  # in whole pieces
        flops = num_tokens * self.linear.chunk_flops / self.tensor
        return flops / rate

    def _convolution_time(self, num_tokens: int) -> float:
        """Compute the seconds in which the convolution reads and writes its channels."""
        hardware = self.hardware
        efficiency = hardware.linear.get("conv_efficiency", hardware.memory_efficiency)
        rate = hardware.bytes_per_second * efficiency
        token_bytes = self.linear.num_channels * self.dtype_bytes
        num_bytes = 2 * num_tokens * token_bytes / self.tensor
        return num_bytes / rate

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
        self._latent: LatentTimes | SelectedTimes | CompressedTimes | None = None
        self._linear: LinearTimes | None = None
        self._window: WindowTimes | None = None
        if layers.compressed:
            self._latent = CompressedTimes(self, layers.compressed)
        elif layers.latent and layers.index:
            self._latent = SelectedTimes(self, layers.latent, layers.index)
        elif layers.latent:
            self._latent = LatentTimes(self, layers.latent)
        if layers.linear:
            tensor = self.parallel.tensor
            self._linear = LinearTimes(layers.linear, self.hardware, self.dtype_bytes, tensor)
        if layers.window:
            self._window = WindowTimes(self, layers.window)
        if self._latent:
            self.uncertainty["attention"] = self._latent.error
        if self._linear:
            self.uncertainty["linear attention"] = self._linear.error

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

    def attention_times(self, batch: Batch) -> tuple[float, float]:
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

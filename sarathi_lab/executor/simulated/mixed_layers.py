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
from sarathi_lab.model.layers import Index, Latent, LinearAttention, Window

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
        formula, latent, spec = self.formula, self.latent, self.formula.spec
        figures = replace(formula.hardware, **formula.hardware.latent)
        heads, dtype_bytes = formula.heads.num_heads, formula.dtype_bytes
        mean = (spec.head_size + latent.value_size) // 2  # of keys and values
        self._prompts = AttentionTimes(figures, heads, heads, mean, mean * dtype_bytes)
        tiles = math.ceil(heads / DECODE_HEADS)
        cached = spec.kv_layer_bytes(dtype_bytes)
        self._decodes = AttentionTimes(figures, heads, tiles, mean, cached / 2 / tiles)
        self._width = latent.expanded_size(heads, spec.head_size)
        rate = figures.flops_per_second * figures.attention_efficiency
        self._pair_time = heads * latent.absorbed_flops / rate
        # Queries and outputs of latent size, written by one kernel and read by another.
        moved = 2 * heads * (latent.cached_size + latent.rank) * dtype_bytes
        self._query_time = moved / figures.memory_rate

    def prefill(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Compute the seconds of `chunks` (start, num_tokens)."""
        chunks = list(chunks)
        context = sum(start for start, _ in chunks)
        expansion = self.formula.layer_product_time(context, self.latent.rank, self._width)
        return self._prompts.prefill(chunks) + (expansion if context else 0.0)

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes."""
        prefill = self.prefill(prefills(batch)) if batch.num_prefills else 0.0
        return prefill, self.decode(batch.num_decodes, batch.decode_kv_tokens)

    def decode(self, num_sequences: int, kv_tokens: int) -> float:
        """Compute the seconds of `num_sequences` decodes that see `kv_tokens` in total."""
        reading = self._decodes.decode(num_sequences, kv_tokens)
        moving = num_sequences * self._query_time
        return moving + overlapped(kv_tokens * self._pair_time, reading)


class SelectedTimes:
    """Seconds of one layer's `latent` attention to the tokens that an `index` selects, on one
    device of `formula`: a roofline, as nothing was measured.

    The index, whose heads are on every device, scores all pairs, and decodes read its keys of all
    tokens. Then each token of prompts and decodes gathers the latents of the selected ones, and
    attends to them in the absorbed form.
    """

    def __init__(self, formula: AnalyticOperations, latent: Latent, index: Index) -> None:
        hardware = formula.hardware
        rate = hardware.flops_per_second * hardware.attention_efficiency
        value_bytes = formula.dtype_bytes if formula.spec.kv_dtype == "auto" else 1
        self._hardware = hardware
        self._selected = Window(formula.spec.num_attention_layers, index.size)
        self._score_time = index.pair_flops / rate
        self._key_time = index.cached_bytes / hardware.kv_rate
        self._pair_time = formula.heads.num_heads * latent.absorbed_flops / rate
        self._latent_time = latent.cached_size * value_bytes / hardware.kv_rate

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes."""
        sums = self._selected.sums(batch.chunks)
        prefill = decode = 0.0
        if batch.num_prefills:
            prefill = self._seconds(
                batch.prefill_query_key_pairs, batch.prefill_kv_tokens, sums.window_pairs
            )
        if batch.num_decodes:
            context = batch.decode_kv_tokens
            decode = self._seconds(context, context, sums.window_decode_kv_tokens)
        return prefill, decode

    def _seconds(self, pairs: int, kv_tokens: int, selected_pairs: int) -> float:
        scoring = overlapped(pairs * self._score_time, kv_tokens * self._key_time)
        gathering = selected_pairs * self._latent_time
        attending = overlapped(selected_pairs * self._pair_time, gathering)
        return SELECTING_KERNELS * self._hardware.kernel_launch + scoring + attending


class WindowTimes:
    """Seconds of one layer's attention in a `window` on one device of `formula`, by the figures of
    its attention to the whole context: kernels pass over the tiles that the window leaves out.
    """

    def __init__(self, formula: AnalyticOperations, window: Window) -> None:
        heads = formula.heads
        cached: float = formula.attention.kv_head_bytes
        if window.heads is not None:
            sizes = window.heads
            tensor = formula.parallel.tensor
            mean_size = (sizes.key_size + sizes.value_size) // 2
            kv_heads = kv_heads_of_device(sizes.num_kv_heads, tensor)
            cached *= mean_size / heads.head_size
            heads = Heads(sizes.num_heads // tensor, kv_heads, mean_size)
        is_sliding = window.kind == "sliding"
        self._window = window
        self._hardware = formula.hardware
        self._times = AttentionTimes(
            formula.hardware, *heads, cached, window=window.size if is_sliding else None
        )

    def times(self, batch: Batch) -> tuple[float, float]:
        """Compute the seconds of prefills and of decodes; in one call, decodes count as what they
        add to the prefills.
        """
        window = self._window
        chunks: list[tuple[int, int]] = []
        for start, num_tokens in prefills(batch) if batch.num_prefills else ():
            chunks += window.pieces(start, num_tokens)
        decode_kv_tokens = window.sums(batch.chunks).window_decode_kv_tokens
        prefill = self._times.prefill(chunks)
        decode = self._times.decode(batch.num_decodes, decode_kv_tokens)
        if self._hardware.hybrid_call and prefill and decode:
            both = self._times.hybrid(chunks, batch.num_decodes, decode_kv_tokens)
            return prefill, max(0.0, both - prefill)
        return prefill, decode


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

    def prefill(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Compute the seconds of `chunks` (start, num_tokens)."""
        linear, hardware, figures = self.linear, self.hardware, self.hardware.linear
        tokens = [num_tokens for _, num_tokens in chunks]
        pieces = [math.ceil(number / linear.chunk) for number in tokens]
        conv_share = figures.get("conv_efficiency", hardware.memory_efficiency)
        convolved = 2 * sum(tokens) * linear.num_channels * self.dtype_bytes / self.tensor
        convolution = convolved / (hardware.bytes_per_second * conv_share)
        if self.is_fitted:
            on_each = sum(pieces) * linear.num_heads / self.tensor / hardware.num_sms
            launch, compute = figures["launch"], figures["step"] * max(*pieces, on_each)
        else:
            rate = hardware.flops_per_second * hardware.matmul_efficiency
            flops = sum(pieces) * linear.chunk * linear.chunk_flops / self.tensor
            launch, compute = KERNELS * hardware.kernel_launch, flops / rate
        moved = sum(tokens) * (linear.num_channels + linear.inner_size) * self.dtype_bytes
        memory = moved / self.tensor / hardware.memory_rate + self._states_time(len(tokens))
        return launch + convolution + overlapped(compute, memory)

    def decode(self, num_sequences: int) -> float:
        """Compute the seconds of one token of each of `num_sequences`."""
        launch = self.hardware.linear.get("decode_launch", 2 * self.hardware.kernel_launch)
        return launch + self._states_time(num_sequences)

    def _states_time(self, num_sequences: int) -> float:
        moved = 2 * num_sequences * self.linear.sequence_bytes(self.dtype_bytes)
        return moved / self.tensor / self.hardware.memory_rate


class MixedOperations(AnalyticOperations):
    """Operations of layers that are not alike, of which a layer is the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, size = self.spec.layers, (self.hardware, self.dtype_bytes, self.parallel.tensor)
        self._latent: LatentTimes | SelectedTimes | None = None
        if layers.latent and layers.index:
            self._latent = SelectedTimes(self, layers.latent, layers.index)
        elif layers.latent:
            self._latent = LatentTimes(self, layers.latent)
        self._linear = LinearTimes(layers.linear, *size) if layers.linear else None
        self._window = WindowTimes(self, layers.window) if layers.window else None
        if self._latent:
            errors = self.hardware.latent.get("uncertainty", {})
            error = math.nan if layers.index else errors.get("attention", math.nan)
            self.uncertainty |= {"attention": error}
        if self._linear:
            error = self.hardware.linear["uncertainty"] if self._linear.is_fitted else math.nan
            self.uncertainty |= {"linear attention": error}

    @property
    def caution(self) -> str:
        """Source of the times."""
        parts = ["a layer's time is the mean of layers that are not alike"]
        if isinstance(self._latent, SelectedTimes):
            parts.append("attention to what an index selects: a roofline, no fit")
        elif self._latent:
            fit = "by figures fitted to" if self.hardware.latent else "without a fit to"
            parts.append(f"latent attention {fit} measured calls, none of which had a context")
        if self._window:
            parts.append("attention in a window by the figures of that to whole contexts, no fit")
        if self._linear:
            fit = "fitted to measured calls" if self._linear.is_fitted else "a roofline, no fit"
            parts.append(f"linear attention of {self._linear.linear.rule}: {fit}")
        return "; ".join(parts)

    def attention_times(self, batch: Batch) -> tuple[float, float]:
        """Compute the mean layer's seconds of prompts and of decodes, in separate calls; linear
        attention counts among them.
        """
        spec = self.spec
        if self._latent is None:
            prefill, decode = super().attention_times(batch)
        else:
            prefill, decode = self._latent.times(batch)
        share = spec.num_full_layers / spec.num_layers
        prefill, decode = share * prefill, share * decode
        if self._window:
            share = (spec.num_attention_layers - spec.num_full_layers) / spec.num_layers
            of_prompts, of_decodes = self._window.times(batch)
            prefill += share * of_prompts
            decode += share * of_decodes
        if self._linear:
            share = self._linear.linear.num_layers / spec.num_layers
            if batch.num_prefills:
                prefill += share * self._linear.prefill(prefills(batch))
            if batch.num_decodes:
                decode += share * self._linear.decode(batch.num_decodes)
        return prefill, decode

"""Roofline time of work on a device with known peaks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.console import amount
from sarathi_lab.model.layers import AmountT, Linear, WindowSums, Work
from sarathi_lab.model.spec import ModelSpec

if TYPE_CHECKING:  # its import takes half a second
    import pandas as pd

TILE = 128  # tokens of a tile of a GPU's large matrix products (SARATHI, section 4.4)
# What formulas read of a table of iterations (`Work`).
SUMS = (
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "prefill_kv_tokens",
    "decode_kv_tokens",
    "prefill_query_key_pairs",
    "num_emits",
    *WindowSums._fields,
)


@dataclass(frozen=True)
class Peaks:
    """Peak FLOP/s and bytes/s of a device, and their source."""

    flops_per_second: float  # in the model's type, in which attention is computed
    bytes_per_second: float
    source: str
    # None: as 16 bits; not a number where products of 8 bits have another peak, which is unknown.
    fp8_flops_per_second: float | None = None
    fp4_flops_per_second: float | None = None  # the same of products of 4 bits
    int8_flops_per_second: float | None = None  # the same of integers of 8 bits

    def rate(self, spec: ModelSpec) -> float:
        """Return the FLOP/s of the products of `spec`: in 8 or 4 bits where its weights have
        these.
        """
        rate = None
        if spec.stored is not None:
            rate = spec.stored.rate_of_products(
                fp8=self.fp8_flops_per_second,
                fp4=self.fp4_flops_per_second,
                int8=self.int8_flops_per_second,
            )
        if rate is None:
            return self.flops_per_second
        return rate

    def times(self, count: int) -> Peaks:
        """Return the peaks of `count` such devices together."""
        if count == 1:
            return self
        return Peaks(
            count * self.flops_per_second,
            count * self.bytes_per_second,
            f"{self.source} x {count}",
            fp8_flops_per_second=_multiple(count, self.fp8_flops_per_second),
            fp4_flops_per_second=_multiple(count, self.fp4_flops_per_second),
            int8_flops_per_second=_multiple(count, self.int8_flops_per_second),
        )

    def describe(self, spec: ModelSpec) -> str:
        """Format such as "measured: 1.2 TFLOP/s, 20 GB/s", with the peak of the products of `spec`,
        or of 16 bits where theirs is not known.
        """
        flops_per_second = self.rate(spec)
        if math.isnan(flops_per_second):
            flops_per_second = self.flops_per_second
        return (
            f"{self.source}: {amount(flops_per_second / 1e12)} TFLOP/s, "
            f"{amount(self.bytes_per_second / 1e9)} GB/s"
        )


def _multiple(count: int, rate: float | None) -> float | None:
    return None if rate is None else count * rate


def roofline_time(spec: ModelSpec, work: Work[AmountT], dtype_bytes: int, peaks: Peaks) -> AmountT:
    """Compute the least seconds of one iteration, all operations overlapping: max(FLOPs / peak,
    bytes / bandwidth). By row if `work` is a table of iterations.
    """
    # A perfect kernel overlaps reading and computing: the slower of the two is its time.
    num_bytes = spec.min_bytes(work, dtype_bytes)
    compute = spec.flops(work) / peaks.rate(spec)
    memory = num_bytes / peaks.bytes_per_second
    slower = np.maximum(compute, memory)
    return cast(AmountT, slower)  # numpy's types lose that a column stays one


def operation_rooflines(
    spec: ModelSpec, work: Work[float], dtype_bytes: int, peaks: Peaks
) -> dict[str, float]:
    """Compute the least seconds of each operation of an iteration, over all layers: max(FLOPs /
    peak, bytes / bandwidth) of each. Their sum bounds operations that run one after another.

    Products read weights and inputs and write outputs; attention reads queries and the KV cache.
    `elementwise` is what fused kernels move: norms add to the residual stream, rotary embedding
    also fills the cache, and activation. Empty for a model without formulas.
    """
    if not spec.has_formulas:
        return {}
    roofline = _OperationRoofline(spec, dtype_bytes, peaks)
    num_tokens = work.num_prefill_tokens + work.num_decode_tokens
    seconds: dict[str, float] = {}
    for linear in spec.layer_linears:
        weight_bytes = spec.product_bytes(linear.name, dtype_bytes)
        seconds[linear.name] = roofline.product(linear, num_tokens, weight_bytes)
    for linear in spec.expert_linears:
        seconds[linear.name] = roofline.experts(linear, num_tokens)
    seconds["attention_prefill"] = roofline.attention(
        work.num_prefill_tokens, work.prefill_query_key_pairs, work.prefill_kv_tokens
    )
    # Each decode attends to its whole context: as many pairs as tokens that are read.
    seconds["attention_decode"] = roofline.attention(
        work.num_decode_tokens, work.decode_kv_tokens, work.decode_kv_tokens
    )
    seconds["elementwise"] = roofline.elementwise(num_tokens)
    if work.num_emits:
        head_bytes = spec.head_bytes(dtype_bytes)
        seconds["lm_head"] = roofline.product(spec.lm_head, work.num_emits, head_bytes)
    return seconds


@dataclass(frozen=True)
class _OperationRoofline:
    """Least seconds of operations of `spec`, each over all layers."""

    spec: ModelSpec
    dtype_bytes: int
    peaks: Peaks

    def product(
        self,
        linear: Linear,
        num_rows: float,
        weight_bytes: float,
        used_share: float = 1.0,
    ) -> float:
        """Compute the seconds of a product over `num_rows` rows, with so many bytes of a weight,
        of which a share is used.
        """
        flops = 2 * num_rows * linear.num_params
        row_size = (linear.in_features + linear.out_features) * linear.count
        row_bytes = num_rows * row_size * self.dtype_bytes
        # Read once for all rows, which is why a larger batch costs less a token.
        read_bytes = used_share * linear.num_params * weight_bytes
        compute = flops / self.peaks.rate(self.spec)
        memory = (read_bytes + row_bytes) / self.peaks.bytes_per_second
        return max(compute, memory)

    def experts(self, linear: Linear, num_tokens: float) -> float:
        """Compute the seconds of a product of all experts over the tokens that choose each."""
        spec = self.spec
        # Each token visits a few experts, so an expert's product has fewer rows than the batch.
        chosen_share = spec.experts_per_token / max(1, spec.num_experts)
        rows_of_expert = num_tokens * chosen_share
        weight_bytes = spec.expert_bytes(self.dtype_bytes)
        used_share = spec.share_of_experts(num_tokens)
        return self.product(linear, rows_of_expert, weight_bytes, used_share)

    def attention(self, num_queries: float, num_pairs: float, kv_tokens: float) -> float:
        """Compute the seconds of attention of queries to `kv_tokens` cached tokens."""
        spec = self.spec
        query_size = spec.num_layers * spec.q_size
        flops = 4 * query_size * num_pairs  # QK and PV, a product and a sum each
        query_bytes = 2 * num_queries * query_size * self.dtype_bytes  # and of outputs
        kv_bytes = kv_tokens * spec.kv_bytes_per_token(self.dtype_bytes)
        compute = flops / self.peaks.flops_per_second
        memory = (kv_bytes + query_bytes) / self.peaks.bytes_per_second
        return max(compute, memory)

    def elementwise(self, num_tokens: float) -> float:
        """Compute the seconds of moving what norms, rotary embedding and activation take."""
        spec = self.spec
        norms = 2 * 4 * spec.hidden_size  # two norms, each with three reads and a write
        rotary = 2 * (spec.q_size + 2 * spec.kv_size)
        num_ffns = max(1, spec.experts_per_token)
        ffn_width = num_ffns * spec.ffn_size + spec.shared_expert_size
        ffn_rows = 3 if spec.gated_ffn else 2  # one is read, or two with a gate, and one written
        activation = ffn_rows * ffn_width
        token_bytes = num_tokens * spec.num_layers * self.dtype_bytes
        num_bytes = token_bytes * (norms + rotary + activation)
        return num_bytes / self.peaks.bytes_per_second


def request_roofline(
    spec: ModelSpec, requests: pd.DataFrame, dtype_bytes: int, peaks: Peaks
) -> NDArray[np.float64]:
    """Compute the least seconds of each request [R] alone: its whole prompt, then one token per
    iteration.

    Decodes are taken at their mean context, P + D/2: exact where memory bounds them, as it does
    single ones.
    """
    prompts = _whole_prompts(spec, requests)
    decodes = _decodes(spec, requests, batch_size=1)
    prefill_seconds = roofline_time(spec, prompts, dtype_bytes, peaks)
    decode_seconds = roofline_time(spec, decodes, dtype_bytes, peaks)
    num_decodes = requests.output_len.astype(float) - 1  # the prefill gives the first token
    return np.asarray(prefill_seconds + num_decodes * decode_seconds, dtype=float)


def ridge_tokens(spec: ModelSpec, dtype_bytes: int, peaks: Peaks) -> float:
    """Compute the tokens of a batch whose product takes as long to compute as its weight to read.

    Memory bounds products of fewer tokens, so tokens that join them are free (the knee of
    SARATHI's Fig 3). Products of experts have another ridge (`expert_ridge_tokens`).
    """
    return _ridge(spec.linear_bytes(dtype_bytes), peaks.rate(spec), peaks)


def expert_ridge_tokens(spec: ModelSpec, dtype_bytes: int, peaks: Peaks) -> float:
    """Compute the same of the tokens of one expert, of which a batch has
    `num_experts / experts_per_token` times as many.
    """
    return _ridge(spec.expert_bytes(dtype_bytes), peaks.rate(spec), peaks)


def _ridge(weight_bytes: float, flops_per_second: float, peaks: Peaks) -> float:
    flops_per_parameter = 2
    seconds_per_parameter = weight_bytes / peaks.bytes_per_second
    return seconds_per_parameter * flops_per_second / flops_per_parameter


def riding_gain(
    spec: ModelSpec,
    requests: pd.DataFrame,
    batch_size: int,
    dtype_bytes: int,
    peaks: Peaks,
) -> float:
    """Compute what a perfect schedule gains over request-level batching at the roofline.

    Request-level batching computes whole prompts, then decodes of `batch_size` requests, each in
    its roofline time. The perfect schedule takes all FLOPs at the peak, or all reads of the cache
    at the bandwidth. A device that stays further from its roofline in decodes than in prompts
    gains more.

    Args:
        spec: The model.
        requests: A row a request, with `prompt_len` and `output_len` in tokens.
        batch_size: Requests that decode together.
        dtype_bytes: Bytes of an element of weights and cache.
        peaks: Of the device.

    Returns:
        The time of request-level batching over the perfect schedule's, at least 1.
    """
    prefills = _whole_prompts(spec, requests)
    decodes = _decodes(spec, requests, batch_size)
    num_decodes = requests.output_len.astype(float) - 1
    decode_iterations = num_decodes / batch_size  # of each request
    prefill_seconds = roofline_time(spec, prefills, dtype_bytes, peaks)
    seconds_of_decode = roofline_time(spec, decodes, dtype_bytes, peaks)
    decode_seconds = decode_iterations * seconds_of_decode
    flops = spec.flops(prefills) + decode_iterations * spec.flops(decodes)
    cache_bytes = decode_iterations * spec.kv_read_bytes(decodes, dtype_bytes)
    computing = flops.sum() / peaks.rate(spec)
    reading = cache_bytes.sum() / peaks.bytes_per_second
    least_seconds = max(computing, reading)
    batched_seconds = (prefill_seconds + decode_seconds).sum()
    gain = batched_seconds / least_seconds
    return max(1.0, float(gain))


def prompt_flops(spec: ModelSpec, requests: pd.DataFrame) -> NDArray[np.float64]:
    """Compute the FLOPs of each request's whole prompt [R], none of which is cached."""
    flops = spec.flops(_whole_prompts(spec, requests))
    return np.asarray(flops, dtype=float)


def _whole_prompts(spec: ModelSpec, requests: pd.DataFrame) -> pd.DataFrame:
    """Return the work of an iteration for each of `requests` that computes its whole prompt."""
    # A token attends to itself and to those before it: n (n + 1) / 2 pairs.
    prompt = requests.prompt_len.astype(float)
    work = _no_work(requests).assign(
        num_prefill_tokens=prompt,
        prefill_kv_tokens=prompt,
        prefill_query_key_pairs=prompt * (prompt + 1) / 2,
        num_emits=1.0,
    )
    window = spec.attention_window
    if window is None:
        return work
    lengths = requests.prompt_len.astype(int)
    return work.assign(
        window_pairs=[float(window.pairs(0, length)) for length in lengths],
        window_prefill_kv_tokens=prompt,
    )


def _decodes(spec: ModelSpec, requests: pd.DataFrame, batch_size: int) -> pd.DataFrame:
    """Return the work of an iteration for each of `requests` in which `batch_size` like it decode,
    at their mean context.
    """
    # Attention is linear in the context: the mean stands for all decodes of a request.
    prompts = requests.prompt_len.astype(float)
    outputs = requests.output_len.astype(float)
    context = prompts + outputs / 2
    work = _no_work(requests).assign(
        num_decode_tokens=float(batch_size),
        decode_kv_tokens=batch_size * context,
        num_emits=float(batch_size),
    )
    window = spec.attention_window
    if window is None:
        return work
    return work.assign(window_decode_kv_tokens=batch_size * context.clip(upper=window.size))


def _no_work(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[[]].assign(**dict.fromkeys(SUMS, 0.0))

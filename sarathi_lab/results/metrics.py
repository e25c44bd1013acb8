"""Metrics of a run from the tables of its ledger, defined in docs/reference/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pandas as pd

from sarathi_lab.model.roofline import TILE, Peaks, operation_rooflines, roofline_time
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.decode_cost import DecodeCost
from sarathi_lab.results.serving_metrics import QUANTILES, latency, quantiles

WAITS = ("ttft", "tbt", "request_gap", "tpot", "latency", "normalised_latency", "bubble_time")
# Compared with a baseline: <name>_vs_<baseline> is the run's value divided by the baseline's.
COMPARED = (
    *("throughput", "output_throughput", "decode_throughput", "decode_time_marginal"),
    *("kv_read_bytes", "kv_reread_factor", "duration", "bubble_fraction"),
    *(f"{name}_p{int(q * 100)}" for name in WAITS for q in QUANTILES),
)
IS_PART = "window_start"  # a quantity of runs of which a part counts
# Difference in the share of replayed iterations above which a ratio is in part of launches.
REPLAY_TOLERANCE = 0.05
STARVED = 0.9  # share of an iteration's time from which launching leaves the device without work


def add_costs(
    iterations: pd.DataFrame, spec: ModelSpec, dtype_bytes: int, peaks: Peaks
) -> pd.DataFrame:
    """Add FLOPs, bytes and tiles of each iteration and its shares of the peaks."""
    num_tokens = iterations.num_prefill_tokens + iterations.num_decode_tokens
    flops, num_bytes = spec.flops(iterations), spec.min_bytes(iterations, dtype_bytes)
    roofline = roofline_time(spec, iterations, dtype_bytes, peaks)
    return iterations.assign(
        flops=flops,
        weight_bytes=spec.weight_read_bytes(iterations, dtype_bytes),
        kv_bytes=spec.kv_read_bytes(iterations, dtype_bytes),
        roofline=roofline,
        min_bytes=num_bytes,
        useful_tiles=num_tokens / TILE,
        computed_tiles=np.ceil((num_tokens + iterations.num_padding_tokens) / TILE),
        mfu=flops / (iterations.busy * peaks.rate(spec)),
        mbu=num_bytes / (iterations.busy * peaks.bytes_per_second),
        time_over_roofline=iterations.busy / roofline,
    )


def summarise(
    iterations: pd.DataFrame, requests: pd.DataFrame, peaks: Peaks, decode_cost: DecodeCost | None
) -> dict[str, float]:
    """Return a run's quantities by name, without those that it does not have.

    `iterations` is `add_costs`' table; `decode_cost` is None for policies that never mix chunks and
    decodes.
    """
    # NaN, not the sum of what is there, for a model without formulas.
    min_bytes = iterations.min_bytes.sum(skipna=False)
    busy, roofline = iterations.busy.sum(), iterations.roofline.sum(skipna=False)
    busy_at_peak = (iterations.mfu * iterations.busy).sum(skipna=False)
    kv_tokens = iterations.prefill_kv_tokens.sum()
    summary = {
        "num_iterations": len(iterations),
        **throughput(requests, iterations.end.max()),
        **_decode(iterations, decode_cost),
        "kv_read_bytes": iterations.kv_bytes.sum(),
        "kv_reread_factor": kv_tokens / iterations.num_prefill_tokens.sum(),
        **latency(requests),
        "busy_time": busy,
        "roofline": roofline,
        "time_over_roofline": busy / roofline,
        **_time_over_roofline_by_kind(iterations),
        "peak_flops_per_second": peaks.flops_per_second,
        "peak_bytes_per_second": peaks.bytes_per_second,
        "mfu": busy_at_peak / busy,
        "mbu": min_bytes / (busy * peaks.bytes_per_second),
        "tile_efficiency": iterations.useful_tiles.sum() / iterations.computed_tiles.sum(),
        **_overheads(iterations),
        "num_preemptions": iterations.num_preemptions.sum(),
    }
    return {name: float(value) for name, value in summary.items() if np.isfinite(value)}


def pipeline_metrics(
    iterations: pd.DataFrame, requests: pd.DataFrame, bubbles: pd.DataFrame, num_stages: int
) -> dict[str, float]:
    """Return the bubbles of a pipeline of `num_stages` from the ledger's table."""
    idle = (bubbles.end - bubbles.start).sum() / num_stages
    share = float(idle / (idle + iterations.busy.sum()))
    return {"bubble_fraction": share, **quantiles("bubble_time", requests.bubble_time)}


def compare(
    summary: Mapping[str, float], baseline: Mapping[str, float], name: str
) -> dict[str, float]:
    """Return the ratios of `summary` to the `baseline` called `name`.

    They are of the compared quantities that both have. Where a part of either run counts, the
    parts have different numbers of requests: a policy that holds fewer at once counts more batches.
    Then their durations are not compared, and the bytes that are read are compared by request.
    """
    is_part = IS_PART in summary or IS_PART in baseline
    ratios = {}
    for quantity in COMPARED:
        if quantity not in summary or baseline.get(quantity, 0) <= 0:
            continue
        if is_part and quantity == "duration":
            continue
        ratio = summary[quantity] / baseline[quantity]
        if is_part and quantity == "kv_read_bytes":
            ratio *= baseline["num_requests"] / summary["num_requests"]
        ratios[f"{quantity}_vs_{name}"] = ratio
    return ratios


def throughput(requests: pd.DataFrame, duration: float) -> dict[str, float]:
    """Return counts and rates of finished `requests` over `duration` seconds."""
    prompt_tokens, output_tokens = requests.prompt_len.sum(), requests.output_len.sum()
    found = rates(prompt_tokens, output_tokens, len(requests), duration)
    return {"num_requests": len(requests), **found}


def rates(
    num_prompt_tokens: float, num_output_tokens: float, num_requests: float, duration: float
) -> dict[str, float]:
    """Return token counts and rates over `duration` seconds."""
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "duration": duration,
        "throughput": (num_prompt_tokens + num_output_tokens) / duration,
        "output_throughput": num_output_tokens / duration,
        "request_throughput": num_requests / duration,
    }


def _decode(iterations: pd.DataFrame, cost: DecodeCost | None) -> dict[str, float]:
    decode_only = (iterations.num_prefill_tokens == 0) & (iterations.num_decode_tokens > 0)
    tokens = iterations.num_decode_tokens
    if "num_draft_tokens" in iterations:
        tokens = tokens - (iterations.num_draft_tokens - iterations.num_accepted_tokens)
    alone, hybrid = tokens[decode_only].sum(), tokens[~decode_only].sum()
    summary: dict[str, float] = {"num_decode_tokens": alone + hybrid}
    seconds = iterations.busy[decode_only].sum()
    if cost is not None:
        summary |= {
            "num_piggybacked_decodes": cost.num_decodes,
            "num_chunk_tokens": cost.num_chunk_tokens,
            "decode_time_alone": cost.alone,
            "decode_time_marginal": cost.marginal,
        }
        if cost.host_share is not None:
            summary["decode_host_share"] = cost.host_share
        if cost.marginal > 0:
            summary["decode_speedup"] = cost.alone / cost.marginal
        seconds += hybrid * cost.marginal
    elif alone:
        summary["decode_time_alone"] = seconds / alone
    is_known = hybrid == 0 if cost is None else cost.marginal > 0
    if seconds > 0 and is_known:
        summary["decode_throughput"] = (alone + hybrid) / seconds
    return summary


def _time_over_roofline_by_kind(iterations: pd.DataFrame) -> dict[str, float]:
    """Return time over roofline of each kind of iteration present."""
    return {
        f"time_over_roofline_{kind}": rows.busy.sum() / rows.roofline.sum(skipna=False)
        for kind, rows in _by_kind(iterations).items()
    }


def _by_kind(iterations: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each kind of iteration present."""
    has_prefill = iterations.num_prefill_tokens > 0
    has_decode = iterations.num_decode_tokens > 0
    kinds = {
        "prefill": iterations[has_prefill & ~has_decode],
        "decode": iterations[has_decode & ~has_prefill],
        "hybrid": iterations[has_prefill & has_decode],
    }
    return {kind: rows for kind, rows in kinds.items() if len(rows)}


def graph_use_by_kind(iterations: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the shares of each kind of iteration that were replayed as CUDA graphs in full,
    piecewise, or not at all; empty where iterations are not launched apart from a host.
    """
    if "graph_use" not in iterations:
        if not iterations.launching_time.any():
            return {}
        iterations = iterations.assign(graph_use="none")
    shares: dict[str, dict[str, float]] = {}
    for kind, rows in _by_kind(iterations).items():
        uses = rows.graph_use.value_counts(normalize=True)
        shares[kind] = {str(use): float(share) for use, share in uses.items()}
    return shares


def replay_caution(
    summary: Mapping[str, float], baseline: Mapping[str, float], name: str
) -> list[str]:
    """Return a caution if ratios to a baseline include CUDA graphs (`REPLAY_TOLERANCE`)."""
    share, other = (one.get("replayed_fraction", np.nan) for one in (summary, baseline))
    words = f"  replayed as CUDA graphs were {share:.0%} of the iterations, of {name}'s {other:.0%}"
    is_other = abs(share - other) > REPLAY_TOLERANCE  # never with NaN: unknown
    return [f"{words}: the ratios are in part of launches"] if is_other else []


def device_idle_fraction(iterations: pd.DataFrame) -> float:
    """Return the share of time in which a device idles although there are requests: between
    iterations and while it waits for launches (`starved_time`).
    """
    instances = iterations.instance if "instance" in iterations else [0] * len(iterations)
    gaps = iterations.groupby(instances).start.shift(-1) - iterations.end
    had_work = iterations.num_running + iterations.num_waiting > 0
    between = float(gaps[had_work].clip(lower=0.0).sum())
    idle = between + float(starved_time(iterations).sum())
    return idle / (between + float(iterations.busy.sum()))


def starved_time(iterations: pd.DataFrame) -> pd.Series:
    """Return an upper bound of the seconds of each iteration in which its device waited for
    launches: the time beyond its roofline (all without that column) if it ended with its launches.
    """
    took = iterations.end - iterations.start
    launching, is_replayed = iterations.launching_time, iterations.is_replayed.astype(bool)
    is_starved = ~is_replayed & (launching > 0) & (launching >= STARVED * took)
    work = iterations.roofline if "roofline" in iterations else 0.0
    return (took - work).clip(lower=0.0).where(is_starved, 0.0)


def _overheads(iterations: pd.DataFrame) -> dict[str, float]:
    """Return a real device's overheads; empty where no host time was measured."""
    if not iterations.host_time.any():
        return {}
    num_padding = iterations.num_padding_tokens
    num_tokens = iterations.num_prefill_tokens + iterations.num_decode_tokens + num_padding
    return {
        "device_idle_fraction": device_idle_fraction(iterations),
        "host_time": iterations.host_time.sum(),
        "padding_fraction": num_padding.sum() / num_tokens.sum(),
        "replayed_fraction": iterations.is_replayed.mean(),
    }


OUTSIDE = "others"  # packing, launches, and what else was not timed
PARTS = {  # rooflines that a timed operation consists of, where names differ
    "attention": ("attention_prefill", "attention_decode"),
    "rotary": (),  # within that of `elementwise`
    "ffn": ("ffn_up", "ffn_down", "router", "shared_up", "shared_down", "shared_gate"),
    "logits": ("lm_head",),
}
EXPERTS = {  # the same of a mixture in C++
    "experts": ("router", "ffn_up", "ffn_down"),
    "ffn_up": ("shared_gate", "shared_up"),
    "ffn_down": ("shared_down",),
}


def operation_table(
    times: pd.DataFrame, iterations: pd.DataFrame, spec: ModelSpec, dtype_bytes: int, peaks: Peaks
) -> pd.DataFrame:
    """Return where the time of `iterations` went, from the `times` (operation, seconds) taken in
    them: `operation`, `seconds`, `share` of the time, `roofline` (seconds of each operation alone,
    NaN where it has none) and `time_over_roofline`.
    """
    seconds = times.groupby("operation", sort=False).seconds.sum()
    seconds[OUTSIDE] = iterations.busy.sum() - seconds.sum()
    least: Counter[str] = Counter()
    for work in iterations.itertuples():
        least.update(operation_rooflines(spec, work, dtype_bytes, peaks))
    parts = PARTS | (EXPERTS if "experts" in seconds else {})
    roofline = [sum(least[part] for part in parts.get(name, (name,))) for name in seconds.index]
    table = pd.DataFrame({"operation": seconds.index, "seconds": seconds.to_numpy()})
    table["share"] = table.seconds / iterations.busy.sum()
    table["roofline"] = pd.Series(roofline, dtype=float).where(lambda least: least > 0)
    return table.assign(time_over_roofline=table.seconds / table.roofline)

"""Metrics of a run from the tables of its ledger, defined in docs/reference/metrics.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from sarathi_lab.model.layers import Work
from sarathi_lab.model.roofline import TILE, Peaks, operation_rooflines, roofline_time
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.decode_cost import DecodeCost
from sarathi_lab.results.serving_metrics import QUANTILES, latency, quantiles
from sarathi_lab.results.table import (
    Iterations,
    Quantities,
    Requests,
    Summary,
)

WAITS = ("ttft", "tbt", "request_gap", "tpot", "latency", "normalised_latency", "bubble_time")
# Compared with a baseline: <name>_vs_<baseline> is the run's value divided by the baseline's.
COMPARED = (
    "throughput",
    "output_throughput",
    "decode_throughput",
    "decode_time_marginal",
    "kv_read_bytes",
    "kv_reread_factor",
    "duration",
    "bubble_fraction",
    *(f"{name}_p{int(q * 100)}" for name in WAITS for q in QUANTILES),
)
CHUNK_RIDGES = "chunk_ridges"
IS_PART = "window_start"  # a quantity of runs of which a part counts
# Difference in the share of replayed iterations above which a ratio is in part of launches.
REPLAY_TOLERANCE = 0.05
STARVED = 0.9  # share of an iteration's time from which launching leaves the device without work


def add_costs(
    iterations: Iterations, spec: ModelSpec, dtype_bytes: int, peaks: Peaks
) -> Iterations:
    """Add FLOPs, bytes and tiles of each iteration and its shares of the peaks."""
    num_tokens = iterations.num_prefill_tokens + iterations.num_decode_tokens
    flops = spec.flops(iterations)
    num_bytes = spec.min_bytes(iterations, dtype_bytes)
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


@dataclass(frozen=True)
class RunTables:
    """What the quantities of a run are computed from: the part of it that counts.

    Attributes:
        iterations: A row for each, with costs (`add_costs`); columns as in metrics.md.
        requests: A row for each, the ledger's `REQUEST_COLUMNS`.
        peaks: Those of the device.
        decode_cost: Of a decode alone and beside a chunk; None for policies that never mix them.
        spec: The model, whose weights decide at which peak its products run; None: one whose
            products are in the type of the rest.
    """

    iterations: Iterations
    requests: Requests
    peaks: Peaks
    decode_cost: DecodeCost | None = None
    spec: ModelSpec | None = None

    @property
    def peak_flops_per_second(self) -> float:
        """FLOP/s of which `mfu` is the share: the products' peak, in 8 or 4 bits where they are."""
        if self.spec is None:
            return self.peaks.flops_per_second
        return self.peaks.rate(self.spec)


Metric = Callable[[RunTables], Summary]  # quantities by name, in SI units


def summarise(
    iterations: Iterations,
    requests: Requests,
    peaks: Peaks,
    decode_cost: DecodeCost | None,
    spec: ModelSpec | None = None,
) -> Quantities:
    """Return a run's quantities by name, without those that it does not have.

    The arguments are those of `RunTables`.
    """
    run = RunTables(iterations, requests, peaks, decode_cost, spec)
    summary: Quantities = {}
    for metric in METRICS:
        summary |= metric(run)
    # A ratio over nothing is NaN or infinite: the run does not have it.
    return {name: float(value) for name, value in summary.items() if np.isfinite(value)}


# -- the metrics of every run ----------------------------------------------------------------------


def _counts_and_rates(run: RunTables) -> Quantities:
    rates_of_run = throughput(run.requests, run.iterations.end.max())
    return {"num_iterations": len(run.iterations), **rates_of_run}


def _decodes(run: RunTables) -> Quantities:
    """Return the tokens of decodes, their times alone and beside chunks, and their rate."""
    iterations = run.iterations
    cost = run.decode_cost
    tokens = iterations.num_decode_tokens
    has_no_chunk = iterations.num_prefill_tokens == 0
    is_decode_only = has_no_chunk & (tokens > 0)
    # Drafts that were wrong are computed, but are no tokens of an answer.
    if "num_draft_tokens" in iterations:
        tokens = tokens - (iterations.num_draft_tokens - iterations.num_accepted_tokens)
    # A decode on a chunk shares its iteration's time, so only its marginal cost counts (Table 2).
    num_alone = tokens[is_decode_only].sum()
    num_hybrid = tokens[~is_decode_only].sum()
    seconds = iterations.busy[is_decode_only].sum()
    summary: Quantities = {"num_decode_tokens": num_alone + num_hybrid}
    has_all_times = num_hybrid == 0
    if cost is not None:
        summary |= _cost_of_decodes(cost)
        seconds += num_hybrid * cost.marginal
        has_all_times = cost.marginal > 0
    elif num_alone:
        summary["decode_time_alone"] = seconds / num_alone
    if seconds > 0 and has_all_times:
        summary["decode_throughput"] = (num_alone + num_hybrid) / seconds
    return summary


def _cost_of_decodes(cost: DecodeCost) -> Quantities:
    summary = {
        "num_piggybacked_decodes": cost.num_decodes,
        "num_chunk_tokens": cost.num_chunk_tokens,
        "decode_time_alone": cost.alone,
        "decode_time_marginal": cost.marginal,
    }
    if cost.host_share is not None:
        summary["decode_host_share"] = cost.host_share
    if cost.marginal > 0:
        summary["decode_speedup"] = cost.alone / cost.marginal
    return summary


def drafts(iterations: Iterations) -> Quantities:
    """Return the share of right drafts and the tokens that a decode emits; empty without drafts."""
    if "num_draft_tokens" not in iterations:
        return {}
    num_drafts = float(iterations.num_draft_tokens.sum())
    num_accepted = float(iterations.num_accepted_tokens.sum())
    # Each decode computes its own token and its drafts.
    num_decodes = float(iterations.num_decode_tokens.sum()) - num_drafts
    summary = {"num_draft_tokens": num_drafts}
    if num_drafts:
        summary["acceptance_rate"] = num_accepted / num_drafts
    if num_decodes:
        summary["tokens_per_decode"] = 1 + num_accepted / num_decodes
    return summary


def _drafts(run: RunTables) -> Quantities:
    return drafts(run.iterations)


def _kv_reads(run: RunTables) -> Quantities:
    # Section 4.2: each chunk reads the keys and values of the ones before it again.
    num_read = run.iterations.prefill_kv_tokens.sum()
    num_computed = run.iterations.num_prefill_tokens.sum()
    return {
        "kv_read_bytes": run.iterations.kv_bytes.sum(),
        "kv_reread_factor": num_read / num_computed,
    }


def _latencies(run: RunTables) -> Quantities:
    return latency(run.requests)


def _rooflines(run: RunTables) -> Quantities:
    """Return the time beside the roofline's, in all and by kind of iteration."""
    busy = run.iterations.busy.sum()
    # NaN, not the sum of what is there, for a model without formulas.
    roofline = run.iterations.roofline.sum(skipna=False)
    summary = {
        "busy_time": busy,
        "roofline": roofline,
        "time_over_roofline": busy / roofline,
    }
    for kind, rows in _by_kind(run.iterations).items():
        seconds = rows.roofline.sum(skipna=False)
        summary[f"time_over_roofline_{kind}"] = rows.busy.sum() / seconds
    return summary


def _utilisation(run: RunTables) -> Quantities:
    """Return the device's peaks, and the shares of them that the run used."""
    iterations = run.iterations
    busy = iterations.busy.sum()
    busy_at_peak = (iterations.mfu * iterations.busy).sum(skipna=False)
    min_bytes = iterations.min_bytes.sum(skipna=False)
    return {
        "peak_flops_per_second": run.peak_flops_per_second,
        "peak_bytes_per_second": run.peaks.bytes_per_second,
        "mfu": busy_at_peak / busy,
        "mbu": min_bytes / (busy * run.peaks.bytes_per_second),
        "tile_efficiency": iterations.useful_tiles.sum() / iterations.computed_tiles.sum(),
    }


def _overheads(run: RunTables) -> Quantities:
    """Return a real device's overheads; empty where no host time was measured."""
    iterations = run.iterations
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


def _preemptions(run: RunTables) -> Quantities:
    return {"num_preemptions": run.iterations.num_preemptions.sum()}


METRICS: Sequence[Metric] = (
    _counts_and_rates,
    _decodes,
    _drafts,
    _kv_reads,
    _latencies,
    _rooflines,
    _utilisation,
    _overheads,
    _preemptions,
)


# -- metrics of some runs, and comparisons ---------------------------------------------------------


def prefix_hits(requests: Requests) -> Quantities:
    """Return the share of prompt tokens that were cached, of runs that share prefixes."""
    num_cached = requests.prefix_hit_tokens.sum()
    return {"prefix_hit_rate": float(num_cached / requests.prompt_len.sum())}


def pipeline_metrics(
    iterations: Iterations, requests: Requests, bubbles: pd.DataFrame, num_stages: int
) -> Quantities:
    """Return the bubbles of a pipeline of `num_stages` from the ledger's table."""
    # Bubbles are summed over all stages, busy time is counted once an iteration.
    seconds = bubbles.end - bubbles.start
    idle = seconds.sum() / num_stages
    busy = iterations.busy.sum()
    share = float(idle / (idle + busy))
    bubble_times = quantiles("bubble_time", requests.bubble_time)
    return {"bubble_fraction": share, **bubble_times}


def compare(
    summary: Summary,
    baseline: Summary,
    name: str,
    own: Collection[str] = (),
) -> Quantities:
    """Return the ratios of `summary` to the `baseline` called `name`.

    They are of the compared quantities, and of a user's `own`, that both have. Where a part of
    either run counts, the parts have different numbers of requests: a policy that holds fewer at
    once counts more batches. Then their durations are not compared, and the bytes that are read are
    compared by request.
    """
    is_part = IS_PART in summary or IS_PART in baseline
    ratios = {}
    for quantity in (*COMPARED, *own):
        if quantity not in summary or baseline.get(quantity, 0) <= 0:
            continue
        if is_part and quantity == "duration":
            continue
        ratio = summary[quantity] / baseline[quantity]
        if is_part and quantity == "kv_read_bytes":
            ratio *= baseline["num_requests"] / summary["num_requests"]
        ratios[f"{quantity}_vs_{name}"] = ratio
    return ratios


def throughput(requests: Requests, duration: float) -> Quantities:
    """Return counts and rates of finished `requests` over `duration` seconds."""
    num_requests = len(requests)
    num_prompt_tokens = requests.prompt_len.sum()
    num_output_tokens = requests.output_len.sum()
    tokens = rates(num_prompt_tokens, num_output_tokens, num_requests, duration)
    return {"num_requests": num_requests, **tokens}


def rates(
    num_prompt_tokens: float, num_output_tokens: float, num_requests: float, duration: float
) -> Quantities:
    """Return token counts and rates over `duration` seconds."""
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "duration": duration,
        "throughput": (num_prompt_tokens + num_output_tokens) / duration,
        "output_throughput": num_output_tokens / duration,
        "request_throughput": num_requests / duration,
    }


def _by_kind(iterations: Iterations) -> dict[str, Iterations]:
    """Return the rows of each kind of iteration present."""
    has_prefill = iterations.num_prefill_tokens > 0
    has_decode = iterations.num_decode_tokens > 0
    kinds = {
        "prefill": iterations[has_prefill & ~has_decode],
        "decode": iterations[has_decode & ~has_prefill],
        "hybrid": iterations[has_prefill & has_decode],
    }
    return {kind: rows for kind, rows in kinds.items() if len(rows)}


# By kind of iteration (prefill, decode, hybrid), the share that each use of graphs has.
GraphUseByKind = dict[str, Quantities]


def graph_use_by_kind(iterations: Iterations) -> GraphUseByKind:
    """Return the shares of each kind of iteration that were replayed as CUDA graphs in full,
    piecewise, or not at all; empty where iterations are not launched apart from a host.
    """
    if "graph_use" not in iterations:
        if not iterations.launching_time.any():
            return {}
        iterations = iterations.assign(graph_use="none")
    shares: GraphUseByKind = {}
    for kind, rows in _by_kind(iterations).items():
        shares[kind] = {}
        uses = rows.graph_use.value_counts(normalize=True)
        for use, share in uses.items():
            shares[kind][str(use)] = float(share)
    return shares


def replay_caution(summary: Summary, baseline: Summary, name: str) -> list[str]:
    """Return a caution if ratios to a baseline include CUDA graphs (`REPLAY_TOLERANCE`)."""
    share = summary.get("replayed_fraction", np.nan)
    share_of_baseline = baseline.get("replayed_fraction", np.nan)
    if not abs(share - share_of_baseline) > REPLAY_TOLERANCE:  # of NaN, too: unknown
        return []
    return [
        f"  replayed as CUDA graphs were {share:.0%} of the iterations, of {name}'s "
        f"{share_of_baseline:.0%}: the ratios are in part of launches"
    ]


def device_idle_fraction(iterations: Iterations) -> float:
    """Return the share of time in which a device idles although there are requests: between
    iterations and while it waits for launches (`starved_time`).
    """
    instances = pd.Series(0, iterations.index)
    if "instance" in iterations:
        instances = iterations.instance
    # The next one of the same instance: others run meanwhile.
    next_start = iterations.groupby(instances).start.shift(-1)
    gaps = next_start - iterations.end
    num_requests = iterations.num_running + iterations.num_waiting
    had_work = num_requests > 0
    between = float(gaps[had_work].clip(lower=0.0).sum())
    starved = float(starved_time(iterations).sum())
    busy = float(iterations.busy.sum())
    idle = between + starved
    return idle / (between + busy)


def starved_time(iterations: Iterations) -> pd.Series:
    """Return an upper bound of the seconds of each iteration in which its device waited for
    launches: the time beyond its roofline (all without that column) if it ended with its launches.
    """
    took = iterations.end - iterations.start
    launching = iterations.launching_time
    is_launched_to_the_end = launching >= STARVED * took
    is_replayed = iterations.is_replayed.astype(bool)
    is_starved = ~is_replayed & (launching > 0) & is_launched_to_the_end
    beyond = took
    if "roofline" in iterations:
        beyond = took - iterations.roofline
    return beyond.clip(lower=0.0).where(is_starved, 0.0)


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
    times: pd.DataFrame, iterations: Iterations, spec: ModelSpec, dtype_bytes: int, peaks: Peaks
) -> pd.DataFrame:
    """Return where the time of `iterations` went, from the `times` (operation, seconds) taken in
    them: `operation`, `seconds`, `share` of the time, `roofline` (seconds of each operation alone,
    NaN where it has none) and `time_over_roofline`.
    """
    seconds = times.groupby("operation", sort=False).seconds.sum()
    busy = iterations.busy.sum()
    seconds[OUTSIDE] = busy - seconds.sum()
    least: defaultdict[str, float] = defaultdict(float)
    for work in cast(Iterable[Work[float]], iterations.itertuples()):
        bounds = operation_rooflines(spec, work, dtype_bytes, peaks)
        for operation, bound in bounds.items():
            least[operation] += bound
    rooflines_of = dict(PARTS)
    if "experts" in seconds:
        rooflines_of |= EXPERTS
    rooflines = []
    for name in seconds.index:
        operations = rooflines_of.get(name, (name,))
        roofline = sum(least[operation] for operation in operations)
        rooflines.append(float(roofline))
    table = pd.DataFrame({"operation": seconds.index, "seconds": seconds.to_numpy()})
    table["share"] = table.seconds / busy
    table["roofline"] = rooflines
    table["roofline"] = table.roofline.where(table.roofline > 0)
    return table.assign(time_over_roofline=table.seconds / table.roofline)

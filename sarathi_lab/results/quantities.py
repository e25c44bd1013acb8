"""The names that quantities of runs have, to tell a typing mistake before a sweep has run."""

from __future__ import annotations

import re

from sarathi_lab.results.metrics import COMPARED
from sarathi_lab.results.table import HEADINGS

# Those without a heading of their own, as docs/reference/metrics.md defines them.
WITHOUT_HEADING = frozenset(
    (
        *("output_throughput", "request_throughput", "num_requests", "num_iterations"),
        *("num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_chunk_tokens"),
        *("num_piggybacked_decodes", "decode_host_share", "num_decode_tokens", "num_draft_tokens"),
        *("prefix_hit_rate", "ttft", "tbt", "request_gap", "tpot", "latency"),
        *("normalised_latency", "scheduling_delay", "window_start", "window_end", "is_steady"),
        *("is_overloaded", "in_service_first", "in_service_last", "scheduling_delay_slope"),
        *("slot_use", "fitting_sequences"),
        *("stall_threshold", "stall_time", "stalled_share", "slo_met", "slo_attainment_ttft"),
        *("slo_attainment_tbt", "slo_attainment_tpot", "slo_attainment_scheduling_delay"),
        *("slo_decode_time", "slowdown", "slowdown_jain", "capacity_high", "capacity_trials"),
        *("closed_rate", "busy_time", "roofline", "predicted_roofline", "tile_efficiency"),
        *("device_idle_fraction", "host_time", "padding_fraction", "replayed_fraction"),
        *("bubble_time", "num_devices", "output_throughput_per_device"),
        *("request_throughput_per_device", "num_transfers", "transfer_bytes", "transfer_time"),
        *("blocks_used", "error/ttft", "error/tpot", "error/latency", "error/tbt"),
    )
)
# What follows a name: a mean or a quantile, of all requests or of a class of prompts.
ENDING = re.compile(r"(_(short|medium|long))?(_(mean|max|p[\d.]+))?$")


def is_quantity(name: str) -> bool:
    """Return whether a run may have the quantity `name`, or its ratio to a baseline."""
    quantity, _, _ = name.partition("_vs_")
    stem = ENDING.sub("", quantity)
    names = WITHOUT_HEADING.union(HEADINGS, COMPARED)
    return quantity in names or stem in names

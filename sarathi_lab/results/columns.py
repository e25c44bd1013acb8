"""How people see quantities: heading with unit, factor from the SI value, number format."""

from __future__ import annotations

HEADINGS: dict[str, tuple[str, float, str]] = {
    "duration": ("duration [s]", 1, ".2f"),
    "num_failed": ("failed requests", 1, ".0f"),
    "throughput": ("throughput [tokens/s]", 1, ".0f"),
    "decode_throughput": ("decode throughput [tokens/s]", 1, ".0f"),
    "decode_time_alone": ("decode alone [ms/token]", 1e3, ".2f"),
    "decode_time_marginal": ("decode piggybacked [ms/token]", 1e3, ".2f"),
    "decode_speedup": ("decode alone / piggybacked", 1, ".2f"),
    "kv_read_bytes": ("KV read [GB]", 1e-9, ".2f"),
    "kv_reread_factor": ("KV re-read factor", 1, ".2f"),
    "ttft_p50": ("TTFT P50 [ms]", 1e3, ".0f"),
    "ttft_p90": ("TTFT P90 [ms]", 1e3, ".0f"),
    "ttft_p99": ("TTFT P99 [ms]", 1e3, ".0f"),
    "tbt_p50": ("TBT P50 [ms]", 1e3, ".1f"),
    "tbt_p90": ("TBT P90 [ms]", 1e3, ".1f"),
    "tbt_max": ("TBT, longest [ms]", 1e3, ".1f"),
    "tbt_p99": ("TBT P99 [ms]", 1e3, ".1f"),
    "tpot_p50": ("TPOT P50 [ms]", 1e3, ".1f"),
    "tpot_p99": ("TPOT P99 [ms]", 1e3, ".1f"),
    "num_stalls": ("generation stalls", 1, ".0f"),
    "longest_gap": ("longest gap [ms]", 1e3, ".0f"),
    "slo_attainment": ("requests within the SLO", 1, ".1%"),
    "goodput": ("goodput [requests/s]", 1, ".3g"),
    "goodput_per_device": ("goodput a device [requests/s]", 1, ".3g"),
    "throughput_per_device": ("throughput a device [tokens/s]", 1, ".0f"),
    "instance_idle_fraction": ("idle, share of the engines' time", 1, ".1%"),
    "transfer_time_p50": ("transfer of a cache P50 [ms]", 1e3, ".2f"),
    "slowdown_class_ratio": ("slowdown, worst class / best", 1, ".2f"),
    "capacity": ("capacity [requests/s]", 1, ".3g"),
    "time_over_roofline": ("time / roofline", 1, ".2f"),
    "time_over_roofline_prefill": ("time / roofline, prefill-only", 1, ".2f"),
    "time_over_roofline_decode": ("time / roofline, decode-only", 1, ".2f"),
    "time_over_roofline_hybrid": ("time / roofline, hybrid", 1, ".2f"),
    "peak_flops_per_second": ("peak of products [TFLOP/s]", 1e-12, ".3g"),
    "peak_bytes_per_second": ("peak of memory [GB/s]", 1e-9, ".3g"),
    "bubble_fraction": ("bubbles, share of time", 1, ".3f"),
    "bubble_time_p50": ("bubbles a request P50 [s]", 1, ".2f"),
    "mfu": ("MFU", 1, ".2f"),
    "mbu": ("MBU", 1, ".2f"),
    "joules_per_token": ("energy [J/token]", 1, ".3g"),
    "joules_per_output_token": ("energy [J/output token]", 1, ".3g"),
    "acceptance_rate": ("drafts that were right", 1, ".1%"),
    "tokens_per_decode": ("tokens a decode and iteration", 1, ".2f"),
    "mean_watts": ("power of a device [W]", 1, ".0f"),
}


MILLISECONDS = 1e3  # the factor of times that people read in milliseconds


def heading(name: str) -> str:
    """Heading of a quantity, of its ratio to a baseline ("throughput_vs_orca"), or the name."""
    quantity, is_ratio, baseline = name.partition("_vs_")
    words = HEADINGS.get(quantity, (quantity, 1, ""))[0]
    return f"{words.split(' [')[0]} / {baseline}" if is_ratio else words


def factor(name: str) -> float:
    """What a stored SI value is multiplied by to be shown; 1 for ratios to a baseline."""
    return HEADINGS.get(name, (name, 1, ""))[1]

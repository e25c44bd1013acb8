"""What users of a server feel, from the ledger's requests; every name is defined in symbols in
METRICS.md.

All functions take the table of requests (`ledger.REQUEST_COLUMNS`), so a part of a run is a part of
its rows. Times are seconds. What no request can tell, such as the gaps of single tokens, is left
out of what they return.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.results.slo import Slo, Targets

QUANTILES = (0.5, 0.9, 0.99)
CLASS_QUANTILES = (0.5, 0.99)
CLASSES = ("short", "medium", "long")
STALL_STEPS = (1.0, 2.0, 4.0, 8.0, 16.0, np.inf)  # edges of the histogram, in thresholds
Floats = NDArray[np.float64]


def quantiles(
    name: str, values: pd.Series | Floats, chosen: Sequence[float] = QUANTILES
) -> dict[str, float]:
    """`<name>_p50` and so on, and the mean, of the values that are numbers; nothing of none."""
    array = np.asarray(values, dtype=float)
    array = array[~np.isnan(array)]
    if not len(array):
        return {}
    found = {f"{name}_p{int(q * 100)}": float(np.quantile(array, q)) for q in chosen}
    return {f"{name}_mean": float(array.mean()), **found}


def ttft(requests: pd.DataFrame) -> Floats:
    """Time to the first token, by request [R]."""
    return (requests.first_token_time - requests.arrival_time).to_numpy(dtype=float)


def gaps(requests: pd.DataFrame) -> Floats:
    """Times between tokens of all requests one after the other [sum of (tokens - 1)]."""
    return np.concatenate([np.empty(0), *(np.diff(times) for times in requests.token_times)])


def tpot(requests: pd.DataFrame) -> Floats:
    """Time per output token after the first [R]; not a number for a request of one token."""
    steps = (requests.output_len - 1).to_numpy(dtype=float)
    seconds = (requests.finish_time - requests.first_token_time).to_numpy(dtype=float)
    return np.divide(seconds, steps, out=np.full(len(requests), np.nan), where=steps > 0)


def whole_latency(requests: pd.DataFrame) -> Floats:
    """From arrival to the last token [R]."""
    return (requests.finish_time - requests.arrival_time).to_numpy(dtype=float)


def scheduling_delay(requests: pd.DataFrame) -> Floats:
    """From arrival to the first batch [R]."""
    return (requests.first_scheduled_time - requests.arrival_time).to_numpy(dtype=float)


# The times that objectives bound.
TIMES = {"ttft": ttft, "tbt": gaps, "tpot": tpot, "scheduling_delay": scheduling_delay}


def latency(requests: pd.DataFrame) -> dict[str, float]:
    """Quantiles of the times that users wait."""
    whole = whole_latency(requests)
    times = {
        "ttft": ttft(requests),
        "tbt": gaps(requests),
        "tpot": tpot(requests),
        "latency": whole,
        "normalised_latency": whole / requests.output_len.to_numpy(dtype=float),
        "scheduling_delay": scheduling_delay(requests),
    }
    return {key: q for name, own in times.items() for key, q in quantiles(name, own).items()}


def serving_summary(
    requests: pd.DataFrame, seconds: float, targets: Targets, alone: Floats | None = None
) -> dict[str, float]:
    """Stalls, latency by class of prompts, goodput and fairness of `requests`, which were served in
    `seconds`.

    `alone` is the time that each would take on an idle engine [R], None where nobody knows.
    """
    if requests.empty:
        return {}
    classes = prompt_classes(requests, targets.prompt_classes)
    summary = {**stalls(requests, targets.stall), **by_class(requests, classes)}
    summary |= goodput(requests, seconds, targets.slo, classes)
    return summary | (fairness(requests, alone, classes) if alone is not None else {})


# -- generation stalls -----------------------------------------------------------------------------


def stalls(requests: pd.DataFrame, threshold: float) -> dict[str, float]:
    """Gaps above `threshold` seconds, and the longest of all (Sarathi-Serve, Fig 1a)."""
    longest = np.array([np.diff(times).max() for times in requests.token_times if len(times) > 1])
    if not len(longest):
        return {}
    between = gaps(requests)
    above = between[between > threshold]
    return {
        "stall_threshold": threshold,
        "num_stalls": float(len(above)),
        "stall_time": float(above.sum()),
        "stalled_share": float((longest > threshold).sum() / len(requests)),
        "longest_gap": float(longest.max()),
    }


def stall_histogram(requests: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """Stalls by length: `count` of gaps in (low, high] seconds, in doubling steps."""
    edges = threshold * np.array(STALL_STEPS)
    between = gaps(requests)
    pairs = itertools.pairwise(edges)
    counts = [int(((between > low) & (between <= high)).sum()) for low, high in pairs]
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:], "count": counts})


# -- classes of prompts ----------------------------------------------------------------------------


def prompt_classes(requests: pd.DataFrame, bounds: Sequence[int]) -> NDArray[np.str_]:
    """The class of each request [R]: "short" below the first bound (tokens), "long" from the second
    on.
    """
    return np.array(CLASSES)[np.searchsorted(bounds, requests.prompt_len, side="right")]


def by_class(requests: pd.DataFrame, classes: NDArray[np.str_]) -> dict[str, float]:
    """Latencies of each class that has requests; nothing if all are of one."""
    summary: dict[str, float] = {}
    for name, is_own in _masks(classes).items():
        own = requests[is_own]
        summary[f"num_requests_{name}"] = float(len(own))
        for quantity in ("ttft", "tbt", "tpot"):
            summary |= quantiles(f"{quantity}_{name}", TIMES[quantity](own), CLASS_QUANTILES)
    return summary


def _masks(classes: NDArray[np.str_]) -> dict[str, NDArray[np.bool_]]:
    """Which requests [R] are of each class that has some; none if all are of one."""
    masks = {name: classes == name for name in CLASSES if (classes == name).any()}
    return masks if len(masks) > 1 else {}


# -- service level objectives ----------------------------------------------------------------------


def request_values(requests: pd.DataFrame, slo: Slo) -> dict[str, Floats]:
    """By bound that `slo` has for single requests what each is held against [R]; a gap stands for
    those of its request by the objective's quantile of them. Not a number where a request has no
    such time.
    """
    found = {name: TIMES[name](requests) for name in ("ttft", "tpot") if name in slo.bounds}
    if slo.tbt is not None:
        between = [np.diff(times) for times in requests.token_times]
        found["tbt"] = np.array(
            [np.quantile(own, slo.quantile) if len(own) else np.nan for own in between]
        )
    return found


def is_good(requests: pd.DataFrame, slo: Slo) -> dict[str, NDArray[np.bool_]]:
    """By bound whether each request meets it [R], and under "all" whether it meets all."""
    values = request_values(requests, slo)
    met = {name: np.isnan(own) | (own <= slo.bounds[name]) for name, own in values.items()}
    return {**met, "all": np.all([np.ones(len(requests), dtype=bool), *met.values()], axis=0)}


def run_values(requests: pd.DataFrame, slo: Slo) -> dict[str, float]:
    """The run's quantile by bound of `slo`; of the scheduling delay the median."""
    found = {}
    for name in slo.bounds:
        own = TIMES[name](requests)
        if len(own := own[~np.isnan(own)]):
            quantile = 0.5 if name == "scheduling_delay" else slo.quantile
            found[name] = float(np.quantile(own, quantile))
    return found


def is_met(requests: pd.DataFrame, slo: Slo) -> bool:
    """Whether the run as a whole meets every bound."""
    return all(value <= slo.bounds[name] for name, value in run_values(requests, slo).items())


def goodput(
    requests: pd.DataFrame, seconds: float, slo: Slo, classes: NDArray[np.str_]
) -> dict[str, float]:
    """Share and rate of the requests within every bound, shares by bound and by class."""
    if not slo.bounds:
        return {}
    met = is_good(requests, slo)
    good = met.pop("all")
    parts = {**met, **{name: good[is_own] for name, is_own in _masks(classes).items()}}
    return {
        "slo_met": float(is_met(requests, slo)),
        "slo_attainment": float(good.mean()),
        "goodput": float(good.sum() / seconds),
        **{f"slo_attainment_{name}": float(own.mean()) for name, own in parts.items()},
    }


# -- fairness --------------------------------------------------------------------------------------


def jain_index(values: Floats) -> float:
    """(Σ x)² / (n Σ x²): 1 if all are alike, 1/n at worst (Jain et al., DEC-TR-301, 1984)."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def fairness(requests: pd.DataFrame, alone: Floats, classes: NDArray[np.str_]) -> dict[str, float]:
    """Slowdowns (latency over `alone` [R]), Jain's index of them, worst class over best."""
    slowdown = whole_latency(requests) / alone
    summary = {**quantiles("slowdown", slowdown), "slowdown_jain": jain_index(slowdown)}
    means = {name: float(slowdown[is_own].mean()) for name, is_own in _masks(classes).items()}
    summary |= {f"slowdown_{name}_mean": mean for name, mean in means.items()}
    if means:
        summary["slowdown_class_ratio"] = max(means.values()) / min(means.values())
    return summary

"""Objectives (config group `slo`); latency, stalls, goodput and fairness from the ledger's
requests; metrics.md has the symbols.

All functions take the table of requests (`ledger.REQUEST_COLUMNS`) or some of its rows. Times are
seconds. Undefined quantities, such as gaps of single tokens, are left out of the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.checked import check_fields, number, refuse_unread, whole
from sarathi_lab.config.errors import UserError, require_int

QUANTILES = (0.5, 0.9, 0.99)
CLASS_QUANTILES = (0.5, 0.99)
CLASSES = ("short", "medium", "long")
BOUNDS = ("ttft", "tbt", "tpot", "scheduling_delay")
QUANTILE_BOUNDS = {"ttft", "tbt", "tpot"}  # of the scheduling delay the median is bounded
DECODE_BATCH, DECODE_CONTEXT = 32, 4096  # of the decode iteration that a relative bound refers to
SECONDS = "use seconds, or null for no bound"
SHARE = "use a share of the tokens or requests, such as 0.99"
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Bounds in seconds, or None, of the `quantile` of time to first token (`ttft`), between tokens
    (`tbt`) and per output token (`tpot`), and of the median `scheduling_delay`.

    With a `tbt_factor` the `tbt` bound is that multiple of a decode-only iteration of
    `decode_batch` sequences at `decode_context` tokens on the device (Sarathi-Serve, section 5.1:
    5 strict, 25 relaxed, of 32 at 4K), fewer where the run's are. Raises UserError.
    """

    name: str
    ttft: float | None = number(None, above=0, fix=SECONDS)
    tbt: float | None = number(None, above=0, fix=SECONDS)
    tpot: float | None = number(None, above=0, fix=SECONDS)
    scheduling_delay: float | None = number(None, above=0, fix=SECONDS)
    quantile: float = number(0.99, above=0, fix=SHARE)
    tbt_factor: float | None = number(None, above=0, fix="use decode iterations such as 5")
    decode_batch: int = whole(DECODE_BATCH, minimum=1, fix="use a number of sequences such as 32")
    decode_context: int = whole(
        DECODE_CONTEXT, minimum=2, fix="use a number of tokens such as 4096"
    )

    def __post_init__(self) -> None:
        check_fields(self, "slo.")
        if self.quantile > 1:
            raise UserError(f"slo.quantile={self.quantile} exceeds 1; {SHARE}")
        if self.tbt_factor is not None and self.tbt is not None:
            raise UserError(f"slo.tbt={self.tbt} and slo.tbt_factor={self.tbt_factor}: drop one")
        if self.tbt_factor is None:
            why = " without slo.tbt_factor; add slo.tbt_factor=5, or drop it"
            refuse_unread(self, ("decode_batch", "decode_context"), why, "slo.")
        if not self.is_relative and not self.bounds.keys() & QUANTILE_BOUNDS:
            why = " without a bound of a quantile; add slo.ttft=2 or slo.tbt=0.05, or drop it"
            refuse_unread(self, ("quantile",), why, "slo.")

    @property
    def bounds(self) -> Mapping[str, float]:
        """Return the bounds that are set, by name."""
        return {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}

    def quantile_of(self, bound: str) -> float:
        """Return the quantile that a bound is for."""
        return self.quantile if bound in QUANTILE_BOUNDS else 0.5

    def quantity_of(self, bound: str) -> str:
        """Return the name of the quantity that a bound is for, such as "tbt_p99"."""
        return f"{bound}_p{100 * self.quantile_of(bound):g}"

    @property
    def is_relative(self) -> bool:
        """Return whether a bound depends on the time of a decode iteration."""
        return self.tbt_factor is not None

    def resolved(self, decode_seconds: float | None) -> Slo:
        """Return the objective with its relative bound in seconds, if that is known."""
        if self.tbt_factor is None or decode_seconds is None:
            return self
        return replace(
            self,
            tbt=self.tbt_factor * decode_seconds,
            tbt_factor=None,
            decode_batch=DECODE_BATCH,
            decode_context=DECODE_CONTEXT,
        )

    def describe(self) -> str:
        """Describe it, such as "P99 TBT 100 ms, P50 scheduling delay 2000 ms"."""
        percent = f"P{100 * self.quantile:g}"
        words = {name: f"{percent} {name.upper()}" for name in ("ttft", "tbt", "tpot")}
        words["scheduling_delay"] = "P50 scheduling delay"
        parts = [f"{words[name]} {1e3 * bound:.4g} ms" for name, bound in self.bounds.items()]
        if self.tbt_factor is not None:
            parts.insert(0, f"{words['tbt']} {self.tbt_factor:g} decode iterations")
        return ", ".join(parts) or "no bounds"


@dataclass(frozen=True)
class Targets:
    """Targets of a run's latencies: the objective, the gap [s] that counts as a generation stall,
    and the prompt lengths [tokens] from which prompts are medium and long. Raises UserError.
    """

    slo: Slo = field(default_factory=lambda: Slo(name="none"))
    stall: float = number(0.2, above=0, fix="use seconds such as 0.2")
    prompt_classes: Sequence[int] = (512, 2048)

    def __post_init__(self) -> None:
        check_fields(self)
        fix = "use the tokens from which prompts are of medium length, and long, such as [512,2048]"
        bounds: Any = self.prompt_classes
        if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
            raise UserError(f"prompt_classes={bounds} are not two lengths; {fix}")
        for bound in bounds:
            require_int("prompt_classes", bound, 1, fix)
        if bounds[0] >= bounds[1]:
            raise UserError(f"prompt_classes={list(bounds)} do not ascend; {fix}")


def quantiles(
    name: str, values: pd.Series | Floats, chosen: Sequence[float] = QUANTILES
) -> dict[str, float]:
    """Return `<name>_mean` and `<name>_p50` and so on of the values that are not NaN."""
    array = np.asarray(values, dtype=float)
    array = array[~np.isnan(array)]
    if not len(array):
        return {}
    found = {f"{name}_p{int(q * 100)}": float(np.quantile(array, q)) for q in chosen}
    return {f"{name}_mean": float(array.mean()), **found}


def gaps(requests: pd.DataFrame) -> Floats:
    """Return the times between tokens of all requests [sum of (tokens - 1)]."""
    return np.concatenate([np.empty(0), *(np.diff(times) for times in requests.token_times)])


def request_gaps(requests: pd.DataFrame) -> Floats:
    """Return the longest time between tokens of each request [R]; NaN for one token.

    A server that lets decodes wait for prompts has few gaps of many seconds: a quantile over all
    gaps hides them, as a request has hundreds of tokens, and its user waits once.
    """
    longest = [np.diff(times).max() if len(times) > 1 else np.nan for times in requests.token_times]
    return np.array(longest, dtype=float)


def waits(requests: pd.DataFrame) -> dict[str, Floats]:
    """Return latencies by name and request [R], except `tbt`, which are `gaps`. A request of one
    token has no time per output token (`tpot`) and no gap (`request_gap`): NaN.
    """
    names = ["arrival_time", "first_scheduled_time", "first_token_time", "finish_time"]
    arrival, start, first, finish = requests[names].to_numpy(dtype=float).T
    output_len = requests.output_len.to_numpy(dtype=float)
    return {
        "ttft": first - arrival,
        "tbt": gaps(requests),
        "request_gap": request_gaps(requests),
        "tpot": (finish - first) / np.where(output_len > 1, output_len - 1, np.nan),
        "latency": finish - arrival,
        "normalised_latency": (finish - arrival) / output_len,
        "scheduling_delay": start - arrival,
    }


def latency(requests: pd.DataFrame) -> dict[str, float]:
    """Return mean and quantiles of all latencies."""
    summary: dict[str, float] = {}
    for name, seconds in waits(requests).items():
        summary |= quantiles(name, seconds)
    return summary


def serving_summary(
    requests: pd.DataFrame, seconds: float, targets: Targets, alone: Floats | None = None
) -> dict[str, float]:
    """Return stalls, latency by prompt class, goodput and fairness of `requests` served in
    `seconds`; `alone` is the time of each on an idle engine [R], None if unknown.
    """
    if requests.empty:
        return {}
    classes = prompt_classes(requests, targets.prompt_classes)
    return {
        **stalls(requests, targets.stall),
        **by_class(requests, classes),
        **goodput(requests, seconds, targets.slo, classes),
        **(fairness(requests, alone, classes) if alone is not None else {}),
    }


def stalls(requests: pd.DataFrame, threshold: float) -> dict[str, float]:
    """Return gaps above `threshold` seconds and the longest gap (Sarathi-Serve, Fig 1a)."""
    between = gaps(requests)
    if not len(between):
        return {}
    above = between[between > threshold]
    stalled = [(np.diff(times) > threshold).any() for times in requests.token_times]
    return {
        "stall_threshold": threshold,
        "num_stalls": float(len(above)),
        "stall_time": float(above.sum()),
        "stalled_share": float(np.mean(stalled)),
        "longest_gap": float(between.max()),
    }


def prompt_classes(requests: pd.DataFrame, bounds: Sequence[int]) -> NDArray[np.str_]:
    """Return the class of each request [R] by the bounds [tokens] where medium and long begin."""
    return np.array(CLASSES)[np.searchsorted(bounds, requests.prompt_len, side="right")]


def by_class(requests: pd.DataFrame, classes: NDArray[np.str_]) -> dict[str, float]:
    """Return latencies of each class present; empty if all requests are of one."""
    summary: dict[str, float] = {}
    for name, is_in in _masks(classes).items():
        times = waits(requests[is_in])
        summary[f"num_requests_{name}"] = float(is_in.sum())
        for quantity in ("ttft", "tbt", "tpot"):
            summary |= quantiles(f"{quantity}_{name}", times[quantity], CLASS_QUANTILES)
    return summary


def _masks(classes: NDArray[np.str_]) -> dict[str, NDArray[np.bool_]]:
    """Return a mask [R] for each class present; empty if all requests are of one."""
    masks = {name: classes == name for name in CLASSES if (classes == name).any()}
    return masks if len(masks) > 1 else {}


def is_good(requests: pd.DataFrame, slo: Slo) -> dict[str, NDArray[np.bool_]]:
    """Return by bound whether each request meets it [R] (one without such a time does), and under
    "all" whether it meets every bound. Gaps of a request count by the objective's quantile.
    """
    values = waits(requests)
    if slo.tbt is not None:
        gaps_of = [np.diff(times) for times in requests.token_times]
        ends = [np.quantile(one, slo.quantile) if len(one) else np.nan for one in gaps_of]
        values["tbt"] = np.array(ends)
    met = {name: ~(values[name] > bound) for name, bound in slo.bounds.items()}
    return {**met, "all": np.all([np.ones(len(requests), dtype=bool), *met.values()], axis=0)}


def bounded(requests: pd.DataFrame, slo: Slo) -> dict[str, float]:
    """Return the run's quantile that each bound of `slo` is for (seconds), by the bound's name; NaN
    where no request has such a time, as outputs of one token have none between tokens.
    """
    times = waits(requests)
    found = {}
    for name in slo.bounds:
        values = times[name][~np.isnan(times[name])]
        found[name] = float(np.quantile(values, slo.quantile_of(name))) if len(values) else math.nan
    return found


def is_met(requests: pd.DataFrame, slo: Slo) -> bool:
    """Return whether the run's quantiles meet every bound; those that are NaN do."""
    return all(not value > slo.bounds[name] for name, value in bounded(requests, slo).items())


def goodput(
    requests: pd.DataFrame, seconds: float, slo: Slo, classes: NDArray[np.str_]
) -> dict[str, float]:
    """Return share and rate of the requests within every bound, and shares by bound and class."""
    if not slo.bounds:
        return {}
    met = is_good(requests, slo)
    good = met.pop("all")
    parts = {**met, **{name: good[is_in] for name, is_in in _masks(classes).items()}}
    return {
        "slo_met": float(is_met(requests, slo)),
        "slo_attainment": float(good.mean()),
        "goodput": float(good.sum() / seconds),
        **{f"slo_attainment_{name}": float(part.mean()) for name, part in parts.items()},
    }


def jain_index(values: Floats) -> float:
    """Return (Σ x)² / (n Σ x²): 1 if all are equal, at least 1/n (Jain et al., 1984)."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def fairness(requests: pd.DataFrame, alone: Floats, classes: NDArray[np.str_]) -> dict[str, float]:
    """Return slowdowns (latency over `alone` [R]), their Jain index, worst class over best."""
    slowdown = waits(requests)["latency"] / alone
    means = {name: float(slowdown[is_in].mean()) for name, is_in in _masks(classes).items()}
    return {
        **quantiles("slowdown", slowdown),
        "slowdown_jain": jain_index(slowdown),
        **{f"slowdown_{name}_mean": mean for name, mean in means.items()},
        **({"slowdown_class_ratio": max(means.values()) / min(means.values())} if means else {}),
    }

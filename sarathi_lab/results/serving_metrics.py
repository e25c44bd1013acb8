"""Objectives (config group `slo`); latency, stalls, goodput and fairness from the ledger's
requests; metrics.md has the symbols.

All functions take the table of requests (`ledger.REQUEST_COLUMNS`) or some of its rows. Times are
seconds. Undefined quantities, such as gaps of single tokens, are left out of the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.checked import check_fields, number, refuse_unread, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.results.table import Quantities, Requests

QUANTILES = (0.5, 0.9, 0.99)
CLASS_QUANTILES = (0.5, 0.99)
CLASSES = ("short", "medium", "long")
QUANTILE_BOUNDS = {"ttft", "tbt", "tpot"}  # of the scheduling delay the median is bounded
# Of the decode iteration that a relative bound refers to.
DECODE_BATCH = 32  # sequences
DECODE_CONTEXT = 4096  # tokens
SECONDS = "use seconds, or null for no bound"
SHARE = "use a share of the tokens or requests, such as 0.99"
TWO_LENGTHS = "use the tokens from which prompts are of medium length, and long, such as [512,2048]"
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]  # of requests [R]
Classes = NDArray[np.str_]  # of requests, by the lengths of their prompts [R]


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
            both = f"slo.tbt={self.tbt} and slo.tbt_factor={self.tbt_factor}"
            raise UserError(f"{both}: drop one")
        if self.is_relative:
            return
        reason = " without slo.tbt_factor; add slo.tbt_factor=5, or drop it"
        refuse_unread(self, ("decode_batch", "decode_context"), reason, "slo.")
        if not self.bounds.keys() & QUANTILE_BOUNDS:
            reason = " without a bound of a quantile; add slo.ttft=2 or slo.tbt=0.05, or drop it"
            refuse_unread(self, ("quantile",), reason, "slo.")

    @property
    def bounds(self) -> Mapping[str, float]:
        """Return the bounds that are set, by name."""
        bounds = {
            "ttft": self.ttft,
            "tbt": self.tbt,
            "tpot": self.tpot,
            "scheduling_delay": self.scheduling_delay,
        }
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def quantile_of(self, bound: str) -> float:
        """Return the quantile that a bound is for."""
        if bound in QUANTILE_BOUNDS:
            return self.quantile
        return 0.5

    def quantity_of(self, bound: str) -> str:
        """Return the name of the quantity that a bound is for, such as "tbt_p99"."""
        percent = 100 * self.quantile_of(bound)
        return f"{bound}_p{percent:g}"

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
        percentile = f"P{100 * self.quantile:g}"
        bounds = []
        if self.tbt_factor is not None:
            bounds.append(f"{percentile} TBT {self.tbt_factor:g} decode iterations")
        for name in self.bounds:
            label = f"{percentile} {name.upper()}"
            if name == "scheduling_delay":
                label = "P50 scheduling delay"
            bound = self.bound_in_ms(name)
            bounds.append(f"{label} {bound} ms")
        return ", ".join(bounds) or "no bounds"

    def bound_in_ms(self, name: str) -> str:
        """Return a bound in milliseconds, as text without an exponent."""
        milliseconds = 1e3 * self.bounds[name]
        if milliseconds >= 1e3:
            return f"{milliseconds:.0f}"
        # Bounds of `tbt_factor` have any number of digits, of which four are shown.
        return f"{milliseconds:.4g}"


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
        bounds: object = self.prompt_classes
        is_list = isinstance(bounds, Sequence) and not isinstance(bounds, str)
        if not is_list or len(self.prompt_classes) != 2:
            raise UserError(f"prompt_classes={bounds} are not two lengths; {TWO_LENGTHS}")
        for bound in self.prompt_classes:
            require_int("prompt_classes", bound, 1, TWO_LENGTHS)
        medium, long = self.prompt_classes
        if medium >= long:
            stated = list(self.prompt_classes)
            raise UserError(f"prompt_classes={stated} do not ascend; {TWO_LENGTHS}")


def quantiles(
    name: str,
    values: pd.Series | Floats,
    chosen: Sequence[float] = QUANTILES,
) -> Quantities:
    """Return `<name>_mean` and `<name>_p50` and so on of the values that are not NaN."""
    array = np.asarray(values, dtype=float)
    is_defined = ~np.isnan(array)
    defined = array[is_defined]
    if not len(defined):
        return {}
    summary = {f"{name}_mean": float(defined.mean())}
    for share in chosen:
        percent = int(share * 100)
        quantile = np.quantile(defined, share)
        summary[f"{name}_p{percent}"] = float(quantile)
    return summary


def _gaps_of_each(requests: Requests) -> list[Floats]:
    return [np.diff(times) for times in requests.token_times]


def gaps(requests: Requests) -> Floats:
    """Return the times between tokens of all requests [sum of (tokens - 1)]."""
    return _together(_gaps_of_each(requests))


def _together(gaps_of_each: Sequence[Floats]) -> Floats:
    # `concatenate` refuses none at all.
    return np.concatenate([np.empty(0), *gaps_of_each])


def request_gaps(requests: Requests) -> Floats:
    """Return the longest time between tokens of each request [R]; NaN for one token.

    A server that lets decodes wait for prompts has few gaps of many seconds: a quantile over all
    gaps hides them, as a request has hundreds of tokens, and its user waits once.
    """
    return _longest_of_each(_gaps_of_each(requests))


def _longest_of_each(gaps_of_each: Sequence[Floats]) -> Floats:
    longest = np.full(len(gaps_of_each), np.nan)
    for row, between in enumerate(gaps_of_each):
        if len(between):
            longest[row] = between.max()
    return longest


def waits(requests: Requests) -> dict[str, Floats]:
    """Return latencies by name and request [R], except `tbt`, which are `gaps`. A request of one
    token has no time per output token (`tpot`) and no gap (`request_gap`): NaN.
    """
    arrival = _column(requests, "arrival_time")
    start = _column(requests, "first_scheduled_time")
    first = _column(requests, "first_token_time")
    finish = _column(requests, "finish_time")
    output_len = _column(requests, "output_len")
    # The first token is the prompt's: the others are what decodes take.
    num_decoded = output_len - 1
    num_decoded[num_decoded <= 0] = np.nan
    gaps_of_each = _gaps_of_each(requests)
    return {
        "ttft": first - arrival,
        "tbt": _together(gaps_of_each),
        "request_gap": _longest_of_each(gaps_of_each),
        "tpot": (finish - first) / num_decoded,
        "latency": finish - arrival,
        "normalised_latency": (finish - arrival) / output_len,
        "scheduling_delay": start - arrival,
    }


def _column(requests: Requests, name: str) -> Floats:
    return requests[name].to_numpy(dtype=float)


def latency(requests: Requests) -> Quantities:
    """Return mean and quantiles of all latencies."""
    summary: Quantities = {}
    for name, seconds in waits(requests).items():
        summary |= quantiles(name, seconds)
    return summary


def serving_summary(
    requests: Requests,
    seconds: float,
    targets: Targets,
    alone: Floats | None = None,
) -> Quantities:
    """Return stalls, latency by prompt class, goodput and fairness of `requests` served in
    `seconds`; `alone` is the time of each on an idle engine [R], None if unknown.
    """
    if requests.empty:
        return {}
    classes = prompt_classes(requests, targets.prompt_classes)
    summary = {
        **stalls(requests, targets.stall),
        **by_class(requests, classes),
        **goodput(requests, seconds, targets.slo, classes),
    }
    if alone is not None:
        summary |= fairness(requests, alone, classes)
    return summary


def stalls(requests: Requests, threshold: float) -> Quantities:
    """Return gaps above `threshold` seconds and the longest gap (Sarathi-Serve, Fig 1a)."""
    between = gaps(requests)
    if not len(between):
        return {}
    above = between[between > threshold]
    longest_gaps = request_gaps(requests)
    is_stalled = longest_gaps > threshold  # not of NaN: a request of one token
    return {
        "stall_threshold": threshold,
        "num_stalls": float(len(above)),
        "stall_time": float(above.sum()),
        "stalled_share": float(is_stalled.mean()),
        "longest_gap": float(between.max()),
    }


def prompt_classes(requests: Requests, bounds: Sequence[int]) -> Classes:
    """Return the class of each request [R] by the bounds [tokens] where medium and long begin."""
    names = np.array(CLASSES)
    numbers = np.searchsorted(bounds, requests.prompt_len, side="right")
    return names[numbers]


def by_class(requests: Requests, classes: Classes) -> Quantities:
    """Return latencies of each class present; empty if all requests are of one."""
    summary: Quantities = {}
    for name, is_in in _masks(classes).items():
        of_class = requests[is_in]
        times = waits(of_class)
        summary[f"num_requests_{name}"] = float(len(of_class))
        for quantity in ("ttft", "tbt", "tpot"):
            name_of_class = f"{quantity}_{name}"
            summary |= quantiles(name_of_class, times[quantity], CLASS_QUANTILES)
    return summary


def _masks(classes: Classes) -> dict[str, Mask]:
    """Return a mask [R] for each class present; empty if all requests are of one."""
    masks = {}
    for name in CLASSES:
        is_in = classes == name
        if is_in.any():
            masks[name] = is_in
    if len(masks) == 1:
        return {}
    return masks


def is_good(requests: Requests, slo: Slo) -> dict[str, Mask]:
    """Return by bound whether each request meets it [R] (one without such a time does), and under
    "all" whether it meets every bound. Gaps of a request count by the objective's quantile.
    """
    values = waits(requests)
    if slo.tbt is not None:
        # Of a request its quantile counts, not each gap: one late token fails no answer.
        values["tbt"] = _gap_quantiles(requests, slo.quantile)
    met = {}
    meets_all = np.ones(len(requests), dtype=bool)
    for name, bound in slo.bounds.items():
        # Not `<=`: a request without such a time has NaN, and is within every bound.
        met[name] = ~(values[name] > bound)
        meets_all &= met[name]
    return {**met, "all": meets_all}


def _gap_quantiles(requests: Requests, share: float) -> Floats:
    """Return a quantile of the times between tokens of each request [R]; NaN for one token."""
    quantile_of_each = np.full(len(requests), np.nan)
    for row, between in enumerate(_gaps_of_each(requests)):
        if len(between):
            quantile_of_each[row] = np.quantile(between, share)
    return quantile_of_each


def bounded(requests: Requests, slo: Slo) -> Quantities:
    """Return the quantile of the run's times that each bound of `slo` limits [s], by the bound's
    name. NaN where no request has such a time: outputs of one token have no time between tokens.
    """
    return bounded_of(waits(requests), slo)


def bounded_of(times: Mapping[str, Floats], slo: Slo) -> Quantities:
    """Return the quantile that each bound is for, by its name, from a run's `waits` (`times`)."""
    bounded_quantiles = {}
    for name in slo.bounds:
        seconds = times[name]
        is_defined = ~np.isnan(seconds)
        defined = seconds[is_defined]
        bounded_quantiles[name] = math.nan
        if len(defined):
            share = slo.quantile_of(name)
            bounded_quantiles[name] = float(np.quantile(defined, share))
    return bounded_quantiles


def is_met(requests: Requests, slo: Slo) -> bool:
    """Return whether the run's quantiles meet every bound; those that are NaN do."""
    values = bounded(requests, slo)
    # Not `all(<=)`, which NaN would fail.
    exceeds = [values[name] > bound for name, bound in slo.bounds.items()]
    return not any(exceeds)


def goodput(
    requests: Requests,
    seconds: float,
    slo: Slo,
    classes: Classes,
) -> Quantities:
    """Return share and rate of the requests within every bound, and shares by bound and class."""
    if not slo.bounds:
        return {}
    met = is_good(requests, slo)
    meets_all = met.pop("all")
    for name, is_in in _masks(classes).items():
        met[name] = meets_all[is_in]
    summary = {
        "slo_met": float(is_met(requests, slo)),
        "slo_attainment": float(meets_all.mean()),
        "goodput": float(meets_all.sum() / seconds),
    }
    for name, met_by in met.items():
        summary[f"slo_attainment_{name}"] = float(met_by.mean())
    return summary


def jain_index(values: Floats) -> float:
    """Return (Σ x)² / (n Σ x²): 1 if all are equal, at least 1/n (Jain et al., 1984)."""
    number = len(values)
    square_of_sum = values.sum() ** 2
    squares = values**2
    largest = number * squares.sum()
    return float(square_of_sum / largest)


def fairness(requests: Requests, alone: Floats, classes: Classes) -> Quantities:
    """Return slowdowns (latency over `alone` [R]), their Jain index, worst class over best."""
    # A long request waits longer by itself: fairness is of times over those on an idle engine.
    times = waits(requests)
    slowdown = times["latency"] / alone
    summary = quantiles("slowdown", slowdown)
    summary["slowdown_jain"] = jain_index(slowdown)
    means = []
    for name, is_in in _masks(classes).items():
        mean = float(slowdown[is_in].mean())
        summary[f"slowdown_{name}_mean"] = mean
        means.append(mean)
    if means:
        summary["slowdown_class_ratio"] = max(means) / min(means)
    return summary

"""What a sweep comes to: for each workload its best run beside the reference, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from sarathi_lab.config.console import amount
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.intervals import (
    FEWEST_PAIRS,
    LEVEL,
    ends_of_median,
    level_of,
    samples_for,
)
from sarathi_lab.results.table import display_unit, less_is_better

# What is judged where all requests wait from the start, and where they arrive over time.
CLOSED_VERDICTS = ("throughput", "tbt_p99")
WAIT_VERDICTS = ("ttft_p50", "ttft_p99", "tbt_p99", "request_gap_p99")
LOADED_VERDICTS = (*WAIT_VERDICTS, "slo_attainment", "goodput")
# What of runs that are not steady is judged: all else depends on their length.
OF_ANY_LENGTH = ("throughput",)
MOST = 4  # sentences
# Ratios so near to 1 are printed as 1.00 and mean nothing to anybody who serves models.
LEAST_DIFFERENCE = 0.005
ONE_DRAW = (
    f"These are single draws of arrivals, of which a P99 is one or two requests; "
    f"seed=range({FEWEST_PAIRS}) shows what they decide."
)


def arrive_over_time(runs: pd.DataFrame) -> bool:
    """Return whether requests arrive over time; False for runs that do not record it."""
    if "arrives_over_time" in runs and runs["arrives_over_time"].notna().all():
        return bool(runs["arrives_over_time"].any())
    if "workload.arrivals" not in runs:  # of an older version
        return False
    return bool(runs["workload.arrivals"].map(analysis.text).ne("closed").any())


def conclusion(runs: pd.DataFrame) -> list[str]:
    """Compare the best run of each workload with the reference: what is better, worse, undecided.

    The best has the most tokens/s; of requests that arrive over time `_order_over_time` states it.
    As it is chosen among several, its intervals are as wide as all of them need at once. Where it
    or the reference is not steady, waits are not compared. More than `MOST` workloads leave the
    best and the worst.
    """
    base = analysis.reference(runs)
    is_over_time = arrive_over_time(runs)
    wanted = LOADED_VERDICTS if is_over_time else CLOSED_VERDICTS
    names = [name for name in wanted if name in runs and runs[name].notna().any()]
    if base is None or not names:
        return []
    runs = runs.reset_index(drop=True)
    judged = list(dict.fromkeys([*names, *(name for name in OF_ANY_LENGTH if name in runs)]))
    for name in judged:
        runs = analysis.relative(runs, name, base)
    further = [] if is_over_time else analysis.references(runs)[1:]
    for name in further:
        runs = analysis.relative(runs, "throughput", name)
    swept, noise = analysis.without_baselines(runs), analysis.noise(runs)
    others, level = swept[swept.policy != base], f"{names[0]}_vs_{base}"
    cases = [name for name in analysis.same_work(runs) if name not in analysis.SAMPLES]
    settings = list(dict.fromkeys(["policy", *analysis.varied(runs)]))
    groups = others.groupby(analysis.group_keys(others, cases), sort=False)
    best = [_best(group, settings, names) for _, group in groups]
    if len(best) > MOST:
        ordered = sorted(best, key=lambda found: found[0][level].median())
        best = [ordered[0], ordered[-1]]
    references = runs[runs.policy == base]
    sentences = []
    for found, num_settings in best:
        is_same = analysis.group_keys(references, cases).isin(analysis.group_keys(found, cases))
        reference = references[is_same]
        unsteady = _unsteady_in_words(found, reference, base)
        quantities = [name for name in OF_ANY_LENGTH if name in runs] if unsteady else names
        sentence = _sentence(
            found, settings, quantities, base, reference, num_settings, noise, unsteady
        )
        sentences.append(sentence + _gains(found, further, noise))
    if len(best) < len(groups):
        sentences.append(f"The other {len(groups) - 2} of {len(groups)} workloads lie between.")
    if not sentences:
        return []
    is_drawn_once = is_over_time and all(len(found) == 1 for found, _ in best)
    remarks = [ONE_DRAW] if is_drawn_once and noise == analysis.DETERMINISTIC else []
    return ["\n" + sentences[0], *sentences[1:], *remarks]


def _best(
    group: pd.DataFrame, settings: Sequence[str], names: Sequence[str]
) -> tuple[pd.DataFrame, int]:
    """Return the runs of the best settings, and among how many they were chosen."""
    keys = analysis.group_keys(group, settings)
    typical = group.groupby(keys, sort=False)[_judged_by(group, names)].median()
    if "throughput" in names:
        order = pd.DataFrame({"throughput": -typical["throughput"]})
    else:
        order = _order_over_time(typical, analysis.are_steady(group, settings))
    first = order.sort_values([*map(str, order)], kind="stable").index[0]
    return group[keys == first], len(typical)


def _judged_by(group: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*names, *(name for name in OF_ANY_LENGTH if name in group)]))


def _order_over_time(typical: pd.DataFrame, is_steady: pd.Series) -> pd.DataFrame:
    """Return columns by which the best of `typical` (medians by settings) comes first.

    That is a steady run, with the most requests within the objective, and then with the least that
    nearly all users wait at a stretch: for the first token, and once between tokens. A P99 over all
    gaps would choose a server that stops for seconds once a request; the gaps alone one that lets
    requests wait before they begin. Of runs that are not steady it has the most tokens/s.
    """
    order = pd.DataFrame(index=typical.index)
    order["unsteady"] = ~is_steady.reindex(typical.index)
    if "throughput" in typical:
        order["unserved"] = -typical["throughput"].where(order["unsteady"], 0.0)
    if "slo_attainment" in typical:
        order["within_objective"] = -typical["slo_attainment"]
    waits = [name for name in ("ttft_p99", "request_gap_p99") if name in typical]
    order["longest_waits"] = typical[waits].sum(axis="columns")
    for name in ("tbt_p99", "ttft_p50"):
        if name in typical:
            order[name] = typical[name]
    return order


def _unsteady_in_words(runs: pd.DataFrame, references: pd.DataFrame, base: str) -> str:
    """State why the waits of `runs` and `references` are not compared; "" if all are steady."""
    is_steady, is_base_steady = (
        bool(analysis.are_steady(table, ["policy"]).all()) for table in (runs, references)
    )
    if is_steady and is_base_steady:
        return ""
    if not is_steady and not is_base_steady:
        return "neither is steady, so that their waits are not compared"
    if is_steady:
        return f"keeps up with the load and {base} does not, whose waits depend on the run's length"
    return f"is not steady, so that its waits are not compared with {base}'s"


def _sentence(
    runs: pd.DataFrame,
    settings: Sequence[str],
    names: Sequence[str],
    base: str,
    reference: pd.DataFrame,
    at_once: int,
    noise: float,
    unsteady: str,
) -> str:
    parts: dict[str, list[str]] = {"better": [], "worse": [], "equal": [], "undecided": []}
    number = len(runs)
    for name in names:
        samples = runs[f"{name}_vs_{base}"].fillna(1.0)  # of two zeros
        ends = ends_of_median(list(samples), level=1 - (1 - LEVEL) / at_once, is_series=False)
        ratio = float(samples.median())
        row = {"quantity": f"{name}_vs_{base}", "policy": "", "value": ratio}
        is_decided = analysis.is_decided({**row, **ends._asdict(), "num_samples": number}, noise)
        value = runs[name].median()
        other = (runs[name] / samples).median()  # of the runs that these are paired with
        if math.isnan(other):  # none of these has any
            other = reference[name].median()
        if samples.sub(1).abs().lt(LEAST_DIFFERENCE).all():
            parts["equal"].append(_value_in_words(name, value))
            continue
        verdict = "better" if (ratio > 1) != less_is_better(name) else "worse"
        compared = _in_words(name, value, other, ratio, ends[:2] if number > 1 else ())
        parts[verdict if is_decided else "undecided"].append(compared)
    named = [f"{name}={analysis.text(runs[name].iloc[0])}" for name in settings[1:]]
    who = " ".join([runs.policy.iloc[0], *(one for one in named if not one.endswith("=-"))])
    verdicts = [f"{word} in {', '.join(each)}" for word, each in parts.items() if each]
    found = "; ".join(filter(None, [unsteady, *verdicts]))
    return f"{who} beside {base}: {found}.{_on_samples(runs, at_once, noise)}"


def _gains(runs: pd.DataFrame, further: Sequence[str], noise: float) -> str:
    """State the throughput over that of further policies, such as the paper's baseline."""
    sentences = ""
    for policy in further:
        quantity = f"throughput_vs_{policy}"
        row = analysis.medians(runs, ["policy"], quantity, level=noise).iloc[0]
        if runs.policy.iloc[0] != policy:
            of_noise = "" if row["is_decided"] else ", which is within the noise"
            in_pairs = " in pairs" if row["num_samples"] > 1 else ""
            is_equal = abs(row["value"] - 1) < LEAST_DIFFERENCE
            times = "as many" if is_equal else f"{row['value']:.2f} times the"
            sentences += f" Beside {policy}: {times} tokens/s{in_pairs}"
            sentences += f"{of_noise}."
    return sentences


def _value_in_words(name: str, value: float) -> str:
    """Format a quantity alone, such as "TTFT P50 185 ms"."""
    if name == "slo_attainment":
        return f"{display_unit(name, value)[1]} {value:.1%}"
    scale, heading = display_unit(name, value)
    label, _, unit = heading.partition(" [")
    return f"{label} {amount(scale * value)} {unit.rstrip(']')}"


def _in_words(name: str, value: float, other: float, ratio: float, ends: Sequence[float]) -> str:
    """Format a quantity, the reference's, their ratio; of samples that of pairs, with its ends."""
    scale, heading = display_unit(name, max(value, other))
    words, _, unit = heading.partition(" [")
    if name == "slo_attainment":
        return f"{words} {value:.1%} against {other:.1%}"
    unit = unit.rstrip("]")
    shown = f"{words} {amount(scale * value)} against {amount(scale * other)} {unit}"
    if not 0 < ratio < math.inf:
        return shown
    if ends:
        return f"{shown} (in pairs {ratio:.2f} times, {ends[0]:.2f} to {ends[1]:.2f})"
    return f"{shown} ({ratio:.2f} times)"


def _on_samples(runs: pd.DataFrame, at_once: int, noise: float) -> str:
    """State the level that the page's intervals have, and what more rounds or seeds would decide.

    Each interval has that level by itself. The best of several settings was chosen by the same
    samples, which its interval covers from `samples_for` on.
    """
    number = len(runs)
    if number == 1:
        return " One run each has no measure of noise." if math.isnan(noise) else ""
    needed = samples_for(at_once)
    has_seeds = "seed" in runs and runs.seed.nunique() > 1
    more = f"seed=range({needed})" if has_seeds else f"repeat={needed}"
    of_best = f" for the best of {at_once} settings" if at_once > 1 else ""
    words = f" These are {level_of(number):.0%} intervals of {number} samples"
    if number >= needed:
        words += of_best
    elif of_best:
        words += f", each by itself; {more} has {LEVEL:.0%}{of_best}"
    else:
        words += f"; {more} has {LEVEL:.0%}"
    if round(noise, 2) > 1:
        words += f"; equal work differed by up to {noise:.2f} times"
    return f"{words}."

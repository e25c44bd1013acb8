"""What a sweep comes to: for each workload its best run beside the reference, in one sentence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.config.console import amount
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.intervals import LEVEL, ends_of_median, level_of, samples_for
from sarathi_lab.results.load_trend import longer_than
from sarathi_lab.results.table import (
    HEADINGS,
    Runs,
    Summary,
    display_unit,
    heading,
    less_is_better,
)

# What is judged where all requests wait from the start, and where they arrive over time.
CLOSED_VERDICTS = ("throughput", "tbt_p99")
WAIT_VERDICTS = ("ttft_p50", "ttft_p99", "tbt_p99", "request_gap_p99")
LOADED_VERDICTS = (*WAIT_VERDICTS, "slo_attainment", "goodput")
# What of runs that are not steady is judged: all else depends on their length.
OF_ANY_LENGTH = "throughput"
MOST_WORKLOADS = 4  # in sentences
# What is said of one policy, and of two.
NOT_STEADY = ("is not steady", "are not steady")
OVERLOADED = ("does not keep up with the load", "do not keep up with the load")
SENTENCE = ("better", "worse", "equal", "undecided")  # verdicts in the order of a sentence
# How a replay is off from the run that it repeats: of means, and of the longest waits.
REPLAY_ERRORS = {
    "error/ttft": "TTFT",
    "error/tpot": "TPOT",
    "error/latency": "end-to-end latency",
    "error/ttft_p99": "TTFT P99",
    "error/tbt_p99": "TBT P99",
}
LARGE_ERROR = 0.1
# Ratios so near to 1 are printed as 1.00 and mean nothing to anybody who serves models.
LEAST_DIFFERENCE = 0.005
DIGITS = ".9g"  # to which quantities of equal runs agree
FEWEST_QUANTITIES = 3  # that runs have in common, so that it says something that they are equal
MOST_BEHIND = 4  # runs that are worse than the reference, in a sentence
MOST_SETS = 3  # of equal runs, in a sentence each


def arrive_over_time(runs: Runs) -> bool:
    """Return whether requests arrive over time; False for runs that do not record it."""
    if "arrives_over_time" in runs:
        over_time = runs["arrives_over_time"]
        if over_time.notna().all():
            return bool(over_time.any())
    if "workload.arrivals" not in runs:
        return False
    kinds = runs["workload.arrivals"].map(analysis.text)
    return bool(kinds.ne("closed").any())


@dataclass(frozen=True)
class _Comparison:
    """How the runs of a sweep are compared: with the policy `base`, by the quantities `names`.

    Attributes:
        runs: All, each with an index of its own.
        references: The policies to compare with; the first is `base`. Where requests arrive over
            time there is no other: the paper's baseline, request-level batching, lets all wait.
        names: What is judged.
        settings: What the runs differ in, the policy first.
        work: What decides the requests and the device.
        noise: See `sweep_analysis.noise`.
    """

    runs: Runs
    references: Sequence[str]
    names: Sequence[str]
    settings: Sequence[str]
    work: Sequence[str]
    noise: float

    @property
    def base(self) -> str | None:
        return next(iter(self.references), None)

    @classmethod
    def of(cls, runs: Runs) -> _Comparison:
        """Return how `runs` are compared."""
        judged: Sequence[str] = CLOSED_VERDICTS
        references = analysis.references(runs)
        if arrive_over_time(runs):
            judged = LOADED_VERDICTS
            references = references[:1]
        measured = runs.dropna(axis="columns", how="all")
        names = [name for name in judged if name in measured]
        settings = ["policy", *analysis.varied(runs)]
        same_work = analysis.same_work(runs)
        return cls(
            runs=runs.reset_index(drop=True),
            references=references,
            names=names,
            settings=list(dict.fromkeys(settings)),
            work=[name for name in same_work if name not in analysis.SAMPLES],
            noise=analysis.noise(runs),
        )


@dataclass(frozen=True)
class _Best:
    """The best runs of a workload, all of the same settings, and among how many these were."""

    runs: Runs
    num_settings: int

    @property
    def policy(self) -> str:
        return str(self.runs["policy"].iloc[0])


def conclusion(runs: Runs) -> list[str]:
    """Compare the best run of each workload with the reference, and with the best one of another
    policy of the sweep: what is better, worse, undecided.

    The best has the most tokens/s; of requests that arrive over time `_order_over_time` states it.
    As it is chosen among several, its intervals are as wide as all of them need at once. Where it
    or the other one is not steady, waits are not compared.
    """
    comparison = _Comparison.of(runs)
    sentences: list[str] = []
    if comparison.names:
        sentences += _verdicts(comparison)
    sentences += _equal_runs(runs)
    caution = _caution_of_replay(runs)
    if caution:
        sentences.append(caution)
    if sentences:
        sentences[0] = f"\n{sentences[0]}"
    return sentences


def _verdicts(comparison: _Comparison) -> list[str]:
    """Compare the best run of each workload with others; of many workloads the first and the last
    one, such as the lowest and the highest rate.
    """
    swept = analysis.without_baselines(comparison.runs)
    is_candidate = swept["policy"] != comparison.base
    candidates = swept[is_candidate]
    works = analysis.group_keys(candidates, comparison.work)
    every_best = []
    for _, of_workload in candidates.groupby(works, sort=False):
        every_best.append(_best(of_workload, comparison))
    described = every_best
    if len(every_best) > MOST_WORKLOADS:
        described = [every_best[0], every_best[-1]]
    sentences = []
    for best in described:
        for others in _compared_with(best, comparison):
            sentences.append(_sentence(best, others, comparison))
    if not sentences:
        return []
    num_between = len(every_best) - len(described)
    if num_between:
        sentences.append(f"The table has the {num_between} workloads between these.")
    sentences += _behind(described, comparison)
    remark = _remark_on_samples(described[0], comparison)
    if remark:
        sentences.append(remark)
    return sentences


def _behind(described: Sequence[_Best], comparison: _Comparison) -> list[str]:
    """Name the runs with fewer tokens/s than the reference, without those that have sentences."""
    base = comparison.base
    if base is None or OF_ANY_LENGTH not in comparison.names:
        return []
    with_ratios = analysis.relative(comparison.runs, OF_ANY_LENGTH, base)
    swept = analysis.without_baselines(with_ratios)
    for best in described:
        swept = swept.drop(best.runs.index, errors="ignore")
    of_others = swept[swept["policy"] != base]
    medians = analysis.medians(of_others, comparison.settings, f"{OF_ANY_LENGTH}_vs_{base}")
    behind = []
    for _, row in medians.iterrows():
        ratio = row["value"]
        if row["is_decided"] and ratio <= 1 - LEAST_DIFFERENCE:
            behind.append(f"{name_of(row, comparison.settings)} ({ratio:.2f} times)")
    num_more = len(behind) - MOST_BEHIND
    if num_more > 1:
        behind[MOST_BEHIND:] = [f"and {num_more} more"]
    if not behind:
        return []
    return [f"Worse than {base} in tokens/s: {', '.join(behind)}."]


def _compared_with(best: _Best, comparison: _Comparison) -> list[Runs]:
    """Return the references' runs on the workload of the best runs, and in a sweep of policies the
    best ones of the next best policy.
    """
    runs = comparison.runs
    compared = []
    for policy in comparison.references:
        of_policy = runs[runs["policy"] == policy]
        references = _on_same_work(of_policy, best, comparison)
        if len(references) and policy != best.policy:
            compared.append(references)
    if "swept" not in runs:
        return compared
    swept = analysis.without_baselines(runs)
    compared_already = [*comparison.references, best.policy]
    is_other = ~swept["policy"].isin(compared_already)
    others = _on_same_work(swept[is_other], best, comparison)
    # A policy that equals the best one is named by `_equal_runs`.
    names = list(comparison.names)
    of_best = best.runs[names].median()
    is_equal = (others[names] == of_best).all(axis="columns")
    others = others[~is_equal]
    if len(others):
        next_best = _best(others, comparison)
        compared.append(next_best.runs)
    return compared


def _on_same_work(runs: Runs, best: _Best, comparison: _Comparison) -> Runs:
    """Return those of `runs` that are on the workload of the best runs."""
    work = comparison.work
    works = analysis.group_keys(runs, work)
    works_of_best = analysis.group_keys(best.runs, work)
    is_same = works.isin(works_of_best)
    return runs[is_same]


def _best(group: Runs, comparison: _Comparison) -> _Best:
    """Return the best of runs on one workload."""
    keys = analysis.group_keys(group, comparison.settings)
    judged = dict.fromkeys([*comparison.names, OF_ANY_LENGTH])
    quantities = []
    for name in judged:
        if name in group:
            quantities.append(name)
    by_settings = group.groupby(keys, sort=False)
    typical = by_settings[quantities].median()
    if OF_ANY_LENGTH in comparison.names:
        ordered = typical.sort_values(OF_ANY_LENGTH, ascending=False, kind="stable")
    else:
        is_steady = analysis.are_steady(group, comparison.settings)
        order = _order_over_time(typical, is_steady)
        columns = list(map(str, order))
        ordered = order.sort_values(columns, kind="stable")
    is_best = keys == ordered.index[0]
    return _Best(group[is_best], num_settings=len(typical))


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
        # Steady ones serve what arrives: all are equal in it.
        if_unsteady = typical["throughput"].where(order["unsteady"], 0.0)
        order["unserved"] = -if_unsteady
    if "slo_attainment" in typical:
        order["within_objective"] = -typical["slo_attainment"]
    # The order of the columns is that of choice: each decides only between runs equal so far.
    waits = typical.filter(["ttft_p99", "request_gap_p99"])
    order["longest_waits"] = waits.sum(axis="columns")
    for name in ("tbt_p99", "ttft_p50"):
        if name in typical:
            order[name] = typical[name]
    return order


def _sentence(best: _Best, others: Runs, comparison: _Comparison) -> str:
    """Compare the best runs of a workload with those of another policy."""
    base = str(others["policy"].iloc[0])
    base_name = base
    if base != comparison.base:
        # Both ran on the same work: only what else it is run with tells them apart.
        own_settings = []
        for name in comparison.settings:
            if name not in comparison.work:
                own_settings.append(name)
        base_name = name_of(others.iloc[0], own_settings)
    pair = pd.concat([best.runs, others])
    clauses = []
    judged = comparison.names
    unsteady = _unsteady(pair)
    if unsteady:
        clauses.append(f"{unsteady}, so that waits are not compared")
        judged = [OF_ANY_LENGTH]
    in_words = defaultdict(list)
    for name in judged:
        if name not in pair:
            continue
        with_ratios = analysis.relative(pair, name, base)
        is_best = with_ratios["policy"] != base
        verdict, values = _verdict(
            name,
            with_ratios[is_best],
            others,
            best.num_settings,
            comparison.noise,
        )
        in_words[verdict].append(values)
    for verdict in SENTENCE:
        if verdict in in_words:
            quantities = ", ".join(in_words[verdict])
            clauses.append(f"{verdict} in {quantities}")
    best_name = name_of(best.runs.iloc[0], comparison.settings)
    compared = "; ".join(clauses)
    return f"{best_name} beside {base_name}: {compared}."


def _unsteady(runs: Runs) -> str:
    """State which policies' runs are mostly not steady; "" if all are."""
    policies = defaultdict(list)
    for policy, of_policy in runs.groupby("policy", sort=False):
        share_unsteady = analysis.unsteady(of_policy).mean()
        if share_unsteady < 0.5:
            continue
        state = NOT_STEADY
        if "is_overloaded" in of_policy:
            is_overloaded = of_policy["is_overloaded"] == 1
            if is_overloaded.all():
                state = OVERLOADED
        policies[state].append(str(policy))
    clauses = []
    for (of_one, of_both), names in policies.items():
        verb = of_one if len(names) == 1 else of_both
        clauses.append(f"{' and '.join(names)} {verb}")
    return " and ".join(clauses)


def _verdict(
    name: str,
    runs: Runs,
    others: Runs,
    num_settings: int,
    noise: float,
) -> tuple[str, str]:
    """Return whether a quantity of `runs` is better than that of `others`, worse, equal or
    undecided, and its values in words.
    """
    base = others["policy"].iloc[0]
    quantity = f"{name}_vs_{base}"
    ratios = runs[quantity].fillna(1.0)  # of two zeros
    differences = (ratios - 1).abs()
    if (differences < LEAST_DIFFERENCE).all():
        return "equal", _label(name)
    # The best of several settings: their intervals hold together.
    level = 1 - (1 - LEVEL) / num_settings
    ends = ends_of_median(list(ratios), level=level, is_series=False)
    ratio = float(ratios.median())
    row = {
        "quantity": quantity,
        "policy": "",
        "value": ratio,
        "num_samples": len(runs),
        **ends._asdict(),
    }
    is_decided = analysis.is_decided(row, noise)
    times = f"{ratio:.2f} times"
    if len(runs) > 1:
        times = f"in pairs {times}, {ends.low:.2f} to {ends.high:.2f}"
    # Of the runs that these are paired with: a slow phase of the machine is in both.
    paired = (runs[name] / ratios).dropna()
    values_of_base = others[name] if paired.empty else paired
    values = _in_words(
        name,
        value=runs[name].median(),
        value_of_base=values_of_base.median(),
    )
    if 0 < ratio < math.inf and name != "slo_attainment":
        values += f" ({times})"
    if not is_decided:
        return "undecided", values
    is_more = ratio > 1
    if is_more == less_is_better(name):
        return "worse", values
    return "better", values


def _label(name: str) -> str:
    label, _, _ = heading(name).partition(" [")
    return label


def _in_words(name: str, value: float, value_of_base: float) -> str:
    """Format a quantity and the reference's."""
    if name == "slo_attainment":
        return f"{_label(name)} {value:.1%} against {value_of_base:.1%}"
    largest = max(value, value_of_base)
    scale, label_and_unit = display_unit(name, largest)
    label, _, bracketed_unit = label_and_unit.partition(" [")
    unit = bracketed_unit.rstrip("]")
    shown = amount(scale * value)
    shown_of_base = amount(scale * value_of_base)
    return f"{label} {shown} against {shown_of_base} {unit}"


def name_of(run: pd.Series, settings: Sequence[str]) -> str:
    """Return the policy of a run and those of the `settings` that it has, as people name it."""
    policy_and_settings = [str(run["policy"])]
    for name in settings:
        value = analysis.text(run[name])
        if name != "policy" and value != "-":
            policy_and_settings.append(f"{name}={value}")
    return " ".join(policy_and_settings)


def _remark_on_samples(best: _Best, comparison: _Comparison) -> str:
    """State what the samples of the best runs leave open, and how many would decide it.

    Each interval has its level by itself. The best of several settings was chosen by the same
    samples, which its interval covers from `samples_for` on.
    """
    num_samples = len(best.runs)
    needed = samples_for(best.num_settings)
    if num_samples == 1:
        return _remark_on_single_runs(comparison, needed)
    level = level_of(num_samples)
    remark = f"These are {level:.0%} intervals of {num_samples} samples, each by itself"
    if num_samples < needed:
        enough_samples = f"repeat={needed}"
        if "seed" in best.runs:
            num_seeds = best.runs["seed"].nunique()
            if num_seeds > 1:
                enough_samples = f"seed=range({needed})"
        remark += f"; {enough_samples} has {LEVEL:.0%}"
        if best.num_settings > 1:
            remark += f" for the best of {best.num_settings}"
    if round(comparison.noise, 2) > 1:
        remark += f"; equal work differed by up to {comparison.noise:.2f} times"
    return f"{remark}."


def _remark_on_single_runs(comparison: _Comparison, needed: int) -> str:
    """State what runs of one sample each leave open, which `needed` samples would decide."""
    if math.isnan(comparison.noise):
        return "One run each has no measure of noise."
    if not _are_drawn(comparison.runs):
        return ""
    return (
        "These are single draws of arrivals, of which a P99 is one or two requests; "
        f"seed=range({needed}) shows what they decide."
    )


def _are_drawn(runs: Runs) -> bool:
    """Return whether a seed decides when requests arrive, not a recorded run or a trace."""
    if "workload.arrivals" not in runs or not arrive_over_time(runs):
        return False
    kinds = runs["workload.arrivals"]
    is_recorded = kinds.isin(["trace", "recorded"])
    is_drawn = kinds.notna() & ~is_recorded
    return bool(is_drawn.all())


def longer_run(runs: Runs) -> str:
    """Return the setting of a run that is long enough to show, perhaps, which server keeps up; ""
    if the requests of these are recorded.
    """
    if not _are_drawn(runs) or "workload.num_requests" not in runs:
        return ""
    num_requests = int(runs["workload.num_requests"].max())
    return f"workload.num_requests={longer_than(num_requests)}"


def _equal_runs(runs: Runs) -> list[str]:
    """Name runs of different settings that agree in all digits of every quantity, in a sentence for
    each set of them: what sets them apart had no effect.
    """
    measured = runs.dropna(axis="columns", how="all").reset_index(drop=True)
    quantities = [name for name in HEADINGS if name in measured]
    distinct = analysis.without_repeated(measured, quantities)
    settings = ["policy", *analysis.varied(distinct)]
    keys = analysis.group_keys(distinct, settings)
    names_by_digits = defaultdict(list)
    for _, of_setting in distinct.groupby(keys, sort=False):
        medians = of_setting[quantities].astype(float).median()
        if medians.count() < FEWEST_QUANTITIES:
            continue
        digits = tuple(format(median, DIGITS) for median in medians)
        name = name_of(of_setting.iloc[0], settings)
        names_by_digits[digits].append(name)
    sentences = []
    for names in names_by_digits.values():
        if len(names) > 1:
            listed = ", ".join(names)
            sentences.append(f"Equal in every quantity: {listed}.")
    num_further = len(sentences) - MOST_SETS
    if num_further > 0:
        sentences[MOST_SETS:] = [f"So are {num_further} further sets of runs."]
    return sentences


def _caution_of_replay(runs: Runs) -> str:
    """State by how much replays miss the run that they repeat; "" where they are near."""
    largest = {}
    for name in REPLAY_ERRORS:
        if name not in runs:
            continue
        errors = runs[name].dropna()
        if len(errors):
            # With its sign: the sentence states whether the replay is slower or faster.
            largest[name] = max(errors, key=abs)
    return caution_of_replay(largest)


def caution_of_replay(errors: Summary) -> str:
    """State by how much a replay misses the run that it repeats.

    Args:
        errors: Shares, by the names of quantities, of which those of `REPLAY_ERRORS` count.

    Returns:
        A sentence; "" where the replay is near.
    """
    misses = []
    for name, label in REPLAY_ERRORS.items():
        error = errors.get(name, 0.0)
        if abs(error) >= LARGE_ERROR:
            misses.append(f"{error:+.0%} in {label}")
    if not misses:
        return ""
    listed = ", ".join(misses)
    return (
        f"The simulation misses your run by {listed}, so that it does not decide "
        "smaller differences; check hardware, host, and the time that passes outside the server "
        "(network, client)."
    )

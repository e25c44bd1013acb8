"""What a sweep comes to: for each workload its best run beside the reference, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from sarathi_lab.config.console import amount
from sarathi_lab.config.instantiate import option_files
from sarathi_lab.results import sweep_analysis as analysis
from sarathi_lab.results.intervals import (
    LEVEL,
    ends_of_median,
    level_of,
    samples_for,
)
from sarathi_lab.results.load_trend import longer_than
from sarathi_lab.results.other_runs import LEAST_DIFFERENCE, equal_runs, run_names, runs_behind
from sarathi_lab.results.table import Row, display_unit, heading, less_is_better

# What is judged where all requests wait from the start, and where they arrive over time.
CLOSED_VERDICTS = ("throughput", "tbt_p99")
WAIT_VERDICTS = ("ttft_p50", "ttft_p99", "tbt_p99", "request_gap_p99")
LOADED_VERDICTS = (*WAIT_VERDICTS, "slo_attainment", "goodput")
# What of runs that are not steady is judged: all else depends on their length.
OF_ANY_LENGTH = ("throughput",)
MOST = 4  # sentences
MOST_POLICIES = 3  # that the best one is compared with
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


def arrive_over_time(runs: pd.DataFrame) -> bool:
    """Return whether requests arrive over time; False for runs that do not record it."""
    if "arrives_over_time" in runs:
        over_time = runs["arrives_over_time"]
        if over_time.notna().all():
            return bool(over_time.any())
    if "workload.arrivals" not in runs:  # of an older version
        return False
    kinds = runs["workload.arrivals"].map(analysis.text)
    return bool(kinds.ne("closed").any())


@dataclass(frozen=True)
class _Comparison:
    """How the runs of a sweep are compared: with the policy `base`, by the quantities `names`.

    Attributes:
        runs: All, with the ratios to `base`.
        base: The policy to compare with.
        others: Further policies whose throughput is compared, such as the paper's baseline.
        names: What is judged.
        settings: What the runs differ in, the policy first.
        work: What decides the requests and the device.
        noise: See `sweep_analysis.noise`.
    """

    runs: pd.DataFrame
    base: str
    others: Sequence[str]
    names: Sequence[str]
    settings: Sequence[str]
    work: Sequence[str]
    noise: float

    @property
    def steady_names(self) -> list[str]:
        """Return what is judged of runs that are not steady."""
        return [name for name in OF_ANY_LENGTH if name in self.runs]


class _Best(NamedTuple):
    """The best runs of a workload, all of the same settings, and among how many these were."""

    runs: pd.DataFrame
    num_settings: int


def conclusion(runs: pd.DataFrame) -> list[str]:
    """Compare the best run of each workload with the reference, and with the best ones of other
    policies: what is better, worse, undecided.

    The best has the most tokens/s; of requests that arrive over time `_order_over_time` states it.
    As it is chosen among several, its intervals are as wide as all of them need at once. Where it
    or the other one is not steady, waits are not compared.
    """
    base = analysis.reference(runs)
    comparison = _comparison(runs, base)
    verdicts: list[str] = []
    if comparison is not None:
        verdicts = _verdicts(comparison)
    remarks = []
    if base is None:
        remarks += _remark_on_reference(runs, are_compared=bool(verdicts))
    elif comparison is not None:
        remarks += _remark_on_further_baselines(comparison)
    remarks += equal_runs(runs)
    caution = _caution_of_replay(runs)
    if caution:
        remarks.append(caution)
    sentences = [*verdicts, *remarks]
    if sentences:
        sentences[0] = f"\n{sentences[0]}"
    return sentences


def _verdicts(comparison: _Comparison) -> list[str]:
    """Compare the best run of each workload with the reference and with other policies' best ones.

    Without a reference only policies of one sweep are compared.
    """
    every_best = _best_of_workloads(comparison)
    sentences: list[str] = []
    if comparison.base:
        sentences = _beside_reference(every_best, comparison)
    elif "swept" in comparison.runs and not _is_replay(comparison.runs):
        sentences = _among_swept(every_best, comparison, num_workloads=len(every_best))
    if sentences and _are_single_draws(comparison.runs):
        num_settings = max(best.num_settings for best in every_best)
        sentences.append(
            "These are single draws of arrivals, of which a P99 is one or two requests; "
            f"seed=range({samples_for(num_settings)}) shows what they decide."
        )
    return sentences


def _beside_reference(every_best: Sequence[_Best], comparison: _Comparison) -> list[str]:
    """Compare the best run of each workload with the reference, of more than `MOST` workloads the
    two extremes. Then these are compared with other policies, and runs that are worse are named.
    """
    described = every_best
    on_others: list[str] = []
    if len(every_best) > MOST:
        described, on_others = _extremes(every_best, comparison)
    sentences = [_sentence(best, comparison) for best in described]
    sentences += on_others
    sentences += _among_swept(described, comparison, num_workloads=len(every_best))
    sentences += _behind(every_best, comparison)
    return sentences


def _remark_on_reference(runs: pd.DataFrame, *, are_compared: bool) -> list[str]:
    """State that the policies of a sweep have no reference, and how they get one."""
    is_sweep = "swept" in runs
    if not is_sweep or _is_replay(runs):
        return []
    policies = list(runs.policy.unique())
    if len(policies) < 2:
        return []
    # Classes of a user's own are no options that `baselines` can name.
    options = option_files("policy")
    named = [policy for policy in policies if policy in options]
    reference = named[-1] if named else analysis.REFERENCES[0]
    remark = "No policy is the reference"
    if are_compared:
        remark += ", so the best ones are compared with each other alone"
    return [
        f"{remark}; baselines=[{reference}] compares with {reference}, with an interval where "
        "there are several seeds."
    ]


def _remark_on_further_baselines(comparison: _Comparison) -> list[str]:
    """Name the baselines that no sentence compares with."""
    runs = comparison.runs
    if "is_baseline" not in runs:
        return []
    baselines = runs.policy[runs.is_baseline.astype(bool)].unique()
    further = [name for name in baselines if name not in (comparison.base, *comparison.others)]
    if not further:
        return []
    return [
        f"Sentences compare with {comparison.base}, and not with {' and '.join(further)}: "
        f"baselines=[{further[0]}] makes it the reference."
    ]


def _among_swept(
    every_best: Sequence[_Best], comparison: _Comparison, *, num_workloads: int
) -> list[str]:
    """Compare the best run of each workload with the best ones of the sweep's other policies: the
    first `MOST_POLICIES` on a single workload, the next best one on each of several.

    What is not compared is counted: policies, and workloads after `MOST` sentences.
    """
    most_others = 1
    next_best = "next best policy of each workload is"
    if num_workloads == 1:
        most_others = MOST_POLICIES
        next_best = f"{MOST_POLICIES} next best policies are"
    sentences: list[str] = []
    num_compared = 0
    leaves_policies = False
    for best in every_best:
        if len(sentences) >= MOST:
            break
        others = _best_of_others(best, comparison)
        sentences += _beside_others(best, others, comparison, most_others)
        leaves_policies = leaves_policies or next(others, None) is not None
        num_compared += 1
    if not sentences:
        return []
    if leaves_policies:
        sentences.append(f"Only the {next_best} compared with the best one.")
    if num_compared < num_workloads:
        sentences.append(
            f"Policies are compared on {num_compared} of {num_workloads} workloads; the table has "
            "the others."
        )
    return sentences


def _beside_others(
    best: _Best, others: Iterator[_Best], comparison: _Comparison, most: int
) -> list[str]:
    """Compare the best run of a workload with the first `most` of `others` that differ from it.

    Equal ones are passed over: `equal_runs` names them.
    """
    sentences: list[str] = []
    for other in others:
        sentence = _beside_other(best, other, comparison)
        if sentence:
            sentences.append(sentence)
        if len(sentences) == most:
            break
    if sentences and not comparison.base:  # else the sentence on the reference has stated it
        sentences[-1] += _on_samples(best.runs, best.num_settings, comparison.noise)
    return sentences


def _best_of_others(best: _Best, comparison: _Comparison) -> Iterator[_Best]:
    """Yield the best runs of the other policies on the same workload, the best one first."""
    swept = analysis.without_baselines(comparison.runs)
    works = analysis.group_keys(swept, comparison.work)
    works_of_best = analysis.group_keys(best.runs, comparison.work)
    is_same_work = works.isin(works_of_best)
    excluded = [comparison.base, best.runs.policy.iloc[0]]
    is_excluded = swept.policy.isin(excluded)
    others = swept[is_same_work & ~is_excluded]
    while not others.empty:
        next_best = _best(others, comparison)
        yield next_best
        others = others[others.policy != next_best.runs.policy.iloc[0]]


def _beside_other(best: _Best, other: _Best, comparison: _Comparison) -> str:
    """Compare the best runs of two policies in a sentence; "" where nothing differs."""
    base = str(other.runs.policy.iloc[0])
    pair = pd.concat([best.runs, other.runs])
    with_ratios = _with_ratios(pair, comparison.names, base)
    of_pair = replace(comparison, runs=with_ratios, base=base)
    runs = with_ratios[with_ratios.policy != base]
    own_settings = [name for name in comparison.settings if name not in comparison.work]
    base_name = run_names(other.runs[:1], own_settings).iloc[0]
    clauses, are_equal = _clauses(_Best(runs, best.num_settings), of_pair, base_name)
    if are_equal:
        return ""
    return _beside(runs, clauses, of_pair, base_name)


def _best_of_workloads(comparison: _Comparison) -> list[_Best]:
    """Return the best runs of each workload, without the reference."""
    swept = analysis.without_baselines(comparison.runs)
    candidates = swept[swept.policy != comparison.base]
    work = analysis.group_keys(candidates, comparison.work)
    return [_best(group, comparison) for _, group in candidates.groupby(work, sort=False)]


def _behind(every_best: Sequence[_Best], comparison: _Comparison) -> list[str]:
    """Name the runs that are worse than the reference, without the best of each workload."""
    of_best = [index for best in every_best for index in best.runs.index]
    names = comparison.names
    runs = comparison.runs
    if "throughput" not in names:  # waits of runs that are not steady depend on their length
        runs = runs[analysis.unsteady(runs) == 0]
    return runs_behind(
        runs, comparison.base, names, comparison.settings, noise=comparison.noise, best=of_best
    )


def _extremes(
    every_best: Sequence[_Best], comparison: _Comparison
) -> tuple[Sequence[_Best], list[str]]:
    """Return the workloads on which the best comes to least and to most beside the reference, and
    sentences on the others.

    The order is that of steady runs by the first quantity that is judged. Where fewer than two
    workloads have such, it is that of all runs by a quantity that does not depend on their length.
    """
    steady = []
    for best in every_best:
        references = _references(best.runs, comparison)
        if not _difference_in_steadiness(best.runs, references, comparison.base):
            steady.append(best)
    number = len(every_best)
    num_unsteady = number - len(steady)
    name = comparison.names[0]
    comparable = steady
    if len(steady) < 2:
        comparable = list(every_best)
        name = next(iter(comparison.steady_names), name)

    def ratio_of(best: _Best) -> float:
        return float(best.runs[f"{name}_vs_{comparison.base}"].median())

    with_ratio = [best for best in comparable if not math.isnan(ratio_of(best))]
    ordered = sorted(with_ratio or comparable, key=ratio_of)
    label, _, _ = heading(name).partition(" [")
    on_others = []
    num_between = len(ordered) - 2
    if num_between > 0:
        on_others.append(f"{num_between} of {number} workloads lie between in {label}.")
    num_unknown = len(comparable) - len(ordered)
    if num_unknown:
        on_others.append(f"{num_unknown} of {number} workloads have no {label}.")
    if num_unsteady:
        on_others.append(f"On {num_unsteady} of {number} workloads a run is not steady.")
    extremes = [ordered[0]]
    if len(ordered) > 1:
        extremes.append(ordered[-1])
    return extremes, on_others


def _are_single_draws(runs: pd.DataFrame) -> bool:
    """Return whether each case is simulated once, with arrivals that a seed decides."""
    swept = analysis.without_baselines(runs)
    cases = analysis.group_keys(swept, ["policy", *analysis.varied(runs)])
    is_simulated = analysis.noise(runs) == analysis.DETERMINISTIC
    return is_simulated and cases.is_unique and _are_drawn(runs)


def _are_drawn(runs: pd.DataFrame) -> bool:
    """Return whether a seed decides when requests arrive, not a recorded run or a trace."""
    if "workload.arrivals" not in runs or _is_replay(runs) or not arrive_over_time(runs):
        return False
    kinds = runs["workload.arrivals"]
    is_drawn = kinds.notna() & kinds.ne("trace")
    return bool(is_drawn.all())


def _is_replay(runs: pd.DataFrame) -> bool:
    """Return whether runs repeat a real server's, whose requests are recorded."""
    return any(name in runs for name in REPLAY_ERRORS)


def _caution_of_replay(runs: pd.DataFrame) -> str:
    """State by how much replays miss the run that they repeat; "" where they are near."""
    largest = {}
    for name in REPLAY_ERRORS:
        errors = runs[name].dropna().tolist() if name in runs else []
        if errors:
            largest[name] = max(errors, key=abs)
    return caution_of_replay(largest)


def caution_of_replay(errors: Mapping[str, float]) -> str:
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
    return (
        f"The simulation misses your run by {', '.join(misses)}, so that it does not decide "
        "smaller differences; check hardware, host, and the time that passes outside the server "
        "(network, client)."
    )


def _comparison(runs: pd.DataFrame, base: str | None) -> _Comparison | None:
    """Return how runs are compared with the policy `base`, with none by what they are judged alone;
    None without a quantity to judge them by.
    """
    judged: Sequence[str]
    further_policies: Sequence[str] = []
    if arrive_over_time(runs):
        judged = LOADED_VERDICTS
    else:
        judged = CLOSED_VERDICTS
        further_policies = analysis.references(runs)[1:]
    names = []
    for name in judged:
        if name in runs and runs[name].notna().any():
            names.append(name)
    if not names:
        return None
    with_ratios = runs.reset_index(drop=True)
    if base is not None:
        with_ratios = _with_ratios(with_ratios, names, base)
    for policy in further_policies:
        for name in names:
            with_ratios = analysis.relative(with_ratios, name, policy)
    settings = ["policy", *analysis.varied(with_ratios)]
    same_work = analysis.same_work(with_ratios)
    return _Comparison(
        runs=with_ratios,
        base=base or "",
        others=further_policies,
        names=names,
        settings=list(dict.fromkeys(settings)),
        work=[name for name in same_work if name not in analysis.SAMPLES],
        noise=analysis.noise(with_ratios),
    )


def _with_ratios(runs: pd.DataFrame, names: Sequence[str], base: str) -> pd.DataFrame:
    """Return runs with the ratios of all that may be judged to those of the policy `base`."""
    for name in dict.fromkeys([*names, *OF_ANY_LENGTH]):
        runs = analysis.relative(runs, name, base)
    return runs


def _best(group: pd.DataFrame, comparison: _Comparison) -> _Best:
    """Return the best of runs on one workload."""
    keys = analysis.group_keys(group, comparison.settings)
    judged = dict.fromkeys([*comparison.names, *comparison.steady_names])
    typical = group.groupby(keys, sort=False)[list(judged)].median()
    if "throughput" in comparison.names:
        order = pd.DataFrame({"throughput": -typical["throughput"]})
    else:
        is_steady = analysis.are_steady(group, comparison.settings)
        order = _order_over_time(typical, is_steady)
    columns = list(map(str, order))
    first = order.sort_values(columns, kind="stable").index[0]
    return _Best(group[keys == first], len(typical))


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


def _difference_in_steadiness(runs: pd.DataFrame, references: pd.DataFrame, base: str) -> str:
    """State why the waits of `runs` and `references` are not compared; "" if all are steady."""
    is_steady = bool(analysis.are_steady(runs, ["policy"]).all())
    is_base_steady = bool(analysis.are_steady(references, ["policy"]).all())
    if is_steady and is_base_steady:
        return ""
    if is_steady:
        return f"keeps up with the load and {base} does not, whose waits depend on the run's length"
    if is_base_steady:
        return f"is not steady, so that its waits are not compared with {base}'s"
    if _are_overloaded(runs) and _are_overloaded(references):
        return "neither keeps up with the load, so that their waits are not compared"
    neither = "neither is steady, so that their waits are not compared"
    longer = longer_run(runs)
    if longer:
        neither += f" (a longer run may show which keeps up: {longer})"
    return neither


def _are_overloaded(runs: pd.DataFrame) -> bool:
    return "is_overloaded" in runs and bool((runs["is_overloaded"] == 1).all())


def longer_run(runs: pd.DataFrame) -> str:
    """Return the setting of a run that is long enough to show, perhaps, which server keeps up; ""
    if the requests of these are recorded.
    """
    if not _are_drawn(runs) or "workload.num_requests" not in runs:
        return ""
    num_requests = int(runs["workload.num_requests"].max())
    return f"workload.num_requests={longer_than(num_requests)}"


def _sentence(best: _Best, comparison: _Comparison) -> str:
    """Describe the best runs of a workload beside the reference's."""
    runs = best.runs
    clauses, _ = _clauses(best, comparison, comparison.base)
    sentence = _beside(runs, clauses, comparison, comparison.base)
    samples = _on_samples(runs, best.num_settings, comparison.noise)
    return sentence + samples + _gains(runs, comparison)


def _beside(
    runs: pd.DataFrame, clauses: Sequence[str], comparison: _Comparison, base_name: str
) -> str:
    """Return the clauses on equal runs beside the reference's as a sentence."""
    name = run_names(runs[:1], comparison.settings).iloc[0]
    return f"{name} beside {base_name}: {'; '.join(clauses)}."


def _clauses(best: _Best, comparison: _Comparison, base_name: str) -> tuple[list[str], bool]:
    """Describe the best runs of a workload beside the reference's, which are called `base_name`.

    Returns:
        Clauses of a sentence, and whether the runs are equal in all that is judged.
    """
    runs = best.runs
    references = _references(runs, comparison)
    clauses = []
    names = comparison.names
    unsteady = _difference_in_steadiness(runs, references, base_name)
    if unsteady:
        clauses.append(unsteady)
        names = comparison.steady_names
    values_by_verdict: dict[str, list[str]] = {verdict: [] for verdict in SENTENCE}
    for name in names:
        verdict, values = _verdict(name, best, references, comparison)
        values_by_verdict[verdict].append(values)
    are_equal = not unsteady
    for verdict, quantities in values_by_verdict.items():
        if quantities:
            clauses.append(f"{verdict} in {', '.join(quantities)}")
            are_equal = are_equal and verdict == "equal"
    return clauses, are_equal


def _references(runs: pd.DataFrame, comparison: _Comparison) -> pd.DataFrame:
    """Return the reference's runs on the same work, of the same chunk if there are such."""
    of_base = comparison.runs[comparison.runs.policy == comparison.base]
    work = analysis.group_keys(runs, comparison.work)
    work_of_base = analysis.group_keys(of_base, comparison.work)
    references = of_base[work_of_base.isin(work)]
    if not analysis.varies_in_chunk(references):
        return references
    is_of_same_chunk = references["chunk"].isin(runs["chunk"])
    if not is_of_same_chunk.any():
        return references
    return references[is_of_same_chunk]


def _verdict(
    name: str, best: _Best, references: pd.DataFrame, comparison: _Comparison
) -> tuple[str, str]:
    """Return whether a quantity is better, worse, equal or undecided, and its values in words."""
    runs = best.runs
    quantity = f"{name}_vs_{comparison.base}"
    ratios = runs[quantity].fillna(1.0)  # of two zeros
    value = runs[name].median()
    differences = (ratios - 1).abs()
    if (differences < LEAST_DIFFERENCE).all():
        return "equal", _value_in_words(name, value)
    # The best of several settings: their intervals hold together.
    level = 1 - (1 - LEVEL) / best.num_settings
    ends = ends_of_median(list(ratios), level=level, is_series=False)
    ratio = float(ratios.median())
    row: Row = {
        "quantity": quantity,
        "policy": "",
        "value": ratio,
        "num_samples": len(runs),
        **ends._asdict(),
    }
    is_decided = analysis.is_decided(row, comparison.noise)
    # Of the runs that these are paired with: a slow phase of the machine is in both.
    value_of_base = (runs[name] / ratios).median()
    if math.isnan(value_of_base):  # none of these has any
        value_of_base = references[name].median()
    interval: Sequence[float] = ()
    if len(runs) > 1:
        interval = (ends.low, ends.high)
    values = _in_words(name, value, value_of_base, ratio, interval)
    if not is_decided:
        return "undecided", values
    is_more = ratio > 1
    if is_more == less_is_better(name):
        return "worse", values
    return "better", values


def _gains(runs: pd.DataFrame, comparison: _Comparison) -> str:
    """State the throughput over that of further policies, such as the paper's baseline."""
    sentences = ""
    for policy in comparison.others:
        if runs.policy.iloc[0] == policy:
            continue
        quantity = f"throughput_vs_{policy}"
        row = analysis.medians(runs, ["policy"], quantity, level=comparison.noise).iloc[0]
        ratio = row["value"]
        times = f"{ratio:.2f} times the"
        if abs(ratio - 1) < LEAST_DIFFERENCE:
            times = "as many"
        sentence = f" Beside {policy}: {times} tokens/s"
        if row["num_samples"] > 1:
            sentence += " in pairs"
        if not row["is_decided"]:
            sentence += ", which is within the noise"
        sentences += f"{sentence}{_other_quantities(runs, policy, comparison)}."
    return sentences


def _other_quantities(runs: pd.DataFrame, policy: str, comparison: _Comparison) -> str:
    """State what else of `runs` differs from a further policy's: more tokens/s may cost waits."""
    clauses = ""
    for name in comparison.names:
        quantity = f"{name}_vs_{policy}"
        if name == "throughput" or quantity not in runs:
            continue
        medians = analysis.medians(runs, ["policy"], quantity, level=comparison.noise)
        for row in medians.to_dict("records"):
            ratio = row["value"]
            if not row["is_decided"] or abs(ratio - 1) < LEAST_DIFFERENCE:
                continue
            value = runs[name].median()
            value_of_policy = (runs[name] / runs[quantity]).median()
            clauses += f"; {_in_words(name, value, value_of_policy, ratio, ())}"
    return clauses


def _value_in_words(name: str, value: float) -> str:
    """Format a quantity alone, such as "TTFT P50 185 ms"."""
    scale, label_and_unit = display_unit(name, value)
    if name == "slo_attainment":
        return f"{label_and_unit} {value:.1%}"
    label, _, unit = label_and_unit.partition(" [")
    return f"{label} {amount(scale * value)} {unit.rstrip(']')}"


def _in_words(
    name: str, value: float, value_of_base: float, ratio: float, ends: Sequence[float]
) -> str:
    """Format a quantity, the reference's, their ratio; of samples that of pairs, with its ends."""
    scale, label_and_unit = display_unit(name, max(value, value_of_base))
    label, _, unit = label_and_unit.partition(" [")
    if name == "slo_attainment":
        return f"{label} {value:.1%} against {value_of_base:.1%}"
    amount_of_base = amount(scale * value_of_base)
    shown = f"{label} {amount(scale * value)} against {amount_of_base} {unit.rstrip(']')}"
    if not 0 < ratio < math.inf:
        return shown
    if ends:
        low, high = ends
        return f"{shown} (in pairs {ratio:.2f} times, {low:.2f} to {high:.2f})"
    return f"{shown} ({ratio:.2f} times)"


def _on_samples(runs: pd.DataFrame, at_once: int, noise: float) -> str:
    """State the level of the printed intervals, and what more rounds or seeds would decide.

    Each interval has that level by itself. The best of several settings was chosen by the same
    samples, which its interval covers from `samples_for` on.
    """
    number = len(runs)
    if number == 1 and math.isnan(noise):
        return " One run each has no measure of noise."
    if number == 1:
        return ""
    is_chosen = at_once > 1
    needed = samples_for(at_once)
    sentence = f" These are {level_of(number):.0%} intervals of {number} samples"
    if number < needed:
        enough_samples = f"repeat={needed}"
        if "seed" in runs and runs.seed.nunique() > 1:
            enough_samples = f"seed=range({needed})"
        if is_chosen:
            sentence += ", each by itself"
        sentence += f"; {enough_samples} has {LEVEL:.0%}"
    if is_chosen:
        sentence += f" for the best of {at_once} settings"
    if round(noise, 2) > 1:
        sentence += f"; equal work differed by up to {noise:.2f} times"
    return f"{sentence}."

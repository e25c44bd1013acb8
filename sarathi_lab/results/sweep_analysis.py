"""Analysis of a sweep: medians over repetitions with intervals, ratios to a reference, noise.

A table of runs has a row per run and flat columns: settings as they are typed (`chunk`,
`workload.rate`), quantities as in metrics.md. What a sweep varied is in its column `swept`, which
the sweeper fills.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError, suggestion
from sarathi_lab.config.paths import CONF
from sarathi_lab.results.intervals import FEWEST_PAIRS, ends_of_median
from sarathi_lab.results.table import Row, Runs

SAMPLES = ("repetition", "seed")  # further samples of the same case
REFERENCES = ("orca", "request_level")  # the first one present is what runs are compared with
IDENTITY = ("model", "device")  # runs of different ones are never one series
DETERMINISTIC = 1.0  # noise of a simulation
WELL_KNOWN = ("throughput", "ttft_p50", "tbt_p99")  # quantities that an error suggests
NUMERIC = ("integer", "floating", "mixed-integer-float")  # of pandas
NOT_WORK = (
    "hydra",
    "task",
    "baselines",
    "output",
    "resume",
    "limit",
    "tracking",
    "repeat",
    "plot",
)


@cache
def _top_level() -> frozenset[str]:
    """Return the names at the top of conf/config.yaml, groups included."""
    loaded = OmegaConf.load(CONF / "config.yaml")
    config: Any = OmegaConf.to_container(loaded)
    names = {"threads"}
    for default in config.pop("defaults"):
        if isinstance(default, dict):
            names.update(default)
    names.update(config)
    names.difference_update(NOT_WORK)
    return frozenset(names)


def is_setting(name: str) -> bool:
    """Return whether a column of runs is a setting, not a quantity."""
    return name.partition(".")[0] in _top_level()


def without_baselines(runs: Runs) -> Runs:
    """Return the runs that are no baselines; all where there are only baselines."""
    if "is_baseline" not in runs or runs.is_baseline.all():
        return runs
    return runs[~runs.is_baseline.astype(bool)]


def without_repeated(runs: Runs, names: Collection[str]) -> Runs:
    """Leave out baselines that equal a swept run of their policy in the quantities `names`."""
    settings = varied(runs)
    compared: dict[str, None] = {}  # in order, each once
    for name in ("policy", *settings, *names):
        is_ratio = "_vs_" in name
        # A baseline has no chunk, and a ratio is to the baseline itself.
        if name != "chunk" and not is_ratio:
            compared[name] = None
    groups = group_keys(runs, list(compared))
    is_swept = _are_swept(runs)
    is_repeated = groups.isin(groups[is_swept])
    return runs[is_swept | ~is_repeated]


def _are_swept(runs: Runs) -> pd.Series:
    """Return which runs are no baselines."""
    swept = without_baselines(runs)
    is_swept = runs.index.isin(swept.index)
    return pd.Series(is_swept, runs.index)


def varied(runs: Runs, leaving: Collection[str] = SAMPLES) -> list[str]:
    """Return the settings in which the runs differ; baselines are not considered.

    Args:
        runs: Runs of one sweep, whose settings the sweeper stored, or of several put together.
            Of several these are the model, the device and what else differs, without settings
            that follow from those before them.
        leaving: First or last parts of settings that are left out, as that of `workload.seed`.
    """
    swept = without_baselines(runs)
    stored = _stored_by_sweeper(swept)
    candidates = stored
    if candidates is None:
        columns = map(str, swept)
        candidates = list(filter(is_setting, columns))
    names = []
    for name in candidates:
        if name not in swept:
            continue
        first = name.partition(".")[0]
        last = name.rpartition(".")[2]
        if first in leaving or last in leaving:
            continue
        # As texts: lists cannot be counted, and a run that lacks the setting counts, too.
        values = swept[name].map(text)
        if values.nunique() > 1:
            names.append(name)
    if stored is not None:
        return names
    # No line joins runs of two models or devices: both are always named.
    identity = [name for name in IDENTITY if name in names]
    # Of two settings that determine each other the one without a group stays.
    short_first = sorted(names, key=lambda name: "." in name)
    in_order_of_choice = [*identity, *short_first]
    return independent(swept, in_order_of_choice, num_chosen=len(identity))


def _stored_by_sweeper(swept: Runs) -> list[str] | None:
    """Return the settings that the sweeper stored; None for runs of several sweeps."""
    if "swept" not in swept:
        return None
    if "sweep" in swept:
        num_sweeps = swept["sweep"].nunique()
        if num_sweeps > 1:
            return None
    stored = swept.swept.unique()
    if len(stored) != 1:
        return None
    names = stored[0]
    if not isinstance(names, str):
        return None
    return names.strip("[]").split(",")


def independent(
    runs: Runs,
    names: Sequence[str],
    num_chosen: int = 0,
) -> list[str]:
    """Leave out settings that those before them determine, but keep the first `num_chosen`."""
    chosen = list(names[:num_chosen])
    # A setting that splits no group of equal settings follows from those before.
    num_groups = group_keys(runs, chosen).nunique()
    for name in names[num_chosen:]:
        with_name = [*chosen, name]
        num_split = group_keys(runs, with_name).nunique()
        if num_split > num_groups:
            chosen.append(name)
            num_groups = num_split
    return chosen


def unsteady(runs: Runs) -> pd.Series:
    """Return 1.0 for runs whose waits depend on their length, as they are overloaded or too short,
    and 0.0 where they do not or it was not judged.
    """
    if "is_steady" not in runs:  # no run was long enough to be judged
        return pd.Series(0.0, runs.index)
    is_steady = runs.is_steady.fillna(1.0)  # so is a run that was not judged
    share_steady = is_steady.astype(float)
    return 1.0 - share_steady


def is_numeric(runs: Runs, name: str) -> bool:
    """Return whether a setting has numbers only."""
    values = runs[name].dropna()
    kind = pd.api.types.infer_dtype(values)
    return kind in NUMERIC


def values_of(runs: Runs, name: str) -> list[str]:
    """Return the values of a setting as text, numbers in order, others as they come."""
    values = runs[name].dropna()
    if is_numeric(runs, name):
        values = values.sort_values(kind="stable")
    texts = values.map(text)
    return list(texts.unique())


def in_order(runs: Runs) -> Runs:
    """Return runs on the same requests and device together, by the settings that decide these:
    baselines first, then the others by policy and by the other settings that vary.
    """
    work = _settings_of_work(runs)
    order = pd.DataFrame(index=runs.index)
    for name in work:
        order[name] = _ranks(runs, name)
    order["is no baseline"] = _are_swept(runs)
    for name in ("policy", *varied(runs)):
        if name not in work:
            order[name] = _ranks(runs, name)
    # A baseline lacks what its sweep varies: its NaN come first, and equal runs stay as they were.
    columns = list(map(str, order))
    ordered = order.sort_values(
        columns,
        kind="stable",
        na_position="first",
    )
    return runs.loc[ordered.index]


def _ranks(runs: Runs, name: str) -> pd.Series:
    """Return which of the values of a setting each run has, counted from 0."""
    rank_of_value = {}
    for rank, value in enumerate(values_of(runs, name)):
        rank_of_value[value] = rank
    values = runs[name].map(text)
    return values.map(rank_of_value)


def with_short_devices(runs: Runs) -> Runs:
    """Leave out what is in brackets in the names of several devices that differ without it."""
    if "device" not in runs:
        return runs
    names = runs.device.astype(str)
    short = names.str.partition(" (")[0]
    num_devices = runs.device.nunique(dropna=False)
    if num_devices > 1 and short.nunique() == num_devices:
        return runs.assign(device=short)
    return runs


def find_column(runs: Runs, name: str) -> str:
    """Return the column that `name` is or ends, as `rate` ends `workload.rate`."""
    columns = list(map(str, runs))
    matching = columns_named(name, columns)
    if len(matching) == 1:
        return matching[0]
    settings = varied(runs) + _samples(runs)
    raise no_column(name, columns, settings)


def columns_named(name: str, columns: Sequence[str]) -> list[str]:
    """Return the column `name`, else those that it ends."""
    if name in columns:
        return [name]
    ending = f".{name}"
    return [column for column in columns if column.endswith(ending)]


def no_column(
    name: str,
    columns: Sequence[str],
    settings: Sequence[str],
) -> UserError:
    """Return the error for a name of none or several of the columns, with `settings` to use."""
    matching = columns_named(name, columns)
    if matching:
        candidates = ", ".join(matching)
        problem = f"is one of {candidates}"
    else:
        similar = suggestion(name, columns)
        problem = f"is no setting or quantity of these runs{similar}"
    quantities = [quantity for quantity in WELL_KNOWN if quantity in columns]
    usable = ", ".join([*settings, *quantities])
    return UserError(f"{name} {problem}; use such as {usable}")


def relative(runs: Runs, name: str, to: str) -> Runs:
    """Return `runs` with the ratios `<name>_vs_<to>` of their values to those of the policy `to`.

    A run is compared with that policy's run on the same requests, whether it is a baseline or not.
    Where `to` ran at several chunks, it is the one at the run's own chunk, if there is one. Without
    runs of `to`, `runs` stay as they are.
    """
    base = runs[runs.policy == to]
    if base.empty or name not in runs:
        return runs
    column = f"{name}_vs_{to}"
    work = same_work(runs)
    values = ratios(runs, base, [name], work)[name]
    if varies_in_chunk(base):
        work_and_chunk = [*work, "chunk"]
        of_same_chunk = ratios(runs, base, [name], work_and_chunk)
        values = of_same_chunk[name].fillna(values)
    if column in runs:
        # A run that was held against its own baseline has the ratio already.
        values = runs[column].fillna(values)
    return runs.assign(**{column: values})


def varies_in_chunk(runs: Runs) -> bool:
    """Return whether runs of one policy differ in their chunk, as baselines of a swept one do."""
    if "chunk" not in runs:
        return False
    return runs["chunk"].nunique() > 1


def same_work(runs: Runs) -> list[str]:
    """Return the columns in which runs on the same requests and device agree."""
    return _settings_of_work(runs) + _samples(runs)


def _settings_of_work(runs: Runs) -> list[str]:
    """Return the settings that decide requests and device."""
    return varied(runs, leaving=(*SAMPLES, "policy", "chunk"))


def _samples(runs: Runs) -> list[str]:
    """Return which of `SAMPLES` the runs have."""
    return [sample for sample in SAMPLES if sample in runs]


def ratios(
    runs: Runs,
    base: Runs,
    names: Sequence[str],
    keys: Sequence[str],
) -> pd.DataFrame:
    """Divide `names` of each run by the median of the runs of `base` that agree in `keys`."""
    # Texts, as a setting may be a number in one run and missing in another.
    groups = group_keys(runs, keys)
    groups_of_base = group_keys(base, keys)
    divisors = pd.DataFrame(index=runs.index)
    for name in names:
        medians_of_base = base[name].groupby(groups_of_base).median()
        divisors[name] = groups.map(medians_of_base)
    return runs[list(names)] / divisors


def group_keys(runs: Runs, keys: Sequence[str]) -> pd.Series:
    """Return equal texts for runs that agree in `keys`."""
    if not keys:
        return pd.Series("", index=runs.index)
    columns = []
    for key in keys:
        columns.append(runs[key].map(text))
    texts_of_runs = list(zip(*columns, strict=True))
    return pd.Series(texts_of_runs, index=runs.index)


def references(runs: Runs) -> list[str]:
    """Return the policies to compare with: those of `REFERENCES`, else another baseline."""
    if runs.policy.nunique() < 2:
        return []
    policies = set(runs.policy)
    present = [name for name in REFERENCES if name in policies]
    if present or "is_baseline" not in runs:
        return present
    is_baseline = runs.is_baseline.astype(bool)
    baselines = runs.policy[is_baseline]
    return list(baselines)[:1]


def reference(runs: Runs) -> str | None:
    """Return the policy to compare with: the first of `references`."""
    return next(iter(references(runs)), None)


def medians(
    runs: Runs,
    by: Sequence[str],
    *names: str,
) -> pd.DataFrame:
    """Return the long table of a sweep.

    Args:
        runs: A row a run.
        by: Settings, each combination of which is a row for each quantity, in the runs' order.
        names: The quantities.

    Returns:
        The settings `by`, the `quantity`, its median over seeds and repetitions as `value`, `low`,
        `high` and `confidence` of its interval, `num_samples`, and whether it `is_decided` that a
        ratio differs from 1.
    """
    rows = []
    settings = list(by)
    noise_of_all = noise(runs)
    for name in names:
        with_value = runs.dropna(subset=[name])
        groups = group_keys(with_value, by)
        for _, group in with_value.groupby(groups, sort=False):
            noise_of_group = noise_of_all
            if _are_simulated(group):  # beside measured runs
                noise_of_group = DETERMINISTIC
            settings_of_group = group[settings].iloc[0]
            row = {**settings_of_group, **_median_of(group[name])}
            row["is_decided"] = is_decided(row, noise_of_group)
            rows.append(row)
    # Named, so that a table without rows has its columns, too.
    columns = [
        *settings,
        "quantity",
        "value",
        "low",
        "high",
        "confidence",
        "num_samples",
        "is_decided",
    ]
    return pd.DataFrame(rows, columns=columns)


def _median_of(values: pd.Series) -> dict[str, object]:
    """Return the median of a quantity, of its name, with its interval."""
    samples = values.astype(float)
    interval = ends_of_median(list(samples), is_series=False)
    return {
        "quantity": values.name,
        "value": samples.median(),
        "num_samples": len(samples),
        **interval._asdict(),
    }


def is_decided(row: Row, noise: float) -> bool:
    """Return whether a ratio differs from 1: its interval excludes 1, and with too few samples for
    95 % the ratio exceeds the noise. Other quantities do, and ratios to the run itself.
    """
    _, is_ratio, base = row["quantity"].partition("_vs_")
    if not is_ratio or row["policy"] == base:
        return True
    num_samples = row["num_samples"]
    if num_samples == 1 and noise == DETERMINISTIC:
        return True
    if num_samples == 1 and math.isnan(noise):
        return False  # one sample does not show the noise
    encloses_one = row["low"] <= 1 <= row["high"]
    if encloses_one:
        return False
    if num_samples >= FEWEST_PAIRS or math.isnan(noise):
        return True
    # The interval of fewer samples is too narrow: it alone decides nothing.
    ratio = row["value"]
    times = max(ratio, 1 / ratio)
    return bool(times > noise)


def _are_simulated(runs: Runs) -> bool:
    if "executor" not in runs:
        return False
    return bool((runs.executor == "simulated").all())


def noise(runs: Runs) -> float:
    """Return the largest ratio between the throughput of two runs with the same iterations
    (`schedule`): repetitions, or policies that must be equal. NaN where no two runs did the same;
    1 in simulation, which is deterministic.
    """
    if _are_simulated(without_baselines(runs)):
        return DETERMINISTIC
    if not {"schedule", "throughput"}.issubset(runs):
        return math.nan
    # Runs of one schedule do equal work: what differs is the machine.
    measured = runs.dropna(subset=["schedule", "throughput"])
    equal_work = ["schedule", *_settings_of_work(runs)]
    groups = group_keys(measured, equal_work)
    spreads = []
    for _, throughput in measured.throughput.groupby(groups):
        if len(throughput) < 2:
            continue
        spread = math.inf
        lowest = throughput.min()
        if lowest > 0:
            spread = throughput.max() / lowest
        spreads.append(spread)
    largest = max(spreads, default=math.nan)
    return float(largest)


def are_steady(runs: Runs, by: Sequence[str]) -> pd.Series:
    """Return whether more than half of the runs of each group by `by` are steady, by the group."""
    groups = group_keys(runs, by)
    is_unsteady = unsteady(runs)
    share_unsteady = is_unsteady.groupby(groups).mean()
    return share_unsteady < 0.5


def text(value: object) -> str:
    """Return a setting's value as people write it; "-" where a run has none."""
    if value is None:
        return "-"
    is_boolean = isinstance(value, bool)  # an int to Python
    if is_boolean or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "-"
    return f"{value:g}"

"""Analysis of a sweep: medians over repetitions with intervals, ratios to a reference, noise.

A table of runs has a row per run and flat columns: settings as they are typed (`chunk`,
`workload.rate`), quantities as in metrics.md. What a sweep varied is in its column `swept`, which
the sweeper fills.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError, suggestion
from sarathi_lab.config.paths import CONF
from sarathi_lab.results.intervals import FEWEST_PAIRS, ends_of_median

SAMPLES = ("repetition", "seed")  # further samples of the same case
REFERENCES = ("orca", "request_level")  # the first one present is what runs are compared with
IDENTITY = ("model", "device")  # runs of different ones are never one series
DETERMINISTIC = 1.0  # noise of a simulation
NOT_WORK = ("baselines", "output", "resume", "limit", "tracking", "repeat", "plot")


@cache
def _top_level() -> frozenset[str]:
    """Return the names at the top of conf/config.yaml, groups included."""
    config: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    groups = {key for one in config.pop("defaults") if isinstance(one, dict) for key in one}
    return frozenset({*config, *groups, "threads"} - {*NOT_WORK, "hydra", "task"})


def is_setting(name: str) -> bool:
    """Return whether a column of runs is a setting, not a quantity."""
    return name.partition(".")[0] in _top_level()


def without_baselines(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that are no baselines; all where there are only baselines."""
    if "is_baseline" not in runs or runs.is_baseline.all():
        return runs
    return runs[~runs.is_baseline.astype(bool)]


def without_repeated(runs: pd.DataFrame, names: Collection[str]) -> pd.DataFrame:
    """Leave out baselines that equal a swept run of their policy in the quantities `names`."""
    swept = without_baselines(runs)
    settings = [one for one in varied(runs) if one != "chunk"]  # baselines have none
    keys = list(dict.fromkeys(["policy", *settings, *(n for n in names if "_vs_" not in n)]))
    groups, is_swept = group_keys(runs, keys), runs.index.isin(swept.index)
    return runs[is_swept | ~groups.isin(groups[is_swept])]


def varied(runs: pd.DataFrame, leaving: Collection[str] = SAMPLES) -> list[str]:
    """Return the settings in which the runs differ, without those in `leaving` (baselines are not
    considered): of one sweep those that the sweeper stored; of runs put together model, device, and
    all that differ without those determined by others before them.
    """

    def is_left(name: str) -> bool:  # by its first or last part, as that of workload.seed
        return not {name.partition(".")[0], name.rpartition(".")[2]}.isdisjoint(leaving)

    swept = without_baselines(runs)
    stored: list[object] = list(swept.swept.unique()) if "swept" in swept else []
    is_one = len(stored) == 1 and isinstance(stored[0], str)
    is_one &= "sweep" not in swept or swept["sweep"].nunique() == 1
    known = str(stored[0]).strip("[]").split(",") if is_one else filter(is_setting, map(str, swept))
    names = [name for name in known if name in swept and not is_left(name)]
    names = [name for name in names if swept[name].map(text).nunique() > 1]
    if is_one:
        return names
    chosen = [name for name in IDENTITY if name in names]
    for name in sorted(names, key=lambda name: "." in name):
        if group_keys(swept, [*chosen, name]).nunique() > group_keys(swept, chosen).nunique():
            chosen.append(name)
    return chosen


def unsteady(runs: pd.DataFrame) -> pd.Series:
    """Return 1.0 for runs whose waits depend on their length, as they are overloaded or too short,
    and 0.0 where they do not or it was not judged.
    """
    if "is_steady" not in runs:
        return pd.Series(0.0, runs.index)
    return 1.0 - runs.is_steady.fillna(1.0).astype(float)


def is_numeric(runs: pd.DataFrame, name: str) -> bool:
    """Return whether a setting has numbers only."""
    kind = pd.api.types.infer_dtype(runs[name].dropna())
    return kind in ("integer", "floating", "mixed-integer-float")


def values_of(runs: pd.DataFrame, name: str) -> list[str]:
    """Return the values of a setting as text, numbers in order, others as they come."""
    known = runs[name].dropna()
    known = known.sort_values(kind="stable") if is_numeric(runs, name) else known
    return list(dict.fromkeys(known.map(text)))


def in_order(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs on the same requests and device together, by the settings that decide these:
    baselines first, then the others by policy and by the other settings that vary.
    """
    work = [name for name in same_work(runs) if name not in SAMPLES]
    is_baseline = ~runs.index.isin(without_baselines(runs).index)
    others = [name for name in ("policy", *varied(runs)) if name not in work]
    order = pd.DataFrame(index=runs.index)
    for name in work:
        order[name] = _places(runs, name)
    order["is no baseline"] = ~is_baseline
    for name in others:
        order[name] = _places(runs, name)
    by = list(map(str, order))
    return runs.loc[order.sort_values(by, kind="stable", na_position="first").index]


def _places(runs: pd.DataFrame, name: str) -> pd.Series:
    """Return the place of each run's value among the values of a setting."""
    places = {value: i for i, value in enumerate(values_of(runs, name))}
    return runs[name].map(text).map(places)


def with_short_devices(runs: pd.DataFrame) -> pd.DataFrame:
    """Leave out what is in brackets in the names of several devices that differ without it."""
    if "device" not in runs:
        return runs
    short = runs.device.astype(str).str.partition(" (")[0]
    is_clear = short.nunique() == runs.device.nunique(dropna=False) > 1
    return runs.assign(device=short) if is_clear else runs


def find_column(runs: pd.DataFrame, name: str) -> str:
    """Return the column that `name` is or ends, as `rate` ends `workload.rate`."""
    if name in runs:
        return name
    ends = [str(one) for one in runs if str(one).endswith(f".{name}")]
    if len(ends) == 1:
        return ends[0]
    settings = [*varied(runs), *(one for one in SAMPLES if one in runs)]
    known = ", ".join([*settings, "throughput", "ttft_p50", "tbt_p99"])
    close = suggestion(name, [*map(str, runs)])
    what = f"is one of {', '.join(ends)}" if ends else "is no setting or quantity of these runs"
    raise UserError(f"{name} {what}{close}; use such as {known}")


def relative(runs: pd.DataFrame, name: str, to: str) -> pd.DataFrame:
    """Return `runs` with `<name>_vs_<to>` filled in: divided by the run of the policy `to` on the
    same requests, a baseline or not; 1 for those runs. Unchanged if there is none.
    """
    ratio, base = f"{name}_vs_{to}", runs[runs.policy == to]
    if base.empty or name not in runs:
        return runs
    known = runs[ratio] if ratio in runs else pd.Series(math.nan, runs.index)
    return runs.assign(**{ratio: known.fillna(ratios(runs, base, [name], same_work(runs))[name])})


def same_work(runs: pd.DataFrame) -> list[str]:
    """Return the columns in which runs on the same requests and device agree."""
    settings = varied(runs, leaving=(*SAMPLES, "policy", "chunk"))
    return [*settings, *(one for one in SAMPLES if one in runs)]


def ratios(
    runs: pd.DataFrame, base: pd.DataFrame, names: Sequence[str], keys: Sequence[str]
) -> pd.DataFrame:
    """Divide `names` of each run by the median of the runs of `base` that agree in `keys`."""
    groups, others = group_keys(runs, keys), group_keys(base, keys)
    divisors = {name: groups.map(base[name].groupby(others).median()) for name in names}
    return runs[list(names)] / pd.DataFrame(divisors, runs.index)


def group_keys(runs: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Return equal texts for runs that agree in `keys`."""
    parts = [runs[key].map(text) for key in keys]
    return pd.Series(list(zip(*parts, strict=True)) if parts else "", index=runs.index)


def references(runs: pd.DataFrame) -> list[str]:
    """Return the policies to compare with: those of `REFERENCES`, else another baseline."""
    if runs.policy.nunique() < 2:
        return []
    policies = set(runs.policy)
    marks = runs.is_baseline.astype(bool) if "is_baseline" in runs else runs.policy.isna()
    return [name for name in REFERENCES if name in policies] or list(runs.policy[marks])[:1]


def reference(runs: pd.DataFrame) -> str | None:
    """Return the policy to compare with: the first of `references`."""
    return next(iter(references(runs)), None)


def medians(
    runs: pd.DataFrame, by: Sequence[str], *names: str, level: float | None = None
) -> pd.DataFrame:
    """Return the long table of a sweep: for each of the quantities `names` a row per combination of
    `by`, in the order of the runs, with those settings, the `quantity`, the median over seeds and
    repetitions as `value`, `low`, `high` and `confidence` of its interval, `num_samples`, and
    whether it `is_decided` that a ratio differs from 1, by the `level` of noise (None: that of
    these runs).
    """
    rows = list[dict[Any, Any]]()
    level = noise(runs) if level is None else level
    for name in names:
        known = runs.dropna(subset=[name])
        for _, group in known.groupby(group_keys(known, by), sort=False):
            samples = group[name].astype(float)
            ends = ends_of_median(list(samples), is_series=False)._asdict()
            row = {**group[list(by)].iloc[0], "quantity": name, "value": samples.median()}
            row |= {**ends, "num_samples": len(samples)}
            of_group = DETERMINISTIC if _are_simulated(group) else level
            rows.append({**row, "is_decided": is_decided(row, of_group)})
    columns = ["quantity", "value", "low", "high", "confidence", "num_samples", "is_decided"]
    return pd.DataFrame(rows, columns=[*by, *columns])


def is_decided(row: Mapping[Any, Any], noise: float) -> bool:
    """Return whether a ratio differs from 1: its interval excludes 1, and with too few samples for
    95 % the ratio exceeds the noise. Other quantities do, and ratios to the run itself.
    """
    _, is_ratio, base = row["quantity"].partition("_vs_")
    if not is_ratio or row["policy"] == base:
        return True
    if row["num_samples"] == 1 and noise == DETERMINISTIC:
        return True
    if row["low"] <= 1 <= row["high"] or (row["num_samples"] == 1 and math.isnan(noise)):
        return False  # one sample does not show the noise
    is_beyond = max(row["value"], 1 / row["value"]) > (1 if math.isnan(noise) else noise)
    return bool(row["num_samples"] >= FEWEST_PAIRS or is_beyond)


def _are_simulated(runs: pd.DataFrame) -> bool:
    return "executor" in runs and bool((runs.executor == "simulated").all())


def noise(runs: pd.DataFrame) -> float:
    """Return the largest ratio between the throughput of two runs with the same iterations
    (`schedule`): repetitions, or policies that must be equal. NaN where no two runs did the same;
    1 in simulation, which is deterministic.
    """
    if _are_simulated(without_baselines(runs)):
        return DETERMINISTIC
    if not {"schedule", "throughput"}.issubset(runs):
        return math.nan
    known = runs.dropna(subset=["schedule", "throughput"])
    keys = ["schedule", *(one for one in same_work(runs) if one not in SAMPLES)]
    ends = known.groupby(group_keys(known, keys)).throughput.agg(["min", "max", "size"])
    ends = ends[ends["size"] > 1]
    ratios = (ends["max"] / ends["min"]).where(ends["min"] > 0, math.inf)  # of differences
    return float(ratios.max())


def are_steady(runs: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Return whether more than half of the runs of each group by `by` are steady, by the group."""
    return unsteady(runs).groupby(group_keys(runs, by)).mean() < 0.5


def text(value: object) -> str:
    """Return a setting's value as people write it; "-" where a run has none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return str(value)

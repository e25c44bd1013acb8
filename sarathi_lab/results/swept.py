"""What a sweep varied, and what its repetitions say: settings, medians with intervals, noise.

A table of runs has a row a run and flat columns: settings as they are typed (`chunk`,
`workload.rate`), quantities as in METRICS.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError, suggestion
from sarathi_lab.config.paths import CONF
from sarathi_lab.results.intervals import FEWEST_PAIRS, ends_of_median

SAMPLES = ("repetition", "seed")  # make another sample of the same thing
# Whose effect is worth an axis first; what others settle comes last.
FIRST = ("policy", "chunk", "pd_ratio", "seq_len", "batch", "dtype", "model", "hardware", "host")
LAST = ("threads", "executor", "device")
# No settings of a run's work.
ASIDE = ("baselines", "output", "resume", "limit", "trace", "tracking", "repeat", "plot")
# Shares of iterations that were replayed as CUDA graphs, further apart than which policies are not
# compared alone: what launching costs the host is part of their ratio.
REPLAYS_APART = 0.05
REFERENCES = ("orca", "request_level")  # what runs are held against, the first that there is


@cache
def _top_level() -> frozenset[str]:
    """The names at the top of conf/config.yaml, groups included."""
    config: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    groups = {key for one in config.pop("defaults") if isinstance(one, dict) for key in one}
    return frozenset({*config, *groups, "threads"} - {*ASIDE, "hydra", "task"})


def is_setting(name: str) -> bool:
    """Whether a column of runs is a setting of theirs, not a quantity."""
    return name.partition(".")[0] in _top_level()


def own_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that were asked for, not their baselines."""
    if "is_baseline" not in runs or runs.is_baseline.all():
        return runs
    return runs[~runs.is_baseline.astype(bool)]


def without_repeated(runs: pd.DataFrame, names: Collection[str]) -> pd.DataFrame:
    """Without baselines that have the same quantities `names` as an own run of their policy, as in
    simulation; where they were measured they differ, and both stay.
    """
    if "is_baseline" not in runs or runs.is_baseline.all():
        return runs
    is_baseline = runs.is_baseline.astype(bool)
    settings = [one for one in varying_settings(runs) if one != "chunk"]  # baselines have none
    keys = list(dict.fromkeys(["policy", *settings, *(n for n in names if "_vs_" not in n)]))
    places = place(runs, keys)
    return runs[~(is_baseline & places.isin(places[~is_baseline]))]


def varying_settings(runs: pd.DataFrame, leaving: Collection[str] = SAMPLES) -> list[str]:
    """The settings in which the runs, baselines aside, differ, without those that begin or end as
    named in `leaving`; none that others before it settle, such as the name of a device by its
    number of threads.
    """
    own = own_runs(runs)
    found: list[str] = []
    names = [str(name) for name in own if is_setting(str(name))]
    # workload.seed is the seed, too, and policy.chunk the policy's
    names = [
        one for one in names if {one.partition(".")[0], one.rpartition(".")[2]}.isdisjoint(leaving)
    ]
    groups, number = np.zeros(len(own), dtype=int), 1  # of runs that agree in what is found
    for name in sorted(names, key=_rank):
        codes, values = pd.factorize(np.array([text(value) for value in own[name]], dtype=object))
        finer, _ = pd.factorize(groups * len(values) + codes)
        if len(finer) and finer.max() >= number:
            found, groups, number = [*found, name], finer, finer.max() + 1
    return found


def _rank(name: str) -> tuple[int, int]:
    if name in FIRST:
        return 0, FIRST.index(name)
    if name in LAST:
        return 3, LAST.index(name)
    return (2 if "." in name else 1), 0


def column(runs: pd.DataFrame, name: str) -> str:
    """The column that `name` is or ends, as `rate` does `workload.rate`. Raises UserError."""
    if name in runs:
        return name
    ends = [str(one) for one in runs if str(one).endswith(f".{name}")]
    if len(ends) == 1:
        return ends[0]
    found = [*varying_settings(runs), *(one for one in SAMPLES if one in runs)]
    known = ", ".join([*found, "throughput", "ttft_p50", "tbt_p99"])
    close = suggestion(name, [*map(str, runs)])
    what = f"is one of {', '.join(ends)}" if ends else "is no setting or quantity of these runs"
    raise UserError(f"{name} {what}{close}; use such as {known}")


def relative(runs: pd.DataFrame, name: str, to: str) -> pd.DataFrame:
    """`runs` with `<name>_vs_<to>` where it lacks, divided by the run of the policy `to` on the
    same requests, a baseline or not; 1 for those runs themselves. `runs` itself if there is none.
    """
    ratio, base = f"{name}_vs_{to}", runs[runs.policy == to]
    if base.empty or name not in runs:
        return runs
    own = runs[ratio] if ratio in runs else pd.Series(math.nan, runs.index)
    return runs.assign(**{ratio: own.fillna(ratios(runs, base, [name], same_work(runs))[name])})


def same_work(runs: pd.DataFrame) -> list[str]:
    """The columns in which runs on the same requests and device agree, whatever their policy."""
    settings = varying_settings(runs, leaving=(*SAMPLES, "policy", "chunk"))
    return [*settings, *(one for one in SAMPLES if one in runs)]


def ratios(
    runs: pd.DataFrame, base: pd.DataFrame, names: Sequence[str], keys: Sequence[str]
) -> pd.DataFrame:
    """The quantities `names` of each run over those of the run of `base` that agrees in `keys`: the
    median of several, NaN without one.
    """
    places, others = place(runs, keys), place(base, keys)
    divisors = {name: places.map(base[name].groupby(others).median()) for name in names}
    return runs[list(names)] / pd.DataFrame(divisors, runs.index)


def place(runs: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Equal texts for runs that agree in `keys`."""
    parts = [runs[key].map(text) for key in keys]
    return pd.Series(list(zip(*parts, strict=True)) if parts else "", index=runs.index)


def replays_apart(runs: pd.DataFrame, to: str) -> pd.Series:
    """Of each run, whether so much more or less of it was replayed (`REPLAYS_APART`) than of the
    run of the policy `to` on the same requests; False where either is unknown.
    """
    name = "replayed_fraction"
    if name not in runs:
        return pd.Series(False, runs.index)
    keys, base = same_work(runs), runs[runs.policy == to]
    others = place(runs, keys).map(base[name].groupby(place(base, keys)).median())
    return (runs[name] - others.astype(float)).abs() > REPLAYS_APART


def reference(runs: pd.DataFrame) -> str | None:
    """The policy that the runs are held against: the first of `REFERENCES` among them, else another
    baseline.
    """
    marks = runs.is_baseline.astype(bool) if "is_baseline" in runs else runs.policy.isna()
    others = list(runs.policy[marks])
    present = [*(one for one in REFERENCES if (runs.policy == one).any()), *others]
    return next(iter(present), None) if runs.policy.nunique() > 1 else None


def medians(runs: pd.DataFrame, by: Sequence[str], name: str) -> pd.DataFrame:
    """A row for every combination of `by`, in the order of the runs: those settings, the `median`
    of the quantity `name` over seeds and repetitions, `low`, `high` and `confidence` of its
    interval (`intervals.ends_of_median`), and the `number` of samples.
    """
    rows: list[dict[Hashable, Any]] = []
    known = runs.dropna(subset=[name])
    for _, group in known.groupby(place(known, by), sort=False):
        samples = group[name].astype(float)
        ends = ends_of_median(list(samples), is_series=False)._asdict()
        own: dict[Hashable, Any] = {"median": samples.median(), "number": len(samples)}
        rows.append({key: group[key].iloc[0] for key in by} | own | {**ends})
    return pd.DataFrame(rows, columns=[*by, "median", "low", "high", "confidence", "number"])


def noise(runs: pd.DataFrame, name: str = "throughput") -> float:
    """How many times as long equal work took at most: the largest ratio between the quantity `name`
    of two runs with the same iterations (`schedule`), be they repetitions or policies that must be
    equal. Not a number where no two runs did the same; 1 in simulation, which repeats itself.
    """
    if "executor" in runs and (runs.executor == "simulated").all():
        return 1.0
    if "schedule" not in runs or name not in runs:
        return math.nan
    known = runs.dropna(subset=["schedule", name])
    keys = [name for name in same_work(runs) if name not in SAMPLES]
    groups = known[name].groupby(place(known, ["schedule", *keys]))
    ends = [(part.min(), part.max()) for _, part in groups if len(part) > 1]
    ratios = [most / least if least > 0 else math.inf for least, most in ends]  # of differences
    return float(max(ratios, default=math.nan))


def is_decided(ratio: pd.Series, noise: float) -> bool:
    """Whether a ratio of `medians` differs from 1: its interval leaves 1 out, and where the samples
    are too few for one of 95 %, the ratio itself is beyond the noise.
    """
    if ratio["number"] == 1 and math.isnan(noise):
        return False  # one sample says nothing of the noise
    if ratio["low"] <= 1 <= ratio["high"]:
        return False
    is_beyond = max(ratio["median"], 1 / ratio["median"]) > (1 if math.isnan(noise) else noise)
    return bool(ratio["number"] >= FEWEST_PAIRS or is_beyond)


def text(value: object) -> str:
    """A setting's value as people write it; "-" where a run has none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return str(value)

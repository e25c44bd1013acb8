"""Which runs a sweep has: all combinations of its settings' values, those that would be the same
once, in as many rounds as it repeats.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.config.arguments import name_of
from sarathi_lab.config.effects import READ_BY, chosen, reads
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.explain import explained
from sarathi_lab.config.instantiate import class_of, copied, resolved
from sarathi_lab.config.jobs import Job

ROUND = "repetition"  # the setting that numbers the rounds of a sweep
MOST_JOBS = 10_000  # of a sweep; all of them are checked before the first one runs


def combinations(settings: Sequence[Override]) -> list[list[str]]:
    """All combinations of the settings' values; of two settings of a key the last counts."""
    values: dict[str, list[str]] = {}
    num_jobs = 1
    for override in settings:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            first = islice(override.sweep_string_iterator(), MOST_JOBS + 1)
            values[key] = [f"{key}={value}" for value in first]
        else:
            raise UserError(
                f"{override.input_line} has no end of values; name them, as in {key}=1,2, or add "
                "hydra/sweeper=optuna_search"
            )
        if not values[key]:
            raise UserError(f"{override.input_line} names no value; name at least one")
        num_jobs *= len(values[key])
        if num_jobs > MOST_JOBS:
            raise UserError(
                f"{override.input_line} makes a sweep of more than {MOST_JOBS} runs; name fewer "
                "values, or let hydra/sweeper=optuna_search choose"
            )
    return [list(job) for job in product(*values.values())]


def without_lacking(
    jobs: Sequence[list[str]],
    varied: Collection[str],
    composer: Composer,
    notes: dict[str, None],
) -> list[list[str]]:
    """The jobs without fields of a swept option, such as `policy.watermark`, that their own option
    lacks and another one has; those that are equal then once, with a note.
    """
    names = dict.fromkeys(name_of(setting) for job in jobs for setting in job)
    fields = [name for name in names if "." in name and name.partition(".")[0] in varied]
    if not fields:
        return list(jobs)
    groups = {name.partition(".")[0] for name in fields}
    lacking: dict[tuple[str, ...], set[str]] = {}
    for job in jobs:
        if (chosen := _of(job, groups)) not in lacking:
            left = [setting for setting in job if name_of(setting) not in fields]
            cfg = composer.job(left).cfg
            lacking[chosen] = {name for name in fields if not _has(cfg, name)}
    nowhere = set.intersection(*lacking.values())  # a mistake, which composing them tells
    found: dict[tuple[str, ...], None] = {}
    for job in jobs:
        aside = lacking[_of(job, groups)] - nowhere
        found[tuple(setting for setting in job if name_of(setting) not in aside)] = None
        notes |= dict.fromkeys(
            _run_once(" ".join(_of(job, {name.partition(".")[0]})), name)
            for name in aside.intersection(varied)
        )
    return [list(job) for job in found]


def _of(job: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(setting for setting in job if name_of(setting) in names)


def _has(cfg: DictConfig, name: str) -> bool:
    *parents, last = name.split(".")
    node: Any = cfg
    for part in parents:
        node = node.get(part) if OmegaConf.is_dict(node) else None
    return OmegaConf.is_dict(node) and last in node


def _run_once(reader: str, name: str) -> str:
    return f"{reader} does not read {name}: run once for all its values"


def collapsed(
    jobs: Sequence[Job],
    names: Sequence[str],
    composer: Composer,
    notes: dict[str, None],
) -> list[Job]:
    """The jobs, of those that differ only in settings of `names` that they do not read one; and a
    note for each such setting.
    """
    found: dict[tuple[str, ...], Job] = {}
    for job in jobs:
        aside = [name for name in names if not reads(job.cfg, name)]
        kept = tuple(one for one in job.settings if name_of(one) not in aside)
        if kept not in found:
            found[kept] = composer.job(kept) if aside else job
        readers = {name: chosen(job.composed, READ_BY[name][0]) for name in aside}
        notes |= dict.fromkeys(_run_once(reader, name) for name, reader in readers.items())
    return list(found.values())


def num_rounds_of(
    job: Job, varied: Collection[str], notes: dict[str, None], *, is_search: bool
) -> int:
    """How many rounds of the sweep the job is part of (`repeat`). Raises UserError."""
    task, repeat = class_of(job.cfg, "task"), job.cfg.repeat
    is_measured = getattr(class_of(job.cfg, "executor"), "computes_tokens", True)
    if repeat == "auto":
        is_sampled = is_search or {ROUND, "seed"} & set(varied)
        return getattr(task, "num_rounds", 1) if is_measured and not is_sampled else 1
    require_int("repeat", repeat, 1, "use a number of rounds such as 6, or auto", MOST_JOBS)
    if repeat > 1 and is_search:
        raise UserError(f"repeat={repeat} has no effect on a search; drop it")
    if repeat > 1 and ROUND in varied:
        raise UserError(f"repeat={repeat} and {ROUND} both number the rounds; drop one")
    if repeat > 1 and not is_measured:
        notes["simulated runs repeat themselves: run in one round"] = None
        return 1
    return repeat


def repeated(jobs: Sequence[Job], num_rounds: Sequence[int]) -> list[Job]:
    """All jobs of one round after those of another, as the machine's speed wanders."""
    if (number := sum(num_rounds)) > MOST_JOBS:
        raise UserError(
            f"repeat={max(num_rounds)} makes a sweep of {number} runs, more than {MOST_JOBS}; use "
            "fewer rounds or values"
        )
    return [
        _of_round(job, i)
        for i in range(max(num_rounds))
        for job, most in zip(jobs, num_rounds, strict=True)
        if i < most
    ]


def _of_round(job: Job, number: int) -> Job:
    """A copy, as composing anew takes nine times as long."""
    composed, setting = copied(job.composed), f"{ROUND}={number}"
    with read_write(composed):
        composed[ROUND] = number
        composed.hydra.overrides.task.append(setting)
    return make_job([*job.settings, setting], composed)


@dataclass
class Composer:
    """Makes the jobs of the sweep that `master` describes.

    Hydra composes once for every choice of options. Jobs that differ in values alone are copies of
    that with the values set as Hydra does: composing anew takes nine times as long. What adds,
    forces or deletes is left to Hydra, as its place among the changes counts.
    """

    master: DictConfig
    loader: ConfigLoader
    _composed: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)

    def job(self, settings: Sequence[str]) -> Job:
        """The job of these settings. Raises UserError."""
        with explained(settings, self.loader):  # its own settings, not the sweep's
            parsed = OverridesParser.create(self.loader).parse_overrides(list(settings))
            if any(one.type != OverrideType.CHANGE or one.package is not None for one in parsed):
                return make_job(settings, self._compose(settings))
            values = [override for override in parsed if self._is_value(override)]
            try:
                return make_job(settings, self._with(values, parsed))
            except OmegaConfBaseException:  # Hydra says which setting is wrong
                return make_job(settings, self._compose(settings))

    def _is_value(self, override: Override) -> bool:
        """Whether it changes a value that is there, not which files are composed."""
        key = override.key_or_group
        return key not in self.master.hydra.runtime.choices and "/" not in key

    def _compose(self, settings: Sequence[str]) -> DictConfig:
        return self.loader.load_sweep_config(self.master, list(settings))

    def _with(self, values: Sequence[Override], parsed: Sequence[Override]) -> DictConfig:
        lines = [str(o.input_line) for o in parsed]
        others = [str(o.input_line) for o in parsed if o not in values]
        key = (*self.master.hydra.overrides.hydra, *others)  # a search adds its folder
        if key not in self._composed:
            self._composed[key] = self._compose(others)
        composed = copied(self._composed[key])
        OmegaConf.copy_cache(from_config=self.master, to_config=composed)  # such as ${now:}
        for override in values:
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
        job = composed.hydra.job
        words = job.config.override_dirname
        named = [str(o.input_line) for o in parsed if o.key_or_group not in words.exclude_keys]
        with read_write(composed):
            composed.hydra.overrides.task = lines
            job.override_dirname = re.sub("=", words.kv_sep, words.item_sep.join(sorted(named)))
        return composed


def make_job(settings: Sequence[str], composed: DictConfig) -> Job:
    """The job of a composed configuration. Raises UserError for one that can't be resolved."""
    job = Job.of(settings, composed)
    resolved(job.cfg)  # a broken ${...} shows here
    return job

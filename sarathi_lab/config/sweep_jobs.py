"""The jobs of a command line: all combinations of its values, those that would be equal once, in
as many rounds as it repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sarathi_lab.config.arguments import name_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.hydra_errors import GROUPS, explained
from sarathi_lab.config.instantiate import build, class_of, copied, resolved
from sarathi_lab.config.unused_settings import READ_BY, check_job, chosen, fit_targets, reads

ROUND = "repetition"  # the setting that numbers the rounds of a sweep
MOST_JOBS = 10_000  # of a sweep; all of them are checked before the first one runs


@dataclass
class Job:
    """The configuration of one run, and what its task's check has prepared for it."""

    settings: tuple[str, ...]
    composed: DictConfig  # with Hydra's node
    prepared: Any = None

    @cached_property
    def cfg(self) -> DictConfig:
        """The configuration without Hydra's node. Raises UserError if it can't be resolved."""
        cfg = copied(self.composed)
        with open_dict(cfg):
            del cfg["hydra"]
        resolved(cfg)
        return cfg

    def check(self) -> None:
        """Let the task check and prepare its run. Raises UserError."""
        hydra = HydraConfig.instance()
        before = hydra.cfg
        hydra.set_config(self.composed)
        try:
            self.prepared = build(self.cfg.task).check(self.cfg)
        finally:
            hydra.cfg = before

    def take_prepared(self) -> Any:
        """Return what the check has prepared, which is kept here no longer."""
        prepared, self.prepared = self.prepared, None
        return prepared


def swept_names(settings: Sequence[Override]) -> tuple[str, ...]:
    """The names of the settings that have several values."""
    varied = (setting for setting in settings if setting.is_sweep_override())
    return tuple(setting.get_key_element().lstrip("+") for setting in varied)


def combine(settings: Sequence[Override]) -> list[tuple[str, ...]]:
    """All combinations of the settings' values; of two settings of a name the last counts."""
    values: dict[str, list[str]] = {}
    num_jobs = 1
    for setting in settings:
        key = setting.get_key_element()
        if not setting.is_sweep_override():
            values[key] = [f"{key}={setting.get_value_element_as_str()}"]
        elif setting.is_discrete_sweep():
            first = islice(setting.sweep_string_iterator(), MOST_JOBS + 1)
            values[key] = [f"{key}={value}" for value in first]
        else:
            raise UserError(
                f"{setting.input_line} has no end of values; name them, as in {key}=1,2, or add "
                "hydra/sweeper=optuna_search"
            )
        if not values[key]:
            raise UserError(f"{setting.input_line} names no value; name at least one")
        num_jobs *= len(values[key])
        if num_jobs > MOST_JOBS:
            raise UserError(
                f"{setting.input_line} makes a sweep of more than {MOST_JOBS} runs; name fewer "
                "values, or let hydra/sweeper=optuna_search choose"
            )
    return list(product(*values.values()))


@dataclass
class JobMaker:
    """Composes the jobs of the sweep or the run that `master` describes."""

    master: DictConfig
    loader: ConfigLoader
    varied: Sequence[str] = ()
    notes: dict[str, None] = field(default_factory=dict)  # for the user, as an ordered set

    def compose(self, settings: Sequence[str]) -> Job:
        """Compose the job of these settings. Raises UserError."""
        with explained(settings, self.loader):
            job = Job(tuple(settings), self.loader.load_sweep_config(self.master, list(settings)))
            assert job.cfg  # a broken ${...} shows here
        return job

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse settings that none of the jobs reads."""
        several = jobs if len(jobs) > 1 else ()
        read = {name for name in READ_BY if any(reads(job.cfg, name) for job in several)}
        for job in jobs:
            check_job(job.composed, job.cfg, job.settings, read)

    def all_jobs(self, combinations: Sequence[tuple[str, ...]]) -> list[Job]:
        """Compose the jobs of all combinations, without what their options do not read where those
        of other jobs do; so those that would be equal are one, with a note.
        """
        groups = {"experiment", *GROUPS}
        groups &= {name.partition(".")[0] for name in self.varied}
        names = dict.fromkeys(name_of(setting) for job in combinations for setting in job)
        fields = {name for name in names if "." in name and name.partition(".")[0] in groups}
        fields -= {name for name in fields if name.endswith("._target_")}
        unread: dict[tuple[str, ...], set[str]] = {}
        for job in combinations if groups else ():
            choice = _choice(job, groups)
            if choice not in unread:
                options = self.compose([one for one in job if name_of(one) not in fields])
                unread[choice] = {name for name in fields if not _has(options.cfg, name)}
                short = [name for name in READ_BY if name in self.varied]
                unread[choice] |= {name for name in short if not reads(options.cfg, name)}
                self._note(options, unread[choice])
        # What no option reads is a mistake, which composing or checking refuses.
        nowhere = set.intersection(*unread.values()) if unread else set()
        kept = dict.fromkeys(
            tuple(one for one in job if name_of(one) not in unread[_choice(job, groups)] - nowhere)
            if groups
            else job
            for job in combinations
        )
        return [self.compose(settings) for settings in kept]

    def _note(self, options: Job, unread: set[str]) -> None:
        for name in self.varied:
            if name in unread:
                group = READ_BY.get(name, (name.partition(".")[0],))[0]
                reader = chosen(options.composed, group)
                self.notes[f"{reader} does not read {name}: run once for all its values"] = None

    def num_rounds(self, job: Job, *, is_search: bool) -> int:
        """How many rounds of the sweep `job` is part of (`repeat`). Raises UserError."""
        task, repeat = class_of(job.cfg, "task"), job.cfg.repeat
        is_measured = getattr(class_of(job.cfg, "executor"), "computes_tokens", True)
        if repeat == "auto":
            is_sampled = is_search or {ROUND, "seed"} & set(self.varied)
            return getattr(task, "num_rounds", 1) if is_measured and not is_sampled else 1
        require_int("repeat", repeat, 1, "use a number of rounds such as 6, or auto", MOST_JOBS)
        if repeat > 1 and is_search:
            raise UserError(f"repeat={repeat} has no effect on a search; drop it")
        if repeat > 1 and ROUND in self.varied:
            raise UserError(f"repeat={repeat} and {ROUND} both number the rounds; drop one")
        if repeat > 1 and not is_measured:
            self.notes["simulated runs repeat themselves: run in one round"] = None
            return 1
        return int(repeat)


def in_rounds(jobs: Sequence[Job], num_rounds: Sequence[int]) -> list[Job]:
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
    """A copy with its round, as composing takes longer."""
    composed, setting = copied(job.composed), f"{ROUND}={number}"
    with read_write(composed):
        composed[ROUND] = number
        composed.hydra.overrides.task.append(setting)
    copy = Job((*job.settings, setting), composed)
    fit_targets(copy.cfg, copy.settings)
    return copy


def _choice(job: Sequence[str], groups: set[str]) -> tuple[str, ...]:
    """The settings that choose options of `groups`."""
    return tuple(
        one
        for one in job
        if name_of(one) in groups or name_of(one).removesuffix("._target_") in groups
    )


def _has(cfg: DictConfig, name: str) -> bool:
    *parents, last = name.split(".")
    node: Any = cfg
    for part in parents:
        node = node.get(part) if OmegaConf.is_dict(node) else None
    return OmegaConf.is_dict(node) and last in node

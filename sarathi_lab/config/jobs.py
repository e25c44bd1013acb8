"""Jobs of a command line: what Hydra composes of options, and values of settings set on that."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Self

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sarathi_lab.config import stated
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import (
    CHOICES,
    ROUND,
    Settings,
    Values,
    check_baselines,
    check_structure,
    check_values,
    copier,
    fit_targets,
    is_measured,
    name_of,
    read_by,
    resolved,
    settings_of,
    target_of,
)
from sarathi_lab.config.task_traits import traits_of

Compose = Callable[[list[str]], DictConfig]
OF_SIMULATION = ("hardware", "host")
READ_BY_ALL_TASKS = (
    *("task", "experiment", "tracking", "output", "resume", "skip_invalid", "hydra"),
)
OF_RUNS = ("repeat", ROUND, "plot")  # read for tasks whose runs a sweep compares
MOST_ROUNDS = 1000
MOST_JOBS = 10_000  # of a sweep; all of them are checked before the first one runs


class ComposedOptions:
    """What Hydra makes of a combination of options, shared by all jobs that choose them."""

    def __init__(self, composed: DictConfig, settings: Settings) -> None:
        """Check what the options decide.

        Args:
            composed: The configuration with Hydra's node.
            settings: One job's, as they are typed; those of other jobs have the same names.

        Raises:
            UserError: The classes do not take these settings.
        """
        self.composed = composed
        if "baselines" in composed:
            check_baselines(composed.baselines)  # before classes are imported, which takes seconds
        check_structure(composed)
        # Hydra's node takes longest to copy, and no task reads it.
        names = [str(name) for name in composed if name != "hydra"]
        self.cfg: DictConfig = OmegaConf.masked_copy(composed, names)
        fit_targets(self.cfg, settings)
        self._copy = copier(self.cfg)

    def with_values(self, values: Values) -> DictConfig:
        """Return a copy of the configuration, without Hydra's node, with these values."""
        cfg = self._copy()
        _set_values(cfg, values)
        return cfg

    def for_hydra(self, settings: Settings, values: Values) -> DictConfig:
        """Return the configuration of a job as Hydra composes it of its `settings`."""
        # Launchers and callbacks read these from Hydra's node, as if each job had been composed.
        composed = self.composed.copy()
        _set_values(composed, values)
        hydra = composed.hydra
        separator = hydra.job.config.override_dirname.item_sep
        own = [setting for setting in settings if not name_of(setting).startswith("hydra")]
        with read_write(hydra), open_dict(hydra):
            hydra.overrides.task = own
            hydra.job.override_dirname = separator.join(sorted(own))
        return composed

    def reads(self, name: str) -> bool:
        """Return whether its options read a short name, or have the field GROUP.NAME."""
        group, _, parameter = name.rpartition(".")
        if group:
            node = OmegaConf.select(self.cfg, group)
            return OmegaConf.is_dict(node) and parameter in node
        # A short name such as `chunk` is read where a chosen option has ${chunk}.
        interpolation = f"${{{name}}}"
        for reader in read_by()[name]:
            if interpolation in OmegaConf.to_yaml(self.cfg[reader]):
                return True
        return False

    def reader(self, name: str) -> str:
        """Return the classes that a setting is for."""
        own_group = name.partition(".")[0]
        names = []
        for group in read_by().get(name, (own_group,)):
            target = target_of(self.cfg, group)
            names.append(target.__name__)
        return " and ".join(names)

    def refuse_unread(self, settings: Settings) -> None:
        """Refuse what the task does not read, and a short name that no chosen option reads."""
        task = traits_of(self.cfg)
        read = set(READ_BY_ALL_TASKS)
        if task.has_runs:
            read.update(OF_RUNS)
        if task.reads is not None:
            read.update(task.reads)
        for setting in settings:
            typed = name_of(setting)
            name = re.split(r"[./]", typed)[0]
            # A task reads a whole group, or some of its settings.
            if task.reads is not None and name not in read and typed not in read:
                raise _unread(setting, typed, task.__name__)
            if name not in read_by() or self.reads(name):
                continue
            remedy = ""
            if name in OF_SIMULATION:
                remedy = ", or simulate it by executor=simulated"
            raise _unread(setting, name, self.reader(name), remedy)


def _set_values(cfg: DictConfig, values: Values) -> None:
    """Set values in `cfg`, by their dotted names."""
    for name, value in values.items():
        OmegaConf.update(cfg, name, value)


def _unread(setting: str, name: str, reader: str, remedy: str = "") -> UserError:
    return UserError(f"{setting} has no effect: {reader} does not read {name}; drop it{remedy}")


@dataclass
class Job:
    """One run: its settings as they are typed, and what its task's check has prepared for it."""

    settings: tuple[str, ...]
    composition: ComposedOptions
    values: Values = field(default_factory=dict)  # set on the composition
    prepared: Any = None

    @cached_property
    def cfg(self) -> DictConfig:
        """The configuration without Hydra's node."""
        cfg = self.composition.with_values(self.values)
        check_values(cfg)
        stated.follow_stated(cfg, self.settings)
        return cfg

    @cached_property
    def config(self) -> dict[str, Any]:
        """`cfg` as plain values."""
        return resolved(self.cfg)

    @property
    def choices(self) -> Mapping[str, str | None]:
        """The option of each group."""
        choices: Mapping[str, str | None] = self.composition.composed.hydra.runtime.choices
        return choices

    def composed(self) -> DictConfig:
        """Return the configuration with Hydra's node, as Hydra's `run_job` takes it."""
        return self.composition.for_hydra(self.settings, self.values)

    def named(self, swept: Collection[str]) -> str:
        """Return the settings of the sweep that it has, as they are typed."""
        return " ".join(settings_of(self.settings, swept))

    def num_rounds(self, swept: Collection[str]) -> int:
        """Return of how many rounds of its sweep it is part (`repeat`). Raises UserError."""
        repeat = self.cfg.repeat
        takes_time = is_measured(self.cfg)
        if repeat == "auto":
            # Repetitions and seeds are rounds already, and a simulation repeats itself exactly.
            numbers_itself = ROUND in swept or "seed" in swept
            if numbers_itself or not takes_time:
                return 1
            return traits_of(self.cfg).num_rounds
        require_int("repeat", repeat, 1, "use a number of rounds such as 6, or auto", MOST_ROUNDS)
        if repeat > 1 and ROUND in swept:
            raise UserError(f"repeat={repeat} has no effect: {ROUND} numbers them; drop it")
        if takes_time:
            return int(repeat)
        return 1

    def in_round(self, number: int) -> Self:
        """Return a copy for a round of the sweep."""
        settings = (*self.settings, f"{ROUND}={number}")
        values = {**self.values, ROUND: number}
        return replace(self, settings=settings, values=values)


def first_of_compositions(jobs: Sequence[Job]) -> list[Job]:
    """Return the first job of each composition: the others of thousands have the same settings, by
    other values.
    """
    first_jobs: dict[int, Job] = {}
    for job in jobs:
        # The jobs keep their compositions alive, so that no two have one id.
        number = id(job.composition)
        first_jobs.setdefault(number, job)
    return list(first_jobs.values())


class Composer:
    """Composes each combination of options once, and sets the values of other settings on it.

    Composing takes Hydra 0.2 s, and a sweep of thousands of jobs has a few combinations of options.
    """

    def __init__(self, compose: Compose, settings: Sequence[Override]) -> None:
        """Make a composer of the jobs of a command line.

        Args:
            compose: Lets Hydra compose the settings of one job.
            settings: All settings of the command line, with all their values.
        """
        self._compose = compose
        self._compositions: dict[tuple[str, ...], ComposedOptions] = {}
        self._values: dict[str, object] = {}  # by setting, as typed
        self._parser = OverridesParser.create()
        # Names of settings whose values are set on a composition.
        self._single_valued: set[str] = set()
        for setting in settings:
            if _has_single_values(setting, settings):
                self._single_valued.add(setting.get_key_element())

    def job(self, settings: Settings) -> Job:
        """Compose the job of these settings. Raises UserError, or what Hydra raises."""
        values = {}
        options = []
        for setting in settings:
            name = setting.partition("=")[0]
            if name in self._single_valued:
                values[name] = self._value(setting)
                options.append(name)
            else:
                options.append(setting)
        # Hydra composes with the first job's values, on which the others' are set.
        key = tuple(options)  # jobs that differ in values alone share a composition
        if key not in self._compositions:
            composed = self._compose(list(settings))
            composition = ComposedOptions(composed, settings)
            self._compositions[key] = composition
        return Job(tuple(settings), self._compositions[key], values)

    def _value(self, setting: str) -> object:
        if setting not in self._values:
            override = self._parser.parse_override(setting)
            self._values[setting] = override.value()
        return self._values[setting]


def _has_single_values(setting: Override, settings: Sequence[Override]) -> bool:
    """Return whether a swept setting has values that can be set on what others decide."""
    name = setting.key_or_group
    # The key of a setting that is added or removed has + or ~ before its name.
    is_changed = setting.is_discrete_sweep() and setting.get_key_element() == name
    if not is_changed or is_choice(name) or _has_nodes(setting):
        return False
    # A node that is stated whole is merged with its settings in the order of the command line.
    for neighbour in settings:
        node = neighbour.key_or_group
        if node not in CHOICES and (_is_within(name, node) or _is_within(node, name)):
            return False
    return True


def _is_within(name: str, node: str) -> bool:
    return name.startswith(f"{node}.")


def _has_nodes(setting: Override) -> bool:
    """Return whether a value is a list or a mapping."""
    # A range may have more values than memory holds; `combine` refuses it later.
    values = islice(setting.sweep_string_iterator(), MOST_JOBS)
    return any(value.startswith(("[", "{")) for value in values)


def is_choice(name: str) -> bool:
    """Return whether a setting decides what is composed: an option, a class, or one of Hydra's."""
    if name in CHOICES or "/" in name:
        return True
    group, _, _ = name.partition(".")
    return group == "hydra" or name.endswith("._target_")

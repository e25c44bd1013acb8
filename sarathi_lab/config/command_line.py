"""Composes every job of a command line, so that a mistake in the last one shows before the first
one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

from sarathi_lab.config.arguments import Arguments, read_arguments
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.effects import READ_BY, check_job, check_single, check_sweep, reads
from sarathi_lab.config.errors import UserError, require_bool
from sarathi_lab.config.explain import explained
from sarathi_lab.config.instantiate import build, class_of, make_loader, resolved
from sarathi_lab.config.jobs import Job
from sarathi_lab.config.sweep_search import OptunaSearch

MOST_JOBS = 10_000  # of a sweep; all of them are checked before the first one runs


@dataclass
class CommandLine:
    """Every job, composed once, and where the results will go."""

    loader: ConfigLoader
    master: DictConfig  # of the sweep; of a single run its own
    jobs: list[Job]  # of a search: those at the ends of its space
    results_dir: Path
    is_sweep: bool
    arguments: tuple[str, ...]  # as typed
    settings: tuple[Override, ...] = ()  # what decides a sweep's jobs, its experiment's included
    search: OptunaSearch | None = None  # chooses the jobs as it goes
    notes: tuple[str, ...] = ()  # on jobs that are run once for several values

    @property
    def swept(self) -> tuple[str, ...]:
        """The settings that a sweep varies."""
        varied = (override for override in self.settings if override.is_sweep_override())
        return tuple(override.get_key_element().lstrip("+") for override in varied)

    @property
    def is_apart(self) -> bool:
        """Whether jobs run in other processes, by one of Hydra's launchers."""
        return self.is_sweep and self.master.hydra.runtime.choices["hydra/launcher"] != "basic"

    def check(self) -> None:
        """Let the tasks check and prepare all jobs. Raises UserError."""
        with progress_of("checking", len(self.jobs), "runs") as advance:
            for job in self.jobs:
                job.check()
                if self.is_apart:
                    job.take_prepared()  # other processes prepare their own
                advance(1)

    def job(self, settings: Sequence[str]) -> Job:
        """The job of these settings: the checked one if there is one, else composed now."""
        same = (job for job in self.jobs if job.settings == tuple(settings) and job.is_checked)
        return next(same, None) or _compose_job(settings, self.master, self.loader)


def read_command_line(args: Sequence[str]) -> CommandLine:
    """Compose all jobs of a command line and check their settings. Raises UserError."""
    arguments = read_arguments(args)
    loader = make_loader()
    with explained(arguments.settings, loader):
        parsed = OverridesParser.create(loader).parse_overrides(list(arguments.settings))
        master, is_sweep = _compose_master(arguments, parsed, loader)
        require_bool("hydra.verbose", master.hydra.verbose, "use true to log more, else false")
        if is_sweep:
            return _sweep(arguments, parsed, master, loader)
        check_single(arguments.settings)
        job = _resolvable(arguments.settings, master)
    check_job(job.cfg, job.settings, (), loader)
    folder = Path(str(master.hydra.run.dir))
    return CommandLine(loader, master, [job], folder, False, tuple(arguments.of_run))


def _compose_master(
    arguments: Arguments, parsed: Sequence[Override], loader: ConfigLoader
) -> tuple[DictConfig, bool]:
    """What a sweep's jobs share, or the single run; an experiment may ask for a sweep, too."""
    settings = list(arguments.settings)
    if arguments.is_multirun or any(override.is_sweep_override() for override in parsed):
        mode = ["hydra.mode=MULTIRUN"] if arguments.is_multirun else []
        master = loader.load_configuration(
            "config", [*settings, *mode], RunMode.MULTIRUN, validate_sweep_overrides=False
        )
        if master.hydra.mode == RunMode.MULTIRUN:
            return master, True
    master = loader.load_configuration("config", settings, RunMode.RUN)
    return master, master.hydra.mode == RunMode.MULTIRUN


def _sweep(
    arguments: Arguments, parsed: Sequence[Override], master: DictConfig, loader: ConfigLoader
) -> CommandLine:
    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    settings = [*OverridesParser.create(loader).parse_overrides(params), *parsed]
    settings = [override for override in settings if not override.is_hydra_override()]
    check_sweep(master.hydra.overrides.hydra, master.hydra.launcher.get("n_jobs"))
    search = _make_search(master)
    jobs = [
        _compose_job(job, master, loader)
        for job in (search.extremes(settings) if search else _combinations(settings))
    ]
    read = {name for name in READ_BY if any(reads(job.cfg, name) for job in jobs)}
    varied = {override.get_key_element() for override in settings if override.is_sweep_override()}
    notes: list[str] = []
    if search is None:
        jobs, notes = _collapsed(
            jobs, [name for name in READ_BY if name in varied & read], master, loader
        )
    for job in jobs:
        check_job(job.cfg, job.settings, read, loader)
    return CommandLine(
        loader,
        master,
        jobs=jobs,
        results_dir=Path(str(master.hydra.sweep.dir)),
        is_sweep=True,
        arguments=tuple(arguments.of_run),
        settings=tuple(settings),
        search=search,
        notes=tuple(notes),
    )


def _collapsed(
    jobs: Sequence[Job], names: Sequence[str], master: DictConfig, loader: ConfigLoader
) -> tuple[list[Job], list[str]]:
    """The jobs, of those that differ only in settings of `names` that they do not read one; and a
    line for each such setting.
    """
    found: dict[tuple[str, ...], Job] = {}
    unread: dict[str, None] = {}
    for job in jobs:
        aside = [name for name in names if not reads(job.cfg, name)]
        kept = tuple(one for one in job.settings if one.partition("=")[0] not in aside)
        if kept not in found:
            found[kept] = _compose_job(kept, master, loader) if aside else job
        for name in aside:
            reader = class_of(job.cfg, READ_BY[name][0]).__name__
            unread[f"{reader} does not read {name}: run once for all its values"] = None
    return list(found.values()), list(unread)


def _make_search(master: DictConfig) -> OptunaSearch | None:
    """The search that the sweeper makes, None for all combinations."""
    name = master.hydra.runtime.choices["hydra/sweeper"]
    if name == "basic":
        return None
    if not str(master.hydra.sweeper["_target_"]).endswith(f".{OptunaSearch.__name__}"):
        raise UserError(
            f"hydra/sweeper={name} is not one of the lab's; use basic (all combinations) or "
            "optuna_search"
        )
    return build(master.hydra.sweeper)


def _combinations(settings: Sequence[Override]) -> list[list[str]]:
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


def _compose_job(settings: Sequence[str], master: DictConfig, loader: ConfigLoader) -> Job:
    """A job of the sweep that `master` describes. Raises UserError."""
    with explained(settings, loader):  # its own settings, not the sweep's
        return _resolvable(settings, loader.load_sweep_config(master, list(settings)))


def _resolvable(settings: Sequence[str], composed: DictConfig) -> Job:
    job = Job.of(settings, composed)
    resolved(job.cfg)  # a broken ${...} shows here
    return job

"""Composes every job of a command line, so that a mistake in the last one shows before the first
one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

from sarathi_lab.config.arguments import Arguments, read_arguments
from sarathi_lab.config.combinations import (
    ROUND,
    Composer,
    collapsed,
    combinations,
    make_job,
    num_rounds_of,
    repeated,
    without_lacking,
)
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.effects import (
    READ_BY,
    check_job,
    check_single,
    check_sweep,
    check_varied,
    reads,
)
from sarathi_lab.config.errors import UserError, require_bool
from sarathi_lab.config.explain import explained
from sarathi_lab.config.instantiate import build, make_loader
from sarathi_lab.config.jobs import Job
from sarathi_lab.config.sweep_search import OptunaSearch


@dataclass
class CommandLine:
    """Every job, composed once, and where the results will go."""

    composer: Composer
    jobs: list[Job]  # of a search: those at the ends of its space
    results_dir: Path
    is_sweep: bool
    arguments: tuple[str, ...]  # as typed
    settings: tuple[Override, ...] = ()  # what decides a sweep's jobs, its experiment's included
    search: OptunaSearch | None = None  # chooses the jobs as it goes
    notes: tuple[str, ...] = ()  # on jobs that are run once for several values

    @property
    def master(self) -> DictConfig:
        """What a sweep's jobs share; of a single run its own."""
        return self.composer.master

    @property
    def swept(self) -> tuple[str, ...]:
        """The settings that a sweep varies."""
        varied = (override for override in self.settings if override.is_sweep_override())
        return tuple(override.get_key_element().lstrip("+") for override in varied)

    @property
    def is_apart(self) -> bool:
        """Whether jobs run in other processes, by one of Hydra's launchers."""
        return self.is_sweep and self.launcher != "basic"

    @property
    def launcher(self) -> str:
        """The one of Hydra's that runs a sweep's jobs."""
        return str(self.master.hydra.runtime.choices["hydra/launcher"])

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
        return next(same, None) or self.composer.job(settings)


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
        job = make_job(arguments.settings, master)
    check_job(job.composed, job.cfg, job.settings, (), loader)
    folder = Path(str(master.hydra.run.dir))
    return CommandLine(Composer(master, loader), [job], folder, False, tuple(arguments.of_run))


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
    composer = Composer(master, loader)
    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    settings = [*OverridesParser.create(loader).parse_overrides(params), *parsed]
    settings = [override for override in settings if not override.is_hydra_override()]
    check_sweep(master.hydra.overrides.hydra, master.hydra.launcher.get("n_jobs"))
    search = _make_search(master)
    varied = {override.get_key_element() for override in settings if override.is_sweep_override()}
    check_varied(varied)
    notes: dict[str, None] = {}  # as an ordered set
    if search is not None:
        jobs = [composer.job(job) for job in search.extremes(settings)]
    else:
        kept = without_lacking(combinations(settings), varied, composer, notes)
        jobs = [composer.job(job) for job in kept]
    read = {name for name in READ_BY if any(reads(job.cfg, name) for job in jobs)}
    if search is None:
        names = [name for name in READ_BY if name in varied & read]
        jobs = collapsed(jobs, names, composer, notes)
    for job in jobs:
        check_job(job.composed, job.cfg, job.settings, read, loader)
    num_rounds = [num_rounds_of(job, varied, notes, is_search=search is not None) for job in jobs]
    if (most := max(num_rounds, default=1)) > 1:
        jobs = repeated(jobs, num_rounds)
        settings.append(OverridesParser.create(loader).parse_override(f"{ROUND}=range({most})"))
    return CommandLine(
        composer,
        jobs=jobs,
        results_dir=Path(str(master.hydra.sweep.dir)),
        is_sweep=True,
        arguments=tuple(arguments.of_run),
        settings=tuple(settings),
        search=search,
        notes=tuple(notes),
    )


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

"""One job: its configuration, its check, its run in the folder that Hydra makes, and how it ended
there.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks  # HydraContext wants one; there is no public way
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job as run_in_folder
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict, read_write

from sarathi_lab.config.apart import call_apart
from sarathi_lab.config.arguments import name_of
from sarathi_lab.config.console import console
from sarathi_lab.config.cores import pin_process
from sarathi_lab.config.effects import fit_targets
from sarathi_lab.config.errors import UserError, no_room
from sarathi_lab.config.instantiate import build, copied
from sarathi_lab.config.launchers import time_over
from sarathi_lab.config.paths import write_json
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.config.sweep_record import FINISHED, OUTPUT, SweepRecord, record_failure

Work = Callable[[DictConfig, RunContext], None]  # does what a configuration asks for
MOST_CHARACTERS = 128  # of a group's name in W&B
# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "trace", "limit", "hydra")


@dataclass
class Job:
    """The configuration of one run, composed once, and what its task's check has made of it."""

    settings: tuple[str, ...]
    composed: DictConfig  # with Hydra's own node
    cfg: DictConfig
    is_checked: bool = False
    prepared: Any = None

    @classmethod
    def of(cls, settings: Sequence[str], composed: DictConfig) -> Job:
        cfg = copied(composed)
        with open_dict(cfg):
            del cfg["hydra"]
        return cls(tuple(settings), composed, cfg)

    def check(self) -> None:
        """Let the task check and prepare its run. Raises UserError."""
        hydra = HydraConfig.instance()
        before = hydra.cfg
        hydra.set_config(self.composed)
        try:
            self.prepared = build(self.cfg.task).check(self.cfg)
        finally:
            hydra.cfg = before
        self.is_checked = True

    def take_prepared(self) -> Any:
        """What the check has made, for the one run of it; it is kept here no longer."""
        prepared, self.prepared, self.is_checked = self.prepared, None, False
        return prepared

    def place(self, folder: Path, number: int | None = None) -> None:
        """Let Hydra run it in `folder`, or as a sweep's job below it."""
        hydra = self.composed.hydra
        with read_write(hydra), open_dict(hydra):
            if number is None:
                hydra.mode, hydra.run.dir = RunMode.RUN, str(folder)
            else:
                hydra.sweep.dir, hydra.job.num, hydra.job.id = str(folder), number, number

    def run(self, function: Callable[[DictConfig], None], loader: ConfigLoader) -> Any:
        """Call `function` in the job's folder, with logs and callbacks. Raises what it raises."""
        is_sweep = self.composed.hydra.mode == RunMode.MULTIRUN
        done = run_in_folder(
            function,
            self.composed,
            job_dir_key="hydra.sweep.dir" if is_sweep else "hydra.run.dir",
            job_subdir_key="hydra.sweep.subdir" if is_sweep else None,
            hydra_context=hydra_context(loader, self.composed),
        )
        with redirect_stderr(StringIO()):  # where Hydra names the settings before it raises
            return done.return_value


def hydra_context(loader: ConfigLoader, cfg: DictConfig) -> HydraContext:
    """What Hydra runs and launches jobs with: its loader, and the callbacks of `cfg`."""
    return HydraContext(loader, Callbacks(cfg))


def run_here(
    work: Work,
    cfg: DictConfig,
    swept: Sequence[str],
    job: Job | None = None,
    *,
    command: str = "",
    host: str = "",
) -> None:
    """Do the work of `cfg` in Hydra's folder, checked first if no `job` of this process was;
    `command` was typed on `host`.
    """
    settings = HydraConfig.get()
    if job is not None and job.is_checked:
        prepared = job.take_prepared()
    else:
        fit_targets(cfg, settings.overrides.task)
        prepared = build(cfg.task).check(cfg)
    run_dir = Path(settings.runtime.output_dir)
    is_sweep = settings.mode == RunMode.MULTIRUN
    root = Path(settings.sweep.dir) if is_sweep else run_dir
    choices = settings.runtime.choices
    is_own = "policy._target_" in map(name_of, settings.overrides.task)
    context = RunContext(
        run_dir=run_dir,
        baselines_dir=root / "baselines",
        name=run_name(str(choices["policy"]), settings.overrides.task, swept if is_sweep else None),
        group=group_of(root, choices, swept, host),
        swept=swept,
        varied=_varied(settings.overrides.task, swept) if is_sweep else {},
        experiment=choices.get("experiment"),
        task=str(choices["task"]),
        policy=None if is_own else str(choices["policy"]),
        prepared=prepared,
        command=command,
        is_verbose=settings.verbose is True,
    )
    if cfg.limit is None:
        work(cfg, context)
    else:  # which makes its plan itself
        call_apart(work, cfg, replace(context, prepared=None), limit=cfg.limit)


@dataclass(frozen=True)
class RecordedJob:
    """A sweep's job, which leaves finished.json or failed.json in its folder and raises nothing but
    Ctrl-C.

    In another process than the one that checked it, which has its `job`, it prints to output.txt,
    as the texts of several would mix. One of `num_processes` on this machine takes cores of its
    own; 0: all cores, or those that a cluster gave it.
    """

    work: Work
    record: SweepRecord
    swept: tuple[str, ...]
    num_processes: int = 0
    job: Job | None = None

    def __call__(self, cfg: DictConfig) -> None:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        if self.job is not None:
            self._run(cfg, run_dir)
            return
        with (
            (run_dir / OUTPUT).open("w", buffering=1) as output,
            redirect_stdout(output),
            redirect_stderr(output),
            self.record.job_running(),
        ):
            self._run(cfg, run_dir)

    def _run(self, cfg: DictConfig, run_dir: Path) -> None:
        start = time.monotonic()
        try:
            if self.num_processes:
                cores = ", ".join(map(str, pin_process(self.num_processes)))
                print(f"cores {cores}" if cores else "no cores of its own: too few are free")
            started = {"command": self.record.command, "host": self.record.host}
            run_here(self.work, cfg, self.swept, self.job, **started)
        except Exception as error:
            told = error if isinstance(error, UserError) else no_room(error) or time_over(error)
            if told is not None:
                stopped(run_dir, told)
                return
            traceback.print_exc()
            short = f"{type(error).__name__}: {error}".splitlines()[0]
            record_failure(run_dir, error=short, traceback=traceback.format_exc())
        else:
            write_json(run_dir / FINISHED, {"seconds": time.monotonic() - start})


def stopped(run_dir: Path, told: UserError) -> None:
    """Print and record why the job in `run_dir` came to no end."""
    console().print(f"  stopped: {told}", soft_wrap=True)
    record_failure(run_dir, error=str(told))


def group_of(root: Path, choices: Mapping[str, Any], swept: Sequence[str], host: str) -> str:
    """What is swept, where and when: the name that the runs of one command share. `choices` are of
    one of its runs, `root` is its folder.
    """
    what = " x ".join(name for name in swept if name != "repetition") or "single run"
    if choices.get("experiment"):
        what = f"{choices['experiment']}: {what}"
    if "executor" in swept or "hardware" in swept:
        where = "several devices"
    elif choices["executor"] == "simulated":
        where = f"simulated {choices['hardware']}"
    else:
        where = host
    return f"{what} on {where}, {'/'.join(root.absolute().parts[-2:])}"[:MOST_CHARACTERS]


def run_name(policy: str, settings: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what its sweep varies, or what a single run was told of its work."""
    told = [(name_of(setting), setting) for setting in settings]
    own = [setting for key, setting in told if key == "policy._target_"]
    policy = own[-1].rpartition(".")[2] if own else policy
    if swept is None:
        parts = [setting for key, setting in told if key.partition(".")[0] not in UNNAMED]
    else:
        named = ("policy", "policy._target_")
        parts = [setting for key, setting in told if key in swept and key not in named]
    return " ".join([policy, *parts])


def _varied(settings: Sequence[str], swept: Sequence[str]) -> dict[str, object]:
    """The values of the settings that the sweep varies; of those that are no scalars the text."""
    values: dict[str, object] = {}
    for override in OverridesParser.create().parse_overrides(list(settings)):
        if (key := override.get_key_element().lstrip("+")) in swept:
            value = override.value()
            is_scalar = isinstance(value, bool | int | float | str)
            values[key] = value if is_scalar else override.get_value_element_as_str()
    return values

"""Where runs keep their results and what they are called; what a sweep leaves in its folder, and
the callback that records there how each of its jobs ended.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Self

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import UserError, as_user_error
from sarathi_lab.config.instantiate import name_of
from sarathi_lab.config.paths import lock, write_json

RECORD = "sweep.json"
FINISHED = "finished.json"  # written last by every job that came to its end
FAILED = "failed.json"  # why it did not
OUTPUT = "output.txt"  # what a job in another process printed
LOCK = Path(".locks") / "sweep"
NOT_OF_WORK = ("output", "tracking", "resume", "limit", "repeat", "plot", "skip_invalid")
MOST_CHARACTERS = 128  # of a group's name in W&B
# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "limit", "hydra")


def as_command(arguments: Sequence[str]) -> str:
    """What to type for these arguments."""
    return shlex.join(["python", "-m", "sarathi_lab.run", *arguments])


@dataclass(frozen=True)
class RunContext:
    """Where a run's results go and what they are called; `prepared` is from the task's `check`."""

    run_dir: Path
    baselines_dir: Path
    name: str
    group: str  # what is swept, where, and the folder: the same of all runs of a command
    swept: Sequence[str] = ()  # the settings that the sweep varies
    # Those of them that this run reads, with its values.
    varied: Mapping[str, object] = field(default_factory=dict)
    # The values of all settings of the command that decide its work.
    stated: Mapping[str, object] = field(default_factory=dict)
    experiment: str | None = None  # the overlay of conf/experiment, if one was asked for
    task: str = "serve"  # the option of conf/task
    policy: str | None = None  # the option of conf/policy; None for a class of the user's
    prepared: Any = None
    command: str = ""  # as typed
    settings: Sequence[str] = ()  # of this run, as typed
    is_verbose: bool = False  # whether to print all of it

    @property
    def is_brief(self) -> bool:
        """Whether to leave what a run found to the table of its sweep."""
        return bool(self.swept) and not self.is_verbose


def current_run(prepared: Any = None) -> RunContext:
    """The context of the job that Hydra runs now."""
    hydra = HydraConfig.get()
    settings, choices = list(hydra.overrides.task), hydra.runtime.choices
    run_dir = root = Path(hydra.runtime.output_dir)
    is_sweep, swept, host = hydra.mode == RunMode.MULTIRUN, list[str](), platform.node()
    command = as_command([*settings, *hydra.overrides.hydra])
    if is_sweep and (record := SweepRecord.find(root := Path(hydra.sweep.dir))):
        swept, host, command = list(record.swept), record.host, record.command
    has_class = "policy._target_" in map(name_of, settings)
    return RunContext(
        run_dir=run_dir,
        baselines_dir=root / "baselines",
        name=run_name(str(choices["policy"]), settings, swept if is_sweep else None),
        group=group_of(root, choices, swept, host),
        swept=swept,
        varied=_values([one for one in settings if name_of(one) in swept]),
        stated=_values([one for one in settings if _decides_work(name_of(one))]),
        experiment=choices.get("experiment"),
        task=str(choices["task"]),
        policy=None if has_class else str(choices["policy"]),
        prepared=prepared,
        command=command,
        settings=settings,
        is_verbose=hydra.verbose is True,
    )


def group_of(root: Path, choices: Mapping[str, Any], swept: Sequence[str], host: str) -> str:
    """What is swept, where and when (its folder is `root`): the name that its runs share."""
    what = " x ".join(name for name in swept if name != "repetition") or "single run"
    if choices.get("experiment"):
        what = f"{choices['experiment']}: {what}"
    where = f"simulated {choices['hardware']}" if choices["executor"] == "simulated" else host
    if "executor" in swept or "hardware" in swept:
        where = "several devices"
    return f"{what} on {where}, {'/'.join(root.absolute().parts[-2:])}"[:MOST_CHARACTERS]


def run_name(policy: str, settings: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what its sweep varies, or what of a single run's settings changes its work."""
    parts = []
    for setting in settings:
        name = name_of(setting)
        if name == "policy._target_":
            policy = setting.rpartition(".")[2]
        elif name != "policy":
            is_named = name.partition(".")[0] not in UNNAMED if swept is None else name in swept
            parts += [setting] if is_named else []
    return " ".join([policy, *parts])


def _decides_work(name: str) -> bool:
    return re.split(r"[./]", name.lstrip("+~"))[0] not in (*NOT_OF_WORK, "hydra")


def _values(settings: Sequence[str]) -> dict[str, object]:
    """The values of settings by name; of those that are no scalars the text."""
    values: dict[str, object] = {}
    for override in OverridesParser.create().parse_overrides(list(settings)):
        value = override.value()
        is_scalar = isinstance(value, bool | int | float | str)
        values[override.key_or_group] = value if is_scalar else override.get_value_element_as_str()
    return values


@dataclass(frozen=True)
class SweepRecord:
    """A sweep's folder, the command line that started it, and the settings that it varies."""

    folder: Path
    arguments: list[str]
    fingerprint: str  # of the configuration of its jobs
    num_jobs: int
    started_at: str
    host: str = ""  # that it was started on
    swept: Sequence[str] = ()

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Read the record in `folder`; None if there is none, or one of another version."""
        try:
            return cls(folder=folder, **json.loads((folder / RECORD).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record that `resume=folder` names. Raises UserError without one."""
        if record := cls.find(folder.absolute()):
            return record
        fix = "name one such as outputs/DATE/TIME, or use resume=true"
        raise UserError(f"resume={folder} is not the folder of a sweep with a {RECORD}; {fix}")

    def write(self) -> None:
        """Write it into the folder."""
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        write_json(self.folder / RECORD, content)

    @property
    def command(self) -> str:
        """The command that started it."""
        return as_command(self.arguments)

    @property
    def resume_command(self) -> str:
        """The command that continues it."""
        return as_command([f"resume={self.folder}"])

    def job_dir(self, number: int) -> Path:
        return self.folder / str(number)

    def is_finished(self, number: int) -> bool:
        """Whether job `number` came to its end."""
        return (self.job_dir(number) / FINISHED).is_file()

    def end(self, number: int) -> dict[str, Any] | None:
        """How job `number` ended: its `seconds`, or `error` with a bug's `traceback`, or None."""
        for name in (FINISHED, FAILED):
            with suppress(FileNotFoundError):
                return dict(json.loads((self.job_dir(number) / name).read_text()))
        return None

    def is_complete(self) -> bool:
        return all(map(self.is_finished, range(self.num_jobs)))

    def begun(self) -> list[int]:
        """The numbers of the jobs that have a folder."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def clear_unfinished(self) -> None:
        """Remove the folders of jobs and baselines without an end."""
        jobs = [self.job_dir(number) for number in self.begun() if not self.is_finished(number)]
        baselines = (self.folder / "baselines").glob("*")
        for path in (*jobs, *(one for one in baselines if not (one / "run.json").is_file())):
            shutil.rmtree(path, ignore_errors=True)

    def check_unused(self) -> None:
        """Refuse a folder for a new sweep in which its results would be mixed with others'."""
        if next(self.folder.rglob("run.json"), None) or (self.folder / RECORD).exists():
            fix = f"name another folder, or resume={self.folder} to continue their sweep"
            raise UserError(f"hydra.sweep.dir={self.folder} has results of other runs; {fix}")

    def resumed(self, resume: str, output: str) -> Self:
        """Find the sweep of the same jobs that `resume` names (a folder, or "true": the latest
        unfinished one below `output`). Raises UserError if there is none, or it is complete.
        """
        if resume.lower() == "true":
            paths = {one.absolute() for one in [*Path(output).rglob(RECORD), self.folder / RECORD]}
            records = [record for path in paths if (record := self.find(path.parent))]
            records.sort(key=lambda record: record.started_at)
        else:
            records = [self.read(Path(resume))]
        same = [record for record in records if record.fingerprint == self.fingerprint]
        if unfinished := [record for record in same if not record.is_complete()]:
            return unfinished[-1]
        if resume.lower() != "true" and not same:
            fix = f"repeat its command, {records[0].command}, or start a new sweep"
            raise UserError(f"resume={resume} has another configuration; {fix}")
        reason = f" below {output}" if not same else f": {same[-1].folder} is complete"
        words = f"finds no unfinished sweep of this command{reason}; drop it to start one"
        raise UserError(f"resume={'true' if resume == 'True' else resume} {words}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep others from continuing the sweep meanwhile. UserError if it or a job of it runs."""
        if (alone := lock(self.folder / LOCK)) is None:
            raise UserError(f"resume={self.folder} is still running; wait for it and its jobs")
        alone.close()
        with lock(self.folder / LOCK, shared=True) or ExitStack():
            yield


def fingerprint(configs: Sequence[Mapping[str, Any]]) -> str:
    """Equal for sweeps whose jobs do the same work, wherever they leave the results."""
    jobs = [{key: cfg[key] for key in cfg if key not in NOT_OF_WORK} for cfg in configs]
    text = json.dumps(jobs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class JobStatus(Callback):
    """Leaves finished.json or failed.json in each job's folder, output.txt of other processes."""

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        hydra = config.hydra
        self._start, self._stack = time.monotonic(), ExitStack()
        if hydra.mode != RunMode.MULTIRUN or hydra.runtime.choices["hydra/launcher"] == "basic":
            return
        # A job may outlive the command that started it.
        alive = lock(Path(hydra.sweep.dir) / LOCK, shared=True) or ExitStack()
        output = (Path(hydra.runtime.output_dir) / OUTPUT).open("w", buffering=1)
        for one in (alive, output, redirect_stdout(output), redirect_stderr(output)):
            self._stack.enter_context(one)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        folder, error = Path(config.hydra.runtime.output_dir), error_of(job_return)
        with self._stack:
            if config.hydra.mode == RunMode.MULTIRUN and error is not None:
                _record_failure(folder, error)
            elif config.hydra.mode == RunMode.MULTIRUN:
                write_json(folder / FINISHED, {"seconds": time.monotonic() - self._start})


def error_of(job: JobReturn) -> Exception | None:
    """What a job has raised."""
    try:
        with redirect_stderr(StringIO()):  # where Hydra names the settings before it raises
            job.return_value  # noqa: B018
    except Exception as error:
        return error
    return None


def _record_failure(folder: Path, error: Exception) -> None:
    """Print why a job came to no end, and write it unless the run itself wrote more."""
    if reason := as_user_error(error):
        console().print(f"  stopped: {reason}", soft_wrap=True)
        why = {"error": str(reason)}
    else:
        lines = "".join(traceback.format_exception(error))
        print(lines, file=sys.stderr)
        why = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "traceback": lines}
    with suppress(OSError):  # of a full disk: the job has then not ended
        if not (folder / FAILED).is_file():
            write_json(folder / FAILED, why)

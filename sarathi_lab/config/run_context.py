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
from typing import Any, Self, TypedDict

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig

from sarathi_lab.config.console import console
from sarathi_lab.config.errors import UserError, as_user_error
from sarathi_lab.config.instantiate import Settings, Values, name_of, settings_of
from sarathi_lab.config.paths import lock, write_json

RECORD = "sweep.json"
FINISHED = "finished.json"  # written last by every job that came to its end
FAILED = "failed.json"  # why it did not
OUTPUT = "output.txt"  # what a job in another process printed
LOCK = Path(".locks") / "sweep"
NOT_OF_WORK = {"output", "tracking", "resume", "repeat", "plot", "skip_invalid"}
MOST_CHARACTERS = 128  # of a group's name in W&B
# Options that a run's name and device state already. Their settings are named: two tensor-parallel
# degrees are two runs.
STATED_OTHERWISE = ("policy", "executor", "baselines")


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
    varied: Values = field(default_factory=dict)
    # The values of all settings of the command that decide its work.
    stated: Values = field(default_factory=dict)
    experiment: str | None = None  # the overlay of conf/experiment, if one was asked for
    task: str = "serve"  # the option of conf/task
    policy: str | None = None  # the option of conf/policy; None for a class of the user's
    prepared: Any = None
    command: str = ""  # as typed
    settings: Settings = ()  # of this run, as typed
    is_verbose: bool = False  # whether to print all of it

    @property
    def is_brief(self) -> bool:
        """Whether to leave what a run found to the table of its sweep."""
        return bool(self.swept) and not self.is_verbose


def current_run(prepared: object = None) -> RunContext:
    """The context of the job that Hydra runs now."""
    hydra = HydraConfig.get()
    settings = list(hydra.overrides.task)
    choices = hydra.runtime.choices
    is_sweep = hydra.mode == RunMode.MULTIRUN
    run_dir = Path(hydra.runtime.output_dir)
    root = run_dir
    record = None
    if is_sweep:
        root = Path(hydra.sweep.dir)
        record = SweepRecord.find(root)
    swept = []
    host = platform.node()
    command = as_command([*settings, *hydra.overrides.hydra])
    if record is not None:
        swept = list(record.swept)
        host = record.host
        command = record.command
    varied = settings_of(settings, swept)
    stated = [setting for setting in settings if _decides_work(name_of(setting))]
    option = str(choices["policy"])
    policy: str | None = option
    if settings_of(settings, ["policy._target_"]):
        policy = None  # a class in place of the option's
    return RunContext(
        run_dir=run_dir,
        baselines_dir=root / "baselines",
        name=run_name(option, settings, swept if is_sweep else None),
        group=group_of(root, choices, swept, host),
        swept=swept,
        varied=_values(varied),
        stated=_values(stated),
        experiment=choices.get("experiment"),
        task=str(choices["task"]),
        policy=policy,
        prepared=prepared,
        command=command,
        settings=settings,
        is_verbose=hydra.verbose is True,
    )


def group_of(root: Path, choices: Mapping[str, str | None], swept: Sequence[str], host: str) -> str:
    """What is swept, where and when (its folder is `root`): the name that its runs share."""
    names = [name for name in swept if name != "repetition"]
    runs = "single run"
    if names:
        runs = " x ".join(names)
    experiment = choices.get("experiment")
    if experiment:
        runs = f"{experiment}: {runs}"
    device = host
    if "executor" in swept or "hardware" in swept:
        device = "several devices"
    elif choices["executor"] == "simulated":
        device = f"simulated {choices['hardware']}"
    # Of Hydra's folder outputs/DATE/TIME.
    day_and_time = root.absolute().parts[-2:]
    when = "/".join(day_and_time)
    name = f"{runs} on {device}, {when}"
    return name[:MOST_CHARACTERS]


def run_name(policy: str, settings: Settings, swept: Sequence[str] | None) -> str:
    """The policy and what its sweep varies, or what of a single run's settings changes its work."""
    rule = policy
    named = []
    for setting in settings:
        name = name_of(setting)
        if name == "policy._target_":
            # A class in place of an option: it is named without its module.
            rule = setting.rpartition(".")[2]
        elif name == "policy":
            continue  # it is the rule
        elif swept is None:
            if name not in STATED_OTHERWISE and _decides_work(name):
                named.append(setting)
        elif name in swept:
            named.append(setting)
    return " ".join([rule, *named])


def _decides_work(name: str) -> bool:
    group = re.split(r"[./]", name)[0]
    return group not in NOT_OF_WORK | {"hydra"}


def _values(settings: Settings) -> dict[str, object]:
    """The values of settings by name; of those that are no scalars the text."""
    values: dict[str, object] = {}
    parser = OverridesParser.create()
    for override in parser.parse_overrides(list(settings)):
        value = override.value()
        if not isinstance(value, bool | int | float | str):
            value = override.get_value_element_as_str()
        name = override.key_or_group
        values[name] = value
    return values


class JobEnd(TypedDict, total=False):
    """How a job ended, as its folder has it: the seconds that it took, or why it stopped."""

    seconds: float
    error: str
    traceback: str  # of a bug


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
        except (OSError, ValueError, TypeError):  # the last of other fields than these
            return None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record that `resume=folder` names. Raises UserError without one."""
        record = cls.find(folder.absolute())
        if record is None:
            raise UserError(
                f"resume={folder} is not the folder of a sweep with a {RECORD}; name one such as "
                "outputs/DATE/TIME, or use resume=true"
            )
        return record

    def write(self) -> None:
        """Write it into the folder."""
        content = asdict(self)
        del content["folder"]  # where it stands, and a sweep's folder may be moved
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

    def end(self, number: int) -> JobEnd | None:
        """How job `number` ended: its `seconds`, or `error` with a bug's `traceback`, or None."""
        for name in (FINISHED, FAILED):
            with suppress(FileNotFoundError):
                end: JobEnd = json.loads((self.job_dir(number) / name).read_text())
                return end
        return None

    def is_complete(self) -> bool:
        return all(map(self.is_finished, range(self.num_jobs)))

    def begun(self) -> list[int]:
        """The numbers of the jobs that have a folder."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def clear_unfinished(self) -> None:
        """Remove the folders of jobs and baselines without an end."""
        for number in self.begun():
            if not self.is_finished(number):
                shutil.rmtree(self.job_dir(number), ignore_errors=True)
        for baseline in (self.folder / "baselines").glob("*"):
            if not (baseline / "run.json").is_file():
                shutil.rmtree(baseline, ignore_errors=True)

    def check_unused(self) -> None:
        """Refuse a folder for a new sweep in which its results would be mixed with others'."""
        if next(self.folder.rglob("run.json"), None) or (self.folder / RECORD).exists():
            raise UserError(
                f"hydra.sweep.dir={self.folder} has results of other runs; name another folder, or "
                f"resume={self.folder} to continue their sweep"
            )

    def resumed(self, resume: str, output: str) -> Self:
        """Find the sweep of the same jobs that `resume` names (a folder, or "true": the latest
        unfinished one below `output`). Raises UserError if there is none, or it is complete.
        """
        if resume == "true":
            records = self._recorded_below(Path(output))
        else:
            records = [self.read(Path(resume))]
        same = [record for record in records if record.fingerprint == self.fingerprint]
        unfinished = [record for record in same if not record.is_complete()]
        if unfinished:
            # As text: all are ISO 8601 in UTC, which sorts by time.
            return max(unfinished, key=lambda record: record.started_at)
        num_others = len(records) - len(same)
        raise UserError(
            f"resume={resume} finds no unfinished sweep of this command: {len(same)} complete, "
            f"{num_others} with another configuration; drop it to start one, or name "
            "resume=FOLDER alone to continue that with its own settings"
        )

    def _recorded_below(self, output: Path) -> list[Self]:
        """Return the records of sweeps below `output` and in this one's folder."""
        folders = {self.folder}
        for path in output.rglob(RECORD):
            folders.add(path.parent.absolute())
        records = []
        for folder in folders:
            record = self.find(folder)
            if record is not None:
                records.append(record)
        return records

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep others from continuing the sweep meanwhile. UserError if it or a job of it runs."""
        alone = lock(self.folder / LOCK)
        if alone is None:
            raise UserError(f"resume={self.folder} is still running; wait for it and its jobs")
        alone.close()
        with lock(self.folder / LOCK, shared=True) or ExitStack():
            yield


def fingerprint(configs: Sequence[Mapping[str, object]]) -> str:
    """Equal for sweeps whose jobs do the same work, wherever they leave the results."""
    jobs = []
    for config in configs:
        names = config.keys() - NOT_OF_WORK
        work = {name: config[name] for name in names}
        jobs.append(work)
    text = json.dumps(jobs, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:16]


class JobStatus(Callback):
    """Leaves finished.json or failed.json in each job's folder, output.txt of other processes."""

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: object
    ) -> None:
        """Begin to time the job; of another process, lock the sweep and divert what is printed."""
        hydra = config.hydra
        self._start = time.monotonic()
        self._stack = ExitStack()
        if not _is_launched(hydra):
            return
        # A job may outlive the command that started it.
        alive = lock(Path(hydra.sweep.dir) / LOCK, shared=True) or ExitStack()
        output = (Path(hydra.runtime.output_dir) / OUTPUT).open("w", buffering=1)
        for context in (alive, output, redirect_stdout(output), redirect_stderr(output)):
            self._stack.enter_context(context)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Record how a sweep's job ended; a run alone is not resumed, and leaves no such record."""
        hydra = config.hydra
        folder = Path(hydra.runtime.output_dir)
        error = error_of(job_return)
        with self._stack:  # closed last, so that output.txt has why a job failed
            if hydra.mode != RunMode.MULTIRUN:
                return
            if error is not None:
                # Of a job in the sweep's process, the sweep prints how it ended.
                _record_failure(folder, error, is_printed=_is_launched(hydra))
            else:
                seconds = time.monotonic() - self._start
                write_json(folder / FINISHED, {"seconds": seconds})


def _is_launched(hydra: DictConfig) -> bool:
    """Return whether a sweep's job is run by a launcher, in another process than the sweep's."""
    is_of_sweep = hydra.mode == RunMode.MULTIRUN
    return is_of_sweep and hydra.runtime.choices["hydra/launcher"] != "basic"


def error_of(job: JobReturn) -> Exception | None:
    """What a job has raised."""
    try:
        with redirect_stderr(StringIO()):  # where Hydra names the settings before it raises
            job.return_value  # noqa: B018
    except Exception as error:
        return error
    return None


def _record_failure(folder: Path, error: Exception, *, is_printed: bool) -> None:
    """Write why a job came to no end, unless the run itself wrote more; print it if `is_printed`,
    if it can't be written, or if it is a bug.
    """
    reason = as_user_error(error)
    if reason is not None:
        failure = {"error": str(reason)}
    else:
        lines = "".join(traceback.format_exception(error))
        print(lines, file=sys.stderr)
        text = f"{type(error).__name__}: {error}"
        failure = {"error": text.splitlines()[0], "traceback": lines}
    path = folder / FAILED
    with suppress(OSError):  # of a full disk: the job has then not ended
        if not path.is_file():
            write_json(path, failure)
    if reason is not None and (is_printed or not path.is_file()):
        console().print(f"  stopped: {reason}", soft_wrap=True)

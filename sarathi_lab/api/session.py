"""`lab.serve` and `lab.sweep`: the command line with Python values for settings."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import MISSING, fields, is_dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.api.results import Results, load
from sarathi_lab.config.command_line import quoted
from sarathi_lab.config.errors import UserError, require_text
from sarathi_lab.config.instantiate import Values, build, option_files
from sarathi_lab.config.sweeper import LabSweeper, compose
from sarathi_lab.policy import Policy
from sarathi_lab.run import run
from sarathi_lab.tasks.base import Task

UNTRACKED = {"tracking": "none"}  # as W&B takes longer to start than many a simulation
KEYWORDS = ("", "null", "true", "false", "nan", "inf")  # text that Hydra takes for another kind


def serve(*, verbose: bool = False, **settings: object) -> Results:
    """Serve one configuration and its baselines: `python -m sarathi_lab.run NAME=VALUE ...`.

    Args:
        verbose: Whether to print what the command line prints.
        settings: Settings and groups by their names on the command line, dotted ones in
            `**{"workload.rate": 2}`; values are Python's. `policy` may also be a class of
            policies, whose parameters are then settings, or an object, whose fields stay as they
            are. `metrics` are functions. `tracking="wandb"` tracks the run.

    Returns:
        The run and its baselines, which are kept below `output`.

    Raises:
        UserError: For what the command line refuses, in the same words, and what stops the run.
    """
    with _prepared(settings, [], verbose) as sweeper:
        sweeper.run()
    return load(sweeper.record.folder)


def sweep(*, verbose: bool = False, **settings: object) -> Results:
    """Serve all combinations of the values that settings have, as `-m` does; else as `serve`.

    Args:
        verbose: Whether to print what the command line prints.
        settings: As those of `serve`. Any iterable but text and mappings holds the values of a
            setting: `seed=range(5)`. A single value that is a list is written inside a list,
            `baselines=[["orca"]]`; `metrics=[function]` are the metrics of every run.

    Returns:
        The runs and their baselines. Runs that stopped are left out, with a warning.

    Raises:
        UserError: As `serve`, or if no run is left.
    """
    with _prepared(settings, ["-m"], verbose) as sweeper:
        try:
            sweeper.run(reports=False)
        except UserError as error:
            record = sweeper.record
            if not any(map(record.is_finished, record.begun())):
                raise
            warnings.warn(f"{error} (see {record.folder})", stacklevel=2)
    return load(sweeper.record.folder)


@contextmanager
def _prepared(settings: Values, flags: list[str], verbose: bool) -> Iterator[LabSweeper]:
    """Compose and check the jobs of `settings`; show what is printed meanwhile if `verbose`."""
    output: AbstractContextManager[object] = redirect_stdout(StringIO())
    if verbose:
        output = nullcontext()
    with TemporaryDirectory() as folder, output:
        args = _arguments({**UNTRACKED, **settings}, flags, Path(folder))
        sweeper = compose(args, run)
        sweeper.check()
        task: Task = build(sweeper.jobs[0].cfg.task)
        if not task.has_runs:
            name = type(task).__name__.lower()
            raise UserError(f"task={name} leaves no runs to return; use the command line for it")
        yield sweeper


def read(settings: Values) -> DictConfig:
    """Return the checked configuration of a single run. Raises UserError."""
    with TemporaryDirectory() as folder:
        args = _arguments(settings, [], Path(folder))
        sweeper = compose(args)
        only_job = sweeper.jobs[0]
        return only_job.cfg


def _arguments(settings: Values, flags: Sequence[str], folder: Path) -> list[str]:
    """Return the command line's arguments; `folder` is for options of policy objects."""
    options = PolicyOptions(folder)
    args = []
    for name, value in settings.items():
        # Only a sweep takes several values apart; a single run has the list as its value.
        if flags and not _is_list_of_metrics(name, value):
            text = _values(value, options)
        else:
            text = text_of(value, options)
        args.append(f"{name}={text}")
    if options.names:
        args += ["--config-dir", str(folder)]
    return [*flags, *args]


def _is_list_of_metrics(name: str, value: object) -> bool:
    """Return whether a value is the list that `metrics` is, rather than one of such lists."""
    if name != "metrics" or not isinstance(value, list | tuple):
        return False
    for item in value:
        is_metric = callable(item) or isinstance(item, str)
        if not is_metric:
            return False
    return True


def _values(setting: object, options: PolicyOptions) -> str:
    """Return the comma-separated values of a setting that a sweep may vary."""
    # Text is iterable too, and so may a policy be.
    is_single = isinstance(setting, str | Mapping | Policy)
    if is_single or not isinstance(setting, Iterable):
        return text_of(setting, options)
    values = [text_of(value, options) for value in setting]
    if not values:
        raise UserError(f"{setting!r} is empty; name at least one value")
    return ",".join(values)


def text_of(value: object, options: PolicyOptions) -> str:
    """Return a value as it is typed on the command line; policy objects become `options`."""
    if isinstance(value, np.generic):
        return text_of(value.item(), options)
    if isinstance(value, Policy) or (isinstance(value, type) and issubclass(value, Policy)):
        return options.add(value)
    if inspect.isfunction(value):
        return _dotted_name(value)
    if value is None:
        return "null"
    if isinstance(value, bool):  # before int, which it is as well
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        entries = []
        for name, setting in value.items():
            entries.append(f"{name}:{text_of(setting, options)}")
        return f"{{{','.join(entries)}}}"
    if isinstance(value, str | Path):
        text = str(value)
        if re.fullmatch(r"[A-Za-z_/][\w./%-]*", text) and text.lower() not in KEYWORDS:
            return text
        return quoted(text)
    if isinstance(value, Iterable):
        items = [text_of(item, options) for item in value]
        return f"[{','.join(items)}]"
    raise UserError(
        f"{value!r} is not a value of a setting; use a number, text, list, policy or function"
    )


def _dotted_name(function: Callable[..., object]) -> str:
    """Return the name that a function is imported by. Raises UserError for one that has none."""
    name = function.__qualname__
    if not _is_named(function):
        raise UserError(
            f"{name} is not in {function.__module__} under that name; define it at the top of a "
            "module or in a notebook's cell"
        )
    return f"{function.__module__}.{name}"


def _is_named(code: Callable[..., object]) -> bool:
    """Return whether a function or class is what its module has under its name."""
    module = sys.modules.get(code.__module__)
    if module is None:
        return False
    names = vars(module)
    return names.get(code.__qualname__) is code


class PolicyOptions:
    """Folder of options like those of `conf/policy/`, a file for each policy object or class.

    Hydra chooses a policy by the name of an option, a sweep between several ones, also in the
    processes of a launcher. A file is the only form of an option that all of these read.
    """

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._folder = folder / "policy"

    def add(self, policy: Policy | type[Policy]) -> str:
        """Write the option of `policy` and return its name: the fields of an object; the defaults
        of a class, and the setting `chunk` for its token budget.

        Raises UserError for a class that can't be imported, and for values that YAML can't hold.
        """
        cls = policy if isinstance(policy, type) else type(policy)
        remedy = 'give the class a name: name: ClassVar[str] = "mine"'
        require_text(f"{cls.__name__}.name", getattr(cls, "name", None), remedy)
        if not _is_named(cls):
            raise UserError(
                f"policy={cls.__qualname__} is not in {cls.__module__} under that name; define it "
                "at the top of a module or in a notebook's cell, and make its objects again"
            )
        target = f"{cls.__module__}.{cls.__qualname__}"
        node = {"_target_": target, **_parameters(policy)}
        try:
            text = OmegaConf.to_yaml(OmegaConf.create(node))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"policy={policy} can't be written as settings ({reason}); use numbers and text, "
                "or an option's file"
            ) from None
        # An option's name is also that of its file, and a value on the command line.
        stem = re.sub(r"\W", "_", cls.name)
        name = self._unused_name(stem)
        self._folder.mkdir(exist_ok=True)
        file = self._folder / f"{name}.yaml"
        file.write_text(text)
        self.names.append(name)
        return name

    def _unused_name(self, stem: str) -> str:
        """Return the stem, with a number where another option has it."""
        used = {*option_files("policy", ()), *self.names}
        name = stem
        number = 1
        while name in used:
            number += 1
            name = f"{stem}_{number}"
        return name


def _parameters(policy: Policy | type[Policy]) -> dict[str, object]:
    """Return the fields of an object; of a class those with defaults, and its token budget."""
    if not is_dataclass(policy):
        return {}
    parameters = {}
    own_fields = [field for field in fields(policy) if field.init]
    if not isinstance(policy, type):
        for field in own_fields:
            parameters[field.name] = getattr(policy, field.name)
        return parameters
    for field in own_fields:
        if field.default is not MISSING:
            parameters[field.name] = field.default
        # A field without either default is left for the user to set.
        elif field.default_factory is not MISSING:
            parameters[field.name] = field.default_factory()
    # So that a sweep over `chunk` varies the class as it does the lab's own policies.
    if policy.budget_field is not None:
        parameters[policy.budget_field] = "${chunk}"
    return parameters

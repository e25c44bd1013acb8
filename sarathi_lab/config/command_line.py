"""Command lines: flags, named as Hydra names them, and settings; and Hydra's errors about them as
one line with the value, the reason and the fix.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from sarathi_lab.config.errors import UserError, require_one_of, suggestion, unknown_name
from sarathi_lab.config.instantiate import (
    CHOICES,
    GROUPS,
    class_name,
    name_of,
    option_files,
    parameter_names,
    parameters_of,
    read_option,
    read_yaml,
    settings_of,
    settings_without,
    target_of,
    top_level,
)
from sarathi_lab.config.jobs import MOST_JOBS, OF_SIMULATION
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.published_names import datasheet_of_card, nearest_option
from sarathi_lab.config.run_context import SweepRecord

SWITCHES = (
    *("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m"),
    *("--dry-run", "--verbose -v", "--shell-completion -sc"),
)
WITH_VALUE = ("--cfg -c", "--package -p", "--config-dir -cd")
SHOWING = ("help", "hydra_help", "version", "cfg", "info", "shell_completion")
LAUNCHER = "hydra/launcher"
LAUNCHERS = ("basic", "joblib", "ray", "submitit_local", "submitit_slurm")
# Those that a package brings, with the name in it.
LAUNCHER_PACKAGES = {
    "joblib": "joblib",
    "ray": "ray",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
}
PLUGINS = {LAUNCHER: LAUNCHERS, "hydra/sweeper": ("lab",)}
# Parameters that no other option of hardware has, and which the user need not name it for.
OF_DATASHEET = (
    *("base", "peak", "bandwidth", "memory", "link", "network"),
    *("fp8_peak", "fp4_peak", "int8_peak", "error"),
)
# Settings whose value is a command line, in which Hydra's grammar has no say.
COMMANDS = ("task.server",)
TEXT_WITH_SPACES = "task.server="  # begins a setting that is a command of several words
ENDS_OF_TRACES = (".csv", ".json", ".jsonl", ".gz")  # of names of files
MOST_NAMES = 1000  # of options of a group that are looked at
MOST_OPTIONS = 3  # that a line names which have the parameter that another lacks


@dataclass(frozen=True)
class Arguments:
    """A command line, read: `flags` make Hydra show something instead of running. `settings` have
    no flag among them, as Hydra's parser refuses settings behind one; `modes` stand for -m and
    --dry-run.
    """

    flags: tuple[str, ...]
    settings: tuple[str, ...]
    modes: tuple[str, ...]
    is_help: bool = False
    topics: tuple[str, ...] = ()  # behind --help: groups and settings to explain

    @property
    def of_hydra(self) -> list[str]:
        """The arguments for `hydra.main`, in whose place the lab's sweeper makes all runs."""
        return [*self.flags, *self.settings, *self.modes]


def read_arguments(args: Sequence[str]) -> Arguments:
    """Read a command line; of `resume=FOLDER` alone that of the sweep there. Raises UserError."""
    parsed = _parsed(args)
    shows = any(vars(parsed)[name] for name in SHOWING)
    topics: list[str] = []
    settings: list[str] = []
    for argument in parsed.settings:
        if parsed.help and "=" not in argument:
            topics.append(argument)
        else:
            settings.append(_with_quotes(argument))
    if parsed.verbose:
        settings.append("hydra.verbose=true")
    settings = _with_datasheet(settings)
    # Hydra's own flags are Hydra's to check; --help is the lab's.
    if parsed.help or not shows:
        if parsed.config_dir:
            settings = _with_folder(settings, parsed.config_dir)
        with explained(settings):
            check_names(settings)
    if not shows:
        modes = []
        if parsed.multirun:
            modes.append("hydra.mode=MULTIRUN")
        if parsed.dry_run:
            modes.append("hydra.sweeper.dry_run=true")
        return _with_recorded(Arguments((), tuple(settings), tuple(modes)))
    if parsed.cfg and not parsed.multirun:
        _refuse_several_values(settings)
    not_of_hydra = ("-v", "--verbose", "--dry-run", *parsed.settings)
    flags = tuple(arg for arg in args if arg not in not_of_hydra)
    return Arguments(flags, tuple(settings), (), parsed.help, tuple(topics))


def _parsed(args: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line. Raises UserError for unknown and useless ones."""
    # Hydra has two short flags of two letters.
    for arg in args:
        if re.match(r"-[^-].", arg) and arg not in ("-sc", "-cd"):
            raise _unknown(arg)  # argparse would take -chunk for -c hunk
    try:
        parsed, unknown = _parser().parse_known_intermixed_args(list(args))
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; --help lists the options") from None
    if unknown:
        raise _unknown(unknown[0])
    for name in ("resolve", "package"):
        if vars(parsed)[name] and not parsed.cfg:
            raise UserError(f"option --{name} has no effect without --cfg; add --cfg job")
    return parsed


def _refuse_several_values(settings: Sequence[str]) -> None:
    with explained(settings):
        overrides = OverridesParser.create().parse_overrides(list(settings))
    for override in overrides:
        if override.is_sweep_override():
            raise several_values(str(override.input_line))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for names in SWITCHES:
        parser.add_argument(*names.split(), action="store_true")
    for names in WITH_VALUE:
        parser.add_argument(*names.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("settings", nargs="*")
    return parser


def _unknown(option: str) -> UserError:
    options = [name for names in (*SWITCHES, *WITH_VALUE) for name in names.split()]
    similar = suggestion(option, options)
    return UserError(
        f"option {option} is unknown{similar}; settings are written name=value, --help lists the "
        "options"
    )


def _with_recorded(arguments: Arguments) -> Arguments:
    """Return the command line that `resume=FOLDER` continues; the one that is typed, if it names
    no folder, or has other settings than the launcher's.
    """
    folder = _resumed_folder(arguments.settings)
    launchers = settings_without(arguments.settings, ["resume"])
    if folder is None or not all(map(_sets_launcher, launchers)):
        return arguments
    record = SweepRecord.read(folder)
    recorded = read_arguments(record.arguments)
    settings = list(recorded.settings)
    if launchers:  # in place of the recorded one
        settings = [setting for setting in settings if not _sets_launcher(setting)]
    settings += launchers
    settings += settings_of(arguments.settings, ["resume"])
    modes = dict.fromkeys((*recorded.modes, *arguments.modes))
    return Arguments((), tuple(settings), tuple(modes))


def _resumed_folder(settings: Sequence[str]) -> Path | None:
    """Return the folder that `resume=FOLDER` names; None where no sweep, or any, is continued.
    Raises UserError for no name.
    """
    resumes = settings_of(settings, ["resume"])
    if not resumes:
        return None
    _, _, value = resumes[-1].partition("=")  # of two the last counts
    name = value.strip("'\"")
    if name in ("", "null"):
        raise UserError("resume= names nothing; use resume=true, or resume=FOLDER of a sweep")
    if name.lower() in ("true", "false"):
        return None
    return Path(name)


def _sets_launcher(setting: str) -> bool:
    """Return whether a setting says where jobs run, which is no part of their work."""
    return name_of(setting).startswith(("hydra.launcher", "hydra/launcher"))


def quoted(text: str) -> str:
    """Quote `text` as a setting's value."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_quotes(setting: str) -> str:
    """Quote the value of one of `COMMANDS`, unless it is quoted."""
    name, _, value = setting.partition("=")
    # Its spaces, commas and braces would be Hydra's lists and sweeps.
    if name not in COMMANDS or value in ("", "null") or value[0] in "'\"":
        return setting
    return f"{name}={quoted(value)}"


def _searchpath(settings: Sequence[str]) -> list[str]:
    """Return the sources of options that settings add to conf/."""
    stated = settings_of(settings, ["hydra.searchpath"])
    if not stated:
        return []
    value = OverridesParser.create().parse_override(stated[-1]).value()
    if isinstance(value, list):
        return list(value)
    return [str(value)]


def folders_of(settings: Sequence[str]) -> list[Path]:
    """The folders that `hydra.searchpath` adds to conf/. Raises UserError for one that is none."""
    folders = []
    for source in _searchpath(settings):
        path = source.removeprefix("file://")
        if "://" in path:  # a package
            continue
        folder = Path(path)
        if not folder.is_dir():
            remedy = "name one such as file:///home/me/conf"
            raise UserError(f"hydra.searchpath={folder} is not a folder; {remedy}")
        folders.append(folder)
    return folders


def _with_folder(settings: list[str], folder: str) -> list[str]:
    """Add the options of `folder` by a setting, which is recorded and passed on as others are."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir {folder} is not a folder; name one that has policy/ or such")
    folders = [*_searchpath(settings), f"file://{Path(folder).absolute()}"]
    searchpath = ",".join(map(quoted, folders))
    others = settings_without(settings, ["hydra.searchpath"])
    return [f"hydra.searchpath=[{searchpath}]", *others]


def _with_datasheet(settings: list[str]) -> list[str]:
    """Choose the option whose parameters are named, where a card is described and none chosen."""
    of_datasheet = [f"hardware.{name}" for name in OF_DATASHEET]
    if settings_of(settings, ["hardware"]) or not settings_of(settings, of_datasheet):
        return settings
    return ["hardware=datasheet", *settings]


def check_names(settings: Sequence[str]) -> None:
    """Refuse settings and options that there are not, before Hydra composes anything."""
    names = [*CHOICES, *top_level()]
    # Hydra composes for a fifth of a second before it finds a typo, and suggests no other name.
    folders = folders_of(settings)
    for override in OverridesParser.create().parse_overrides(list(settings)):
        name = override.key_or_group
        options: Collection[str] = PLUGINS.get(name, ())
        if name.partition("/")[0] in CHOICES:
            options = option_files(name, folders)
        if options:
            _check_options(override, options)
        if override.is_hydra_override():
            continue
        is_choice = "/" in name
        group = re.split(r"[./]", name)[0]
        if group not in names or (is_choice and not options):
            raise unknown_name(name, names, "a setting")


def _check_options(override: Override, options: Collection[str]) -> None:
    name = override.key_or_group
    value = override.value()
    if isinstance(value, list):
        remedy = f"sweep over them by {name}={','.join(map(str, value))} -m"
        raise UserError(f"{override.input_line} is a list, not an option; {remedy}")
    for option in _values(override):
        if name in ("model", "hardware") and option not in options:
            _refuse_published_name(name, option)
        _refuse_other_group(name, option, options)
        _refuse_file_or_class(name, option, options)
        if option != "null" or name in GROUPS:
            require_one_of(name, option, options)
        if name == LAUNCHER and option in LAUNCHER_PACKAGES:
            _require_launcher(option)


def _refuse_other_group(name: str, option: str, options: Collection[str]) -> None:
    """Raise UserError for a task that is an experiment, or the reverse."""
    other = {"task": "experiment", "experiment": "task"}.get(name)
    if other is not None and option not in options and option in option_files(other):
        raise UserError(
            f"{name}={option} is unknown; {option} is an option of {other}: write {other}={option}"
        )


def _refuse_file_or_class(name: str, option: str, options: Collection[str]) -> None:
    """Raise UserError for a file or a class of the user's where an option is expected."""
    if option in options or name not in ("policy", "workload"):
        return
    path = Path(option)
    if name == "workload" and path.suffix.lower() in ENDS_OF_TRACES:
        raise UserError(
            f"workload={option} is no option; for a file of requests write workload=trace "
            f"workload.path={option}"
        )
    parts = option.split(".")
    is_class = len(parts) > 1 and all(map(str.isidentifier, parts)) and parts[-1][0].isupper()
    if path.suffix == ".py":
        place = f", with {path.parent} on PYTHONPATH" if "/" in option else ""
        own_class = f"{path.stem}.CLASS{place}"
    elif is_class:
        own_class = option
    else:
        return
    raise UserError(
        f"{name}={option} is no option; for a class of yours write {name}._target_={own_class}"
    )


def _refuse_published_name(group: str, name: str) -> None:
    """Raise UserError for a model or a card by its published name, with the option that stands for
    it or is nearest to it; and for a model's file or folder.

    Takes names of the hub (meta-llama/Llama-3.3-70B-Instruct) and ends of folders.
    """
    nearest = nearest_option(group, name.rstrip("/").rpartition("/")[2])
    is_path = group == "model" and ("/" in name or name.endswith(".json"))
    hint = ""
    remedy = f"write {group}={nearest.option}"
    if nearest.differences:
        hint = f" ({nearest.option}, but for {' '.join(nearest.differences)})"
    elif nearest.option:
        hint = f" (did you mean {nearest.option}?)"
    if group == "hardware" and nearest.differences:
        remedy = f"write {datasheet_of_card(nearest)}"
    elif is_path or nearest.differences:
        remedy = "for a config.json or a checkpoint write model=auto model.path=FOLDER"
    if is_path or hint:
        raise UserError(f"{group}={name} is no option{hint}; {remedy}")


def _require_launcher(option: str) -> None:
    """Raise UserError for a launcher whose package is missing."""
    package = LAUNCHER_PACKAGES[option]
    if find_spec(f"hydra_plugins.hydra_{package}_launcher") is None:
        raise UserError(
            f"{LAUNCHER}={option} needs a package that is missing; pip install "
            f"hydra-{package}-launcher"
        )


def _values(override: Override) -> list[str]:
    """The values of a setting that is swept, or its one value; none of a glob."""
    if isinstance(override.value(), Glob):
        return []  # known by Hydra's loader
    if override.is_discrete_sweep():
        values = islice(override.sweep_string_iterator(), MOST_NAMES)
        return [str(value).strip("'\"") for value in values]
    if override.value() is None:
        return ["null"]
    return [str(override.value())]


@contextmanager
def explained(settings: Sequence[str], *kinds: type[Exception]) -> Iterator[None]:
    """Raise UserError for errors about `settings`: of these `kinds`, else Hydra's, OmegaConf's."""
    kinds = kinds or (HydraException, OmegaConfBaseException, ValueError)
    try:
        yield
    except kinds as error:
        raise _explain(error, settings) from None


def _explain(error: Exception, settings: Sequence[str]) -> UserError:
    """Return one line for an error of Hydra or OmegaConf about `settings`."""
    if isinstance(error, OverrideParseException):
        remedy = "settings are written name=value, without spaces around ="
        is_stated = any(setting.startswith(TEXT_WITH_SPACES) for setting in settings)
        if is_stated and "=" not in str(error.override):
            remedy = f"quote a value with spaces: '{TEXT_WITH_SPACES}vllm serve MODEL'"
        return UserError(f"{error.override!r} can't be read; {remedy}")
    # Hydra wraps OmegaConf's error, which alone names the key.
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return _unknown_key(str(cause.full_key), settings)
    if isinstance(error, ConfigCompositionException):
        name = _added_again(settings)
        if name is not None:
            return UserError(f"+{name} is listed already; write {name}=VALUE without the +")
    messages = f"{error}\n{cause or ''}".strip()
    first_line = messages.partition("\n")[0].strip()
    reason = first_line or type(error).__name__
    return UserError(f"{' '.join(settings)}: {reason}; --help shows the settings")


def _added_again(settings: Sequence[str]) -> str | None:
    """Return the first setting that is added with a + although it is listed."""
    for override in OverridesParser.create().parse_overrides(list(settings)):
        name = override.key_or_group
        if override.is_add() and _is_listed(name, settings):
            return name
    return None


def _is_listed(name: str, settings: Sequence[str]) -> bool:
    """Return whether config.yaml, or the option that is chosen of a group, has a setting."""
    group, _, parameter = name.partition(".")
    path = chosen_options(settings).get(group)
    if path is None:
        return OmegaConf.select(OmegaConf.create(top_level()), name) is not None
    return OmegaConf.select(read_option(group, path), parameter) is not None


def several_values(setting: str) -> UserError:
    """For a sweep without -m."""
    return UserError(f"{setting} has several values; add -m to sweep over them, or quote the comma")


def chosen_options(settings: Sequence[str]) -> dict[str, Path]:
    """Return the file of the option of each group that the defaults or `settings` choose: of
    several the first.
    """
    folders = folders_of(settings)
    typed: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(list(settings)):
        typed[override.key_or_group] = next(iter(_values(override)), "")
    chosen = _default_options(CONF / "config.yaml")
    experiments = option_files("experiment", folders)
    # In the order in which they count: defaults, the experiment's options, then those typed.
    overlay = experiments.get(typed.get("experiment", ""))
    if overlay is not None:
        chosen |= _default_options(overlay)
    chosen |= typed
    files: dict[str, Path] = {}
    for group, option in chosen.items():
        if group not in CHOICES:
            continue
        path = option_files(group, folders).get(option)
        if path is not None:
            files[group] = path
    return files


def _default_options(path: Path) -> dict[str, str]:
    """Return the options by group that a file's defaults list chooses."""
    config = read_yaml(path)
    options: dict[str, str] = {}
    for entry in config.get("defaults", []):
        if not OmegaConf.is_dict(entry):
            continue
        for typed, option in entry.items():
            group = str(typed).removeprefix("override ").strip("/")
            options[group] = option
    return options


def _unknown_key(key: str, settings: Sequence[str]) -> UserError:
    """Say what is wrong with a key that the composed configuration has not."""
    group, _, parameter = key.partition(".")
    files = chosen_options(settings)
    if group not in files:
        return _unknown_setting(key)
    option = read_option(group, files[group])
    names = parameter_names(option, group)
    for setting in settings:
        name, _, target = setting.lstrip("+").partition("=")
        if name == f"{group}._target_":  # a class in place of the option's
            option["_target_"] = target
    owner = class_name(option) if "_target_" in option else group
    # From the likeliest mistake to the least: a typo, a missing +, another option's parameter.
    unknown = unknown_name(key, names, f"a parameter of {owner}")
    if key in names:  # task=validate finds the option in a run, where the key has no place
        return UserError(
            f"{key} needs an option that is named; add {group}=NAME, which a run without {key} "
            "prints"
        )
    if difflib.get_close_matches(key, names, cutoff=0.9):
        return unknown  # a typo; importing the class would take a second
    parameters = parameters_of(target_of({group: option}, group)) or ()
    if parameter.partition(".")[0] in parameters:
        return UserError(f"{key} is not listed by the option's file; write +{key}=VALUE")
    options = _options_with(group, parameter, settings)
    if 0 < len(options) <= MOST_OPTIONS:
        named = " and ".join(f"{group}={option}" for option in options)
        remedy = f"add {group}={_fitting(options, group, settings)}"
        return UserError(f"{key} is not a parameter of {owner}, but of {named}; {remedy}")
    return unknown


def _fitting(options: Sequence[str], group: str, settings: Sequence[str]) -> str:
    """Return the first of a group's `options` that reads a simulated device or host, where one is
    stated; else the last.
    """
    paths = option_files(group, folders_of(settings))
    stated = {name_of(setting).partition(".")[0] for setting in settings}
    simulated = stated.intersection(OF_SIMULATION)
    for option in options:
        if not simulated.isdisjoint(read_option(group, paths[option])):
            return option
    return options[-1]


def _unknown_setting(key: str) -> UserError:
    """For a key that belongs to no option: of config.yaml, or of a node there, such as `cache`."""
    group, _, _ = key.partition(".")
    names = list(top_level())
    node = top_level().get(group)
    if isinstance(node, DictConfig):
        names = [f"{group}.{name}" for name in map(str, node)]
    return unknown_name(key, names, "a setting")


def _options_with(group: str, parameter: str, settings: Sequence[str]) -> list[str]:
    """Return the options of a group whose files list a parameter."""
    paths = option_files(group, folders_of(settings))
    return [option for option, path in paths.items() if parameter in read_option(group, path)]


def combine(settings: Sequence[Override]) -> list[tuple[str, ...]]:
    """All combinations of the settings' values; of two settings of a name the last counts."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        key = setting.get_key_element()
        line = str(setting.input_line)
        values[key] = [line]
        if setting.is_discrete_sweep():
            first = islice(setting.sweep_string_iterator(), MOST_JOBS + 1)
            values[key] = [f"{key}={value}" for value in first]
        elif setting.is_sweep_override():
            raise UserError(f"{line} has no end of values; name them, as in {key}=1,2")
        num_jobs = math.prod(map(len, values.values()))
        if not 0 < num_jobs <= MOST_JOBS:
            raise UserError(
                f"{line} makes a sweep of 0, or of more than {MOST_JOBS} runs; name other values"
            )
    return list(product(*values.values()))

"""Command lines: flags and settings; and Hydra's errors about them as one line with the value, the
reason and the fix.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from sarathi_lab.config.errors import UserError, nearest_name, suggestion, unknown_name
from sarathi_lab.config.instantiate import (
    CHOICES,
    Settings,
    class_name,
    name_of,
    option_files,
    parameter_names,
    parameters_of,
    read_option,
    settings_of,
    settings_without,
    target_of,
)
from sarathi_lab.config.published_names import nearest_option
from sarathi_lab.config.run_context import SweepRecord

SWITCHES = (
    *("--help -h", "--version", "--multirun -m", "--dry-run", "--verbose -v"),
    *("--hydra-help", "--resolve", "--shell-completion -sc"),
)
WITH_VALUE = ("--config-dir -cd", "--cfg -c", "--package -p")
SHOWN_BY_HYDRA = ("hydra_help", "cfg", "info", "shell_completion")
OF_LAB = ("--dry-run", "--verbose", "-v")  # flags that Hydra does not have
LAUNCHER = "hydra/launcher"
GROUPS_OF_OPTIONS = (*CHOICES, LAUNCHER, "hydra/sweeper")
# Parameters that no other option of hardware has, and which the user need not name it for.
OF_DATASHEET = (
    *("base", "peak", "bandwidth", "memory", "link", "network"),
    *("fp8_peak", "fp4_peak", "int8_peak", "error"),
)
# A setting whose value is a command line, in which Hydra's grammar has no say.
SERVER = "task.server"
MOST_OPTIONS = 3  # that a line names which have the parameter that another lacks
# What else than the name of an option may be meant, and how it is written.
BESIDE_OPTIONS = {
    "policy": "for a class of yours write policy._target_=my_module.MyPolicy",
    "workload": "for a file of requests write workload=trace workload.path=FILE",
    "model": "for a config.json or a checkpoint write model=auto model.path=FOLDER",
    "hardware": "for another card write hardware=datasheet hardware.base=NAME hardware.name=YOURS "
    "and what else its datasheet has otherwise",
    LAUNCHER: "others come with hydra-joblib-launcher, hydra-ray-launcher, hydra-submitit-launcher",
}


@dataclass(frozen=True)
class Arguments:
    """A command line, read.

    Attributes:
        settings: As they are typed; none is a flag.
        flags_of_hydra: With which Hydra shows something instead of running.
        topics: Behind --help: groups and settings to explain.
    """

    settings: tuple[str, ...]
    is_sweep: bool = False
    is_dry_run: bool = False
    is_help: bool = False
    is_version: bool = False
    topics: tuple[str, ...] = ()
    flags_of_hydra: tuple[str, ...] = ()


def read_arguments(args: Sequence[str]) -> Arguments:
    """Read a command line; of `resume=FOLDER` alone that of the sweep there. Raises UserError."""
    parsed = _parsed(args)
    topics = []
    settings = []
    for argument in parsed.settings:
        if parsed.help and "=" not in argument:
            topics.append(argument)
        else:
            settings.append(_with_quotes(argument))
    if parsed.verbose:
        settings.append("hydra.verbose=true")
    if parsed.config_dir:
        settings.append(_searchpath(settings, parsed.config_dir))
    flags_of_hydra = []
    if any(vars(parsed)[name] for name in SHOWN_BY_HYDRA):
        others = (*OF_LAB, *parsed.settings)
        flags_of_hydra = [argument for argument in args if argument not in others]
    arguments = Arguments(
        settings=tuple(_with_datasheet(settings)),
        is_sweep=parsed.multirun,
        is_dry_run=parsed.dry_run,
        is_help=parsed.help,
        is_version=parsed.version,
        topics=tuple(topics),
        flags_of_hydra=tuple(flags_of_hydra),
    )
    return _with_recorded(arguments)


def _parsed(args: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line. Raises UserError for unknown and useless ones."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    for names in SWITCHES:
        parser.add_argument(*names.split(), action="store_true")
    for names in WITH_VALUE:
        parser.add_argument(*names.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("settings", nargs="*")
    # Hydra has two short flags of two letters; argparse would take -chunk for -c hunk.
    unknown = [arg for arg in args if re.match(r"-[^-].", arg) and arg not in ("-sc", "-cd")]
    if not unknown:
        try:
            parsed, unknown = parser.parse_known_intermixed_args(list(args))
        except argparse.ArgumentError as error:
            raise UserError(f"{error}; --help lists the options") from None
    if unknown:
        options = " ".join([*SWITCHES, *WITH_VALUE]).split()
        similar = suggestion(unknown[0], options)
        raise UserError(
            f"option {unknown[0]} is unknown{similar}; settings are written name=value, --help "
            "lists the options"
        )
    if parsed.resolve and not parsed.cfg:
        raise UserError("option --resolve has no effect without --cfg; add --cfg job")
    return parsed


def _with_recorded(arguments: Arguments) -> Arguments:
    """Return the command line that `resume=FOLDER` continues; the one that is typed, if it names
    no folder, or has other settings than the launcher's.
    """
    resume = settings_of(arguments.settings, ["resume"])
    launchers = settings_without(arguments.settings, ["resume"])
    if not all(map(_sets_launcher, launchers)):
        return arguments
    _, _, value = " ".join(resume).partition("=")
    folder = value.strip("'\"")
    if folder.lower() in ("", "true", "false"):
        return arguments
    record = SweepRecord.read(Path(folder))
    recorded = read_arguments(record.arguments)
    settings = list(recorded.settings)
    if launchers:  # in place of the recorded one
        settings = [setting for setting in settings if not _sets_launcher(setting)]
    settings += [*launchers, *resume]
    return replace(recorded, settings=tuple(settings), is_dry_run=arguments.is_dry_run)


def _sets_launcher(setting: str) -> bool:
    """Return whether a setting says where jobs run, which is no part of their work."""
    return name_of(setting).startswith(("hydra.launcher", LAUNCHER))


def quoted(text: str) -> str:
    """Quote `text` as a setting's value."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_quotes(setting: str) -> str:
    """Quote a command line that is a value, unless it is quoted."""
    name, _, value = setting.partition("=")
    is_stated = name == SERVER and value not in ("", "null")
    if not is_stated:
        return setting
    if value[0] in "'\"":
        return setting
    # Its spaces, commas and braces would be Hydra's lists and sweeps.
    return f"{name}={quoted(value)}"


def _searchpath(settings: Settings, folder: str) -> str:
    """Return the setting that adds options of `folder`, which is recorded as others are."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir {folder} is not a folder; name one that has policy/ or such")
    if settings_of(settings, ["hydra.searchpath"]):
        raise UserError(
            f"--config-dir {folder} has no effect beside hydra.searchpath; name both folders there"
        )
    source = quoted(f"file://{Path(folder).absolute()}")
    return f"hydra.searchpath=[{source}]"


def _with_datasheet(settings: list[str]) -> list[str]:
    """Choose the option whose parameters are named, where a card is described and none chosen."""
    of_datasheet = [f"hardware.{name}" for name in OF_DATASHEET]
    is_card_chosen = bool(settings_of(settings, ["hardware"]))
    states_datasheet = bool(settings_of(settings, of_datasheet))
    if is_card_chosen or not states_datasheet:
        return settings
    return ["hardware=datasheet", *settings]


@contextmanager
def explained(settings: Settings) -> Iterator[None]:
    """Raise UserError for errors of Hydra and OmegaConf about `settings`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _explain(error, settings) from None


def _explain(error: Exception, settings: Settings) -> UserError:
    """Return one line for an error of Hydra or OmegaConf about `settings`."""
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override!r} can't be read; settings are written name=value, without spaces "
            "around =, and a value with spaces is quoted: 'task.server=vllm serve MODEL'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        path = error.missing_cfg_file  # such as policy/orcaa
        for group in GROUPS_OF_OPTIONS:
            if path.startswith(f"{group}/"):
                return _unknown_option(group, path.removeprefix(f"{group}/"), error.options or ())
    # Hydra wraps OmegaConf's error, which alone has the key.
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        node = cause.parent_node
        if isinstance(node, DictConfig):
            return _unknown_key(str(cause.full_key), node)
    # In several lines, some of which say what to write.
    reason = " ".join(f"{error}\n{cause or ''}".split()) or type(error).__name__
    return UserError(f"{' '.join(settings)}: {reason}; --help shows the settings")


def _unknown_option(group: str, name: str, options: Sequence[str]) -> UserError:
    """Return the refusal of a name that is none of a group's `options`."""
    similar = suggestion(name, options)
    if group in ("model", "hardware"):
        similar = _published(group, name) or similar
    groups = [other for other in CHOICES if name in option_files(other)]
    if not similar and len(groups) == 1:  # "none" is of several
        (other,) = groups
        return UserError(
            f"{group}={name} is unknown; {name} is an option of {other}: write {other}={name}"
        )
    remedy = f"use one of {', '.join(options)}"
    if group in BESIDE_OPTIONS:
        remedy = f"{BESIDE_OPTIONS[group]}, or {remedy}"
    return UserError(f"{group}={name} is unknown{similar}; {remedy}")


def _published(group: str, name: str) -> str:
    """Return which option is meant by a published name, as a question; empty for none."""
    # A name of the hub or of a folder ends with the model's: meta-llama/Llama-3.3-70B-Instruct.
    _, _, own_name = name.rstrip("/").rpartition("/")
    nearest = nearest_option(group, own_name)
    if nearest.differences:
        differences = " ".join(nearest.differences)
        return f" ({nearest.option}, but for {differences})"
    if nearest.option:
        return f" (did you mean {nearest.option}?)"
    return ""


def _unknown_key(key: str, node: DictConfig) -> UserError:
    """Return the refusal of a key that `node`, a part of the configuration, does not have."""
    group, dot, parameter = key.rpartition(".")
    if not group or "_target_" not in node:
        names = []
        for name in map(str, node):
            if name != "hydra":
                names.append(f"{group}{dot}{name}")
        if not group:
            names.append("experiment")  # which has settings of all groups
        return unknown_name(key, names, "a setting")
    owner = class_name(node)
    options = _options_with(group, parameter)
    named = [f"{group}={option}" for option in options]
    if 0 < len(named) <= MOST_OPTIONS:
        remedy = f"add {' or '.join(named)}"
        return UserError(
            f"{key} is not a parameter of {owner}, but of {' and '.join(named)}; {remedy}"
        )
    if group == "hardware" and "datasheet" in options:
        return UserError(f"{key} is not a parameter of {owner}; {BESIDE_OPTIONS[group]}")
    names = parameter_names(node, group)
    own_names = [name.rpartition(".")[2] for name in names]
    # Importing the class takes a second, which a typo need not wait for.
    if nearest_name(parameter, own_names) is None:
        target = target_of({group: node}, group)
        if parameter in (parameters_of(target) or ()):
            return UserError(f"{key} is not listed by the option's file; write +{key}=VALUE")
    return unknown_name(key, names, f"a parameter of {owner}")


def _options_with(group: str, parameter: str) -> list[str]:
    """Return the options of a group whose files list a parameter."""
    files = option_files(group, ())
    options = []
    for option, path in files.items():
        if parameter in read_option(group, path):
            options.append(option)
    return options

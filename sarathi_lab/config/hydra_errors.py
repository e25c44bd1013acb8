"""Errors of Hydra as one line (the value, the reason, the fix), and the text of `--help`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.config.arguments import name_of, searchpath
from sarathi_lab.config.errors import UserError, suggestion, unknown_option
from sarathi_lab.config.instantiate import class_of, make_loader, parameters_of
from sarathi_lab.config.paths import CONF

HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
GROUPS = (
    *("task", "policy", "workload", "executor", "model", "hardware", "host", "cluster", "slo"),
    *("speculation", "tracking"),
)
LAUNCHERS = ("basic", "joblib", "ray", "submitit_local", "submitit_slurm")
USAGE = """usage: python -m sarathi_lab.run [GROUP=OPTION ...] [SETTING=VALUE[,VALUE ...] ...] [-m]

  -m, --multirun            sweep over settings with several values
  -cd, --config-dir FOLDER  a folder with options of your own, such as policy/mine.yaml
      --dry-run             check and list the runs, with an estimate of their time; run nothing
  -c, --cfg job [-p NODE]   show the configuration instead of running it; --resolve fills in ${...}
  -i, --info                what Hydra has read; --hydra-help: its other options
"""


@contextmanager
def explained(
    settings: Sequence[str],
    loader: ConfigLoader | None = None,
    kinds: tuple[type[Exception], ...] = HYDRA_ERRORS,
) -> Iterator[None]:
    """Raise UserError for errors of Hydra and OmegaConf about `settings` in the block."""
    try:
        yield
    except kinds as error:
        raise _explain(error, settings, loader or make_loader()) from None


def _explain(error: Exception, settings: Sequence[str], loader: ConfigLoader) -> UserError:
    """Return one line for an error of Hydra or OmegaConf about `settings`."""
    message, cause = str(error), str(error.__cause__ or "")
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override!r} can't be read; settings are written name=value, without spaces "
            "around ="
        )
    if found := re.search(r"Sweep parameters? '(.+?)' requires --multirun", message):
        return UserError(f"{found[1]} is a sweep over several values; add -m to run them all")
    if found := re.search(r"Ambiguous value for argument '(.+?)'", message):
        return UserError(
            f"{found[1]} has several values; add -m to sweep over them, or quote the comma"
        )
    if found := re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']+)'", message):
        return _missing_plugin(*found.groups())
    if found := re.search(rf"Could not find '({'|'.join(GROUPS)})/(.+?)'", message):
        return unknown_option(found[1], found[2], options(found[1], settings, loader))
    if found := re.search(r"Could not override '([\w.@/]+)'", message + cause):
        return _unknown_key(found[1], settings, loader)
    lines = [line.strip() for line in f"{message}\n{cause}".splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return UserError(f"{' '.join(settings)}: {first}; --help shows the settings")


def _missing_plugin(kind: str, name: str) -> UserError:
    if kind == "sweeper":
        return unknown_option("hydra/sweeper", name, ("lab", "optuna_search"))
    if name not in LAUNCHERS:
        return unknown_option("hydra/launcher", name, LAUNCHERS)
    package = f"hydra-{name.partition('_')[0]}-launcher"
    return UserError(
        f"hydra/launcher={name} needs the package {package}, which is missing; pip install "
        f"{package}"
    )


def options(group: str, settings: Sequence[str], loader: ConfigLoader) -> list[str]:
    """The options of a group, those of the folders that `settings` add included."""
    folders = [setting for setting in settings if name_of(setting) == "hydra.searchpath"]
    return loader.get_group_options(group, config_name="config", overrides=folders)


def unknown_name(key: str, valid: Sequence[str], what: str) -> UserError:
    """For a key that is not `what`."""
    fix = f"use one of {', '.join(sorted(valid))}" if valid else "it has none; drop it"
    return UserError(f"{key} is not {what}{suggestion(key, valid)}; {fix}")


def _unknown_key(key: str, settings: Sequence[str], loader: ConfigLoader) -> UserError:
    chosen = rf"({'|'.join(GROUPS)})=[\w.-]+|hydra\.searchpath=.*"
    choices = [setting for setting in settings if re.fullmatch(chosen, setting)]
    cfg = loader.load_configuration("config", choices, RunMode.RUN)
    group, _, parameter = key.partition(".")
    if not parameter or group not in cfg or not isinstance(cfg[group], DictConfig):
        names = [str(name) for name in cfg if name != "hydra"]
        return unknown_name(key, [*names, "experiment"], "a setting")
    names = parameter_names(cfg, group)
    is_typo = bool(difflib.get_close_matches(key, names, cutoff=0.9))
    # Importing the class takes a second: only where a typo is not the likelier mistake.
    listed = parameters_of(class_of(cfg, group)) if not is_typo and group in GROUPS else None
    if parameter.partition(".")[0] in (listed or ()):
        return UserError(
            f"{key} is at its default, which the option's file does not list; write +{key}=VALUE"
        )
    owner = str(cfg[group].get("_target_", group)).rpartition(".")[2]
    return unknown_name(key, names, f"a parameter of {owner}")


def parameter_names(cfg: DictConfig, group: str) -> list[str]:
    """A group's parameters as a user types them: the short name where it is an interpolation."""
    raw: Any = OmegaConf.to_container(cfg[group], resolve=False)
    return [
        short[1] if (short := re.fullmatch(r"\$\{(\w+)\}", str(value))) else f"{group}.{key}"
        for key, value in raw.items()
        if key != "_target_"
    ]


def help_text(settings: Sequence[str], loader: ConfigLoader) -> str:
    """What there is to set: the groups with their options, and the configuration of `settings`,
    each with the comments of its file. Hydra's own help takes twice as long.
    """
    parsed = OverridesParser.create().parse_overrides(list(settings))
    single = [str(one.input_line) for one in parsed if not one.is_sweep_override()]
    cfg = loader.load_configuration("config", single, RunMode.RUN)
    choices = cfg.hydra.runtime.choices
    with open_dict(cfg):
        del cfg["hydra"]
    folders = [*(Path(folder.removeprefix("file://")) for folder in searchpath(settings)), CONF]
    comments = comments_of(CONF / "config.yaml")
    for group in (*GROUPS, "experiment"):
        if choices.get(group) is not None and (path := _file(group, choices[group], folders)):
            comments |= comments_of(path, group)
    shown = [line + comments.get(name, "") for line, name in named_lines(OmegaConf.to_yaml(cfg))]
    groups = (*GROUPS, "experiment", "hydra/launcher", "hydra/sweeper")
    listed = [
        line
        for group in groups
        for line in (f"\n{group}=", *_described(group, options(group, settings, loader), folders))
    ]
    return "\n".join([USAGE, "groups and their options:", *listed, "", "settings:", *shown])


def _described(group: str, names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """A line for each option of a group, with the first sentence of its file's comment."""
    width = max(map(len, names), default=0)
    lines = []
    for name in names:
        path = _file(group, name, folders)
        text = "" if path is None else path.read_text().removeprefix("# @package _global_\n")
        comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
        sentence = " ".join(line[2:] for line in comment)
        lines.append(f"  {name:{width}}  {sentence.partition('. ')[0].rstrip('.')}".rstrip())
    return lines


def _file(group: str, name: str, folders: Sequence[Path]) -> Path | None:
    """Where an option is described; None for those of other packages."""
    paths = (folder / group / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def comments_of(path: Path, group: str = "") -> dict[str, str]:
    """Return the comment of each setting in a file of `group` by dotted name; what it takes
    from the files of its defaults list included.
    """
    text = path.read_text()
    prefix = "" if not group or text.startswith("# @package _global_") else f"{group}."
    found: dict[str, str] = {}
    for folder, names in re.findall(r"^  - /(\w+)@_here_: \[(.*)\]$", text, re.M):
        for name in names.split(", "):
            shared = comments_of(CONF / folder / f"{name}.yaml")
            found |= {prefix + setting: comment for setting, comment in shared.items()}
    for line, name in named_lines(text):
        if name and (comment := re.search(r" # .*$", line)):
            found[prefix + name] = comment[0]
    return found


def named_lines(text: str) -> Iterator[tuple[str, str]]:
    """The lines of YAML, each with the dotted name of the setting it holds; empty for others."""
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        if (key := re.match(r"( *)([\w.-]+):( |$)", line)) is None:
            yield line, ""
            continue
        parents = [parent for parent in parents if parent[0] < len(key[1])]
        parents.append((len(key[1]), key[2]))
        yield line, ".".join(name for _, name in parents)

"""The text of `--help`: groups with their options, settings with the comments of their files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from sarathi_lab.config.arguments import searchpath
from sarathi_lab.config.hydra_errors import GROUPS, options
from sarathi_lab.config.paths import CONF

USAGE = """usage: python -m sarathi_lab.run [GROUP=OPTION ...] [SETTING=VALUE[,VALUE ...] ...] [-m]

  -m, --multirun            sweep over settings with several values
  -cd, --config-dir FOLDER  a folder with options of your own, such as policy/mine.yaml
      --dry-run             check and list the runs, with an estimate of their time; run nothing
  -c, --cfg job [-p NODE]   show the configuration instead of running it; --resolve fills in ${...}
  -i, --info                what Hydra has read; --hydra-help: its other options
"""


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
        said = " ".join(line[2:] for line in comment)
        lines.append(f"  {name:{width}}  {said.partition('. ')[0].rstrip('.')}".rstrip())
    return lines


def _file(group: str, name: str, folders: Sequence[Path]) -> Path | None:
    """Where an option is described; None for those of other packages."""
    paths = (folder / group / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def comments_of(path: Path, group: str = "") -> dict[str, str]:
    """What a file of `group` says beside each setting, by the setting's dotted name; what it takes
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

"""The text of `--help`: the settings, as their files explain them; Hydra's takes longer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from sarathi_lab.config.command_line import LAUNCHERS, chosen_options, folders_of
from sarathi_lab.config.console import typed
from sarathi_lab.config.instantiate import CHOICES, option_files
from sarathi_lab.config.paths import CONF

OPTIONS = """[NAME=VALUE[,VALUE ...] ...] [-m]

  -m, --multirun            sweep over settings with several values
  -cd, --config-dir FOLDER  a folder with more options, such as policy/mine.yaml
      --dry-run             check and list the runs; run nothing
  -c, --cfg job [-p NODE]   show the configuration; --resolve fills in ${...}
  -i, --info                what Hydra has read; --hydra-help: its other options
      --version             of the lab

groups and their options:"""
COLUMNS = 80


def help_text(settings: Sequence[str]) -> str:
    """The groups with their options, then the files of the defaults and of `settings`' options."""
    folders, lines = folders_of(settings), [f"usage: {typed('run')} {OPTIONS}"]
    for group in (*CHOICES, "hydra/sweeper"):
        options = option_files(group, folders)
        width = max(map(len, options))
        lines.append(f"\n{group}=")
        lines += [f"  {name:{width}}  {_summary(path)}" for name, path in options.items()]
    lines += ["\nhydra/launcher=", *(f"  {name}" for name in LAUNCHERS), "\nsettings:"]
    text = (CONF / "config.yaml").read_text()
    lines.append(text.partition("\n\n")[2].partition("\nhydra:")[0])
    for group, path in chosen_options(settings).items():
        lines += [f"{group}: # {path.stem}", *_settings(path)]
        for shared in re.findall(r"^  - /(\w+)@_here_: \[(.*)\]$", path.read_text(), re.MULTILINE):
            for name in shared[1].split(", "):
                lines += ["  # if not set above:", *_settings(CONF / shared[0] / f"{name}.yaml")]
    return "\n".join(_wrapped(line) for text in lines for line in text.split("\n"))


def _wrapped(line: str) -> str:
    """Break a line that is too long: below an option's summary, or into comments."""
    option = re.match(r"  \S+ {2,}", line)
    indent = " " * len(option[0]) if option else "    # " if "# " in line else "    "
    return textwrap.fill(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _settings(path: Path) -> list[str]:
    return [f"  {line}" for line in path.read_text().splitlines() if not line.startswith("#")]


def _summary(path: Path) -> str:
    """The first sentence of the comment that a file begins with; a folder's page as the folder."""
    text = path.read_text().removeprefix("# @package _global_\n")
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    sentence = " ".join(line[2:] for line in comment).partition(". ")[0].rstrip(".")
    return sentence.removesuffix("/README.md")

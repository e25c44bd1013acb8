"""The text of `--help`: the settings, as their files explain them; Hydra's takes longer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from sarathi_lab.config.command_line import LAUNCHERS, chosen_options, folders_of
from sarathi_lab.config.instantiate import CHOICES, option_files
from sarathi_lab.config.paths import CONF

USAGE = """usage: python -m sarathi_lab.run [GROUP=OPTION ...] [SETTING=VALUE[,VALUE ...] ...] [-m]

  -m, --multirun            sweep over settings with several values
  -cd, --config-dir FOLDER  a folder with further options, such as policy/mine.yaml
      --dry-run             check and list the runs; run nothing
  -c, --cfg job [-p NODE]   show the configuration instead of running it; --resolve fills in ${...}
  -i, --info                what Hydra has read; --hydra-help: its other options

groups and their options:"""


def help_text(settings: Sequence[str]) -> str:
    """The groups with their options, then the files of the defaults and of the options that
    `settings` choose.
    """
    folders, lines = folders_of(settings), [USAGE]
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
    return "\n".join(lines)


def _settings(path: Path) -> list[str]:
    return [f"  {line}" for line in path.read_text().splitlines() if not line.startswith("#")]


def _summary(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    text = path.read_text().removeprefix("# @package _global_\n")
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line[2:] for line in comment).partition(". ")[0].rstrip(".")

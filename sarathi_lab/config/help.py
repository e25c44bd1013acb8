"""The text of `--help`: what there is to set, as its files say it. Hydra's own takes longer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import indent

from omegaconf import OmegaConf

from sarathi_lab.config.command_line import LAUNCHERS, chosen_options, folders_of
from sarathi_lab.config.instantiate import GROUPS, option_files, read_yaml
from sarathi_lab.config.paths import CONF

USAGE = """usage: python -m sarathi_lab.run [GROUP=OPTION ...] [SETTING=VALUE[,VALUE ...] ...] [-m]

  -m, --multirun            sweep over settings with several values
  -cd, --config-dir FOLDER  a folder with options of your own, such as policy/mine.yaml
      --dry-run             check and list the runs; run nothing
  -c, --cfg job [-p NODE]   show the configuration instead of running it; --resolve fills in ${...}
  -i, --info                what Hydra has read; --hydra-help: its other options

groups and their options:"""


def help_text(settings: Sequence[str]) -> str:
    """The groups with their options, then the files of the defaults and of the options that
    `settings` choose.
    """
    folders, lines = folders_of(settings), [USAGE]
    for group in (*GROUPS, "experiment", "hydra/sweeper"):
        options = option_files(group, folders)
        width = max(map(len, options))
        lines.append(f"\n{group}=")
        lines += [f"  {name:{width}}  {_summary(path)}" for name, path in options.items()]
    lines += ["\nhydra/launcher=", *(f"  {name}" for name in LAUNCHERS), "\nsettings:"]
    lines += [text for name, text in blocks_of(CONF / "config.yaml").items() if name != "hydra"]
    for group, path in chosen_options(settings).items():
        text = "\n".join(blocks_of(path, folders).values())
        is_global = path.read_text().startswith("# @package _global_")
        lines += [text] if is_global else [f"{group}: # {path.stem}", indent(text, "  ")]
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    text = path.read_text().removeprefix("# @package _global_\n")
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line[2:] for line in comment).partition(". ")[0].rstrip(".")


def blocks_of(path: Path, folders: Sequence[Path] = ()) -> dict[str, str]:
    """The lines of each setting in a file by its name, with their comments; those of the files of
    the same group, or put `_here_`, in its defaults list first.
    """
    texts = re.split(r"^(?=\w)", path.read_text(), flags=re.MULTILINE)[1:]
    blocks = {text.partition(":")[0]: text.rstrip() for text in texts}
    shared: dict[str, str] = {}
    for entry in read_yaml(path).get("defaults", []) if blocks.pop("defaults", "") else ():
        group, names = path.parent.name, [entry]
        if OmegaConf.is_dict(entry):
            key, names = next(iter(entry.items()))
            group, _, where = str(key).strip("/").partition("@")
            names = names if where == "_here_" else []
        files = option_files(group, folders)
        for name in names if isinstance(names, list) else [*names]:
            shared |= blocks_of(files[name], folders) if name in files else {}
    return shared | blocks

"""The arguments of a command line: flags, named as Hydra names them, and settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from sarathi_lab.config.errors import UserError

SWITCHES = (
    *("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m"),
    *("--dry-run", "--verbose -v", "--shell-completion -sc"),
)
WITH_VALUE = ("--cfg -c", "--package -p", "--config-dir -cd")
SHOWING = ("help", "hydra_help", "version", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class Arguments:
    """Flags come first in `ordered`: Hydra's own parser drops what follows a flag in the middle.

    `shows` is whether they ask for help or for showing the configuration, not for runs.
    """

    ordered: tuple[str, ...]
    settings: tuple[str, ...]
    is_multirun: bool
    shows: bool
    is_help: bool
    is_dry_run: bool = False

    @property
    def of_run(self) -> list[str]:
        """The same command line in as few words: -m and settings."""
        return [*(["-m"] if self.is_multirun else []), *self.settings]


def read_arguments(args: Sequence[str]) -> Arguments:
    """Raises UserError for options that there are not."""
    parser = _parser()
    for arg in args:
        # The parser would take -chunk for -c hunk.
        if re.match(r"-[^-].", arg) and arg not in ("-sc", "-cd"):
            raise _unknown(arg)
    try:
        parsed, unknown = parser.parse_known_intermixed_args(list(args))
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; --help lists the options") from None
    settings = list(parsed.settings)
    args = [arg for arg in args if arg not in ("--verbose", "-v")]  # a setting, as jobs are told
    settings += ["hydra.verbose=true"] if parsed.verbose else []
    flags = [arg for arg in args if arg not in settings]
    if unknown:
        raise _unknown(unknown[0])
    shows = any(getattr(parsed, name) for name in SHOWING)
    for name in ("resolve", "package"):
        if getattr(parsed, name) and not parsed.cfg:
            raise UserError(f"option --{name} has no effect without --cfg; add --cfg job")
    if parsed.config_dir and (parsed.help or not shows):
        settings = _with_folder(settings, parsed.config_dir)
    _check_folders(settings)
    return Arguments(
        (*flags, *parsed.settings),
        tuple(settings),
        is_multirun=parsed.multirun,
        shows=shows,
        is_help=parsed.help,
        is_dry_run=parsed.dry_run,
    )


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
    return UserError(
        f"option {option} is unknown; settings are written name=value, --help lists the options"
    )


def name_of(setting: str) -> str:
    """What it sets, such as "policy" of "+policy=orca"."""
    return setting.partition("=")[0].lstrip("+")


def is_searchpath(setting: str) -> bool:
    """Whether it says where more options are."""
    return setting.lstrip("+").startswith("hydra.searchpath=")


def searchpath(settings: Sequence[str]) -> list[str]:
    """The folders that `hydra.searchpath` adds to conf/."""
    own = [setting for setting in settings if is_searchpath(setting)]
    value = OverridesParser.create().parse_override(own[-1]).value() if own else []
    return list(value) if isinstance(value, list) else [str(value)]


def _with_folder(settings: list[str], folder: str) -> list[str]:
    """With the options of `folder` by a setting, as jobs in other processes compose anew."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir {folder} is not a folder; name one that has policy/ or such")
    folders = [*searchpath(settings), f"file://{Path(folder).absolute()}"]
    others = [setting for setting in settings if not is_searchpath(setting)]
    return [f"hydra.searchpath=[{','.join(map(quoted, folders))}]", *others]


def _check_folders(settings: Sequence[str]) -> None:
    for source in searchpath(settings):
        scheme, _, path = source.rpartition("://")
        if scheme in ("", "file") and not Path(path).is_dir():
            raise UserError(
                f"hydra.searchpath={source} is not a folder; name one such as file:///home/me/conf"
            )


def quoted(text: str) -> str:
    """`text` as a setting's value, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

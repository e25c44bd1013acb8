"""Command lines: flags, named as Hydra names them, and settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.sweep_record import SweepRecord, read_record

SWITCHES = (
    *("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m"),
    *("--dry-run", "--verbose -v", "--shell-completion -sc"),
)
WITH_VALUE = ("--cfg -c", "--package -p", "--config-dir -cd")
SHOWING = ("help", "hydra_help", "version", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class Arguments:
    """A command line, read.

    `flags` make Hydra show something instead of running. `settings` have no flag among them:
    Hydra's own parser refuses settings behind one.
    """

    flags: tuple[str, ...]
    settings: tuple[str, ...]
    is_multirun: bool
    is_help: bool
    is_dry_run: bool

    @property
    def of_hydra(self) -> list[str]:
        """The arguments for `hydra.main`, in whose place the lab's sweeper makes all runs."""
        if self.flags:
            return [*self.flags, *(["-m"] if self.is_multirun else []), *self.settings]
        added = ["hydra.mode=MULTIRUN"] if self.is_multirun else []
        return [*self.settings, *added, *(["hydra.sweeper.dry_run=true"] * self.is_dry_run)]


def read_arguments(args: Sequence[str]) -> Arguments:
    """Read a command line; of `resume=FOLDER` alone that of the sweep there. Raises UserError for
    unknown options.
    """
    for arg in args:
        if re.match(r"-[^-].", arg) and arg not in ("-sc", "-cd"):
            raise _unknown(arg)  # argparse would take -chunk for -c hunk
    try:
        parsed, unknown = _parser().parse_known_intermixed_args(list(args))
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; --help lists the options") from None
    if unknown:
        raise _unknown(unknown[0])
    shows = any(getattr(parsed, name) for name in SHOWING)
    for name in ("resolve", "package"):
        if getattr(parsed, name) and not parsed.cfg:
            raise UserError(f"option --{name} has no effect without --cfg; add --cfg job")
    settings = [*parsed.settings, *(["hydra.verbose=true"] if parsed.verbose else [])]
    if parsed.config_dir and (parsed.help or not shows):
        settings = _with_folder(settings, parsed.config_dir)
    _check_folders(settings)
    dropped = ("-v", "--verbose", "-m", "--multirun", "--dry-run", *parsed.settings)
    flags = tuple(arg for arg in args if arg not in dropped) if shows else ()
    arguments = Arguments(flags, tuple(settings), parsed.multirun, parsed.help, parsed.dry_run)
    return arguments if shows else _with_recorded(arguments)


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


def _with_recorded(arguments: Arguments) -> Arguments:
    """The command line that `resume=FOLDER` continues, if nothing but a launcher is set beside."""
    resumes = [one for one in arguments.settings if name_of(one) == "resume"]
    value = resumes[-1].partition("=")[2].strip("'\"") if resumes else "false"
    if value in ("", "null"):
        raise UserError(
            "resume= names nothing; use resume=true, or resume=FOLDER with the folder of a sweep"
        )
    others = [one for one in arguments.settings if one not in resumes]
    if value.lower() in ("true", "false") or not all(map(_sets_launcher, others)):
        return arguments
    record: SweepRecord = read_record(Path(value))
    recorded = read_arguments(record.arguments)
    kept = [one for one in recorded.settings if not (others and _sets_launcher(one))]
    settings = (*kept, *others, *resumes)
    return Arguments((), settings, recorded.is_multirun, is_help=False, is_dry_run=False)


def _sets_launcher(setting: str) -> bool:
    return setting.lstrip("+~").startswith(("hydra.launcher", "hydra/launcher"))


def name_of(setting: str) -> str:
    """The name that a setting sets, such as "policy" of "+policy=orca"."""
    return setting.partition("=")[0].lstrip("+~")


def searchpath(settings: Sequence[str]) -> list[str]:
    """The folders that `hydra.searchpath` adds to conf/."""
    found = [one for one in settings if name_of(one) == "hydra.searchpath"]
    value = OverridesParser.create().parse_override(found[-1]).value() if found else []
    return list(value) if isinstance(value, list) else [str(value)]


def _with_folder(settings: list[str], folder: str) -> list[str]:
    """Add the options of `folder` by a setting, which is recorded and passed on as others are."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir {folder} is not a folder; name one that has policy/ or such")
    folders = [*searchpath(settings), f"file://{Path(folder).absolute()}"]
    others = [setting for setting in settings if name_of(setting) != "hydra.searchpath"]
    return [f"hydra.searchpath=[{','.join(map(quoted, folders))}]", *others]


def _check_folders(settings: Sequence[str]) -> None:
    for source in searchpath(settings):
        scheme, _, path = source.rpartition("://")
        if scheme in ("", "file") and not Path(path).is_dir():
            raise UserError(
                f"hydra.searchpath={source} is not a folder; name one such as file:///home/me/conf"
            )


def quoted(text: str) -> str:
    """Quote `text` as a setting's value."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

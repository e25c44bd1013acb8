"""The text of `--help`: one screen of pointers, and what the files of conf/ say of a topic."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from sarathi_lab.config.console import typed
from sarathi_lab.config.errors import UserError, unknown_name
from sarathi_lab.config.instantiate import (
    CHOICES,
    GROUPS,
    Settings,
    name_of,
    option_files,
    top_level,
)
from sarathi_lab.config.paths import CONF

COLUMNS = 80
EXAMPLES = (
    ("chunk=256,512,1024 -m", "a sweep, measured on this machine"),
    ("chunk=256 executor=simulated hardware=h100", "simulated"),
    ("experiment=fig08", "a figure of the paper"),
    ("task=advise hardware=h100 model=llama3-8b", "which token budget"),
)
FLAGS = """\
  -m, --multirun            sweep over settings with several values
      --dry-run             check and list the runs; run nothing
  -v, --verbose             print all that is known of each run
  -c, --cfg job [-p NODE]   show the configuration; --resolve fills in ${...}
  -cd, --config-dir FOLDER  a folder with more options, such as policy/mine.yaml
      --version             of the lab; -i and --hydra-help: of Hydra"""
POINTERS = (
    ("--help policy", "the options of a group"),
    ("--help chunk", "a setting, wherever it stands"),
    ("policy=vllm_v1 --help", "the settings of chosen options"),
)
FIRST_SETTINGS = ("chunk", "batch", "pd_ratio", "seq_len", "seed", "baselines", "output")


def help_text(settings: Settings, topics: Sequence[str] = ()) -> str:
    """Return what `--help` prints in lines of 80 columns.

    Args:
        settings: Settings on the command line, which are explained; of an option all of its own.
        topics: Groups (`policy`) and names of settings (`chunk`, `workload.rate`).

    Raises:
        UserError: A topic is neither a group nor a setting.
    """
    sections = [f"usage: {typed('run')} [NAME=VALUE[,VALUE ...] ...] [-m]"]
    own_settings = [setting for setting in settings if not setting.startswith("hydra")]
    if own_settings or topics:
        sections += map(_explained, own_settings)
        sections += map(_topic, topics)
    else:
        sections += _overview()
    text = "\n\n".join(sections)
    lines = map(_wrapped, text.split("\n"))
    return "\n".join(lines)


def _overview() -> Iterator[str]:
    """One screen: examples, flags, groups, the first settings, and where to read on."""
    command = typed("run")
    examples = []
    for example, purpose in EXAMPLES:
        examples += [f"  {command} {example}", f"      {purpose}"]
    yield "\n".join(examples)
    yield f"flags:\n{FLAGS}"
    yield _list_groups()
    # As config.yaml has them: `name: value # comment; more of it`.
    commented = re.findall(r"^(\w+):.*? # ([^;\n]+)", _top_level_text(), flags=re.MULTILINE)
    comments = dict(commented)
    lines = ["settings, among others:"]
    for name in FIRST_SETTINGS:
        lines.append(f"  {name:10} {comments[name]}")
    yield "\n".join(lines)
    lines = ["more:"]
    for example, purpose in POINTERS:
        lines.append(f"  {example:24} {purpose}")
    yield "\n".join(lines)


def _list_groups() -> str:
    names = []
    for group in CHOICES:
        number = len(option_files(group, ()))
        names.append(f"{group} ({number})")
    text = textwrap.fill(", ".join(names), COLUMNS - 2, break_on_hyphens=False)
    indented = textwrap.indent(text, "  ")
    return f"groups (and how many options):\n{indented}"


def _explained(setting: str) -> str:
    """Return the settings of a chosen option; of any other setting what it means."""
    name = name_of(setting)
    _, _, option = setting.partition("=")
    path = option_files(name, ()).get(option)
    if path is None:
        return _topic(name)
    lines = [f"{name}: # {option}", *_settings_in(path)]
    for shared in _shared_files(path):
        lines += ["  # if not set above:", *_settings_in(shared)]
    return "\n".join(lines)


def _topic(name: str) -> str:
    """Return the options of a group, or the lines about a setting."""
    if name in CHOICES:
        return _options_of(name)
    lines = [*_lines_about(name)]
    if not lines:
        for group in CHOICES:
            if name in option_files(group):
                fix = f"write {group}={name} --help"
                raise UserError(f"--help {name}: {name} is an option of {group}; {fix}")
        raise unknown_name(name, [*CHOICES, *top_level()], "a group or a setting")
    return "\n".join(lines)


def _options_of(group: str) -> str:
    """List the options of a group, each with the first sentence of its file."""
    options = option_files(group, ())
    width = max(map(len, options))
    lines = [f"{group}="]
    for name, path in options.items():
        summary = _summary(path)
        lines.append(f"  {name:{width}}  {summary}")
    return "\n".join(lines)


def _lines_about(name: str) -> Iterator[str]:
    """Yield where a setting stands, with its value and comment: config.yaml, or options' files."""
    group, _, parameter = name.rpartition(".")
    if not group or group in top_level():
        for setting in _set_in(_top_level_text(), parameter):
            yield name.removesuffix(parameter) + setting
    for owner in GROUPS:
        if group not in ("", owner):
            continue
        options_by_text = defaultdict(list)  # many options state a setting in the same words
        for option, path in option_files(owner, ()).items():
            for setting in _set_by(path, parameter):
                options_by_text[setting].append(option)
        for setting, options in options_by_text.items():
            yield f"{owner}.{setting}"
            yield f"    of {owner}={', '.join(options)}"


def _set_by(path: Path, name: str) -> list[str]:
    """Return what sets `name` in an option's file, or else in the files that it takes over."""
    for file in (path, *_shared_files(path)):
        settings = _set_in(file.read_text(), name)
        if settings:
            return settings
    return []


def _set_in(text: str, name: str) -> list[str]:
    """Return what sets `name` in a file of settings, with the lines below it that are its own."""
    pattern = rf"^( *){re.escape(name)}:.*(?:\n\1 +.*)*"
    settings = []
    for match in re.finditer(pattern, text, flags=re.MULTILINE):
        lines = match[0]
        settings.append(lines.strip())
    return settings


def _top_level_text() -> str:
    """Return the settings of config.yaml, without its defaults and Hydra's own."""
    text = (CONF / "config.yaml").read_text()
    _, _, behind_defaults = text.partition("\n\n")
    settings, _, _ = behind_defaults.partition("\nhydra:")
    return settings


def _shared_files(path: Path) -> Iterator[Path]:
    """Yield the files whose settings an option takes over, such as those of arrivals."""
    text = path.read_text()
    # In the defaults list of a file: `- /folder@_here_: [name, name]`.
    taken_over = re.findall(r"^  - /(\w+)@_here_: \[(.*)\]$", text, re.MULTILINE)
    for folder, names in taken_over:
        for name in names.split(", "):
            yield CONF / folder / f"{name}.yaml"


def _settings_in(path: Path) -> list[str]:
    """Return the lines of a file without its comments, as they stand below the group's name."""
    return [f"  {line}" for line in path.read_text().splitlines() if not line.startswith("#")]


def _wrapped(line: str) -> str:
    """Break a line that is too long: below an option's summary, or into comments."""
    if len(line) <= COLUMNS:
        return line
    option = re.match(r"  \S+ {2,}", line)
    indent = "    "
    if option:
        indent = " " * len(option[0])
    elif "# " in line:
        indent = "    # "
    return textwrap.fill(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _summary(path: Path) -> str:
    """Return the first sentence of the comment that a file begins with."""
    text = path.read_text().removeprefix("# @package _global_\n")
    comment = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        comment.append(line[2:])
    sentence, _, _ = " ".join(comment).partition(". ")
    # An experiment's ends with its page: "...; see experiments/.../NAME/README.md".
    return sentence.rstrip(".").removesuffix("/README.md")

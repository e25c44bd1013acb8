"""The commands that the documents and the Makefile show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY

PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
DOCUMENTS = [
    *(path for path in sorted(REPOSITORY.glob("*.md")) if path.name != "CHANGELOG.md"),
    *(REPOSITORY / folder / "README.md" for folder in ("conf", "sarathi_lab", "kernels")),
    *PAGES,
    *sorted(EXPERIMENTS.rglob("*.md")),
]
# Up to its end, or what the shell makes of the rest.
COMMAND = re.compile(r"(?:python -m sarathi_lab[. ]|sarathi-lab )run ((?:[^`\n#;>']|'[^'`\n]*')+)")
PLACEHOLDERS = (
    "DIRECTORY",
    "FOLDER",
    "FILE",
    "NAME",
    "--cfg",
    "--help",
    "hardware=mine",
    "=outputs/",
    "my_policy",
)


def find_commands(paths: Iterable[Path]) -> list[str]:
    """List the arguments of each command of sarathi_lab.run in files."""
    texts = [path.read_text().replace(" $(ARGS)", "") for path in paths]
    return sorted({found.strip() for text in texts for found in COMMAND.findall(text)})


COMMANDS = find_commands([*DOCUMENTS, REPOSITORY / "Makefile"])
KNOWN = [command for command in COMMANDS if not any(word in command for word in PLACEHOLDERS)]


OTHER_COMMAND = re.compile(r"(?:python -m sarathi_lab|sarathi-lab) (?!run\b)([a-z]+)([^`\n>#]*)")


def other_commands() -> list[tuple[str, ...]]:
    """List the commands besides `run` that documents show, each with its arguments; without that of
    the dashboard, which imports all of W&B, and whose own tests call it.
    """
    commands: set[tuple[str, ...]] = set()
    for path in DOCUMENTS:
        for name, arguments in OTHER_COMMAND.findall(path.read_text()):
            if name == "dashboard":
                continue
            commands.add((name, *shlex.split(arguments.removesuffix("--"))))
    return sorted(commands)


class Parsed(Exception):
    """Ends a command when its parser has accepted its arguments."""


def last_of_sweeps(command: str) -> list[str]:
    """Split a command into arguments, of a sweep with the last values of all settings."""
    return [re.sub(r"=[^'\"\[\](]+,", "=", argument) for argument in shlex.split(command)]


# What takes longer than the half minute of a simulation and the two of a measurement on a CPU.
LONG = re.compile(
    r"\bmake (?:artifact|image|gpu_launches|gpu-hour|test)\b[a-z-]*"
    r"|sarathi_lab\.run (?:experiment=(?!fig|paper)[a-z]\w+|task=(?:figures|calibrate))"
    r"|sarathi_lab leaderboard|sarathi_lab claims --run"
)
# A number with its unit, or a word for one: "seconds" alone may be of anything.
TIME = re.compile(
    r"(?:\d|\b(?:an?|one|two|three|four|few|half|ten)) (?:an? )?"
    r"(?:s|min|h|seconds?|minutes?|hours?)\b"
    r"|\bnot timed\b"
)
NEAR = 4  # lines, as between a block of commands and the sentence before it


def untimed(page: Path) -> set[str]:
    """Return the long commands of a page that have a time near none of their mentions."""
    lines = page.read_text().splitlines()
    named, timed = set[str](), set[str]()
    for number, line in enumerate(lines):
        commands = LONG.findall(line)
        named.update(commands)
        if TIME.search("\n".join(lines[max(0, number - NEAR) : number + NEAR])):
            timed.update(commands)
    return named - timed

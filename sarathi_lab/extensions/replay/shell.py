"""The commands of a shell's script, each cut into words, with the variables set above it."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

# A break that a shell takes for none (also of Windows), or in front of a flag.
CONTINUED = re.compile(r"[\\^`]\r?\n|\r?\n(?=\s*-)")
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*)|:?\?[^}]*)?\}|\$\((\w+)\)|\$(\w+)")
# What a command prints, or the value of a sum; with quotes around it where it has some.
OUTPUT = re.compile(r"(\"?)(\$\((?!\w+\))(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`)\1")
# What stands for a variable that is set; nothing does for one that is not.
ALTERNATIVE = re.compile(r"\$\{(\w+):?\+((?:[^{}]|\{[^{}]*\})*)\}")
PIECE = re.compile(
    r"""
      (?P<array> "?\$\{(?P<array_name>\w+)\[[@*]\]\}"?)  # all words of an array
    | \\. | '[^']*' | "(?:\\.|[^"\\])*"          # of one meaning, whatever is in it
    | \d?>&\d? | &>>?                             # a redirection, whose & ends no command
    | (?P<variable> \$\{\w+(?::?[-?][^}]*)?\} | \$\w+ | \$\(\w+\))
    | (?P<end> [;&|]+)
    | (?P<comment> (?<!\S)\#.*)
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
# A command in brackets, or whose output a variable takes.
BRACKETED = re.compile(r"\s*(?:\w+=[\"']?\$)?\((.*)\)[\"']?\s*", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
ARRAY = re.compile(r"=\(([^()]*)\)")  # of words, on several lines
# A line that sets variables, or has some, which may stand for a command.
WITH_VARIABLES = re.compile(r"(?:^|[;&])\s*(?:\w+\s+)?\w+\+?=|\$")
COMMENT = re.compile(r"(?<!\S)#.*")
UNIT_VARIABLES = re.compile(r"^Environment=", re.MULTILINE)  # of systemd
DECLARING = (["export"], ["local"], ["readonly"], ["declare"])


@dataclass(frozen=True)
class ShellCommand:
    """A command cut into words, and the variables that were set before it.

    Attributes:
        argv: Its words, assignments in front included.
        variables: Values by name.
        has_open_quotes: Whether a quote is not closed, so that words are those between spaces.
        image: Of the container that it runs in; "": none is known.
        notes: What else is stated where it stands, and not simulated.
    """

    argv: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    has_open_quotes: bool = False
    image: str = ""
    notes: Sequence[str] = ()


def commands_in(
    script: str, variables: Mapping[str, str], programs: Sequence[str]
) -> Iterator[ShellCommand]:
    """Yield the commands of a script in their order, with variables filled in.

    Args:
        script: One line or several.
        variables: Those set before it.
        programs: Lines with none of these and no variables, as of a log, are passed over.
    """
    return _commands(script, dict(variables), programs)


def _commands(
    script: str, values: dict[str, str], programs: Sequence[str]
) -> Iterator[ShellCommand]:
    """Yield the commands of a script, and note in `values` the variables that it sets."""
    script = UNIT_VARIABLES.sub("export ", script)
    before = dict(values)

    def replacement(match: re.Match[str]) -> str:
        above = dict(before)
        deque(_commands(script[: match.start()], above, programs), maxlen=0)
        return _alternative(match, above)

    script = ALTERNATIVE.sub(replacement, script)
    for line in CONTINUED.sub(" ", ARRAY.sub(_quoted_array, script)).splitlines():
        is_of_program = any(program in line for program in programs)
        if not is_of_program and WITH_VARIABLES.search(line) is None:
            continue
        line = OUTPUT.sub(lambda output: _as_word(output, programs), line)
        for text in _commands_of_line(line):
            command = _command_of(text, values)
            argv = command.argv[command.argv[:1] in DECLARING :]
            assignments = [match for match in map(ASSIGNMENT.fullmatch, argv) if match]
            if len(assignments) < len(argv):
                yield command
                continue
            for name, adds, value in (match.groups() for match in assignments):
                if adds:
                    value = values.get(name, "") + value
                if OUTPUT.search(value):
                    values.pop(name, None)  # only a run of the script knows it
                else:
                    values[name] = value


def split(text: str) -> list[str]:
    """Return the words of a shell's line; of one with open quotes, those between spaces."""
    with suppress(ValueError):
        return shlex.split(text)
    return text.split()


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Fill in the variables that are known, or have a default."""

    def value_of(match: re.Match[str]) -> str:
        in_braces, default, in_brackets, plain = match.groups()
        unset = match[0] if default is None else default
        return variables.get(in_braces or in_brackets or plain, unset)

    return VARIABLE.sub(value_of, text)


def _commands_of_line(line: str) -> list[str]:
    """Cut a line where a command ends, and its comment off."""
    commands = [""]
    for piece in PIECE.finditer(line):
        if piece.lastgroup == "comment":
            break
        if piece.lastgroup == "end":
            commands.append("")
        else:
            commands[-1] += piece[0]
    return [_without_brackets(command) for command in commands if command.strip()]


def _without_brackets(command: str) -> str:
    """Return a command that stands in brackets, or whose output a variable takes."""
    bracketed = BRACKETED.fullmatch(command)
    return command if bracketed is None else bracketed[1]


def _as_word(output: re.Match[str], programs: Sequence[str]) -> str:
    """Return what a command prints as one word; unchanged where a server may be started in it."""
    if any(program in output[2] for program in programs):
        return output[0]
    return "'" + re.sub("[\"']", "", output[2]) + "'"


def _command_of(text: str, variables: Mapping[str, str]) -> ShellCommand:
    """Cut a command into words: an unquoted variable may be several, or none."""
    filled = ""  # still one text: a quoted piece keeps its quotes until `shlex` splits it
    for piece in PIECE.finditer(text):
        value = piece[0]
        if piece.lastgroup == "array":
            value = variables.get(piece["array_name"], value)
        if piece.lastgroup == "variable":
            value = substituted(piece[0], variables)
            if value != piece[0]:
                # A shell splits the value at spaces, but takes no quotes in it as quotes.
                value = " ".join(map(shlex.quote, value.split()))
        filled += value
    try:
        argv = shlex.split(filled)
    except ValueError:
        return ShellCommand(filled.split(), dict(variables), has_open_quotes=True)
    return ShellCommand([substituted(word, variables) for word in argv], dict(variables))


def _alternative(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Return what `${NAME:+words}` stands for: its words where NAME has a value, nothing where it
    is empty. Where its value is not here, flags have that as theirs, so that they can be named.
    """
    name, replacement = match.groups()
    value = variables.get(name)
    if value == "":
        return ""
    if value is not None and "$" not in value:
        return str(replacement)
    unset = f"${{{name}}}"
    flags = list[str]()
    for word in split(replacement):
        if word.startswith("-"):
            flags.append(f"{word.partition('=')[0]}={unset}")
    return " ".join(flags) or unset


def _quoted_array(match: re.Match[str]) -> str:
    """Return an array as one quoted text, whose words are separated by spaces."""
    elements = split(COMMENT.sub("", CONTINUED.sub(" ", match[1])))
    return f"={shlex.quote(' ' + ' '.join(map(shlex.quote, elements)))}"

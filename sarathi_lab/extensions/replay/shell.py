"""The commands of a shell's script, each cut into words, with the variables set above it.

No script is run: `$(line_7)` stands for what only a run of its line 7 tells, such as what a command
prints, or a variable that is set in a branch, a loop or a function, or by `read`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile

PROGRAMS = ("vllm", "sglang", "trtllm")  # a word of each server's program, and of its images
LINE = re.compile(r"\$\(line_(\d+)\)")
# A variable: of a shell, where `[@]` stands for all words of an array, or of Kubernetes.
VARIABLE = re.compile(r"\$\{(\w+(?:\[@\])?)(?::?-([^}]*)|:?\?[^}]*)?\}|\$\((\w+)\)|\$(\w+)")
# What a command prints, the value of a sum, or what stands for a variable that is set.
COMPUTED = re.compile(
    r"\$\((?!\w+\))(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
    r"|\$\{\w+:?\+(?:[^{}]|\{[^{}]*\})*\}"
)
PIECE = re.compile(
    r"""
      (?P<array> \w+\+?=\( (?: (?<!\S)\#[^\n]* | '[^']*' | "(?:\\.|[^"\\])*" | [^()] )*+ \) )
    | (?P<variable> "\$\{\w+\[@\]\}" | \$\{\w+(?:\[@\])?(?::?[-?][^}]*)?\} | \$\w+ | \$\(\w+\) )
    | \\. | '[^']*' | "(?:\\.|[^"\\])*"          # of one meaning, whatever is in it
    | \d?>&\d? | &>>?                             # a redirection, whose & ends no command
    | (?P<end> [;&|()]+)
    | (?P<comment> (?<!\S)\#[^\n]*)
    | (?P<open> ['"] | =\( )
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
BREAK = re.compile(r"(?:\\| [\^`])[ \t]*\r?\n")  # that a shell takes for none (also of Windows)
GOING_ON = ("\\", " ^", " `", "&&", "||")  # how a line ends whose command has another one
COMMENT = re.compile(r"(?<!\S)#.*")
ALL_WORDS = "[@]"  # behind an array's name
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[@\])?)(\+?)=(.*)", re.DOTALL)
DECLARING = ("export", "local", "readonly", "declare")
# A line that names a server, sets or has variables, or begins or ends a branch: of others no
# command follows.
OF_SCRIPT = re.compile(
    r"""
      vllm | sglang | trtllm | \$
    | (?:^|[;)&|{]) \s* (?:\w+\s+)? \w+\+?=
    | [{}]\s*$ | ^\s*\} | \(\(
    | (?:^|[;&|({]|\b(?:do|then|else|while|until|if)\b) \s* (?:\w+=\S*\s+)?
      (?:read|mapfile|readarray|getopts|printf|let|unset|source|\.) \s
    | ^\s* (?:if|for|select|while|until|case|fi|done|esac)\b
    """,
    re.VERBOSE,
)
BRANCHES = ("if", "for", "select", "while", "until", "case", "{")
ENDS = ("fi", "done", "esac", "}")
# Functions, and loops: what stands in them may run behind what follows.
LOOPS = ("for", "select", "while", "until", "{")
ENDS_OF_LOOPS = ("done", "}")
BEFORE_COMMANDS = ("if", "then", "elif", "else", "while", "until", "do", "{", "!")
SETTING = (
    "read",
    "mapfile",
    "readarray",
    "getopts",
    "printf",
    "unset",
)  # the variables that they name
SOURCING = ("source", ".")
SETTING_NOTHING = ("activate", "conda.sh")  # how files end that set no variable of a server
NAME = re.compile(r"[A-Za-z_]\w*")
ARITHMETIC = re.compile(r"\(\((.*?)\)\)|\blet\s+([^;&|]*)")
CHANGED = re.compile(
    rf"(?<=\+\+|--){NAME.pattern}|{NAME.pattern}(?=\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)"
)
SOURCED = "*"  # in place of a variable's name: the line behind which any may be set
# Behind these && goes on, as a server was started; behind others, such as a test, it may not.
SUCCEEDING = ("cd", "source", ".", "set", "echo", "sleep", "mkdir", "pip", "uv", "docker")
MOST_LINES = 100  # of a command; a quote that is open for longer stands in other text
Variables = Mapping[str, str]  # values by name


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
    variables: Variables = field(default_factory=dict)
    has_open_quotes: bool = False
    image: str = ""
    notes: Sequence[str] = ()


def untold(line: int) -> str:
    """Return what stands for a value that only a run of a script tells."""
    return f"$(line_{line})"


def commands_in(script: str, variables: Variables) -> Iterator[ShellCommand]:
    """Yield the commands of a script in their order, with variables filled in.

    Args:
        script: One line or several; of others, such as a log's, those without a server and without
            variables are passed over.
        variables: Those set before it.
    """
    unsettled = _unsettled(script)
    values = {**variables, **unsettled}
    depth = 0  # of branches, loops and functions
    for number, line in _command_lines(script):
        told_line = COMPUTED.sub(untold(number), line)
        is_reached = True
        for text, end in _commands_of_line(told_line):
            command = _command_of(text, values)
            first = "".join(command.argv[:1])
            last = "".join(command.argv[-1:])
            if first in BRANCHES or last == "{":
                depth += 1
            is_certain = is_reached and depth == 0
            is_assignment = _assign(command.argv, values, number, is_certain=is_certain)
            values |= unsettled
            if not is_assignment:
                yield command
            if _sets_any(command.argv):
                names = [*values, SOURCED]
                values = dict.fromkeys(names, untold(number))
            if first in ENDS:
                depth = max(0, depth - 1)
            if end == "&&":
                succeeds = is_assignment or first in SUCCEEDING
                is_reached = is_reached and succeeds
            else:
                is_reached = end != "||" and ")" not in end  # as of a test, or a pattern of `case`


def _unsettled(script: str) -> dict[str, str]:
    """Return by variable what stands for it where the order of a script's lines does not tell its
    value: a loop or a function sets it, or has it and it is set below, or arithmetic or a command
    such as `read` sets it.
    """
    unsettled = dict[str, str]()
    used = set[str]()  # in loops and functions
    depth = 0  # of them
    for number, line in _command_lines(script):
        arithmetic = str(ARITHMETIC.findall(line))
        names = CHANGED.findall(arithmetic)
        told_line = COMPUTED.sub(untold(number), line)
        for text, _ in _commands_of_line(told_line):
            argv = _command_of(text, {}).argv
            first = "".join(argv[:1])
            if first in ENDS_OF_LOOPS:
                depth = max(0, depth - 1)
            last = "".join(argv[-1:])
            if first in LOOPS or last == "{":
                depth += 1
            if depth > 0:
                variables = VARIABLE.finditer(text)
                used.update(map(_name_of, variables))
            names += _names_read(argv)
            for name in _names_assigned(argv):
                if depth > 0 or name in used:
                    names.append(name)
        unsettled |= dict.fromkeys(names, untold(number))
    return unsettled


def _names_read(argv: Sequence[str]) -> list[str]:
    """Return the variables that a command such as `read` sets."""
    command = _without_keywords(argv)
    program = list(dropwhile(ASSIGNMENT.fullmatch, command))
    if "".join(program[:1]) not in SETTING:
        return []
    return list(filter(NAME.fullmatch, program))


def _names_assigned(argv: Sequence[str]) -> list[str]:
    """Return the variables that a command assigns, except those of a function alone."""
    command = _without_keywords(argv)
    if command[:1] == ["local"]:
        return []
    matches = map(ASSIGNMENT.fullmatch, command)
    return [assignment[1] for assignment in matches if assignment]


def _without_keywords(argv: Sequence[str]) -> list[str]:
    """Return a command behind words such as `then`."""
    return list(dropwhile(BEFORE_COMMANDS.__contains__, argv))


def _sets_any(argv: Sequence[str]) -> bool:
    """Return whether a command runs another script, which may set any variable."""
    command = _without_keywords(argv)
    if len(command) < 2 or command[0] not in SOURCING:
        return False
    return not command[1].endswith(SETTING_NOTHING)


def _command_lines(script: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script that may matter by their numbers, each with those that it goes on
    to.
    """
    lines = script.splitlines()
    start = 0
    while start < len(lines):
        end = start + 1
        if OF_SCRIPT.search(lines[start]):
            while end < len(lines) and _goes_on(lines[start:end], lines[end]):
                end += 1
            num_lines = end - start
            if num_lines > MOST_LINES:
                end = start + 1
            joined = "\n".join(lines[start:end])
            number = start + 1
            yield number, BREAK.sub("\n", joined)
        start = end


def _goes_on(lines: Sequence[str], next_line: str) -> bool:
    """Return whether a command goes on in the next line: behind what a shell (also of Windows)
    takes for no break, within quotes or an array, or where that begins with a flag.
    """
    if len(lines) > MOST_LINES:
        return False
    last_line = lines[-1].rstrip()
    if last_line.endswith(GOING_ON) or next_line.lstrip().startswith("-"):
        return True
    joined = "\n".join(lines)
    pieces = PIECE.finditer(joined)
    return any(piece.lastgroup == "open" for piece in pieces)


def _commands_of_line(line: str) -> list[tuple[str, str]]:
    """Cut a line where a command ends, and its comments off; return each with what ends it."""
    commands = list[tuple[str, str]]()
    text = ""
    for piece in PIECE.finditer(line):
        if piece.lastgroup == "end":
            commands.append((text, piece[0]))
            text = ""
        elif piece.lastgroup != "comment":
            text += piece[0]
    return [*commands, (text, "")]


def _command_of(text: str, values: Variables) -> ShellCommand:
    """Cut a command into words: an unquoted variable may be several, or none."""
    # Still one text: a quoted piece keeps its quotes until `shlex` splits it.
    filled = ""
    for piece in PIECE.finditer(text):
        filled += _filled_in(piece, values)
    try:
        argv = shlex.split(filled)
    except ValueError:
        return ShellCommand(filled.split(), dict(values), has_open_quotes=True)
    argv = [substituted(word, values) for word in argv]  # those in quotes, too
    return ShellCommand(argv, dict(values))


def _filled_in(piece: re.Match[str], values: Variables) -> str:
    """Return a piece of a command, with the value of what is a variable."""
    text = piece[0]
    if piece.lastgroup == "array":
        return _array_as_text(text)
    if piece.lastgroup != "variable":
        return text
    value = substituted(text.strip('"'), values)
    if ALL_WORDS in text:
        return value  # whose words have quotes
    # A shell splits the value at spaces, but takes no quotes in it as quotes.
    return shlex.join(value.split())


def _array_as_text(assignment: str) -> str:
    """Return an array's assignment as that of one text, whose words are quoted."""
    name, _, bracketed = assignment.partition("=")
    uncommented = COMMENT.sub("", bracketed[1:-1])
    quoted = shlex.join(split(uncommented))
    value = shlex.quote(f" {quoted}")
    if name.endswith("+"):
        return f"{name[:-1]}{ALL_WORDS}+={value}"
    return f"{name}{ALL_WORDS}={value}"


def _assign(argv: Sequence[str], values: dict[str, str], line: int, *, is_certain: bool) -> bool:
    """Set the variables that a command sets; return whether it does nothing else.

    Args:
        argv: The command.
        values: By variable, as far as the script has been followed.
        line: Of the command.
        is_certain: Whether the command is reached; else only a run of the script tells.
    """
    assigning = argv
    if argv and argv[0] in DECLARING:
        assigning = argv[1:]
    matches = map(ASSIGNMENT.fullmatch, assigning)
    assignments = [match for match in matches if match]
    is_assignment = len(assignments) == len(assigning)
    for assignment in assignments:
        name, added, value = assignment.groups()
        if not is_certain:
            values[name] = untold(line)
        elif is_assignment and added:
            values[name] = values.get(name, "") + value
        elif is_assignment:
            values[name] = value
    if argv[:1] == ["for"]:
        values[argv[1]] = untold(line)
    return is_assignment


def split(text: str) -> list[str]:
    """Return the words of a command; of one with open quotes, those between spaces."""
    text = BREAK.sub(" ", text)
    with suppress(ValueError):
        return shlex.split(text)
    return text.split()


def substituted(text: str, variables: Variables) -> str:
    """Fill in the variables that are known, or have a default."""

    def value_of(match: re.Match[str]) -> str:
        name = _name_of(match)
        default = match[2]
        if name in variables:
            return variables[name]
        if default is None:
            return match[0]
        return variables.get(SOURCED, default)

    return VARIABLE.sub(value_of, text)


def _name_of(variable: re.Match[str]) -> str:
    return variable[1] or variable[3] or variable[4]

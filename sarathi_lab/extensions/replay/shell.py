"""The commands of a shell's script, each cut into words, with the variables set above it."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

# A break that a shell takes for none (also of Windows), in front of a flag, or in a list.
CONTINUED = re.compile(r"[\\^`]\r?\n|\r?\n(?=\s*-)|(?<=&&|\|\|)[ \t]*\r?\n")
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
COMMENT = re.compile(r"(?<!\S)#.*")
# Of words, on several lines; brackets in comments, quotes and outputs are none of it.
ARRAY = re.compile(
    r"=\(((?:(?<!\S)\#[^\n]* | '[^']*' | \"(?:\\.|[^\"\\])*\" | \$\([^()]*\) | [^()])*+)\)",
    re.VERBOSE,
)
# Stands for a variable that is set in a branch, of which only a run tells whether it is reached.
IN_BRANCH = re.compile(r"\$\(branch_(\w+)\)")
# What stands in front of a command, and begins or ends a branch, or neither.
KEYWORD = re.compile(
    r"""
    \s* (?:
        (?P<begins> (?:if|while|until)(?=\s) | case\s+\S+\s+in(?!\S))
      | (?P<loop> (?:for|select)\s+(?P<variable>\w*).*)
      | (?P<divides> (?:elif|else)(?!\S))
      | (?P<ends> (?:fi|done|esac|})(?!\S))
      | (?P<group> {(?!\S))
      | (?:then|do|!)(?!\S)
      | \(?[^()\s=$]+\s*\)  # a pattern of `case`
    ) \s*
    """,
    re.VERBOSE | re.DOTALL,
)
# Words that begin what a keyword ends.
BEGUN_BY = {
    "fi": ("if",),
    "done": ("while", "until", "for", "select"),
    "esac": ("case",),
    "}": ("{",),
}
LIST = "&&"  # begins what is only reached by what another command returns, also behind ||
# A line that sets variables, has some, which may stand for a command, or begins or ends a branch.
OF_SCRIPT = re.compile(
    r"(?:^|[;&])\s*(?:\w+\s+)?\w+\+?=|\$|;;|(?:^|[;&|])\s*(?:[{}](?!\S)"
    r"|(?:if|then|elif|else|fi|for|select|while|until|do|done|case|esac)\b)"
)
MOST_LINES = 20  # of one pair of quotes
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

    branches = _Branches(values)
    script = ALTERNATIVE.sub(replacement, script)
    for line in _lines(CONTINUED.sub(" ", ARRAY.sub(_quoted_array, script)), programs):
        line = OUTPUT.sub(lambda output: _as_word(output, programs), line)
        for text, end in _commands_of_line(line):
            command = _command_of(branches.enter(text), values)
            is_assignment = _assign(command, values)
            if not is_assignment:
                yield command
            branches.leave(end, is_certain=is_assignment)


def _lines(script: str, programs: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a script that may matter, each with those that its quotes go on to."""
    lines = deque(script.splitlines())
    while lines:
        line = lines.popleft()
        is_of_program = any(program in line for program in programs)
        if not is_of_program and OF_SCRIPT.search(line) is None:
            continue
        quote = _open_quote(line)
        following = list(islice(lines, MOST_LINES))
        for number, next_line in enumerate(following, start=1):
            if not quote:
                break
            joined = "\n".join([line, *following[:number]])
            if quote in next_line and not _open_quote(joined):
                line = joined
                for _ in range(number):
                    lines.popleft()
                break
        yield line


def _open_quote(line: str) -> str:
    """Return the quote that a line leaves open; "": none."""
    for piece in PIECE.finditer(line):
        if piece.lastgroup == "comment":
            return ""
        if piece[0] in ("'", '"'):
            return piece[0]
    return ""


def _assign(command: ShellCommand, values: dict[str, str]) -> bool:
    """Set the variables that a command sets; return whether it does nothing else."""
    argv = command.argv[command.argv[:1] in DECLARING :]
    assignments = [match for match in map(ASSIGNMENT.fullmatch, argv) if match]
    if len(assignments) < len(argv):
        return False
    for name, adds, value in (match.groups() for match in assignments):
        if adds:
            value = values.get(name, "") + value
        if OUTPUT.search(value):
            values.pop(name, None)  # only a run of the script knows it
        else:
            values[name] = value
    return True


@dataclass
class _Branch:
    """Commands of which only a run of the script tells whether it reaches them.

    Attributes:
        keyword: That begins it.
        before: Values of variables in front of it.
        changed: Variables that it sets, or another branch of the same statement.
    """

    keyword: str
    before: Mapping[str, str]
    changed: set[str] = field(default_factory=set)


class _Branches:
    """Follows the branches of a script: a variable that one sets has its value within, and none
    that is known behind it.

    Args:
        values: By variable, as far as the script has been followed.
    """

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values
        self._open = list[_Branch]()

    def enter(self, text: str) -> str:
        """Return a command without the keywords in front of it, which begin and end branches."""
        while match := KEYWORD.match(text):
            text = text[match.end() :]
            keyword = match[0].split()[0]
            variable = match["variable"]
            if variable:
                self._values[variable] = _in_branch(variable)
            if match["begins"] or match["loop"] or (match["group"] and self._is_in(LIST)):
                self._begin(keyword)
            elif match["divides"] and self._is_in("if"):
                self._divide()
            elif match["ends"]:
                self._end(*BEGUN_BY[keyword])
        return text

    def leave(self, end: str, *, is_certain: bool) -> None:
        """Go on behind a command that ends by such as && or a semicolon; "": by its line's end.
        After one that `is_certain` to succeed, what follows && is reached.
        """
        if end in (LIST, "||"):
            if not is_certain and not self._is_in(LIST):
                self._begin(LIST)
            return
        if end != "|":
            self._end(LIST)
        if end.startswith(";;") and self._is_in("case"):
            self._divide()

    def _is_in(self, *keywords: str) -> bool:
        return bool(self._open) and self._open[-1].keyword in keywords

    def _begin(self, keyword: str) -> None:
        self._open.append(_Branch(keyword, dict(self._values)))

    def _divide(self) -> None:
        """End a branch where another one of the same statement may begin."""
        branch = self._open[-1]
        for name in {*branch.before, *self._values}:
            if self._values.get(name) != branch.before.get(name):
                branch.changed.add(name)
        self._values.clear()
        self._values.update(branch.before)

    def _end(self, *keywords: str) -> None:
        """End the innermost statement, if one of these began it."""
        if not self._is_in(*keywords):
            return
        self._divide()
        for name in self._open.pop().changed:
            self._values[name] = _in_branch(name)


def _in_branch(variable: str) -> str:
    return f"$(branch_{variable})"


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


def _commands_of_line(line: str) -> list[tuple[str, str]]:
    """Cut a line where a command ends, and its comment off; return each with what ends it."""
    commands = list[tuple[str, str]]()
    text = ""
    for piece in PIECE.finditer(line):
        if piece.lastgroup == "comment":
            break
        if piece.lastgroup == "end":
            commands.append((_without_brackets(text), piece[0]))
            text = ""
        else:
            text += piece[0]
    return [*commands, (_without_brackets(text), "")]


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
    elements = split(CONTINUED.sub(" ", COMMENT.sub("", match[1])))
    return f"={shlex.quote(' ' + ' '.join(map(shlex.quote, elements)))}"

"""Arguments in the words of a server's command, as the servers read them: `-tp8` is `-tp 8`,
`-cc.cudagraph_mode=NONE` a part of `compilation_config`, `--no-NAME` switches NAME off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from sarathi_lab.extensions.replay.argument_table import FLAGS, Arguments, find, table
from sarathi_lab.extensions.replay.argument_values import FALSE, TRUE
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.extensions.replay.shell import LINE

REDIRECTION = re.compile(r"\d?[<>|&;#]")  # behind which no argument stands
LONG_DASH = re.compile(r"^[‐-―−](?=[A-Za-z])")  # what a text editor makes of two hyphens
GLUED = re.compile(r"^-(tp|pp|dp|O)(\d+)$")  # a short flag and its number in one word
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
FLAG_PREFIXES = ("enable_", "disable_")  # of arguments that are not in the table
FLAG_VALUE = re.compile(rf"(?i:{'|'.join((*TRUE, *FALSE))})|{LINE.pattern}")


class CommandArguments:
    """The arguments of a command.

    Attributes:
        values: By the names of the table.
        unread: Words behind no flag.
    """

    def __init__(self, system: str, argv: Sequence[str]) -> None:
        self.values = dict[str, object]()
        self.unread = list[str]()
        self._system = system
        typed = takewhile(_is_argument, argv)
        self._remaining = [LONG_DASH.sub("--", word) for word in typed]
        while self._remaining:
            word = self._remaining.pop(0)
            self._read(word)

    def _read(self, word: str) -> None:
        """Read the next word, and those behind it that are its values."""
        if word.startswith("-"):
            self._read_flag(GLUED.sub(r"-\1=\2", word))
        elif self._system != "sglang" and "model" not in self.values:
            self.values["model"] = word  # which the others take without a flag
        elif word:
            self.unread.append(word)

    def _read_flag(self, word: str) -> None:
        flag_and_key, has_value, text = word.partition("=")
        flag, _, key = flag_and_key.partition(".")
        name = self._name_of(flag)
        value: object = text
        if not has_value:
            value = self._take_value(name, flag)
        is_object = bool(key) or str(value).startswith("{")
        if name == "optimization_level" and is_object:
            name = "compilation_config"  # which -O was short for
        if key:
            keys = as_object(self.values.get(name))
            value = {**keys, key: _from_json(str(value))}
        self.values[name] = value

    def _name_of(self, flag: str) -> str:
        """Return the argument that a flag is of."""
        for row in table(self._system).values():
            if flag == row.short:
                return row.argument.removesuffix("*")
        name = _plain(flag)
        if find(self._system, name) is None:
            positive = name.removeprefix("no_")
            if find(self._system, positive) is not None:
                return positive
        return name

    def _take_value(self, name: str, flag: str) -> object:
        """Take the words behind a flag that are its value; of none, whether it switches it on."""
        plain = _plain(flag)
        is_on = name == plain or not plain.startswith("no_")
        following = list(takewhile(_is_value, self._remaining))
        if not following:
            return is_on
        value = following[0]
        kind = self._kind_of(name)
        if kind in FLAGS and not FLAG_VALUE.fullmatch(value):
            return is_on  # and the next word is the model
        if kind == "list" and not value.startswith("["):
            del self._remaining[: len(following)]
            return [_from_json(word) for word in following]
        del self._remaining[0]  # others may follow, such as the model
        return value

    def _kind_of(self, name: str) -> str:
        """Return how an argument's value is read; of one that is not in the table, by its name."""
        row = find(self._system, name)
        if row is not None:
            return row.kind
        is_flag = name.startswith(FLAG_PREFIXES)
        return "flag" if is_flag else "text"


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _is_argument(word: str) -> bool:
    return REDIRECTION.match(word) is None


def _is_value(word: str) -> bool:
    """Return whether a word is no flag; a negative number is none."""
    return not word.startswith("-") or NEGATIVE.fullmatch(word) is not None


def _from_json(text: str) -> object:
    """Return what text is as JSON; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def flags_of(arguments: Arguments) -> list[str]:
    """Return arguments by their names as the flags of a command."""
    argv = list[str]()
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False:
            argv.append(f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}")
        if isinstance(value, Mapping | list):
            argv.append(json.dumps(value))
        elif value is not None and not isinstance(value, bool):
            argv.append(str(value))
    return argv

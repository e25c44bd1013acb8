"""Values by name in the texts that servers and scripts write, such as "a=1, b='x'"."""

from __future__ import annotations

import ast
import re
from contextlib import suppress

OPENING = "([{<"
CLOSING = ")]}>"
QUOTES = "'\""


def named_values(text: str) -> dict[str, object]:
    """Read "a=1, b='x'" or "'a': 1, 'b': 'x'"; a value that is no literal of Python stays text."""
    values = dict[str, object]()
    for part in _split(text):
        separated = re.match(r"\s*['\"]?([\w-]+)['\"]?\s*[:=]\s*(.*?)\s*$", part, re.DOTALL)
        if separated is None:
            continue
        name, value = separated.groups()
        values[name] = value
        # Such as <class 'x'> stays text.
        with suppress(ValueError, SyntaxError):
            values[name] = ast.literal_eval(value)
    return values


def is_closed(text: str) -> bool:
    """Return whether a bracket that is opened in front of `text` is closed in it."""
    pieces = _split(text)
    return len(",".join(pieces)) < len(text)


def _split(text: str) -> list[str]:
    """Cut `text` at the commas outside brackets and quotes."""
    pieces = list[str]()
    depth = 0
    quote = ""
    start = 0
    for position, character in enumerate(text):
        is_escaped = text[position - 1 : position] == "\\"
        if quote:
            if character == quote and not is_escaped:
                quote = ""
        elif character in QUOTES:
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
            if depth < 0:  # the end of what the text was cut out of
                return [*pieces, text[start:position]]
        elif character == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    return [*pieces, text[start:]]

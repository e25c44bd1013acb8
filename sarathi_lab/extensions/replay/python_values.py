"""Values in a script of Python's that are told without running it: what operators and functions
make of others, in bounded time and memory.

A value that only a run tells is text such as $(line_7), wherever it ends up: in a word, in a list,
in an object.
"""

from __future__ import annotations

import ast
import json
import operator
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

LINE = re.compile(r"\$\(line_(\d+)\)")  # stands for what only a run of the script tells
# Beyond these no number is computed, which might take a machine's memory.
LARGEST = 2**40
LARGEST_POWER = 64
LONGEST = 2**14  # characters of what a text is made of
# Methods that leave lists and objects as they are.
READING = ("get", "items", "keys", "values", "copy", "index", "count")
# Fields of texts with a width of four digits or more, or one that is a value.
WIDE_FIELD = re.compile(r"\{[^{}]*(?:\d{4}|:[^{}]*\{)|%(?:\(\w*\))?[-+ #.\d]*(?:\d{4}|\*)")
Located = ast.stmt | ast.expr | ast.arg


def is_untold(value: object) -> bool:
    """Return whether a value, or a part of it, is known only when the script runs."""
    return LINE.search(repr(value)) is not None


def untold(node: Located) -> str:
    return f"$(line_{node.lineno})"


def several(node: Located) -> str:
    """Stand for any number of words; as a flag, so that it is not the value of another one."""
    return f"--{untold(node)}"


def spliced(value: object, node: Located) -> list[object]:
    """Return the words that a value adds to a list."""
    return value if isinstance(value, list) else [several(node)]


def mark(value: object, node: Located) -> None:
    """Note that a list or an object has been changed, as only a run tells."""
    if isinstance(value, list):
        value.append(several(node))
    elif isinstance(value, dict):
        value[several(node)] = True


def change(
    owner: object, method: str, values: Sequence[object], named: Mapping[str, object], node: Located
) -> None:
    """Do to a list or an object what a call of its method does."""
    if method in READING:
        return
    if method == "append" and isinstance(owner, list):
        owner += values
    elif method == "extend" and isinstance(owner, list) and values:
        owner += spliced(values[0], node)
    elif isinstance(owner, dict):
        _change_object(owner, method, values, named, node)
    else:
        mark(owner, node)


def _change_object(
    owner: dict[str, object],
    method: str,
    values: Sequence[object],
    named: Mapping[str, object],
    node: Located,
) -> None:
    """Do to an object what a call of its method does."""
    if method == "update":
        for value in values:
            if isinstance(value, dict):
                owner |= value
            else:
                mark(owner, node)
        owner |= named
        return
    if not values or is_untold(values[0]):
        mark(owner, node)
        return
    key = str(values[0])
    if method == "pop":
        owner.pop(key, None)
    elif method == "setdefault" and len(values) == 2:
        owner.setdefault(key, values[1])
    elif method == "__setitem__" and len(values) == 2:
        owner[key] = values[1]
    else:
        mark(owner, node)


def either(first: object, second: object, node: Located) -> object:
    """Return what has one of two values, as only a run tells; lists and objects are changed."""
    if isinstance(first, list):
        first.append(several(node))
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        for name in {**first, **second}:
            if name not in first or name not in second or first[name] != second[name]:
                first[name] = untold(node)
        return first
    if isinstance(second, list):  # which may be a server's command, and is refused as one
        return [*second, several(node)]
    return untold(node)


def joined(objects: Sequence[object], named: dict[str, object]) -> dict[str, object]:
    """Return one object with the entries of several."""
    entries = dict[str, object]()
    for item in (*objects, named):
        assert isinstance(item, dict), "as the caller asks"
        entries |= item
    return entries


def entry_of(owner: dict[str, object], values: Sequence[object], node: Located) -> object:
    """Return an object's entry, or a default for one that it has not; without a key, a copy."""
    if not values:
        return {**owner}
    if is_untold([values[0], *owner]):
        return untold(node)
    return owner.get(str(values[0]), values[1] if len(values) > 1 else untold(node))


def formatted(template: str, *values: object, **named: object) -> str:
    """Fill values in a template. Raises ValueError for one that may become very long."""
    if WIDE_FIELD.search(template):
        raise ValueError(template)
    return template.format(*values, **named)


def _divided(first: object, second: object) -> object:
    """Divide numbers, and join paths."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        return first / second
    return posixpath.join(str(first), str(second))


def _remainder(first: object, second: object) -> object:
    """Return the remainder of numbers, or a text with values filled in."""
    if isinstance(first, str) and WIDE_FIELD.search(first):
        raise ValueError(first)
    if isinstance(second, list):  # which stands for a tuple here
        second = tuple(second)
    return operator.mod(first, second)


# Functions without an effect on others, by the names that scripts call them.
CONVERSIONS: dict[str, Callable[..., object]] = {
    "str": str,
    "int": int,
    "float": float,
    "Path": str,
    "os.path.join": posixpath.join,
    "max": max,
    "min": min,
    "len": len,
    "round": round,
    "json.dumps": json.dumps,
    "shlex.join": shlex.join,
    "shlex.quote": str,
    "shlex.split": shlex.split,
}
# Methods of texts.
METHODS_OF_TEXT: dict[str, Callable[..., object]] = {
    "format": formatted,
    "join": str.join,
    "split": str.split,
    "strip": str.strip,
}
OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: _divided,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _remainder,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def applied(operation: ast.AST, values: Sequence[object], node: Located) -> object:
    """Return what an operator makes of values."""
    if isinstance(operation, ast.Add):
        first, second = values
        if isinstance(first, list) or isinstance(second, list):
            return spliced(first, node) + spliced(second, node)
        if isinstance(first, str) and isinstance(second, str) and len(first + second) < LONGEST:
            return first + second
    function = OPERATORS.get(type(operation))
    if function is None or is_untold(values):
        return untold(node)
    is_growing = isinstance(operation, ast.Mult | ast.Pow | ast.LShift)
    if is_growing and not all(map(_is_small, values)):
        return untold(node)
    if isinstance(operation, ast.Pow | ast.LShift) and values[1] not in range(LARGEST_POWER):
        return untold(node)
    return result_of(function, values, node)


def _is_small(value: object) -> bool:
    """Return whether a value is a number that others may be computed of."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def result_of(
    function: Callable[..., object],
    values: Sequence[object],
    node: Located,
    named: Mapping[str, object] = MappingProxyType({}),
) -> object:
    """Return what a function makes of values."""
    text = repr([*values, *named.values()])
    if LINE.search(text) or len(text) > LONGEST:
        return untold(node)
    try:
        return function(*values, **named)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        return untold(node)

"""Calls in a script of Python's, or in a log that has one: their arguments by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from sarathi_lab.extensions.replay.literals import named_values

MOST_BRACKETS = 100  # closed within a call
MAKING_OBJECTS = ("dict", "LoadingConfig")  # calls whose arguments are an object's


@dataclass(frozen=True)
class PythonCall:
    """A call's arguments.

    Attributes:
        named: Values by name; what is no literal of Python stays text.
        positional: Values without one.
        unread: Arguments that only a run of the script knows, such as **options.
    """

    named: Mapping[str, object]
    positional: list[object] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def find_calls(text: str, function: re.Pattern[str]) -> list[PythonCall]:
    """Return the calls of a function in a script; in other text the first alone.

    Args:
        text: Of a script or a log.
        function: Matches the function's name, up to the opening bracket.
    """
    first = function.search(text)
    if first is None:
        return []
    script = parsed(text)
    if script is not None:
        calls = [call for call in _calls_in(script) if _is_of(call, function)]
        return [_read(call, script) for call in calls]
    expression = _shortest_expression(text[first.start() :])
    if expression is not None:
        outermost = _calls_in(expression)[0]
        return [_read(outermost, expression)]
    # Such as of an object that is printed, whose values are no Python.
    return [PythonCall(named_values(text[first.end() :]))]


def _shortest_expression(text: str) -> ast.Module | None:
    """Parse the beginning of a text up to the bracket that closes its first call; None if it is no
    Python. What follows, such as the rest of a log, is none.
    """
    for bracket in islice(re.finditer(r"\)", text), MOST_BRACKETS):
        expression = parsed(text[: bracket.end()])
        if expression is not None:
            return expression
    return None


def _calls_in(script: ast.Module) -> list[ast.Call]:
    """List all calls, outer ones before those in their arguments."""
    return [node for node in ast.walk(script) if isinstance(node, ast.Call)]


def parsed(text: str) -> ast.Module | None:
    """Parse a script; None for other text."""
    try:
        return ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_of(call: ast.Call, function: re.Pattern[str]) -> bool:
    name = ast.unparse(call.func)  # with its module, as in vllm.LLM
    return function.search(f"{name}(") is not None


def _read(call: ast.Call, script: ast.Module) -> PythonCall:
    """Read the arguments of a call, with the values of variables where the script sets them."""
    variables = _variables_above(call, script)
    named = dict[str, object]()
    unread = list[str]()
    for keyword in call.keywords:
        value = _value(keyword.value, variables)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif isinstance(value, Mapping):
            named |= value
        else:
            unread.append(f"**{value}")
    positional = list[object]()
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            unread.append(ast.unparse(argument))
        else:
            positional.append(_value(argument, variables))
    return PythonCall(named, positional, unread)


def _variables_above(call: ast.Call, script: ast.Module) -> dict[str, object]:
    """Return the values of the names to which the script gives literals above a call."""
    variables = dict[str, object]()
    for node in ast.walk(script):
        if not isinstance(node, ast.Assign) or node.lineno >= call.lineno:
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                variables[target.id] = _value(node.value, {})
    return variables


def _value(node: ast.expr, variables: Mapping[str, object]) -> object:
    """Return the value of a variable or a literal; else the text of the expression."""
    if isinstance(node, ast.Name) and node.id in variables:
        return variables[node.id]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(MAKING_OBJECTS):
        values = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        return {name: _value(value, variables) for name, value in values.items()}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return ast.unparse(node)

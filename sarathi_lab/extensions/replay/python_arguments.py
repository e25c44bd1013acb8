"""Commands that a script of Python's has as lists of words, or as text."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from sarathi_lab.extensions.replay.python_calls import parsed

CONVERTING = ("str", "Path", "shlex.quote")  # calls that leave a word as it is
PRINTING = ("print", "logger.info", "logging.info", "log.info")


def find_argument_lists(text: str) -> list[list[str]]:
    """Return the words of each list in a script, with those that are added to it below, and each
    text that a call takes or a variable has. What only a run knows is a word such as $(options.n).
    """
    script = parsed(text)
    if script is None:
        return []
    variables = _variables_of(script)
    lists = list[list[str]]()
    by_name = dict[str, list[str]]()
    for node in ast.walk(script):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
            argv = _argv_of(node.value.elts, variables)
            lists.append(argv)
            by_name |= {ast.unparse(target): argv for target in node.targets}
        elif isinstance(node, ast.Assign):
            lists += _texts([node.value], variables)
        elif isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.List | ast.Tuple):
                    lists.append(_argv_of(argument.elts, variables))
            if ast.unparse(node.func) not in PRINTING:
                lists += _texts(node.args, variables)
    _add_below(script, by_name, variables)
    return lists


def _add_below(
    script: ast.Module, by_name: Mapping[str, list[str]], variables: Mapping[str, object]
) -> None:
    """Add to the lists of a script, in the order of its lines, what stands below them. An addition
    that depends on what only a run knows is left out with a word that names it.
    """
    conditions = dict[ast.AST, ast.expr]()
    for branch in ast.walk(script):
        if isinstance(branch, ast.If):
            for statement in branch.body:
                conditions |= dict.fromkeys(ast.walk(statement), branch.test)
    for node in ast.walk(script):
        added: list[ast.expr] = []
        target = ""
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.List | ast.Tuple):
            target = ast.unparse(node.target)
            added = node.value.elts
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = ast.unparse(node.func.value)
            added = _added_by(node)
        if target not in by_name or not added:
            continue
        condition = conditions.get(node)
        argv = _argv_of(added, variables)
        if condition is None or _is_true(condition, variables):
            by_name[target] += argv
        elif _is_true(condition, variables) is None:
            by_name[target].append(f"$({' '.join(argv)} if {ast.unparse(condition)})")


def _added_by(call: ast.Call) -> list[ast.expr]:
    """Return the elements that a call of append or extend adds to a list."""
    assert isinstance(call.func, ast.Attribute), "asked for by the caller"
    argument = call.args[0] if call.args else None
    if call.func.attr == "append" and argument is not None:
        return [argument]
    if call.func.attr == "extend" and isinstance(argument, ast.List | ast.Tuple):
        return argument.elts
    return []


def _is_true(condition: ast.expr, variables: Mapping[str, object]) -> bool | None:
    """Return whether a condition holds; None where only a run knows."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        operand = _is_true(condition.operand, variables)
        return None if operand is None else not operand
    if isinstance(condition, ast.Constant):
        return bool(condition.value)
    if isinstance(condition, ast.Name) and condition.id in variables:
        return bool(variables[condition.id])
    return None


def _argv_of(elements: Sequence[ast.expr], variables: Mapping[str, object]) -> list[str]:
    """Return the words that the elements of a list are."""
    argv = list[str]()
    for element in elements:
        if isinstance(element, ast.Starred) and isinstance(element.value, ast.Name):
            value = variables.get(element.value.id)
            if isinstance(value, list | tuple):
                argv += [str(word) for word in value]
                continue
        argv.append(_word(element, variables))
    return argv


def _word(node: ast.expr, variables: Mapping[str, object]) -> str:
    """Return the text of an expression; of one that only a run knows, $(...) with it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name) and node.id in variables:
        return str(variables[node.id])
    if ast.unparse(node) == "sys.executable":
        return "python"
    is_conversion = isinstance(node, ast.Call) and ast.unparse(node.func) in CONVERTING
    if isinstance(node, ast.Call) and is_conversion and len(node.args) == 1:
        return _word(node.args[0], variables)
    if isinstance(node, ast.JoinedStr):
        return "".join(_word(part, variables) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _word(node.value, variables)
    if isinstance(node, ast.IfExp):
        is_true = _is_true(node.test, variables)
        if is_true is not None:
            chosen = node.body if is_true else node.orelse
            return _word(chosen, variables)
    return f"$({ast.unparse(node)})"


def _texts(nodes: Sequence[ast.expr], variables: Mapping[str, object]) -> list[list[str]]:
    """Return each node that is a text, as a list of it alone."""
    texts = list[list[str]]()
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text or isinstance(node, ast.JoinedStr):
            texts.append([_word(node, variables)])
    return texts


def _variables_of(script: ast.Module) -> dict[str, object]:
    """Return the values of the names that a script gives one literal, and no other."""
    variables = dict[str, object]()
    changing = set[str]()
    for node in ast.walk(script):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Name):
                continue
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError):
                changing.add(target.id)
                continue
            if target.id in variables and variables[target.id] != value:
                changing.add(target.id)
            variables[target.id] = value
    return {name: value for name, value in variables.items() if name not in changing}

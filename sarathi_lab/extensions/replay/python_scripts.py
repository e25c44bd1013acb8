"""Calls that a script of Python's makes, with the arguments that are told without running it.

Statements are followed in their order, those of functions behind all others. A value that only a
run tells is text such as $(line_7), wherever it ends up: in a word, in a list, in an object.
"""

from __future__ import annotations

import ast
import json
import operator
import posixpath
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

LINE = re.compile(r"\$\(line_(\d+)\)")  # stands for what only a run of the script tells
PRINTING = ("print", "echo", "log", "debug", "info", "warning", "error", "exception", "critical")
OBJECT_MAKERS = ("dict", "LoadingConfig")  # end the names of calls whose arguments are an object's
# In a function that is given a list: it may add to that, or make another one of it.
CHANGES_LISTS = re.compile(r" \+=? |\*\w|\.(append|extend|insert|join)\(")
# Functions without an effect on others, by the names that scripts call them.
CONVERSIONS: dict[str, Callable[..., object]] = {
    "str": str,
    "int": int,
    "float": float,
    "Path": str,
    "os.path.join": posixpath.join,
    "' '.join": " ".join,
    "json.dumps": json.dumps,
    "shlex.join": shlex.join,
    "shlex.quote": str,
    "shlex.split": shlex.split,
}
OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: posixpath.join,  # of paths
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
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
# Values of names that a script has from elsewhere.
VALUES = {
    "__name__": "__main__",
    "sys.executable": "python",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
}
# Beyond these no number is computed, which might take a machine's memory.
LARGEST = 2**40
LARGEST_POWER = 64
Located = ast.stmt | ast.expr | ast.arg
Scope = dict[str, object]  # values by variable; with $ in front, by variable of the environment


@dataclass(frozen=True)
class PythonCall:
    """A call in a script.

    Attributes:
        function: Its name, with the module that it is imported from.
        positional: Values without a name; --$(line_7) stands for any number of values.
        named: Values by name, as well.
        environment: The variables of the environment that the script has set by then.
    """

    function: str
    positional: Sequence[object]
    named: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, object] = field(default_factory=dict)


def parsed(text: str) -> ast.Module | None:
    """Parse a script; None for other text."""
    if text.lstrip("\n")[:1] in (" ", "\t"):
        text = textwrap.dedent(text)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def calls_in(script: ast.Module) -> list[PythonCall]:
    """List the calls in a script in their order, but those that print; behind them the values of
    its variables, as calls without a name.
    """
    follower = _Follower(script)
    with suppress(RecursionError):  # of an expression of many hundred parts
        follower.follow(script.body, {**VALUES})
    calls = [call for call in follower.calls if not call.function.endswith(PRINTING)]
    for scope in follower.scopes:
        environment = _environment(scope)
        for value in scope.values():
            calls.append(PythonCall("", [value], {}, environment))
    return calls


def is_untold(value: object) -> bool:
    """Return whether a value, or a part of it, is known only when the script runs."""
    return LINE.search(repr(value)) is not None


def _untold(node: Located) -> str:
    return f"$(line_{node.lineno})"


def _several(node: Located) -> str:
    """Stand for any number of words; as a flag, so that it is not the value of another one."""
    return f"--{_untold(node)}"


def _spliced(value: object, node: Located) -> list[object]:
    """Return the words that a value adds to a list."""
    return value if isinstance(value, list) else [_several(node)]


def _environment(scope: Scope) -> Scope:
    environment = Scope()
    for name, value in scope.items():
        if name.startswith("$"):
            environment[name[1:]] = value
    return environment


class _Ended(Exception):
    """Nothing behind this statement is reached."""


class _Follower(ast.NodeVisitor):
    """Follows the statements of a script; of an expression it returns the value.

    Attributes:
        calls: Those in it, in their order.
        scopes: The variables of the script and of each function, at its end.
    """

    def __init__(self, script: ast.Module) -> None:
        self.calls = list[PythonCall]()
        self.scopes = list[Scope]()
        self._scope: Scope = {}
        self._functions = list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, Scope]]()
        self._imported = dict[str, str]()  # names of functions and modules, by the script's
        self._changing = set[str]()  # functions of the script that may change a list
        self._shared = set[str]()  # variables that functions may change for others
        for node in ast.walk(script):
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._shared.update(node.names)

    def follow(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Follow the statements of a scope, then those of the functions in it."""
        self._scope = scope
        self.scopes.append(scope)
        self._run(statements)
        while self._functions:
            function, enclosing = self._functions.pop(0)
            own = {**enclosing}
            for node in ast.walk(function.args):
                if isinstance(node, ast.arg):
                    own[node.arg] = _untold(node)
            self.follow(function.body, own)

    def _run(self, statements: Sequence[ast.stmt]) -> bool:
        """Follow statements; return whether what stands behind them is reached."""
        try:
            for statement in statements:
                self.visit(statement)
        except _Ended:
            return False
        return True

    def _run_maybe(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements of which only a run tells whether they are reached."""
        before = self._scope
        self._scope = deepcopy(before)
        is_continued = self._run(statements)
        changed = self._scope
        self._scope = before
        if not is_continued:
            return
        for name, value in changed.items():
            current = before.get(name)
            if value == current:
                continue
            if isinstance(current, list):
                current.append(_several(statements[0]))
            elif isinstance(value, list):  # which may be a server's command, and is refused as one
                before[name] = [*value, _several(statements[0])]
            else:
                before[name] = _untold(statements[0])

    def _store(self, target: ast.expr, value: object) -> None:
        """Give a value to a variable, or to an entry of an object such as os.environ."""
        match target:
            case ast.Name() | ast.Attribute():
                name = ast.unparse(target)
                self._scope[name] = _untold(target) if name in self._shared else value
            case ast.Subscript():
                self._scope[f"${self.visit(target.slice)}"] = value
                self._store(target.value, _untold(target))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = [_untold(target)] * len(targets)
                if isinstance(value, list) and len(value) == len(targets):
                    values = value
                for part, value_of_part in zip(targets, values, strict=True):
                    self._store(part, value_of_part)
            case ast.Starred():
                self._store(target.value, _untold(target))

    # -- statements --------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = ""
        if isinstance(node, ast.ImportFrom):
            module = f"{node.module}."
        for alias in node.names:
            name = alias.asname or alias.name
            self._imported[name] = f"{module}{alias.name}"

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append((node, self._scope))
        if CHANGES_LISTS.search(ast.unparse(node)):
            self._changing.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._scope
        self._scope = {**outer}
        self._run(node.body)
        self._scope = outer

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._scope["return"] = self.visit(node.value)
        raise _Ended

    def visit_Raise(self, node: ast.stmt) -> None:
        raise _Ended

    visit_Break = visit_Continue = visit_Raise

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self._store(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._store(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.visit(node.value)
        current = self._scope.get(ast.unparse(node.target), _untold(node))
        if isinstance(current, list):
            current += _spliced(value, node)
        else:
            self._store(node.target, _applied(node.op, [current, value], node))

    def visit_If(self, node: ast.If) -> None:
        condition = self.visit(node.test)
        if is_untold(condition):
            self._run_maybe(node.body)
            self._run_maybe(node.orelse)
            return
        branch = node.body if condition else node.orelse
        if not self._run(branch):
            raise _Ended

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        for name in ast.walk(node):
            if not isinstance(name, ast.Name):
                continue
            # What a round adds to a list shows in its words.
            is_list = isinstance(self._scope.get(name.id), list)
            if isinstance(name.ctx, ast.Store) and not is_list:
                self._scope[name.id] = _untold(node)
        self._run_maybe(node.body)

    visit_AsyncFor = visit_While = visit_For

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.match_case) -> None:
        self._run_maybe(node.body)

    visit_match_case = visit_ExceptHandler

    # -- expressions -------------------------------------------------------------------------------

    def generic_visit(self, node: ast.AST) -> object:
        super().generic_visit(node)
        if isinstance(node, ast.expr):
            return _untold(node)
        return None

    def visit_Constant(self, node: ast.Constant) -> object:
        return node.value

    def visit_Name(self, node: ast.Name | ast.Attribute) -> object:
        name = ast.unparse(node)
        if not isinstance(node.ctx, ast.Load):  # such as of `with` and `del`
            self._scope[name] = _untold(node)
        return self._scope.get(name, _untold(node))

    def visit_Attribute(self, node: ast.Attribute) -> object:
        self.visit(node.value)
        return self.visit_Name(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> str:
        texts = [str(self.visit(part)) for part in node.values]
        return "".join(texts)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> object:
        if node.format_spec is not None:
            return _untold(node)
        return self.visit(node.value)

    def visit_List(self, node: ast.List | ast.Tuple) -> list[object]:
        return self._values(node.elts)

    visit_Tuple = visit_List

    def _values(self, elements: Sequence[ast.expr]) -> list[object]:
        """Return the values of a list's elements, or of positional arguments."""
        values = list[object]()
        for element in elements:
            if isinstance(element, ast.Starred):
                values += _spliced(self.visit(element.value), element)
            else:
                values.append(self.visit(element))
        return values

    def visit_Dict(self, node: ast.Dict) -> Scope:
        entries = Scope()
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else str(self.visit(key))
            self._enter(entries, name, value)
        # It may be of variables of the environment.
        self._scope |= {f"${name}": value for name, value in entries.items()}
        return entries

    def _enter(self, entries: Scope, name: str | None, expression: ast.expr) -> None:
        """Add an entry to an object; without a name, all of another object."""
        value = self.visit(expression)
        if name is not None:
            entries[name] = value
        elif isinstance(value, dict):
            entries |= value
        else:
            entries[_several(expression)] = True

    def visit_IfExp(self, node: ast.IfExp) -> object:
        condition = self.visit(node.test)
        if is_untold(condition):
            return _several(node)
        return self.visit(node.body if condition else node.orelse)

    def visit_BinOp(self, node: ast.BinOp) -> object:
        values = self._values([node.left, node.right])
        return _applied(node.op, values, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        return _applied(node.op, [self.visit(node.operand)], node)

    def visit_Compare(self, node: ast.Compare) -> object:
        values = self._values([node.left, *node.comparators])
        return _applied(node.ops[0], values, node)

    def visit_Call(self, node: ast.Call) -> object:
        function = ast.unparse(node.func)
        values = self._values(node.args)
        named = Scope()
        for keyword in node.keywords:
            self._enter(named, keyword.arg, keyword.value)
        if function.endswith(OBJECT_MAKERS) and not values:
            return named
        convert = CONVERSIONS.get(function)
        if convert is not None and not is_untold(values):
            return _result(convert, values, node)
        self.visit(node.func)  # calls in front
        target, _, method = function.rpartition(".")
        changed = self._scope.get(target)
        if isinstance(changed, list):
            changed += _added(method, values, node)
        if method in self._changing:
            for value in values:
                if isinstance(value, list):
                    value.append(_several(node))
        first, dot, attributes = function.partition(".")
        name = self._imported.get(first, first) + dot + attributes
        environment = _environment(self._scope)
        call = PythonCall(name, values, named, environment)
        self.calls.append(deepcopy(call))
        return _untold(node)


def _added(method: str, values: Sequence[object], node: Located) -> list[object]:
    """Return the words that a call of a list's method adds to it."""
    if method == "append":
        return [*values]
    if method == "extend" and values:
        return _spliced(values[0], node)
    return [_several(node)]


def _applied(operation: ast.AST, values: Sequence[object], node: Located) -> object:
    """Return what an operator makes of values."""
    if isinstance(operation, ast.Add):
        first, second = values
        if isinstance(first, list) or isinstance(second, list):
            return _spliced(first, node) + _spliced(second, node)
        if isinstance(first, str) and isinstance(second, str):
            return first + second
    function = OPERATORS.get(type(operation))
    if function is None or is_untold(values):
        return _untold(node)
    if isinstance(operation, ast.Mult | ast.Pow) and not all(map(_is_small, values)):
        return _untold(node)
    if isinstance(operation, ast.Pow) and values[1] not in range(LARGEST_POWER):
        return _untold(node)
    return _result(function, values, node)


def _is_small(value: object) -> bool:
    """Return whether a value is a number that others may be computed of."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _result(function: Callable[..., object], values: Sequence[object], node: Located) -> object:
    """Return what a function makes of values."""
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return _untold(node)

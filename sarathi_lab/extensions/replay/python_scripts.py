"""Calls that a script of Python's makes, with the arguments that are told without running it.

Statements are followed in their order, those of functions behind all others.
"""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

from sarathi_lab.extensions.replay.python_values import (
    CONVERSIONS,
    METHODS_OF_TEXT,
    applied,
    change,
    either,
    entry_of,
    formatted,
    is_untold,
    joined,
    mark,
    result_of,
    several,
    spliced,
    untold,
)

PRINTING = (
    "print",
    "exit",
    "echo",
    "log",
    "debug",
    "info",
    "warning",
    "error",
    "exception",
    "critical",
)
# A call of a class, whose arguments by name are those of the object that it makes.
MAKES_OBJECT = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*")
# In a function that is given a list or an object: it may change that, or make another one of it.
CHANGING = ("append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear")
CHANGES = re.compile(rf" \+=? |\*\w|(\]|\.\w+) = |\.({'|'.join(CHANGING)}|join)\(")
ENVIRON = "os.environ"  # the variables of the environment, as far as the script sets them
# In a function, as ast.unparse writes it.
SETS_VARIABLE = re.compile(r"(?:environ\[|environ\.setdefault\(|putenv\()'(\w+)'(?:\] = |, )")
# Functions that are methods of these.
OF_ENVIRON = {"os.getenv": "get", "os.putenv": "__setitem__"}
STARTS_PROGRAM = re.compile(
    r"subprocess\.\w+|os\.(?:system|popen|(?:exec|spawn)\w+)|asyncio\.create_subprocess_\w+"
)
# Values of names that a script has from elsewhere.
VALUES = {
    "__name__": "__main__",
    "sys.executable": "python",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
}
Scope = dict[str, object]  # values by variable


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
        follower.follow(script.body, {**VALUES, ENVIRON: Scope()})
    calls = [call for call in follower.calls if not call.function.endswith(PRINTING)]
    for scope in follower.scopes:
        environment = _environment(scope)
        for value in scope.values():
            calls.append(PythonCall("", [value], {}, environment))
    return calls


def untold_commands(calls: Sequence[PythonCall]) -> list[str]:
    """Return what stands for the commands that a script starts, and only a run of it tells."""
    commands = list[str]()
    for call in calls:
        if not STARTS_PROGRAM.fullmatch(call.function):
            continue
        for command in [*call.positional[:1], call.named.get("args")]:
            argv = command if isinstance(command, list) else str(command).split()
            if is_untold(argv[:1]):
                commands.append(str(argv[0]))
    return commands


def _environment(scope: Scope) -> Scope:
    environment = scope[ENVIRON]
    assert isinstance(environment, dict), "entries of it alone are set"
    return {**environment}


def _changeable(scope: Scope, statements: Sequence[ast.stmt]) -> Scope:
    """Return the lists and objects that statements may change, as they name them."""
    names = set[str]()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                names.add(node.id)
    changeable = Scope()
    for name, value in scope.items():
        if isinstance(value, list | dict) and name.partition(".")[0] in names:
            changeable[name] = value
    return changeable


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
        self._changing = set[str]()  # functions of the script that may change what they are given
        self._variables_of = dict[str, set[str]]()  # of the environment, by function that sets them
        self._shared = set[str]()  # variables that functions may change for others
        for node in ast.walk(script):
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._shared.update(node.names)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._shared |= _changed_for_others(node)

    def follow(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Follow the statements of a scope, then those of the functions in it."""
        self._scope = scope
        self.scopes.append(scope)
        self._run(statements)
        while self._functions:
            function, enclosing = self._functions.pop(0)
            own = {**enclosing, ENVIRON: _environment(enclosing)}
            for node in ast.walk(function.args):
                if isinstance(node, ast.arg):
                    own[node.arg] = untold(node)
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
        self._scope = {**before, **deepcopy(_changeable(before, statements))}
        is_continued = self._run(statements)
        changed = self._scope
        self._scope = before
        if not is_continued:
            return
        for name, value in changed.items():
            current = before.get(name)
            if value is not current and value != current:
                before[name] = either(current, value, statements[0])

    def _store(self, target: ast.expr, value: object) -> None:
        """Give a value to a variable, or to an entry of an object such as os.environ."""
        match target:
            case ast.Name():
                self._scope[target.id] = untold(target) if target.id in self._shared else value
            case ast.Attribute():
                owner = self.visit(target.value)
                if isinstance(owner, dict):
                    owner[target.attr] = value
                else:
                    self._scope[ast.unparse(target)] = value
            case ast.Subscript():
                owner = self.visit(target.value)
                key = self.visit(target.slice)
                if isinstance(owner, dict) and not is_untold(key):
                    owner[str(key)] = value
                else:
                    mark(owner, target)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = [untold(target)] * len(targets)
                if isinstance(value, list) and len(value) == len(targets):
                    values = value
                for part, value_of_part in zip(targets, values, strict=True):
                    self._store(part, value_of_part)
            case ast.Starred():
                self._store(target.value, untold(target))

    # -- statements --------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = ""
        if isinstance(node, ast.ImportFrom):
            module = f"{node.module}."
        for alias in node.names:
            name = alias.asname or alias.name
            imported = f"{module}{alias.name}"
            self._imported[name] = imported
            if imported in self._scope:
                self._scope[name] = self._scope[imported]

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append((node, self._scope))
        if CHANGES.search(ast.unparse(node)):
            self._changing.add(node.name)
        self._variables_of[node.name] = set(SETS_VARIABLE.findall(ast.unparse(node)))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._scope
        self._scope = {**outer}
        self._run(node.body)
        attributes = Scope()
        for name, value in self._scope.items():
            if name not in outer or value is not outer[name]:
                attributes[name] = value
        self._scope = outer
        self._store(ast.Name(node.name, lineno=node.lineno), attributes)

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

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                key = self.visit(target.slice)
                change(self.visit(target.value), "pop", [key], {}, target)
            else:
                self._store(target, untold(target))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.visit(node.value)
        current = self._scope.get(ast.unparse(node.target), untold(node))
        if isinstance(current, list):
            current += spliced(value, node)
        elif isinstance(current, dict):
            change(current, "update", [value], {}, node)
        else:
            self._store(node.target, applied(node.op, [current, value], node))

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
                self._scope[name.id] = untold(node)
        self._run_maybe(node.body)

    visit_AsyncFor = visit_While = visit_For

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.match_case) -> None:
        self._run_maybe(node.body)

    visit_match_case = visit_ExceptHandler

    # -- expressions -------------------------------------------------------------------------------

    def generic_visit(self, node: ast.AST) -> object:
        super().generic_visit(node)
        if isinstance(node, ast.expr):
            return untold(node)
        return None

    def visit_Constant(self, node: ast.Constant) -> object:
        return node.value

    def visit_Name(self, node: ast.Name | ast.Attribute) -> object:
        name = ast.unparse(node)
        if not isinstance(node.ctx, ast.Load):  # such as of `with` and `del`
            self._scope[name] = untold(node)
        return self._scope.get(name, untold(node))

    def visit_Attribute(self, node: ast.Attribute) -> object:
        owner = self.visit(node.value)
        if isinstance(owner, dict) and node.attr in owner and not is_untold([*owner]):
            return owner[node.attr]
        return self.visit_Name(node)

    def visit_Subscript(self, node: ast.Subscript) -> object:
        owner = self.visit(node.value)
        key = self.visit(node.slice)
        if isinstance(owner, dict) and str(key) in owner and not is_untold([key, *owner]):
            return owner[str(key)]
        if isinstance(owner, list) and isinstance(key, int) and not is_untold(owner):
            return result_of(operator.getitem, [owner, key], node)
        return untold(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> str:
        texts = [str(self.visit(part)) for part in node.values]
        return "".join(texts)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> object:
        value = self.visit(node.value)
        if node.conversion not in (-1, ord("s")):
            return untold(node)
        if node.format_spec is None:
            return value
        template = f"{{:{self.visit(node.format_spec)}}}"
        return result_of(formatted, [template, value], node)

    def visit_List(self, node: ast.List | ast.Tuple) -> list[object]:
        return self._values(node.elts)

    visit_Tuple = visit_List

    def _values(self, elements: Sequence[ast.expr]) -> list[object]:
        """Return the values of a list's elements, or of positional arguments."""
        values = list[object]()
        for element in elements:
            if isinstance(element, ast.Starred):
                values += spliced(self.visit(element.value), element)
            else:
                values.append(self.visit(element))
        return values

    def visit_Dict(self, node: ast.Dict) -> Scope:
        entries = Scope()
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else str(self.visit(key))
            self._enter(entries, name, value)
        return entries

    def _enter(self, entries: Scope, name: str | None, expression: ast.expr) -> None:
        """Add an entry to an object; without a name, all of another object."""
        value = self.visit(expression)
        if name is not None:
            entries[name] = value
        elif isinstance(value, dict):
            entries |= value
        else:
            entries[several(expression)] = True

    def visit_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> str:
        outer = self._scope
        self._scope = {**outer}  # its variables are its own
        self.generic_visit(node)
        self._scope = outer
        return untold(node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_BoolOp(self, node: ast.BoolOp) -> object:
        ends_with = isinstance(node.op, ast.Or)  # the first that is true, or is not
        value: object = None
        for part in node.values:
            value = self.visit(part)
            if is_untold(value):
                return untold(node)
            if bool(value) == ends_with:
                break
        return value

    def visit_IfExp(self, node: ast.IfExp) -> object:
        condition = self.visit(node.test)
        if is_untold(condition):
            return several(node)
        return self.visit(node.body if condition else node.orelse)

    def visit_BinOp(self, node: ast.BinOp) -> object:
        values = self._values([node.left, node.right])
        return applied(node.op, values, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        return applied(node.op, [self.visit(node.operand)], node)

    def visit_Compare(self, node: ast.Compare) -> object:
        values = self._values([node.left, *node.comparators])
        return applied(node.ops[0], values, node)

    def visit_Call(self, node: ast.Call) -> object:
        function = ast.unparse(node.func)
        values = self._values(node.args)
        named = Scope()
        for keyword in node.keywords:
            self._enter(named, keyword.arg, keyword.value)
        convert = CONVERSIONS.get(function)
        if convert is not None and not is_untold(values):
            return result_of(convert, values, node)
        if function == "dict" and all(isinstance(value, dict) for value in values):
            return joined(values, named)
        method = OF_ENVIRON.get(self._imported_name(function), "")
        owner: object = self._scope[ENVIRON]
        if isinstance(node.func, ast.Attribute) and not method:
            method = node.func.attr
            owner = self.visit(node.func.value)  # with calls in front
        convert = METHODS_OF_TEXT.get(method)
        if convert is not None and isinstance(owner, str) and not is_untold([owner, values, named]):
            return result_of(convert, [owner, *values], node, named)
        if method in ("get", "copy") and isinstance(owner, dict):
            return entry_of(owner, values, node)
        if method:
            change(owner, method, values, named, node)
        if function.rpartition(".")[2] in self._changing:
            for value in (*values, *named.values()):
                mark(value, node)
        for variable in self._variables_of.get(function, ()):
            self._set_variables([{variable: untold(node)}], node)
        environment = _environment(self._scope)
        stated = named.get("env")
        if isinstance(stated, dict):
            environment = stated
        if method == "env":  # as of an image of Modal's
            self._set_variables([*values, named], node)
        call = PythonCall(
            self._imported_name(function),
            deepcopy(values),
            deepcopy(named),
            deepcopy(environment),
        )
        self.calls.append(call)
        is_of_script = function in self._scope
        if is_of_script or MAKES_OBJECT.fullmatch(function) is None:
            return untold(node)
        # What is set of an object later is an argument of the call that made it.
        return call.named

    def _set_variables(self, objects: Sequence[object], node: ast.Call) -> None:
        """Set variables of the environment for all that the script starts; one that has several
        values may have either.
        """
        environment = self._scope[ENVIRON]
        assert isinstance(environment, dict), "entries of it alone are set"
        for variables in objects:
            if not isinstance(variables, dict):
                continue
            for name, value in variables.items():
                is_other = environment.get(name, value) != value
                environment[name] = untold(node) if is_other else value

    def _imported_name(self, function: str) -> str:
        """Return a function's name with the module that the script imports it from."""
        first, dot, attributes = function.partition(".")
        first = self._imported.get(first, first)
        return f"{first}{dot}{attributes}"


def _changed_for_others(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the variables from outside a function whose entries it sets, or to which it adds."""
    own = set[str]()
    changed = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Subscript | ast.Attribute):
            is_method = isinstance(node, ast.Attribute) and node.attr in CHANGING
            if is_method or isinstance(node.ctx, ast.Store):
                changed.add(ast.unparse(node.value))
    return changed - own

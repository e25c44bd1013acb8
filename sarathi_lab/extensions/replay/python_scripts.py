"""Commands of servers that a script of Python's states as literals: a list of words, a text, or a
call such as LLM(...). No script is run: what another expression makes stands as `$(line_7)` in
them, by which the command is refused; so is a program that a script starts by another expression.
"""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

from sarathi_lab.extensions.replay.argument_table import find
from sarathi_lab.extensions.replay.command_arguments import flags_of
from sarathi_lab.extensions.replay.server_programs import ENVIRONMENT_NAME, PROGRAM_WORDS
from sarathi_lab.extensions.replay.shell import LINE, ShellCommand, commands_in, untold

# Calls that make a server, by system, in a script that has a word: TensorRT-LLM's is called as
# vLLM's.
SERVER_CALLS = {
    "trtllm": ("tensorrt_llm", ("LLM",)),
    "sglang": ("sgl", ("Engine", "ServerArgs")),
    "vllm": ("", ("LLM", "AsyncEngineArgs", "EngineArgs")),
}
# Functions by which a text is a command, and others that leave a variable as it is.
STARTING = re.compile(r"(?:\w+\.)*(?:Popen|run|call|check_\w+|system|exec\w+|create_\w+|split)")
# Of these, calls that start a program: `run` is many another thing's.
PROGRAM_CALL = re.compile(
    r"(?:subprocess\.)?(?:run|call|check_call|check_output|getoutput|Popen)"
    r"|(?:\w+\.)?(?:system|popen|(?:exec|spawn)[lv]\w*|create_subprocess_\w+)"
)
# An expression of an f-string where a command has its program.
UNTOLD_PROGRAM = re.compile(rf"(?:^|[;&|(])\s*(?:\w+=\S*\s+|nohup\s+|exec\s+)*{LINE.pattern}")
READING = re.compile(rf"{STARTING.pattern}|(?:\w+\.)*(?:print|info)|.*\.join")
# What a literal may be part of, and stay as it is.
KEEPING = ast.Call | ast.keyword | ast.Expr | ast.Dict


def parsed(text: str) -> ast.Module | None:
    """Parse a script; None for other text."""
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class PythonScript:
    """A script, whose literals may be commands of servers.

    Args:
        tree: What `parsed` gives.
        text: The script itself.
    """

    def __init__(self, tree: ast.Module, text: str) -> None:
        self._text = text
        self._nodes = list(ast.walk(tree))
        self._parents = dict[ast.AST, ast.AST]()
        self._names = defaultdict[str, list[ast.Name]](list)  # by variable
        self._environment = dict[str, str]()
        self._imported = dict[str, str]()  # names by those that the script gives them
        for node in self._nodes:
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
            match node:
                case ast.Name():
                    self._names[node.id].append(node)
                case ast.alias(name=imported, asname=str(alias)):
                    self._imported[alias] = imported
                case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
                    self._note_variable(name, node)

    def _note_variable(self, name: str, node: ast.expr | ast.keyword) -> None:
        """Note a server's variable; its value is told if the script's one mention of it is outside
        functions and branches, such as os.environ["VLLM_USE_V1"] = "0".
        """
        if not ENVIRONMENT_NAME.fullmatch(name):
            return
        value = untold(node.lineno)
        parent = self._parents[node]
        statement = self._parents.get(parent)
        match statement:
            case ast.Assign(
                targets=[ast.Subscript() as target], value=ast.Constant(value=str(text))
            ):
                is_of_process = ast.unparse(target.value) == "os.environ"
                is_certain = isinstance(self._parents[statement], ast.Module)
                if is_of_process and is_certain and name not in self._environment:
                    value = text
        self._environment[name] = value

    def commands(self) -> Iterator[ShellCommand]:
        """Yield the commands that may start a server."""
        for node in self._nodes:
            match node:
                case ast.Call():
                    argv = self._argv_of_call(node)
                    yield ShellCommand(argv, self._environment)
                case ast.JoinedStr():
                    text = _text_of_f_string(node)
                    yield from self._commands_of_text(node, text)
                case ast.List(elts=elements) | ast.Tuple(elts=elements):
                    argv = [str(_value(element)) for element in elements]
                    argv += self._changes(node)
                    yield ShellCommand(argv, self._environment)
                case ast.Constant(value=str(text)):
                    yield from self._commands_of_text(node, text)

    def untold_programs(self) -> Iterator[str]:
        """Yield what stands for each program that the script starts by no literal."""
        for node in self._nodes:
            if not isinstance(node, ast.Call):
                continue
            first, dot, attribute = ast.unparse(node.func).partition(".")
            module = self._imported.get(first, first)
            if PROGRAM_CALL.fullmatch(module + dot + attribute) is None:
                continue
            arguments = list(node.args)
            for keyword in node.keywords:
                if keyword.arg in ("args", None):
                    arguments.append(keyword.value)
            are_stated = map(self._is_stated, arguments)
            if not all(are_stated):
                yield untold(node.lineno)

    def _argv_of_call(self, call: ast.Call) -> list[str]:
        """Return the command with the arguments of a call that makes a server; else no words."""
        name = ast.unparse(call.func).rpartition(".")[2]
        for system, (word, names) in SERVER_CALLS.items():
            if name not in names or word not in self._text:
                continue
            argv = [*PROGRAM_WORDS[system]]
            for argument in call.args:
                argv.append(str(_value(argument)))
            for keyword in call.keywords:
                argv += _flags_of_keyword(keyword)
            argv += self._flags_of_fields(system)
            return argv
        return []

    def _is_stated(self, argument: ast.expr) -> bool:
        """Return whether an argument is a literal, or a variable that is one wherever it is set."""
        match argument:
            case ast.Call(func=ast.Attribute(attr="split"), args=[text]):
                return self._is_stated(text)
            case ast.Name(id=name):
                mentions = self._names[name]
                are_set = list(map(self._sets_literal, mentions))
                are_read = map(self._is_read, mentions)
                are_stated = map(operator.or_, are_set, are_read)
                return any(are_set) and all(are_stated)
        return _is_literal(argument)

    def _sets_literal(self, mention: ast.Name) -> bool:
        """Return whether a variable is given a literal where it is mentioned."""
        match self._parents[mention]:
            case ast.Assign(targets=[target], value=value):
                return target is mention and _is_literal(value)
        return False

    def _is_read(self, mention: ast.expr) -> bool:
        """Return whether a function is given a variable that leaves it as it is."""
        function = self._function_given(mention)
        return READING.fullmatch(function) is not None

    def _flags_of_fields(self, system: str) -> list[str]:
        """Return flags that stand for arguments which a script sets by name behind a call."""
        flags = list[str]()
        for node in self._nodes:
            if not isinstance(node, ast.Attribute | ast.Call):
                continue
            for name in _fields_set(node):
                is_named = name.isidentifier()
                if not is_named or find(system, name) is not None:
                    flags.append(_untold_flag(node))
        return flags

    def _commands_of_text(self, literal: ast.expr, text: str) -> Iterator[ShellCommand]:
        """Yield the commands in a text that starts a program."""
        changes = self._changes(literal)
        for mention in self._mentions(literal):
            function = self._function_given(mention)
            if STARTING.fullmatch(function) is None:
                continue
            for command in commands_in(text, self._environment):
                argv = command.argv + changes
                yield ShellCommand(argv, command.variables)

    def _mentions(self, literal: ast.expr) -> list[ast.expr]:
        """Return a literal itself, or where a script names the variable that it is given to."""
        match self._parents[literal]:
            case ast.Assign(targets=[ast.Name() as variable]):
                mentions = self._names[variable.id]
                return [mention for mention in mentions if mention is not variable]
        return [literal]

    def _function_given(self, argument: ast.expr) -> str:
        """Return the function that is called with an argument; "": it is none."""
        parent = self._parents[argument]
        if isinstance(parent, ast.keyword):
            parent = self._parents[parent]
        if isinstance(parent, ast.Call):
            return ast.unparse(parent.func)
        return ""

    def _changes(self, literal: ast.expr) -> list[str]:
        """Return flags that stand for what the script may make of a literal."""
        changes = list[str]()
        for mention in self._mentions(literal):
            if mention is literal:
                is_kept = isinstance(self._parents[literal], KEEPING)
            else:
                is_kept = self._is_read(mention)
            if not is_kept:
                changes.append(_untold_flag(mention))
        return changes


def _flags_of_keyword(keyword: ast.keyword) -> list[str]:
    """Return an argument by its name as a flag and its value."""
    if keyword.arg is None:  # as of **options
        return [_untold_flag(keyword)]
    return flags_of({keyword.arg: _value(keyword.value)})


def _value(node: ast.expr) -> object:
    """Return the value of a literal; of another expression, text that stands for it."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr=dtype):
            return dtype
        case ast.Starred():
            return _untold_flag(node)
    with suppress(ValueError, TypeError):
        return ast.literal_eval(node)
    return untold(node.lineno)


def _fields_set(node: ast.Attribute | ast.Call) -> list[str]:
    """Return the names of fields that a script sets, of others than its own object; "": of any."""
    match node:
        case ast.Attribute(value=owner, attr=name, ctx=ast.Store()):
            is_own = ast.unparse(owner) == "self"
            return [] if is_own else [name]
        case ast.Call(func=function, args=arguments, keywords=keywords):
            called = ast.unparse(function).rpartition(".")[2]
            if called == "replace":
                return [keyword.arg or "" for keyword in keywords]
            if called in ("setattr", "__setattr__"):
                return [str(_value(argument)) for argument in arguments[1:2]]
    return []


def _is_literal(node: ast.expr) -> bool:
    """Return whether the program that a command starts is a literal, or Python itself."""
    match node:
        case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]):
            is_python = ast.unparse(first) == "sys.executable"
            return is_python or isinstance(first, ast.Constant)
        case ast.JoinedStr():
            text = _text_of_f_string(node)
            return UNTOLD_PROGRAM.search(text) is None
    return isinstance(node, ast.Constant)


def _text_of_f_string(node: ast.JoinedStr) -> str:
    """Return an f-string, with text that stands for the values of its expressions."""
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        else:
            text += untold(part.lineno)
    return text


def _untold_flag(node: ast.expr | ast.keyword) -> str:
    """Stand for any number of words; as a flag, so that it is not the value of another one."""
    return f"--{untold(node.lineno)}"

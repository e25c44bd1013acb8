"""Commands of servers that a script of Python's states as literals: a list of words, a text, or a
call such as LLM(...). No script is run: what another expression makes stands as `$(line_7)` in
them, by which the command is refused.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress

from sarathi_lab.extensions.replay.command_arguments import flags_of
from sarathi_lab.extensions.replay.server_arguments import find
from sarathi_lab.extensions.replay.server_programs import ENVIRONMENT_NAME, PROGRAM_WORDS
from sarathi_lab.extensions.replay.shell import ShellCommand, commands_in, untold

# Calls that make a server, in a script that has a word; TensorRT-LLM's is called as vLLM's.
SERVER_CALLS = {
    "trtllm": ("tensorrt_llm", ("LLM",)),
    "sglang": ("sglang", ("Engine", "ServerArgs")),
    "vllm": ("", ("LLM", "AsyncEngineArgs", "EngineArgs")),
}
# Calls by which a text is a command; and those that leave a variable as it is.
STARTING = re.compile(r"(?:\w+\.)*(?:Popen|run|call|check_\w+|system|exec\w+|create_\w+|split)")
READING = re.compile(rf"{STARTING.pattern}|(?:\w+\.)*(?:print|info)|.*\.join")


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
        self._nodes = [*ast.walk(tree)]
        self._parents = dict[ast.AST, ast.AST]()
        self._environment = dict[str, str]()
        for node in self._nodes:
            self._parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
            match node:
                # Whatever value it gets, as the script may choose it.
                case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
                    if ENVIRONMENT_NAME.fullmatch(name):
                        self._environment[name] = untold(node.lineno)

    def commands(self) -> Iterator[ShellCommand]:
        """Yield the commands that may start a server."""
        for node in self._nodes:
            match node:
                case ast.Call():
                    yield ShellCommand(self._argv_of_call(node), self._environment)
                case ast.List(elts=elements) | ast.Tuple(elts=elements):
                    argv = [str(_value(element)) for element in elements]
                    yield ShellCommand(argv + self._changes(node), self._environment)
                case ast.Constant(value=str(text)) if self._is_command(node):
                    for command in commands_in(text, self._environment):
                        yield ShellCommand(command.argv + self._changes(node), command.variables)

    def _argv_of_call(self, call: ast.Call) -> list[str]:
        """Return the command with the arguments of a call that makes a server."""
        name = ast.unparse(call.func).rpartition(".")[2]
        for system, (word, names) in SERVER_CALLS.items():
            if name not in names or word not in self._text:
                continue
            argv = [*PROGRAM_WORDS[system], *(str(_value(value)) for value in call.args)]
            for keyword in call.keywords:
                if keyword.arg is None:
                    argv.append(_untold_flag(keyword))
                else:
                    argv += flags_of({keyword.arg: _value(keyword.value)})
            return argv + self._fields_set(system)
        return []

    def _fields_set(self, system: str) -> list[str]:
        """Return flags that stand for arguments which a script sets by name behind a call."""
        flags = list[str]()
        for node in self._nodes:
            match node:
                case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()):
                    if owner != "self" and find(system, name) is not None:
                        flags.append(_untold_flag(node))
        return flags

    def _uses(self, literal: ast.expr) -> list[ast.AST]:
        """Return what a literal is part of, by itself or as the value of a variable."""
        parent = self._parents[literal]
        match parent:
            case ast.keyword():
                return [self._parents[parent]]
            case ast.Assign(targets=[ast.Name(id=variable)]):
                names = [node for node in self._nodes if isinstance(node, ast.Name)]
                uses = [self._parents[name] for name in names if name.id == variable]
                return [use for use in uses if use is not parent]
        return [parent]

    def _is_command(self, text: ast.expr) -> bool:
        """Return whether a text starts a program."""
        return any(_calls(STARTING, use) for use in self._uses(text))

    def _changes(self, literal: ast.expr) -> list[str]:
        """Return flags that stand for what the script may make of a literal."""
        if isinstance(self._parents[literal], ast.Call | ast.keyword | ast.Expr | ast.Dict):
            return []
        uses = self._uses(literal)
        return [_untold_flag(use) for use in uses if not _calls(READING, use)]


def _calls(functions: re.Pattern[str], use: ast.AST) -> bool:
    return isinstance(use, ast.Call) and functions.fullmatch(ast.unparse(use.func)) is not None


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


def _untold_flag(node: ast.AST) -> str:
    """Stand for any number of words; as a flag, so that it is not the value of another one."""
    assert isinstance(node, ast.expr | ast.stmt | ast.keyword), "others have no line"
    return f"--{untold(node.lineno)}"

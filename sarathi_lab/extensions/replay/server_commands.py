"""The command that started a server: as typed, in a script, in a description of containers
(Kubernetes, compose), or as a call of Python's.

Values are read as the servers read them: 8k is 8000, `-cc.cudagraph_mode=NONE` a part of
`compilation_config`, `--no-NAME` switches NAME off. Environment variables of a server count among
its arguments.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.literals import named_values
from sarathi_lab.extensions.replay.server_arguments import (
    FALSE,
    FLAGS,
    TRUE,
    Statement,
    as_object,
    find,
    read_arguments,
    with_rules_of_v0,
)

TYPED = "task.server"  # the source of what a user types
# Commands that start a server, by the words that they contain.
SERVER_COMMANDS = {
    "sglang": ("sglang.launch_server", "sglang_router.launch_server", "sglang serve"),
    "vllm": ("vllm serve", "vllm.entrypoints"),
}
IMAGES = {"sglang": re.compile(r"lmsysorg/sglang\b"), "vllm": re.compile(r"vllm-openai\b")}
IMAGE_VERSION = re.compile(r"(?:vllm-openai|lmsysorg/sglang):v(\d+\.\d+(?:\.\d+)?)")
SCRIPTS = ("launch_server", "api_server", "launch_server.py", "api_server.py")
PYTHON_CALLS = {
    "sglang": re.compile(r"\b(?:sgl|sglang)\.(?:Engine|ServerArgs)\((.*)\)", re.DOTALL),
    "vllm": re.compile(r"\b(?:LLM|AsyncEngineArgs|EngineArgs)\((.*)\)", re.DOTALL),
}
SHORT_FLAGS = {
    "vllm": {
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-dcp": "decode_context_parallel_size",
        "-pcp": "prefill_context_parallel_size",
        "-q": "quantization",
        "-O": "optimization_level",
        "-cc": "compilation_config",
        "-ac": "attention_config",
        "-sc": "speculative_config",
        "-ep": "enable_expert_parallel",
        "-n": "nnodes",
        "-r": "node_rank",
    },
    "sglang": {
        "--tp": "tp_size",
        "--pp": "pp_size",
        "--dp": "dp_size",
        "--ep": "ep_size",
        "--model": "model_path",
    },
}
GLUED = re.compile(r"^-(tp|pp|dp|O)(\d+)$")  # a short flag and its number in one word
UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1024, "M": 2**20, "G": 2**30}  # vLLM's
SHELL = re.compile(r"\d?[<>|&;#]")  # where a command ends
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
SCALED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
# A break that a shell takes for none (also of Windows), or in front of a flag.
CONTINUED = re.compile(r"[\\^`]\r?\n|\r?\n(?=\s*-)")
LONG_DASH = re.compile(r"^[‐-―−](?=[A-Za-z])")  # what a text editor makes of two hyphens
ENVIRONMENT = re.compile(r"^((?:VLLM|SGLANG|SGL)_[A-Z0-9_]+)=(.*)$", re.DOTALL)
ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S+|\"[^\"]*\"|'[^']*')\s*$", re.MULTILINE
)
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$\((\w+)\)|\$(\w+)")
HELM_KEY = "vllmConfig"
V0_SWITCH = "VLLM_USE_V1"


@dataclass(frozen=True)
class Words:
    """A command cut into words, and the variables that were set before it."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def read_command(command: str, source: str = TYPED) -> Statement:
    """Read the command that started a server.

    Args:
        command: Such as "vllm serve MODEL --max-num-seqs 128", or SGLang's; environment variables
            and a container's command may stand in front. Also a list of words, a script, a
            description of containers in YAML, or a call such as LLM(model="MODEL").
        source: What messages name.

    Raises:
        UserError: For a command of no known server, and a misspelt argument.
    """
    statement = find_command(command, source)
    if statement is None:
        shown = " ".join(command.split())[:60]
        raise UserError(
            f"{source}={shown} starts no known server; use one such as "
            "'vllm serve MODEL --max-num-seqs 128' or 'python -m sglang.launch_server "
            "--model-path M'"
        )
    return statement


def find_command(text: str, source: str) -> Statement | None:
    """Read the command that starts a server in `text`; None where there is none. Raises UserError
    for several of them, and a misspelt argument.
    """
    for system, call in PYTHON_CALLS.items():
        called = call.search(text)
        if called is not None:
            arguments = named_values(called[1])
            is_typed = source == TYPED  # else in a log, with all defaults
            return read_arguments(
                system, arguments, source, is_typed=is_typed, is_dump=not is_typed, is_complete=True
            )
    for commands in (_in_containers(text), _in_list(text), _in_script(text, source)):
        servers = [command for command in commands if _system_of(command.words) is not None]
        if len(servers) > 1:
            raise UserError(
                f"{source} has the commands of {len(servers)} servers; state the one whose run it "
                "is as task.server='vllm serve MODEL ...'"
            )
        if servers:
            return _read_words(servers[0], source)
    return None


def _read_words(command: Words, source: str) -> Statement:
    """Read a command of a known server."""
    variables = dict(command.variables)
    words = [_substituted(word, variables) for word in command.words]
    inner = next((word for word in words if " " in word and _system_of(_split(word))), None)
    if inner is not None:  # as in bash -c 'vllm serve MODEL'
        variables |= dict(ASSIGNMENT.findall(inner))
        before = words[: words.index(inner)]
        words = [*before, *_split(_substituted(CONTINUED.sub(" ", inner), variables))]
    system = _system_of(words)
    assert system is not None, "asked for by the caller"
    start = _end_of_command(system, words)
    behind = takewhile(lambda word: SHELL.match(word) is None, words[start:])
    arguments, unread = _arguments_of(system, list(behind))
    environment = _environment(words[:start], variables)
    image = IMAGE_VERSION.search(" ".join(words[:start]))
    if image is not None:
        arguments["version"] = image[1]
    arguments = {**_of_config_file(arguments), **arguments, **environment}
    statement = read_arguments(system, arguments, source, is_typed=True, is_complete=True)
    if unread:
        not_read = f"{' '.join(unread)} (no flag stands before it)"
        statement = replace(statement, not_simulated=[*statement.not_simulated, not_read])
    if system == "vllm" and environment.get(V0_SWITCH) == "0":
        return with_rules_of_v0(statement)
    return statement


# -- where a command stands ------------------------------------------------------------------------


def _in_list(text: str) -> list[Words]:
    """Return the command that is a list of words, in JSON or Python's."""
    if not text.lstrip().startswith("["):
        return []
    try:
        words = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return []
    return [Words([str(word) for word in words])] if isinstance(words, list) else []


def _in_script(text: str, source: str) -> list[Words]:
    """Return the first command of a server in the lines of a script. Raises UserError for quotes
    that are open.
    """
    variables = dict[str, str]()
    for name, value in ASSIGNMENT.findall(text):
        variables[name] = value.strip("'\"")
    for line in CONTINUED.sub(" ", text).splitlines():
        has_command = _system_of(line.split()) is not None
        if not has_command or line.lstrip().startswith("#"):
            continue
        try:
            return [Words(shlex.split(line), variables)]
        except ValueError as error:
            raise UserError(f"{source} can't be read ({error}); close its quotes") from None
    return []


def _in_containers(text: str) -> list[Words]:
    """Return the commands of the containers that YAML describes."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        return []
    return [command for document in documents for command in _of_containers(document)]


def _of_containers(content: object) -> Iterator[Words]:
    if isinstance(content, list):
        for entry in content:
            yield from _of_containers(entry)
    if not isinstance(content, Mapping):
        return
    if isinstance(content.get(HELM_KEY), Mapping):
        yield Words(["vllm", "serve", *_words_of_helm(content)])
        return
    if any(key in content for key in ("command", "args", "entrypoint")):
        words = [str(content.get("image", ""))]
        for key in ("entrypoint", "command", "args"):
            words += _words_of(content.get(key))
        variables = _variables_of(content.get("env")) | _variables_of(content.get("environment"))
        yield Words(words, variables)
        return
    for value in content.values():
        yield from _of_containers(value)


def _words_of_helm(content: Mapping[str, Any]) -> list[str]:
    """Return the words of a server in the values of vLLM's production stack: `vllmConfig` has the
    flags in camel case.
    """
    words = [str(content.get("modelURL", ""))]
    for name, value in content[HELM_KEY].items():
        if name == "extraArgs":
            words += _words_of(value)
            continue
        flag = re.sub(r"(?=[A-Z])", "-", str(name)).lower()
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def _words_of(value: object) -> list[str]:
    """Return the words of a command, which is text or a list."""
    if isinstance(value, str):
        return _split(CONTINUED.sub(" ", value))
    return [str(word) for word in value] if isinstance(value, list) else []


def _variables_of(value: object) -> dict[str, str]:
    """Return a container's environment: an object, or a list of objects or of assignments."""
    if isinstance(value, Mapping):
        return {str(name): str(content) for name, content in value.items()}
    variables = dict[str, str]()
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, Mapping) and "value" in entry:
            variables[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, content = entry.partition("=")
            variables[name] = content
    return variables


def _split(text: str) -> list[str]:
    """Return the words of a shell's line; of one with open quotes, those between spaces."""
    with suppress(ValueError):
        return shlex.split(text)
    return text.split()


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """Fill in the variables that are known, or have a default."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return VARIABLE.sub(value_of, text)


# -- which command it is ---------------------------------------------------------------------------


def _system_of(words: Sequence[str]) -> str | None:
    """Return the server that a command starts, by the words or the image in it."""
    text = " ".join(words)
    for system, signs in SERVER_COMMANDS.items():
        if any(sign in text for sign in signs):
            return system
    return next((system for system, image in IMAGES.items() if image.search(text)), None)


def _end_of_command(system: str, words: Sequence[str]) -> int:
    """Return where the arguments begin, behind the words that name the server."""
    end = 0
    for sign in SERVER_COMMANDS[system]:
        parts = sign.split()
        for start in range(len(words) - len(parts) + 1):
            named = words[start : start + len(parts)]
            is_command = named[0].rpartition("/")[2] == parts[0] and named[1:] == parts[1:]
            if is_command:
                end = max(end, start + len(parts))
                break
    for position, word in enumerate(words):
        is_program = word.endswith(SCRIPTS) or IMAGES[system].search(word) is not None
        if is_program and not word.startswith("-"):
            end = max(end, position + 1)
            break
    while end < len(words) and words[end] in ("serve", system):
        end += 1
    return end


# -- its arguments ---------------------------------------------------------------------------------


def _arguments_of(system: str, words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Return the arguments of a command, by the names of the table, and words of none."""
    remaining = [LONG_DASH.sub("--", word) for word in words]
    arguments = dict[str, Any]()
    unread = list[str]()
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-"):
            # vLLM takes the model without a flag.
            if system == "vllm" and "model" not in arguments:
                arguments["model"] = word
            elif word:
                unread.append(word)
            continue
        word = GLUED.sub(r"-\1=\2", word)
        flag, has_value, value = word.partition("=")
        flag, _, key = flag.partition(".")
        name, is_on = _name_of(system, flag)
        content: Any = _scaled(value)
        if not has_value:
            content = _take_value(system, name, remaining, is_on=is_on)
        if name == "optimization_level" and (key or str(content).startswith("{")):
            name = "compilation_config"  # which -O was short for
        if key:
            content = {**as_object(arguments.get(name)), key: content}
        arguments[name] = content
    return arguments, unread


def _take_value(system: str, name: str, remaining: list[str], *, is_on: bool) -> object:
    """Take the words behind a flag that are its value; of none, whether it is on."""
    row = find(system, name)
    is_flag = row is not None and row.kind in FLAGS
    if is_flag and not (remaining and remaining[0].lower() in (*TRUE, *FALSE)):
        return is_on
    values = [_scaled(value) for value in _take_words(remaining)]
    if row is not None and row.kind == "any" and len(values) > 1:
        return [int(value) if value.isdigit() else value for value in values]
    remaining[:0] = values[1:]  # such as a model behind a flag
    return values[0] if values else is_on


def _name_of(system: str, flag: str) -> tuple[str, bool]:
    """Return the argument that a flag is of, and whether it switches it on."""
    name = SHORT_FLAGS[system].get(flag)
    if name is not None:
        return name, True
    name = flag.lstrip("-").replace("-", "_")
    positive = name.removeprefix("no_")
    if positive != name and find(system, name) is None and find(system, positive) is not None:
        return positive, False
    return name, True


def _take_words(remaining: list[str]) -> list[str]:
    """Take the words up to the next flag; a negative number is none."""
    values = list[str]()
    while remaining and (not remaining[0].startswith("-") or NEGATIVE.fullmatch(remaining[0])):
        values.append(remaining.pop(0))
    return values


def _scaled(value: str) -> str:
    """Write out a number with a unit, as vLLM takes it: 8k is 8000, 8K is 8192."""
    match = SCALED.fullmatch(value)
    if match is None:
        return value
    return str(int(float(match[1]) * UNITS[match[2]]))


def _environment(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the servers' own variables that are set before the command."""
    assignments = [*words, *(f"{name}={value}" for name, value in variables.items())]
    matches = map(ENVIRONMENT.match, assignments)
    return {match[1]: match[2] for match in matches if match is not None}


def _of_config_file(arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments in the file that `--config` names, where that is here."""
    path = Path(str(arguments.get("config", ""))).expanduser()
    if not path.is_file():
        return {}
    try:
        content = as_object(yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    arguments.pop("config")
    return {str(name).replace("-", "_"): value for name, value in content.items()}

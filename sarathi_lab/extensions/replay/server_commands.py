"""The command that started a server: as typed, in a script, in a description of containers
(Kubernetes, compose), or as a call of Python's.

Values are read as the servers read them: 8k is 8000, `-cc.cudagraph_mode=NONE` a part of
`compilation_config`, `--no-NAME` switches NAME off. Environment variables of a server count among
its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.literals import named_values
from sarathi_lab.extensions.replay.python_scripts import LINE, PythonCall, calls_in, parsed
from sarathi_lab.extensions.replay.server_arguments import (
    FALSE,
    FLAGS,
    NO_EFFECT,
    TRUE,
    Statement,
    as_object,
    find,
    read_arguments,
    with_rules_of_v0,
    with_rules_of_version,
)
from sarathi_lab.extensions.replay.server_containers import (
    UNIT_LINE,
    containers_in,
    containers_of,
    dockerfile_in,
    list_in,
    quadlet_in,
)
from sarathi_lab.extensions.replay.server_programs import (
    PREFILL,
    PROGRAMS,
    PROMPTS,
    REPLICAS,
    VARIABLES_FILES,
    end_of_command,
    is_of_server,
    starts_server,
    system_of,
)
from sarathi_lab.extensions.replay.shell import (
    OUTPUT,
    VARIABLE,
    ShellCommand,
    commands_in,
    substituted,
)

TYPED = "task.server"  # the source of what a user types
# Servers whose arguments are not read, by a word that starts them; and the policy that is like
# their scheduler, as far as the lab has one.
OTHER_SERVERS = {
    "[TRT-LLM]": ("TensorRT-LLM", "trtllm"),  # in its log
    "tritonserver": ("Triton", "trtllm"),
    "text-generation-launcher": ("TGI", "tgi"),
    "text_generation_launcher": ("TGI", "tgi"),
    "text-generation-inference": ("TGI", "tgi"),
    "llama-server": ("llama.cpp", "llama_cpp"),
    "lmdeploy serve": ("LMDeploy", "lmdeploy"),
    "ollama serve": ("Ollama", "llama_cpp"),
}
IMAGE_TAG = re.compile(
    r"([^\s=]*(?:vllm-openai|sglang|tensorrt-llm/release)[\w.-]*):v?(\d+\.\d+(?:\.\d+)?)"
)
# Images, or mirrors of them, whose tag is the server's version; of others it may be their own.
TAGGED_BY_VERSION = (
    *("/vllm/vllm-openai", "/vllm/vllm-openai-rocm", "/vllm/vllm-openai-cpu"),
    *("/lmsysorg/sglang", "/nvidia/tensorrt-llm/release"),
)
PYTHON_CALLS = {
    "sglang": re.compile(r"\b(?:sgl|sglang)\.(?:Engine|ServerArgs)\("),
    "vllm": re.compile(r"\b(?:LLM|AsyncEngineArgs|EngineArgs)\("),
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
    "trtllm": {},
}
# Defaults of arguments that are otherwise than their policy's here, and so are named.
OTHER_DEFAULTS: dict[str, dict[str, object]] = {"trtllm": {"enable_chunked_prefill": "false"}}
GLUED = re.compile(r"^-(tp|pp|dp|O)(\d+)$")  # a short flag and its number in one word
MODEL_NAMES = {"vllm": "model", "sglang": "model_path"}  # of the first positional argument
SHELL = re.compile(r"\d?[<>|&;#]")  # where a command ends
FLAG_PREFIXES = ("enable_", "disable_")  # of arguments that are not in the table
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
LONG_DASH = re.compile(r"^[‐-―−](?=[A-Za-z])")  # what a text editor makes of two hyphens
ENVIRONMENT = re.compile(r"^(?:--env=|-e=?)?((?:VLLM|SGLANG|SGL)_[A-Z0-9_]+)=(.*)$", re.DOTALL)
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n[ \t]*\2[ \t]*(?:\n|$)", re.DOTALL)
# Behind comments, it begins with FROM or with variables of it; a script may write one elsewhere.
BEGINS_DOCKERFILE = re.compile(r"(?:\s*#.*\n|\s*\n)*[ \t]*(?:FROM|ARG)[ \t]+\S+")
V0_SWITCH = "VLLM_USE_V1"


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
        check_is_of_known_server(command, source)
        shown = " ".join(command.split())[:60]
        raise UserError(
            f"{source}={shown} starts no known server; use one such as "
            "'vllm serve MODEL --max-num-seqs 128' or 'python -m sglang.launch_server "
            "--model-path M'"
        )
    return statement


def check_is_of_known_server(text: str, source: str) -> None:
    """Raise UserError for a text that starts a server whose arguments are not read."""
    for word, (name, policy) in OTHER_SERVERS.items():
        if word in text:
            raise UserError(
                f"{source} starts no known server: arguments of {name} ({word}) are not read; "
                f"state them beside the client's file as policy={policy} chunk=N batch=N model=M"
            )


def find_container(text: str, source: str) -> Statement | None:
    """Read the server that a description of containers starts; None where there is none. Raises
    UserError as `find_command` does.
    """
    servers = [command for command in containers_in(text) if is_of_server(command.argv)]
    if not servers:
        return None
    _check_is_one(servers, source)
    return _read_command(servers[0], source)


def find_command(text: str, source: str) -> Statement | None:
    """Read the command that starts a server in `text`; None where there is none. Raises UserError
    for several of them, and a misspelt argument.
    """
    script = parsed(text)
    calls = [] if script is None else calls_in(script)
    for system, function in PYTHON_CALLS.items():
        engines = [call for call in calls if function.search(f"{call.function}(")]
        if engines:
            _check_is_one(engines, source)
            return _read_call(system, engines[0], source)
        printed = function.search(text)
        if printed is not None and script is None:  # in a log, with all defaults
            listed = named_values(text[printed.end() :])
            return read_arguments(system, listed, source, is_dump=True, is_complete=True)
    in_containers = containers_in(text)
    in_documents = list[ShellCommand]()
    for document in DOCUMENT.finditer(text):  # as for kubectl apply
        in_documents += containers_in(document[3])
    descriptions = (in_containers, in_documents, list_in(text), dockerfile_in(text))
    for commands in (*descriptions, quadlet_in(text), _in_python(calls)):
        servers = [command for command in commands if is_of_server(command.argv)]
        if servers:
            _check_is_one(servers, source)
            return _read_command(servers[0], source)
    if in_containers or BEGINS_DOCKERFILE.match(text):
        return None  # an image alone starts no server, nor does an earlier stage
    servers = _servers_in(text, {}, source)
    if not servers:
        return None
    server = servers[0]
    names = {name for name, _ in UNIT_LINE.findall(text)}
    in_front = [name for name in VARIABLES_FILES if name in names]
    return _read_command(replace(server, argv=[*in_front, *server.argv]), source)


def _check_is_one(servers: Sequence[object], source: str) -> None:
    """Raise UserError for several servers."""
    if len(servers) > 1:
        raise UserError(
            f"{source} has the commands of {len(servers)} servers; state the one whose run it "
            "is as task.server='vllm serve MODEL ...'"
        )


def _read_call(system: str, call: PythonCall, source: str) -> Statement:
    """Read a call of Python's that makes a server."""
    arguments = dict(call.named)
    unread = list[str]()
    for position, value in enumerate(call.positional, start=1):
        if position == 1:
            arguments[MODEL_NAMES[system]] = value
        else:
            unread.append(f"argument {position} (it has no name)")
    arguments |= _environment([], call.environment)
    _check_is_told(system, arguments, source)
    statement = read_arguments(system, arguments, source, is_typed=True, is_complete=not unread)
    return replace(statement, not_simulated=[*statement.not_simulated, *unread])


def _check_is_told(system: str, arguments: Mapping[str, object], source: str) -> None:
    """Raise UserError for an argument with an effect that only a run of a script tells."""
    for name, value in arguments.items():
        untold = LINE.search(f"{name} {value}")
        row = find(system, name)
        if untold is None or (row is not None and row.setting == NO_EFFECT):
            continue
        shown = "an argument" if LINE.search(name) else name
        raise UserError(
            f"{source}, line {untold[1]}: {shown} is known only when the script runs; state the "
            "command with its values as task.server='vllm serve MODEL ...'"
        )


def _read_command(command: ShellCommand, source: str) -> Statement:
    """Read a command of a known server."""
    command = _inner_command(command, source)
    argv = command.argv
    system = system_of(argv)
    assert system is not None, "asked for by the caller"
    start = end_of_command(system, argv)
    in_front = argv[:start]  # the program, and what an engine of containers is told
    behind = takewhile(lambda word: SHELL.match(word) is None, argv[start:])
    arguments, unread = _arguments_of(system, list(behind))
    environment = _environment(in_front, command.variables)
    image = IMAGE_TAG.search(" ".join(in_front))
    is_tagged_by_version = image is not None and f"/{image[1]}".endswith(TAGGED_BY_VERSION)
    if image is not None and is_tagged_by_version:
        arguments["version"] = image[2]
    if system == "vllm":
        arguments = {**_of_config_file(arguments), **arguments}
    arguments = {**OTHER_DEFAULTS.get(system, {}), **arguments, **environment}
    for word in unread:
        _check_is_told(system, {word: ""}, source)
    _check_is_told(system, arguments, source)
    arguments, not_read = _without_unset(system, arguments)
    statement = read_arguments(system, arguments, source, is_typed=True, is_complete=True)
    if unread:
        not_read.append(f"{' '.join(unread)} (no flag stands before it)")
    if image is not None and not is_tagged_by_version:
        not_read.append(f"{image[0]} (its tag may be no version of {system})")
    for name in VARIABLES_FILES:
        if any(word.startswith(name) for word in in_front):
            not_read.append(f"{name} (its variables are not here)")
    for word in argv[:start]:
        if word.startswith(REPLICAS):
            not_read.append(f"{word} (one of them is)")
        if word.startswith(PREFILL):
            not_read.append(f"{word} (prompts have devices of their own)")
    statement = replace(statement, not_simulated=[*statement.not_simulated, *not_read])
    if system != "vllm":
        return statement
    switch = environment.get(V0_SWITCH)
    if switch is None:
        return with_rules_of_version(statement)
    if switch == "0":
        return with_rules_of_v0(statement)
    return statement


def _inner_command(command: ShellCommand, source: str) -> ShellCommand:
    """Fill in a command's variables, and take out of its word a command that another one starts, as
    in bash -c 'vllm serve MODEL'.
    """
    argv = [substituted(word, command.variables) for word in command.argv]
    for position, word in enumerate(argv):
        if " " not in word:
            continue
        servers = _servers_in(word, command.variables, source)
        if servers:
            inner = servers[0]
            return ShellCommand([*argv[:position], *inner.argv], inner.variables)
    return ShellCommand(argv, command.variables)


def _without_unset(
    system: str, arguments: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return arguments without those whose value is a variable that nothing sets, and a note of
    each that may change the times.
    """
    filled_in = dict[str, object]()
    notes = list[str]()
    for name, value in arguments.items():
        if isinstance(value, Mapping):  # as of -cc.cudagraph_mode=$MODE
            filled_in[name], of_keys = _without_unset(system, value)
            notes += [f"{name}.{note}" for note in of_keys]
            continue
        # A list with one such word is not taken at all: the others may be half of what was meant.
        words = value if isinstance(value, list) else [value]
        text = " ".join(map(str, words))
        if VARIABLE.search(text) is None and OUTPUT.search(text) is None:
            filled_in[name] = value
            continue
        row = find(system, name)
        if row is None or row.setting != NO_EFFECT:
            is_output = OUTPUT.search(text) is not None
            reason = "only a run of it tells" if is_output else "nothing here sets the variable"
            notes.append(f"{name}={text} ({reason})")
    return filled_in, notes


# -- where a command stands ------------------------------------------------------------------------


def _servers_in(script: str, variables: Mapping[str, str], source: str) -> list[ShellCommand]:
    """Return the command of a script that starts a server, or none. Raises UserError for several,
    and for one with open quotes.
    """
    servers = list[ShellCommand]()
    texts = set[str]()
    for command in commands_in(script, variables, PROGRAMS):
        # A shell's trace (set -x) has a command once more.
        text = " ".join(word for word in command.argv if word not in PROMPTS)
        if starts_server(command.argv) and text not in texts:
            servers.append(command)
            texts.add(text)
    _check_is_one(servers, source)
    if any(server.has_open_quotes for server in servers):
        raise UserError(f"{source} can't be read (a quote is open); close its quotes")
    return servers


def _in_python(calls: Sequence[PythonCall]) -> list[ShellCommand]:
    """Return the commands that calls in a script of Python's have as lists of words, as text, or as
    the arguments of a container; if none has any, those that its variables have.
    """
    by_kind = dict[bool, list[ShellCommand]]()
    for call in calls:
        commands = by_kind.setdefault(bool(call.function), [])
        for command in _commands_of(call):
            if starts_server(command.argv) and command not in commands:
                commands.append(command)
    return by_kind.get(True) or by_kind.get(False) or []


def _commands_of(call: PythonCall) -> Iterator[ShellCommand]:
    """Yield what the arguments of a call may be as commands."""
    variables = {name: str(value) for name, value in call.environment.items()}
    for value in (*call.positional, [*call.positional]):
        if isinstance(value, str):
            yield from commands_in(value, variables, PROGRAMS)
        elif isinstance(value, list) and len(value) > 1:
            yield ShellCommand([str(word) for word in value], variables)
    for command in containers_of(call.named, 1):
        yield replace(command, variables={**variables, **command.variables})


# -- its arguments ---------------------------------------------------------------------------------


def _arguments_of(system: str, argv: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Return the arguments of a command, by the names of the table, and words of none."""
    remaining = [LONG_DASH.sub("--", word) for word in argv]
    arguments = dict[str, object]()
    unread = list[str]()
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-"):
            # The others take the model without a flag.
            if system != "sglang" and "model" not in arguments:
                arguments["model"] = word
            elif word:
                unread.append(word)
            continue
        # -tp8 is -tp=8; -cc.mode=3 is a key of the object -cc.
        word = GLUED.sub(r"-\1=\2", word)
        flag, has_value, value = word.partition("=")
        flag, _, key = flag.partition(".")
        name, is_on = _name_of(system, flag)
        content: Any = value
        if not has_value:
            content = _take_value(system, name, remaining, is_on=is_on)
        if name == "optimization_level" and (key or str(content).startswith("{")):
            name = "compilation_config"  # which -O was short for
        if key:
            content = {**as_object(arguments.get(name)), key: _from_json(content)}
        arguments[name] = content
    return arguments, unread


def _take_value(system: str, name: str, remaining: list[str], *, is_on: bool) -> object:
    """Take the words behind a flag that are its value; of none, whether it is on."""
    row = find(system, name)
    is_flag = name.startswith(FLAG_PREFIXES)
    if row is not None:
        is_flag = row.kind in FLAGS
    if is_flag and not (remaining and remaining[0].lower() in (*TRUE, *FALSE)):
        return is_on
    values = _take_words(remaining)
    if not values:
        return is_on
    if row is not None and row.kind == "list":
        if len(values) == 1 and values[0].startswith("["):
            return _from_json(values[0])
        return [int(value) if value.isdigit() else value for value in values]
    remaining[:0] = values[1:]  # such as a model behind a flag
    return values[0]


def _from_json(value: object) -> object:
    """Return what text is as JSON; other text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


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


def _environment(argv: Sequence[str], variables: Mapping[str, object]) -> dict[str, str]:
    """Return the servers' own variables that are set before the command; arrays are a script's."""
    values = {name: str(value) for name, value in variables.items()}
    set_before = [f"{name}={value}" for name, value in values.items() if value[:1] != " "]
    assignments = [*argv, *set_before]
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

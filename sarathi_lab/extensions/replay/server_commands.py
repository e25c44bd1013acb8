"""The command that started a server: as typed, in a script, in a description of containers
(Kubernetes, compose), or as a call of Python's.

Values are read as the servers read them: 8k is 8000, `-cc.cudagraph_mode=NONE` a part of
`compilation_config`, `--no-NAME` switches NAME off. Environment variables of a server count among
its arguments.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.literals import named_values
from sarathi_lab.extensions.replay.python_scripts import (
    PythonCall,
    calls_in,
    parsed,
    untold_commands,
)
from sarathi_lab.extensions.replay.python_values import LINE
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
    flags_of,
    list_in,
    quadlet_in,
)
from sarathi_lab.extensions.replay.server_programs import (
    ENVIRONMENT,
    PROGRAM_WORDS,
    PROGRAMS,
    Server,
    notes_of_files,
    servers_of,
)
from sarathi_lab.extensions.replay.shell import (
    COMMENT,
    IN_BRANCH,
    OUTPUT,
    VARIABLE,
    ShellCommand,
    commands_in,
)

TYPED = "task.server"  # the source of what a user types
# Servers whose arguments are not read, by a word that starts them; and the policy that is like
# their scheduler, as far as the lab has one.
OTHER_SERVERS = {
    "[TRT-LLM]": ("TensorRT-LLM", "trtllm"),  # in its log
    "trtllm-serve disaggregated": ("TensorRT-LLM", "trtllm"),
    "trtllm-bench": ("TensorRT-LLM", "trtllm"),
    "tensorrt_llm.commands.serve": ("TensorRT-LLM", "trtllm"),
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
# Packages of servers, and how an installation of one names its version.
PACKAGES = {"vllm": r"\bvllm", "sglang": r"\bsglang", "trtllm": r"\btensorrt[-_]llm"}
PINNED = r"(?:\[[\w,-]+\])?==(\d+\.\d+(?:\.\d+)?)"
# Calls that make a server, by the names that a script imports.
PYTHON_CALLS = {
    "trtllm": re.compile(r"\btensorrt_llm\.(?:\w+\.)*LLM\("),
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
        # Of KServe's server for models of Hugging Face, which hands all others to vLLM.
        "--model_name": "served_model_name",
        "--model_id": "model",
        "--model_dir": "model",
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
SHELL = re.compile(r"\d?[<>|&;#]")  # where a command ends
FLAG_PREFIXES = ("enable_", "disable_")  # of arguments that are not in the table
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
LONG_DASH = re.compile(r"^[‐-―−](?=[A-Za-z])")  # what a text editor makes of two hyphens
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n[ \t]*\2[ \t]*(?:\n|$)", re.DOTALL)
# Behind comments, it begins with FROM or with variables of it; a script may write one elsewhere.
BEGINS_DOCKERFILE = re.compile(r"(?:[ \t]*(?:#.*)?\r?\n)*[ \t]*(?:FROM|ARG)[ \t]+\S+")
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
        if os.path.isfile(command):
            raise UserError(f"{source}={command} is a file; name it as task.log={command}")
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
    server = _server_in(containers_in(text), source)
    return None if server is None else _read_server(server, source, text)


def find_command(text: str, source: str) -> Statement | None:
    """Read the command that starts a server in `text`; None where there is none. Raises UserError
    for several of them, and a misspelt argument.
    """
    script = parsed(text)
    if script is None:
        for system, function in PYTHON_CALLS.items():
            printed = function.search(text)
            if printed is not None:  # in a log, with all defaults
                listed = named_values(text[printed.end() :])
                return read_arguments(system, listed, source, is_dump=True, is_complete=True)
    in_containers = containers_in(text)
    in_documents = list[ShellCommand]()
    for document in DOCUMENT.finditer(text):  # as for kubectl apply
        in_documents += containers_in(document[3])
    descriptions = [in_containers, in_documents, list_in(text), dockerfile_in(text)]
    descriptions.append(quadlet_in(text))
    # A command that only names what a script starts is none where that is not told.
    last_resorts = list[list[ShellCommand]]()
    untold = list[str]()
    calls = list[PythonCall]()
    if script is not None:
        calls = calls_in(script)
        of_calls, of_variables = _in_python(calls)
        descriptions.append(of_calls)
        last_resorts.append(of_variables)
        untold = untold_commands(calls)
    if not calls and not in_containers and BEGINS_DOCKERFILE.match(text) is None:
        # Else an image alone starts no server, nor does an earlier stage.
        notes = notes_of_files([name for name, _ in UNIT_LINE.findall(text)])
        in_script = list(commands_in(text, {}, PROGRAMS))
        last_resorts.append([replace(command, notes=notes) for command in in_script])
        for command in in_script:
            untold += filter(IN_BRANCH.fullmatch, command.argv[:1])
    server = _first_server(descriptions, source)
    if server is None:
        server = _first_server(last_resorts, source)
        for system in PROGRAMS:
            if system in text:
                _check_is_told(system, untold, source)
    return None if server is None else _read_server(server, source, text)


def _first_server(descriptions: Sequence[Sequence[ShellCommand]], source: str) -> Server | None:
    """Return the server of the first description that has one. Raises UserError as `_server_in`."""
    for commands in descriptions:
        server = _server_in(commands, source)
        if server is not None:
            return server
    return None


def _server_in(commands: Sequence[ShellCommand], source: str) -> Server | None:
    """Return the server that one of several commands starts; None: none does. Raises UserError for
    several servers, and for a command with open quotes.
    """
    servers = dict[tuple[str, ...], Server]()
    for command in commands:
        for server in servers_of(command):
            # A shell's trace (set -x) has a command once more.
            servers.setdefault(tuple(server.arguments), server)
    if len(servers) > 1:
        system = next(iter(servers.values())).system
        raise UserError(
            f"{source} has the commands of {len(servers)} servers; state the one whose run it "
            f"is as task.server='{_beginning_of(system)} ...'"
        )
    for server in servers.values():
        if server.command.has_open_quotes:
            raise UserError(f"{source} can't be read (a quote is open); close its quotes")
        return server
    return None


def _read_server(server: Server, source: str, text: str) -> Statement:
    """Read a command that starts a server, and the version that the text around it installs."""
    system = server.system
    behind = takewhile(lambda word: SHELL.match(word) is None, server.arguments)
    arguments, unread = _arguments_of(system, list(behind))
    not_read = [f"{' '.join(unread)} (no flag stands before it)"] if unread else []
    image = IMAGE_TAG.search(server.command.image)
    if image is not None and f"/{image[1]}".endswith(TAGGED_BY_VERSION):
        arguments["version"] = image[2]
    elif image is not None:
        not_read.append(f"{image[0]} (its tag may be no version of {system})")
    installed = sorted(set(re.findall(PACKAGES[system] + PINNED, COMMENT.sub("", text))))
    if len(installed) == 1:
        arguments = {"version": installed[0], **arguments}
    elif installed and "version" not in arguments:
        not_read.append(f"{system} {' and '.join(installed)} (several are installed)")
    environment = _environment(server.command.variables)
    if system == "vllm":
        arguments = {**_of_config_file(arguments), **arguments}
    arguments = {**OTHER_DEFAULTS.get(system, {}), **arguments, **environment}
    arguments, unset = _without_unset(system, arguments)
    _check_is_told(system, [*unset, *unread], source)
    statement = read_arguments(system, arguments, source, is_typed=True, is_complete=True)
    not_simulated = [*statement.not_simulated, *unset, *not_read, *server.command.notes]
    statement = replace(statement, not_simulated=not_simulated)
    if system != "vllm":
        return statement
    switch = environment.get(V0_SWITCH)
    if switch is None:
        return with_rules_of_version(statement)
    if switch == "0":
        return with_rules_of_v0(statement)
    return statement


def _without_unset(
    system: str, arguments: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return arguments without those whose value, which may change the times, is a variable that
    nothing sets, and a note of each.
    """
    filled_in = dict[str, object]()
    notes = list[str]()
    for name, value in arguments.items():
        if isinstance(value, Mapping):  # as of -cc.cudagraph_mode=$MODE
            filled_in[name], of_keys = _without_unset(system, value)
            notes += [f"{name}.{note}" for note in of_keys]
            continue
        # A list with one such word is not taken at all: the others may be half of what was meant.
        values = value if isinstance(value, list) else [value]
        text = " ".join(map(str, values))
        is_output = OUTPUT.search(text) is not None
        is_told = VARIABLE.search(f"{name} {text}") is None and not is_output
        row = find(system, name)
        if is_told or (row is not None and row.setting == NO_EFFECT):
            filled_in[name] = value
            continue
        reason = "only a run of it tells" if is_output else "nothing here sets the variable"
        notes.append(f"{name}={text} ({reason})")
    return filled_in, notes


def _check_is_told(system: str, notes: Sequence[str], source: str) -> None:
    """Raise UserError for an argument that only a run of a script tells."""
    for note in notes:
        line = LINE.search(note)
        branch = IN_BRANCH.search(note)
        if line is not None:
            name, separator, _ = note[: line.start()].partition("=")
            if not separator:
                name = "an argument"
            reason = f", line {line[1]}: {name} is computed by the script"
        elif branch is not None:
            reason = f": {branch[1]} is set in a branch or a loop of the script"
        else:
            continue
        raise UserError(
            f"{source}{reason}, which is not run here; state the command with its values as "
            f"task.server='{_beginning_of(system)} ...'"
        )


def _beginning_of(system: str) -> str:
    """Return how a command begins that starts a server."""
    flag = "--model-path " if system == "sglang" else ""
    return f"{' '.join(PROGRAM_WORDS[system])} {flag}MODEL"


def _in_python(calls: Sequence[PythonCall]) -> tuple[list[ShellCommand], list[ShellCommand]]:
    """Return the commands that calls in a script of Python's have as lists of words, as text, or as
    arguments by name; and those that its variables have.
    """
    of_calls = list[ShellCommand]()
    of_variables = list[ShellCommand]()
    for call in calls:
        commands = of_calls if call.function else of_variables
        variables = {name: str(value) for name, value in call.environment.items()}
        for system, function in PYTHON_CALLS.items():
            if function.search(f"{call.function}("):
                arguments = [*map(str, call.positional), *flags_of(call.named)]
                commands.append(ShellCommand([*PROGRAM_WORDS[system], *arguments], variables))
                break
        for value in (*call.positional, [*call.positional]):
            if isinstance(value, str) and " " in value:
                commands += commands_in(value, variables, PROGRAMS)
            elif isinstance(value, list) and len(value) > 1:
                commands.append(ShellCommand([str(word) for word in value], variables))
        for command in containers_of(call.named):
            commands.append(replace(command, variables={**variables, **command.variables}))
    return of_calls, of_variables


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
        content: object = value
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
    is_list = row is not None and row.kind == "list"
    if values[0].startswith("[") and is_list:
        return _from_json(values[0])
    # SGLang takes no words but those of flags.
    if is_list or (system == "sglang" and len(values) > 1):
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


def _environment(variables: Mapping[str, object]) -> dict[str, str]:
    """Return the variables that servers read; arrays are a script's."""
    environment = dict[str, str]()
    for name, value in variables.items():
        if ENVIRONMENT.match(f"{name}={value}") and not str(value).startswith(" "):
            environment[name] = str(value)
    return environment


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

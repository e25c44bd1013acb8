"""The command that started a server: as typed, in a script, in a description of containers
(Kubernetes, compose), or as a call of Python's.

Values are read as the servers read them: 8k is 8000, `-cc.cudagraph_mode=NONE` a part of
`compilation_config`, `--no-NAME` switches NAME off. Environment variables of a server count among
its arguments.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.python_calls import PythonCall, find_calls
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
from sarathi_lab.extensions.replay.shell import (
    ASSIGNMENT,
    CONTINUED,
    VARIABLE,
    ShellCommand,
    commands_in,
    split,
    substituted,
)

TYPED = "task.server"  # the source of what a user types
# Commands that start a server, by the words that they contain.
SERVER_COMMANDS = {
    "sglang": ("sglang.launch_server", "sglang_router.launch_server", "sglang serve"),
    "vllm": ("vllm serve", "vllm.entrypoints", "entrypoints.openai.api_server"),
}
# What images of servers have, too.
CLIENTS_AND_ROUTERS = ("launch_router", "bench_serving", "vllm bench", "sglang.bench")
PROGRAMS = ("vllm", "sglang")  # a word of each of these, and of each image
REGISTRY = r"(?:[\w.:-]+/)*"
TAG = r"(?::[\w.-]+)?(?:@\S+)?"
# Images by name: many others are called vllm, such as those of routers, and folders are, too.
OTHERS_OF_VLLM = (
    r"(?:(?:rocm|intel|nvidia|deep-learning-containers)/vllm"
    r"|rocm/vllm-dev|ascend/vllm-ascend|vllm/vllm-tpu)"
)
IMAGES = {
    "sglang": re.compile(rf"{REGISTRY}lmsysorg/sglang{TAG}"),
    "vllm": re.compile(rf"{REGISTRY}(?:vllm-openai[\w.-]*|{OTHERS_OF_VLLM}){TAG}"),
}
# An image that starts the server, so that a model may follow; others may start any program.
STARTING_IMAGE = re.compile(rf"{REGISTRY}vllm-openai[\w.-]*{TAG}")
REPLICAS, PREFILL = "replicas=", "prefill="  # words in front of a container's command
IMAGE_FLAG = "--image"  # of kubectl
ENTRYPOINT_FLAG = "--entrypoint"  # of container engines: the program that starts instead
BEHIND_FLAGS = "--"  # what follows is the container's command
# Flags of container engines whose value may have a server's name, and is no image.
NAMING = (
    *("--name", "--hostname", "-h", "--network-alias", "--label", "-l"),
    *("--volume", "-v", "--workdir", "-w"),
)
CONTAINER_ENGINES = ("docker", "podman", "nerdctl", "kubectl", "oc")
STARTING = ("run", "create", "exec")  # their commands by which one starts
PROMPTS = ("+", "$")  # of a shell's trace, of a terminal
# Words in front of a command's program.
BEFORE_PROGRAMS = (
    *("if", "then", "else", "elif", "do", "while", "until", "!", "{", *PROMPTS),
    *("time", "exec", "nohup", "sudo", "setsid", "command", "eval", "env"),
)
# Programs that may name a server and start none.
OTHER_PROGRAMS = (
    *("echo", "printf", "cat", "tail", "grep", "egrep", "ps", "pgrep", "pkill", "killall", "kill"),
    *("trap", "alias", "curl", "wget", "git", "pip", "pip3", "which", "man", "FROM"),
    *("from", "import"),
)
IMAGE_TAG = re.compile(r"([^\s=]*(?:vllm-openai|sglang)[\w.-]*):v(\d+\.\d+(?:\.\d+)?)")
# Images, or mirrors of them, whose tag is the server's version; of others it may be their own.
TAGGED_BY_VERSION = (
    *("/vllm/vllm-openai", "/vllm/vllm-openai-rocm", "/vllm/vllm-openai-cpu"),
    "/lmsysorg/sglang",
)
SCRIPTS = (
    *("launch_server", "api_server", "launch_server.py", "api_server.py"),
    "vllm.entrypoints.cli.main",
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
}
GLUED = re.compile(r"^-(tp|pp|dp|O)(\d+)$")  # a short flag and its number in one word
MODEL_NAMES = {"vllm": "model", "sglang": "model_path"}  # of the first positional argument
SHELL = re.compile(r"\d?[<>|&;#]")  # where a command ends
FLAG_PREFIXES = ("enable_", "disable_")  # of arguments that are not in the table
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
LONG_DASH = re.compile(r"^[‐-―−](?=[A-Za-z])")  # what a text editor makes of two hyphens
ENVIRONMENT = re.compile(r"^(?:--env=|-e=?)?((?:VLLM|SGLANG|SGL)_[A-Z0-9_]+)=(.*)$", re.DOTALL)
# Where a container's variables are that stand in no command: of engines, compose and Kubernetes.
# Keys of YAML whose value is a script, or several: of dstack, and of SkyPilot.
SCRIPT_KEYS = ("commands", "run")
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n[ \t]*\2[ \t]*(?:\n|$)", re.DOTALL)
DOCKERFILE = re.compile(r"^[ \t]*FROM[ \t]+\S+", re.MULTILINE)
# Behind comments, it begins with FROM or with variables of it; a script may write one elsewhere.
BEGINS_DOCKERFILE = re.compile(r"(?:\s*#.*\n|\s*\n)*[ \t]*(?:FROM|ARG)[ \t]+\S+")
INSTRUCTION = re.compile(r"^[ \t]*(FROM|ARG|ENV|ENTRYPOINT|CMD)[ \t]+(.*)$", re.MULTILINE)
VARIABLES_FILES = ("--env-file", "env_file", "envFrom")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
HELM_KEY = "vllmConfig"
# Of KServe: formats of models that its runtime serves with vLLM, and a variable with arguments.
FORMATS_OF_VLLM = ("vLLM", "huggingface")
ADDITIONAL_ARGS, HUB = "VLLM_ADDITIONAL_ARGS", "hf://"
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
    for system, function in PYTHON_CALLS.items():
        calls = find_calls(text, function)
        if calls:
            _check_is_one(calls, source)
            return _read_call(system, calls[0], source)
    in_containers = _in_containers(text)
    in_documents = list[ShellCommand]()
    for document in DOCUMENT.finditer(text):  # as for kubectl apply
        in_documents += _in_containers(document[3])
    for commands in (in_containers, in_documents, _in_list(text), _in_dockerfile(text)):
        servers = [command for command in commands if _is_of_server(command.argv)]
        if servers:
            _check_is_one(servers, source)
            return _read_command(servers[0], source)
    if in_containers or BEGINS_DOCKERFILE.match(text):
        return None  # an image alone starts no server, nor does an earlier stage
    servers = _servers_in(text, {}, source)
    if not servers:
        return None
    return _read_command(servers[0], source)


def _is_of_server(argv: Sequence[str]) -> bool:
    """Return whether a container's or a list's command starts a server: its image may also run a
    script that starts something else, such as a worker of another container's server.
    """
    if _system_of(argv) is None:
        return False
    for position, word in enumerate(argv[:-2]):
        is_shell = word.rpartition("/")[2] in SHELLS
        if is_shell and argv[position + 1].endswith("c"):  # -c, or joined to others as in -lc
            commands = commands_in(argv[position + 2], {}, PROGRAMS)
            return any(_starts_server(command.argv) for command in commands)
    return True


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
    unread = list(call.unread)
    for position, value in enumerate(call.positional):
        if position == 0:
            arguments[MODEL_NAMES[system]] = value
        else:
            unread.append(f"argument {position + 1}")
    is_typed = source == TYPED  # else in a log, with all defaults
    statement = read_arguments(
        system,
        arguments,
        source,
        is_typed=is_typed,
        is_dump=not is_typed,
        is_complete=not unread,
    )
    not_read = [f"{argument} (its values are not here)" for argument in unread]
    return replace(statement, not_simulated=[*statement.not_simulated, *not_read])


def _read_command(command: ShellCommand, source: str) -> Statement:
    """Read a command of a known server."""
    command = _inner_command(command, source)
    argv = command.argv
    system = _system_of(argv)
    assert system is not None, "asked for by the caller"
    start = _end_of_command(system, argv)
    in_front = argv[:start]  # the program, and what an engine of containers is told
    behind = takewhile(lambda word: SHELL.match(word) is None, argv[start:])
    arguments, unread = _arguments_of(system, list(behind))
    environment = _environment(in_front, command.variables)
    image = IMAGE_TAG.search(" ".join(in_front))
    is_tagged_by_version = image is not None and f"/{image[1]}".endswith(TAGGED_BY_VERSION)
    if image is not None and is_tagged_by_version:
        arguments["version"] = image[2]
    arguments = {**_of_config_file(arguments), **arguments, **environment}
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
        if VARIABLE.search(text) is None:
            filled_in[name] = value
            continue
        row = find(system, name)
        if row is None or row.setting != NO_EFFECT:
            notes.append(f"{name}={text} (nothing here sets the variable)")
    return filled_in, notes


# -- where a command stands ------------------------------------------------------------------------


def _in_list(text: str) -> list[ShellCommand]:
    """Return the command that is a list of words, in JSON or Python's."""
    if not text.lstrip().startswith("["):
        return []
    try:
        argv = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return []
    if not isinstance(argv, list):
        return []
    return [ShellCommand([str(word) for word in argv])]


def _servers_in(script: str, variables: Mapping[str, str], source: str) -> list[ShellCommand]:
    """Return the command of a script that starts a server, or none. Raises UserError for several,
    and for one with open quotes.
    """
    servers = list[ShellCommand]()
    texts = set[str]()
    for command in commands_in(script, variables, PROGRAMS):
        # A shell's trace (set -x) has a command once more.
        text = " ".join(word for word in command.argv if word not in PROMPTS)
        if _starts_server(command.argv) and text not in texts:
            servers.append(command)
            texts.add(text)
    _check_is_one(servers, source)
    if any(server.has_open_quotes for server in servers):
        raise UserError(f"{source} can't be read (a quote is open); close its quotes")
    return servers


def _starts_server(argv: Sequence[str]) -> bool:
    """Return whether a command starts a server, and does not only name one."""
    system = _system_of(argv)
    if system is None:
        return False
    if _end_of_command(system, argv) == 0:  # at most within a word, as in bash -c 'vllm serve'
        texts = [word for word in argv if " " in word]
        inner = [command.argv for text in texts for command in commands_in(text, {}, PROGRAMS)]
        if not any(map(_starts_server, inner)):
            return False
    for position, word in enumerate(argv):
        # As in PID=$(pgrep -f 'vllm serve').
        program = re.split(r"[$(`]+", word)[-1]
        is_assignment = ASSIGNMENT.fullmatch(program) is not None
        if is_assignment or word in BEFORE_PROGRAMS or word.startswith("-"):
            continue
        name = program.rpartition("/")[2]
        if name in CONTAINER_ENGINES:
            return any(starting in argv[position:] for starting in STARTING)
        return name not in OTHER_PROGRAMS
    return False


def _in_containers(text: str) -> list[ShellCommand]:
    """Return the commands of the containers that YAML describes."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        return []
    return [command for document in documents for command in _of_containers(document, 1)]


@dataclass
class Stage:
    """A stage of a Dockerfile, which a later one may begin from.

    Attributes:
        image: Its base.
        variables: Values of ENV and ARG.
        entrypoint: Words of ENTRYPOINT.
        command: Words of CMD.
    """

    image: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def _in_dockerfile(text: str) -> list[ShellCommand]:
    """Return the command of the image that a Dockerfile makes, which is its last stage."""
    if DOCKERFILE.search(text) is None:
        return []
    stages = dict[str, Stage]()  # by their names
    stage = Stage()
    before_stages = dict[str, str]()  # ARGs that a FROM may read
    for instruction, content in INSTRUCTION.findall(CONTINUED.sub(" ", text)):
        if instruction == "FROM":
            if not stage.image:
                before_stages = stage.variables
            stage = _begin_stage(substituted(content, before_stages), stages)
        elif instruction in ("ENV", "ARG"):
            stage.variables |= _variables_of_docker(content)
        else:
            words = _in_list(content)
            argv = words[0].argv if words else split(content)
            if instruction == "ENTRYPOINT":
                stage.entrypoint = argv
            else:
                stage.command = argv
    argv = [stage.image, *stage.entrypoint, *stage.command]
    return [ShellCommand(argv, stage.variables)]


def _begin_stage(content: str, stages: dict[str, Stage]) -> Stage:
    """Begin a stage from an image, or from an earlier stage, and note it by its name.

    Args:
        content: What stands behind FROM: flags, the base, maybe AS and a name.
        stages: Earlier ones by name.
    """
    words = [word for word in content.split() if not word.startswith("-")]
    base = "".join(words[:1])
    stage = Stage(base)
    if base.lower() in stages:
        earlier = stages[base.lower()]
        stage = replace(earlier, variables=dict(earlier.variables))
    if len(words) > 2:  # BASE AS NAME
        stages[words[2].lower()] = stage
    return stage


def _variables_of_docker(content: str) -> dict[str, str]:
    """Read NAME=value of several variables, or NAME and a value."""
    words = split(content)
    if not words:
        return {}
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return _variables_of(words)


def _of_containers(content: object, replicas: int) -> Iterator[ShellCommand]:
    if isinstance(content, list):
        for entry in content:
            yield from _of_containers(entry, replicas)
    if not isinstance(content, Mapping):
        return
    replicas = _replicas_of(content, replicas)
    marks = [f"{REPLICAS}{replicas}"] if replicas > 1 else []
    if isinstance(content.get(HELM_KEY), Mapping):
        yield ShellCommand([*marks, "vllm", "serve", *_argv_of_helm(content)])
        return
    if content.get("kind") == "LLMInferenceService":
        yield _of_llm_service(as_object(content.get("spec")))
        return
    if as_object(content.get("modelFormat")).get("name") in FORMATS_OF_VLLM:
        argv = ["vllm", "serve", _model_of_kserve(content), *_argv_of(content.get("args"))]
        yield ShellCommand([*marks, *argv], _variables_of(content.get("env")))
        return
    if any(key in content for key in ("command", "args", "entrypoint")):
        argv = [name for name in VARIABLES_FILES if content.get(name)]
        argv += marks
        argv.append(str(content.get("image", "")))
        for key in ("entrypoint", "command", "args"):
            argv += _argv_of(content.get(key))
        variables = _variables_of(content.get("env")) | _variables_of(content.get("environment"))
        yield ShellCommand(argv, variables)
        return
    variables = _variables_of(content.get("env")) | _variables_of(content.get("envs"))
    image = str(content.get("image", ""))
    for key in SCRIPT_KEYS:
        script = content.get(key)
        if isinstance(script, list):
            script = "\n".join(map(str, script))
        if isinstance(script, str):
            for command in commands_in(script, variables, PROGRAMS):
                if _starts_server(command.argv):
                    yield ShellCommand([*marks, image, *command.argv], command.variables)
    for value in content.values():
        yield from _of_containers(value, replicas)


def _replicas_of(content: Mapping[str, object], around: int) -> int:
    """Return how many replicas an object states, else those stated `around` it: Kubernetes' and
    dstack's, compose's, Helm's, SkyPilot's or KServe's fewest.
    """
    places = (
        content.get("replicas"),
        as_object(content.get("deploy")).get("replicas"),
        content.get("scale"),
        content.get("replicaCount"),
        as_object(content.get("service")).get("replicas"),
        content.get("minReplicas"),
    )
    return next((number for number in places if isinstance(number, int)), around)


def _of_llm_service(spec: Mapping[str, object]) -> ShellCommand:
    """Return the command of a KServe service of vLLM's, whose first container has its image."""
    containers = as_object(spec.get("template")).get("containers")
    container: Mapping[str, object] = {}
    if isinstance(containers, list) and containers:
        container = as_object(containers[0])
    variables = _variables_of(container.get("env"))
    argv = list[str]()
    replicas = spec.get("replicas")
    if isinstance(replicas, int) and replicas > 1:
        argv.append(f"{REPLICAS}{replicas}")
    if spec.get("prefill"):
        argv.append(f"{PREFILL}{as_object(spec['prefill']).get('replicas', 1)}")
    model = _model_of_kserve(as_object(spec.get("model")))
    argv += [str(container.get("image", "")), "vllm", "serve", model]
    for kind, number in as_object(spec.get("parallelism")).items():
        if kind in ("tensor", "pipeline", "data"):
            argv += [f"--{kind}-parallel-size", str(number)]
    argv += _argv_of(container.get("args"))
    argv += split(variables.pop(ADDITIONAL_ARGS, ""))
    return ShellCommand(argv, variables)


def _model_of_kserve(model: Mapping[str, object]) -> str:
    """Return a model's hub id, or where it is kept."""
    uri = str(model.get("uri") or model.get("storageUri") or "")
    if uri.startswith(HUB):
        return uri.removeprefix(HUB)
    return str(model.get("name") or uri)


def _argv_of_helm(content: Mapping[str, object]) -> list[str]:
    """Return the words of a server in the values of vLLM's production stack: `vllmConfig` has the
    flags in camel case.
    """
    argv = [str(content.get("modelURL", ""))]
    for name, value in as_object(content[HELM_KEY]).items():
        if name == "extraArgs":
            argv += _argv_of(value)
            continue
        flag = re.sub(r"(?=[A-Z])", "-", str(name)).lower()
        if isinstance(value, bool):
            switch = "" if value else "no-"
            argv.append(f"--{switch}{flag}")
        elif value is not None:
            argv += [f"--{flag}", str(value)]
    return argv


def _argv_of(value: object) -> list[str]:
    """Return the words of a command, which is text or a list."""
    if isinstance(value, str):
        return split(CONTINUED.sub(" ", value))
    if isinstance(value, list):
        return [str(word) for word in value]
    return []


def _variables_of(value: object) -> dict[str, str]:
    """Return a container's environment: an object, or a list of objects or of assignments."""
    if isinstance(value, Mapping):
        return {str(name): str(content) for name, content in value.items()}
    variables = dict[str, str]()
    if not isinstance(value, list):
        return variables
    for entry in value:
        if isinstance(entry, Mapping) and "value" in entry:
            variables[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, content = entry.partition("=")
            variables[name] = content
    return variables


# -- which command it is ---------------------------------------------------------------------------


def _system_of(argv: Sequence[str]) -> str | None:
    """Return the server that a command starts, by the words or the image in it."""
    text = " ".join(argv)
    for system, signs in SERVER_COMMANDS.items():
        if any(sign in text for sign in signs):
            return system
    if any(sign in text for sign in CLIENTS_AND_ROUTERS):
        return None
    return next((system for system in IMAGES if _image_in(system, argv) is not None), None)


def _image_in(system: str, argv: Sequence[str]) -> int | None:
    """Return the position of a server's image among the words, where a container of it starts
    the server; None: there is none.
    """
    for position, word in enumerate(argv):
        image = word.removeprefix(f"{IMAGE_FLAG}=")
        if IMAGES[system].fullmatch(image) is None or not _starts_container(argv, position):
            continue
        behind = argv[_behind_image(argv, position) :]
        has_flags = bool(behind) and behind[0].startswith("-")
        if has_flags or STARTING_IMAGE.fullmatch(image) is not None:
            return position
    return None


def _starts_container(argv: Sequence[str], position: int) -> bool:
    """Return whether the word at `position` is where a container's image stands: in a description,
    or in the command of an engine that does not replace its program.
    """
    in_front = argv[:position]
    if in_front and in_front[-1] in NAMING:
        return False
    program = _entrypoint_in(in_front)
    if program and not program.rpartition("/")[2].startswith(PROGRAMS):
        return False
    if argv[position].startswith(IMAGE_FLAG) or in_front[-1:] == [IMAGE_FLAG]:
        return True
    is_in_command = any(word in STARTING for word in in_front)
    return is_in_command or all(map(_is_no_program, in_front))


def _entrypoint_in(argv: Sequence[str]) -> str:
    """Return the program that a container is told to start instead of its image's; "": none."""
    for position, word in enumerate(argv):
        flag, has_value, program = word.partition("=")
        if flag != ENTRYPOINT_FLAG:
            continue
        if has_value:
            return program
        return "".join(argv[position + 1 : position + 2])
    return ""


def _is_no_program(word: str) -> bool:
    """Return whether a word stands in front of a description's image, or sets a variable."""
    marks = (*VARIABLES_FILES, REPLICAS, PREFILL)
    return word == "" or word.startswith(marks) or ASSIGNMENT.fullmatch(word) is not None


def _behind_image(argv: Sequence[str], image: int) -> int:
    """Return where the words of a container begin, behind the one at `image` and flags of kubectl's
    own.
    """
    has_flag = argv[image].startswith(IMAGE_FLAG) or IMAGE_FLAG in argv[:image]
    if has_flag and BEHIND_FLAGS in argv[image:]:
        return argv.index(BEHIND_FLAGS, image) + 1
    return image + 1


def _end_of_command(system: str, argv: Sequence[str]) -> int:
    """Return where the arguments begin, behind the words that name the server."""
    end = 0
    for sign in SERVER_COMMANDS[system]:
        program = sign.split()
        for start in range(len(argv) - len(program) + 1):
            named = argv[start : start + len(program)]
            is_command = named[0].rpartition("/")[2] == program[0] and named[1:] == program[1:]
            if is_command:
                end = max(end, start + len(program))
                break
    scripts = [
        position
        for position, word in enumerate(argv)
        if word.endswith(SCRIPTS) and not word.startswith("-")
    ]
    if scripts:
        end = max(end, scripts[0] + 1)
    image = _image_in(system, argv)
    if image is not None:
        end = max(end, _behind_image(argv, image))
    while end < len(argv) and argv[end] in ("serve", system):
        end += 1
    return end


# -- its arguments ---------------------------------------------------------------------------------


def _arguments_of(system: str, argv: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Return the arguments of a command, by the names of the table, and words of none."""
    remaining = [LONG_DASH.sub("--", word) for word in argv]
    arguments = dict[str, object]()
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


def _environment(argv: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the servers' own variables that are set before the command; arrays are a script's."""
    values = {name: value for name, value in variables.items() if not value.startswith(" ")}
    assignments = [*argv, *(f"{name}={value}" for name, value in values.items())]
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

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.python_scripts import PythonScript, parsed
from sarathi_lab.extensions.replay.server_arguments import (
    FALSE,
    FLAGS,
    NO_EFFECT,
    TRUE,
    Statement,
    as_object,
    find,
    read_arguments,
    table,
    with_rules_of_v0,
    with_rules_of_version,
)
from sarathi_lab.extensions.replay.server_containers import containers_in
from sarathi_lab.extensions.replay.server_programs import (
    ENVIRONMENT_NAME,
    PROGRAM_WORDS,
    Server,
    notes_of_files,
    servers_of,
)
from sarathi_lab.extensions.replay.shell import (
    COMMENT,
    LINE,
    PROGRAMS,
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
# Defaults of arguments that are otherwise than their policy's here, and so are named.
OTHER_DEFAULTS: dict[str, dict[str, object]] = {"trtllm": {"enable_chunked_prefill": "false"}}
GLUED = re.compile(r"^-(tp|pp|dp|O)(\d+)$")  # a short flag and its number in one word
REDIRECTION = re.compile(r"\d?[<>|&;#]")  # behind which no argument stands
FLAG_PREFIXES = ("enable_", "disable_")  # of arguments that are not in the table
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
LONG_DASH = re.compile(r"^[‐-―−](?=[A-Za-z])")  # what a text editor makes of two hyphens
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n[ \t]*\2[ \t]*(?:\n|$)", re.DOTALL)
# Variables in a unit of systemd.
UNIT_VARIABLES = re.compile(r"^Environment=", re.MULTILINE)
UNIT_FILE = re.compile(r"^EnvironmentFile(?==)", re.MULTILINE)
FLAG_VALUE = re.compile(rf"(?i:{'|'.join((*TRUE, *FALSE))})|{LINE.pattern}")
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


def find_command(text: str, source: str) -> Statement | None:
    """Read the command that starts a server in `text`; None where there is none. Raises UserError
    for several of them, and a misspelt argument.
    """
    server = _server_in(_commands(text, source), source)
    return None if server is None else _read_server(server, source, text)


def _commands(text: str, source: str) -> list[ShellCommand]:
    """List the commands in a description of containers, a script of Python's, or one of a shell's.
    Raises UserError for one that only a run of a shell's script tells.
    """
    in_containers = containers_in(text)
    if in_containers or text.lstrip().startswith("{"):
        return in_containers
    script = parsed(text)
    if script is not None:
        return [*PythonScript(script, text).commands()]
    in_documents = list[ShellCommand]()
    for document in DOCUMENT.finditer(text):  # as for kubectl apply
        in_documents += containers_in(document[3])
    commands = [*commands_in(UNIT_VARIABLES.sub("export ", text), {})]
    for command in commands:
        program = "".join(command.argv[:1])
        for system in PROGRAMS:
            if LINE.fullmatch(program) and system in text:
                _check_is_told(system, [program], source)
    notes = notes_of_files(UNIT_FILE.findall(text))
    return in_documents + [replace(command, notes=notes) for command in commands]


def _server_in(commands: Iterable[ShellCommand], source: str) -> Server | None:
    """Return the server that one of several commands starts; None: none does. Raises UserError for
    several servers, and for a command with open quotes.
    """
    servers = dict[tuple[str, ...], Server]()
    for command in commands:
        for started in servers_of(command):
            # A shell's trace (set -x) has a command once more.
            servers.setdefault(tuple(started.arguments), started)
    server = next(iter(servers.values()), None)
    if server is None:
        return None
    if len(servers) > 1:
        raise UserError(
            f"{source} has the commands of {len(servers)} servers; state the one whose run it "
            f"is as task.server='{_example(server.system)}'"
        )
    if server.command.has_open_quotes:
        raise UserError(f"{source} can't be read (a quote is open); close its quotes")
    return server


def _example(system: str) -> str:
    """Return how a command begins that starts a server."""
    flag = "--model-path " if system == "sglang" else ""
    return f"{' '.join(PROGRAM_WORDS[system])} {flag}MODEL ..."


def _read_server(server: Server, source: str, text: str) -> Statement:
    """Read a command that starts a server, and the version that the text around it installs."""
    system = server.system
    behind = takewhile(lambda word: REDIRECTION.match(word) is None, server.arguments)
    typed, unread = _arguments_of(system, list(behind))
    versions, notes = _versions(server, text)
    environment = {
        name: value
        for name, value in server.command.variables.items()
        if ENVIRONMENT_NAME.fullmatch(name)
    }
    arguments = {**versions, **OTHER_DEFAULTS.get(system, {}), **typed, **environment}
    _check_is_told(system, [*unread, *_effective(system, arguments)], source)
    arguments, unset = _without_unset(system, arguments)
    statement = read_arguments(system, arguments, source, is_typed=True, is_complete=True)
    if unread:
        unset.append(f"{' '.join(unread)} (no flag stands before it)")
    not_simulated = [*statement.not_simulated, *unset, *notes, *server.command.notes]
    statement = replace(statement, not_simulated=not_simulated)
    switch = environment.get(V0_SWITCH)
    if system != "vllm" or switch == "1":
        return statement
    if switch == "0":
        return with_rules_of_v0(statement)
    return with_rules_of_version(statement)


def _versions(server: Server, text: str) -> tuple[dict[str, object], list[str]]:
    """Return the version that a server's image is tagged by, or else the text installs; and what
    may be one, and may not.
    """
    image = IMAGE_TAG.search(server.command.image)
    if image is not None and f"/{image[1]}".endswith(TAGGED_BY_VERSION):
        return {"version": image[2]}, []
    notes = list[str]()
    if image is not None:
        notes.append(f"{image[0]} (its tag may be no version of {server.system})")
    installed = sorted(set(re.findall(PACKAGES[server.system] + PINNED, COMMENT.sub("", text))))
    if len(installed) == 1:
        return {"version": installed[0]}, notes
    if installed:
        notes.append(f"{server.system} {' and '.join(installed)} (several are installed)")
    return {}, notes


def _effective(system: str, arguments: Mapping[str, object]) -> list[str]:
    """Return the arguments that may change the times, with their values as text."""
    shown = list[str]()
    for name, value in arguments.items():
        row = find(system, name)
        if row is None or row.setting != NO_EFFECT:
            shown.append(f"{name}={value}")
    return shown


def _check_is_told(system: str, arguments: Sequence[str], source: str) -> None:
    """Raise UserError for an argument that only a run of a script tells."""
    for argument in arguments:
        line = LINE.search(argument)
        if line is None:
            continue
        name = argument[: line.start()].partition("=")[0] or "an argument"
        raise UserError(
            f"{source}, line {line[1]}: {name} is computed by the script, which is not run here; "
            f"state the command with its values as task.server='{_example(system)}'"
        )


def _without_unset(
    system: str, arguments: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return arguments without those whose value, which may change the times, has a variable that
    nothing sets, and a note of each.
    """
    filled_in = dict(arguments)
    notes = list[str]()
    for argument in _effective(system, arguments):
        if VARIABLE.search(argument):
            del filled_in[argument.partition("=")[0]]
            notes.append(f"{argument} (nothing here sets the variable)")
    return filled_in, notes


# -- its arguments ---------------------------------------------------------------------------------


def _arguments_of(system: str, argv: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Return the arguments of a command, by the names of the table, and words of none."""
    remaining = [LONG_DASH.sub("--", word) for word in argv]
    arguments = dict[str, object]()
    unread = list[str]()
    while remaining:
        word = remaining.pop(0)
        if word.startswith("-"):
            _read_flag(system, word, remaining, arguments)
        elif system != "sglang" and "model" not in arguments:
            arguments["model"] = word  # which the others take without a flag
        elif word:
            unread.append(word)
    return arguments, unread


def _read_flag(system: str, word: str, remaining: list[str], arguments: dict[str, object]) -> None:
    """Add the argument of a flag, whose values may be the next of the `remaining` words."""
    # -tp8 is -tp=8; -cc.mode=3 is a key of the object -cc.
    flag, has_value, value = GLUED.sub(r"-\1=\2", word).partition("=")
    flag, _, key = flag.partition(".")
    name, is_on = _name_of(system, flag)
    content: object = value
    if not has_value:
        content = _take_value(system, name, remaining, is_on=is_on)
    if name == "optimization_level" and (key or str(content).startswith("{")):
        name = "compilation_config"  # which -O was short for
    if key:
        content = {**as_object(arguments.get(name)), key: _from_json(str(content))}
    arguments[name] = content


def _name_of(system: str, flag: str) -> tuple[str, bool]:
    """Return the argument that a flag is of, and whether it switches it on."""
    for row in table(system).values():
        if flag == row.short:
            return row.argument.removesuffix("*"), True
    name = flag.lstrip("-").replace("-", "_")
    positive = name.removeprefix("no_")
    if positive != name and find(system, name) is None and find(system, positive) is not None:
        return positive, False
    return name, True


def _take_value(system: str, name: str, remaining: list[str], *, is_on: bool) -> object:
    """Take the words behind a flag that are its value; of none, whether it is on."""
    row = find(system, name)
    kind = row.kind if row is not None else ""
    is_flag = kind in FLAGS or (not kind and name.startswith(FLAG_PREFIXES))
    following = list(takewhile(_is_value, remaining))
    if not following:
        return is_on
    if is_flag and not FLAG_VALUE.fullmatch(following[0]):
        return is_on  # and the next word is the model
    if kind != "list" or following[0].startswith("["):
        del remaining[0]  # others may follow, such as the model
        return _from_json(following[0]) if kind == "list" else following[0]
    del remaining[: len(following)]
    return [int(value) if value.isdigit() else value for value in following]


def _is_value(word: str) -> bool:
    """Return whether a word is no flag; a negative number is none."""
    return not word.startswith("-") or NEGATIVE.fullmatch(word) is not None


def _from_json(text: str) -> object:
    """Return what text is as JSON; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text

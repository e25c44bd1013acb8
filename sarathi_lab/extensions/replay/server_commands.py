"""The command that started a server: as typed, in a script, in a description of containers
(Kubernetes, compose), or as a call of Python's. Environment variables of a server count among its
arguments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.argument_table import NO_EFFECT, Arguments, find
from sarathi_lab.extensions.replay.command_arguments import CommandArguments
from sarathi_lab.extensions.replay.first_engine import with_rules_of_v0, with_rules_of_version
from sarathi_lab.extensions.replay.python_scripts import PythonScript, parsed
from sarathi_lab.extensions.replay.server_arguments import Statement, read_arguments
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
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n[ \t]*\2[ \t]*(?:\n|$)", re.DOTALL)
OBJECT = re.compile(r"\s*\{\s*[\"'}]")  # of JSON; a shell's group begins with a program
# Variables in a unit of systemd.
UNIT_VARIABLES = re.compile(r"^Environment=", re.MULTILINE)
UNIT_FILE = re.compile(r"^EnvironmentFile(?==)", re.MULTILINE)
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
            "--model-path M', or name a file of it, such as docker-compose.yml, as task.log=FILE"
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
    statement = None
    if server is not None:
        statement = _read_server(server, source, text)
    tree = parsed(text)
    if tree is not None:  # whose server may be of a program that is no literal
        script = PythonScript(tree, text)
        programs = list(script.untold_programs())
        _check_programs(text, programs, source)
    return statement


def _commands(text: str, source: str) -> list[ShellCommand]:
    """List the commands in a description of containers, a script of Python's, or one of a shell's.
    Raises UserError for one that only a run of a shell's script tells.
    """
    in_containers = containers_in(text)
    if in_containers or OBJECT.match(text):
        return in_containers
    tree = parsed(text)
    if tree is not None:
        script = PythonScript(tree, text)
        return list(script.commands())
    commands = list[ShellCommand]()
    for document in DOCUMENT.finditer(text):  # as for kubectl apply
        commands += containers_in(document[3])
    files = UNIT_FILE.findall(text)
    exporting = UNIT_VARIABLES.sub("export ", text)
    for command in commands_in(exporting, {}):
        _check_programs(text, command.argv[:1], source)
        commands.append(replace(command, notes=notes_of_files(files)))
    return commands


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
    command = CommandArguments(system, server.arguments)
    version, version_notes = _version_of(server, text)
    environment = _environment_of(server)
    arguments: dict[str, object] = {"version": version}
    arguments |= OTHER_DEFAULTS.get(system, {})
    arguments |= command.values
    arguments |= environment
    effective = _effective(system, arguments)
    _check_is_told(system, [*command.unread, *effective], source)
    notes = list[str]()
    for argument in filter(VARIABLE.search, effective):
        name = argument.partition("=")[0]
        del arguments[name]
        notes.append(f"{argument} (nothing here sets the variable)")
    if command.unread:
        notes.append(f"{' '.join(command.unread)} (no flag stands before it)")
    statement = read_arguments(system, arguments, source, is_typed=True, is_complete=True)
    not_simulated = [*statement.not_simulated, *notes, *version_notes, *server.command.notes]
    statement = replace(statement, not_simulated=not_simulated)
    if system != "vllm":
        return statement
    return _with_rules(statement, environment.get(V0_SWITCH, ""))


def _environment_of(server: Server) -> dict[str, str]:
    """Return the variables of servers that are set for one."""
    environment = dict[str, str]()
    for name, value in server.command.variables.items():
        if ENVIRONMENT_NAME.fullmatch(name):
            environment[name] = value
    return environment


def _with_rules(statement: Statement, switch: str) -> Statement:
    """Let a server of vLLM's have the rules of its engine, which a variable may switch."""
    if switch == "0":
        return with_rules_of_v0(statement)
    if switch == "1":
        return statement
    return with_rules_of_version(statement)


def _version_of(server: Server, text: str) -> tuple[str, list[str]]:
    """Return the version that a server's image is tagged by, or else the text installs, and notes
    of what may be one; "": none is told.
    """
    system = server.system
    notes = list[str]()
    image = IMAGE_TAG.search(server.command.image)
    if image is not None:
        if f"/{image[1]}".endswith(TAGGED_BY_VERSION):
            return image[2], notes
        notes.append(f"{image[0]} (its tag may be no version of {system})")
    uncommented = COMMENT.sub("", text)
    installed = re.findall(PACKAGES[system] + PINNED, uncommented)
    versions = sorted(set(installed))
    if len(versions) == 1:
        return versions[0], notes
    if versions:
        notes.append(f"{system} {' and '.join(versions)} (several are installed)")
    return "", notes


def _effective(system: str, arguments: Arguments) -> list[str]:
    """Return the arguments that may change the times, with their values as text."""
    shown = list[str]()
    for name, value in arguments.items():
        row = find(system, name)
        if row is None or row.setting != NO_EFFECT:
            shown.append(f"{name}={value}")
    return shown


def _check_programs(text: str, programs: Sequence[str], source: str) -> None:
    """Raise UserError for a program that only a run tells, in a script that has a server's."""
    for system in PROGRAMS:
        if system in text:
            _check_is_told(system, programs, source)


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

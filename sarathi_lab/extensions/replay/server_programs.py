"""Which server a command starts, by its program or by the image of a container."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_lab.extensions.replay.shell import ASSIGNMENT, ShellCommand, commands_in, substituted

END = "\0"  # of a word in a command's text, as words may have spaces
# The program that starts a server, as one word of a command or several.
SERVER_PROGRAM = re.compile(
    rf"""
    (?:^|(?<={END})) (?![-])
    (?:
        (?P<sglang> [^\s{END}]*sglang(?:_router)?\.launch_server | dynamo\.sglang
            | (?:[^\s{END}]*/)?sglang{END}serve)
      | (?P<vllm> [^\s{END}]*entrypoints\.(?:\w+\.)?api_server | dynamo\.vllm
            | vllm\.entrypoints\.cli\.main | (?:[^\s{END}]*/)?vllm{END}serve)
      | (?P<trtllm> (?:[^\s{END}]*/)?trtllm-serve (?!{END}(?:disaggregated|mm_embedding_serve)))
    )
    (?:{END}serve)? (?:{END}|$)
    """,
    re.VERBOSE,
)
PROGRAMS = ("vllm", "sglang", "trtllm")  # a word of each of these, and of each image
# The words that start a server where only its arguments are stated.
PROGRAM_WORDS = {
    "vllm": ["vllm", "serve"],
    "sglang": ["sglang", "serve"],
    "trtllm": ["trtllm-serve"],
}
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
# What images of servers have, too.
CLIENTS_AND_ROUTERS = re.compile(rf"launch_router|bench_serving|vllm{END}bench|sglang\.bench")
IMAGE_FLAG = "--image"  # of kubectl
# Of container engines: the program that starts instead of the image's.
ENTRYPOINT = re.compile(rf"(?:^|{END})--entrypoint[={END}]([^{END}]+)")
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
    *PROMPTS,
    *("time", "exec", "nohup", "sudo", "setsid", "command", "eval", "env"),
)
# Programs that may name a server and start none.
OTHER_PROGRAMS = (
    *("echo", "printf", "cat", "tail", "grep", "egrep", "ps", "pgrep", "pkill", "killall", "kill"),
    *("trap", "alias", "curl", "wget", "git", "pip", "pip3", "which", "man", "FROM"),
    *("from", "import", "sleep", "huggingface-cli", "hf"),
)
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
# Files of variables of a container: of engines, compose, Kubernetes and systemd.
VARIABLES_FILES = ("--env-file", "env_file", "envFrom", "EnvironmentFile")
ENVIRONMENT = re.compile(r"^(?:--env=|-e=?)?((?:VLLM|SGLANG|SGL)_[A-Z0-9_]+)=(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Server:
    """A command that starts a server.

    Attributes:
        system: The server's name in the table of arguments.
        arguments: The words behind its program.
        command: With the variables that are set for it.
    """

    system: str
    arguments: list[str]
    command: ShellCommand


def container(
    image: str,
    program: Sequence[str],
    arguments: Sequence[str],
    variables: Mapping[str, str],
    notes: Sequence[str] = (),
) -> ShellCommand:
    """Return the command that a container runs.

    Args:
        image: As named; its own program starts where there is no other.
        program: Words that replace the image's own program; empty: none do.
        arguments: Words behind the program.
        variables: Those of the environment.
        notes: What of the description is not simulated.
    """
    argv = [*program, *arguments]
    text = END.join(argv)
    first = "".join(argv[:1]).rpartition("/")[2]
    has_flags = first.startswith("-")
    is_other = first in (*OTHER_PROGRAMS, *SHELLS) or CLIENTS_AND_ROUTERS.search(text)
    if has_flags or not (program or is_other or SERVER_PROGRAM.search(text)):
        for system, images in IMAGES.items():
            starts = has_flags or STARTING_IMAGE.fullmatch(image)
            if starts and images.fullmatch(image):
                argv = [*PROGRAM_WORDS[system], *argv]
    return ShellCommand(argv, variables, image=image, notes=notes)


def servers_of(command: ShellCommand) -> list[Server]:
    """Return the servers that a command starts: its own, or those of a script within it, as in
    bash -c 'vllm serve MODEL'.
    """
    argv = [substituted(word, command.variables) for word in command.argv]
    if not _may_start(argv):
        return []
    command = _in_container(replace(command, argv=argv))
    argv = command.argv
    text = END.join(argv)
    program = SERVER_PROGRAM.search(text)
    if program is not None:
        in_front = text[: program.end()].split(END)
        image = command.image or " ".join(in_front)
        notes = [*command.notes, *notes_of_files(in_front)]
        variables = _with_variables(command, in_front)
        command = replace(command, image=image, notes=notes, variables=variables)
        return [Server(str(program.lastgroup), argv[len(in_front) - 1 :], command)]
    servers = list[Server]()
    for position, word in enumerate(argv):
        if " " not in word:
            continue
        variables = _with_variables(command, argv[:position])
        image = command.image or " ".join(argv[:position])
        for inner in commands_in(word, variables, PROGRAMS):
            servers += servers_of(replace(inner, image=image, notes=command.notes))
    return servers


def _may_start(argv: Sequence[str]) -> bool:
    """Return whether a command is of no program that only names a server."""
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


def _in_container(command: ShellCommand) -> ShellCommand:
    """Return the command in a container that an engine's command starts; another one as it is."""
    argv = command.argv
    for position, word in enumerate(argv):
        image = word.removeprefix(f"{IMAGE_FLAG}=")
        is_image = any(images.fullmatch(image) for images in IMAGES.values())
        if not is_image or not _is_place_of_image(word, argv[:position]):
            continue
        end = position + 1
        is_of_kubectl = word != image or IMAGE_FLAG in argv[:end]
        if is_of_kubectl and BEHIND_FLAGS in argv[end:]:
            end = argv.index(BEHIND_FLAGS, end) + 1
        in_front = argv[:end]
        notes = [*command.notes, *notes_of_files(in_front)]
        program = ENTRYPOINT.findall(END.join(in_front))
        variables = _with_variables(command, in_front)
        return container(image, program, argv[end:], variables, notes)
    return command


def _is_place_of_image(word: str, in_front: Sequence[str]) -> bool:
    """Return whether the word behind others is where a container's image stands."""
    before = "".join(in_front[-1:])
    if before in NAMING:
        return False
    if IMAGE_FLAG in (before, word.partition("=")[0]):
        return True
    is_program = all(map(ASSIGNMENT.fullmatch, in_front))
    return is_program or not set(STARTING).isdisjoint(in_front)


def notes_of_files(names: Sequence[str]) -> list[str]:
    """Note the files of variables that are named."""
    notes = list[str]()
    for name in VARIABLES_FILES:
        if any(word.startswith(name) for word in names):
            notes.append(f"{name} (its variables are not here)")
    return notes


def _with_variables(command: ShellCommand, argv: Sequence[str]) -> dict[str, str]:
    """Return a command's variables, and those of servers that words in front of it set."""
    variables = dict(command.variables)
    for word in argv:
        match = ENVIRONMENT.match(word)
        if match is not None:
            variables[match[1]] = match[2]
    return variables

"""Which server a command starts, by its program or the image of a container."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sarathi_lab.extensions.replay.shell import ASSIGNMENT, commands_in

# Commands that start a server, by the words that they contain.
SERVER_COMMANDS = {
    "sglang": (
        *("sglang.launch_server", "sglang_router.launch_server", "sglang serve"),
        "dynamo.sglang",
    ),
    "vllm": ("vllm serve", "vllm.entrypoints", "entrypoints.openai.api_server", "dynamo.vllm"),
    "trtllm": ("trtllm-serve",),
}
# What images and commands of servers have, too.
CLIENTS_AND_ROUTERS = (
    *("launch_router", "bench_serving", "vllm bench", "sglang.bench"),
    *("trtllm-serve disaggregated", "trtllm-serve mm_embedding_serve"),
)
PROGRAMS = ("vllm", "sglang", "trtllm")  # a word of each of these, and of each image
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
    *("from", "import", "sleep", "huggingface-cli", "hf"),
)
SCRIPTS = (
    *("launch_server", "api_server", "launch_server.py", "api_server.py"),
    "vllm.entrypoints.cli.main",
)
# Files of variables of a container: of engines, compose, Kubernetes and systemd.
VARIABLES_FILES = ("--env-file", "env_file", "envFrom", "EnvironmentFile")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")


def system_of(argv: Sequence[str]) -> str | None:
    """Return the server that a command starts, by the words or the image in it."""
    text = " ".join(argv)
    for system, signs in SERVER_COMMANDS.items():
        if any(sign in text for sign in signs):
            return system
    if any(sign in text for sign in CLIENTS_AND_ROUTERS):
        return None
    return next((system for system in IMAGES if _image_in(system, argv) is not None), None)


def starts_server(argv: Sequence[str]) -> bool:
    """Return whether a command starts a server, and does not only name one."""
    system = system_of(argv)
    if system is None:
        return False
    if end_of_command(system, argv) == 0:  # at most within a word, as in bash -c 'vllm serve'
        texts = [word for word in argv if " " in word]
        inner = [command.argv for text in texts for command in commands_in(text, {}, PROGRAMS)]
        if not any(map(starts_server, inner)):
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


def is_of_server(argv: Sequence[str]) -> bool:
    """Return whether a container's or a list's command starts a server: its image may also run a
    script that starts something else, such as a worker of another container's server.
    """
    if system_of(argv) is None:
        return False
    for position, word in enumerate(argv[:-2]):
        is_shell = word.rpartition("/")[2] in SHELLS
        if is_shell and argv[position + 1].endswith("c"):  # -c, or joined to others as in -lc
            commands = commands_in(argv[position + 2], {}, PROGRAMS)
            return any(starts_server(command.argv) for command in commands)
    return True


def end_of_command(system: str, argv: Sequence[str]) -> int:
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


def _image_in(system: str, argv: Sequence[str]) -> int | None:
    """Return the position of a server's image among the words, where a container of it starts
    the server; None: there is none.
    """
    for position, word in enumerate(argv):
        image = word.removeprefix(f"{IMAGE_FLAG}=")
        if (
            system not in IMAGES
            or IMAGES[system].fullmatch(image) is None
            or not _starts_container(argv, position)
        ):
            continue
        behind = argv[_behind_image(argv, position) :]
        if "".join(behind[:1]).rpartition("/")[2] in (*OTHER_PROGRAMS, *SHELLS):
            continue
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
    marks = (*VARIABLES_FILES, REPLICAS, PREFILL, ENTRYPOINT_FLAG)
    return word == "" or word.startswith(marks) or ASSIGNMENT.fullmatch(word) is not None


def _behind_image(argv: Sequence[str], image: int) -> int:
    """Return where the words of a container begin, behind the one at `image` and flags of kubectl's
    own.
    """
    has_flag = argv[image].startswith(IMAGE_FLAG) or IMAGE_FLAG in argv[:image]
    if has_flag and BEHIND_FLAGS in argv[image:]:
        return argv.index(BEHIND_FLAGS, image) + 1
    return image + 1

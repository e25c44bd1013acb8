"""Which server a command starts, by its program or by the image of a container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_lab.extensions.replay.shell import ShellCommand, commands_in, substituted

END = "\0"  # of a word in a command's text, as words may have spaces
# The program that starts a server, as one word of a command or several.
SERVER_PROGRAM = re.compile(
    rf"""
    (?:^|(?<={END})) (?![-])
    (?:
        (?P<sglang> [^\s{END}]*sglang(?:_router)?\.launch_server | dynamo\.sglang
            | (?:[^\s{END}]*/)?sglang{END}serve)
      | (?P<vllm> [^\s{END}]*entrypoints\.(?:\w+\.)?api_server | dynamo\.vllm
            | vllm\.entrypoints\.cli\.main{END}serve
            | (?:[^\s{END}]*/)?vllm{END}serve)
      | (?P<trtllm> (?:[^\s{END}]*/)?trtllm-serve (?!{END}(?:disaggregated|mm_embedding_serve)))
    )
    (?:{END}serve)? (?:{END}|$)
    """,
    re.VERBOSE,
)
# The words that start a server where only its arguments are stated.
PROGRAM_WORDS = {
    "vllm": ["vllm", "serve"],
    "sglang": ["sglang", "serve"],
    "trtllm": ["trtllm-serve"],
}
# Images by name: many others are called vllm, such as those of routers, and folders are, too.
IMAGES = {
    "sglang": re.compile(r"(?:[\w.:-]+/)*lmsysorg/sglang(?:[:@]\S+)?"),
    "vllm": re.compile(
        r"(?:[\w.:-]+/)*(?:vllm-openai[\w.-]*|(?:rocm|intel|nvidia)/vllm|rocm/vllm-dev"
        r"|ascend/vllm-ascend|vllm/vllm-tpu)(?:[:@]\S+)?"
    ),
}
MODEL = re.compile(r"[\w.-]+/[\w.-]+")  # of a hub, in place of a program
# Flags of container engines whose value may look like an image.
NAMING = ("--name", "--hostname", "-h", "--label", "-l", "--volume", "-v", "--workdir", "-w")
ENTRYPOINT = re.compile(rf"--entrypoint[={END}]([^{END}]+)")  # instead of the image's program
STARTING = ("run", "create")  # commands of container engines behind which an image stands
# Words in front of a command's program, among them those of a shell's trace and of a terminal.
BEFORE_PROGRAMS = (
    *("+", "$", "time", "exec", "nohup", "sudo", "setsid", "command", "eval", "env"),
    *("if", "then", "elif", "else", "while", "until", "do", "{", "!"),
)
# Programs that may name a server, and start none.
OTHER_PROGRAMS = (
    *("echo", "printf", "cat", "tail", "grep", "egrep", "ps", "pgrep", "pkill", "killall", "kill"),
    *("trap", "alias", "which", "man", "from", "import"),
)
VARIABLES_FILES = ("--env-file", "env_file", "envFrom", "EnvironmentFile")
ENVIRONMENT_NAME = re.compile(r"(?:VLLM|SGLANG|SGL)_[A-Z0-9_]+")
ENVIRONMENT = re.compile(rf"(?:--env=|-e=?)?({ENVIRONMENT_NAME.pattern})=(.*)", re.DOTALL)


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
    first = "".join(arguments[:1])
    if not program and (first.startswith("-") or MODEL.fullmatch(first)):
        for system, images in IMAGES.items():
            if images.fullmatch(image):
                argv = [*PROGRAM_WORDS[system], *argv]
    return ShellCommand(argv, variables, image=image, notes=notes)


def servers_of(command: ShellCommand) -> Iterator[Server]:
    """Yield the servers that a command starts: its own, or those of a script within it, as in
    bash -c 'vllm serve MODEL'.
    """
    argv = [substituted(word, command.variables) for word in command.argv]
    if not _may_start(argv):
        return
    command = _in_container(replace(command, argv=argv))
    argv = command.argv
    text = END.join(argv)
    program = SERVER_PROGRAM.search(text)
    if program is not None:
        in_front = text[: program.end()].split(END)
        command = _with_words_in_front(command, in_front)
        yield Server(str(program.lastgroup), argv[len(in_front) - 1 :], command)
        return
    for position, word in enumerate(argv):
        if " " not in word:
            continue
        outer = _with_words_in_front(command, argv[:position])
        for inner in commands_in(word, outer.variables):
            yield from servers_of(replace(inner, image=outer.image, notes=outer.notes))


def _may_start(argv: Sequence[str]) -> bool:
    """Return whether a command is of no program that only names a server."""
    for word in argv:
        is_assignment = "=" in word
        if is_assignment or word.startswith("-") or word in BEFORE_PROGRAMS:
            continue
        program = word.rpartition("/")[2]
        return program not in OTHER_PROGRAMS
    return True


def _in_container(command: ShellCommand) -> ShellCommand:
    """Return the command in a container that an engine's command starts; another one as it is."""
    for position, word in enumerate(command.argv):
        in_front = command.argv[:position]
        if not _is_image(word, in_front):
            continue
        arguments = command.argv[position + 1 :]
        program = ENTRYPOINT.findall(END.join(in_front))
        outer = _with_words_in_front(command, in_front)
        return container(word, program, arguments, outer.variables, outer.notes)
    return command


def _is_image(word: str, in_front: Sequence[str]) -> bool:
    """Return whether a word is a server's image, where a container engine takes one."""
    if in_front:
        is_started = any(program in in_front for program in STARTING)
        if not is_started or in_front[-1] in NAMING:
            return False
    return any(images.fullmatch(word) for images in IMAGES.values())


def _with_words_in_front(command: ShellCommand, in_front: Sequence[str]) -> ShellCommand:
    """Return a command with what words in front of its program state: an image, variables of
    servers, and files of variables.
    """
    image = command.image or " ".join(in_front)
    matches = filter(None, map(ENVIRONMENT.fullmatch, in_front))
    variables = {match[1]: match[2] for match in matches}
    return replace(
        command,
        image=image,
        variables={**command.variables, **variables},
        notes=[*command.notes, *notes_of_files(in_front)],
    )


def notes_of_files(names: Sequence[str]) -> list[str]:
    """Note the files of variables that are named."""
    notes = list[str]()
    for name in VARIABLES_FILES:
        if any(word.startswith(name) for word in names):
            notes.append(f"{name} (its variables are not here)")
    return notes

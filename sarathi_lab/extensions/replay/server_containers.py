"""Commands of servers in descriptions of containers: of Kubernetes, compose and docker inspect."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

import yaml

from sarathi_lab.extensions.replay.server_programs import (
    VARIABLES_FILES,
    container,
    notes_of_files,
)
from sarathi_lab.extensions.replay.shell import ShellCommand, split, substituted

# Keys of `docker inspect` by those of compose.
KEYS = {"Image": "image", "Entrypoint": "entrypoint", "Cmd": "command", "Env": "environment"}
REQUIRED = re.compile(r"\$\{(\w+):?\?[^}]*\}")  # a variable of compose that must be set
# Behind comments, it begins with a key, or with an entry of a list.
BEGINS_YAML = re.compile(
    r"""(?:[ \t]*(?:(?:[#%]|---).*)?\r?\n)*[ \t]*(?:-\s|["']?[\w./-]+["']?[ \t]*:(?:\s|$))"""
)


def containers_in(text: str) -> list[ShellCommand]:
    """Return the commands of the containers that YAML or JSON describes."""
    with suppress(ValueError):
        return [*_containers_of(json.loads(text))]  # many times faster than as YAML
    if BEGINS_YAML.match(text):  # as reading a long log as YAML takes minutes
        with suppress(yaml.YAMLError):
            return [*_containers_of([*yaml.safe_load_all(text)])]
    return []


def _containers_of(content: object, replicas: int = 1) -> Iterator[ShellCommand]:
    """Yield the commands of the containers in a part of a description, of which there are so many
    `replicas` unless it says otherwise.
    """
    if isinstance(content, list):
        for entry in content:
            yield from _containers_of(entry, replicas)
    if not isinstance(content, Mapping):
        return
    content = {KEYS.get(str(key), str(key)): value for key, value in content.items()}
    stated = content.get("replicas", content.get("scale"))
    if isinstance(stated, int):
        replicas = stated
    program, arguments = _words_of_container(content)
    if not program and not arguments:
        for value in content.values():
            yield from _containers_of(value, replicas)
        return
    variables = {**_variables_of(content.get("env")), **_variables_of(content.get("environment"))}
    image = substituted(str(content.get("image", "")), variables)
    notes = notes_of_files([name for name in VARIABLES_FILES if content.get(name)])
    deployed = content.get("deploy")
    if isinstance(deployed, Mapping):
        replicas = deployed.get("replicas", replicas)
    if replicas != 1:
        notes.append(f"replicas={replicas} (one of them serves all requests here)")
    yield container(image, program, arguments, variables, notes)


def _words_of_container(content: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the program that a container starts instead of its image's, and its arguments."""
    entrypoint = _argv_of(content.get("entrypoint"))
    command = _argv_of(content.get("command"))
    arguments = _argv_of(content.get("args"))
    # Kubernetes' command stands for the image's entrypoint, compose's only for its arguments.
    if not entrypoint and ("args" in content or "name" in content):
        return command, arguments
    return entrypoint, command + arguments


def flags_of(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments by their names as the flags of a command."""
    argv = list[str]()
    for name, value in arguments.items():
        flag = str(name).replace("_", "-")
        if isinstance(value, bool):
            switch = "" if value else "no-"
            argv.append(f"--{switch}{flag}")
        elif isinstance(value, Mapping | list):
            argv += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            argv += [f"--{flag}", str(value)]
    return argv


def _argv_of(value: object) -> list[str]:
    """Return the words of a command, which is text, a list, or text that has a list. Variables
    stay, but for what compose writes of them: an escaped $, or a message for one that is not set.
    """
    if isinstance(value, str):
        value = REQUIRED.sub(r"${\1}", value.replace("$$", "$"))
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, SyntaxError):
            return [str(word) for word in ast.literal_eval(value.strip())]
    if isinstance(value, str):
        return split(value)
    if isinstance(value, list):
        return [str(word).replace("$$", "$") for word in value]
    return []


def _variables_of(value: object) -> dict[str, str]:
    """Return a container's environment: an object, a list of objects, or assignments."""
    if isinstance(value, Mapping):
        return {str(name): str(content) for name, content in value.items()}
    variables = dict[str, str]()
    entries = value if isinstance(value, list) else []
    for entry in entries:
        if isinstance(entry, Mapping) and "value" in entry:
            variables[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, content = entry.partition("=")
            variables[name] = content
    return variables

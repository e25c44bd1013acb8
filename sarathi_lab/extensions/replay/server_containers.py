"""Commands of servers in descriptions of containers: of Kubernetes, compose and docker inspect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

import yaml

from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.extensions.replay.server_programs import (
    VARIABLES_FILES,
    container,
    notes_of_files,
)
from sarathi_lab.extensions.replay.shell import ShellCommand, split, substituted

Words = list[str]
Fields = Mapping[str, object]  # of a container, by the keys of compose
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
        content = json.loads(text)  # many times faster than as YAML
        return list(_containers_of(content))
    if BEGINS_YAML.match(text):  # as reading a long log as YAML takes minutes
        with suppress(yaml.YAMLError):
            documents = list(yaml.safe_load_all(text))
            return list(_containers_of(documents))
    return []


def _containers_of(content: object, replicas: object = 1) -> Iterator[ShellCommand]:
    """Yield the commands of the containers in a part of a description, of which there are so many
    `replicas` unless it says otherwise.
    """
    if isinstance(content, list):
        for entry in content:
            yield from _containers_of(entry, replicas)
    if not isinstance(content, Mapping):
        return
    fields = {KEYS.get(str(key), str(key)): value for key, value in content.items()}
    replicas = _replicas_of(fields, replicas)
    program, arguments = _words_of_container(fields)
    if not program and not arguments:
        for value in fields.values():
            yield from _containers_of(value, replicas)
        return
    variables = _variables_of(fields.get("env"))
    variables |= _variables_of(fields.get("environment"))
    image = str(fields.get("image", ""))
    files = [name for name in VARIABLES_FILES if fields.get(name)]
    notes = notes_of_files(files)
    if replicas != 1:
        notes.append(f"replicas={replicas} (one of them serves all requests here)")
    yield container(substituted(image, variables), program, arguments, variables, notes)


def _replicas_of(fields: Fields, outer: object) -> object:
    """Return how many containers of a kind there are: as `outer` parts say, unless it does."""
    deployed = as_object(fields.get("deploy"))  # of compose, which may also scale
    for number in (fields.get("replicas"), fields.get("scale"), deployed.get("replicas")):
        if isinstance(number, int | str):
            return number
    return outer


def _words_of_container(fields: Fields) -> tuple[Words, Words]:
    """Return the program that a container starts instead of its image's, and its arguments."""
    entrypoint = _argv_of(fields.get("entrypoint"))
    command = _argv_of(fields.get("command"))
    arguments = _argv_of(fields.get("args"))
    if entrypoint:
        return entrypoint, command
    # Kubernetes' command stands for the image's entrypoint, compose's only for its arguments.
    is_of_kubernetes = "args" in fields or "name" in fields
    if is_of_kubernetes:
        return command, arguments
    return [], command


def _argv_of(value: object) -> Words:
    """Return the words of a command, which is text or a list. Variables stay, but for what compose
    writes of them: an escaped $, or a message for one that is not set.
    """
    if isinstance(value, str):
        unescaped = value.replace("$$", "$")
        return split(REQUIRED.sub(r"${\1}", unescaped))
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
        if isinstance(entry, str):
            name, is_set, content = entry.partition("=")
            if is_set:
                variables[name] = content
        described = as_object(entry)
        if "value" in described:  # else it is in a secret, or another object
            name = str(described.get("name"))
            variables[name] = str(described["value"])
    return variables

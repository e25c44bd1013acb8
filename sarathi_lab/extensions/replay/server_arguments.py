"""What one source states of a server: its arguments as the lab's settings, what of them is not
simulated, and what has no effect here (`argument_table`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.argument_table import (
    NO_EFFECT,
    Argument,
    Arguments,
    find,
    misspelt,
    table,
)
from sarathi_lab.extensions.replay.argument_values import (
    EAGER,
    GRAPH_MODE,
    NotSimulated,
    settings_of,
)

# Schedulers that a system has in all versions.
POLICIES = {"sglang": "sglang", "trtllm": "trtllm"}
OBJECTS = ("compilation_config", "kv_cache_config")  # of vLLM's and of TensorRT-LLM's arguments
NOTHING = ("", "none", "null")
SHOWN_VALUE = 24  # characters of a value in a message
SHOWN_NAMES = 8  # unknown names of a server's dump in a message
# Fields of vLLM's resolved configuration with other names than its arguments.
ARGUMENT_NAMES = {"policy": "scheduling_policy", "cache_dtype": "kv_cache_dtype"}


@dataclass(frozen=True)
class Statement:
    """What one source states of a server.

    Attributes:
        source: The file, as messages name it.
        settings: Values by the names of the table's `setting`.
        not_simulated: Arguments that would change the times, with their values and maybe a reason.
        without_effect: Arguments that change nothing here.
        is_complete: Whether what it does not state is the server's default.
        policy: The name in conf/policy of the server's scheduler; "": the one of the client's file.
    """

    source: str
    settings: Mapping[str, Any]  # a setting's name tells the type of its value
    not_simulated: Sequence[str] = ()
    without_effect: Sequence[str] = ()
    is_complete: bool = False
    policy: str = ""


class LoggedCache(NamedTuple):
    """Tokens of vLLM's cache, as it logs them.

    Attributes:
        tokens: As logged.
        is_of_longest: Whether they are those of as many of the longest sequences as fit; else of
            the blocks that each group of layers would have.
    """

    tokens: int
    is_of_longest: bool


def read_arguments(
    system: str,
    arguments: Arguments,
    source: str,
    *,
    is_typed: bool = False,
    is_dump: bool = False,
    is_complete: bool = False,
) -> Statement:
    """Read what `arguments` state of a server.

    Args:
        system: "vllm", "sglang" or "trtllm".
        arguments: Values by the server's names; those of None, "" and empty ones state nothing.
        source: The file, as messages name it.
        is_typed: Whether a person wrote the names, so that a misspelt one is refused.
        is_dump: Whether all arguments are listed, defaults included: names without effect are then
            left out.
        is_complete: Whether what is not listed has the server's default.

    Raises:
        UserError: For a misspelt name and, unless it is a dump, a value of another kind.
    """
    settings = dict[str, object]()
    not_simulated = list[str]()
    without_effect = list[str]()
    unknown = list[str]()
    for name, value in _flattened(system, arguments).items():
        row = find(system, name)
        if _says_nothing(row, value):
            continue
        if row is None:
            shown = _as_unknown(system, name, source, is_typed=is_typed)
            if not _is_idle(value, ""):
                unknown.append(shown)
        elif row.setting == NO_EFFECT:
            without_effect.append(name)
        elif row.setting:
            try:
                settings |= settings_of(row, value, source, is_written=not is_dump)
            except NotSimulated as reason:
                not_simulated.append(_with_reason(name, value, str(reason)))
        elif not _is_idle(value, row.neutral):
            not_simulated.append(_with_reason(name, value, row.reason))
    if unknown:
        not_simulated.append(f"{_some(unknown)} (unknown here)")
    if is_dump:
        without_effect.clear()
    policy = POLICIES.get(system, "")
    return Statement(source, settings, not_simulated, without_effect, is_complete, policy)


def _as_unknown(system: str, name: str, source: str, *, is_typed: bool) -> str:
    """Return how an argument is named that the table lacks. Raises UserError for one that a person
    has misspelt.
    """
    meant = misspelt(system, name)
    if meant is None:
        return name
    if not is_typed:
        return f"{name}, maybe {meant}"
    raise UserError(
        f"{source}: {name} is not an argument of {system} (did you mean {meant}?); correct or "
        "remove it"
    )


def as_object(value: object) -> Mapping[str, object]:
    """Return an object, which may be text, as after --compilation-config; else an empty one."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        return value
    return {}


def _flattened(system: str, arguments: Arguments) -> dict[str, object]:
    """Return arguments by their plain names, with those in objects among them."""
    flat = dict[str, object]()
    for typed_name, value in arguments.items():
        name = typed_name.lstrip("-").replace("-", "_")
        content = as_object(value) if name in OBJECTS else {}
        if not content:
            flat[name] = value
        for key, value_of_key in content.items():
            flat[_name_of_key(system, name, key)] = value_of_key
    if EAGER in flat:
        flat[EAGER] = flat.pop(EAGER)  # last, as it overrules the mode of graphs
    return flat


def _name_of_key(system: str, name: str, key: str) -> str:
    """Return the argument that a key of an object is: graphs have the same names outside."""
    meant = misspelt(system, key) or key
    row = find(system, meant)
    if row is not None and row.setting.startswith("host.graphs."):
        return key
    return f"{name}.{key}"


def merged(first: Statement, *others: Statement) -> Statement:
    """Merge what one source states in several places, the last place first."""
    statements = (first, *others)
    settings = dict[str, object]()
    for statement in statements:
        settings |= statement.settings
    return replace(
        first,
        settings=settings,
        not_simulated=each_once(statement.not_simulated for statement in statements),
        without_effect=each_once(statement.without_effect for statement in statements),
        is_complete=any(statement.is_complete for statement in statements),
    )


def each_once(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the entries of several lists in their order, each once."""
    return list(dict.fromkeys(chain.from_iterable(lists)))


def selected(system: str, content: Arguments, *, is_typed: bool = False) -> dict[str, object]:
    """Select the server's arguments among other keys, and what looks like a misspelling of one if a
    person has typed them.
    """
    arguments = dict[str, object]()
    for name, value in content.items():
        if name in table(system) or (is_typed and misspelt(system, name) is not None):
            arguments[name] = value
    return arguments


def arguments_of_sections(config: Arguments) -> dict[str, object]:
    """Return the arguments in vLLM's resolved configuration, an object for each part of it."""
    arguments = dict[str, object]()
    for section, content in config.items():
        if section == "device_config":
            continue  # devices are those of the hardware file
        if section == "speculative_config":  # itself an argument
            arguments[section] = content
            continue
        for field_name, value in as_object(content).items():
            name = ARGUMENT_NAMES.get(field_name, field_name)
            if value is not None and name in table("vllm"):
                arguments[name] = value
    return arguments


def _says_nothing(row: Argument | None, value: object) -> bool:
    """Return whether a value leaves an argument as it is."""
    if row is not None and row.setting == GRAPH_MODE and value:
        return False  # where "none" is a mode
    if isinstance(value, str):
        return value.lower() in NOTHING
    return value is None or value in ([], {})


def _is_idle(value: object, neutral: str) -> bool:
    """Return whether an argument with this value does nothing."""
    valid = neutral.split("|")
    return "*" in valid or value is False or str(value) in (*valid, "False", "auto")


def _with_reason(name: str, value: object, reason: str) -> str:
    """Describe an argument that is not simulated, without a value that is long."""
    shown = str(value)
    if len(shown) > SHOWN_VALUE or isinstance(value, dict | list):
        stated = name
    else:
        stated = f"{name}={shown}"
    if reason:
        return f"{stated} ({reason})"
    return stated


def _some(names: Sequence[str]) -> str:
    """List the first names, and count the others."""
    shown = ", ".join(names[:SHOWN_NAMES])
    more = len(names) - SHOWN_NAMES
    if more > 0:
        shown += f" and {more} more"
    return shown

"""What one source states of a server: its arguments as the lab's settings, what of them is not
simulated, and what has no effect here (`argument_table`).
"""

from __future__ import annotations

import json
import re
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
from sarathi_lab.policy.systems import NULL_BLOCKS, WHOLE_PROMPT_TOKENS

# Policies of the first engine (V0).
CHUNKED_V0 = "vllm_v0_chunked"
WHOLE_PROMPTS_V0 = "prefill_first"
FIRST_OF_V1 = (0, 8)  # version whose default is the second engine
VERSION = re.compile(r"v?(\d+)\.(\d+)")
LONG_CONTEXT_V0 = 32_768  # positions above which it chunks by default,
UNCHUNKED_V0 = ("speculative", "num_speculative", "enable_lora")  # but not with these
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
            meant = misspelt(system, name)
            if meant is not None and is_typed:
                raise UserError(
                    f"{source}: {name} is not an argument of {system} (did you mean {meant}?); "
                    "correct or remove it"
                )
            if not _is_idle(value, ""):
                unknown.append(name if meant is None else f"{name}, maybe {meant}")
        elif row.setting == NO_EFFECT:
            without_effect.append(name)
        elif not row.setting:
            if not _is_idle(value, row.neutral):
                not_simulated.append(_with_reason(name, value, row.reason))
        else:
            try:
                settings |= settings_of(row, value, source, is_written=not is_dump)
            except NotSimulated as reason:
                not_simulated.append(_with_reason(name, value, str(reason)))
    if unknown:
        not_simulated.append(f"{_some(unknown)} (unknown here)")
    if is_dump:
        without_effect.clear()
    policy = POLICIES.get(system, "")
    return Statement(source, settings, not_simulated, without_effect, is_complete, policy)


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


def with_rules_of_v0(statement: Statement) -> Statement:
    """Let a server of vLLM's first engine have its rules: whole prompts, unless chunked, and no
    block that is never allocated.
    """
    settings = {"cache.prefix": False, **statement.settings}
    if "cache.num_blocks" in settings:
        settings["cache.num_blocks"] += NULL_BLOCKS
    is_chunked = settings.pop("policy.enable_chunked_prefill", None)
    if is_chunked is None:
        is_whole = any(name.startswith(UNCHUNKED_V0) for name in statement.not_simulated)
        if "max_model_len" in settings or is_whole:
            is_long = settings.get("max_model_len", 0) > LONG_CONTEXT_V0
            is_chunked = is_long and not is_whole
        else:
            note = (
                f"chunked prefill by default above {LONG_CONTEXT_V0} positions (max_model_len is "
                "not stated)"
            )
            statement = replace(statement, not_simulated=[*statement.not_simulated, note])
    if is_chunked:
        return replace(statement, settings=settings, policy=CHUNKED_V0)
    if "chunk" not in settings and "max_model_len" in settings:
        settings["chunk"] = max(settings["max_model_len"], WHOLE_PROMPT_TOKENS)
    if "chunk" in settings:
        settings["policy.max_num_batched_tokens"] = settings["chunk"]
    return replace(statement, settings=settings, policy=WHOLE_PROMPTS_V0)


def with_rules_of_version(statement: Statement) -> Statement:
    """Let a server have the rules of the engine that its version of vLLM has by default."""
    if statement.policy or not is_of_v0(statement.settings.get("version", "")):
        return statement
    return with_rules_of_v0(statement)


def is_of_v0(version: object) -> bool:
    """Return whether a version of vLLM has its first engine by default."""
    numbers = VERSION.match(str(version))
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < FIRST_OF_V1


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

"""Arguments of serving systems as the lab has them: one table for every file that states some.

`server_arguments.csv` has a row for each argument of vLLM's, SGLang's and TensorRT-LLM's servers:

- `short`: a flag that stands for it;
- `kind`: how its value is read where it is text (`inverse`: a flag that switches the setting off;
  `list`: one that has several words on a command line; numbers: `int` and `number` from 0 on,
  `count` from 1 on, `share` above 0 up to 1);
- `setting`: what it is here, as typed on the lab's command line, or one of `OF_FILES`; several are
  separated by a space; "-": it has no effect on a simulation; empty: it is not simulated;
- `neutral`: values (separated by "|") by which an argument that is not simulated does nothing;
- `reason`: why it is not simulated, where that needs words.

A `*` in a name stands for any text; plain names go first.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sarathi_lab.config.errors import UserError
from sarathi_lab.policy.systems import NULL_BLOCKS, WHOLE_PROMPT_TOKENS

# What the lab's command line has no name for: the cache in tokens, as vLLM logs it, and in bytes of
# a device; whether replicas share experts; the server's version; the names that clients use.
LOGGED_CACHE = "cache.logged"
CACHE_BYTES = "cache.bytes"
SERVED_NAMES = "model.served"
OF_FILES = (
    *("cache.tokens", LOGGED_CACHE, CACHE_BYTES, "cluster.shares_experts", "version"),
    SERVED_NAMES,
)
NO_EFFECT = "-"
UNCUT = -1  # a chunk of SGLang's that cuts no prompt
# Policies of the first engine (V0).
CHUNKED_V0 = "vllm_v0_chunked"
WHOLE_PROMPTS_V0 = "prefill_first"
FIRST_OF_V1 = (0, 8)  # version whose default is the second engine
VERSION = re.compile(r"v?(\d+)\.(\d+)")
# Built from sources without their tags, as 0.1.dev11000+g1a2b3c4 is: of any version.
UNTAGGED = re.compile(r"v?0\.(0\.0|[01](\.\d+)?\.dev)")
LONG_CONTEXT_V0 = 32_768  # positions above which it chunks by default,
UNCHUNKED_V0 = ("speculative", "num_speculative", "enable_lora")  # but not with these
# How alike two names are where one is taken for a misspelling of the other.
MISSPELT = 0.85
SHOWN_VALUE = 24  # characters of a value in a message
SHOWN_NAMES = 8  # unknown names of a server's dump in a message
# Schedulers that a system has in all versions.
POLICIES = {"sglang": "sglang", "trtllm": "trtllm"}
FLAGS = ("flag", "inverse")  # kinds of arguments without a value
CACHE_OBJECT = "kv_cache_config"  # of TensorRT-LLM's
WHOLE_NUMBERS = ("int", "count")  # kinds of arguments
NUMBERS = (*WHOLE_NUMBERS, "number", "share")
TRUE = ("true", "1", "yes", "on", "enabled")
FALSE = ("false", "0", "no", "off", "disabled")
SCALED = re.compile(r"(\d+)(\.\d+)?([kKmMgGtT])")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}  # vLLM's
BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
NOTHING = ("", "none", "null")
GRAPH_MODE = "host.graphs.mode"
LEFT_TO_SERVER = ("auto", "-1")  # numbers that a server chooses itself
# vLLM's numbers of its modes of CUDA graphs, and pairs of them: of decodes, of other batches.
GRAPH_MODES: dict[object, str] = {0: "none", 1: "piecewise", 2: "full"}
GRAPH_MODES |= {(2, 0): "full_decode_only", (2, 1): "full_and_piecewise"}
# Weights that a method has, by a part of its name; of GPTQ the usual 4 bits.
WEIGHTS_OF_METHODS = {"fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4"}
WEIGHTS_OF_METHODS |= {"modelopt_fp4": "nvfp4", "w8a8": "w8a8", "int8": "int8"}
WEIGHTS_OF_METHODS |= {"auto_round": "int4", "auto-round": "int4"}
# Methods that leave all but the experts in other types, by a part of their names.
METHODS_OF_EXPERTS = ("experts_int8", "w4afp8", "int4fp8")
# Methods that leave the type of the weights to a checkpoint's files; its name may tell it.
METHODS_OF_CHECKPOINTS = ("inc", "compressed-tensors", "modelopt", "quark")
DTYPES = {"half": "float16", "float": "float32"}
# Fields of vLLM's resolved configuration with other names than its arguments.
ARGUMENT_NAMES = {"policy": "scheduling_policy", "cache_dtype": "kv_cache_dtype"}


class Argument(NamedTuple):
    """A row of the table."""

    system: str
    argument: str
    short: str
    kind: str
    setting: str
    neutral: str
    reason: str


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


class NotSimulated(Exception):
    """A value that the simulator has no equal of."""


@cache
def table(system: str) -> dict[str, Argument]:
    """Return the arguments of a system by name; those with a `*` last."""
    with Path(__file__).with_name("server_arguments.csv").open(newline="") as file:
        rows = [Argument(**row) for row in csv.DictReader(file)]
    rows.sort(key=lambda row: "*" in row.argument)
    return {row.argument: row for row in rows if row.system == system}


def find(system: str, name: str) -> Argument | None:
    """Return the row of an argument; None if the table has none."""
    rows = table(system)
    if name in rows:
        return rows[name]
    fitting = (row for row in rows.values() if fnmatch.fnmatchcase(name, row.argument))
    return next(fitting, None)


def misspelt(system: str, name: str) -> str | None:
    """Return the argument that `name` is a misspelling of; None if it is like none."""
    names = [argument for argument in table(system) if "*" not in argument]
    close = difflib.get_close_matches(name, names, n=1, cutoff=MISSPELT)
    return close[0] if close else None


def read_arguments(
    system: str,
    arguments: Mapping[str, object],
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
    settings: dict[str, object] = {}
    not_simulated = list[str]()
    without_effect = list[str]()
    unknown = list[str]()
    for name, value in _flattened(system, arguments).items():
        row = find(system, name)
        if _says_nothing(row, value):
            continue
        if row is None:
            _check_name(system, name, source, is_typed=is_typed)
            if not _is_idle(value, ""):
                meant = misspelt(system, name)
                guess = "" if meant is None else f", maybe {meant}"
                unknown.append(f"{name}{guess}")
        elif row.setting == NO_EFFECT:
            without_effect.append(name)
        elif not row.setting:
            if not _is_idle(value, row.neutral):
                not_simulated.append(_with_reason(name, value, row.reason))
        else:
            converted, reason = _settings_or_reason(row, value, source, is_dump=is_dump)
            settings |= converted
            if reason is not None:
                not_simulated.append(_with_reason(name, value, reason))
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


def _flattened(system: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments by their plain names, with those in objects among them."""
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    for name, value in as_object(plain.get("compilation_config")).items():
        plain.pop("compilation_config", None)
        row = find(system, misspelt(system, name) or name)
        is_of_graphs = row is not None and row.setting.startswith("host.graphs.")
        if not is_of_graphs:
            name = f"compilation_config.{name}"
        plain[name] = value
    for name, value in as_object(plain.get(CACHE_OBJECT)).items():
        plain.pop(CACHE_OBJECT, None)
        plain[f"{CACHE_OBJECT}.{name}"] = value
    # Last, as it overrules the mode of graphs.
    return dict(sorted(plain.items(), key=lambda item: item[0] == "enforce_eager"))


def merged(first: Statement, *others: Statement) -> Statement:
    """Merge what one source states in several places, the last place first."""
    settings: dict[str, object] = {}
    # Of dictionaries the keys alone count, in their order and each once.
    not_simulated = dict[str, None]()
    without_effect = dict[str, None]()
    statements = (first, *others)
    for statement in statements:
        settings |= statement.settings
        not_simulated |= dict.fromkeys(statement.not_simulated)
        without_effect |= dict.fromkeys(statement.without_effect)
    is_complete = any(statement.is_complete for statement in statements)
    return Statement(
        first.source,
        settings,
        [*not_simulated],
        [*without_effect],
        is_complete,
        first.policy,
    )


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


def selected(
    system: str, content: Mapping[str, object], *, is_typed: bool = False
) -> dict[str, object]:
    """Select the server's arguments among other keys, and what looks like a misspelling of one if a
    person has typed them.
    """
    return {
        key: value
        for key, value in content.items()
        if key in table(system) or (is_typed and misspelt(system, key) is not None)
    }


def arguments_of_sections(config: Mapping[str, object]) -> dict[str, object]:
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


def _check_name(system: str, name: str, source: str, *, is_typed: bool) -> None:
    """Raise UserError for a name that a person has misspelt."""
    meant = misspelt(system, name)
    if is_typed and meant is not None:
        raise UserError(
            f"{source}: {name} is not an argument of {system} (did you mean {meant}?); correct or "
            "remove it"
        )


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


def _settings_or_reason(
    row: Argument, value: object, source: str, *, is_dump: bool
) -> tuple[dict[str, object], str | None]:
    """Return the settings that an argument is, or why it is not simulated. Raises UserError."""
    try:
        return _converted(row, value, source), None
    except NotSimulated as reason:
        return {}, str(reason)
    except UserError:
        # A person can correct what they wrote, but not what a server wrote.
        if not is_dump:
            raise
        return {}, "not understood"


def _converted(row: Argument, value: object, source: str) -> dict[str, object]:
    """Return the settings that an argument is. Raises UserError and NotSimulated."""
    read = _parsed(row, value, source)
    names = row.setting.split()
    convert = CONVERSIONS.get(names[0])
    if convert is not None:
        read = convert(row, read)
    if read is None:  # such as of enforce_eager=False, which leaves the mode to others
        return {}
    return dict.fromkeys(names, read)


def _parsed(row: Argument, value: object, source: str) -> object:
    """Read a value, which is text in some files, as one of the row's kind. Raises UserError."""
    text = str(value).strip()
    if row.kind in NUMBERS:
        if text.lower() in LEFT_TO_SERVER and row.setting != "chunk":
            raise NotSimulated("the server chooses it")
        return _number(row, value, source)
    if row.kind in FLAGS:
        if text.lower() not in (*TRUE, *FALSE):
            raise UserError(
                f"{source}: {row.argument}={text} is neither true nor false; correct it"
            )
        return (text.lower() in TRUE) != (row.kind == "inverse")
    if row.kind == "text":
        return text
    if text.startswith("["):
        with suppress(ValueError):
            return json.loads(text)
    return value


def _number(row: Argument, value: object, source: str) -> float:
    """Read a number of the row's kind. Raises UserError."""
    text = str(value).strip()
    complaint = ""
    number = math.nan
    with suppress(ValueError):
        number = float(_scaled(text))
    if isinstance(value, bool) or not math.isfinite(number):
        complaint = "is not a number"
    elif row.kind in WHOLE_NUMBERS and number % 1:
        complaint = "is not a whole number"
    elif row.kind == "count" and number < 1:
        complaint = "is below 1"
    elif row.kind == "share" and not 0 < number <= 1:
        complaint = "is not a share, above 0 and up to 1"
    elif number < 0 and row.setting != "chunk":
        complaint = "is below 0"
    if complaint:
        raise UserError(f"{source}: {row.argument}={text} {complaint}; correct it")
    return int(number) if row.kind in WHOLE_NUMBERS else number


def _scaled(text: str) -> str:
    """Write out a number with a unit, as vLLM takes it: 8k is 8000, 8K is 8192."""
    match = SCALED.fullmatch(text)
    if match is None:
        return text
    number, decimals, unit = match.groups()
    if unit in BINARY_UNITS:
        if decimals:
            return text  # which vLLM refuses
        return str(int(number) * BINARY_UNITS[unit])
    return str(int(float(number + (decimals or "")) * UNITS[unit]))


def _dtype(row: Argument, value: str) -> str:
    name = value.removeprefix("torch.")
    return DTYPES.get(name, name)


def _weights(row: Argument, value: str) -> str:
    if any(part in value for part in METHODS_OF_EXPERTS):
        raise NotSimulated("of experts alone; executor.weights has the type of all products")
    for method, weights in WEIGHTS_OF_METHODS.items():
        if method in value:
            return weights
    raise NotSimulated("weights are of the dtype here, unless model.path has its config.json")


def _served_names(row: Argument, value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    return tuple(map(str, names))


def _version(row: Argument, value: str) -> str:
    if UNTAGGED.match(value) is not None:
        raise NotSimulated("a build without its tag, which is taken for the newest version")
    return value


def _cache_dtype(row: Argument, value: str) -> str:
    name = value.removeprefix("torch.")
    for kind in ("fp8", "int8"):
        if name.startswith(kind):
            return kind
    if name not in ("auto", "bfloat16", "float16", "bf16", "fp16"):
        raise NotSimulated("the cache is of the dtype here")
    return "auto"


def _queue_order(row: Argument, value: str) -> str:
    if value != "fcfs":
        raise NotSimulated("the recorded requests have no priorities")
    return value


def _graph_mode(row: Argument, value: object) -> str | None:
    if row.argument == "enforce_eager":
        return "none" if value else None
    key = value
    if str(value).isdigit():
        key = int(str(value))
    elif isinstance(value, list | tuple):
        key = tuple(value)
    return GRAPH_MODES.get(key, str(key).rpartition(".")[2].lower())


def _graph_sizes(row: Argument, value: object) -> list[int]:
    if not isinstance(value, list | tuple):
        raise NotSimulated("it is no list of sizes")
    if row.argument == "cuda_graph_sizes" and len(value) == 1:
        raise NotSimulated("state max_cudagraph_capture_size")
    if not all(str(size).isdigit() for size in value):
        raise NotSimulated("it is no list of sizes")
    return sorted(int(size) for size in value)


def _num_blocks(row: Argument, value: int) -> int:
    return value - NULL_BLOCKS


def _chunk(row: Argument, value: int) -> int:
    if value > 0:
        return value
    if row.system != "sglang":
        raise NotSimulated("it is no number of tokens")
    return UNCUT


CONVERSIONS: dict[str, Callable[[Argument, Any], object]] = {
    "version": _version,
    "dtype": _dtype,
    "executor.weights": _weights,
    "cache.dtype": _cache_dtype,
    "queue_order": _queue_order,
    SERVED_NAMES: _served_names,
    GRAPH_MODE: _graph_mode,
    "host.graphs.sizes": _graph_sizes,
    "chunk": _chunk,
    "cache.num_blocks": _num_blocks,
}

"""Values of servers' arguments as the lab's settings have them: text is read by the kind that the
table states, then what servers call otherwise is named as here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.argument_table import FLAGS, SERVED_NAMES, Argument
from sarathi_lab.policy.systems import NULL_BLOCKS

UNCUT = -1  # a chunk of SGLang's that cuts no prompt
EAGER = "enforce_eager"
GRAPH_MODE = "host.graphs.mode"
TRUE = ("true", "1", "yes", "on", "enabled")
FALSE = ("false", "0", "no", "off", "disabled")
LEFT_TO_SERVER = "auto"  # a number that a server chooses itself
SCALED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}  # vLLM's: 8k is 8000, 8K is 8192
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# vLLM's numbers of its modes of CUDA graphs, and pairs of them: of decodes, of other batches.
GRAPH_MODES = {"0": "none", "1": "piecewise", "2": "full"}
GRAPH_MODES |= {"2,0": "full_decode_only", "2,1": "full_and_piecewise"}
BRACKETS = re.compile(r"[\[\]() ]")
# Weights that a method has, by a part of its name; of GPTQ the usual 4 bits.
WEIGHTS_OF_METHODS = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "awq": "int4",
    "gptq": "int4",
    "modelopt_fp4": "nvfp4",
    "w8a8": "w8a8",
    "int8": "int8",
    "auto_round": "int4",
    "auto-round": "int4",
}
# Methods that leave all but the experts in other types, by a part of their names.
METHODS_OF_EXPERTS = ("experts_int8", "w4afp8", "int4fp8")
# Methods that leave the type of the weights to a checkpoint's files; its name may tell it.
METHODS_OF_CHECKPOINTS = ("inc", "compressed-tensors", "modelopt", "quark")
DTYPES = {"half": "float16", "float": "float32"}
DTYPES_OF_16_BITS = ("bfloat16", "float16", "bf16", "fp16")


class NotSimulated(Exception):
    """A value that the simulator has no equal of."""


class NumberKind(NamedTuple):
    """What numbers of a kind may be; as messages call it last."""

    lowest: float
    highest: float
    is_whole: bool
    name: str


NUMBERS = {
    "int": NumberKind(0, 2**63, True, "a whole number from 0 on"),
    "count": NumberKind(1, 2**63, True, "a whole number from 1 on"),
    "chunk": NumberKind(UNCUT, 2**63, True, "a whole number"),
    "number": NumberKind(0, 2**63, False, "a number from 0 on"),
    "share": NumberKind(1e-9, 1, False, "a share, above 0 and up to 1"),
}


def settings_of(
    row: Argument, value: object, source: str, *, is_written: bool
) -> dict[str, object]:
    """Return the settings that an argument is.

    Args:
        row: Of the argument.
        value: As stated.
        source: The file, as messages name it.
        is_written: Whether a person wrote the value, who can correct it.

    Raises:
        NotSimulated: For a value that the simulator has no equal of.
        UserError: For a value of another kind that a person wrote.
    """
    try:
        read_value = _read(row, value)
    except ValueError as complaint:
        if is_written:
            stated = f"{source}: {row.argument}={str(value).strip()}"
            raise UserError(f"{stated} is not {complaint}; correct it") from None
        raise NotSimulated("not understood") from None
    names = row.setting.split()
    convert = CONVERSIONS.get(names[0])
    if convert is not None:
        read_value = convert(row, read_value)
    if read_value is None:  # such as of enforce_eager=False, which leaves the mode to others
        return {}
    return dict.fromkeys(names, read_value)


def _read(row: Argument, value: object) -> object:
    """Read a value, which is text in some files, as one of the row's kind. Raises ValueError that
    says what it should be.
    """
    text = str(value).strip()
    if row.kind in NUMBERS:
        return _number(row.kind, text)
    if row.kind in FLAGS:
        is_true = text.lower() in TRUE
        if not is_true and text.lower() not in FALSE:
            raise ValueError("true or false")
        is_inverse = row.kind == "inverse"
        return is_true != is_inverse
    if row.kind == "text":
        return text
    if text.startswith("["):
        with suppress(ValueError):
            return json.loads(text)
    return value


def _number(kind_name: str, text: str) -> float:
    """Read a number of a kind. Raises ValueError, and NotSimulated for one that is left open."""
    kind = NUMBERS[kind_name]
    if text.lower() == LEFT_TO_SERVER or (text == "-1" and kind.lowest >= 0):
        raise NotSimulated("the server chooses it")
    number = math.nan
    with suppress(ValueError):
        number = _amount(text.replace(",", ""))  # of logs
    is_valid = kind.lowest <= number <= kind.highest
    if not is_valid or (kind.is_whole and not number.is_integer()):
        raise ValueError(kind.name)
    return int(number) if kind.is_whole else number


def _amount(text: str) -> float:
    """Return a number, which may have a unit."""
    scaled = SCALED.fullmatch(text)
    if scaled is None:
        return float(text)
    return float(scaled[1]) * UNITS[scaled[2]]


def _dtype(row: Argument, value: str) -> str:
    name = value.removeprefix("torch.")
    return DTYPES.get(name, name)


def _weights(row: Argument, value: str) -> str:
    if any(method in value for method in METHODS_OF_EXPERTS):
        raise NotSimulated("of experts alone; executor.weights has the type of all products")
    for method, weights in WEIGHTS_OF_METHODS.items():
        if method in value:
            return weights
    raise NotSimulated("weights are of the dtype here, unless model.path has its config.json")


def _served_names(row: Argument, value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    return tuple(map(str, names))


def _version(row: Argument, value: str) -> str:
    # Built from sources without their tags, as 0.1.dev11000+g1a2b3c4 is.
    if re.match(r"v?0\.(0\.0|[01](\.\d+)?\.dev)", value):
        raise NotSimulated("a build without its tag, which is taken for the newest version")
    return value


def _cache_dtype(row: Argument, value: str) -> str:
    name = value.removeprefix("torch.")
    for kind in ("fp8", "int8"):
        if name.startswith(kind):
            return kind
    if name not in ("auto", *DTYPES_OF_16_BITS):
        raise NotSimulated("the cache is of the dtype here")
    return "auto"


def _queue_order(row: Argument, value: str) -> str:
    if value != "fcfs":
        raise NotSimulated("the recorded requests have no priorities")
    return value


def _graph_mode(row: Argument, value: object) -> str | None:
    if row.argument == EAGER:
        return "none" if value else None
    text = BRACKETS.sub("", str(value))
    name = text.rpartition(".")[2].lower()
    return GRAPH_MODES.get(text, name)


def _graph_sizes(row: Argument, value: object) -> list[int]:
    sizes = value if isinstance(value, list | tuple) else [value]
    texts = [str(size) for size in sizes]
    is_list = all(map(str.isdigit, texts))
    if row.argument == "cuda_graph_sizes" and len(texts) == 1:
        is_list = False  # but the largest size
    if not is_list:
        raise NotSimulated("it is no list of sizes; state max_cudagraph_capture_size")
    return sorted(map(int, texts))


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

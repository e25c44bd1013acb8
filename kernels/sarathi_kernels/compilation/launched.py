"""Launches of a process that interprets kernels, written for one that compiles them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.launch import Launch, recorded

ALIGNMENT = 16  # bytes by which Triton specialises pointers
HALVES = "float16", "bfloat16"  # the interpreter has the first alone


@contextmanager
def recording_to(path: Path, capability: int) -> Iterator[None]:
    """Do the launches as for a chip of that capability, and write each once in the end, a line
    each. Raises OSError.
    """
    with recorded(CHIPS[capability], runs=True) as recording:
        yield
    lines = (json.dumps([capability, *_described(one)]) for one in recording.launches)
    path.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)))


def read(path: Path) -> Iterator[tuple[int, Launch]]:
    """Yield the capability and the launch of each line, those on float16 on bfloat16, too."""
    for line in path.read_text().splitlines():
        for text in dict.fromkeys((line, line.replace(f'"{HALVES[0]}"', f'"{HALVES[1]}"'))):
            capability, module, name, arguments, options, uses_tensor_cores = json.loads(text)
            kernel = getattr(import_module(module), name)
            given = tuple(map(_argument, arguments))
            yield capability, Launch(kernel, (1,), given, options, False, uses_tensor_cores)


def _described(launch: Launch) -> tuple[Any, ...]:
    """What `read` makes a launch of. Its grid is not compiled, and registers of the awkward sizes
    of tests may spill.
    """
    function = launch.kernel.fn
    arguments = [_text(one) if isinstance(one, Tensor) else one for one in launch.arguments]
    place = function.__module__, function.__name__
    return *place, arguments, launch.options, launch.uses_tensor_cores


def _text(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), tensor.data_ptr() % ALIGNMENT > 0]


def _argument(described: Any) -> Any:
    if not isinstance(described, list):
        return described
    name, is_unaligned = described
    return torch.empty(2, dtype=getattr(torch, name), device="meta")[int(is_unaligned) :]

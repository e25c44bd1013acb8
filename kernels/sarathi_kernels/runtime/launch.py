"""The one way kernels are launched, so that whatever the engine can launch can also be compiled
without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sarathi_kernels.runtime.chip import Chip, assumed

if TYPE_CHECKING:  # this module is imported where Triton is not installed
    from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Launch:
    """A launch as it would have been: `arguments` and `options` (constants, num_warps, num_stages)
    by name.

    `is_hot` kernels take a good part of an iteration, so none of their registers may spill;
    `uses_tensor_cores` says that matrix instructions must be in the code, `programs_per_sm` how
    many programs a multiprocessor must hold at a time.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, object]
    is_hot: bool
    uses_tensor_cores: bool
    programs_per_sm: int = 1


@dataclass
class Recording:
    """Launches for `chip`, only recorded unless it `runs` them."""

    chip: Chip
    launches: list[Launch] = field(default_factory=list)
    runs: bool = False


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


def launch(
    kernel: JITFunction,
    grid: tuple[int, ...],
    *arguments: object,
    is_hot: bool = False,
    uses_tensor_cores: bool = False,
    programs_per_sm: int = 1,
    **options: object,
) -> None:
    """`kernel[grid](*arguments, **options)`; a record of it, too, or alone, during `recorded`.

    All arguments that are not constants are positional; constants, num_warps and num_stages are
    named.
    """
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(
            Launch(kernel, grid, arguments, options, is_hot, uses_tensor_cores, programs_per_sm)
        )
        if not recording.runs:
            return
    kernel[grid](*arguments, **options)


@contextmanager
def recorded(chip: Chip, *, runs: bool = False) -> Iterator[Recording]:
    """Record the launches that public functions do on `chip`, as it is `assumed`; unless it `runs`
    them, tensors may be on the device "meta".
    """
    recording = Recording(chip, runs=runs)
    token = _recording.set(recording)
    try:
        with assumed(chip):
            yield recording
    finally:
        _recording.reset(token)

"""Whether the C++ kernels can do a model's work on this CPU, and their way into it. Compiled when asked."""

from __future__ import annotations

from functools import cache

import torch

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.build import NotBuilt
from sarathi_lab.model import native_operations
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer


def why_not(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Why they don't compute `spec`, in words; None if they do."""
    return native_operations.why_not(spec, dtype) or _why_not_built()


@cache
def _why_not_built() -> str | None:
    try:
        library.load()
    except NotBuilt as error:
        return str(error)
    return None


def install(model: Transformer, *, is_whole: bool = True) -> None:
    """Let them compute the model, each iteration in one call, or one operation at a time unless `is_whole`."""
    library.start(torch.get_num_threads())
    operations = native_operations.NativeOperations(model)
    model.operations = operations
    model.whole_pass = operations.whole_pass if is_whole else None

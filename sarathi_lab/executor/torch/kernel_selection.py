"""Selection of what computes a model besides torch: Triton on a GPU, C++ on a CPU."""

from __future__ import annotations

from functools import cache

import torch

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.build import NEEDED, NotBuilt, instruction_set
from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.executor.torch.placement import place
from sarathi_lab.model import native_operations
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

FIX = "use executor.kernels=torch"
ISAS = ("auto", *NEEDED)


def require_supported(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless kernels run on `device` and take the model's heads and `dtype`."""
    try:
        from sarathi_kernels.attention.support import check_supported
        from sarathi_kernels.runtime.support import probe, require_chip
    except ImportError as error:
        raise UserError(f"Triton is not installed ({error}); {FIX}") from None
    try:
        check_supported(spec.head_size, dtype, block_size=1)  # they take blocks of any size
        require_chip(chip_of(device))
        if device.type == "cuda":
            probe(device)
    except ValueError as error:
        raise UserError(f"model {spec.name}: {error}; {FIX}") from None


def use_triton(model: Transformer, hybrid: Hybrid) -> None:
    """Let Triton compute all but the matrix products of `model`."""
    from sarathi_lab.model.kernel_operations import KernelOperations

    model.operations = KernelOperations(model.spec, model.inverse_frequencies, hybrid)


def require_isa(isa: str, *, is_wanted: bool) -> None:
    """Raise UserError unless C++ `is_wanted` and has the instructions `isa`, or they are auto."""
    require_one_of("executor.isa", isa, ISAS)
    if isa == "auto":
        return
    if not is_wanted:
        raise UserError(
            f"executor.isa={isa} is for the C++ of a CPU, which is not used here; leave it out"
        )
    try:
        instruction_set(isa)
    except NotBuilt as error:
        raise UserError(f"executor.isa={isa} does not run here: {error}; use auto") from None


def built_isa(isa: str) -> str | None:
    """Return the instructions of the compiled C++; None without it."""
    return instruction_set(isa) if why_not_built(isa) is None else None


@cache
def why_not_built(isa: str) -> str | None:
    """Return why the C++ of the instructions `isa` can't be built; None if it can."""
    try:
        library.load(isa)
    except NotBuilt as error:
        return str(error)
    return None


def use_native(model: Transformer, *, is_whole: bool = True, isa: str = "auto") -> None:
    """Let C++ compute `model`, each iteration in one call or, unless `is_whole`, in several."""
    library.start(torch.get_num_threads(), isa=isa)
    placement = place(torch.get_num_threads())
    library.place(placement.bound, placement.nodes)
    operations = native_operations.NativeOperations(model, is_whole=is_whole)
    model.operations = operations
    model.whole_pass = operations.whole_pass if is_whole else None

"""Choice of attention kernels: Triton's, or another library's for prompts or for decodes."""

from __future__ import annotations

import torch

from sarathi_kernels.attention.flash import FLASH, FlashPrompts
from sarathi_kernels.attention.flash_infer import FLASHINFER, FlashInferDecodes
from sarathi_kernels.attention.library import Library
from sarathi_kernels.runtime.chip import chip_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.model.operations import Hybrid
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

ATTENTION = ("auto", "triton", "flash", "flashinfer")
LIBRARIES = {"flash": FLASH, "flashinfer": FLASHINFER}


def attention_names(
    setting: str,
    hybrid: Hybrid,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> list[str]:
    """Return what attends from prompts and what from decodes: Triton, but for the library that
    `setting` names. None of these has run on a GPU with the lab, so `auto` takes none. Raises
    UserError if the named one does not run here.
    """
    names = []
    for name, library in LIBRARIES.items():
        is_named = setting == name
        reason = _why_not(library, hybrid, spec, device, dtype) if is_named else None
        if reason is not None:
            raise UserError(
                f"executor.attention={name} does not run here: {reason}; use "
                "executor.attention=auto"
            )
        names.append(name if is_named else "triton")
    return names


def _why_not(
    library: Library,
    hybrid: Hybrid,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    if device.type != "cuda":
        return f"{library.title} needs a GPU"
    if hybrid != "series":
        return f"executor.hybrid={hybrid} is for Triton's two kernels"
    # They take blocks of any size.
    return library.why_not(spec, dtype, block_size=1, chip=chip_of(device))


def use_attention(model: Transformer, names: list[str], hybrid: Hybrid, block_size: int) -> None:
    """Let the kernels of `names` attend in `model`, whose other operations are Triton's."""
    from sarathi_kernels.attention.hybrid import HybridAttention
    from sarathi_lab.model.kernel_operations import KernelOperations

    assert isinstance(model.operations, KernelOperations)
    prompts = FlashPrompts() if names[0] == "flash" else None
    decodes = None
    if names[1] == "flashinfer":
        decodes = FlashInferDecodes(model.spec, model.dtype, block_size, model.device)
    model.operations.attention = HybridAttention(hybrid, prompts, decodes)

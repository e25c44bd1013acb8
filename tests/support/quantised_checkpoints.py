"""Small checkpoints in 4 bits, in the formats of GPTQ and AWQ."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS, GROUP = 4, 32  # of a weight; weights that share a scale
PACKED = 32 // BITS  # weights in an int32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in an int32
MIDDLE = 8  # the integer that stands for zero in GPTQ's symmetric weights
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
}


def make_quantised(method: str, folder: Path, **sizes: int) -> torch.nn.Module:
    """Save a seeded Llama whose layers are quantised by "gptq" or "awq", and return the model of
    the values that its integers stand for, in float32.
    """
    model = make_checkpoint("llama", folder, **{**SIZES, **sizes})
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stem = name.removesuffix("weight")
            if not name.endswith("proj.weight"):
                parameter.copy_(parameter.half())
                tensors[name] = parameter.half()
                continue
            packed, values = quantise(method, parameter.T.contiguous())
            parameter.copy_(values.T)
            tensors |= {f"{stem}{kind}": tensor for kind, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    of_method = {"sym": True, "desc_act": False}
    if method == "awq":
        of_method = {"zero_point": True, "version": "gemm"}
    quantisation = {"quant_method": method, "bits": BITS, "group_size": GROUP, **of_method}
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantisation}))
    return model


def quantise(method: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a weight [inputs, outputs] in 4 bits, and the values they stand for."""
    num_inputs, num_outputs = weight.shape
    groups = weight.view(-1, GROUP, num_outputs)
    span = groups.amax(1) - groups.amin(1)
    scales = (span / (2**BITS - 1)).half().float()
    zeros = torch.full_like(scales, MIDDLE)
    if method == "awq":
        zeros = torch.round(-groups.amin(1) / scales).clamp(0, 2**BITS - 1)
    integers = torch.round(groups / scales[:, None] + zeros[:, None]).clamp(0, 2**BITS - 1)
    values = (integers - zeros[:, None]) * scales[:, None]
    rows = integers.view(num_inputs, num_outputs).long()
    tensors = {"scales": scales.half()}
    if method == "awq":
        tensors["qweight"] = pack_columns(rows, AWQ_ORDER)
        tensors["qzeros"] = pack_columns(zeros.long(), AWQ_ORDER)
    else:
        tensors["qweight"] = pack_columns(rows.T.contiguous()).T.contiguous()
        tensors["qzeros"] = pack_columns(zeros.long() - 1)  # as GPTQ's files have them
        tensors["g_idx"] = (torch.arange(num_inputs) // GROUP).int()
    return tensors, values.view(num_inputs, num_outputs)


def pack_columns(integers: Tensor, order: tuple[int, ...] = tuple(range(PACKED))) -> Tensor:
    """Pack eight columns of 4 bits into one of int32, the first in `order` lowest."""
    columns = integers.view(integers.shape[0], -1, PACKED)[:, :, list(order)]
    shifts = BITS * torch.arange(PACKED)
    packed = (columns << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def num_bytes_of(folder: Path) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())

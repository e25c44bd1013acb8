"""Weights of a `Transformer`: from a checkpoint, tensor by tensor, or random from a seed; and
products of weights in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from sarathi_kernels.attention.kv_cache import quantize
from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import stored_tensors
from sarathi_lab.model.huggingface import Source, parameter_sources
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

E4M3 = torch.float8_e4m3fn
ROW_WISE = F.ScalingType.RowWise
OLDEST = (8, 9)  # compute capability that multiplies e4m3
MULTIPLE = 16  # of the sizes of a product on a GPU
EXACT = 1024  # products of two int8 whose sum float32 holds exactly: 127 * 127 * 1024 < 2^24


class EightBitLinear(nn.Module):
    """Product of `linear` in 8 bits: weights [out_features, in_features], with float32 scales of
    output channels and of tokens.
    """

    dtype: ClassVar[torch.dtype]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = quantize(linear.weight, self.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)  # [out_features]
        self.bias = linear.bias


class Fp8Linear(EightBitLinear):
    """Product in e4m3. A GPU multiplies in 8 bits; torch's CPU code converts both sides to float32
    before it does. `quantize_rows` is a kernel where kernels compute.
    """

    dtype = E4M3
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = staticmethod(
        partial(quantize, dtype=E4M3)
    )

    def forward(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        rows, scales = self.quantize_rows(x)
        sides = (rows, self.weight.t(), scales[:, None], ROW_WISE, self.scales[None], ROW_WISE)
        product = F.scaled_mm(*sides, output_dtype=x.dtype)
        return product if self.bias is None else product.add_(self.bias)


class Int8Linear(EightBitLinear):
    """Product in int8 with exact sums."""

    dtype = torch.int8

    def forward(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        rows, scales = quantize(x, torch.int8)
        sums = torch.zeros(len(rows), len(self.weight), dtype=torch.int32, device=rows.device)
        # In float32, as torch has no fast product of integers on every CPU.
        parts = zip(rows.split(EXACT, 1), self.weight.split(EXACT, 1), strict=True)
        for some, of_weight in parts:
            sums += (some.float() @ of_weight.float().t()).int()
        product = sums.float() * scales[:, None] * self.scales
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def why_not_fp8(
    linears: list[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why `device` can't multiply weights of these sizes in e4m3; None if it can."""
    if device.type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        number, oldest = (".".join(map(str, one)) for one in (capability, OLDEST))
        return f"the GPU's compute capability is {number}, below {oldest}"
    if dtype != torch.bfloat16:
        return f"its products on a GPU give bfloat16, and dtype is {str(dtype).split('.')[-1]}"
    if odd := [size for sizes in linears for size in sizes if size % MULTIPLE]:
        return f"a layer's size, {odd[0]}, is no multiple of {MULTIPLE}"
    return None


PRODUCTS: dict[str, type[EightBitLinear]] = {"fp8": Fp8Linear, "int8": Int8Linear}
Fill = Callable[[Tensor], None]


def load_model(
    spec: ModelSpec, directory: Path | None, device: torch.device, dtype: torch.dtype, seed: int
) -> Transformer:
    """The model on `device`, its weights from the checkpoint in `directory`, or random from `seed`.
    In 8 bits, where `spec` has them, once they are loaded in `dtype`. Raises UserError for a shape
    that is meant for simulation only, or a tied output head that differs from the embedding.
    """
    spec.require_runnable()
    model = Transformer(spec, device, dtype)
    parameters = dict(model.named_parameters())
    for name, fill in fillers(spec, directory, parameters, seed, device):
        fill(parameters[name])
    return in_8_bits(model).eval()


def fillers(
    spec: ModelSpec,
    directory: Path | None,
    parameters: Mapping[str, Tensor],
    seed: int,
    device: torch.device,
) -> Iterator[tuple[str, Fill]]:
    """Yield the names of the whole model's `parameters`, with a function that fills one: of random
    weights all must be called, in order. Activations stay of order one at any width and depth
    (GPT-2's residual scaling).
    """
    if directory is not None:
        yield from _stored(spec, directory)
        return
    generator = torch.Generator(device).manual_seed(seed)
    for name in parameters:
        yield name, partial(_draw, name=name, spec=spec, generator=generator)


def in_8_bits(model: Transformer) -> Transformer:
    """Replace the products of the layers by those in 8 bits, if the spec has them; in int8 also the
    output head.
    """
    if (kind := PRODUCTS.get(model.spec.weight_dtype)) is None:
        return model
    for parent in (*model.layers, *((model,) if kind is Int8Linear else ())):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear):
                setattr(parent, name, kind(module))
    return model


def _draw(parameter: Tensor, name: str, spec: ModelSpec, generator: torch.Generator) -> None:
    """Fill the parameter `name` of the whole model: at random, but biases with 0, norms with 1."""
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    is_looked_up = name == "embedding.weight" and not spec.tie_embeddings
    deviation = 1.0 if is_looked_up else parameter.shape[-1] ** -0.5
    is_residual = "out_proj" in name or "down" in name
    deviation *= (2 * spec.num_layers) ** -0.5 if is_residual else 1.0
    parameter.normal_(0.0, deviation, generator=generator)


def _stored(spec: ModelSpec, directory: Path) -> Iterator[tuple[str, Fill]]:
    """Open each file once, as an expert is a tensor, and a header is read at every opening."""
    stored = stored_tensors(directory)
    opened = {file: safe_open(file, "pt") for file in {one.file for one in stored.values()}}

    def read(tensor: str) -> Tensor:
        found: Tensor = opened[stored[tensor].file].get_tensor(tensor)
        return found

    for name, sources in parameter_sources(directory, spec, stored):
        tensor, tied = sources[0].tensor, sources[0].tied
        if not tied:
            yield name, partial(_copy, sources=sources, read=read, num_heads=spec.num_heads)
        elif tensor in stored and not (read(tensor) == read(tied)).all():
            raise UserError(
                f"{tensor} in {directory} differs from the embedding; correct tie_word_embeddings "
                "in config.json to false"
            )


def _copy(
    parameter: Tensor, sources: Sequence[Source], read: Callable[[str], Tensor], num_heads: int
) -> None:
    """Copy each tensor into its rows; files are mapped, so the weights are never there twice. The
    weights of all experts are one parameter, their rows one after the other.
    """
    rows = parameter.view(-1, *sources[0].shape[1:]).split([one.shape[0] for one in sources])
    for source, target in zip(sources, rows, strict=True):
        target.copy_(source.as_computed(read(source.tensor), num_heads))

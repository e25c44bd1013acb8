"""Fills a `Transformer`: from a checkpoint, tensor by tensor, or with seeded random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import Stored, stored_tensors
from sarathi_lab.model.eight_bit import Fp8Linear, Int8Linear
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.tensor_names import Source, parameter_sources
from sarathi_lab.model.transformer import Transformer

PRODUCTS: dict[str, Callable[[nn.Linear], nn.Module]] = {"fp8": Fp8Linear, "int8": Int8Linear}


def load_model(
    spec: ModelSpec, directory: Path | None, device: torch.device, dtype: torch.dtype, seed: int
) -> Transformer:
    """The model on `device`, its weights from the checkpoint in `directory`, or random from `seed`.
    In 8 bits, where `spec` has them, once they are loaded in `dtype`. Raises UserError for a shape
    that is meant for simulation only.
    """
    spec.require_runnable()
    model = Transformer(spec, device, dtype)
    if directory is None:
        fill_at_random(model, seed)
    else:
        fill_from(model, directory)
    return in_8_bits(model).eval()


def in_8_bits(model: Transformer) -> Transformer:
    """Replace the products of the layers by those in 8 bits, if the spec has them; in int8 also the
    output head.
    """
    if (made := PRODUCTS.get(model.spec.weight_dtype)) is None:
        return model
    for parent in (*model.layers, *((model,) if made is Int8Linear else ())):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear):
                setattr(parent, name, made(module))
    return model


def fill_at_random(model: Transformer, seed: int) -> None:
    """Activations stay of order one at any width and depth (GPT-2's residual scaling)."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        draw(parameter, name, model.spec, generator)


def draw(parameter: Tensor, name: str, spec: ModelSpec, generator: torch.Generator) -> None:
    """Fill the parameter `name` of the whole model: at random, but biases with 0, norms with 1."""
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    is_looked_up = name == "embedding.weight" and not spec.tie_embeddings
    deviation = 1.0 if is_looked_up else parameter.shape[-1] ** -0.5
    is_residual = "out_proj" in name or "down" in name
    deviation *= (2 * spec.num_layers) ** -0.5 if is_residual else 1.0
    parameter.normal_(0.0, deviation, generator=generator)


def fill_from(model: Transformer, directory: Path) -> None:
    """Copy each tensor into its rows; files are mapped, so the weights are never there twice.
    Raises UserError for a tied output head that differs from the embedding.
    """
    stored = stored_tensors(directory)
    files = opened(stored)
    for name, sources in parameter_sources(directory, model.spec, stored):
        # the weights of all experts are one parameter, their rows one after the other
        parameter = model.get_parameter(name).view(-1, *sources[0].shape[1:])
        rows = parameter.split([source.shape[0] for source in sources])
        for source, target in zip(sources, rows, strict=True):
            if source.tied and source.tensor not in stored:
                continue
            tensor = _read(source, files[source.tensor], model.spec.num_heads)
            if not source.tied:
                target.copy_(tensor)
            elif not torch.equal(tensor.to(target), target):
                raise untied(source.tensor, directory)


def untied(tensor: str, directory: Path) -> UserError:
    return UserError(
        f"{tensor} in {directory} differs from the embedding; correct tie_word_embeddings in "
        "config.json to false"
    )


def opened(stored: dict[str, Stored]) -> dict[str, safe_open]:
    """The file of each tensor, opened once: an expert is a tensor, and a header is read at every
    opening.
    """
    files = {one.file for one in stored.values()}
    open_files = {file: safe_open(file, framework="pt") for file in files}
    return {tensor: open_files[one.file] for tensor, one in stored.items()}


def _read(source: Source, file: safe_open, num_heads: int) -> Tensor:
    """The rows of a parameter that `source` is of."""
    tensor: Tensor = file.get_tensor(source.tensor)
    return by_projection(tensor, num_heads) if source.interleaved else tensor


def by_projection(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of (q, k, v) of each head as all q, all k, all v."""
    by_head = tensor.view(num_heads, 3, -1, *tensor.shape[1:])
    return by_head.transpose(0, 1).reshape(tensor.shape)

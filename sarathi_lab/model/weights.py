"""Fills a `Transformer`: from a checkpoint, tensor by tensor, or with seeded random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import stored_tensors
from sarathi_lab.model.fp8 import Fp8Linear
from sarathi_lab.model.int8 import Int8Linear
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.tensor_names import Source, parameter_sources
from sarathi_lab.model.transformer import Transformer

PRODUCTS: dict[str, Callable[[nn.Linear], nn.Module]] = {"fp8": Fp8Linear, "int8": Int8Linear}


def load_model(
    spec: ModelSpec, directory: Path | None, device: torch.device, dtype: torch.dtype, seed: int
) -> Transformer:
    """The model on `device`, its weights from the checkpoint in `directory`, or random from `seed`.
    In 8 bits, where `spec` says so, once they are there in `dtype`. Raises UserError for a shape
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
    """`model` with such products in the place of its own, exchanged one after the other, if its
    spec says so: those of its layers, and in int8 the output head.
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
        deviation = random_deviation(name, parameter.shape, model.spec)
        if deviation is None:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, deviation, generator=generator)


def random_deviation(name: str, shape: Sequence[int], spec: ModelSpec) -> float | None:
    """The standard deviation of a parameter's random values; None for biases, 0, and norms, 1."""
    if len(shape) == 1:
        return None
    is_looked_up = name == "embedding.weight" and not spec.tie_embeddings
    deviation = 1.0 if is_looked_up else shape[-1] ** -0.5
    is_residual = "out_proj" in name or "down" in name
    return deviation * ((2 * spec.num_layers) ** -0.5 if is_residual else 1.0)


def fill_from(model: Transformer, directory: Path) -> None:
    """Copy each tensor into its rows; files are mapped, so the weights are never there twice.
    Raises UserError for an output head that is told to equal the embedding, and does not.
    """
    stored = stored_tensors(directory)
    # Each file opened once: an expert is a tensor, and a header is read at every opening.
    files = {one.file: safe_open(one.file, framework="pt") for one in stored.values()}
    for name, sources in parameter_sources(directory, model.spec, stored):
        # the weights of all experts are one parameter, their rows one after the other
        parameter = model.get_parameter(name).view(-1, *sources[0].shape[1:])
        rows = parameter.split([source.shape[0] for source in sources])
        for source, target in zip(sources, rows, strict=True):
            if source.tied and source.tensor not in stored:
                continue
            tensor = _read(source, files[stored[source.tensor].file], model.spec)
            if not source.tied:
                target.copy_(tensor)
            elif not torch.equal(tensor.to(target), target):
                raise untied(source.tensor, directory)


def untied(tensor: str, directory: Path) -> UserError:
    return UserError(
        f"{tensor} in {directory} differs from the embedding; correct tie_word_embeddings in "
        "config.json to false"
    )


def _read(source: Source, tensors: safe_open, spec: ModelSpec) -> Tensor:
    """The rows of a parameter that `source` is of."""
    tensor = tensors.get_tensor(source.tensor)
    if not source.interleaved:
        return tensor
    # From (q, k, v) of each head to all q, all k, all v.
    by_head = tensor.view(spec.num_heads, 3, -1, *tensor.shape[1:])
    return by_head.transpose(0, 1).reshape(tensor.shape)

"""Weights of a `Transformer`: from a checkpoint, tensor by tensor, or random from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import stored_tensors
from sarathi_lab.model.huggingface import Source, parameter_sources
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

Fill = Callable[[Tensor], None]


def load_model(
    spec: ModelSpec,
    directory: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> Transformer:
    """The model on `device`, its weights from the checkpoint in `directory`, or random from `seed`.
    Raises UserError for a shape that is meant for simulation only, or a tied output head that
    differs from the embedding.
    """
    spec.require_runnable()
    model = Transformer(spec, device, dtype)
    parameters = dict(model.named_parameters())
    for name, fill in fillers(spec, directory, parameters, seed, device):
        fill(parameters[name])
    return model.eval()


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


def _draw(parameter: Tensor, name: str, spec: ModelSpec, generator: torch.Generator) -> None:
    """Fill the parameter `name` of the whole model: at random, but biases with 0, norms with 1."""
    if parameter.ndim == 1:
        is_bias = name.endswith("bias")
        parameter.fill_(0.0 if is_bias else 1.0)
        return
    is_looked_up = name == "embedding.weight" and not spec.tie_embeddings
    deviation = 1.0 if is_looked_up else parameter.shape[-1] ** -0.5
    is_residual = "out_proj" in name or "down" in name
    if is_residual:
        deviation *= (2 * spec.num_layers) ** -0.5
    parameter.normal_(0.0, deviation, generator=generator)


def _stored(spec: ModelSpec, directory: Path) -> Iterator[tuple[str, Fill]]:
    """Open each file once, as an expert is a tensor, and a header is read at every opening."""
    stored = stored_tensors(directory)
    files = {tensor.file for tensor in stored.values()}
    opened = {file: safe_open(file, "pt") for file in files}

    def read(name: str) -> Tensor:
        file = opened[stored[name].file]
        tensor: Tensor = file.get_tensor(name)
        return tensor

    for name, sources in parameter_sources(directory, spec, stored):
        tensor = sources[0].tensor
        tied = sources[0].tied
        if not tied:
            yield name, partial(_copy, sources=sources, read=read, num_heads=spec.num_heads)
            continue
        is_equal = tensor not in stored or (read(tensor) == read(tied)).all()
        if not is_equal:
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
    num_rows = [source.shape[0] for source in sources]
    shape_of_row = sources[0].shape[1:]
    rows = parameter.view(-1, *shape_of_row)
    for source, target in zip(sources, rows.split(num_rows), strict=True):
        stored = read(source.tensor)
        target.copy_(source.as_computed(stored, num_heads))

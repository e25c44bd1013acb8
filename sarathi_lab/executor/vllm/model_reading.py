"""Specs of models by vLLM's reading of their configuration, and of weights that it quantises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.vllm import workers as vllm
from sarathi_lab.executor.vllm.worker_errors import last_line
from sarathi_lab.model.checkpoint import stored_tensors
from sarathi_lab.model.huggingface import read_config, spec_of
from sarathi_lab.model.quantisation import Quantisation, Quantised
from sarathi_lab.model.quantised_config import read_quantisation
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.stored_spec import StoredSpec

Arguments = Mapping[str, object]  # of vLLM's engine

QUANTISING = ("quantization", "quantization_config")  # engine arguments
FP8_PER_TENSOR = ("fp8", "fp8_per_tensor")  # values of the first: one scale for all of a weight
_shapes: dict[str, vllm.ModelShape] = {}  # that vLLM has read, a second each, by arguments


def shape_of(arguments: Arguments, runner: str) -> vllm.ModelShape:
    """Return the shape of the model that `arguments` name. Raises what vLLM does."""
    key = f"{arguments} {runner}"
    if key not in _shapes:
        _shapes[key] = vllm.model_shape(arguments, runner)
    return _shapes[key]


def read_spec(checkpoint: Path, arguments: Arguments, runner: str, *, on_gpu: bool) -> ModelSpec:
    """Return the spec of a checkpoint by vLLM's reading. Raises UserError for one that vLLM
    refuses, or that executor=vllm does not run on this device.
    """
    try:
        shape = shape_of(arguments, runner)
    except Exception as error:
        raise UserError(
            f"model.path={checkpoint}: vLLM can't load it ({last_line(error)}); take another"
        ) from None
    reason = shape.beyond
    if reason is None and not on_gpu:
        reason = _lack_on_cpu(shape)
    if reason is not None:
        raise UserError(
            f"model.path={checkpoint} has {reason}, which executor=vllm does not run; take another"
        )
    if shape.is_quantised:
        quantised = _quantised_spec(checkpoint)
        if quantised is not None:
            return quantised
    return _stored_spec(checkpoint, shape)


def _quantised_spec(checkpoint: Path) -> ModelSpec | None:
    """Return the spec of a quantised model that the lab itself computes in its type; None for
    others, and for a method whose bytes are not known.
    """
    try:
        config = read_config(checkpoint)
        plain = {**config, "quantization_config": None}
        spec = spec_of(plain, checkpoint.resolve().name)
        return replace(spec, quantisation=read_quantisation(config, spec))
    except (UserError, KeyError):
        return None


def _lack_on_cpu(shape: vllm.ModelShape) -> str | None:
    """Return what vLLM's operators on a CPU do not compute, where it checks nothing."""
    if not shape.is_latent:
        if shape.head_size not in vllm.head_sizes_of_cpu():
            return f"heads of {shape.head_size} on a CPU"
        return None
    # `rotary_embedding` of vLLM 0.32 takes the last axis of queries for all heads: those of latent
    # attention have an axis of heads, of which it rotates the first alone.
    if shape.has_plain_rotation:
        return "latent attention with plain rotary embeddings on a CPU"
    sizes = vllm.latent_sizes_of_cpu()
    if shape.head_size not in sizes:
        return f"latents of {shape.head_size}, not {', '.join(map(str, sizes))}, on a CPU"
    return None


def _stored_spec(checkpoint: Path, shape: vllm.ModelShape) -> StoredSpec:
    """Return sizes alone: those of the files, and of the cache."""
    stored_params = 0
    stored_bytes = 0
    for tensor in stored_tensors(checkpoint).values():
        stored_params += tensor.num_elements
        stored_bytes += tensor.num_bytes
    num_kv_heads = shape.num_kv_heads
    num_cached = 2 * num_kv_heads * shape.head_size
    if shape.is_latent:  # one for all heads
        num_kv_heads = 1
        num_cached = shape.head_size
    return StoredSpec(
        name=checkpoint.resolve().name,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=num_kv_heads,
        ffn_size=shape.ffn_size,
        vocab_size=shape.vocab_size,
        head_size=shape.head_size,
        max_position=shape.max_position,
        stored_params=stored_params,
        stored_bytes=stored_bytes if shape.is_quantised else None,
        cached_values=shape.num_layers * num_cached,
    )


def quantised_setting(options: Mapping[str, object]) -> str | None:
    """Return the setting that has vLLM quantise weights when it loads them, if there is one."""
    for name in QUANTISING:
        if options.get(name) is not None:
            return f"executor.options.{name}={options[name]}"
    return None


def with_quantised_weights(
    spec: ModelSpec, arguments: Arguments, runner: str, *, setting: str
) -> ModelSpec:
    """Return `spec` with the bytes of weights that `setting` has vLLM quantise. Raises UserError
    for what vLLM refuses, and for a way of which its configuration states no bytes.
    """
    try:
        num_bytes = vllm.weight_bytes(arguments, runner)
    except Exception as error:
        raise UserError(f"{setting}: vLLM refuses it ({last_line(error)}); drop it") from None
    is_per_tensor = arguments.get("quantization") in FP8_PER_TENSOR
    if is_per_tensor and vllm.lacks_fp8_quantiser():
        raise UserError(
            f"{setting}: this vLLM lacks the operator static_scaled_fp8_quant, as on a CPU; use a "
            "GPU, or on a CPU a checkpoint in 4 bits (GPTQ, AWQ) by model.path"
        )
    if num_bytes is None:
        raise UserError(
            f"{setting}: vLLM's configuration states no bytes of such weights, which the lab "
            "counts; use fp8_per_tensor, or a quantised checkpoint by model.path"
        )
    if num_bytes.dense is not None:
        return replace(spec, quantisation=_on_load(setting, num_bytes.dense, "layers"))
    if num_bytes.expert is not None and spec.num_experts:
        return replace(spec, quantisation=_on_load(setting, num_bytes.expert, "experts"))
    raise UserError(f"{setting} quantises experts, which model {spec.name} has not; drop it")


def _on_load(setting: str, num_bytes: float, part: Quantised) -> Quantisation:
    """Return weights that vLLM quantises, with activations where the device can: their products
    have another peak.
    """
    return Quantisation(setting, num_bytes, product_type="fp8", of=part)

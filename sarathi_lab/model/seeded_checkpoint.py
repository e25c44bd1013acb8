"""Random weights of a seed, saved once as a Hugging Face checkpoint for engines that load those."""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sarathi_kernels.cpu.build import cache_folder
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import write_json
from sarathi_lab.model.huggingface import parameter_sources, spec_of, with_defaults
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.weights import load_model

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}


def seeded_checkpoint(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Path:
    """Return the checkpoint of the weights that `load_model` draws for these arguments, saved now
    unless an earlier call did. Raises UserError for a shape without an architecture in
    transformers.
    """
    require_architecture(spec)
    folder = path_of(spec, device, dtype, seed)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole, so that no process reads half a checkpoint.
    with TemporaryDirectory(dir=folder.parent) as name:
        part = Path(name) / spec.name
        part.mkdir()
        _write_config(part, spec, dtype)
        tensors = _tensors(part, spec, device, dtype, seed)
        save_file(tensors, part / "model.safetensors", {"format": "pt"})
        if not folder.is_dir():  # another process may have been faster
            part.rename(folder)
    return folder


def config_folder(spec: ModelSpec, dtype: torch.dtype) -> Path:
    """Return a folder with the config.json of `spec` alone, for engines that draw weights. Raises
    UserError for a shape without an architecture in transformers.
    """
    require_architecture(spec)
    folder = path_of_config(spec, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, spec, dtype)
    return folder


def _write_config(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    dtype_name = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config_of(spec, dtype_name))


def require_architecture(spec: ModelSpec) -> None:
    """Raise UserError for a shape that no architecture in transformers has: read back, its
    config.json would be another model.
    """
    config = with_defaults(config_of(spec, "float32"))
    if spec_of(config, spec.name) != spec.unquantised():
        raise UserError(
            f"model {spec.name} has no architecture in transformers, which checkpoints need; take "
            "a Llama, Mistral, Mixtral or Qwen, the paper's 7b, 13b or 33b, or executor=torch"
        )


def path_of(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Path:
    """Return where `seeded_checkpoint` keeps the weights, which depend on the kind of device."""
    return _path_of("checkpoints", spec, device.type, dtype, seed)


def path_of_config(spec: ModelSpec, dtype: torch.dtype) -> Path:
    """Return where `config_folder` keeps the config.json."""
    return _path_of("configs", spec, dtype)


def _path_of(kind: str, spec: ModelSpec, *settings: object) -> Path:
    plain = spec.unquantised()
    content = repr((plain, *settings)).encode()
    key = hashlib.sha256(content).hexdigest()[:16]
    folder = cache_folder() / kind / key
    return folder / spec.name


def config_of(spec: ModelSpec, dtype: str) -> dict[str, object]:
    """Return the config.json of the architecture that has the fields of `spec`."""
    kind = _architecture(spec)
    if kind == "gpt_neox":
        of_kind = _neox_settings(spec)
    elif spec.num_experts:
        of_kind = _llama_settings(spec) | _mixture_settings(spec, kind)
    else:
        of_kind = _llama_settings(spec)
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "hidden_act": spec.activation,
        "tie_word_embeddings": spec.tie_embeddings,
        "dtype": dtype,
        **of_kind,
    }


def _architecture(spec: ModelSpec) -> str:
    if spec.norm == "layer":
        return "gpt_neox"
    if spec.num_experts and not spec.qk_norm and not spec.qkv_bias:
        return "mixtral"
    if spec.num_experts:
        return "qwen3_moe" if spec.qk_norm else "qwen2_moe"
    if spec.qk_norm:
        return "qwen3"
    if spec.sliding_window is not None:
        return "mistral"
    return "qwen2" if spec.qkv_bias and not spec.out_bias else "llama"


def _llama_settings(spec: ModelSpec) -> dict[str, object]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    scaling = spec.rope_scaling
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope["low_freq_factor"] = scaling.low_freq_factor
            rope["high_freq_factor"] = scaling.high_freq_factor
            rope["original_max_position_embeddings"] = scaling.original_max_position
    return {
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "rms_norm_eps": spec.norm_eps,
        "attention_bias": spec.out_bias,
        "mlp_bias": spec.ffn_bias,
        "sliding_window": spec.sliding_window,
        "rope_parameters": rope,
    }


def _mixture_settings(spec: ModelSpec, kind: str) -> dict[str, object]:
    number = "num_local_experts" if kind == "mixtral" else "num_experts"
    return {
        number: spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.ffn_size,
        "shared_expert_intermediate_size": spec.shared_expert_size,
        "norm_topk_prob": spec.normalise_experts,
    }


def _neox_settings(spec: ModelSpec) -> dict[str, object]:
    """The paper's plain block, attention and FFN one after the other (`use_parallel_residual`)."""
    return {
        "layer_norm_eps": spec.norm_eps,
        "attention_bias": spec.qkv_bias,
        "use_parallel_residual": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": spec.rotary_fraction,
        },
        # transformers 4, whose vLLM releases are still in use, reads these two names.
        "rotary_pct": spec.rotary_fraction,
        "rotary_emb_base": spec.rope_theta,
    }


def _tensors(
    folder: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> dict[str, Tensor]:
    """Return the drawn weights by their names in the checkpoint, on the host."""
    model = load_model(
        spec.unquantised(),
        None,
        device,
        dtype,
        seed,
    )
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, sources in parameter_sources(folder, spec, ()):
        # Tied to the embedding, which is saved already.
        if sources[0].tied:
            continue
        parameter = parameters[name].detach().cpu()
        rows = parameter.view(-1, *sources[0].shape[1:]).split(
            [source.shape[0] for source in sources]
        )
        for source, part in zip(sources, rows, strict=True):
            stored = source.as_stored(part, spec.num_heads)
            tensors[source.tensor] = stored.contiguous()
    return tensors

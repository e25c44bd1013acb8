"""A Llama as files that every engine reads: its configuration, and seeded random weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.huggingface import read_config
from sarathi_lab.model.spec import ModelSpec

# What a Llama's configuration can say; anything else must be as it is by default.
SHAPES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


def require_llama(spec: ModelSpec) -> None:
    """Raise UserError unless `spec` is a plain Llama, which is what all engines read."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in (*SHAPES, "name", "rope_theta") and value != field.default:
            raise UserError(
                f"task.models: {spec.name} has {field.name}={value}, which a plain Llama has "
                "not; use 30m or 120m"
            )


def ensure_checkpoint(
    spec: ModelSpec, folder: Path, seed: int, *, has_weights: bool = True
) -> Path:
    """The checkpoint of `spec` below `folder`, made unless it is there, in float32."""
    directory = folder / (f"{spec.name}-seed{seed}" if has_weights else f"{spec.name}-shape")
    shapes = {theirs: getattr(spec, ours) for ours, theirs in SHAPES.items()}
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta}
    wanted: dict[str, Any] = {**shapes, "rope_parameters": rope}
    if directory.is_dir():
        found = read_config(directory)
        for name, value in wanted.items():
            if found.get(name) != value:
                raise UserError(
                    f"task.checkpoints: {directory} has {name}={found.get(name)}, the model "
                    f"{value}; remove that folder"
                )
        return directory
    from transformers.utils import logging

    unfinished = folder / f"{directory.name}.unfinished"
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _llama(wanted, seed if has_weights else None).save_pretrained(unfinished)
    finally:
        if had_bar:
            logging.enable_progress_bar()
    return unfinished.rename(directory)


def _llama(shapes: dict[str, Any], seed: int | None) -> Any:
    """The model with the weights of `seed`; None: its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    config = LlamaConfig(**shapes, **ends, pad_token_id=0, architectures=["LlamaForCausalLM"])
    if seed is None:
        return config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)

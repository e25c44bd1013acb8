"""Small random checkpoints, saved by transformers: one for each family and switch that the decoder
supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sarathi_lab.engine.request import Request

# Tests of model and executor run on the GPU where there is one: the same code, the other device.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {  # name: class in transformers, settings
    "llama": ("LlamaConfig", {}),
    "llama gqa, llama3 rope": (
        "LlamaConfig",
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama linear rope, tied": (
        "LlamaConfig",
        {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True},
    ),
    "llama biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen2 tied": (
        "Qwen2Config",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt_neox": ("GPTNeoXConfig", {"use_parallel_residual": False}),
    "gpt_neox whole rotary": (
        "GPTNeoXConfig",
        {
            "use_parallel_residual": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
}
_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 3}
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 6, "moe_intermediate_size": 20}
MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 5, "intermediate_size": 20}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe plain": ("Qwen3MoeConfig", {**_QWEN_EXPERTS, "head_dim": 16}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 28}),
}


def make_checkpoint(
    family: str,
    directory: Path,
    max_shard_size: str = "1GB",
    *,
    is_fused: bool = False,
    **sizes: int,
) -> torch.nn.Module:
    """Save a seeded random model of `family` and return it; every bias and norm is random too, or
    nothing tests it.

    `sizes` go before the family's own. With `is_fused` all experts are in one tensor, as they are
    in memory.
    """
    import transformers  # here, as it takes seconds

    transformers.logging.set_verbosity_error()
    kind, settings = {**FAMILIES, **MIXTURES}[family]
    config = getattr(transformers, kind)(**{**SIZES, **settings, **sizes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(
        directory, max_shard_size=max_shard_size, save_original_format=not is_fused
    )
    return model


def greedy_tokens(model: torch.nn.Module, requests: Sequence[Request]) -> dict[int, list[int]]:
    """What `generate` of transformers answers, by request."""
    greedy = {}
    for wish in requests:
        prompt = torch.from_numpy(wish.prompt_token_ids.astype(np.int64))[None]
        lengths = {"max_new_tokens": wish.output_len, "min_new_tokens": wish.output_len}
        ends = {"attention_mask": torch.ones_like(prompt), "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(prompt, do_sample=False, **ends, **lengths)
        greedy[wish.request_id] = out[0, wish.prompt_len :].tolist()
    return greedy

"""A Llama checkpoint of transformers as the GGUF file that llama.cpp reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

QUERY, KEY = "self_attn.q_proj", "self_attn.k_proj"
OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    QUERY: "attn_q",
    KEY: "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NEWLINE = 10  # a token that the vocabulary must have


def exported(model_dir: Path, dtype: str) -> Path:
    """The model in `dtype` (float32 or bfloat16) below its folder, made unless it is there."""
    target = model_dir / "llama_cpp" / f"{dtype}.gguf"
    if target.is_file():
        return target
    import gguf
    from safetensors.numpy import load_file

    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(unfinished, "llama")
    _describe(writer, config)
    kinds = gguf.GGMLQuantizationType
    matrices = {"float32": kinds.F32, "bfloat16": kinds.BF16}[dtype]
    for name, weight in renamed(load_file(model_dir / "model.safetensors"), config):
        kind = matrices if weight.ndim == 2 else kinds.F32
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads x head size, hidden] for rotary pairs (0, 1), (2,
    3), ... of a head.

    transformers rotates the pairs (0, n/2), (1, n/2 + 1), ... of its n rows. Products of queries
    and keys don't change.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def renamed(
    weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names and layouts. Raises ValueError for a weight that it has no name for."""
    heads = {QUERY: config["num_attention_heads"], KEY: config["num_key_value_heads"]}
    for name, weight in weights.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if name in OUTSIDE_LAYERS:
            yield OUTSIDE_LAYERS[name], weight
        elif layer is None or layer[2] not in IN_A_LAYER:
            raise ValueError(f"llama.cpp's Llama has no weight {name}")
        else:
            laid_out = interleaved(weight, heads[layer[2]]) if layer[2] in heads else weight
            yield f"blk.{layer[1]}.{IN_A_LAYER[layer[2]]}.weight", laid_out


def _describe(writer: Any, config: Mapping[str, Any]) -> None:
    """The shape; a vocabulary of RWKV's kind, as others' end of sequence is never answered."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([r"\n" if i == NEWLINE else f"{i}," for i in range(config["vocab_size"])])

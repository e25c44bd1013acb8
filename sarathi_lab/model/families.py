"""Architectures of published models, and what their config.json leaves to their code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sarathi_lab.model import own_fields as own
from sarathi_lab.model import state_layers
from sarathi_lab.model.config_facts import Config, Facts
from sarathi_lab.model.layers import LinearAttention
from sarathi_lab.model.spec import StoredDtype


@dataclass(frozen=True)
class Family:
    """What config.json leaves to the code of an architecture.

    Attributes:
        gated: Whether an FFN has a gate.
        tied: Whether the output head is the embedding, where the file does not say.
        every_full: Of how many layers the last sees the whole context, where a window is set and no
            layer is named; 0: none does.
        has_window_switch: Whether a window counts only with `use_sliding_window`.
        has_shared_gate: Whether a shared expert's output passes a gate.
        has_output_gate: Whether attention's output passes a gate.
        shared_size: The field of the width of shared experts, where no other has it.
        dense_size: The field of the width of an FFN in layers without experts.
        linear: How layers without a context are read, by their number.
        normal: Returns fields by the names of other models, where an architecture has its own.
        has_both: Whether every layer has attention of both kinds.
        float_states: Whether vLLM keeps the states in float32 though the file does not say so.
        defaults: Fields that published files leave out.
        counted: Fields of parts that only this architecture's formulas have.
        usual_weights: How its authors store the weights, where they have not 16 bits.
    """

    gated: bool = True
    tied: bool = False
    every_full: int = 0
    has_window_switch: bool = False
    has_shared_gate: bool = False
    has_output_gate: bool = False
    shared_size: str | None = None
    dense_size: str = "intermediate_size"
    linear: Callable[[Facts, int], LinearAttention] | None = None
    normal: Callable[[Facts], Config] | None = None
    has_both: bool = False
    float_states: bool = False
    defaults: Config = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    usual_weights: StoredDtype = "auto"


def _index_of(num_heads: int) -> Config:
    """Return the fields of an index, which files of some converters leave out."""
    return {"index_n_heads": num_heads, "index_head_dim": 128, "index_topk": 2048}


_PLAIN = Family()
_TIED = Family(tied=True)
_UNGATED = Family(gated=False)
_QWEN = Family(has_window_switch=True)
_DELTA = Family(has_shared_gate=True, has_output_gate=True, linear=state_layers.gated_delta)
# Of the 4B model, whose file names little else.
_GEMMA3: Config = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
}
_2048_POSITIONS: Config = {"max_position_embeddings": 2048}
_LFM2 = Family(tied=True, linear=state_layers.short_conv, normal=own.of_lfm2)
_GEMMA4 = Family(tied=True, normal=own.of_gemma4)
_GPT2 = Family(gated=False, tied=True, normal=own.of_gpt2)
FAMILIES: Mapping[str, Family] = {
    # Dense, with layers alike.
    **dict.fromkeys(("llama", "olmo", "olmo2", "granite", "glm", "glm4", "stablelm"), _PLAIN),
    **dict.fromkeys(("seed_oss", "internlm2", "internlm3", "mistral", "phi3", "exaone"), _PLAIN),
    **dict.fromkeys(("ministral", "ministral3", "aquila", "nemotron-nas", "helium"), _PLAIN),
    **dict.fromkeys(("cwm", "hyperclovax", "iquestcoder", "minicpm3", "mellum"), _PLAIN),
    **dict.fromkeys(("granite4_vision", "phi4mm", "phi4_multimodal"), _PLAIN),
    **dict.fromkeys(("gemma", "cohere", "smollm3", "ernie4_5", "hunyuan_v1_dense"), _TIED),
    **dict.fromkeys(("minicpm", "youtu", "hunyuan_vl"), _TIED),
    **dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl"), _QWEN),
    "qwen2_5_omni": _QWEN,
    **dict.fromkeys(("nemotron", "gpt_neox", "apertus", "arcee", "phi", "jais2"), _UNGATED),
    **dict.fromkeys(("persimmon", "nanochat"), _UNGATED),
    **dict.fromkeys(("opt", "starcoder2"), Family(gated=False, tied=True)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "bloom": replace(_GPT2, defaults=_2048_POSITIONS),
    "gptj": Family(gated=False, normal=own.of_gpt2),
    "falcon": Family(gated=False, tied=True, normal=own.of_falcon, defaults=_2048_POSITIONS),
    # Some layers see a window.
    **dict.fromkeys(("granite_swa", "granitemoe_swa", "kolibri1", "flint"), _PLAIN),
    **dict.fromkeys(("gemma2", "vaultgemma"), Family(tied=True, every_full=2)),
    "gemma3": Family(tied=True, every_full=6, defaults=_GEMMA3),
    "gemma3n": Family(tied=True, every_full=5),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _GEMMA4),
    **dict.fromkeys(("cohere2", "cohere2_moe"), Family(tied=True, every_full=4)),
    **dict.fromkeys(("olmo3", "exaone4", "exaone_moe"), Family(every_full=4)),
    "gpt_oss": Family(every_full=2, usual_weights="mxfp4"),
    # Mixtures of experts.
    **dict.fromkeys(("mixtral", "minimax_m2", "olmoe", "phimoe", "granitemoe"), _PLAIN),
    **dict.fromkeys(("glm4_moe", "dots1", "bailing_moe", "bailing_moe_v2"), _PLAIN),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _PLAIN),
    **dict.fromkeys(("solar_open", "hy_v3", "axk1", "mistral4"), _PLAIN),
    **dict.fromkeys(("granitemoeshared", "flex_olmo", "glm4v", "glm4v_moe"), _PLAIN),
    **dict.fromkeys(("ernie4_5_moe", "hunyuan", "hunyuan_v1_moe"), _TIED),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"), _QWEN),
    "qwen2_moe": Family(has_window_switch=True, has_shared_gate=True),
    **dict.fromkeys(("afmoe", "muse_glimmer"), Family(has_output_gate=True, every_full=4)),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), Family(normal=own.of_mimo)),
    **dict.fromkeys(("step3p5", "step3p7"), Family(normal=own.of_step)),
    "longcat_flash": Family(normal=own.of_longcat),
    "laguna": Family(normal=own.of_laguna),
    # Latents, of which an index selects some.
    "deepseek_v32": Family(defaults=_index_of(64)),
    "glm_moe_dsa": Family(defaults=_index_of(32)),
    "axk2": _PLAIN,
    "deepseek_v4": Family(
        normal=own.of_deepseek_v4,
        defaults=own.DEFAULTS_OF_V4,
        counted=("compress_ratios", "hc_mult"),
    ),
    "llama4": Family(
        every_full=4, shared_size="intermediate_size", dense_size="intermediate_size_mlp"
    ),
    # Some layers keep a state of constant size.
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _DELTA),
    "olmo_hybrid": Family(linear=state_layers.gated_delta),
    "kimi_linear": Family(linear=state_layers.kda, normal=own.of_kimi_linear, float_states=True),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _LFM2),
    # Its gates are products of their own, without a rank between.
    "bailing_hybrid": Family(
        linear=state_layers.kda, float_states=True, defaults={"linear_gate_rank": None}
    ),
    "minimax": Family(linear=state_layers.lightning, normal=own.of_minimax),
    "jamba": Family(linear=state_layers.mamba1, normal=own.of_jamba),
    "nemotron_h": Family(
        gated=False, linear=state_layers.mamba2, normal=own.of_nemotron_h, float_states=True
    ),
    "falcon_h1": Family(linear=state_layers.mamba2, has_both=True),
    **dict.fromkeys(("granitemoehybrid", "bamba"), Family(linear=state_layers.mamba2)),
}

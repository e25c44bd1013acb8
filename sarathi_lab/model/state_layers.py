"""Layers without a cache of tokens, by the fields of a published model's config.json."""

from __future__ import annotations

from sarathi_lab.model.config_facts import Facts
from sarathi_lab.model.layers import LinearAttention


def short_conv(facts: Facts, num_layers: int) -> LinearAttention:
    """Read LFM2's short convolutions, as wide as the hidden state."""
    return LinearAttention(
        num_layers,
        # The last inputs of the convolution are all that is kept; the rule has no further state.
        num_heads=1,
        num_key_heads=1,
        key_size=1,
        value_size=facts.size("hidden_size"),
        rule="short_conv",
        conv_size=facts.count("conv_L_cache", 3),
    )


def kda(facts: Facts, num_layers: int) -> LinearAttention:
    """Read Kimi Linear's layers."""
    num_heads = facts.size("linear_num_heads")
    size = facts.size("linear_head_dim")
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_size=size,
        value_size=size,
        rule="kda",
        conv_size=facts.count("linear_conv_kernel_dim", 4),
        gate_rank=facts.optional_size("linear_gate_rank", size),
    )


def lightning(facts: Facts, num_layers: int) -> LinearAttention:
    """Read MiniMax-01's layers, whose heads are as those of attention to a context."""
    num_heads = facts.size("num_attention_heads")
    size = facts.count("head_dim", facts.size("hidden_size") // num_heads)
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_size=size,
        value_size=size,
        rule="lightning",
        conv_size=1,  # none: it would see the token alone
        chunk=facts.count("block_size", 256),
    )


def mamba1(facts: Facts, num_layers: int) -> LinearAttention:
    """Read Jamba's layers of Mamba."""
    return LinearAttention(
        num_layers,
        # Every channel has decays of its own, so that the layer counts as one wide head.
        num_heads=1,
        num_key_heads=1,
        key_size=facts.size("mamba_d_state"),
        value_size=facts.count("mamba_expand", 2) * facts.size("hidden_size"),
        rule="mamba1",
        conv_size=facts.count("mamba_d_conv", 4),
        gate_rank=facts.size("mamba_dt_rank"),
    )


def gated_delta(facts: Facts, num_layers: int) -> LinearAttention:
    """Read Qwen3-Next's layers."""
    return LinearAttention(
        num_layers,
        num_heads=facts.size("linear_num_value_heads"),
        num_key_heads=facts.size("linear_num_key_heads"),
        key_size=facts.size("linear_key_head_dim"),
        value_size=facts.size("linear_value_head_dim"),
        conv_size=facts.count("linear_conv_kernel_dim", 4),
    )


def mamba2(facts: Facts, num_layers: int) -> LinearAttention:
    """Read layers of Mamba-2, by the names of Nemotron-H or of Bamba and what came from it."""
    num_heads = facts.size("mamba_num_heads", "mamba_n_heads")
    if facts.text("mamba_d_head") == "auto":
        inner = facts.size("mamba_expand") * facts.size("hidden_size")
        value_size = inner // num_heads
    else:
        value_size = facts.size("mamba_head_dim", "mamba_d_head")
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=facts.size("n_groups", "mamba_n_groups"),
        key_size=facts.size("ssm_state_size", "mamba_d_state"),
        value_size=value_size,
        rule="mamba2",
        conv_size=facts.size_or(4, "conv_kernel", "mamba_d_conv"),
        chunk=facts.size_or(128, "chunk_size", "mamba_chunk_size"),
    )

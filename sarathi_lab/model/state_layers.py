"""Layers without a cache of tokens, by the fields of a published model's config.json."""

from __future__ import annotations

from sarathi_lab.model.config_facts import Facts
from sarathi_lab.model.layers import LinearAttention, Rule

CHUNK_OF_MAMBA = 128  # tokens, where a file does not say


def read_states(rule: Rule, facts: Facts, num_layers: int) -> LinearAttention:
    """Read `num_layers` layers that keep states by a `rule`. Raises UserError, naming the field."""
    num_heads = facts.size("linear_num_heads")
    is_kda = rule == "kda"  # which has as many heads of keys
    num_key_heads = num_heads if is_kda else facts.size("linear_num_key_heads")
    is_mamba = rule == "mamba2"
    chunk = facts.count("linear_chunk", CHUNK_OF_MAMBA) if is_mamba else 64
    gate_rank = None
    if is_kda and not facts.flag("use_full_rank_gate", default=False):
        gate_rank = facts.size("linear_key_size")
    return LinearAttention(
        num_layers,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_size=facts.size("linear_key_size"),
        value_size=_value_size(facts, num_heads),
        rule=rule,
        conv_size=facts.count("linear_conv_size", 4),
        chunk=chunk,
        gate_rank=gate_rank,
    )


def _value_size(facts: Facts, num_heads: int) -> int:
    if facts.text("linear_value_size") != "auto":
        return facts.size("linear_value_size")
    inner_size = facts.size("mamba_expand") * facts.size("hidden_size")
    return inner_size // num_heads

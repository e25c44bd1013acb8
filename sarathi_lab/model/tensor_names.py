"""How checkpoints of Hugging Face name the tensors that fill the decoder's parameters."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_lab.model.huggingface import known, read_config
from sarathi_lab.model.spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that fills the next rows of one of the decoder's parameters.
    `interleaved` tensors hold (q, k, v) head by head, as GPT-NeoX stores them; one that is `tied`
    need not be there, as it has to equal what fills the parameter anyway.
    """

    tensor: str
    shape: tuple[int, ...]
    interleaved: bool = False
    tied: bool = False


# All experts in one tensor, as transformers holds them and may save them, under whatever family.
_FUSED = {"gate_up": "{}.mlp.experts.gate_up_proj", "down": "{}.mlp.experts.down_proj"}


def parameter_sources(
    directory: Path, spec: ModelSpec, stored: Container[str]
) -> Iterator[tuple[str, list[Source]]]:
    """Every parameter of `Transformer` and the checkpoint tensors that fill its rows, in order, by
    their names in whichever layout the tensors that are `stored` have.
    """
    family = read_config(directory)["model_type"]
    is_fused = _FUSED["down"].format("model.layers.0") in stored
    families = known("tensors")
    names = families.get("llama" if is_fused else family, families["llama"])
    table = (spec.vocab_size, spec.hidden_size)
    yield "embedding.weight", [Source(names["embedding"], table)]
    yield "lm_head.weight", [Source(names["lm_head"], table, tied=spec.tie_embeddings)]
    yield from _norm("final_norm", names["final_norm"], spec)
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", names["layer"].format(i)
        yield from _norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", spec)
        yield from _norm(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm", spec)
        for kind in ("q_norm", "k_norm") if spec.qk_norm else ():
            tensor = f"{theirs}.self_attn.{kind}.weight"
            yield f"{ours}.{kind}.weight", [Source(tensor, (spec.head_size,))]
        yield from _linears(ours, theirs, names, spec)
        if spec.num_experts:
            yield from _experts(ours, theirs, names, spec, is_fused=is_fused)


def _norm(ours: str, theirs: str, spec: ModelSpec) -> Iterator[tuple[str, list[Source]]]:
    for kind in ("weight", "bias") if spec.norm == "layer" else ("weight",):
        yield f"{ours}.{kind}", [Source(f"{theirs}.{kind}", (spec.hidden_size,))]


def _linears(
    ours: str, theirs: str, names: Mapping[str, Any], spec: ModelSpec
) -> Iterator[tuple[str, list[Source]]]:
    hidden, q, kv = spec.hidden_size, spec.q_size, spec.kv_size
    is_interleaved = "interleaved" in names
    parts = {  # rows of the modules, their columns, and whether they have biases
        "qkv_proj": ((q + 2 * kv,) if is_interleaved else (q, kv, kv), hidden, spec.qkv_bias),
        "out_proj": ((hidden,), q, spec.out_bias),
        "ffn_up": ((spec.ffn_size,) * len(names["ffn_up"]), hidden, spec.ffn_bias),
        "ffn_down": ((hidden,), spec.ffn_size, spec.ffn_bias),
        "router": ((spec.num_experts,), hidden, False),
        "shared_up": ((spec.shared_expert_size,) * 2, hidden, False),
        "shared_down": ((hidden,), spec.shared_expert_size, False),
        "shared_gate": ((1,), hidden, False),
    }
    for name in (linear.name for linear in spec.layer_linears):
        rows, columns, has_bias = parts[name]
        by_head = is_interleaved and name == "qkv_proj"
        for kind, width in (("weight", (columns,)), ("bias", ()))[: 1 + has_bias]:
            yield (
                f"{ours}.{name}.{kind}",
                [
                    Source(f"{theirs}.{module}.{kind}", (count, *width), by_head)
                    for module, count in zip(names[name], rows, strict=True)
                ],
            )


def _experts(
    ours: str, theirs: str, names: Mapping[str, Any], spec: ModelSpec, *, is_fused: bool
) -> Iterator[tuple[str, list[Source]]]:
    count, hidden, size = spec.num_experts, spec.hidden_size, spec.ffn_size
    shapes = {"gate_up": (size, hidden), "down": (hidden, size)}  # of each module
    for name, (rows, columns) in shapes.items():
        modules = names[name]
        whole = Source(_FUSED[name].format(theirs), (count, rows * len(modules), columns))
        each = (
            f"{theirs}.{names['experts']}.{i}.{module}.weight"
            for i in range(count)
            for module in modules
        )
        sources = [whole] if is_fused else [Source(tensor, shapes[name]) for tensor in each]
        yield f"{ours}.{name}", sources

"""Tables of measured operation times: the folder of CSV files that cost models interpolate.

Every file has a column `time_us`, microseconds of one device, and columns that say of what:

| file | columns | a row is |
| --- | --- | --- |
| `dense.csv` | layer, tokens | one call of a layer's operation over so many tokens (`LAYERS`) |
| `per_sequence.csv` | layer, sequences | an operation over the sequences that emit a token |
| `attention.csv` | prefill_chunk, kv_prefill, n_decode, kv_decode | one call: a chunk of so many \
tokens behind `kv_prefill` cached ones, and `n_decode` decodes of `kv_decode` tokens each |
| `products.csv` | dtype, tokens, in_features, out_features | a matrix product |
| `communication.csv` | operation, devices, bytes | a collective over `bytes` on each device |
| `moe.csv` | tokens, activated_experts | a layer's experts |

`attention.csv` may add num_heads, num_kv_heads and head_size, and num_prefills (equal chunks in one
call, else 1); `moe.csv` hidden_size, expert_size (of one device), num_experts and top_k, of experts
with a gate. What has such columns holds for any model, interpolated between shapes, or by the
nearest. The rest holds for the model and the degree of
tensor parallelism that it was measured for: `meta.yaml`, in the folder or the one above, names the
model, and a folder `tpN` the degree. `meta.yaml` further states the source, the size of the
elements (`dtype`), over how many layers a row of dense.csv and attention.csv is summed (`layers`,
else 1), and operations of the cost model that other rows contain (`included`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from sarathi_lab.model.spec import ModelSpec

TIME = "time_us"
MICROSECOND = 1e-6
META = "meta.yaml"
SHAPE = ("num_heads", "num_kv_heads", "head_size")
EXPERT_SHAPE = ("hidden_size", "expert_size", "num_experts", "top_k")
ATTENTION = ("prefill_attention", "decode_attention")
DTYPE_SIZES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "fp8": 1}


class Layer(NamedTuple):
    """What a `layer` of a table is to the cost model: its `operation`, how many calls of it a layer
    or an iteration makes, what it runs over, and the operations that it stands for besides.
    """

    operation: str
    calls: int = 1
    per: str = "layer"  # or "iteration", or "emit": once, over the tokens, or those that emit
    replaces: tuple[str, ...] = ()


LAYERS: Mapping[str, Layer] = {
    # The lab's names; vLLM's modules that are the same come second.
    **dict.fromkeys(("qkv_proj",), Layer("qkv_proj")),
    **dict.fromkeys(("out_proj", "o_proj"), Layer("out_proj")),
    **dict.fromkeys(("ffn_up", "gate_up_proj"), Layer("ffn_up")),
    **dict.fromkeys(("ffn_down", "down_proj"), Layer("ffn_down")),
    **dict.fromkeys(("activation", "act_fn"), Layer("activation")),
    "layernorm": Layer("norms", calls=2),
    "qk_norm": Layer("qk_norm"),
    "rotary_emb": Layer("rotary"),
    "embedding": Layer("embedding", per="iteration"),
    "final_layernorm": Layer("final_norm", per="iteration"),
    "lm_head": Layer("lm_head", per="emit"),
    **dict.fromkeys(("sampling", "sampler"), Layer("sampling", per="emit")),
    # As the engine is calibrated: the whole FFN, norms with residuals, the head with sampling, and
    # what an iteration takes beside these and attention.
    "ffn": Layer("ffn", replaces=("ffn_up", "ffn_down", "activation")),
    "elementwise": Layer("elementwise", replaces=("norms",)),
    "logits": Layer("logits", per="emit", replaces=("lm_head", "sampling")),
    "others": Layer("others", per="iteration"),
}


class File(NamedTuple):
    """Columns of a file: names, counts with their least values, and others that it may have."""

    names: tuple[str, ...]
    counts: Mapping[str, int]
    optional: tuple[str, ...] = ()


FILES: Mapping[str, File] = {
    "dense": File(("layer",), {"tokens": 1}),
    "per_sequence": File(("layer",), {"sequences": 1}),
    "attention": File(
        (),
        {"prefill_chunk": 0, "kv_prefill": 0, "n_decode": 0, "kv_decode": 0},
        (*SHAPE, "num_prefills"),
    ),
    "products": File(("dtype",), {"tokens": 1, "in_features": 1, "out_features": 1}),
    "communication": File(("operation",), {"devices": 2, "bytes": 1}),
    "moe": File((), {"tokens": 1, "activated_experts": 1}, EXPERT_SHAPE),
}
OF_ONE_MODEL = ("dense", "per_sequence")  # files that never have shapes


@dataclass(frozen=True)
class OperationTables:
    """The checked tables of a folder by file name (`FILES`), and what its `meta.yaml` says."""

    source: str
    frames: Mapping[str, pd.DataFrame]
    meta: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1  # devices that share a layer, of tables without shapes

    @property
    def num_layers(self) -> int:
        """Layers that a row of the layers' operations is summed over."""
        return int(self.meta.get("layers", 1))

    @property
    def dtype_bytes(self) -> int | None:
        """Size of the elements that were measured; None if not said."""
        name = str(self.meta.get("dtype", self.meta.get("variant", "")))
        return DTYPE_SIZES.get(name)

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether `meta.yaml` names this model, or its shapes as one of `tp_degrees` divides them
        (LLMServingSim's `hf_overrides`).
        """
        if _plain(str(self.meta.get("model", ""))).startswith(_plain(spec.name)):
            return True  # maybe one that is tuned further
        engine = self.meta.get("engine_effective")
        shapes = engine.get("hf_overrides") if isinstance(engine, Mapping) else None
        if not isinstance(shapes, Mapping):
            return False
        own = {
            "intermediate_size": spec.ffn_size,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "vocab_size": spec.vocab_size,
        }
        return any(
            all(shapes.get(name) == math.ceil(size / degree) for name, size in own.items())
            for degree in self.meta.get("tp_degrees", [1])
        )

    @property
    def included(self) -> tuple[str, ...]:
        """Operations of the cost model that other rows hold; vLLM's attention writes the cache."""
        own = ("kv_write",) if "vllm_version" in self.meta else ()
        return own + tuple(self.meta.get("included", ()))

    @cached_property
    def layers(self) -> Mapping[str, tuple[Layer, pd.DataFrame]]:
        """Rows of each named layer, with columns `size` (tokens or sequences) and `seconds`."""
        found = {}
        for file, size in (("dense", "tokens"), ("per_sequence", "sequences")):
            if (frame := self.frames.get(file)) is None:
                continue
            for name, rows in frame.rename(columns={size: "size"}).groupby("layer", sort=False):
                layer = LAYERS[str(name)]
                divided = self.num_layers if layer.per == "layer" else 1
                seconds = layer.calls * rows[TIME] * MICROSECOND / divided
                rows = rows.assign(seconds=seconds).sort_values("size")
                found[str(name)] = layer, rows[["size", "seconds"]]
        return found

    @property
    def has_own_model(self) -> bool:
        """Whether a table has no shapes, so holds for the model that it was measured with."""
        return any(name in self.frames for name in OF_ONE_MODEL) or any(
            name in self.frames and column not in self.frames[name]
            for name, column in (("attention", SHAPE[0]), ("moe", EXPERT_SHAPE[0]))
        )


def _plain(model: str) -> str:
    """A model's name without its organisation, case and signs."""
    return re.sub(r"[^a-z0-9]", "", model.rsplit("/", 1)[-1].lower())


def frames_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables of rows with the columns operation (of `LAYERS`, or `ATTENTION`), num_tokens (new
    ones, or decodes), kv_tokens (that attention reads in all, else 0), seconds, and maybe
    timing (how they were taken: graph, calls or host).
    """
    rows = rows.assign(**{TIME: rows.seconds / MICROSECOND})
    is_attention = rows.operation.isin(ATTENTION)
    attention = rows[is_attention]
    layers = rows[~is_attention].rename(columns={"operation": "layer"})
    per_emit = layers.layer.map(lambda name: LAYERS[name].per == "emit")
    is_decode = attention.operation == "decode_attention"
    tokens = attention.num_tokens
    sizes = {
        "prefill_chunk": tokens.where(~is_decode, 0),
        "kv_prefill": (attention.kv_tokens - tokens).where(~is_decode, 0),
        "n_decode": tokens.where(is_decode, 0),
        "kv_decode": (attention.kv_tokens // tokens).where(is_decode, 0),
    }
    frames = {
        "dense": layers[~per_emit].rename(columns={"num_tokens": "tokens"}),
        "per_sequence": layers[per_emit].rename(columns={"num_tokens": "sequences"}),
        "attention": attention.assign(**sizes),
    }
    how = [name for name in ("timing",) if name in rows]
    return {
        name: frame[[*FILES[name].names, *FILES[name].counts, TIME, *how]].reset_index(drop=True)
        for name, frame in frames.items()
    }


def write_tables(
    folder: Path, frames: Mapping[str, pd.DataFrame], meta: Mapping[str, Any], title: str = ""
) -> None:
    """Write the files of `folder`, numbers with six digits."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    (folder / META).write_text(title + yaml.safe_dump(dict(meta), sort_keys=False))

"""The files and tensors of a Hugging Face checkpoint: found, checked and named, nothing loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.model.huggingface import read_config, read_spec
from sarathi_lab.model.spec import ModelSpec

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors"]


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that fills the next rows of one of the decoder's parameters.

    `interleaved` tensors hold (q, k, v) head by head, as GPT-NeoX stores them.
    """

    tensor: str
    shape: tuple[int, ...]
    interleaved: bool = False


def find_checkpoint(path: str) -> Path:
    """The folder `path`, fetched first if it is a hub id. Raises UserError if there is none."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise UserError(
            f"model.path={path} is a file; name the folder that holds config.json and the weights"
        )
    if path.startswith((".", "/", "~")) or not HUB_ID.fullmatch(path):
        raise UserError(
            f"model.path={path} is missing; name a folder, or a hub id such as Qwen/Qwen3-0.6B"
        )
    return _fetch(path)


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # one of a dozen kinds, all meaning that it is not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.path={hub_id} is neither a folder here nor to be had from the hub ({reason}); "
            "check the id, the network, or name a folder"
        ) from None


def weight_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the files' headers.

    Raises UserError for no files, a missing shard of the index, a truncated or corrupt file.
    """
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = _shards(index)
        if missing := sorted(shards - {file.name for file in files}):
            raise UserError(
                f"model.path={directory} lacks {missing[0]}, which its index names; fetch it again"
            )
        files = [file for file in files if file.name in shards]
    if not files:
        others = [*directory.glob("*.bin"), *directory.glob("*.pt*")]
        hint = f"only {others[0].name}, which is not read; " if others else ""
        raise UserError(
            f"model.path={directory} has no weights: {hint}save it with save_pretrained, which "
            "writes .safetensors"
        )
    return {name: file for file in files for name in _header(file)}


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is no index of weights ({error!r}); fetch the checkpoint again"
        ) from None


def _header(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is truncated or corrupt ({error}); fetch it again") from None


def check_checkpoint(directory: Path, spec: ModelSpec) -> None:
    """Raise UserError unless every tensor that `spec` needs is there in the right shape."""
    files = weight_files(directory)
    sources = [source for _, parts in parameter_sources(directory, spec) for source in parts]
    if missing := [source.tensor for source in sources if source.tensor not in files]:
        raise UserError(
            f"model.path={directory} lacks {len(missing)} tensors, the first {missing[0]}; "
            "fetch the checkpoint again"
        )
    for source in sources:
        with safe_open(files[source.tensor], framework="numpy") as tensors:
            shape = tuple(tensors.get_slice(source.tensor).get_shape())
        if shape != source.shape:
            raise UserError(
                f"{source.tensor} in {files[source.tensor]} has shape {list(shape)}, config.json "
                f"asks for {list(source.shape)}; fetch the checkpoint again"
            )


@dataclass(frozen=True)
class _Family:
    """How a family of architectures names its tensors.

    `qkv` and `up` are modules that make up one of the decoder's linears, their rows one after the
    other; as many rows each but for `qkv`.
    """

    embedding: str
    lm_head: str
    final_norm: str
    layer: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    interleaved: bool


_LLAMA = _Family(
    embedding="model.embed_tokens.weight",
    lm_head="lm_head.weight",
    final_norm="model.norm",
    layer="model.layers.{}",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    interleaved=False,
)
_NEOX = _Family(
    embedding="gpt_neox.embed_in.weight",
    lm_head="embed_out.weight",
    final_norm="gpt_neox.final_layer_norm",
    layer="gpt_neox.layers.{}",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    interleaved=True,
)


def parameter_sources(directory: Path, spec: ModelSpec) -> Iterator[tuple[str, list[Source]]]:
    """Every parameter of `Transformer` and the checkpoint tensors that fill its rows, in order."""
    family = _NEOX if read_config(directory)["model_type"] == "gpt_neox" else _LLAMA
    table = (spec.vocab_size, spec.hidden_size)
    yield "embedding.weight", [Source(family.embedding, table)]
    if not spec.tie_embeddings:
        yield "lm_head.weight", [Source(family.lm_head, table)]
    yield from _norm("final_norm", family.final_norm, spec)
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", family.layer.format(i)
        yield from _norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", spec)
        yield from _norm(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm", spec)
        for kind in ("q_norm", "k_norm") if spec.qk_norm else ():
            tensor = f"{theirs}.self_attn.{kind}.weight"
            yield f"{ours}.{kind}.weight", [Source(tensor, (spec.head_size,))]
        yield from _linears(ours, theirs, family, spec)


def _norm(ours: str, theirs: str, spec: ModelSpec) -> Iterator[tuple[str, list[Source]]]:
    for kind in ("weight", "bias") if spec.norm == "layer" else ("weight",):
        yield f"{ours}.{kind}", [Source(f"{theirs}.{kind}", (spec.hidden_size,))]


def _linears(
    ours: str, theirs: str, family: _Family, spec: ModelSpec
) -> Iterator[tuple[str, list[Source]]]:
    hidden, q, kv = spec.hidden_size, spec.q_size, spec.kv_size
    qkv_rows = (q + 2 * kv,) if family.interleaved else (q, kv, kv)
    parts = {  # modules, their rows and columns, and whether they have biases
        "qkv_proj": (family.qkv, qkv_rows, hidden, spec.qkv_bias),
        "out_proj": ((family.out,), (hidden,), q, spec.out_bias),
        "ffn_up": (family.up, (spec.ffn_size,) * len(family.up), hidden, spec.ffn_bias),
        "ffn_down": ((family.down,), (hidden,), spec.ffn_size, spec.ffn_bias),
    }
    for name, (modules, rows, columns, has_bias) in parts.items():
        is_sorted = name == "qkv_proj" and family.interleaved
        for kind, width in (("weight", (columns,)), ("bias", ()))[: 1 + has_bias]:
            yield (
                f"{ours}.{name}.{kind}",
                [
                    Source(f"{theirs}.{module}.{kind}", (count, *width), is_sorted)
                    for module, count in zip(modules, rows, strict=True)
                ],
            )


@dataclass(frozen=True)
class AutoModel:
    """A Hugging Face folder or hub id, or None: random weights in a shape that fits the device."""

    path: str | None = None

    def resolve(self, default_name: str) -> tuple[ModelSpec, Path | None]:
        """The spec, and the folder of the weights if there is one; nothing is loaded, all checked.

        Without a path the spec is that of `conf/model/<default_name>.yaml`. Raises UserError for a
        path that is missing or incomplete, or an architecture that is not supported.
        """
        if self.path is None:
            return load_option("model", default_name), None
        directory = find_checkpoint(str(self.path))
        spec = read_spec(directory)
        check_checkpoint(directory, spec)
        return spec, directory

"""The files and tensors of a Hugging Face checkpoint: found, checked and named, nothing loaded.
Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.model.huggingface import read_config, read_spec
from sarathi_lab.model.spec import ModelSpec

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors"]


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that fills the next rows of one of the decoder's parameters.

    `interleaved` tensors hold (q, k, v) head by head, as GPT-NeoX stores them, and are sorted while
    loading.
    """

    tensor: str
    shape: tuple[int, ...]
    interleaved: bool = False


def find_checkpoint(path: str) -> Path:
    """The folder that `path` names, fetched first if it is a hub id. Raises UserError if there is
    no such thing.
    """
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
    except (
        Exception
    ) as error:  # the hub client raises a dozen kinds, all meaning that it is not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.path={hub_id} is neither a folder here nor to be had from the hub ({reason}); "
            "check the id, the network, or name a folder"
        ) from None


def weight_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the files' headers.

    Raises UserError if there are none, if a shard of the index is missing, or if a file is
    truncated or corrupt.
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
                f"{source.tensor} in {files[source.tensor]} has shape {list(shape)}, "
                "config.json asks for "
                f"{list(source.shape)}; fetch the checkpoint again"
            )


def parameter_sources(directory: Path, spec: ModelSpec) -> Iterator[tuple[str, list[Source]]]:
    """Every parameter of `transformer.Transformer` and the checkpoint tensors that fill its rows,
    in order.
    """
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
        if spec.qk_norm:
            for kind in ("q_norm", "k_norm"):
                yield (
                    f"{ours}.{kind}.weight",
                    [Source(f"{theirs}.self_attn.{kind}.weight", (spec.head_size,))],
                )
        for linear in family.linears(spec):
            yield from linear.sources(ours, theirs)


def _norm(ours: str, theirs: str, spec: ModelSpec) -> Iterator[tuple[str, list[Source]]]:
    for kind in ("weight", "bias") if spec.norm == "layer" else ("weight",):
        yield f"{ours}.{kind}", [Source(f"{theirs}.{kind}", (spec.hidden_size,))]


@dataclass(frozen=True)
class _FusedLinear:
    """One of the decoder's four linears and the checkpoint's modules that it is made of, with their
    rows.
    """

    name: str
    in_features: int
    has_bias: bool
    parts: tuple[tuple[str, int], ...]
    interleaved: bool = False

    def sources(self, ours: str, theirs: str) -> Iterator[tuple[str, list[Source]]]:
        weights = [
            Source(f"{theirs}.{part}.weight", (rows, self.in_features), self.interleaved)
            for part, rows in self.parts
        ]
        yield f"{ours}.{self.name}.weight", weights
        if self.has_bias:
            biases = [
                Source(f"{theirs}.{part}.bias", (rows,), self.interleaved)
                for part, rows in self.parts
            ]
            yield f"{ours}.{self.name}.bias", biases


def _llama_linears(spec: ModelSpec) -> list[_FusedLinear]:
    qkv = (
        ("self_attn.q_proj", spec.q_size),
        ("self_attn.k_proj", spec.kv_size),
        ("self_attn.v_proj", spec.kv_size),
    )
    gate_up = (("mlp.gate_proj", spec.ffn_size), ("mlp.up_proj", spec.ffn_size))
    hidden = spec.hidden_size
    return [
        _FusedLinear("qkv_proj", hidden, spec.qkv_bias, qkv),
        _FusedLinear("out_proj", spec.q_size, spec.out_bias, (("self_attn.o_proj", hidden),)),
        _FusedLinear("ffn_up", hidden, spec.ffn_bias, gate_up),
        _FusedLinear("ffn_down", spec.ffn_size, spec.ffn_bias, (("mlp.down_proj", hidden),)),
    ]


def _neox_linears(spec: ModelSpec) -> list[_FusedLinear]:
    hidden = spec.hidden_size
    qkv = (("attention.query_key_value", spec.q_size + 2 * spec.kv_size),)
    return [
        _FusedLinear("qkv_proj", hidden, spec.qkv_bias, qkv, interleaved=True),
        _FusedLinear("out_proj", spec.q_size, spec.out_bias, (("attention.dense", hidden),)),
        _FusedLinear("ffn_up", hidden, spec.ffn_bias, (("mlp.dense_h_to_4h", spec.ffn_size),)),
        _FusedLinear("ffn_down", spec.ffn_size, spec.ffn_bias, (("mlp.dense_4h_to_h", hidden),)),
    ]


@dataclass(frozen=True)
class _Family:
    """How a family of architectures names its tensors."""

    embedding: str
    lm_head: str
    final_norm: str
    layer: str
    linears: Callable[[ModelSpec], list[_FusedLinear]]


_LLAMA = _Family(
    "model.embed_tokens.weight", "lm_head.weight", "model.norm", "model.layers.{}", _llama_linears
)
_NEOX = _Family(
    "gpt_neox.embed_in.weight",
    "embed_out.weight",
    "gpt_neox.final_layer_norm",
    "gpt_neox.layers.{}",
    _neox_linears,
)


@dataclass(frozen=True)
class AutoModel:
    """`path` is a Hugging Face folder or hub id, or None for random weights in the shape that fits
    the device.
    """

    path: str | None = None

    def resolve(self, default_name: str) -> tuple[ModelSpec, Path | None]:
        """The spec, and the folder of the weights if there is one; nothing is loaded, all is
        checked.

        Without a path the spec is that of `conf/model/<default_name>.yaml`. Raises UserError for a
        path that is missing, holds no complete safetensors checkpoint, or an architecture that is
        not supported.
        """
        if self.path is None:
            return instantiate(OmegaConf.load(CONF / "model" / f"{default_name}.yaml")), None
        directory = find_checkpoint(str(self.path))
        spec = read_spec(directory)
        check_checkpoint(directory, spec)
        return spec, directory

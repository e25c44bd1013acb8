"""The model that a configuration names; of a Hugging Face checkpoint the files and tensors, found,
checked and named, nothing loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.paths import read_object
from sarathi_lab.model.huggingface import AGAIN, parameter_sources, read_spec
from sarathi_lab.model.published import QUANTISED_FILE, read_published
from sarathi_lab.model.spec import KvDtype, ModelSpec

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors"]
SHAPE_FILES = ["config.json", QUANTISED_FILE]  # what a simulation reads
DTYPES = ("F64", "F32", "BF16", "F16")
# Of an element, by safetensors' names of types.
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
# Buffers that old versions of transformers saved, which follow from the settings.
UNUSED = re.compile(r"rotary_emb\.inv_freq$|attention\.(masked_)?bias$")


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, as the header of its file describes it."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Raises UserError for a type that this module does not know."""
        if self.dtype not in ELEMENT_BYTES:
            raise UserError(f"{self.file} has tensors of {self.dtype}, whose size is unknown")
        return self.num_elements * ELEMENT_BYTES[self.dtype]


def find_checkpoint(path: str, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder `path`, or that of its config.json, or if it is a hub id the `files` that are
    fetched first. Raises UserError if there is none.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.name == "config.json" and directory.is_file():
        return directory.parent
    is_path = directory.exists() or path.startswith((".", "/", "~"))
    if is_path or not HUB_ID.fullmatch(path):
        reason = "is a file" if directory.exists() else "is missing"
        if path.lower().endswith(".gguf"):
            reason = "is a GGUF file, which is not read"
        raise UserError(
            f"model.path={path} {reason}; name a folder that holds config.json (and the weights, "
            "where a model is run), or a hub id such as Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except Exception as error:  # one of a dozen kinds, all meaning that it is not to be had
        message = str(error) or type(error).__name__
        reason = message.splitlines()[0]
        raise UserError(
            f"model.path={path} is neither a folder here nor to be had from the hub ({reason}); "
            "check the id, the network, or name a folder"
        ) from None


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors by name, from the files' headers. Raises UserError for no files, a missing shard
    of the index, a truncated or corrupt file, a tensor that is there twice.
    """
    tensors: dict[str, Stored] = {}
    for file in _weight_files(directory):
        of_file = _header(file)
        repeated = tensors.keys() & of_file
        if repeated:
            raise UserError(
                f"model.path={directory} has {min(repeated)} twice, the second in {file.name}; "
                "remove the file that is left over"
            )
        tensors |= of_file
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    """One file, the shards that an index names, or all files of the folder."""
    single_file = directory / "model.safetensors"
    if single_file.is_file():
        return [single_file]
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = read_object(index, AGAIN)["weight_map"]
            files = sorted({directory / name for name in shards.values()})
        except (KeyError, AttributeError, TypeError):
            raise UserError(f"{index} is no index of weights; {AGAIN}") from None
    if not files:
        raise UserError(
            f"model.path={directory} has no weights; save it with save_pretrained, which writes "
            ".safetensors"
        )
    return files


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            # A slice reads its header alone: the weights may not fit the memory.
            headers: dict[str, Stored] = {}
            for name, tensor in slices.items():
                shape = tuple(tensor.get_shape())
                headers[name] = Stored(file, tensor.get_dtype(), shape)
            return headers
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is missing, truncated or corrupt ({error}); {AGAIN}") from None


def check_checkpoint(directory: Path, spec: ModelSpec) -> None:
    """Raise UserError unless every tensor that `spec` needs is there, of floating point and in the
    right shape, and none besides.
    """
    tensors = stored_tensors(directory)
    unread = {name for name in tensors if not UNUSED.search(name)}
    for source in chain.from_iterable(
        sources for _, sources in parameter_sources(directory, spec, tensors)
    ):
        stored = tensors.get(source.tensor)
        unread.discard(source.tensor)
        if stored is None and not source.tied:
            raise UserError(f"model.path={directory} lacks {source.tensor}; {AGAIN}")
        if stored is None:
            continue
        fits = stored.shape == source.shape and stored.dtype in DTYPES
        if not fits:
            stated = f"{stored.dtype} {list(stored.shape)}"
            raise UserError(
                f"{source.tensor} in {stored.file} is {stated}, and has to be one of "
                f"{', '.join(DTYPES)} and, by config.json, {list(source.shape)}; take the "
                f"unquantized model, or {AGAIN}"
            )
    if unread:
        raise UserError(
            f"model.path={directory} has {len(unread)} tensors that its config.json has no place "
            f"for, the first {min(unread)}; correct config.json, or {AGAIN}"
        )


@dataclass(frozen=True)
class AutoModel:
    """A Hugging Face folder or hub id, or None: random weights in a shape that fits the device."""

    path: str | None = None

    def resolve(
        self, default_name: str, read_other: Callable[[Path], ModelSpec | None] = lambda _: None
    ) -> tuple[ModelSpec, Path | None]:
        """The spec, and the folder of the weights if there is one; nothing is loaded, all checked.

        Without a path the spec is that of `conf/model/<default_name>.yaml`. What the lab itself
        does not compute is left to `read_other`. Raises UserError for a path that is missing or
        incomplete, or an architecture that is not supported.
        """
        if self.path is None:
            return load_option("model", default_name), None
        directory = find_checkpoint(str(self.path))
        try:
            spec = read_spec(directory)
        except UserError:
            read = read_other(directory)
            if read is None:
                raise
            return read, directory
        check_checkpoint(directory, spec)
        return spec, directory

    def shape(self, default_name: str) -> tuple[ModelSpec, Path | None]:
        """The spec by config.json alone, for simulation, and the folder; no weights are needed.

        Without a path it is that of `conf/model/<default_name>.yaml`. Raises UserError as
        `read_published` does.
        """
        if self.path is None:
            return load_option("model", default_name), None
        directory = find_checkpoint(str(self.path), SHAPE_FILES)
        return read_published(directory), directory


def resolve_model(cfg: DictConfig, backend: Any) -> tuple[ModelSpec, Path | None]:
    """Make the model that `cfg` names.

    Returns:
        Its shapes, with the types of its cache and its weights; and the folder of its weights, None
        for random ones.

    Raises:
        UserError: The model can't be read, or `backend` does not compute it.
    """
    require_one_of("cache.dtype", cfg.cache.dtype, get_args(KvDtype))
    model = build(cfg.model)
    spec = model
    checkpoint = None
    if isinstance(model, AutoModel):
        if backend.computes_tokens:
            spec, checkpoint = model.resolve(backend.default_model, backend.read_model)
        else:
            spec, checkpoint = model.shape(backend.default_model)
    if spec.kv_dtype != "auto":
        raise UserError(
            f"model.kv_dtype={spec.kv_dtype} is set by the cache; use "
            f"cache.dtype={spec.kv_dtype} instead"
        )
    weights = cfg.executor.get("weights", "auto")
    spec = replace(spec, kv_dtype=cfg.cache.dtype, weight_dtype=weights)
    return backend.with_weights(spec, checkpoint), checkpoint


def text_encoder(checkpoint: Path | None) -> Callable[[str], list[int]] | None:
    """Return the encoder of text to token ids by the checkpoint's tokenizer, if it has one."""
    if checkpoint is None or not (checkpoint / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"{checkpoint}/tokenizer.json can't be read ({error}); fetch the checkpoint again"
        ) from None
    return lambda text: tokenizer.encode(text).ids

"""The model that a configuration names, and the tokenizer beside its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, get_args

from omegaconf import DictConfig

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import build
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.spec import KvDtype, ModelSpec


class HasDefaultModel(Protocol):
    """A device that knows the option of conf/model that suits it."""

    @property
    def default_model(self) -> str: ...


def resolve_model(cfg: DictConfig, backend: HasDefaultModel) -> tuple[ModelSpec, Path | None]:
    """The model that `cfg` names, its cache of type `cache.dtype`, and the folder of its weights if
    it has one. Raises UserError.
    """
    require_one_of("cache.dtype", cfg.cache.dtype, get_args(KvDtype))
    model = build(cfg.model)
    spec, checkpoint = (
        model.resolve(backend.default_model) if isinstance(model, AutoModel) else (model, None)
    )
    if spec.kv_dtype != "auto":
        raise UserError(
            f"model.kv_dtype={spec.kv_dtype} is set by the cache; use "
            f"cache.dtype={spec.kv_dtype} instead"
        )
    return replace(spec, kv_dtype=cfg.cache.dtype), checkpoint


def text_encoder(checkpoint: Path | None) -> Callable[[str], list[int]] | None:
    """Text to token ids by the checkpoint's own tokenizer, if it has one."""
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

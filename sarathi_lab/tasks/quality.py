"""The task `quality`: what chunks and the types of KV cache and weights do to what a trained model
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from sarathi_lab.config.checked import listed, whole
from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import UserError, require_bool, require_int, require_one_of
from sarathi_lab.config.paths import readable
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.device import DTYPES
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.teacher_forced import (
    Cuts,
    Tokens,
    blocks_needed,
    teacher_forced_logits,
)
from sarathi_lab.experiment.quality import joined
from sarathi_lab.model.checkpoint import text_encoder
from sarathi_lab.model.spec import KvDtype, ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.provenance import provenance, slug_of
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.subjects import BLOCK_SIZE, measured_subject, where_of

EXPERIMENT = "kv_quality"
HELD_OUT = "held_out.txt"  # of the text that a checkpoint's model was not trained on
NUM_BYTES = 256  # tokens of a model without a tokenizer
PIECE = "use the tokens of a piece, such as 256"
COUNTS = "use numbers of sequences such as [0,3]"
_axis = partial(listed, complaint="is not a list of values; use one such as those of the default")


def _dtype(name: str, value: object) -> None:
    require_one_of(name, value, tuple(DTYPES))


def _whole(minimum: int, fix: str) -> Any:
    return partial(require_int, minimum=minimum, fix=fix)


@dataclass(frozen=True)
class Quality(Task):
    """Compares what a trained model says, cut and cached in many ways, with uncut float32 by torch.

    The matrix has a row for every combination of the lists; settings: `conf/task/quality.yaml`.
    """

    reads = ("executor", "model", "device", "dtype")
    text: str | None = None
    num_texts: int = whole(4, minimum=1, fix="use a small number such as 4")
    length: int = whole(256, minimum=4 * BLOCK_SIZE, fix=PIECE)
    chunks: Sequence[int] = _axis((16, 64, 256), each=_whole(1, "use tokens such as [16,256]"))
    offsets: Sequence[int] = _axis((0, 5), each=_whole(0, "use tokens such as [0,5]"))
    prefix_hits: Sequence[bool] = _axis((False, True), each=require_bool)
    mates: Sequence[int] = _axis((0, 3), each=_whole(0, COUNTS))
    kv_dtypes: Sequence[KvDtype] = _axis(
        ("auto", "int8", "fp8"), each=partial(require_one_of, valid=get_args(KvDtype))
    )
    more_dtypes: Sequence[str] = _axis((), may_be_empty=True, each=_dtype)
    record: str | None = None

    def check(self, cfg: DictConfig) -> None:
        backend, spec, checkpoint = _subject(cfg)
        self._pieces(spec, checkpoint)
        for each, kv_dtype in product(self._backends(backend), self.kv_dtypes):
            each.check(replace(spec, kv_dtype=kv_dtype), self._num_blocks * BLOCK_SIZE)

    def _backends(self, first: TorchBackend) -> list[TorchBackend]:
        return [first, *(replace(first, dtype=name) for name in self.more_dtypes)]

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        backend, spec, checkpoint = _subject(cfg)
        where, pieces = where_of(backend, spec), self._pieces(spec, checkpoint)
        console().print(f"\nquality of {where}", style="bold")
        table = self._compared(backend, spec, checkpoint, pieces).assign(
            model=spec.name,
            device=backend.device_name,
            weights=backend.weights,
            git_commit=provenance()["git_commit"],
        )
        places: dict[str, Path | str] = {"results": context.run_dir}
        if self.record is not None:
            is_cpu = backend.num_threads is not None
            device = "cpu" if is_cpu else slug_of(torch.cuda.get_device_name())
            places["record"] = load.save(table, EXPERIMENT, device, Path(self.record))
        kinds = table.kv_dtype if not self.more_dtypes else table.dtype + " " + table.kv_dtype
        means = table.groupby(kinds)[["nll_increase", "kl", "top1_agreement"]].mean()
        return Result(
            tables={EXPERIMENT: table},
            summary={f"{c}/{k}": float(means[c][k]) for k in means.index for c in means},
            shown=[_shown(table)],
            places=places,
            labels={"where": where},
            tags=[EXPERIMENT, spec.name, *table.dtype.unique()],
            float_format="%.6g",
        )

    @property
    def _num_blocks(self) -> int:
        return blocks_needed(self.length, max(self.mates), BLOCK_SIZE)

    def _compared(
        self, backend: TorchBackend, spec: ModelSpec, checkpoint: Path, pieces: list[Tokens]
    ) -> pd.DataFrame:
        sizes = Sizes(self._num_blocks, BLOCK_SIZE, batch_size=1 + max(self.mates))
        exact = TorchBackend(backend.device, "float32", kernels="torch", threads=backend.threads)
        reference = exact.build(spec, checkpoint, sizes)
        cells = list(product(self.prefix_hits, self.chunks, self.offsets, self.mates))
        kinds = list(product(self._backends(backend), self.kv_dtypes))
        rows = []
        with progress_of("comparing", len(kinds) * len(cells) + 1, "cells") as progress:
            uncut = Cuts(self.length)
            texts = [(own, teacher_forced_logits(reference, own[:-1], uncut)) for own in pieces]
            progress(1)
            for each, kv_dtype in kinds:
                executor = each.build(replace(spec, kv_dtype=kv_dtype), checkpoint, sizes)
                for hit, chunk, offset, num_mates in cells:
                    cuts = Cuts(chunk, offset, hit)
                    row = _row(executor, cuts, num_mates, texts)
                    rows.append({"dtype": each.dtype_name, **row})
                    progress(1)
        return pd.DataFrame(rows)

    def _pieces(self, spec: ModelSpec, checkpoint: Path) -> list[Tokens]:
        """`num_texts` pieces of `length` + 1 tokens, evenly spread over the file."""
        path = Path(self.text) if self.text is not None else checkpoint / HELD_OUT
        with readable(f"task.text={path}", "name a text file"):
            content = path.read_bytes()
        if (encode := text_encoder(checkpoint)) is not None:
            tokens = np.array(encode(content.decode(errors="replace")), dtype=np.int32)
        elif spec.vocab_size == NUM_BYTES:
            tokens = np.frombuffer(content, dtype=np.uint8).astype(np.int32)
        else:
            raise UserError(
                f"model.path={checkpoint} has no tokenizer.json, and {spec.vocab_size} tokens, "
                "which are not bytes; fetch it with its tokenizer"
            )
        size = self.length + 1
        if len(tokens) < self.num_texts * size:
            raise UserError(
                f"task.text={path} has {len(tokens)} tokens, {self.num_texts} pieces of {size} are "
                "wanted; name a longer text, or lower task.num_texts or task.length"
            )
        step = len(tokens) // self.num_texts
        return [tokens[start : start + size] for start in range(0, self.num_texts * step, step)]


def _subject(cfg: DictConfig) -> tuple[TorchBackend, ModelSpec, Path]:
    backend, spec, checkpoint = measured_subject(cfg, "quality")
    if checkpoint is None:
        raise UserError(
            f"task=quality asks what trained weights say, and those of model {spec.name} are "
            "random; name a checkpoint by model.path (experiments/lab/kv_quality/train.py makes a "
            "small one)"
        )
    return backend, spec, checkpoint


def _row(
    executor: TorchExecutor, cuts: Cuts, num_mates: int, texts: list[tuple[Tokens, Tensor]]
) -> dict[str, object]:
    """A cell of the matrix; the mates of a text are those that follow it."""
    parts = []
    for number, (piece, reference) in enumerate(texts):
        mates = [texts[(number + 1 + mate) % len(texts)][0][:-1] for mate in range(num_mates)]
        found = teacher_forced_logits(executor, piece[:-1], cuts, mates)
        targets = torch.from_numpy(piece[-len(found) :].astype(np.int64)).to(found.device)
        parts.append((found, reference[-len(found) :], targets))
    result, model = joined(parts), executor.model
    return {
        "kv_dtype": model.spec.kv_dtype,
        **asdict(cuts),
        "num_mates": num_mates,
        "kv_bytes_per_token": model.spec.kv_bytes_per_token(model.dtype.itemsize),
        **asdict(result),
        "nll_increase": result.nll_increase,
    }


def _shown(table: pd.DataFrame) -> Shown:
    """The means of each type of model and cache, and its worst cell by divergence."""
    rows = []
    for (dtype, kv_dtype), cells in table.groupby(["dtype", "kv_dtype"], sort=False):
        worst = cells.iloc[int(cells.kl.argmax())]
        cell = f"chunk {worst.chunk}, offset {worst.offset}, mates {worst.num_mates}"
        rows.append(
            {
                "dtype": str(dtype),
                "KV cache": str(kv_dtype),
                "B/token": f"{worst.kv_bytes_per_token:,}",
                "NLL": f"{cells.nll.mean():.4f}",
                "increase": f"{cells.nll_increase.mean():+.2e}",
                "mean KL": f"{cells.kl.mean():.2e}",
                "worst KL": f"{worst.kl:.2e}",
                "same token": f"{cells.top1_agreement.mean():.2%}",
                "worst cell": f"{cell}, prefix hit" if worst.prefix_hit else cell,
            }
        )
    return Shown(rows, left=("dtype", "KV cache", "worst cell"))

"""The task `quality`: what chunks and the KV cache's type do to what a trained model says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_bool, require_int, require_one_of
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.teacher_forced import (
    Cuts,
    Tokens,
    blocks_needed,
    teacher_forced_logits,
)
from sarathi_lab.experiment.quality import joined
from sarathi_lab.model.spec import KvDtype, ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.provenance import provenance, slug_of
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.plan import text_encoder
from sarathi_lab.tasks.subjects import BLOCK_SIZE, measured_subject, require_list, where_of

EXPERIMENT = "kv_quality"
HELD_OUT = "held_out.txt"  # of the text that a checkpoint's model was not trained on
NUM_BYTES = 256  # tokens of a model without a tokenizer
COUNTS = "use numbers of sequences such as [0,3]"
AXES: Mapping[str, Callable[[str, Any], object]] = {
    "chunks": partial(require_int, minimum=1, fix="use tokens such as [16,256]"),
    "offsets": partial(require_int, minimum=0, fix="use tokens such as [0,5]"),
    "prefix_hits": require_bool,
    "mates": partial(require_int, minimum=0, fix=COUNTS),
    "kv_dtypes": partial(require_one_of, valid=get_args(KvDtype)),
}


@dataclass(frozen=True)
class Quality:
    """Compares what a trained model says, cut and cached in many ways, with uncut float32 by torch.

    The text is `num_texts` pieces of `length` tokens of the file `text`. The matrix has a row for
    every combination of `chunks`, `offsets`, `prefix_hits`, `mates` and `kv_dtypes`. `record` names
    a folder such as experiments to keep it in. Raises UserError for random weights, and for lists
    that are empty or hold what can't be.
    """

    reads: ClassVar[tuple[str, ...]] = ("executor", "model", "device", "dtype")
    has_runs: ClassVar[bool] = False
    text: str | None = None
    num_texts: int = 4
    length: int = 256
    chunks: Sequence[int] = (16, 64, 256)
    offsets: Sequence[int] = (0, 5)
    prefix_hits: Sequence[bool] = (False, True)
    mates: Sequence[int] = (0, 3)
    kv_dtypes: Sequence[KvDtype] = ("auto", "int8", "fp8")
    record: str | None = None

    def __post_init__(self) -> None:
        pieces, least = "use the tokens of a piece, such as 256", 4 * BLOCK_SIZE
        require_int("task.num_texts", self.num_texts, 1, "use a small number such as 4")
        require_int("task.length", self.length, least, pieces)
        fix = "use one such as those of the default"
        for name, check in AXES.items():
            values = getattr(self, name)
            require_list(f"task.{name}", values, "is not a list of values", fix, check)

    def check(self, cfg: DictConfig) -> None:
        """Raise UserError for weights or a text that are not there, or that do not go together."""
        backend, spec, checkpoint = _subject(cfg)
        self._pieces(spec, checkpoint)
        for kv_dtype in self.kv_dtypes:
            backend.check(replace(spec, kv_dtype=kv_dtype), self._num_blocks * BLOCK_SIZE)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """The matrix, also kept in `record`."""
        backend, spec, checkpoint = _subject(cfg)
        where, pieces = where_of(backend, spec), self._pieces(spec, checkpoint)
        console.console().print(f"\nquality of {where}", style="bold")
        table = self._compared(backend, spec, checkpoint, pieces).assign(
            model=spec.name,
            dtype=backend.dtype_name,
            device=backend.device_name,
            git_commit=provenance()["git_commit"],
        )
        places: dict[str, Path | str] = {"results": context.run_dir}
        if self.record is not None:
            is_cpu = backend.num_threads is not None
            device = "cpu" if is_cpu else slug_of(torch.cuda.get_device_name())
            places["record"] = load.save(table, EXPERIMENT, device, Path(self.record))
        means = table.groupby("kv_dtype")[["nll_increase", "kl", "top1_agreement"]].mean()
        return Result(
            tables={EXPERIMENT: table},
            summary={f"{c}/{k}": float(means[c][k]) for k in means.index for c in means},
            shown=[_shown(table)],
            places=places,
            labels={"where": where},
            tags=[EXPERIMENT, spec.name, backend.dtype_name],
            float_format="%.6g",
        )

    @property
    def _num_blocks(self) -> int:
        return blocks_needed(self.length, max(self.mates), BLOCK_SIZE)

    def _cells(self) -> Iterator[tuple[Cuts, int]]:
        """How the text is cut, and the number of mates, of every cell of one type of cache."""
        axes = product(self.prefix_hits, self.chunks, self.offsets, self.mates)
        return ((Cuts(chunk, offset, hit), num_mates) for hit, chunk, offset, num_mates in axes)

    def _compared(
        self, backend: TorchBackend, spec: ModelSpec, checkpoint: Path, pieces: list[Tokens]
    ) -> pd.DataFrame:
        exact = TorchBackend(backend.device, "float32", kernels="torch", threads=backend.threads)
        reference = self._executor(exact, spec, checkpoint)
        num_cells = len(self.kv_dtypes) * len(list(self._cells()))
        rows = []
        with console.progress_of("comparing", num_cells + 1, "cells") as progress:
            expected = [
                teacher_forced_logits(reference, piece[:-1], Cuts(self.length)) for piece in pieces
            ]
            progress(1)
            for kv_dtype in self.kv_dtypes:
                executor = self._executor(backend, replace(spec, kv_dtype=kv_dtype), checkpoint)
                for cuts, num_mates in self._cells():
                    rows.append(_row(executor, cuts, num_mates, pieces, expected))
                    progress(1)
        return pd.DataFrame(rows)

    def _executor(self, backend: TorchBackend, spec: ModelSpec, checkpoint: Path) -> TorchExecutor:
        sizes = Sizes(self._num_blocks, BLOCK_SIZE, batch_size=1 + max(self.mates))
        return backend.build(spec, checkpoint, sizes)

    def _pieces(self, spec: ModelSpec, checkpoint: Path) -> list[Tokens]:
        """`num_texts` pieces of `length` + 1 tokens, evenly spread over the file."""
        path = Path(self.text) if self.text is not None else checkpoint / HELD_OUT
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"task.text={path} can't be read ({error.strerror}); name a text file"
            ) from None
        tokens = _tokens(content, spec, checkpoint)
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


def _tokens(content: bytes, spec: ModelSpec, checkpoint: Path) -> Tokens:
    """By the checkpoint's own tokenizer, else its bytes."""
    if (encode := text_encoder(checkpoint)) is not None:
        return np.array(encode(content.decode(errors="replace")), dtype=np.int32)
    if spec.vocab_size != NUM_BYTES:
        raise UserError(
            f"model.path={checkpoint} has no tokenizer.json, and {spec.vocab_size} tokens, which "
            "are not bytes; fetch it with its tokenizer"
        )
    return np.frombuffer(content, dtype=np.uint8).astype(np.int32)


def _row(
    executor: TorchExecutor,
    cuts: Cuts,
    num_mates: int,
    pieces: list[Tokens],
    expected: list[Tensor],
) -> dict[str, object]:
    """A cell of the matrix; the mates of a piece are those that follow it."""
    parts = []
    for number, (piece, reference) in enumerate(zip(pieces, expected, strict=True)):
        mates = [pieces[(number + 1 + mate) % len(pieces)][:-1] for mate in range(num_mates)]
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
    """The means of each type of cache, and its worst cell by divergence."""
    rows = []
    for kv_dtype, cells in table.groupby("kv_dtype", sort=False):
        worst = cells.iloc[int(cells.kl.argmax())]
        cell = f"chunk {worst.chunk}, offset {worst.offset}, mates {worst.num_mates}"
        rows.append(
            {
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
    return Shown(rows, left=("KV cache", "worst cell"))

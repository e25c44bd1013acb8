"""The task of asking what chunks and the type of the KV cache do to the quality of what a trained
model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from torch import Tensor

from sarathi_lab.config import console
from sarathi_lab.config.errors import UserError, require_bool, require_int, require_one_of
from sarathi_lab.config.instantiate import build, resolved
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.teacher_forced import Cuts, Tokens, blocks_needed, forced_logits
from sarathi_lab.experiment.quality import joined
from sarathi_lab.model.spec import KvDtype, ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.tracking import Tracker
from sarathi_lab.tasks.calibrate import measured_subject
from sarathi_lab.tasks.gpu.publish import slug_of
from sarathi_lab.tasks.plan import text_encoder

EXPERIMENT = "kv_quality"
BLOCK_SIZE = 16  # tokens
HELD_OUT = "held_out.txt"  # of the text that a checkpoint's model was not trained on
NUM_BYTES = 256  # tokens of a model without a tokenizer


@dataclass(frozen=True)
class Quality:
    """Compares what a trained model says, cut and cached in many ways, with what it says uncut, in
    float32, by torch.

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
        require_int("task.num_texts", self.num_texts, 1, "use a small number such as 4")
        require_int(
            "task.length", self.length, 4 * BLOCK_SIZE, "use the tokens of a piece, such as 256"
        )
        for name, check in self._axes().items():
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise UserError(
                    f"task.{name}={values} is not a list of values; use one such as those of "
                    "the default"
                )
            for value in values:
                check(f"task.{name}", value)

    def check(self, cfg: DictConfig) -> None:
        """Raise UserError for weights or a text that are not there, or that do not go together."""
        backend, spec, checkpoint = _subject(cfg)
        self._pieces(spec, checkpoint)
        for kv_dtype in self.kv_dtypes:
            backend.check(replace(spec, kv_dtype=kv_dtype), self._num_blocks * BLOCK_SIZE)

    def run(self, cfg: DictConfig, place: RunContext) -> None:
        """Compute, print, write, record and log."""
        backend, spec, checkpoint = _subject(cfg)
        where = f"{spec.name} in {backend.dtype_name} on {backend.device_name}"
        console.console().print(f"\nquality of {where}", style="bold")
        pieces = self._pieces(spec, checkpoint)
        with console.progress_of(
            "comparing", len(self.kv_dtypes) * len(list(self._cells())) + 1, "cells"
        ) as advance:
            table = self._compared(backend, spec, checkpoint, pieces, advance)
        table = table.assign(
            model=spec.name,
            dtype=backend.dtype_name,
            device=backend.device_name,
            git_commit=provenance()["git_commit"],
        )
        _print(table)
        _write(cfg, place, table, where)
        if self.record is not None:
            is_cpu = backend.num_threads is not None
            device = "cpu" if is_cpu else slug_of(torch.cuda.get_device_name())
            console.print_place("record", load.save(table, EXPERIMENT, device, Path(self.record)))

    # -- the matrix --------------------------------------------------------------------------------

    def _axes(self) -> dict[str, Callable[[str, Any], object]]:
        """What is varied, and what each value must be."""
        return {
            "chunks": lambda name, value: require_int(
                name, value, 1, "use tokens such as [16,256]"
            ),
            "offsets": lambda name, value: require_int(name, value, 0, "use tokens such as [0,5]"),
            "prefix_hits": require_bool,
            "mates": lambda name, value: require_int(
                name, value, 0, "use numbers of sequences such as [0,3]"
            ),
            "kv_dtypes": lambda name, value: require_one_of(name, value, get_args(KvDtype)),
        }

    def _cells(self) -> Iterator[tuple[Cuts, int]]:
        """How the text is cut, and the number of mates, of every cell of one type of cache."""
        axes = product(self.prefix_hits, self.chunks, self.offsets, self.mates)
        return ((Cuts(chunk, offset, hit), num_mates) for hit, chunk, offset, num_mates in axes)

    @property
    def _num_blocks(self) -> int:
        return blocks_needed(self.length, max(self.mates), BLOCK_SIZE)

    def _compared(
        self,
        backend: TorchBackend,
        spec: ModelSpec,
        checkpoint: Path | None,
        pieces: list[Tokens],
        advance: Callable[[float], None],
    ) -> pd.DataFrame:
        exact = TorchBackend(backend.device, "float32", kernels="torch", threads=backend.threads)
        reference = self._executor(exact, spec, checkpoint)
        expected = [forced_logits(reference, piece[:-1], Cuts(self.length)) for piece in pieces]
        advance(1)
        rows = []
        for kv_dtype in self.kv_dtypes:
            executor = self._executor(backend, replace(spec, kv_dtype=kv_dtype), checkpoint)
            for cuts, num_mates in self._cells():
                rows.append(self._row(executor, cuts, num_mates, pieces, expected))
                advance(1)
        return pd.DataFrame(rows)

    def _executor(
        self, backend: TorchBackend, spec: ModelSpec, checkpoint: Path | None
    ) -> TorchExecutor:
        return backend.build(
            spec, checkpoint, Sizes(self._num_blocks, BLOCK_SIZE, batch_size=1 + max(self.mates))
        )

    def _row(
        self,
        executor: TorchExecutor,
        cuts: Cuts,
        num_mates: int,
        pieces: list[Tokens],
        expected: list[Tensor],
    ) -> dict[str, object]:
        parts = []
        for number, (piece, reference) in enumerate(zip(pieces, expected, strict=True)):
            mates = [pieces[(number + 1 + mate) % len(pieces)][:-1] for mate in range(num_mates)]
            found = forced_logits(executor, piece[:-1], cuts, mates)
            targets = torch.from_numpy(piece[-len(found) :].astype(np.int64)).to(found.device)
            parts.append((found, reference[-len(found) :], targets))
        result = joined(parts)
        model = executor.model
        return {
            "kv_dtype": model.spec.kv_dtype,
            **asdict(cuts),
            "num_mates": num_mates,
            "kv_bytes_per_token": model.spec.kv_bytes_per_token(model.dtype.itemsize),
            **asdict(result),
            "nll_increase": result.nll_increase,
        }

    # -- the text ----------------------------------------------------------------------------------

    def _pieces(self, spec: ModelSpec, checkpoint: Path | None) -> list[Tokens]:
        """`num_texts` pieces of `length` + 1 tokens, evenly spread over the file."""
        assert checkpoint is not None, "checked before"
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
                f"task.text={path} has {len(tokens)} tokens, {self.num_texts} pieces of {size} "
                "are wanted; name a "
                "longer text, or lower task.num_texts or task.length"
            )
        step = len(tokens) // self.num_texts
        return [tokens[start : start + size] for start in range(0, self.num_texts * step, step)]


def _subject(cfg: DictConfig) -> tuple[TorchBackend, ModelSpec, Path | None]:
    backend, spec, checkpoint = measured_subject(cfg, "quality")
    if checkpoint is None:
        raise UserError(
            f"task=quality asks what trained weights say, and those of model {spec.name} are "
            "random; name a checkpoint "
            "by model.path (experiments/lab/kv_quality/train.py makes a small one)"
        )
    return backend, spec, checkpoint


def _tokens(content: bytes, spec: ModelSpec, checkpoint: Path) -> Tokens:
    """By the checkpoint's own tokenizer, else its bytes."""
    if (encode := text_encoder(checkpoint)) is not None:
        return np.array(encode(content.decode(errors="replace")), dtype=np.int32)
    if spec.vocab_size != NUM_BYTES:
        raise UserError(
            f"model.path={checkpoint} has no tokenizer.json, and {spec.vocab_size} tokens, "
            "which are not bytes; fetch "
            "it with its tokenizer"
        )
    return np.frombuffer(content, dtype=np.uint8).astype(np.int32)


def _print(table: pd.DataFrame) -> None:
    """The worst cell of each type of cache, by its divergence, and the mean of all."""
    shown = Table(box=None, padding=(0, 2), pad_edge=True)
    for heading in (
        "KV cache",
        "B/token",
        "NLL",
        "increase",
        "mean KL",
        "worst KL",
        "same token",
        "worst cell",
    ):
        shown.add_column(
            heading, justify="left" if heading in ("KV cache", "worst cell") else "right"
        )
    for kv_dtype, rows in table.groupby("kv_dtype", sort=False):
        worst = rows.sort_values("kl").iloc[-1]
        cell = f"chunk {worst.chunk}, offset {worst.offset}, mates {worst.num_mates}"
        cell += ", prefix hit" if worst.prefix_hit else ""
        shown.add_row(
            str(kv_dtype),
            f"{worst.kv_bytes_per_token:,}",
            f"{rows.nll.mean():.4f}",
            f"{rows.nll_increase.mean():+.2e}",
            f"{rows.kl.mean():.2e}",
            f"{worst.kl:.2e}",
            f"{rows.top1_agreement.mean():.2%}",
            cell,
        )
    console.console().print(shown)


def _write(cfg: DictConfig, place: RunContext, table: pd.DataFrame, where: str) -> None:
    """Write kv_quality.csv and the configuration, and hand them to the tracker."""
    place.run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(resolved(cfg)), place.run_dir / "config.yaml")
    table.to_csv(place.run_dir / f"{EXPERIMENT}.csv", index=False, float_format="%.6g")
    tracker: Tracker = build(cfg.tracking)
    tags = [EXPERIMENT, str(table.model.iloc[0]), str(table["dtype"].iloc[0])]
    config = {"task": "quality", "where": where, "settings": resolved(cfg)}
    with tracker.run(
        name=place.name, group=place.group, job_type=EXPERIMENT, tags=tags, config=config
    ) as tracked:
        means = table.groupby("kv_dtype")[["nll_increase", "kl", "top1_agreement"]].mean()
        tracked.log_summary(
            {f"{c}/{k}": float(means.loc[k, c]) for k in means.index for c in means.columns}
        )
        tracked.log_tables(place.run_dir)
    console.print_place("results", place.run_dir)

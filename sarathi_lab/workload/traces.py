"""Requests with the lengths of a trace, at its times or others, and random prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.checked import number, refuse_unread, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.prefix_cache import PREFIX_ID_TOKENS
from sarathi_lab.workload.base import (
    ArrivalKind,
    Arriving,
    Encode,
    LoadedRequests,
    random_prompt,
)
from sarathi_lab.workload.files import named_file
from sarathi_lab.workload.trace_formats import TraceTable, read_trace


@dataclass(frozen=True, kw_only=True)
class Trace(Arriving):
    """Lengths of requests from a file in one of the formats of `read_trace`, with random prompts.

    `arrivals` None: the file's times, from its first row, times `time_scale` (2 halves the load),
    or scaled to a mean of `rate` requests per second; a file without times gives a closed batch.
    Any other kind of arrivals replaces the times. Where the file has ids of blocks of 512 tokens,
    equal ids give equal tokens.

    Rows with more than `max_len` tokens in all (None: what the model takes), or without a prompt or
    an output token, and those after the first `max_requests` usable ones are dropped and counted.
    """

    name: ClassVar[str] = "trace"
    path: str | None = None
    arrivals: ArrivalKind | None = None
    max_requests: int | None = whole(None, minimum=1, fix="use null for the whole trace")
    time_scale: float = number(1.0, above=0, fix="use 1 for the trace's own times")
    max_len: int | None = whole(None, minimum=2, fix="use null for what the model takes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals is not None:
            why = f" on {self.arrivals} arrivals; drop it, or use workload.arrivals=null for the "
            refuse_unread(self, ["time_scale"], f"{why}trace's own times", "workload.")
            return
        why = " on the trace's own times; drop it, or exchange them with workload.arrivals"
        refuse_unread(self, ("cv", "end_rate", "users", "think_time"), why, "workload.")
        if self.rate is not None and self.time_scale != 1:
            raise UserError(
                f"workload.rate={self.rate} and workload.time_scale={self.time_scale} both scale "
                "the trace's times; drop one"
            )

    def within(self, max_len: int) -> Self:
        """Limit the trace to `max_len` tokens of a model, unless it has a limit."""
        return self if self.max_len is not None else replace(self, max_len=max_len)

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        file = named_file(self.path, self.name)
        table = read_trace(file)
        used, dropped = self._usable(file, table)
        shapes = (
            (prompt_len, output_len, self._prompt(i, prompt_len, ids, vocab_size), ids)
            for i, (prompt_len, output_len, ids) in enumerate(map(table.row, used))
        )
        return self.loaded(
            f"{self.name} {file.name}",
            self._times(file, table, used),
            shapes,
            rows_read=len(table),
            dropped=dropped,
            notes=table.notes,
        )

    def _usable(self, file: Path, table: TraceTable) -> tuple[list[int], dict[str, int]]:
        is_empty = (table.prompt_lens < 1) | (table.output_lens < 1)
        is_long = np.zeros(len(table), dtype=bool)
        if self.max_len is not None:
            is_long = ~is_empty & (table.prompt_lens > self.max_len - table.output_lens)
        usable = np.flatnonzero(~(is_empty | is_long))
        used = usable[: self.max_requests].tolist()
        dropped = {
            "without prompt or output": int(is_empty.sum()),
            f"over max_len={self.max_len}": int(is_long.sum()),
            "after max_requests": len(usable) - len(used),
        }
        if not used:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
            raise UserError(
                f"{file}: all {len(table)} rows were dropped ({reasons}); name another file or "
                "raise max_len"
            )
        return used, dropped

    def _times(self, file: Path, table: TraceTable, used: Sequence[int]) -> NDArray[np.float64]:
        if self.arrivals is not None:
            return self.times(len(used))
        if table.times is None:
            why = f": {file} has no times; drop it, or make some with workload.arrivals=poisson "
            refuse_unread(self, ["time_scale"], f"{why}and workload.rate", "workload.")
            self.check_arrivals("closed")  # a rate needs times
            return np.zeros(len(used))
        times = (table.times[used] - table.times[0]) / 1e9
        if self.rate is None:
            return times * self.time_scale
        duration = times[-1] - times[0]
        if duration <= 0:
            raise UserError(
                f"workload.rate={self.rate} can't rescale {file}: its {len(times)} usable rows "
                "share one time; drop it, or make other times with workload.arrivals=poisson"
            )
        return times * (float((len(times) - 1) / duration) / self.rate)

    def _prompt(
        self, request_id: int, prompt_len: int, ids: Sequence[int], vocab_size: int | None
    ) -> NDArray[np.int32] | None:
        """Token ids [prompt_len]: blocks of 512 by seed and id only, then `random_prompt`'s."""
        prompt = random_prompt(request_id, prompt_len, vocab_size, self.seed)
        if prompt is None or vocab_size is None:
            return None
        for start, block_id in zip(range(0, prompt_len, PREFIX_ID_TOKENS), ids, strict=False):
            rng = np.random.default_rng([self.seed, 5, block_id])
            block = rng.integers(0, vocab_size, PREFIX_ID_TOKENS, dtype=np.int32)
            prompt[start : start + PREFIX_ID_TOKENS] = block[: prompt_len - start]
        return prompt

"""Requests with the lengths of public traces, at their times or others, and random prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import pandas as pd

from sarathi_lab.config.arrivals import ArrivalKind
from sarathi_lab.config.checked import refuse_unread, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.workload.base import (
    Arriving,
    Encode,
    LoadedRequests,
    Times,
    Tokens,
    random_tokens,
)
from sarathi_lab.workload.files import named_file
from sarathi_lab.workload.sessions import SessionRow, placeholders, turns_of
from sarathi_lab.workload.trace_formats import TraceFile, read_trace_file


def read_trace(file: Path, block_size: int | None = None) -> TraceFile:
    """Read `file` in one of the formats of trace_formats.yaml, where block ids stand for
    `block_size` tokens each (None: as the numbers of ids say). An unchanged file is not read again.
    Raises UserError.
    """
    state = None
    if file.is_file():
        status = file.stat()
        state = (status.st_mtime_ns, status.st_size)
    return _read(file, block_size, state)


@lru_cache(maxsize=2)
def _read(file: Path, block_size: int | None, state: tuple[int, int] | None) -> TraceFile:
    """Read `file` of this time and size, once for all runs of a sweep."""
    return read_trace_file(file, block_size)


@dataclass(frozen=True, kw_only=True)
class Trace(Arriving):
    """Lengths of requests from a file in one of the formats of trace_formats.yaml, with random
    prompts.

    `arrivals` None: the file's times, from its first row, or scaled to a mean of `rate` requests
    per second; of a file without times what the other settings imply, a closed batch without any.
    Any other kind of arrivals replaces the times. Where the file has ids of blocks, equal ids give
    equal tokens; a block has `block_size` of them, which follow from the file if it is None.

    Turns with a delay after the answer before, as AIPerf and Weka write them, wait for it; `rate`,
    `arrivals` and `users` are then those of conversations.

    Rows with more than `max_len` tokens in all (None: what the model takes), or without a prompt or
    an output token, damaged ones and those outside the `max_requests` usable ones are dropped and
    counted: `part` 0 has the first ones, 1 the next, its times from its first row.
    """

    name: ClassVar[str] = "trace"
    path: str | None = None
    max_requests: int | None = whole(None, minimum=1, fix="use null for the whole trace")
    part: int = whole(0, minimum=0, fix="use 0 for the first max_requests rows")
    max_len: int | None = whole(None, minimum=2, fix="use null for what the model takes")
    block_size: int | None = whole(None, minimum=1, fix="use null for what the file's ids say")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_requests is None:
            refuse_unread(self, ("part",), " without max_requests; add it", "workload.")

    @property
    def arrival_kind(self) -> ArrivalKind | None:
        return self.arrivals

    def check_arrivals(self, kind: str | None) -> None:
        if kind is not None:  # else the file decides what is read
            super().check_arrivals(kind)

    def within(self, max_len: int) -> Self:
        """Limit the trace to `max_len` tokens of a model, unless it has a limit."""
        if self.max_len is not None:
            return self
        return replace(self, max_len=max_len)

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        file = named_file(self.path, self.name)
        trace = read_trace(file, self.block_size)
        used, dropped = self._usable(file, trace)
        kind = self._kind_for(trace)
        waits = (used.session != "") & used.delay.notna()
        has_sessions = bool(waits.any())
        times = self._times(file, trace, used, has_sessions=has_sessions)
        prompts = self._prompts(used, trace.block_size, vocab_size, has_sessions=has_sessions)
        prompt_lens = used.prompt_len.tolist()
        output_lens = used.output_len.tolist()
        shapes = zip(prompt_lens, output_lens, prompts, strict=True)
        priorities = used.priority.astype(int)
        name = f"{self.name} {file.name}"
        load = replace(
            self.loaded(name, times, shapes, priorities.tolist()),
            rows_read=trace.num_rows,
            dropped=dropped,
            notes=trace.notes,
            shares_blocks=any(used.block_ids),
            arrival_kind=kind,
        )
        if has_sessions:
            return self._with_sessions(load, used, vocab_size)
        return load

    def _with_sessions(
        self, load: LoadedRequests, used: pd.DataFrame, vocab_size: int | None
    ) -> LoadedRequests:
        """Add the conversations that the requests are turns of."""
        rows = []
        for request, session, delay in zip(load.requests, used.session, used.delay, strict=True):
            rows.append(SessionRow(request, session, delay))
        new_tokens = partial(self._own_tokens, vocab_size=vocab_size)
        sessions = turns_of(rows, new_tokens)
        note = f"{len(sessions)} sessions, whose turns wait for their answers"
        return replace(load, sessions=sessions, notes=[*load.notes, note])

    def _kind_for(self, trace: TraceFile) -> ArrivalKind | None:
        """Return the kind of arrivals, None for the file's times. Raises UserError for settings
        that nothing reads.
        """
        if self.arrivals is None and trace.has_times:
            reason = " on the trace's times; drop it, or exchange them with workload.arrivals"
            refuse_unread(self, ("cv", "users", "think_time"), reason, "workload.")
            return None
        kind = self.arrivals
        if kind is None:
            kind = self.implied_kind()
        self.check_arrivals(kind)
        return kind

    def _usable(self, file: Path, trace: TraceFile) -> tuple[pd.DataFrame, dict[str, int]]:
        """Return the rows that become requests, and how many others there are, by the reason."""
        table = trace.recording.requests
        has_prompt = table.prompt_len >= 1
        has_output = table.output_len >= 1
        filled = table[has_prompt & has_output]
        short = filled
        if self.max_len is not None:
            room = self.max_len - filled.output_len
            short = filled[filled.prompt_len <= room]
        used = short
        if self.max_requests is not None:
            first = self.part * self.max_requests
            used = short[first:][: self.max_requests]
        recording = trace.recording
        reason_of_damaged = "damaged"
        if recording.example:
            reason_of_damaged = f"damaged ({recording.example})"
        reason_of_others = (
            f"after workload.max_requests={self.max_requests}, of which null takes all"
        )
        if self.part:
            reason_of_others = f"outside part={self.part}"
        dropped = {
            reason_of_damaged: sum(recording.left_out.values()),
            "without prompt or output": len(table) - len(filled),
            f"over max_len={self.max_len}": len(filled) - len(short),
            reason_of_others: len(short) - len(used),
        }
        if used.empty:
            reasons = []
            for reason, count in dropped.items():
                if count:
                    reasons.append(f"{count} {reason}")
            raise UserError(
                f"{file}: all {trace.num_rows} rows were dropped ({', '.join(reasons)}); name "
                "another file or raise max_len"
            )
        return used, dropped

    def _times(
        self,
        file: Path,
        trace: TraceFile,
        used: pd.DataFrame,
        *,
        has_sessions: bool,
    ) -> Times:
        """Return seconds of arrival, of a conversation's turns those of its first one."""
        numbers = np.arange(len(used))  # of the conversation that each row belongs to
        if has_sessions:
            # A row outside of conversations is one of its own.
            is_in_session = used.session != ""
            names_of_rows = used.index.astype(str)
            names = used.session.where(is_in_session, names_of_rows)
            numbers, _ = pd.factorize(names)
        num_arrivals = int(numbers.max()) + 1
        if self.arrivals is not None or not trace.has_times:
            times_of_arrivals = self.times(num_arrivals)
            return times_of_arrivals[numbers]
        times = used.arrival.to_numpy()
        if self.part:  # the clock starts with its first request
            times = times - times[0]
        if self.rate is None:
            return times
        duration = times[-1] - times[0]
        if duration <= 0:
            raise UserError(
                f"workload.rate={self.rate} can't rescale {file}: its {len(times)} usable rows "
                "share one time; drop it, or make other times with workload.arrivals=poisson"
            )
        # All gaps are stretched alike, so that their mean is 1 / `rate`.
        num_gaps = num_arrivals - 1
        rate_in_file = float(num_gaps / duration)
        return times * (rate_in_file / self.rate)

    def _prompts(
        self,
        used: pd.DataFrame,
        block_size: int,
        vocab_size: int | None,
        *,
        has_sessions: bool,
    ) -> list[Tokens | None]:
        """Return the token ids of each request: blocks by seed and id only, and tokens of its own
        behind them. Without ids there are none in simulations, and those of conversations follow
        from their turns.
        """
        prompts = list[Tokens | None]()
        needs_tokens = vocab_size is not None and not has_sessions
        lengths = used.prompt_len.tolist()
        for length, ids in zip(lengths, used.block_ids, strict=True):
            prompt = None
            if ids or needs_tokens:
                number = len(prompts)
                prompt = self._own_tokens(number, length, vocab_size)
                self._fill_blocks(prompt, ids, block_size, vocab_size)
            prompts.append(prompt)
        return prompts

    def _own_tokens(self, request_id: int, num_tokens: int, vocab_size: int | None) -> Tokens:
        """Token ids that no other request has."""
        if vocab_size is None:
            return placeholders(request_id, num_tokens)
        return random_tokens(request_id, num_tokens, vocab_size, self.seed)

    def _fill_blocks(
        self,
        prompt: Tokens,
        ids: Sequence[int],
        block_size: int,
        vocab_size: int | None,
    ) -> None:
        """Write the tokens of blocks into `prompt`, whose end may cut the last one."""
        if vocab_size is None:
            # Any numbers do that tell blocks apart, but they must fit a token id.
            token_ids = [number % 2**31 for number in ids]
            numbers = np.array(token_ids, dtype=np.int32)
            blocks = np.repeat(numbers, block_size)
            num_shared = min(len(blocks), len(prompt))
            prompt[:num_shared] = blocks[:num_shared]
            return
        for start, block_id in zip(range(0, len(prompt), block_size), ids, strict=False):
            rng = self.random(5, block_id)
            block = rng.integers(0, vocab_size, block_size, dtype=np.int32)
            room = len(prompt) - start
            prompt[start : start + block_size] = block[:room]

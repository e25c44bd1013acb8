"""Requests, their state in an engine, and the chunks and batches that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.model.layers import Window, WindowSums


@dataclass(frozen=True, slots=True)
class Request:
    """Immutable request created by the workload.

    Exactly `output_len` tokens are generated: end-of-sequence is ignored, so that policies are
    compared on the same work.
    """

    request_id: int
    arrival_time: float  # seconds since the start of the run
    prompt_len: int
    output_len: int
    prompt_token_ids: Sequence[int] | NDArray[np.int32] | None = None  # None: simulated
    priority: int = 0  # lower ones are served first with queue_order=priority

    @property
    def total_len(self) -> int:
        """The paper's sequence length P + D, in tokens."""
        return self.prompt_len + self.output_len


@dataclass(eq=False, repr=False, slots=True)
class SequenceState:
    """Engine state of one request: tokens known, tokens computed, blocks held.

    There is no prefill phase and no decode phase. A sequence has `num_known` tokens (prompt and
    generated) and the keys and values of `num_computed` of them in the cache; scheduling chooses
    how many more to compute.
    """

    request: Request
    order: int  # rank of arrival
    num_computed: int = 0  # tokens in its blocks; while waiting, cached ones. By Scheduler
    block_ids: list[int] = field(default_factory=list)  # by BlockManager
    block_keys: list[int] = field(default_factory=list)  # of full blocks. By PrefixCache
    num_published: int = 0  # full blocks that others may share. By PrefixCache
    is_running: bool = False  # admitted, not preempted since; from here on by Scheduler
    in_flight: bool = False  # in a batch
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: Sequence[int] = ()  # of its decode in flight, to be verified
    token_times: list[float] = field(default_factory=list)  # when each was collected
    first_scheduled_time: float | None = None
    prefix_hit_tokens: int = 0  # of the prompt, at its first admission
    num_preemptions: int = 0
    bubble_time: float = 0.0  # seconds of idle stages before its batches. By Ledger

    @property
    def first_token_time(self) -> float:
        return self.token_times[0]

    @property
    def finish_time(self) -> float:
        return self.token_times[-1]

    @property
    def num_known(self) -> int:
        return self.request.prompt_len + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet computed; 1 for a sequence that is decoding."""
        return self.request.prompt_len + len(self.output_token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest generated token is pending; a last prompt token is prefill."""
        generated = len(self.output_token_ids)  # inlined properties: this is read most often
        return generated > 0 and self.num_computed - self.request.prompt_len == generated - 1

    @property
    def is_finished(self) -> bool:
        return len(self.output_token_ids) >= self.request.output_len

    def __repr__(self) -> str:
        counts = f"{self.num_computed}/{self.num_known} computed"
        return f"SequenceState({self.request.request_id}: {counts})"


class Chunk(NamedTuple):
    """A slice of one sequence to run now: tokens `start` to `start + num_tokens`."""

    sequence: SequenceState
    start: int
    num_tokens: int
    is_decode: bool
    # It ends at the newest known token. Stored, as it can't be derived later: a recompute chunk
    # that leaves one token pending looks like a decode.
    emits_token: bool

    @property
    def output_index(self) -> int:
        """The index of the output token that it emits; with drafts of the last."""
        return self.start + self.num_tokens - self.sequence.request.prompt_len

    @property
    def num_rows(self) -> int:
        """Rows of logits, if it emits: a decode has one for each draft, too."""
        return self.num_tokens if self.is_decode else 1


class Queues(NamedTuple):
    """Numbers of running and waiting sequences, used blocks, and preemptions so far."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_preemptions: int


@dataclass(eq=False, slots=True)
class Batch:
    """The chunks of one iteration and their sums, from which FLOPs and bytes follow.

    `kv_tokens` count cached tokens read by attention (context plus the chunk itself).
    """

    chunks: list[Chunk] = field(default_factory=list)
    prefix_hit_tokens: int = 0  # cached tokens of the admitted sequences
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # one a decode, and its drafts
    prefill_kv_tokens: int = 0
    decode_kv_tokens: int = 0
    prefill_query_key_pairs: int = 0  # causal products
    num_emits: int = 0  # rows of logits: a token each, but for wrong drafts
    num_draft_tokens: int = 0  # of the decodes' tokens
    num_accepted_tokens: int = 0  # right drafts, once it has run
    finished: list[SequenceState] = field(default_factory=list)  # by Scheduler.advance
    queues: Queues | None = None  # after it, by Scheduler.advance
    instance: int = 0  # of a cluster, that runs it
    window: Window | None = None  # of some of the model's layers. By Scheduler
    _window_sums: WindowSums | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def num_decodes(self) -> int:
        return self.num_decode_tokens - self.num_draft_tokens

    def window_sums(self) -> WindowSums:
        """Sum what attention in the `window` computes and reads. Raises ValueError for a batch that
        was made without one.
        """
        if self.window is None:
            raise ValueError("the batch was made without the window of the model's layers")
        # A cost model and the ledger ask for the same sums of hundreds of chunks.
        if self._window_sums is None:
            self._window_sums = self.window.sums(self.chunks)
        return self._window_sums

    @property
    def window_pairs(self) -> int:
        return self.window_sums().window_pairs

    @property
    def window_prefill_kv_tokens(self) -> int:
        return self.window_sums().window_prefill_kv_tokens

    @property
    def window_decode_kv_tokens(self) -> int:
        return self.window_sums().window_decode_kv_tokens

    def add(self, sequence: SequenceState, num_tokens: int) -> None:
        """Add the next tokens of a sequence, which is in flight from now on, so that later
        sequences can't evict it.

        Args:
            sequence: One that is not in flight.
            num_tokens: From 1 to its pending tokens.

        Raises:
            ValueError: The sequence is in flight, or has not so many pending tokens.
        """
        start = sequence.num_computed
        pending = sequence.num_pending
        if sequence.in_flight or not 0 < num_tokens <= pending:
            raise ValueError(
                f"cannot take {num_tokens} tokens of {sequence}, in_flight={sequence.in_flight}"
            )
        is_decode = pending == 1 and start >= sequence.request.prompt_len
        emits_token = num_tokens == pending
        sequence.in_flight = True
        self._window_sums = None
        self.chunks.append(Chunk(sequence, start, num_tokens, is_decode, emits_token))
        self.num_emits += emits_token
        if is_decode:
            self.num_decode_tokens += 1
            self.decode_kv_tokens += start + 1
        else:
            self.count_prefill(start, num_tokens)

    def remove(self, sequence: SequenceState) -> None:
        """Take out the chunk of `sequence`, which is no longer in flight."""
        index = next(i for i, chunk in enumerate(self.chunks) if chunk.sequence is sequence)
        self._window_sums = None
        chunk = self.chunks.pop(index)
        sequence.in_flight = False
        sequence.draft_token_ids = ()
        if chunk.emits_token:
            self.num_emits -= chunk.num_rows
        if chunk.is_decode:
            self.num_decode_tokens -= chunk.num_tokens
            self.num_draft_tokens -= chunk.num_tokens - 1
            self.decode_kv_tokens -= chunk.start + chunk.num_tokens
        else:
            self.count_prefill(chunk.start, chunk.num_tokens, sign=-1)

    def replace_chunk(self, index: int, chunk: Chunk) -> None:
        """Put `chunk` in the place of one of other tokens; the caller counts them."""
        self._window_sums = None
        self.chunks[index] = chunk

    def count_prefill(self, start: int, num_tokens: int, sign: int = 1) -> None:
        """Add a chunk of a prompt to the sums, or take it out with `sign` -1."""
        self.num_prefills += sign
        self.num_prefill_tokens += sign * num_tokens
        self.prefill_kv_tokens += sign * (start + num_tokens)
        self.prefill_query_key_pairs += sign * causal_pairs(start, num_tokens)

    def add_decodes(self, sequences: Sequence[SequenceState]) -> None:
        """Add the next token of `sequences`, which are decoding and in flight already: `add` for
        all at once, as most chunks of a run are decodes.
        """
        self._window_sums = None
        make = tuple.__new__  # twice as fast as the named tuple's constructor
        self.chunks += [
            make(Chunk, (sequence, sequence.num_computed, 1, True, True)) for sequence in sequences
        ]
        num_cached = sum([sequence.num_computed for sequence in sequences])
        self.num_emits += len(sequences)
        self.num_decode_tokens += len(sequences)
        self.decode_kv_tokens += num_cached + len(sequences)  # each reads its own token, too


def causal_pairs(start: int, num_tokens: int) -> int:
    """Count the causal query-key pairs of `num_tokens` tokens behind `start` others."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2

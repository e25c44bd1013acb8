"""What is asked for (Request), how far it got (SequenceState), and what runs now (Chunk, Batch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Request:
    """One wish, made by the workload and never changed.

    Exactly `output_len` tokens are generated: end-of-sequence is ignored, so that policies are
    compared on the same work.
    """

    request_id: int
    arrival_time: float  # seconds since the start of the run
    prompt_len: int
    output_len: int
    prompt_token_ids: Sequence[int] | NDArray[np.int32] | None = None  # None: nobody reads tokens
    priority: int = 0  # the lower is served first where the queue is ordered by it
    # One per 512 tokens of the prompt: equal ids with equal ids before them mean equal tokens.
    # Tokens beyond the last id are the request's own; without ids nothing is said.
    prefix_ids: tuple[int, ...] = ()

    @property
    def total_len(self) -> int:
        """The paper's sequence length P + D, in tokens."""
        return self.prompt_len + self.output_len


@dataclass(eq=False, repr=False, slots=True)
class SequenceState:
    """Engine state of one request: tokens known, tokens computed, blocks held.

    There is no prefill phase and no decode phase. A sequence knows `num_known` tokens (prompt plus
    generated) and has the keys and values of `num_computed` of them in the cache; scheduling is
    choosing how many to catch up.
    """

    request: Request
    order: int  # rank of arrival: what "first come" means when sequences are sorted
    # What its blocks hold; of one that waits, what is cached. Written by Scheduler.
    num_computed: int = 0
    # Written by BlockManager: its blocks, whether their ids count up by one, and where its cache is
    # while it is swapped out.
    block_ids: list[int] = field(default_factory=list)
    blocks_are_neighbours: bool = True
    host_block_ids: list[int] = field(default_factory=list)
    # Written by PrefixCache: the keys of its full blocks, how many of them others may share, and
    # the runs of cached blocks that it holds, in their order. Where another's block stands for an
    # equal one of its own, a run is missing.
    block_keys: list[int] = field(default_factory=list)
    cached_runs: list[CachedRun] = field(default_factory=list)
    num_published: int = 0
    # Written by Scheduler: whether it is admitted and not preempted since, its rank among those
    # (earlier ones have smaller ones), and whether it is in a batch.
    is_running: bool = False
    position: int = 0
    in_flight: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: Sequence[int] = ()  # of its decode in flight, to be verified
    token_times: list[float] = field(default_factory=list)  # when each was collected
    first_scheduled_time: float | None = None
    prefix_hit_tokens: int = 0  # of the prompt, when admitted first
    num_preemptions: int = 0
    bubble_time: float = 0.0  # seconds of idle stages before its batches
    # Of a prompt that passes the layers in groups (`Batch.pass_in`): its tokens that are halfway,
    # those after `num_computed`, and how many layers they have passed.
    num_halfway: int = 0
    layers_passed: int = 0

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
        num_generated = len(self.output_token_ids)  # in few words, as this is asked most
        return (
            num_generated > 0 and self.num_computed - self.request.prompt_len == num_generated - 1
        )

    @property
    def is_finished(self) -> bool:
        return len(self.output_token_ids) >= self.request.output_len

    def __repr__(self) -> str:
        counts = f"{self.num_computed}/{self.num_known} computed"
        return f"SequenceState({self.request.request_id}: {counts})"


@dataclass(eq=False, slots=True)
class CachedRun:
    """Blocks of the cache that follow one another and that the same sequences hold, by the keys of
    what is in them; see `PrefixCache`.
    """

    holders: list[SequenceState]
    keys: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class Chunk(NamedTuple):
    """A slice of one sequence to run now: tokens `start` to `start + num_tokens`."""

    sequence: SequenceState
    start: int
    num_tokens: int
    is_decode: bool
    # Whether it ends at the newest known token, which can only be told when it is cut: a recompute
    # chunk that leaves one token pending looks like a decode afterwards.
    emits_token: bool

    @property
    def output_index(self) -> int:
        """Which of the sequence's output tokens it emits, if it does; with drafts the last."""
        return self.start + self.num_tokens - self.sequence.request.prompt_len

    @property
    def num_rows(self) -> int:
        """Of logits, if it emits: a decode wants those behind its drafts, too."""
        return self.num_tokens if self.is_decode else 1


class Copy(NamedTuple):
    """A block of cache to move before a batch runs: out to host memory, or back in."""

    is_out: bool
    device_block: int
    host_block: int


class Layers(NamedTuple):
    """The layers `start` to `stop` of all `num` that a model has."""

    start: int
    stop: int
    num: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.num

    @property
    def share(self) -> float:
        return (self.stop - self.start) / self.num

    def of(self, number: int) -> int:
        """Their part of `number`, whole, so that the parts of all groups add up to it."""
        return number * self.stop // self.num - number * self.start // self.num


SUMS = (  # of a batch
    *("num_swapped_tokens", "prefix_hit_tokens", "num_prefills", "num_prefill_tokens"),
    *("num_decode_tokens", "prefill_kv_tokens", "decode_kv_tokens", "prefill_query_key_pairs"),
    *("num_emits", "num_draft_tokens", "num_accepted_tokens"),
)


class Queues(NamedTuple):
    """How many sequences run and wait, blocks are taken, and preemptions there were so far."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_preemptions: int


@dataclass(eq=False, slots=True)
class Batch:
    """The chunks of one iteration and their sums, from which FLOPs and bytes follow. `kv_tokens`
    count cached tokens read by attention (context plus the chunk itself).

    With `layers` its prompts pass these alone, and its decodes all; the sums then have the layers'
    part of what belongs to prompts.
    """

    chunks: list[Chunk] = field(default_factory=list)
    layers: Layers | None = None
    copies: list[Copy] = field(default_factory=list)  # made in order, before anything is computed
    num_swapped_tokens: int = 0  # of cache, in all copies
    prefix_hit_tokens: int = 0  # found in the cache by those it admits
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # one a decode, and its drafts
    prefill_kv_tokens: int = 0
    decode_kv_tokens: int = 0
    prefill_query_key_pairs: int = 0  # causal products
    num_emits: int = 0  # rows of logits: a token each, but for drafts that are wrong
    num_draft_tokens: int = 0  # of the decodes' tokens
    num_accepted_tokens: int = 0  # of the drafts, once it has run
    # Set by `Scheduler.advance`: who has all they asked for, and the queues that it leaves behind.
    finished: list[SequenceState] = field(default_factory=list)
    queues: Queues | None = None
    parts: tuple[Batch, ...] = ()  # of replicas of the engine in lockstep, one each, maybe empty
    instance: int = 0  # of a cluster, that runs it

    @classmethod
    def of(cls, parts: tuple[Batch, ...]) -> Batch:
        """The `parts` as one batch, with the chunks and the sums of all."""
        chunks = [chunk for part in parts for chunk in part.chunks]
        sums = {name: sum(map(attrgetter(name), parts)) for name in SUMS}
        return cls(chunks, parts=parts, **sums)

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def num_decodes(self) -> int:
        return self.num_decode_tokens - self.num_draft_tokens

    @property
    def num_rejected_tokens(self) -> int:
        """Drafts that were wrong, once it has run."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def num_swapped_blocks(self) -> int:
        return len(self.copies)

    @property
    def layer_share(self) -> float:
        """Of all layers, those that its prompts pass."""
        return 1.0 if self.layers is None else self.layers.share

    def pass_in(self, layers: Layers) -> None:
        """Let the chunks of prompts, which were added whole, pass `layers` alone, behind decodes;
        only the last layers emit. Raises ValueError for prompts that are not in front of them.
        """
        for i, chunk in enumerate(self.chunks):
            if chunk.is_decode:
                continue
            sequence = chunk.sequence
            passed = sequence.layers_passed, sequence.num_halfway or chunk.num_tokens
            if passed != (layers.start, chunk.num_tokens):
                raise ValueError(f"{chunk.num_tokens} tokens of {sequence} can't pass {layers}")
            self.chunks[i] = chunk._replace(emits_token=chunk.emits_token and layers.is_last)
        self.chunks.sort(key=lambda chunk: not chunk.is_decode)
        self.layers = layers
        self.num_emits = sum(chunk.num_rows for chunk in self.chunks if chunk.emits_token)
        of, prompts = layers.of, self.chunks[self.num_decodes :]
        self.num_prefill_tokens = sum(of(one.num_tokens) for one in prompts)
        self.prefill_kv_tokens = sum(of(one.start + one.num_tokens) for one in prompts)
        pairs = (_pairs(one.start, one.num_tokens) for one in prompts)
        self.prefill_query_key_pairs = sum(map(of, pairs))

    def apart(self) -> tuple[Batch, Batch]:
        """What passes `layers`, and what passes the other layers, which are the decodes, as batches
        that pass all layers.
        """
        num_decodes, num_tokens = self.num_decodes, self.num_decode_tokens
        outside = Batch(self.chunks[:num_decodes], num_emits=num_tokens)
        outside.num_draft_tokens = self.num_draft_tokens
        outside.num_decode_tokens, outside.decode_kv_tokens = num_tokens, self.decode_kv_tokens
        inside = replace(outside, chunks=self.chunks, num_emits=self.num_emits)
        for chunk in self.chunks[num_decodes:]:
            inside.count_prefill(chunk.start, chunk.num_tokens)
        return inside, outside

    def put_prefills_first(self) -> None:
        """Order the chunks: those of prompts before the decodes, each in the order they had."""
        self.chunks.sort(key=lambda chunk: chunk.is_decode)

    def add(self, sequence: SequenceState, num_tokens: int) -> None:
        """Take the next `num_tokens` pending tokens of `sequence`, which is in flight from now on:
        making room for a later one can't evict it.
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
        self.chunks.append(Chunk(sequence, start, num_tokens, is_decode, emits_token))
        self.num_emits += emits_token
        if is_decode:
            self.num_decode_tokens += 1
            self.decode_kv_tokens += start + 1
        else:
            self.count_prefill(start, num_tokens)

    def count_prefill(self, start: int, num_tokens: int) -> None:
        """Add a chunk of a prompt to the sums."""
        self.num_prefills += 1
        self.num_prefill_tokens += num_tokens
        self.prefill_kv_tokens += start + num_tokens
        self.prefill_query_key_pairs += _pairs(start, num_tokens)

    def add_decodes(self, sequences: Sequence[SequenceState]) -> None:
        """Take the next token of `sequences`, which are decoding, and in flight already: what `add`
        does, but for all at once, as most chunks of a run are these.
        """
        make = tuple.__new__  # what a NamedTuple calls, for half of what its own call takes
        self.chunks += [make(Chunk, (one, one.num_computed, 1, True, True)) for one in sequences]
        self.num_emits += len(sequences)
        self.num_decode_tokens += len(sequences)
        self.decode_kv_tokens += len(sequences) + sum([one.num_computed for one in sequences])

    def add_drafts(self, place: int, drafts: Sequence[int]) -> None:
        """Let the decode at `place` carry `drafts`, which see one another and its context."""
        chunk, number = self.chunks[place], len(drafts)
        chunk.sequence.draft_token_ids = drafts
        self.chunks[place] = chunk._replace(num_tokens=1 + number)
        self.num_draft_tokens += number
        self.num_decode_tokens += number
        self.decode_kv_tokens += number
        self.num_emits += number


def _pairs(start: int, num_tokens: int) -> int:
    """Causal query-key pairs of tokens behind `start` others."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2

"""What is asked for (Request), how far it got (SequenceState), and what runs now (Chunk, Batch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Request:
    """One wish, made by the workload and never changed.

    `prompt_token_ids` is None where nobody reads tokens (simulation); `prompt_len` is always set.
    Exactly `output_len` tokens are generated: end-of-sequence is ignored, so that policies are
    compared on the same work. Times are seconds since the start of the run. Lower `priority` is
    served first where the queue is ordered by it. `prefix_ids` has one id per 512 tokens of the
    prompt: equal ids with equal ids before them mean equal tokens. Tokens beyond the last id are
    the request's own; without ids nothing is said.
    """

    request_id: int
    arrival_time: float
    prompt_len: int
    output_len: int
    prompt_token_ids: Sequence[int] | NDArray[np.int32] | None = None
    priority: int = 0
    prefix_ids: tuple[int, ...] = ()

    @property
    def total_len(self) -> int:
        """Prompt plus output, in tokens: the paper's sequence length P + D."""
        return self.prompt_len + self.output_len


class SequenceState:
    """Engine state of one request: tokens known, tokens computed, blocks held.

    There is no prefill phase and no decode phase. A sequence knows `num_known` tokens (prompt plus
    generated) and has the keys and values of `num_computed` of them in the cache; scheduling is
    choosing how many to catch up.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "blocks_are_neighbours",
        "first_scheduled_time",
        "host_block_ids",
        "in_flight",
        "is_running",
        "num_computed",
        "num_preemptions",
        "num_published",
        "order",
        "output_token_ids",
        "position",
        "prefix_hit_tokens",
        "request",
        "token_times",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order  # rank of arrival: what "first come" means when sequences are sorted
        self.num_computed = (
            0  # written by Scheduler: what its blocks hold; of one that waits, what is cached
        )
        self.block_ids: list[int] = []  # written by BlockManager only, as is the next
        self.blocks_are_neighbours = True  # whether block_ids count up by one
        self.host_block_ids: list[
            int
        ] = []  # where its cache is while it is swapped out; written by BlockManager only
        self.block_keys: list[
            bytes
        ] = []  # of its full blocks, as is the next; written by PrefixCache only
        self.num_published = 0  # of them, those that others may share
        self.is_running = (
            False  # written by Scheduler: admitted and not preempted since, as is the next
        )
        self.position = 0  # rank among the running: those before have smaller ones
        self.in_flight = False  # set by Batch.add, cleared by Scheduler.update
        self.output_token_ids: list[int] = []
        self.token_times: list[float] = []  # when each output token was collected
        self.first_scheduled_time: float | None = None
        self.prefix_hit_tokens = 0  # of the prompt, cached when it was admitted first
        self.num_preemptions = 0

    @property
    def num_known(self) -> int:
        return self.request.prompt_len + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet computed; 1 for a sequence that is decoding."""
        return self.request.prompt_len + len(self.output_token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest generated token is pending (a last prompt token is still
        prefill).
        """
        prompt_len = self.request.prompt_len
        return (
            self.num_computed >= prompt_len
            and prompt_len + len(self.output_token_ids) - self.num_computed == 1
        )

    @property
    def is_finished(self) -> bool:
        return len(self.output_token_ids) >= self.request.output_len

    def __repr__(self) -> str:
        return (
            f"SequenceState({self.request.request_id}: {self.num_computed}/{self.num_known} "
            "computed)"
        )


class Chunk(NamedTuple):
    """A slice of one sequence to run now: tokens `start` to `start + num_tokens`, seeing all before
    them.

    `emits_token` is carried, not derived later: whether a slice ends at the newest known token can
    only be told at the moment it is cut (a recompute chunk that leaves one token pending looks like
    a decode afterwards).
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    is_decode: bool
    emits_token: bool

    @property
    def output_index(self) -> int:
        """Which of the sequence's output tokens it emits, if it does."""
        return self.start + self.num_tokens - self.sequence.request.prompt_len


class Copy(NamedTuple):
    """A block of cache to be moved before a batch runs: out to host memory, or back in; ids of
    either pool.
    """

    is_out: bool
    device_block: int
    host_block: int


class Queues(NamedTuple):
    """How many sequences run and wait, blocks are taken, and preemptions there were so far."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_preemptions: int


class Batch:
    """The chunks of one iteration and their sums, from which FLOPs and bytes follow
    (`model/spec.py`).

    Filled by a policy through the scheduler's moves; read by executors and the ledger. `kv_tokens`
    count cached tokens read by attention (context plus the chunk itself); `query_key_pairs` counts
    causal query-key products. `copies`, in all `num_swapped_tokens` tokens of cache, are to be made
    in their order, before anything is computed. `prefix_hit_tokens` were found in the cache by
    those it admits. `queues` are those that it leaves behind, set by `Scheduler.advance`.
    """

    __slots__ = (
        "chunks",
        "copies",
        "decode_kv_tokens",
        "num_decode_tokens",
        "num_emits",
        "num_prefill_tokens",
        "num_prefills",
        "num_swapped_tokens",
        "prefill_kv_tokens",
        "prefill_query_key_pairs",
        "prefix_hit_tokens",
        "queues",
    )

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.copies: list[Copy] = []  # written by Scheduler, as are the next two
        self.num_swapped_tokens = 0
        self.prefix_hit_tokens = 0
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0  # one token a decode, so also the number of decodes
        self.prefill_kv_tokens = 0
        self.decode_kv_tokens = 0
        self.prefill_query_key_pairs = 0
        self.num_emits = 0
        self.queues: Queues | None = None

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    def put_prefills_first(self) -> None:
        """Order the chunks so that those of prompts come before the decodes; the order among either
        stays.
        """
        self.chunks.sort(key=lambda chunk: chunk.is_decode)

    def add(self, sequence: SequenceState, num_tokens: int) -> None:
        """Take the next `num_tokens` pending tokens of `sequence`.

        The sequence is marked in flight at once, so that making room for a later one can't evict
        it.
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
            self.num_prefills += 1
            self.num_prefill_tokens += num_tokens
            self.prefill_kv_tokens += start + num_tokens
            self.prefill_query_key_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2

"""Layered prefill (arXiv 2510.08055): prompts advance by groups of layers, not by tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import require_int
from sarathi_lab.engine.policy import Policy, Reserve
from sarathi_lab.engine.request import Batch, Chunk, SequenceState, causal_pairs
from sarathi_lab.engine.scheduler import Scheduler


class Layers(NamedTuple):
    """Layers `start` to `stop` of the `num` layers of a model."""

    start: int
    stop: int
    num: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.num

    def of(self, number: int) -> int:
        """Their integer part of `number`; the parts of all groups add up to it."""
        return number * self.stop // self.num - number * self.start // self.num


@dataclass
class Pass:
    """Groups of layers of the current pass, how many are passed, and the tokens that have passed
    them, by sequence and its preemptions: a sequence that was preempted since starts over.
    """

    num_groups: int = 1
    num_passed: int = 0
    halfway: dict[tuple[SequenceState, int], int] = field(default_factory=dict)

    def num_halfway(self, sequence: SequenceState) -> int:
        """Tokens after `num_computed` that have passed only some layers."""
        return self.halfway.get((sequence, sequence.num_preemptions), 0)

    def next_group(self, num_layers: int) -> Layers:
        start = num_layers * self.num_passed // self.num_groups
        self.num_passed += 1
        return Layers(start, num_layers * self.num_passed // self.num_groups, num_layers)


@dataclass(eq=False, slots=True)
class LayeredBatch(Batch):
    """A batch whose prompts pass only the layers of `group` (None: all), decodes all; its sums of
    prompts are the group's part.
    """

    group: Layers | None = None

    @property
    def layers(self) -> range | None:
        return None if self.group is None else range(self.group.start, self.group.stop)

    @property
    def layer_share(self) -> float:
        group = self.group
        return 1.0 if group is None else (group.stop - group.start) / group.num

    def restrict_to(self, group: Layers) -> None:
        """Let the chunks of prompts, added whole, pass only `group`, behind the decodes; the last
        layers emit.
        """
        self.chunks = [
            one if one.is_decode else one._replace(emits_token=one.emits_token and group.is_last)
            for one in sorted(self.chunks, key=lambda chunk: not chunk.is_decode)
        ]
        self.group = group
        self.num_emits = sum(chunk.num_rows for chunk in self.chunks if chunk.emits_token)
        prompts = self.chunks[self.num_decodes :]
        self.num_prefill_tokens = sum(group.of(chunk.num_tokens) for chunk in prompts)
        self.prefill_kv_tokens = sum(group.of(one.start + one.num_tokens) for one in prompts)
        pairs = [causal_pairs(chunk.start, chunk.num_tokens) for chunk in prompts]
        self.prefill_query_key_pairs = sum(map(group.of, pairs))

    def passes(self, num_layers: int) -> list[tuple[range, Batch]]:
        """List the layers before, in and behind `group`: all chunks pass it, decodes the others.
        Without decodes there is an empty part of no layers behind it.
        """
        if self.layers is None:
            return [(range(num_layers), self)]
        num_decodes, num_tokens = self.num_decodes, self.num_decode_tokens
        outside = Batch(self.chunks[:num_decodes], num_emits=num_tokens)
        outside.num_draft_tokens = self.num_draft_tokens
        outside.num_decode_tokens, outside.decode_kv_tokens = num_tokens, self.decode_kv_tokens
        inside = replace(outside, chunks=self.chunks, num_emits=self.num_emits)
        for chunk in self.chunks[num_decodes:]:
            inside.count_prefill(chunk.start, chunk.num_tokens)
        parts: list[tuple[range, Batch]] = [(self.layers, inside)]
        if num_decodes and self.layers.start:
            parts.insert(0, (range(self.layers.start), outside))
        if self.layers.stop < num_layers:
            parts.append((range(self.layers.stop, num_layers if num_decodes else 0), outside))
        return parts

    def packed(self, pack: Callable[[Batch], Any], num_layers: int) -> Any:
        if self.layers is None:
            return pack(self)
        from sarathi_lab.extensions.layered.passes import packed_apart  # torch takes seconds

        return packed_apart(self, num_layers, pack)

    def computed(self, chunks: list[Chunk], scheduler: Scheduler) -> list[Chunk]:
        """Record which tokens of prompts are halfway, and return the others."""
        if self.group is None:
            return chunks
        state = scheduler.state(Pass)
        state.halfway.clear()
        if self.group.is_last:
            return chunks
        for sequence, _, num_tokens, _, _ in chunks[self.num_decodes :]:
            state.halfway[sequence, sequence.num_preemptions] = num_tokens
            sequence.in_flight = False
        return chunks[: self.num_decodes]


@dataclass(frozen=True)
class LayeredPrefill(Policy):
    """Decodes pass all layers in every iteration, prompts one group of them; the next group is the
    next iteration's. So the weights of a layer are read once for a prompt, not once for a chunk.

    Without a prompt halfway, running prompts and then waiting ones begin a pass of up to
    `max_num_batched_tokens` tokens together; a longer prompt goes on in the next. The layers come
    in as many groups as the pass has times `chunk` tokens, so that an iteration computes about as
    much as with chunks of that size, or in `groups`; at most one by one.

    Names are those of the paper's implementation (scale-snu/layered-prefill), which takes a power
    of two of groups, up to 16, and defaults to no size; its README's are the defaults here.
    """

    name = "layered_prefill"
    budget_field = "chunk"
    in_layers = True
    batch_type = LayeredBatch
    chunk: int = 512
    max_num_batched_tokens: int = whole(8192, minimum=1, fix="use the length of a long prompt")
    groups: int | None = whole(None, minimum=1, fix="use null, or a number such as 16")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    @property
    def is_capped(self) -> bool:
        """False, as a group of layers computes whole prompts."""
        return False

    @property
    def most_prompt_tokens(self) -> int:
        return self.max_num_batched_tokens

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        """Any positive number is valid, as decodes don't count."""
        require_int("chunk", self.chunk, 1, "use a number of tokens such as 512")

    def fill(self, batch: Any, scheduler: Scheduler) -> None:
        scheduler.sort_running()
        scheduler.add_decodes(batch)
        state = scheduler.state(Pass)
        for sequence in scheduler.idle_prefills:
            if num_halfway := state.num_halfway(sequence):
                scheduler.take(batch, sequence, num_halfway)
        if batch.num_prefills:
            # No other prompt is swapped in while some are halfway.
            scheduler.swap_in(batch, size=lambda one, left: left if one.is_decoding else 0)
        else:
            state.num_groups, state.num_passed = self._begin(batch, scheduler), 0
        if batch.num_prefills and state.num_groups > 1:
            batch.restrict_to(state.next_group(scheduler.num_layers))

    def _begin(self, batch: Batch, scheduler: Scheduler) -> int:
        """Start a pass of prompts; returns its groups of layers."""
        most = batch.num_tokens + self.max_num_batched_tokens
        scheduler.continue_prefills(batch, most)
        scheduler.admit(batch, most)
        wanted = self.groups or ceil(batch.num_prefill_tokens / self.chunk)
        return max(1, min(wanted, scheduler.num_layers))

"""What the scheduler asks of a policy, and how much of a sequence goes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from sarathi_lab.engine.request import Batch, Request, SequenceState

Moves = TypeVar("Moves", contravariant=True)
Own = TypeVar("Own")
# How many of the tokens that are left for a sequence's prompt it takes; 0 passes it over.
Size = Callable[[SequenceState, int], int]


class SchedulingPolicy(Protocol[Moves]):
    """What a scheduler with certain moves asks of a policy; see `sarathi_lab.policy.Policy`."""

    @property
    def name(self) -> str: ...

    @property
    def watermark(self) -> float: ...

    @property
    def follows_up(self) -> bool: ...

    @property
    def in_layers(self) -> bool: ...

    @property
    def budget(self) -> int | None: ...

    @property
    def is_capped(self) -> bool: ...

    @property
    def decodes_on_top(self) -> bool: ...

    @property
    def most_prefills(self) -> int | None: ...

    @property
    def most_prompt_tokens(self) -> int | None: ...

    def validate(self, batch_size: int, max_model_len: int) -> None: ...

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int: ...

    def fill(self, batch: Batch, scheduler: Moves) -> None: ...


def with_budget(policy: Own, budget: int) -> Own:
    """`policy`, which cuts prompts, with another budget (tokens of one iteration)."""
    own: Any = policy
    changed: Own = replace(own, **{own.budget_field: budget})
    return changed


def tokens_to_take(
    sequence: SequenceState, token_budget: int | None, batch: Batch, size: Size | None = None
) -> int:
    """Tokens to take now, never negative before `size`."""
    left = sequence.num_pending
    if token_budget is not None:
        left = max(0, min(left, token_budget - batch.num_tokens))
    return left if size is None else size(sequence, left)

"""What the scheduler asks of a policy, which requests fit at all, and how much of one goes next."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
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

    def validate(self, batch_size: int, max_model_len: int) -> None: ...

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int: ...

    def fill(self, batch: Batch, scheduler: Moves) -> None: ...


def with_budget(policy: Own, budget: int) -> Own:
    """`policy`, which cuts prompts, with another budget (tokens of one iteration)."""
    own: Any = policy
    changed: Own = replace(own, **{own.budget_field: budget})
    return changed


def check_fits(
    request: Request, blocks: BlockManager, policy: SchedulingPolicy[Any], max_model_len: int
) -> None:
    """Raise UserError if `request` is longer than the model or the cache allows, alone on an idle
    engine.
    """
    what = f"request {request.request_id} of {request.prompt_len} + {request.output_len} tokens"
    if request.total_len > max_model_len:
        raise UserError(
            f"{what} exceeds max_model_len={max_model_len}; raise it or shorten the request"
        )
    reserved = policy.reserved_tokens(request, request.total_len, max_model_len)
    needed = blocks.blocks_for(max(request.total_len, reserved))
    needed += blocks.watermark_blocks(policy.watermark)
    if needed > blocks.num_blocks:
        raise UserError(
            f"{what} can never fit the KV cache: policy {policy.name} needs {needed} blocks of "
            f"{blocks.block_size} tokens, num_blocks={blocks.num_blocks}; raise cache.num_blocks"
        )


def tokens_to_take(
    sequence: SequenceState, token_budget: int | None, batch: Batch, size: Size | None = None
) -> int:
    """Tokens to take now, never negative before `size`."""
    left = sequence.num_pending
    if token_budget is not None:
        left = max(0, min(left, token_budget - batch.num_tokens))
    return left if size is None else size(sequence, left)

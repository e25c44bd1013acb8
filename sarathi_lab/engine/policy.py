"""The base of scheduling policies: small frozen dataclasses whose `fill` is a few lines over the
scheduler's moves.

The fields of a policy are its configuration (`conf/policy/*.yaml`), with the names of the system
that it follows. Numbers of tokens are per iteration. A policy is shared between runs; what it must
keep from one iteration to the next is in `Scheduler.state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, get_args

from sarathi_lab.config.checked import check_fields
from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.engine.executor import Predictor
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.engine.served_system import ServedSystem

if TYPE_CHECKING:  # the scheduler imports policies
    from sarathi_lab.engine.scheduler import Scheduler

Reserve = Literal["max_model_len", "total", "prompt", "chunk"]


class Policy(ABC):
    """Base of all policies; what users can choose is a field of a subclass's dataclass.

    Attributes:
        name: The option in `conf/policy/`.
        budget_field: The field with the tokens of one iteration, which the setting `chunk` stands
            for; None for policies that never cut a prompt.
        decodes_on_top: The budget is for prompts alone.
        follows_up: The next chunk of a prompt is scheduled while the one before is in flight, for
            a pipeline whose stages keep the order.
        keeps_order: Running sequences stay in the order of admission where requests have
            priorities.
        leaves_with_output: Where batches are made ahead, a sequence keeps its place and its blocks
            until its last token is back. Else it leaves as soon as that token is scheduled.
        shares_at_once: Equal prefixes of a batch are computed once: blocks can be shared as soon as
            they are scheduled, since a layer's keys and values are written before its attention.
        system: The served system whose rule it is, with its defaults; None for a paper's.
        reserve: The cache that admission reserves: "max_model_len" tokens, the request's "total"
            (prompt and output), its whole "prompt", or the first "chunk".
        watermark: Share of the cache that admission leaves free, from 0 to below 1.
    """

    name: ClassVar[str]
    budget_field: ClassVar[str | None] = None
    decodes_on_top: ClassVar[bool] = False
    follows_up: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    leaves_with_output: ClassVar[bool] = False
    shares_at_once: ClassVar[bool] = False
    system: ClassVar[ServedSystem | None] = None
    reserve: Reserve = "max_model_len"
    watermark: float = 0.0

    @abstractmethod
    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        """Put this iteration's work into the empty `batch`, by the moves of a `Scheduler`.

        Args:
            batch: Empty, at most `scheduler.batch_size` sequences.
            scheduler: It knows which sequences run and wait, and has the moves that admit, continue
                and evict them.
        """

    @property
    def budget(self) -> int | None:
        """Tokens of one iteration; None where prompts are never cut."""
        if self.budget_field is None:
            return None
        budget: int | None = getattr(self, self.budget_field)
        return budget

    @property
    def chunk_of_runs(self) -> int | None:
        """The chunk that runs are labelled by: the budget, or for a policy that states no
        `budget_field` its own field `chunk`, which the setting of that name fills, too; None
        without either.
        """
        if self.budget_field is None and is_dataclass(self):
            for field in fields(self):
                if field.name == "chunk":
                    chunk: int = getattr(self, field.name)
                    return chunk
        return self.budget

    @property
    def smallest_budget(self) -> int | None:
        """Tokens of its smallest iteration, which must hold a full batch; None: no budget."""
        return self.budget

    @property
    def window_pool(self) -> float | None:
        """Tokens of a pool for layers with a window, for each token of the others; None: all layers
        have blocks of one pool.
        """
        return None

    def with_budget(self, budget: int) -> Self:
        """Copy this policy, which cuts prompts, with another budget."""
        assert self.budget_field is not None, f"{self.name} cuts no prompts"
        return self.with_fields(**{self.budget_field: budget})

    def with_fields(self, **fields: object) -> Self:
        """Copy this policy with other values of its fields."""
        policy: Self = replace(cast(Any, self), **fields)  # every policy is a dataclass
        return policy

    @property
    def is_capped(self) -> bool:
        """Whether `budget` bounds every batch, or its prompts with `decodes_on_top`."""
        return self.budget is not None

    @property
    def most_prefills(self) -> int | None:
        """The most whole prompts in one batch; None: as many as a batch has sequences."""
        return None

    def describe(self) -> str:
        """Show the budget and other non-default fields, such as " (chunk=512, reserve=chunk)"."""
        if not is_dataclass(self):
            return ""
        shown: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            default = getattr(type(self), field.name, None)
            if value == default and field.name != self.budget_field:
                continue
            if isinstance(value, float):
                shown.append(f"{field.name}={value:.4g}")
            elif isinstance(value, int | str):  # no fitted object
                shown.append(f"{field.name}={value}")
        if not shown:
            return ""
        return f" ({', '.join(shown)})"

    def validate(self, batch_size: int, max_model_len: int) -> None:
        """Raise UserError for parameters that cannot work with this batch size and model length."""
        if not hasattr(self, "name"):
            raise UserError(
                f"policy {type(self).__name__} has no name; add one to the class, such as "
                'name: ClassVar[str] = "my_policy"'
            )
        check_fields(self)
        require_one_of("reserve", self.reserve, get_args(Reserve))
        remedy = "use a share of the cache, a number from 0 to below 1"
        if require_number("watermark", self.watermark, minimum=0, fix=remedy) >= 1:
            raise UserError(f"watermark={self.watermark} is not below 1; {remedy}")
        if self.budget_field is not None and not self.decodes_on_top:
            self.check_budget(batch_size, max_model_len)
        self.check(batch_size, max_model_len)

    def check(self, batch_size: int, max_model_len: int) -> None:  # noqa: B027 (few need more)
        """Raise UserError for combinations of valid fields that a subclass refuses."""

    def check_budget(self, batch_size: int, max_model_len: int) -> None:
        """Raise UserError for a budget that leaves a full batch of decodes no prompt token."""
        check_budget(str(self.budget_field), cast(int, self.budget), batch_size)

    def check_longest(self, name: str, max_model_len: int, reason: str) -> None:
        """Raise UserError, with the `reason`, if the field `name` (None: no limit) has no room
        for the longest request.
        """
        limit = getattr(self, name)
        if limit is not None and limit < max_model_len:
            raise UserError(f"{name}={limit} is below max_model_len={max_model_len}: {reason}")

    def reserved_tokens(self, request: Request, num_known: int, max_model_len: int) -> int:
        """Return the cache that admission of a request reserves.

        Args:
            request: The request to admit.
            num_known: Its prompt, and output that was generated before a preemption, in tokens.
            max_model_len: The most tokens of any sequence.

        Returns:
            Tokens; of a "chunk" none, as the chunk itself takes what it needs.
        """
        reserved = {"max_model_len": max_model_len, "total": request.total_len, "chunk": 0}
        return reserved.get(self.reserve, num_known)

    def for_stages(self, num_sequences: int, num_stages: int) -> tuple[Policy, int]:
        """Share the sequences of a server out to the stages of its pipeline.

        Args:
            num_sequences: The most that all stages serve together.
            num_stages: Stages, each with a batch in flight.

        Returns:
            The policy, and the most sequences of one batch.
        """
        return self, max(1, num_sequences // num_stages)

    def on_device(
        self, predictor: Callable[[], Predictor | None], batch_size: int, max_model_len: int
    ) -> Policy:
        """Fit this policy to a device.

        Args:
            predictor: Gives the device's cost model, None if it has none.
            batch_size: The most sequences of a batch.
            max_model_len: The most tokens of a sequence.

        Returns:
            A policy without open parameters: this one, or a copy with fitted ones.

        Raises:
            UserError: A policy needs a cost model, and the device has none.
        """
        return self


def check_budget(name: str, budget: int, batch_size: int) -> None:
    """Raise UserError unless the field `name` leaves a full batch of decodes a prompt's token."""
    remedy = "use a number of tokens such as 256, or chunk=auto with executor=simulated"
    if require_int(name, budget, 1, remedy) < batch_size:
        raise UserError(
            f"{name}={budget} is smaller than the {batch_size - 1} decodes and 1 prompt token that "
            f"a batch of {batch_size} must carry; use {name}>={batch_size} or a smaller batch"
        )

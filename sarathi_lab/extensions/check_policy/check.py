"""Serves random queues with a policy, twice each, and names the first rule that it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.policy_errors import PolicyRaised, PolicyStalled
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.extensions.check_policy.queues import STREAM, Case, draw_case
from sarathi_lab.extensions.check_policy.rules import Checker, PolicyFault, Schedule, hold
from sarathi_lab.policy import Policy

MAX_REQUESTS = 10
MAX_OVERTAKING = STREAM // 2  # later requests of a stream that finish before an earlier one


@dataclass(frozen=True)
class PolicyCheck:
    """Numbers of random queues that a policy served without breaking a rule, and refused."""

    policy: str
    num_served: int
    num_refused: int

    def __str__(self) -> str:
        return (
            f"{self.policy}: no rule is broken in {self.num_served} random queues "
            f"({self.num_refused} refused)"
        )


def check_policy(
    policy: Policy | type[Policy], num_queues: int = 100, seed: int = 0
) -> PolicyCheck:
    """Serve random queues, pipelines and tight caches included, with a policy (a class: with its
    defaults; one with a token budget also with random budgets).

    Raises PolicyFault for the first rule that it breaks; queues grow, so that a short one shows it:

    - batch: a batch holds each sequence once, at most `batch` of them, and what `Batch.add` counts
    - budget: it has no more tokens than the policy's `budget`, where that `is_capped`
    - blocks: no chunk is computed without cache blocks, and no block is shared or lost
    - progress: every request is served
    - starvation: of a stream of requests none is overtaken by half of those after it
    - same schedule: an equal queue is served equally, so that the policy itself has no state
      (`Scheduler.state` is for that)
    - no errors: `fill` raises nothing

    Raises UserError for a policy that refuses every queue.
    """
    if isinstance(policy, type):
        policy = policy()
    refusals: list[str] = []
    for number in range(num_queues):
        # Short queues first: the first fault that is found is the easiest to read.
        max_requests = 1 + number * MAX_REQUESTS // num_queues
        case = draw_case(policy, Random(f"{seed} {number}"), max_requests)
        if _refusal(case):  # maybe of the random budget only
            case = replace(case, engine=replace(case.engine, policy=policy))
        refusal = _refusal(case)
        if refusal:
            refusals.append(refusal)
        else:
            _serve_twice(case)
    if len(refusals) == num_queues:
        raise UserError(f"policy={policy} refuses every queue, such as: {refusals[0]}")
    return PolicyCheck(policy.name, num_queues - len(refusals), len(refusals))


def _refusal(case: Case) -> str:
    """The reason for which the engine refuses the queue; empty if it does not."""
    try:
        case.engine.check(case.requests)
    except UserError as error:
        return str(error)
    return ""


def _serve_twice(case: Case) -> None:
    """Raises PolicyFault with the case for a rule that it breaks."""
    try:
        is_same = _serve(case) == _serve(case)
        hold(is_same, "same schedule", "the queue is served in another way a second time")
    except PolicyFault as fault:
        raise PolicyFault(fault.rule, fault.how, case) from None
    except PolicyStalled as stall:
        raise PolicyFault("progress", stall.how, case) from None
    except Exception as error:
        cause = error.__cause__ if isinstance(error, PolicyRaised) else error
        how = f"{type(cause).__name__}: {cause}"
        raise PolicyFault("no errors", how, case) from cause


def _serve(case: Case) -> Schedule:
    num_stages = case.engine.num_micro_batches

    def times(batch: Batch) -> list[float]:
        seconds = 0.5 + 0.1 * batch.num_tokens
        return [seconds / num_stages] * num_stages

    engine = case.engine
    scheduler = engine.make_engine(engine.policy)
    checker = Checker(scheduler)
    executor = PipelineExecutor(num_stages, times)
    run_engine(case.requests, scheduler, executor, checker)
    num_missing = len(case.requests) - len(checker.finished)
    hold(num_missing == 0, "progress", f"{num_missing} requests are not served")
    hold(not scheduler.has_work, "progress", "sequences are left after the last request")
    # Only in a stream, of equal requests, does overtaking show a fault.
    if len(case.requests) == STREAM:
        order = [sequence.request.request_id for sequence in checker.finished]
        _check_starvation(order)
    return checker.schedule


def _check_starvation(order: Sequence[int]) -> None:
    """Check the numbers of a stream's requests, by their `order` in finishing."""
    for position, number in enumerate(order):
        finished_before = order[:position]
        num_later = sum(earlier > number for earlier in finished_before)
        how = f"request {number} is overtaken by {num_later} of those that come after it"
        hold(num_later <= MAX_OVERTAKING, "starvation", how)

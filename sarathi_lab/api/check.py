"""`lab.check_policy`: random queues under a policy, until one breaks a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from textwrap import shorten

from sarathi_lab.api.rules import (
    Checker,
    CountingScheduler,
    RuleBroken,
    ShadowCache,
    ShadowExecutor,
    check_books,
    history,
    hold,
)
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.policy import Policy

LONGEST_PROMPT, LONGEST_OUTPUT = 28, 12  # tokens
NUM_LAYERS = 6  # for policies by which prompts pass these in groups
STREAM = 40  # requests of one size that keep coming while others wait
MOST_OVERTAKING = STREAM // 2  # requests that come later and are done before one


class PolicyFault(UserError):
    """What a policy does wrong: the `rule` (see `check_policy`), and the queue that shows it."""

    def __init__(self, message: str, rule: str, case: Case) -> None:
        super().__init__(message)
        self.rule = rule
        self.case = case


@dataclass(frozen=True)
class Case:
    """A queue of requests, and an engine: sizes in sequences, blocks and tokens."""

    requests: tuple[Request, ...]
    policy: Policy
    batch_size: int
    num_blocks: int
    block_size: int
    num_host_blocks: int
    num_stages: int

    def __str__(self) -> str:
        queue = [f"{r.prompt_len}+{r.output_len} at {r.arrival_time:g} s" for r in self.requests]
        told = f"{len(queue)} requests ({', '.join(queue[:6])}{', ...' if queue[6:] else ''})"
        host = f" + {self.num_host_blocks} on the host" if self.num_host_blocks else ""
        cache = f"{self.num_blocks}{host} blocks of {self.block_size}"
        sizes = f"batch {self.batch_size}, {cache}, {self.num_stages} in flight"
        return f"{told}, {shorten(repr(self.policy), 160)}, {sizes}"


@dataclass(frozen=True)
class PolicyCheck:
    """How many random queues a policy served without breaking a rule, and refused in one line."""

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
    """Serve random queues, pipelines, tight caches and swapping included, under a policy (a class:
    with its defaults; of one that cuts prompts also with random budgets).

    Raises PolicyFault for the first rule that it breaks, with the shortest queue found to show it:

    - batch: a batch holds each sequence once, at most `batch` of them, and what `Batch.add` counts
    - budget: it has no more tokens than the policy's `budget`, where that `is_capped`
    - blocks: nobody reads or writes a cache block of others, and none is lost
    - order: tokens come one by one, after their request, and none is computed twice
    - progress: every request is served
    - starvation: of a stream of requests none is overtaken by half of those after it
    - same schedule: the same queue is served in the same way again, so that the policy itself
      remembers nothing (what it must remember is for `Scheduler.state`)
    - no errors: `fill` raises nothing

    Raises UserError for a policy that refuses every queue.
    """
    policy = policy() if isinstance(policy, type) else policy
    refused: list[str] = []
    for number in range(num_queues):
        case = _case(policy, Random(f"{seed} {number}"))
        try:
            try:
                found = _fault(case)
            except UserError:  # maybe of the random budget only
                case = replace(case, policy=policy)
                found = _fault(case)
        except UserError as error:
            refused.append(str(error))
            continue
        if found is not None:
            case, found = _shortest(case, found)
            raise PolicyFault(f"{found}; seen with {case}", found.rule, case)
    if len(refused) == num_queues:
        raise UserError(f"policy={policy} refuses every queue, such as: {refused[0]}")
    return PolicyCheck(policy.name, num_queues - len(refused), len(refused))


def _case(policy: Policy, random: Random) -> Case:
    """A stream every fourth time, else a few requests in a cache that is often tight."""
    is_stream, batch_size = random.random() < 0.25, random.randint(1, 5)
    if is_stream:
        sizes = [(random.randint(1, 9), random.randint(1, 5))] * STREAM
        times = [0.4 * i for i in range(STREAM)]
    else:
        number = random.randint(1, 10)
        lengths = (LONGEST_PROMPT, LONGEST_OUTPUT)
        sizes = [(random.randint(1, lengths[0]), random.randint(1, lengths[1]))] * number
        sizes = [(random.randint(1, lengths[0]), random.randint(1, lengths[1])) for _ in sizes]
        times = [random.choice((0.0, 0.0, 3.0, 4.5, 12.0)) for _ in sizes]
    queue = zip(sorted(times), sizes, strict=True)
    requests = tuple(Request(i, time, *size) for i, (time, size) in enumerate(queue))
    block_size, longest = random.choice((1, 3, 4, 8)), max(one.total_len for one in requests)
    spare = batch_size * longest if is_stream else random.randint(-1, 12)
    if policy.budget_field and random.random() < 0.75:
        policy = policy.with_budget(random.randint(batch_size, 24))
    return Case(
        requests,
        policy,
        batch_size=batch_size,
        num_blocks=max(1, -(-longest // block_size) + spare),
        block_size=block_size,
        num_host_blocks=random.choice((0, 0, 2, 30)),
        num_stages=1 if is_stream or policy.in_layers else random.choice((1, 1, 2, 4)),
    )


def _fault(case: Case) -> RuleBroken | None:
    """The first rule that the case breaks. Raises UserError where the policy refuses it."""
    schedulers = [_scheduler(case) for _ in range(2)]
    for request in case.requests:
        schedulers[0].check_fits(request)
    try:
        first, again = (_serve(case, scheduler) for scheduler in schedulers)
        hold(first == again, "same schedule", "the queue is served in another way a second time")
    except RuleBroken as broken:
        return broken
    except Exception as error:  # whatever a policy's `fill` raises, and the loop when it stalls
        if "stalled with" in str(error):
            return RuleBroken("progress", str(error))
        return RuleBroken("no errors", f"{type(error).__name__}: {error}")
    return None


def _scheduler(case: Case) -> CountingScheduler:
    longest = max(request.total_len for request in case.requests)
    return CountingScheduler(
        case.policy,
        BlockManager(case.num_blocks, case.block_size, case.num_host_blocks),
        batch_size=case.batch_size,
        max_model_len=longest,
        num_micro_batches=case.num_stages,
        preemption="swap" if case.num_host_blocks else "recompute",
    )


def _serve(case: Case, scheduler: CountingScheduler) -> list[list[tuple[int, int, int]]]:
    """Serve the case, and return its schedule: a row (request, start, tokens) a chunk."""

    def times(batch: Batch) -> list[float]:
        return [(0.5 + 0.1 * batch.num_tokens) / case.num_stages] * case.num_stages

    checker, requests = Checker(scheduler), case.requests
    histories = [history((), one.request_id, one.total_len, is_shared=False) for one in requests]
    cache = ShadowCache(scheduler, histories)
    pipeline = PipelineExecutor(case.num_stages, times, num_layers=NUM_LAYERS)
    executor = ShadowExecutor(pipeline, [cache])
    run_engine(requests, scheduler, executor, checker)
    check_books(requests, [scheduler], checker)
    if len(requests) == STREAM:
        _check_starvation(checker, requests)
    return checker.schedule


def _check_starvation(checker: Checker, requests: Sequence[Request]) -> None:
    order = [one.request.request_id for one in checker.finished]
    for place, number in enumerate(order):
        later = sum(other > number for other in order[:place])
        how = f"request {number} is overtaken by {later} of those that come after it"
        hold(later <= MOST_OVERTAKING, "starvation", how)


def _shortest(case: Case, found: RuleBroken) -> tuple[Case, RuleBroken]:
    """The case without the requests that it does not need to break the same rule; whole where that
    shows in a long queue, or not every time.
    """
    for number in reversed(range(len(case.requests))):
        if len(case.requests) == 1 or found.rule in ("starvation", "same schedule"):
            break
        left = [one for i, one in enumerate(case.requests) if i != number]
        renumbered = tuple(replace(one, request_id=i) for i, one in enumerate(left))
        fewer = replace(case, requests=renumbered)
        try:
            broken = _fault(fewer)
        except UserError:
            continue
        if broken is not None and broken.rule == found.rule:
            case, found = fewer, broken
    return case, found

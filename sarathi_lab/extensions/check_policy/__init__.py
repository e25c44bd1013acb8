"""`lab.check_policy`: random queues served with a policy, until one breaks a rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from textwrap import shorten

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.policy import Policy

LONGEST_PROMPT, LONGEST_OUTPUT = 28, 12  # tokens
MOST_REQUESTS = 10
STREAM = 40  # requests of equal size that arrive while others wait
MOST_OVERTAKING = STREAM // 2  # later requests that finish before one
MOST_ITERATIONS = 5000  # of a run of a few short requests
Schedule = list[list[tuple[int, int, int]]]  # by iteration: request, start and tokens of each chunk


@dataclass(frozen=True)
class Case:
    """Queue of requests and the engine that serves it."""

    requests: tuple[Request, ...]
    engine: EngineConfig

    def __str__(self) -> str:
        queue = [f"{r.prompt_len}+{r.output_len} at {r.arrival_time:g} s" for r in self.requests]
        shown = f"{len(queue)} requests ({', '.join(queue[:6])}{', ...' if queue[6:] else ''})"
        on = self.engine
        cache = f"{on.num_blocks} blocks of {on.block_size}"
        sizes = f"batch {on.batch_size}, {cache}, {on.num_micro_batches} in flight"
        return f"{shown}, {shorten(repr(on.policy), 160)}, {sizes}"


class PolicyFault(UserError):
    """Violation of a `rule` (see `check_policy`) in a `case`, None where the caller has it."""

    def __init__(self, rule: str, how: str, case: Case | None = None) -> None:
        super().__init__(f"{rule}: {how}{f'; seen with {case}' if case else ''}")
        self.rule = rule
        self.how = how
        self.case = case


def hold(condition: bool, rule: str, how: str) -> None:
    """Raise PolicyFault unless the condition holds."""
    if not condition:
        raise PolicyFault(rule, how)


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
    policy = policy() if isinstance(policy, type) else policy
    refused: list[str] = []
    for number in range(num_queues):
        most = 1 + number * MOST_REQUESTS // num_queues
        case = _case(policy, Random(f"{seed} {number}"), most)
        try:
            case.engine.check(case.requests)
        except UserError:  # maybe of the random budget only
            case = replace(case, engine=replace(case.engine, policy=policy))
        try:
            case.engine.check(case.requests)
        except UserError as error:
            refused.append(str(error))
            continue
        try:
            is_same = _serve(case) == _serve(case)
            hold(is_same, "same schedule", "the queue is served in another way a second time")
        except PolicyFault as fault:
            raise PolicyFault(fault.rule, fault.how, case) from None
        except Exception as error:  # of the policy's `fill`, or of the loop when it stalls
            if "stalled with" in str(error):
                raise PolicyFault("progress", str(error), case) from None
            how = f"{type(error).__name__}: {error}"
            raise PolicyFault("no errors", how, case) from error
    if len(refused) == num_queues:
        raise UserError(f"policy={policy} refuses every queue, such as: {refused[0]}")
    return PolicyCheck(policy.name, num_queues - len(refused), len(refused))


def _case(policy: Policy, random: Random, most_requests: int) -> Case:
    """Draw a stream every fourth time, else a few requests and a cache that is often tight."""
    is_stream, batch_size = random.random() < 0.25, random.randint(1, 5)
    if is_stream:
        sizes = [(random.randint(1, 9), random.randint(1, 5))] * STREAM
        times = [0.4 * i for i in range(STREAM)]
    else:
        number = random.randint(1, most_requests)
        sizes = [
            (random.randint(1, LONGEST_PROMPT), random.randint(1, LONGEST_OUTPUT))
            for _ in range(number)
        ]
        times = sorted(random.choice((0.0, 0.0, 3.0, 4.5, 12.0)) for _ in sizes)
    queue = zip(times, sizes, strict=True)
    requests = tuple(Request(i, time, *size) for i, (time, size) in enumerate(queue))
    block_size, longest = random.choice((1, 3, 4, 8)), max(one.total_len for one in requests)
    spare = batch_size * longest if is_stream else random.randint(-1, 12)
    if policy.budget_field and random.random() < 0.75:
        policy = policy.with_budget(random.randint(batch_size, 24))
    engine = EngineConfig(
        policy,
        batch_size=batch_size,
        num_blocks=max(1, -(-longest // block_size) + spare),
        block_size=block_size,
        max_model_len=longest,
        num_micro_batches=1 if is_stream else random.choice((1, 1, 2, 4)),
    )
    return Case(requests, engine)


def _serve(case: Case) -> Schedule:
    num_stages = case.engine.num_micro_batches

    def times(batch: Batch) -> list[float]:
        return [(0.5 + 0.1 * batch.num_tokens) / num_stages] * num_stages

    scheduler = case.engine.make_engine(case.engine.policy)
    checker = Checker(scheduler)
    executor = PipelineExecutor(num_stages, times)
    run_engine(case.requests, scheduler, executor, checker)
    missing = len(case.requests) - len(checker.finished)
    hold(missing == 0, "progress", f"{missing} requests are not served")
    hold(not scheduler.has_work, "progress", "sequences are left after the last request")
    if len(case.requests) == STREAM:
        _check_starvation([one.request.request_id for one in checker.finished])
    return checker.schedule


def _check_starvation(order: Sequence[int]) -> None:
    for place, number in enumerate(order):
        later = sum(other > number for other in order[:place])
        how = f"request {number} is overtaken by {later} of those that come after it"
        hold(later <= MOST_OVERTAKING, "starvation", how)


class Checker(Ledger):
    """Ledger that checks every iteration, and keeps the schedule and what finished."""

    def __init__(self, *schedulers: Scheduler) -> None:
        super().__init__()
        self.schedulers = schedulers
        self.finished: list[SequenceState] = []
        self.schedule: Schedule = []

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        super().record(result, finished)
        batch = result.batch
        for scheduler, part in zip(self.schedulers, getattr(batch, "parts", (batch,)), strict=True):
            check_batch(part, scheduler)
            self.check_cache(scheduler)
        rows = [(c.sequence.request.request_id, c.start, c.num_tokens) for c in batch.chunks]
        self.schedule.append(rows)
        self.finished += finished
        hold(len(self.schedule) < MOST_ITERATIONS, "progress", "sequences evict one another")

    def check_cache(self, scheduler: Scheduler) -> None:
        check_blocks(scheduler.blocks, scheduler.running)


def check_batch(batch: Batch, scheduler: Scheduler) -> None:
    """Raise PolicyFault unless `batch` keeps its limits and sums up its chunks."""
    chunks, policy = batch.chunks, scheduler.policy
    sequences = {chunk.sequence for chunk in chunks}
    hold(len(sequences) == len(chunks), "batch", "a sequence is in it twice")
    how = f"it has {len(chunks)} sequences, where batch={scheduler.batch_size}"
    hold(len(chunks) <= scheduler.batch_size, "batch", how)
    hold(all(chunk.num_tokens > 0 for chunk in chunks), "batch", "a chunk has no tokens")
    prompts = [chunk for chunk in chunks if not chunk.is_decode]
    decodes = [chunk for chunk in chunks if chunk.is_decode]
    # Drafts that are no longer in their chunks.
    rejected = batch.num_draft_tokens - batch.num_accepted_tokens
    sums = {
        "num_prefills": len(prompts),
        "num_decodes": len(decodes),
        "num_decode_tokens": sum(chunk.num_tokens for chunk in decodes) + rejected,
        "num_prefill_tokens": sum(chunk.num_tokens for chunk in prompts),
        "prefill_kv_tokens": sum(chunk.start + chunk.num_tokens for chunk in prompts),
        "decode_kv_tokens": sum(chunk.start + chunk.num_tokens for chunk in decodes) + rejected,
    }
    for name, value in sums.items():
        counted = getattr(batch, name)
        how = f"{name} is {counted}, its chunks make {value}; use Batch.add"
        hold(counted == value, "batch", how)
    # A sequence that comes back to its cached tokens looks like a decode beside whole prompts.
    is_cut = bool(decodes) and scheduler.blocks.prefix is None
    budget = policy.budget
    if budget is not None and (policy.is_capped or is_cut):
        on_top = batch.num_decode_tokens if policy.decodes_on_top else 0
        how = (
            f"a batch has {batch.num_tokens} tokens, {len(decodes)} of them decodes, where "
            f"{budget} are allowed{' for prompts' if on_top else ''}"
        )
        hold(batch.num_tokens <= max(budget + on_top, len(decodes)), "budget", how)


def check_blocks(blocks: BlockManager, sequences: Iterable[SequenceState]) -> None:
    """Raise PolicyFault unless every block of a cache without shared prefixes is free or held by
    one of `sequences`, and these hold as many as they have computed.
    """
    sequences = list(sequences)
    held = [block for sequence in sequences for block in sequence.block_ids]
    hold(len(set(held)) == len(held), "blocks", "two sequences hold a block")
    how = f"{len(held)} held + {blocks.num_free} free blocks are not the {blocks.num_blocks} blocks"
    hold(len(held) + blocks.num_free == blocks.num_blocks, "blocks", how)
    for sequence in sequences:
        has_room = len(sequence.block_ids) * blocks.block_size >= sequence.num_computed
        how = f"{sequence} has computed tokens for which it holds no block"
        hold(has_room, "blocks", how)

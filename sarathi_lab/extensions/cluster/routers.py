"""Routers, which choose the instance for a request, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

Router = Callable[[Sequence[Scheduler], Request], int]  # the index of one of the schedulers
WAITING_WEIGHT = 4  # of a waiting request beside a running one, as in vLLM's front end
# SGLang's defaults: the share of a prompt from which a cached prefix counts, and how many requests
# more, and how many times the fewest, the fullest instance may have.
CACHE_THRESHOLD = 0.3
ABSOLUTE_IMBALANCE = 64
RELATIVE_IMBALANCE = 1.5


def load_of(scheduler: Scheduler) -> int:
    """Count the requests of an instance, those without a place in its cache four times."""
    return WAITING_WEIGHT * len(scheduler.waiting) + len(scheduler.running)


def least_loaded(schedulers: Sequence[Scheduler], request: Request) -> int:
    """Choose the first with the least load (vLLM's data-parallel front end)."""
    loads = [load_of(scheduler) for scheduler in schedulers]
    return loads.index(min(loads))


def round_robin() -> Router:
    """Make a router that takes instances in turn."""
    turns = count()

    def choose(schedulers: Sequence[Scheduler], request: Request) -> int:
        turn = next(turns)
        return turn % len(schedulers)

    return choose


def longest_prefix(schedulers: Sequence[Scheduler], request: Request) -> int:
    """Choose the instance with the longest cached prefix of the prompt; the least loaded one if
    that is short, or if the instances are out of balance. This is SGLang's cache-aware router,
    which estimates what an instance has cached; here the cache is queried.
    """
    numbers = []
    for scheduler in schedulers:
        numbers.append(len(scheduler.waiting) + len(scheduler.running))
    if _is_out_of_balance(min(numbers), max(numbers)):
        return least_loaded(schedulers, request)
    probe = SequenceState(request, order=-1)  # shares block keys between instances
    cached = [cached_tokens(scheduler, probe) for scheduler in schedulers]
    least_cached = CACHE_THRESHOLD * request.prompt_len
    if max(cached) <= least_cached:
        return least_loaded(schedulers, request)
    # Of those with the longest prefix the one with the fewest requests, of these the first.
    ranks = []
    for num_cached, number in zip(cached, numbers, strict=True):
        ranks.append((-num_cached, number))
    return ranks.index(min(ranks))


def _is_out_of_balance(fewest: int, largest: int) -> bool:
    """Whether instances have too different numbers of requests."""
    is_far = largest - fewest > ABSOLUTE_IMBALANCE
    is_many_times = largest > RELATIVE_IMBALANCE * fewest
    return is_far and is_many_times


def cached_tokens(scheduler: Scheduler, sequence: SequenceState) -> int:
    """Count the tokens at the start of `sequence` that the instance has in its prefix cache."""
    prefix = scheduler.blocks.prefix
    if prefix is None:
        return 0
    num_blocks = len(prefix.find(sequence))
    return num_blocks * prefix.block_size


# Each makes the router of a run.
ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round_robin": round_robin,
    "least_loaded": lambda: least_loaded,
    "prefix_aware": lambda: longest_prefix,
}

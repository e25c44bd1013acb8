"""Which instance of a cluster takes a request: a router chooses one of several schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from sarathi_lab.config.checked import number, one_of, refuse_unread, share, whole
from sarathi_lab.engine.prefix_cache import num_found
from sarathi_lab.engine.replicas import least_loaded
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.scheduler import Scheduler

Router = Callable[[Sequence[Scheduler], Request], int]


def round_robin() -> Router:
    """One after the other, whatever they have to do."""
    turns = count()
    return lambda schedulers, request: next(turns) % len(schedulers)


def cached_tokens(scheduler: Scheduler, sequence: SequenceState) -> int:
    """Tokens of the beginning of `sequence` that the instance has in its prefix cache."""
    prefix = scheduler.blocks.prefix
    return 0 if prefix is None else num_found(prefix.find(sequence)) * prefix.block_size


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Settings of a router by its name: "round_robin", "least_loaded" or "prefix_aware".

    "prefix_aware" takes the instance with the longest cached beginning of the prompt; the least
    loaded one if that is no more than the share `cache_threshold` of the prompt, or if instances
    are out of balance: their requests more than `balance_abs_threshold` apart, and the most more
    than `balance_rel_threshold` times the fewest. That is SGLang's cache-aware router with its
    defaults; it guesses from its own record what an instance has cached, here the cache is asked.
    """

    router: str = one_of("least_loaded", valid=("round_robin", "least_loaded", "prefix_aware"))
    cache_threshold: float = share(0.3, fix="use a share of the prompt such as 0.3")
    balance_abs_threshold: int = whole(64, minimum=0, fix="use a number of requests such as 64")
    balance_rel_threshold: float = number(1.5, minimum=1, fix="use a ratio from 1, such as 1.5")

    def check_routing(self) -> None:
        """Raise UserError for settings that the router does not read."""
        if self.router != "prefix_aware":
            names = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
            why = f" on cluster.router={self.router}; drop it, or use cluster.router=prefix_aware"
            refuse_unread(self, names, why, "cluster.")

    def make_router(self) -> Router:
        """A router for one run."""
        if self.router == "prefix_aware":
            return self._longest_prefix
        return round_robin() if self.router == "round_robin" else least_loaded

    def _longest_prefix(self, schedulers: Sequence[Scheduler], request: Request) -> int:
        numbers = [len(one.waiting) + len(one.swapped) + len(one.running) for one in schedulers]
        fewest, most = min(numbers), max(numbers)
        apart = most - fewest > self.balance_abs_threshold
        if not (apart and most > self.balance_rel_threshold * fewest):
            asking = SequenceState(request, order=-1)  # keeps the keys of its blocks for all
            cached = [cached_tokens(one, asking) for one in schedulers]
            if max(cached) > self.cache_threshold * request.prompt_len:
                longest = [i for i, own in enumerate(cached) if own == max(cached)]
                return min(longest, key=numbers.__getitem__)
        return least_loaded(schedulers, request)

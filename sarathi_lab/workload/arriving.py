"""How requests arrive, and how urgent they are: settings that several workloads share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.checked import check_fields, listed, number, refuse_unread, whole
from sarathi_lab.config.errors import (
    MOST,
    UserError,
    require_int,
    require_list,
    require_number,
    require_one_of,
)
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import LoadedRequests

ArrivalKind = Literal["closed", "poisson", "gamma", "ramp", "users"]

# What each kind reads, and needs unless it is in OPTIONAL.
READS: dict[str, tuple[str, ...]] = {
    "closed": (),
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "ramp": ("rate", "end_rate"),
    "users": ("users", "think_time"),
}
OPTIONAL = ("think_time",)
EXPLAINED = {
    "rate": "in requests per second, such as 2.0",
    "cv": "the coefficient of variation of the gaps, such as 2.0 (1 is poisson)",
    "end_rate": "in requests per second, above workload.rate",
    "users": "the number of users who wait for their answers, such as 8",
    "think_time": "in seconds, such as 1.0",
}
CV_RANGE = (0.01, 100.0)  # beyond, gaps are equal or zero in double precision
MOST_REQUESTS = 10_000_000  # which take some 5 GB
SHARES_ERROR = 1e-6  # by which shares may miss 1
LEVELS = "use whole numbers, lower ones first served, such as [0,1]"
NO_LEVELS = f"is not a list; {LEVELS}"


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """What decides when requests arrive and which are urgent.

    - "closed": all at time 0.
    - "poisson": exponential gaps of mean 1 / `rate` (requests per second).
    - "gamma": gamma gaps of mean 1 / `rate` and coefficient of variation `cv`.
    - "ramp": a Poisson process whose rate rises linearly to `end_rate` while the requests last.
    - "users": `users` users, who send the next request `think_time` seconds after an answer.

    `arrivals` None stands for the times that a file brings. Times are made of random numbers of
    mean 1, scaled: with the same seed, rates share them. `priorities` (lower is served first where
    queue_order=priority) are dealt at random in `priority_shares`, equal ones if they are None.
    Raises UserError for what is unknown, missing or has no effect.
    """

    arrivals: ArrivalKind | None = "closed"
    rate: float | None = number(None, above=0, fix="use requests per second, such as 2.0")
    cv: float | None = number(None, minimum=CV_RANGE[0], fix=f"use {EXPLAINED['cv']}")
    end_rate: float | None = number(
        None, above=0, fix="use requests per second, above workload.rate"
    )
    users: int | None = whole(
        None, minimum=1, maximum=MOST_REQUESTS, fix=f"use {EXPLAINED['users']}"
    )
    think_time: float | None = number(None, minimum=0, fix="use seconds, such as 1.0")
    priorities: Sequence[int] | None = listed(
        None, each=partial(require_int, minimum=-MOST, fix=LEVELS), complaint=NO_LEVELS
    )
    priority_shares: Sequence[float] | None = None
    seed: int = whole(minimum=0, fix="use a number such as 0", name="seed")

    def __post_init__(self) -> None:
        if self.arrivals is not None:
            self.check_arrivals(self.arrivals)
        check_fields(self, "workload.")
        if self.end_rate is not None and self.rate is not None and self.end_rate <= self.rate:
            raise UserError(
                f"workload.end_rate={self.end_rate} does not exceed workload.rate={self.rate}; "
                "raise it, or use workload.arrivals=poisson for a rate that stays"
            )
        if self.cv is not None and self.cv > CV_RANGE[1]:
            raise UserError(f"workload.cv={self.cv} exceeds {CV_RANGE[1]:g}; use {EXPLAINED['cv']}")
        self._check_priorities()

    def check_arrivals(self, kind: str) -> None:
        """Raise UserError unless there is what this `kind` of arrivals reads, and no more."""
        require_one_of("workload.arrivals", kind, READS)
        for name, explained in EXPLAINED.items():
            if name not in READS[kind]:
                reader = next(other for other, read in READS.items() if name in read)
                why = f" on {kind} arrivals; drop it or use workload.arrivals={reader}"
                refuse_unread(self, [name], why, "workload.")
            elif getattr(self, name) is None and name not in OPTIONAL:
                raise UserError(f"workload.arrivals={kind} needs workload.{name}, {explained}")

    def _check_priorities(self) -> None:
        priorities, shares = self.priorities, self.priority_shares
        if priorities is None:
            why = " without workload.priorities; add workload.priorities=[0,1]"
            refuse_unread(self, ["priority_shares"], why, "workload.")
            return
        levels = list(priorities)
        if len(set(levels)) < 2:
            raise UserError(f"workload.priorities={levels} has no effect: all are equal; {LEVELS}")
        if shares is None:
            return
        name = "workload.priority_shares"
        fix = f"give one share a priority of {levels} that sum to 1, or null for equal ones"
        unfit = f"does not fit workload.priorities; {fix}"
        require_list(name, shares, unfit, partial(require_number, above=0, fix=fix))
        if len(shares) != len(levels):
            raise UserError(f"{name}={shares} {unfit}")
        if abs(sum(shares) - 1) > SHARES_ERROR:
            raise UserError(f"{name}={list(shares)} sum to {sum(shares):g}; {fix}")

    def times(self, num_requests: int) -> NDArray[np.float64]:
        """Seconds of arrival [num_requests], ascending from 0; all 0 where users decide.

        More requests leave the first ones' times as they were, but for a ramp.
        """
        if self.rate is None:  # closed, or for users to decide
            return np.zeros(num_requests)
        # A stream of its own: the same seed gives the same prompts at every rate.
        generator = np.random.default_rng([self.seed, 1])
        if self.cv is None:
            gaps = generator.standard_exponential(num_requests)
        else:
            gaps = generator.standard_gamma(1 / self.cv**2, num_requests) * self.cv**2
        if self.end_rate is None:
            gaps *= 1 / self.rate
            return np.cumsum(gaps) - gaps[0]  # the clock starts with the first request
        # When a process of rate r(t) = r0 + (r1 - r0) t / L has `expected` arrivals behind it: the
        # root of its integral; L = 2 n / (r0 + r1), in which n requests are expected (time change
        # of a Poisson process: Cinlar, 1975, ch. 4.7).
        expected = np.cumsum(gaps) - gaps[0]
        slope = (self.end_rate**2 - self.rate**2) / (2 * num_requests)
        return 2 * expected / (self.rate + np.sqrt(self.rate**2 + 2 * slope * expected))

    def loaded(
        self,
        name: str,
        times: NDArray[np.float64],
        shapes: Iterable[tuple[int, int, NDArray[np.int32] | None, Sequence[int]]],
        **read: Any,
    ) -> LoadedRequests:
        """Requests at `times` of these tokens, prompts and prefix ids, with dealt priorities;
        `read` is what else a file tells.
        """
        levels, shares = self.priorities or (0,), self.priority_shares
        chosen = [0] * len(times)
        if len(levels) > 1:
            weights = np.asarray(shares or [1.0] * len(levels), dtype=float)
            dice = np.random.default_rng([self.seed, 4])
            chosen = dice.choice(len(levels), len(times), p=weights / weights.sum()).tolist()
        requests = [
            Request(i, time, prompt_len, output_len, prompt, levels[level], tuple(prefix_ids))
            for i, (time, level, (prompt_len, output_len, prompt, prefix_ids)) in enumerate(
                zip(times.tolist(), chosen, shapes, strict=False)
            )
        ]
        think_time = self.think_time or 0.0
        return LoadedRequests(name, requests, num_users=self.users, think_time=think_time, **read)

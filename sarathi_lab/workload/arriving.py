"""How requests arrive, and how urgent they are: settings that several workloads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.checked import check_fields, number, whole
from sarathi_lab.config.errors import UserError, require_number, require_one_of

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
SHARES_ERROR = 1e-6  # by which shares may miss 1


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """What decides when requests arrive and which are urgent.

    - "closed": all at time 0.
    - "poisson": exponential gaps of mean 1 / `rate` (requests per second).
    - "gamma": gamma gaps of mean 1 / `rate` and coefficient of variation `cv`: shape 1 / cv^2,
      scale cv^2 / rate.
    - "ramp": a Poisson process whose rate rises linearly from `rate` to `end_rate` while the
      requests last.
    - "users": `users` users, each of whom sends the next request `think_time` seconds after its
      last has finished.

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
    users: int | None = whole(None, minimum=1, fix=f"use {EXPLAINED['users']}")
    think_time: float | None = number(None, minimum=0, fix="use seconds, such as 1.0")
    priorities: Sequence[int] | None = None
    priority_shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.arrivals is not None:
            check_arrivals(self, self.arrivals)
        check_fields(self, "workload.")
        self._check_values()
        _check_priorities(self.priorities, self.priority_shares)

    def _check_values(self) -> None:
        if self.end_rate is not None and self.rate is not None and self.end_rate <= self.rate:
            raise UserError(
                f"workload.end_rate={self.end_rate} does not exceed workload.rate={self.rate}; "
                "raise it, or use workload.arrivals=poisson for a rate that stays"
            )
        if self.cv is not None and self.cv > CV_RANGE[1]:
            raise UserError(f"workload.cv={self.cv} exceeds {CV_RANGE[1]:g}; use {EXPLAINED['cv']}")

    def times(self, kind: ArrivalKind, num_requests: int, seed: int) -> NDArray[np.float64]:
        """Seconds of arrival [num_requests], ascending from 0; all 0 where users decide."""
        return arrival_times(
            kind, self.rate, num_requests, seed, cv=self.cv, end_rate=self.end_rate
        )

    def dealt_priorities(self, num_requests: int, seed: int) -> list[int]:
        """The priority of each request; 0 where none were asked for."""
        if self.priorities is None:
            return [0] * num_requests
        shares = np.asarray(self.priority_shares or [1.0] * len(self.priorities), dtype=float)
        drawn = np.random.default_rng([seed, 4]).choice(
            len(shares), num_requests, p=shares / shares.sum()
        )
        return [self.priorities[i] for i in drawn.tolist()]


def check_arrivals(settings: Arriving, kind: str) -> None:
    """Raise UserError unless `settings` have what this `kind` of arrivals reads, and no more."""
    require_one_of("workload.arrivals", kind, READS)
    for name, explained in EXPLAINED.items():
        value = getattr(settings, name)
        if name not in READS[kind]:
            if value is not None:
                reader = next(other for other, read in READS.items() if name in read)
                raise UserError(
                    f"workload.{name}={value} has no effect on {kind} arrivals; drop it or use "
                    f"workload.arrivals={reader}"
                )
        elif value is None and name not in OPTIONAL:
            raise UserError(f"workload.arrivals={kind} needs workload.{name}, {explained}")


def _check_priorities(priorities: Sequence[int] | None, shares: Sequence[float] | None) -> None:
    if priorities is None:
        if shares is not None:
            raise UserError(
                f"workload.priority_shares={shares} has no effect without workload.priorities; add "
                "workload.priorities=[0,1]"
            )
        return
    fix = "use whole numbers, lower ones first served, such as [0,1]"
    if isinstance(priorities, str) or not isinstance(priorities, Sequence) or not priorities:
        raise UserError(f"workload.priorities={priorities} is not a list; {fix}")
    for priority in priorities:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(
                f"workload.priorities={list(priorities)}: {priority} is not a whole number; {fix}"
            )
    if len(set(priorities)) < 2:
        raise UserError(
            f"workload.priorities={list(priorities)} has no effect: all are equal; {fix}"
        )
    if shares is not None:
        _check_shares(priorities, shares)


def _check_shares(priorities: Sequence[int], shares: Sequence[float]) -> None:
    fix = f"give one share a priority of {list(priorities)} that sum to 1, or null for equal ones"
    if (
        isinstance(shares, str)
        or not isinstance(shares, Sequence)
        or len(shares) != len(priorities)
    ):
        raise UserError(
            f"workload.priority_shares={shares} does not fit workload.priorities; {fix}"
        )
    for share in shares:
        require_number("workload.priority_shares", share, above=0, fix=fix)
    if abs(sum(shares) - 1) > SHARES_ERROR:
        raise UserError(f"workload.priority_shares={list(shares)} sum to {sum(shares):g}; {fix}")


def arrival_times(
    kind: ArrivalKind,
    rate: float | None,
    num_requests: int,
    seed: int,
    *,
    cv: float | None = None,
    end_rate: float | None = None,
) -> NDArray[np.float64]:
    """Seconds [num_requests] at which requests arrive, ascending from 0, by the checked settings of
    `Arriving`.

    More requests leave the first ones' times as they were, but for a ramp, which is as long as its
    requests last.
    """
    if rate is None:  # closed, or for users to decide
        return np.zeros(num_requests)
    # A stream of its own: the same seed gives the same prompts at every rate.
    generator = np.random.default_rng([seed, 1])
    if cv is None:
        gaps = generator.standard_exponential(num_requests)
    else:
        gaps = generator.standard_gamma(1 / cv**2, num_requests) * cv**2
    if end_rate is not None:
        return _ramp_times(np.cumsum(gaps) - gaps[0], rate, end_rate)
    gaps *= 1 / rate
    return np.cumsum(gaps) - gaps[0]  # the clock starts with the first request


def _ramp_times(expected: NDArray[np.float64], rate: float, end_rate: float) -> NDArray[np.float64]:
    """When a process of rate r(t) = r0 + (r1 - r0) t / L has `expected` arrivals behind it: the
    root of its integral.

    L = 2 n / (r0 + r1), in which n requests are expected (time change of a Poisson process: Cinlar,
    1975, ch. 4.7).
    """
    slope = (end_rate**2 - rate**2) / (2 * len(expected))
    return 2 * expected / (rate + np.sqrt(rate**2 + 2 * slope * expected))

"""How a benchmark client sent its requests: by a clock, or in a closed loop of users, each of whom
sends the next request when an answer is complete.

A replay of a closed loop with the recorded times of sending would let a faster server wait for the
requests of a slower one. So these are sent again, in their order, by as many users. With a rate as
well (`--request-rate 4 --max-concurrency 16`) a request waits for its time and for a user.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.console import counted
from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.extensions.replay.json_values import count_of, number_of

# Coefficients of variation of gaps.
POISSON = 1.0
EVEN = 0.0


@dataclass(frozen=True)
class Client:
    """How requests were sent.

    Attributes:
        users: Most unanswered requests at a time; None: no limit, the recorded times count.
        rate: Requests due per second; infinity: all at once.
        is_stated: Whether a file or the user states it; else the recorded times are taken.
        due: Seconds at which each request was due, where the client drew them here; else empty.
        named_rate: What the file has in place of a rate, such as "trace".
        cv: Coefficient of variation of the gaps at this rate: 1 of a Poisson process, 0 of even
            ones, others of a gamma distribution.
    """

    users: int | None = None
    rate: float = math.inf
    is_stated: bool = False
    due: Sequence[float] = ()
    named_rate: str = ""
    cv: float = POISSON

    @property
    def sending(self) -> str:
        """How requests are sent where no time is recorded, such as "at random at 2/s"."""
        if self.rate == math.inf:
            return "all at once" if self.users is None else f"from {counted(self.users, 'user')}"
        sending = f"at random {self.pace}"
        if self.cv == EVEN:
            sending = f"evenly {self.pace}"
        elif self.cv != POISSON:
            sending += f" with gamma gaps of cv={self.cv:.3g}"
        if self.users is not None:
            sending += f", at most {self.users} at a time"
        return sending

    @property
    def pace(self) -> str:
        """The rate at which requests are due, such as "at 2/s"."""
        if self.named_rate:
            return f"at {self.rate:.4g}/s, the mean, as the rate is {self.named_rate}"
        return f"at {self.rate:g}/s"

    def drawn(self, number: int) -> NDArray[np.float64]:
        """Draw when as many requests are due (seconds, ascending)."""
        if self.rate == math.inf:
            return np.zeros(number)
        if self.cv == EVEN:
            return np.arange(number) / self.rate
        shape = self.cv**-2  # of a gamma distribution, whose gaps vary by `cv`
        gaps = np.random.default_rng(0).standard_gamma(shape, number)
        return np.cumsum(gaps / (shape * self.rate))

    def limited_to(self, num_requests: int) -> Client:
        """Leave out a limit that so many requests can't reach, where a rate sends them."""
        if self.users is None or self.rate == math.inf or self.users < num_requests:
            return self
        return replace(self, users=None)


CLOCK = Client()


@dataclass(frozen=True)
class Loop:
    """A closed loop to replay: users, seconds of thought after an answer, and when each request is
    due at the earliest.
    """

    users: int
    think_time: float
    due: tuple[float, ...]


def client_of_rate(
    rate: object,
    users: object,
    cv: float = POISSON,
    *,
    mean_rate: float = math.nan,
) -> Client:
    """Make the client of a file with a request rate.

    Args:
        rate: Requests per second, maybe "inf", or a word such as "trace"; None: all at once.
        users: The most requests at a time, or no number.
        cv: Coefficient of variation of the gaps.
        mean_rate: Requests per second over the whole run, in place of a word; NaN: not stated.

    Raises:
        ValueError: For a rate of nothing, or a word without a mean.
    """
    number = math.inf  # all at once, as where a file has no rate
    named_rate = ""
    if rate is not None:
        number = number_of(rate)
    if math.isnan(number):
        number = mean_rate
        named_rate = str(rate)
    if math.isnan(number):
        raise ValueError(f"request_rate={rate} is no number, and no mean rate is stated")
    if not number > 0:
        raise ValueError(f"request_rate={rate} is not above 0")
    return Client(
        count_of(users) or None,  # some clients write no limit as 0, "inf" or "none"
        number,
        is_stated=True,
        named_rate=named_rate,
        cv=cv,
    )


def cv_of_gamma(shape: object) -> float:
    """Return the coefficient of variation of gamma gaps of a `shape`, which clients call burstiness
    or smoothness; None is 1. Raises ValueError for what is no shape.
    """
    if shape is None:
        return POISSON
    number = number_of(shape)
    if not number > 0:
        raise ValueError(f"burstiness={shape} is not above 0")
    return number**-0.5


def concurrency(requests: pd.DataFrame) -> int:
    """Return the largest number of requests that were unanswered at once; an answer goes before a
    request of the same time.
    """
    changes = [(time, -1) for time in requests.finish_time]
    changes += [(time, 1) for time in requests.arrival_time]
    num_unanswered = 0
    largest = 0
    for _, change in sorted(changes):
        num_unanswered += change
        largest = max(largest, num_unanswered)
    return largest


def loop_of(requests: pd.DataFrame, client: Client, think_time: float) -> Loop | None:
    """Return the closed loop that sends `requests` again as `client` does, with seconds of thought
    between an answer and the next request; None: by their times.
    """
    if client.users is None:
        return None
    due = client.due or [0.0] * len(requests)
    if client.rate < math.inf and not client.due:
        due = requests.arrival_time.tolist()
    return Loop(client.users, think_time, tuple(due))


def measured_thought(requests: pd.DataFrame, client: Client) -> float:
    """Return the median seconds that a client with recorded times took between an answer and the
    next request; 0 where it was not at its limit, or sends by a rate as well.
    """
    users = client.users
    if users is None or client.due or client.rate < math.inf:
        return 0.0
    if len(requests) <= users or users != concurrency(requests):
        return 0.0
    seconds = _seconds_after_answers(requests, users)
    return float(np.median(seconds))


def asked_client(
    workload: Mapping[str, object], typed: Mapping[str, str], client: Client
) -> Client | None:
    """Return the client that the user states by `workload.*`; None if it is not stated. Raises
    UserError for arrivals that are neither recorded nor those of users.
    """
    users: int | None = None
    if workload.get("users") is not None:
        remedy = "use the number of users, such as 8"
        users = require_int("workload.users", workload["users"], 1, remedy)
    think_time = workload.get("think_time")
    if think_time is not None:
        require_number("workload.think_time", think_time, minimum=0, fix="use seconds, such as 1.0")
    kind = workload.get("arrivals")
    if "workload.arrivals" in typed and kind is None:
        if users is not None:
            raise UserError(
                f"workload.users={users} has no effect on the recorded times "
                "(workload.arrivals=null); drop one of them"
            )
        return Client(None, client.rate, is_stated=True)
    if kind not in (None, "users"):
        raise UserError(
            f"workload.arrivals={kind} has no effect: task=validate sends the requests of "
            "task.run; use null for their recorded times, or users with workload.users=16"
        )
    if users is None:
        if kind == "users" and client.users is None:
            raise UserError(
                "workload.arrivals=users needs workload.users, the number of users who wait for "
                "their answers, such as 8"
            )
        return None
    # Requests that a file's users held back are due at its rate for others, too. The rate of an
    # open loop is that of its recorded times, which users do not follow.
    rate = client.rate if client.users else math.inf
    return Client(users, rate, is_stated=True, due=client.due)


def describe(loop: Loop, client: Client) -> str:
    """Describe a closed loop, such as "a closed loop of 16 users"."""
    description = f"a closed loop of {counted(loop.users, 'user')}"
    if loop.think_time >= 5e-4:
        description += f", {loop.think_time:.3g} s between an answer and the next request"
    if client.rate < math.inf:
        description += f", whose requests are due {client.pace}"
        if not client.due:
            description += ", those that were held when they were sent"
    return description


def _seconds_after_answers(requests: pd.DataFrame, users: int) -> NDArray[np.float64]:
    """Return the seconds by which each request but the first of each user follows the answer that
    let it come; 0 where it came before.
    """
    arrivals = np.sort(requests.arrival_time.to_numpy(float))
    answers = np.sort(requests.finish_time.to_numpy(float))
    later = arrivals[users:]
    waited = later - answers[: len(later)]
    return np.maximum(waited, 0.0)

"""The requests of a run, when they arrive and with which priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.arrivals import ArrivalKind, implied_arrivals
from sarathi_lab.config.checked import check_fields, listed, number, refuse_unread, whole
from sarathi_lab.config.errors import (
    LAST_SECOND,
    MOST,
    UserError,
    require_int,
    require_one_of,
)
from sarathi_lab.engine.arrivals import Arrivals, ClosedLoop, Sessions, Turn, behind_front_end
from sarathi_lab.engine.request import Request

Encode = Callable[[str], list[int]]
Tokens = NDArray[np.int32]
Times = NDArray[np.float64]  # seconds
# Prompt and output tokens of a request, and its token ids.
Shape = tuple[int, int, Tokens | None]

READS: dict[str, tuple[str, ...]] = {  # by kind of arrivals; all but think_time are needed
    "closed": (),
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "users": ("users", "think_time"),
}
EXPLAINED = {
    "rate": "in requests per second, such as 2.0",
    "cv": "the coefficient of variation of the gaps, such as 2.0 (1 is poisson)",
    "users": "the number of users who wait for their answers, such as 8",
    "think_time": "in seconds, such as 1.0",
}
CV_RANGE = (0.01, 100.0)  # beyond, gaps are equal or zero in double precision
MOST_REQUESTS = 10_000_000  # some 5 GB
LEVELS = "use whole numbers, lower ones first served, such as [0,1]"


@dataclass(frozen=True)
class LoadedRequests:
    """The requests of a run and, of a file, its rows: read = used + dropped.

    With `num_users` the requests have no times: users send them in this order.
    """

    name: str
    requests: Sequence[Request]
    rows_read: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> rows
    notes: Sequence[str] = ()  # further facts of a file
    num_users: int | None = None
    think_time: float = 0.0  # seconds
    sessions: Sequence[Sequence[Turn]] = ()  # where requests wait for answers of others
    shares_blocks: bool = False  # whether prompts have blocks of tokens in common
    arrival_kind: ArrivalKind | None = None  # None: the file's times
    request_time: float = 0.0  # seconds of a server's front end (`Backend.request_time`)

    def __post_init__(self) -> None:
        last = max((request.arrival_time for request in self.requests), default=0.0)
        if not last <= LAST_SECOND:
            raise UserError(
                f"workload {self.name}: a request arrives after {last:.3g} s, beyond the precision "
                f"of the clock; bring it below {LAST_SECOND:g} s, such as by workload.rate"
            )

    def arrivals(self) -> Arrivals:
        """Return the requests as the engine gets them."""
        return behind_front_end(self._sent(), self.request_time)

    def _sent(self) -> Arrivals:
        if self.sessions:
            return Sessions(self.sessions, self.num_users, self.think_time)
        if self.num_users is None:
            return Arrivals(self.requests)
        return ClosedLoop(self.requests, self.num_users, self.think_time)

    @property
    def repeats_prefixes(self) -> bool:
        """Whether prompts begin with what a prefix cache may have."""
        return bool(self.sessions) or self.shares_blocks

    @property
    def waits_for_answers(self) -> bool:
        """Whether arrivals depend on earlier answers (a closed loop)."""
        return self.num_users is not None or bool(self.sessions)

    @property
    def all_wait(self) -> bool:
        """Whether all requests are there from the start (a closed queue)."""
        return not (self.has_times or self.waits_for_answers)

    @property
    def has_times(self) -> bool:
        """Whether requests arrive over time independently of answers (an open loop)."""
        has_gaps = any(request.arrival_time > 0 for request in self.requests)
        return has_gaps and not self.waits_for_answers

    def describe(self) -> str:
        """Describe number and lengths of the requests, and the dropped rows."""
        requests = self.requests
        prompts = _range([request.prompt_len for request in requests])
        outputs = _range([request.output_len for request in requests])
        number = len(requests)
        line = (
            f"workload {self.name}: {number} requests of {prompts} prompt + {outputs} output tokens"
        )
        if self.num_users is not None:
            line += f" from {self.num_users} users who think {self.think_time:g} s"
        sentences = [line, *self.notes]
        line = ", ".join(sentences)
        if self.rows_read is None:
            return line
        num_dropped = sum(self.dropped.values())
        rows = [f"{self.rows_read} rows read = {number} used + {num_dropped} dropped"]
        for reason, count in self.dropped.items():
            if count:
                rows.append(f"{count} {reason}")
        return f"{line}; {', '.join(rows)}"


@runtime_checkable
class Workload(Protocol):
    """Makes the requests of a run; see `conf/workload/`."""

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """Make all requests, without prompts in simulations (`vocab_size` None) where possible.

        `encode` turns text into token ids. Raises UserError if there are no requests.
        """


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """Settings of arrivals and priorities, shared by workloads.

    - "closed": all at time 0.
    - "poisson": exponential gaps of mean 1 / `rate` (requests per second).
    - "gamma": gamma gaps of mean 1 / `rate` and coefficient of variation `cv`.
    - "users": `users` users, who send the next request `think_time` seconds after an answer.

    `arrivals` None stands for the kind that the other settings imply: "users" by `users` or
    `think_time`, "gamma" by `cv`, "poisson" by `rate`, "closed" by none. Times are random numbers
    of mean 1, scaled: with the same seed, rates share them. `priorities` (lower first with
    queue_order=priority) are drawn with equal chances, one that is listed twice twice as often.
    Raises UserError for unknown, missing and unread settings.
    """

    arrivals: ArrivalKind | None = None
    rate: float | None = number(None, above=0, fix="use requests per second, such as 2.0")
    cv: float | None = number(None, minimum=CV_RANGE[0], fix=f"use {EXPLAINED['cv']}")
    users: int | None = whole(
        None,
        minimum=1,
        maximum=MOST_REQUESTS,
        fix=f"use {EXPLAINED['users']}",
    )
    think_time: float | None = number(None, minimum=0, fix="use seconds, such as 1.0")
    priorities: Sequence[int] | None = listed(
        None,
        each=partial(require_int, minimum=-MOST, fix=LEVELS),
        complaint=f"is not a list; {LEVELS}",
    )
    seed: int = whole(minimum=0, fix="use a number such as 0", name="seed")

    def __post_init__(self) -> None:
        check_fields(self, "workload.")
        self.check_arrivals(self.arrival_kind)
        if self.cv is not None and self.cv > CV_RANGE[1]:
            raise UserError(f"workload.cv={self.cv} exceeds {CV_RANGE[1]:g}; use {EXPLAINED['cv']}")
        if self.priorities and len(set(self.priorities)) < 2:
            raise UserError(
                f"workload.priorities={list(self.priorities)} has no effect: all are equal; "
                f"{LEVELS}"
            )

    @property
    def arrival_kind(self) -> ArrivalKind | None:
        """The kind that is named, else the implied one. Raises UserError for settings of two."""
        return self.implied_kind() if self.arrivals is None else self.arrivals

    def implied_kind(self) -> ArrivalKind:
        """Return the kind of arrivals that the other settings are for. Raises UserError."""
        stated = {name: value for name, value in self._settings.items() if value is not None}
        of_rates = [name for name in READS["gamma"] if name in stated]
        of_users = [name for name in READS["users"] if name in stated]
        if of_rates and of_users:
            rate = of_rates[0]
            users = of_users[0]
            raise UserError(
                f"workload.{rate}={stated[rate]} and workload.{users}={stated[users]} are for "
                "different arrivals; drop one"
            )
        kind, _ = implied_arrivals(stated)
        return kind

    @property
    def _settings(self) -> dict[str, float | None]:
        return {
            "rate": self.rate,
            "cv": self.cv,
            "users": self.users,
            "think_time": self.think_time,
        }

    def check_arrivals(self, kind: str | None) -> None:
        """Raise UserError for missing and unread settings of this `kind` of arrivals."""
        require_one_of("workload.arrivals", kind, READS)
        assert kind is not None, "it is one of them"
        for name, explained in EXPLAINED.items():
            is_stated = self._settings[name] is not None
            is_read = name in READS[kind]
            if is_stated and not is_read:
                reader = next(reader for reader, names in READS.items() if name in names)
                reason = f" on {kind} arrivals; drop it or use workload.arrivals={reader}"
                refuse_unread(self, [name], reason, "workload.")
            # Users who are not said to think ask again at once.
            is_needed = is_read and name != "think_time"
            if is_needed and not is_stated:
                raise UserError(f"workload.arrivals={kind} needs workload.{name}, {explained}")

    def random(self, *stream: int) -> np.random.Generator:
        """Return the generator of a stream of the seed, by its number and maybe a request's."""
        return np.random.default_rng([self.seed, *stream])

    def times(self, num_requests: int) -> Times:
        """Seconds of arrival [num_requests], ascending from 0; all 0 for closed arrivals and users.

        More requests leave earlier times unchanged.
        """
        if self.rate is None:
            return np.zeros(num_requests)
        # A separate stream: the same seed gives the same prompts at every rate.
        generator = self.random(1)
        if self.cv is None:
            gaps = generator.standard_exponential(num_requests)
        else:
            # Shape 1 / cv^2 and scale cv^2: mean 1 and coefficient of variation cv.
            variance = self.cv**2
            gaps = generator.standard_gamma(1 / variance, num_requests) * variance
        gaps *= 1 / self.rate
        return np.cumsum(gaps) - gaps[0]  # the clock starts with the first request

    def loaded(
        self,
        name: str,
        times: Times,
        shapes: Iterable[Shape],
        recorded_priorities: Sequence[int] | None = None,
    ) -> LoadedRequests:
        """Make requests of `shapes` at `times`, with drawn priorities unless some are recorded and
        none are set.
        """
        priorities = recorded_priorities
        if priorities is None or self.priorities is not None:
            priorities = self._drawn_priorities(len(times))
        requests: list[Request] = []
        # There may be more shapes than times.
        for time, priority, shape in zip(times.tolist(), priorities, shapes, strict=False):
            prompt_len, output_len, token_ids = shape
            number = len(requests)
            requests.append(Request(number, time, prompt_len, output_len, token_ids, priority))
        return LoadedRequests(
            name,
            requests,
            num_users=self.users,
            think_time=self.think_time or 0.0,
            arrival_kind=self.arrival_kind,
        )

    def _drawn_priorities(self, num_requests: int) -> Sequence[int]:
        levels = self.priorities or (0,)
        num_levels = len(levels)
        chances = np.full(num_levels, 1 / num_levels)
        rng = self.random(4)
        drawn = rng.choice(num_levels, num_requests, p=chances)
        priorities = []
        for level in drawn.tolist():
            priorities.append(levels[level])
        return priorities


def random_prompt(
    request_id: int, prompt_len: int, vocab_size: int | None, seed: int
) -> Tokens | None:
    """Uniform token ids [prompt_len] by seed and request only; None without `vocab_size`."""
    if vocab_size is None:
        return None
    return random_tokens(request_id, prompt_len, vocab_size, seed)


def random_tokens(request_id: int, num_tokens: int, vocab_size: int, seed: int) -> Tokens:
    """Uniform token ids [num_tokens] by seed and request only."""
    # Stream 0 of the seed, and a request of its own: no other one changes its tokens.
    rng = np.random.default_rng([seed, 0, request_id])
    return rng.integers(0, vocab_size, num_tokens, dtype=np.int32)


def _range(lengths: Sequence[int]) -> str:
    low = min(lengths)
    high = max(lengths)
    if low == high:
        return str(low)
    return f"{low}..{high}"

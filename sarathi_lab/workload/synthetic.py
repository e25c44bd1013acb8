"""Requests with random prompts: the paper's fixed grid, uniform, Zipf and lognormal lengths, and
sessions of agents.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import NormalDist
from typing import ClassVar, NamedTuple

import numpy as np

from sarathi_lab.config.checked import check_fields, number, refuse_unread, require_order, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.arrivals import Turn
from sarathi_lab.engine.request import Request
from sarathi_lab.workload.base import (
    MOST_REQUESTS,
    Arriving,
    Encode,
    LoadedRequests,
    Shape,
    Tokens,
    random_prompt,
    random_tokens,
)

Lengths = tuple[int, int]  # of a prompt and of its output, in tokens
ANY_VOCAB_SIZE = 2**15  # of simulated prompts, whose tokens only identify prefixes
MOST_TOKENS = 10_000_000  # of a request of a drawn length
_TOKENS = "use at least one prompt and one output token"
ROUNDED = 0.05  # share by which whole tokens may miss a ratio without a note
NORMAL = NormalDist()
# Of the fit of a truncated lognormal.
MAX_STEPS = 10_000
TOLERANCE = 1e-9


def split_length(total_len: int, pd_ratio: float) -> Lengths:
    """P and D, each at least 1, of P + D = total_len and P : D nearest to `pd_ratio`."""
    longest = total_len - 1
    if pd_ratio >= 2 * total_len:
        return longest, 1
    nearest = round(total_len * pd_ratio / (pd_ratio + 1))
    prompt_len = min(longest, max(1, nearest))
    return prompt_len, total_len - prompt_len


@dataclass(frozen=True, kw_only=True)
class Generated(Arriving, ABC):
    """`num_requests` requests with random prompts, all from one seed.

    Every prompt begins with one of `num_prefixes` texts (None: one) of `shared_prefix_len` tokens,
    which count as part of its length; a shorter prompt is the text's beginning.
    """

    name: ClassVar[str]
    shared_prefix_len: int = whole(0, minimum=0, fix="use 0 for prompts that share nothing")
    num_prefixes: int | None = whole(
        None, minimum=1, fix="use null for one prefix that all prompts share"
    )
    num_requests: int = whole(
        minimum=1, maximum=MOST_REQUESTS, fix="use the number of requests to serve, such as 16"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shared_prefix_len:
            reason = " without a prefix; add workload.shared_prefix_len=512"
            refuse_unread(self, ["num_prefixes"], reason, "workload.")

    @abstractmethod
    def lengths(self) -> Iterable[Lengths]:
        """Prompt and output tokens of each request (or of more), by the seed."""

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """Make `num_requests` requests, whose lengths don't depend on settings of arrivals."""
        times = self.times(self.num_requests)
        shapes = self._shapes(vocab_size)
        return self.loaded(self.name, times, shapes)

    def _shapes(self, vocab_size: int | None) -> Iterator[Shape]:
        for request_id, (prompt_len, output_len) in enumerate(self.lengths()):
            prompt = self.prompt(request_id, prompt_len, vocab_size)
            yield prompt_len, output_len, prompt

    def prompt(self, request_id: int, prompt_len: int, vocab_size: int | None) -> Tokens | None:
        """Token ids [prompt_len] by seed and request only; None in simulations without a prefix."""
        if not self.shared_prefix_len:
            return random_prompt(request_id, prompt_len, vocab_size, self.seed)
        num_tokens = vocab_size or ANY_VOCAB_SIZE
        return self._prompt_with_prefix(request_id, prompt_len, num_tokens)

    def _prompt_with_prefix(self, request_id: int, prompt_len: int, vocab_size: int) -> Tokens:
        # Streams 10 and 11 of the seed: which prefix a request has, and the prefix's tokens.
        rng = self.random(10, request_id)
        num_texts = self.num_prefixes or 1
        text = int(rng.integers(num_texts))
        text_rng = self.random(11, text)
        prompt = random_tokens(request_id, prompt_len, vocab_size, self.seed)
        num_shared = min(self.shared_prefix_len, prompt_len)
        shared = text_rng.integers(0, vocab_size, num_shared, dtype=np.int32)
        prompt[:num_shared] = shared
        return prompt


@dataclass(frozen=True, kw_only=True)
class _Split(Generated):
    """Requests whose total lengths are split at one ratio."""

    pd_ratio: float = number(
        above=0, fix="use prompt tokens per output token such as 31", name="pd_ratio"
    )

    def _check_ratio(self, setting: str, longest: int) -> None:
        """Raise UserError if no request of `longest` tokens, which `setting` states, has the ratio.

        One of its tokens at least is the prompt's, and one the output's.
        """
        limit = longest - 1
        if not 1 / limit <= self.pd_ratio <= limit:
            raise UserError(
                f"pd_ratio={self.pd_ratio:g} is not possible with {setting}={longest} tokens "
                f"of a request; use 1/{limit} to {limit}, or raise {setting}"
            )

    @abstractmethod
    def total_lens(self) -> Sequence[int]:
        """Tokens of each request, prompt and output together."""

    def lengths(self) -> Iterable[Lengths]:
        return [split_length(total_len, self.pd_ratio) for total_len in self.total_lens()]

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        """Make the requests, with a note where whole tokens give another ratio."""
        load = super().generate(vocab_size, encode)
        num_prompt = 0
        num_output = 0
        for request in load.requests:
            num_prompt += request.prompt_len
            num_output += request.output_len
        served = num_prompt / num_output
        difference = abs(served / self.pd_ratio - 1)
        if difference <= ROUNDED:
            return load
        note = f"P:D {served:.3g} in whole tokens, not {self.pd_ratio:g}"
        return replace(load, notes=[note])


@dataclass(frozen=True, kw_only=True)
class PaperGrid(_Split):
    """The paper's workload (section 5): every request has the same P and D with P + D = seq_len.

    `prompt_len` and `output_len` state P and D themselves; seq_len and pd_ratio, which the
    configuration lets follow from them, must agree. Raises UserError.
    """

    name = "paper_grid"
    seq_len: int = whole(minimum=2, fix=f"{_TOKENS}, such as 1024", name="seq_len")
    prompt_len: int | None = whole(
        None,
        minimum=1,
        maximum=MOST_TOKENS,
        fix="use the tokens of every prompt, such as 6000",
    )
    output_len: int | None = whole(
        None,
        minimum=1,
        maximum=MOST_TOKENS,
        fix="use the tokens of every answer, such as 300",
    )

    def __post_init__(self) -> None:
        check_fields(self, "workload.")  # lengths first, as the ratio follows from them
        lengths = {"prompt_len": self.prompt_len, "output_len": self.output_len}
        for name, other in (("prompt_len", "output_len"), ("output_len", "prompt_len")):
            if lengths[name] is not None and lengths[other] is None:
                raise UserError(
                    f"workload.{name}={lengths[name]} needs workload.{other} as well, such as "
                    f"workload.{other}=300"
                )
        if self.prompt_len is not None and self.output_len is not None:
            self._check_lengths(self.prompt_len, self.output_len)
        super().__post_init__()
        self._check_ratio("seq_len", self.seq_len)

    def _check_lengths(self, prompt_len: int, output_len: int) -> None:
        """Raise UserError if seq_len or pd_ratio contradict stated lengths.

        Where a user has typed one of them the other follows from the lengths, so it agrees and is
        not named.
        """
        total_len = prompt_len + output_len
        contradicting = ""
        if self.seq_len != total_len:
            contradicting = f"seq_len={self.seq_len}"
        elif split_length(total_len, self.pd_ratio) != (prompt_len, output_len):
            contradicting = f"pd_ratio={self.pd_ratio}"
        if contradicting:
            lengths = f"workload.prompt_len={prompt_len} workload.output_len={output_len}"
            raise UserError(
                f"{contradicting} contradicts {lengths}, which are {total_len} tokens at a P:D of "
                f"{prompt_len / output_len:.4g}; drop it"
            )

    def total_lens(self) -> Sequence[int]:
        return [self.seq_len] * self.num_requests


@dataclass(frozen=True, kw_only=True)
class Uniform(_Split):
    """Uniform total lengths from min_len to max_len, both included."""

    name = "uniform"
    min_len: int = whole(minimum=2, maximum=MOST_TOKENS, fix=_TOKENS)
    max_len: int = whole(minimum=2, maximum=MOST_TOKENS, fix=_TOKENS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ratio("workload.max_len", self.max_len)
        require_order(self, "min_len", "max_len", "; exchange them", "workload.")

    def total_lens(self) -> Sequence[int]:
        rng = self.random(2)
        longest = self.max_len + 1
        lengths = rng.integers(self.min_len, longest, self.num_requests)
        return lengths.tolist()


@dataclass(frozen=True, kw_only=True)
class Zipf(Uniform):
    """Total lengths with P(min_len + k - 1) proportional to k^-theta, so that short ones are
    likely; the paper's pipelines take theta = 0.4 over 1K to 4K tokens (section 5.3).
    """

    name = "zipf"
    theta: float = number(0.4, above=0, fix="use an exponent such as 0.4")

    def total_lens(self) -> Sequence[int]:
        num_lengths = self.max_len - self.min_len + 1
        ranks = np.arange(1, num_lengths + 1)
        exponent = -float(self.theta)
        weights = ranks**exponent
        chances = weights / weights.sum()
        rng = self.random(2)
        drawn = rng.choice(ranks, self.num_requests, p=chances)
        lengths = self.min_len + drawn - 1
        return lengths.tolist()


@dataclass(frozen=True, kw_only=True)
class Lognormal(Generated):
    """Prompt and output lengths drawn independently from lognormals of these medians and P90
    (tokens), as papers describe data sets; requests of more than `max_len` tokens in all are drawn
    again, which the fit accounts for.
    """

    name = "lognormal"
    prompt_p50: float = number(above=0, fix="use tokens")
    prompt_p90: float = number(above=0, fix="use tokens")
    output_p50: float = number(above=0, fix="use tokens")
    output_p90: float = number(above=0, fix="use tokens")
    max_len: int = whole(minimum=2, fix="use the most tokens of prompt and output together")

    @property
    def quantiles(self) -> dict[str, tuple[float, float]]:
        """The stated median and P90 by what is drawn."""
        return {
            "prompt": (self.prompt_p50, self.prompt_p90),
            "output": (self.output_p50, self.output_p90),
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, (p50, p90) in self.quantiles.items():
            if p90 <= p50:
                raise UserError(
                    f"workload.{kind}_p90={p90:g} is not above workload.{kind}_p50={p50:g}; "
                    "raise it"
                )
        if self.prompt_p90 + self.output_p90 >= self.max_len:
            raise UserError(
                f"workload.max_len={self.max_len} is not above prompt_p90 + output_p90 = "
                f"{self.prompt_p90 + self.output_p90:g} tokens; raise it, or shorten the requests"
            )

    def lengths(self) -> Iterator[Lengths]:
        generator = self.random(3)
        prompt_mean, prompt_deviation = self._fit("prompt", self.output_p50)
        output_mean, output_deviation = self._fit("output", self.prompt_p50)
        # Without end: as many are taken as there are requests.
        while True:
            # The prompt first: the order is the seed's.
            prompt = generator.lognormal(prompt_mean, prompt_deviation)
            output = generator.lognormal(output_mean, output_deviation)
            prompt_len = max(1, round(prompt))
            output_len = max(1, round(output))
            if prompt_len + output_len <= self.max_len:
                yield prompt_len, output_len

    def _fit(self, kind: str, partner_p50: float) -> tuple[float, float]:
        """Fit a lognormal to the median and P90 that it has once it is truncated.

        F(p50) = F(longest) / 2 and F(p90) = 0.9 F(longest), where `longest` tokens leave room for
        the median of the request's other part.

        Returns:
            Mean and deviation of its logarithm.
        """
        p50, p90 = self.quantiles[kind]
        longest = self.max_len - partner_p50
        # A fixed point: the share of the lognormal below `longest` decides its quantiles, and they
        # decide the share.
        share = 1.0
        deviation = 0.0
        for _ in range(MAX_STEPS):
            middle = NORMAL.inv_cdf(0.5 * share)
            upper = NORMAL.inv_cdf(0.9 * share)
            before = deviation
            deviation = math.log(p90 / p50) / (upper - middle)
            mean = math.log(p50) - deviation * middle
            share = NORMAL.cdf((math.log(longest) - mean) / deviation)
            if abs(deviation - before) < TOLERANCE * deviation:
                return mean, deviation
            if share < 0.05:  # no lognormal is this wide
                break
        raise UserError(
            f"workload.{kind}_p90={p90:g} is too near workload.max_len={self.max_len} for a "
            f"lognormal with median {p50:g}; raise max_len"
        )


P90 = NORMAL.inv_cdf(0.9)
PAUSE = "use the seconds of a tool such as 1.0"


class TurnLengths(NamedTuple):
    """Tokens of a turn of a session."""

    prompt_len: int
    new_len: int  # of the prompt, what the turn before had not
    output_len: int


@dataclass(frozen=True, kw_only=True)
class Agentic(Lognormal):
    """`num_requests` turns in sessions of `turns` each, the last as many as are left; a session
    ends earlier where its next turn would exceed `max_len` tokens.

    A first prompt is the `shared_prefix_len` tokens of a system prompt and new tokens; each turn
    adds new ones. These, the answers and the seconds between an answer and the next turn are drawn
    from lognormals of the stated median and P90. Sessions arrive by `arrivals`; with `users` each
    user has one at a time, and begins the next one `think_time` seconds after its last answer.
    """

    name = "agentic"
    turns: int = whole(12, minimum=1, fix="use the requests of a session such as 12")
    pause_p50: float = number(1.0, above=0, fix=PAUSE)
    pause_p90: float = number(10.0, above=0, fix=PAUSE)

    @property
    def quantiles(self) -> dict[str, tuple[float, float]]:
        """The stated median and P90 by what is drawn."""
        return {**super().quantiles, "pause": (self.pause_p50, self.pause_p90)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_prefix_len + self.prompt_p90 + self.output_p90 >= self.max_len:
            raise UserError(
                f"workload.max_len={self.max_len} has no room for a first turn behind a system "
                f"prompt of workload.shared_prefix_len={self.shared_prefix_len} tokens; raise it"
            )

    def generate(self, vocab_size: int | None, encode: Encode | None = None) -> LoadedRequests:
        sessions = self._lengths()
        num_turns = [len(session) for session in sessions]
        # Of a session only the first turn is sent at its time.
        times = np.repeat(self.times(len(sessions)), num_turns)
        shapes = []
        for turn in chain.from_iterable(sessions):
            shapes.append((turn.prompt_len, turn.output_len, None))
        load = self.loaded(self.name, times, shapes)
        requests = iter(load.requests)
        num_tokens = vocab_size or ANY_VOCAB_SIZE
        turns = []
        for session in sessions:
            turns_of_session = []
            for lengths in session:
                request = next(requests)
                turns_of_session.append(self._turn(request, lengths.new_len, num_tokens))
            turns.append(turns_of_session)
        note = f"{len(sessions)} sessions, whose turns wait for their answers"
        return replace(load, sessions=turns, notes=[note])

    def _lengths(self) -> list[list[TurnLengths]]:
        """Return the lengths of each session's turns."""
        sessions: list[list[TurnLengths]] = [[]]
        context = self.shared_prefix_len
        for new_len, output_len in islice(self.lengths(), self.num_requests):
            is_full = len(sessions[-1]) == self.turns
            is_too_long = context + new_len + output_len > self.max_len
            if is_full or is_too_long:
                if sessions[-1]:
                    sessions.append([])
                context = self.shared_prefix_len
                # What does not fit behind the system prompt alone is cut.
                room = self.max_len - context - output_len
                new_len = min(new_len, room)
            # All of a first prompt is new, the system prompt, too.
            if not sessions[-1]:
                new_len += context
                context = 0
            turn = TurnLengths(context + new_len, new_len, output_len)
            sessions[-1].append(turn)
            context += new_len + output_len
        return sessions

    def _turn(self, request: Request, new_len: int, vocab_size: int) -> Turn:
        number = request.request_id
        is_first = new_len == request.prompt_len
        if is_first and self.shared_prefix_len:
            tokens = self._prompt_with_prefix(number, new_len, vocab_size)
        else:
            tokens = random_tokens(number, new_len, vocab_size, self.seed)
        rng = self.random(12, number)
        # Pauses are lognormal, so their logarithms have a mean and a deviation.
        ratio = self.pause_p90 / self.pause_p50
        deviation = math.log(ratio) / P90
        deviations = deviation * float(rng.standard_normal())
        pause = self.pause_p50 * math.exp(deviations)
        return Turn(request, tokens, pause)


@dataclass(frozen=True, kw_only=True)
class Conversations(Agentic):
    """People who chat: sessions as `Agentic` has them, whose pauses are those of a reader."""

    name = "sessions"

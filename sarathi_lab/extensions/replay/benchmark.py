"""One load on a server, as a benchmark client recorded it: its requests, how they were sent, what
the file states of the server, and what of the file is not replayed.

Every time counts from when the client sent the request, as the clients count it themselves, so
that waiting in the client is in none of them.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.extensions.replay.clients import CLOCK, Client, inferred
from sarathi_lab.extensions.replay.json_values import count_of
from sarathi_lab.extensions.replay.server_arguments import Statement
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import latency
from sarathi_lab.workload.recording import DAMAGED, FINISHED, Recording, RowCheck, recorded

# Columns that a reader fills in for each finished request, with their least value.
LENGTHS = ("prompt_len", "output_len")
SECONDS = ("first_token", "latency")
WAITS = ("ttft", "tpot", "latency")  # of metrics.md, whose means clients state
# Share of tokens that have a time each, below which a client has recorded chunks of several.
TOKENS_TIMED = 0.9
# Share by which what was read may differ from what the file states of all its requests.
SAME_TOTALS = 0.02
# Ratio of a mean time between tokens to what other means say, beyond which they are contradictory.
MOST_DIFFERENT = 1.5
NOT_STREAMED = "has no times of first tokens, as answers were not streamed; run it again streaming"
# What of a conversation is kept for a replay, a row a request.
CONVERSATION = ("cached_len", "session", "delay")


@dataclass(frozen=True)
class Benchmark:
    """One load on a server.

    Attributes:
        labels: Names and settings of the client, for tables.
        requests: The finished ones in the ledger's columns: times in seconds since the first was
            sent, NaN where only the server has the value.
        num_failed: How many have no answer.
        server: What is recorded of the server's arguments.
        policy: A name of conf/policy.
        means: Mean waits (seconds), where no request is recorded.
        cautions: What of the requests is not known or not replayed.
        client: How they were sent.
        conversation: `CONVERSATION` of each request: tokens of the prompt that came from the cache,
            the session ("": none), seconds between the answer before and it (NaN: first turn).
    """

    labels: Mapping[str, object]
    requests: pd.DataFrame
    num_failed: int
    server: Sequence[Statement] = ()
    policy: str = "vllm_v1"
    means: Mapping[str, float] = field(default_factory=dict)
    cautions: Sequence[str] = ()
    client: Client = CLOCK
    conversation: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=list(CONVERSATION))
    )

    @property
    def summary(self) -> dict[str, float]:
        """Return quantities by the names of metrics.md."""
        if self.means:
            waits = {f"{name}_mean": value for name, value in self.means.items()}
            return {**waits, "num_failed": self.num_failed}
        quantities = quantities_of(self.requests, end_of(self.requests))
        return {**quantities, "num_failed": self.num_failed}

    @property
    def has_conversations(self) -> bool:
        """Whether some requests continue others."""
        return bool(self.conversation.delay.notna().any())


@dataclass(frozen=True, kw_only=True)
class Load(ABC):
    """One load as a reader takes it from a file.

    Attributes:
        client_name: Of the program that wrote the file.
        numbers: What the file states of all its requests: mean waits (seconds) as ttft, tpot and
            latency, num_requests, num_failed, num_incomplete, num_prompt_tokens,
            num_output_tokens, prompt_len and output_len (mean tokens), and others of metrics.md.
        client: How requests were sent.
        labels: Further ones for tables.
        server: What is recorded of the server's arguments.
        policy: A name of conf/policy.
        cautions: What of the requests is not known.
    """

    client_name: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    client: Client = CLOCK
    labels: Mapping[str, object] = field(default_factory=dict)
    server: Sequence[Statement] = ()
    policy: str = "vllm_v1"
    cautions: Sequence[str] = ()

    @property
    def means(self) -> dict[str, float]:
        """Mean waits in seconds that the file states."""
        return {wait: self.numbers[wait] for wait in WAITS if wait in self.numbers}

    @abstractmethod
    def benchmark(self, path: Path, damaged: Sequence[str]) -> Benchmark:
        """Make a benchmark of the load in a file with `damaged` parts. Raises UserError where it
        has no request that can be used.
        """

    def labels_of(self, path: Path) -> dict[str, object]:
        """Return all labels for tables."""
        return {
            "policy": self.client_name,
            **self.labels,
            "executor": "server",
            "is_baseline": False,
            "path": str(path),
        }


@dataclass(frozen=True, kw_only=True)
class RecordedLoad(Load):
    """A load with a record of each request.

    Attributes:
        rows: All requests, with columns of `Recording.requests`: tokens and seconds.
        has_arrivals: Whether they have times of sending.
    """

    rows: Iterable[Mapping[str, object]]
    has_arrivals: bool = True

    def benchmark(self, path: Path, damaged: Sequence[str]) -> Benchmark:
        table, check = _checked_table(path, self.rows, has_arrivals=self.has_arrivals)
        recording = recorded(table, check, damaged)
        if recording.requests.empty:
            remedy = "see the server's log"
            if recording.left_out.get(DAMAGED):  # of which a server logs nothing
                remedy = "correct these values, or run the benchmark again"
            raise UserError(f"{path}: {_reason_for_nothing(recording)}; {remedy}")
        cautions = [recording.describe_left_out(), *self.cautions]
        requests = recording.requests
        client = self.client
        is_drawn = bool(requests.arrival.isna().all())
        if is_drawn:
            requests, client, caution = _with_drawn_arrivals(requests, client)
            cautions.append(caution)
        caution_of_chunks = _caution_of_chunks(requests)
        if caution_of_chunks:
            # Times between chunks are no times between tokens.
            cautions.append(caution_of_chunks)
            no_gaps: list[tuple[float, ...]] = [()] * len(requests)
            requests = requests.assign(gaps=pd.Series(no_gaps, requests.index))
        in_ledger = _with_token_times(requests)
        if DAMAGED not in recording.left_out:
            totals = {f"{wait}_mean": mean for wait, mean in self.means.items()}
            cautions += _cautions_of_totals(
                in_ledger, {**self.numbers, **totals}, is_drawn=is_drawn
            )
        conversation = _conversation(requests)
        cautions += _cautions_of_conversations(requests)
        if not client.source and not conversation.delay.notna().any():
            client = inferred(in_ledger)
        return Benchmark(
            self.labels_of(path),
            in_ledger,
            sum(recording.left_out.values()),
            self.server,
            self.policy,
            cautions=[caution for caution in cautions if caution],
            client=client.limited_to(len(in_ledger)),
            conversation=conversation,
        )


@dataclass(frozen=True, kw_only=True)
class Summary(Load):
    """What a client that recorded no request states of all of them.

    Attributes:
        record: The client's file that has each request, and the flags that leave it.
    """

    record: str

    def benchmark(self, path: Path, damaged: Sequence[str]) -> Benchmark:
        """Make as many requests of the mean lengths, at the stated rate or from as many users."""
        self._check(path)
        means = {name: value for name, value in self.means.items() if value > 0}
        if not means:
            raise UserError(
                f"{path} states no mean latency; name {self.record}, of answers that were streamed"
            )
        number = round(self.num_requests)
        table = pd.DataFrame(
            {
                "prompt_len": [max(1, round(self._mean_tokens("prompt")))] * number,
                "output_len": max(1, round(self._mean_tokens("output"))),
                "latency": means.get("latency", means.get("ttft", 0.0)),
            }
        )
        requests, client, _ = _with_drawn_arrivals(table, self.client)
        lengths = requests[["prompt_len", "output_len"]]
        return Benchmark(
            self.labels_of(path),
            in_ledgers_columns(lengths.assign(arrival_time=requests.arrival)),
            self.num_failed,
            self.server,
            self.policy,
            means,
            self._cautions(number, client),
            client.limited_to(len(requests)),
        )

    @property
    def num_requests(self) -> float:
        """Finished ones; NaN where it is not stated."""
        return self.numbers.get("num_requests", math.nan)

    @property
    def num_failed(self) -> int:
        """Requests without an answer."""
        return count_of(self.numbers.get("num_failed"))

    def _mean_tokens(self, kind: str) -> float:
        """Return the mean tokens of a "prompt" or an "output"; NaN where they do not follow."""
        total = self.numbers.get(f"num_{kind}_tokens", math.nan)
        mean = math.nan
        if self.num_requests > 0:
            mean = total / self.num_requests
        return self.numbers.get(f"{kind}_len", mean)

    def _check(self, path: Path) -> None:
        """Raise UserError for a load without an answer, or without a mean that requests need."""
        if self.num_failed and not self.num_requests:
            raise UserError(f"{path}: all {self.num_failed} requests failed; see the server's log")
        needed = {
            "the number of requests": self.num_requests,
            "the mean tokens of a prompt": self._mean_tokens("prompt"),
            "the mean tokens of an answer": self._mean_tokens("output"),
        }
        missing = [name for name, value in needed.items() if not value > 0]
        if missing:
            raise UserError(
                f"{path} has no requests, and does not state {' and '.join(missing)}; name "
                f"{self.record}"
            )

    def _cautions(self, number: int, client: Client) -> list[str]:
        how = client.timing
        if client.users is not None and client.rate < math.inf:
            how += f", at most {client.users} at a time"
        elif client.users is not None:
            how = f"from {client.users} user{'s' * (client.users != 1)}"
        cautions = [*self.cautions]
        num_incomplete = count_of(self.numbers.get("num_incomplete"))
        if num_incomplete:
            cautions.append(f"{num_incomplete} more requests were incomplete")
        if not client.source:
            cautions.append("the file does not state how requests were sent, as workload.users may")
        if self.num_failed:
            num_all = number + self.num_failed
            cautions.append(f"{number} of {num_all} requests; {self.num_failed} failed")
        cautions += self._cautions_of_means()
        cautions.append(
            f"the file has means only: {number} requests of {round(self._mean_tokens('prompt'))} "
            f"prompt and {round(self._mean_tokens('output'))} output tokens are sent {how}, and "
            "only means are compared"
        )
        return cautions

    def _cautions_of_means(self) -> list[str]:
        """Name a mean time between tokens that the other means contradict, as that of a client
        which takes parts of a token's message for tokens.
        """
        means = self.means
        output_len = self._mean_tokens("output")
        if len(means) < len(WAITS) or output_len < MOST_DIFFERENT:
            return []
        follows = (means["latency"] - means["ttft"]) / (output_len - 1)
        if 1 / MOST_DIFFERENT < means["tpot"] / max(follows, 1e-9) < MOST_DIFFERENT:
            return []
        return [
            f"the file's mean time between tokens is {1e3 * means['tpot']:.3g} ms, and by its "
            f"latency, time to the first token and output tokens {1e3 * follows:.3g} ms"
        ]


def quantities_of(requests: pd.DataFrame, duration: float) -> dict[str, float]:
    """Return rates and waits of requests of the ledger by the names of metrics.md.

    Args:
        requests: A row each.
        duration: Seconds in which they were served.
    """
    return {**throughput(requests, duration), **latency(requests)}


def end_of(requests: pd.DataFrame) -> float:
    """Return when the last request of the ledger's was finished (seconds since the first)."""
    return float(requests.finish_time.max())


def _checked_table(
    path: Path, rows: Iterable[Mapping[str, object]], *, has_arrivals: bool
) -> tuple[pd.DataFrame, RowCheck]:
    """Make a table of rows with `LENGTHS`, `SECONDS` and `arrival` (seconds), and check those of
    finished requests. Raises UserError where no answer was streamed.
    """
    table = pd.DataFrame(list(rows), dtype=object)  # ids of sessions may be numbers
    columns = (*LENGTHS, *SECONDS, "arrival")
    for name in (*columns, "status"):
        if name not in table:
            table[name] = FINISHED if name == "status" else np.nan
    table.index += 1
    for name in ("cached_len", "turn"):
        if name in table:
            table[name] = table[name].map(count_of)
    if "session" in table:
        table["session"] = table.session.map(lambda session: str(session or ""))
    finished = table[table.status == FINISHED]
    if _is_not_streamed(finished):
        raise UserError(f"{path} {NOT_STREAMED}")
    check = RowCheck(finished.index, "row")
    numbers = {name: check.numbers(finished[name], 1, is_whole=True) for name in LENGTHS}
    times = [*SECONDS]
    if has_arrivals:
        times.append("arrival")
    numbers |= {name: check.numbers(finished[name], 0) for name in times}
    if "gaps" in table:
        has_numbers = finished.gaps.map(lambda gaps: not any(map(math.isnan, gaps)))
        check.require(finished.gaps, has_numbers)
    for name in columns:
        table[name] = numbers.get(name, pd.Series(np.nan, index=table.index))
    return table, check


def _is_not_streamed(finished: pd.DataFrame) -> bool:
    """Return whether no answer has a time of its first token, or all of them that of their end."""
    numbers = finished[["output_len", *SECONDS]].apply(pd.to_numeric, errors="coerce")
    # Of one token the first is the last.
    answered = numbers[numbers.latency.notna() & ~(numbers.output_len <= 1)]
    if answered.empty:
        return False
    comes_at_end = answered.first_token >= answered.latency
    return bool((answered.first_token.isna() | comes_at_end).all())


def _reason_for_nothing(recording: Recording) -> str:
    counts = {reason: number for reason, number in recording.left_out.items() if number}
    if not counts:
        return "it has no request"
    number = sum(counts.values())
    if len(counts) > 1 or recording.example:
        counted = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        example = f" ({recording.example})" if recording.example else ""
        return f"none of {number} requests can be replayed: {counted}{example}"
    return f"all {number} requests {next(iter(counts))}"


def in_ledgers_columns(
    requests: pd.DataFrame, token_times: Sequence[Sequence[float]] | None = None
) -> pd.DataFrame:
    """Return requests of a file as the ledger has them.

    Args:
        requests: A row each, with those of the ledger's columns that the file states.
        token_times: Seconds of each token of each request; None: not recorded, so that each has
            an empty list.

    Returns:
        All columns of the ledger, NaN where the file does not tell.
    """
    if token_times is None:
        token_times = [[] for _ in range(len(requests))]
    table = requests.assign(
        request_id=requests.index,
        token_times=pd.Series(token_times, requests.index, dtype=object),
    )
    return table.reindex(columns=list(REQUEST_COLUMNS))


def _with_token_times(requests: pd.DataFrame) -> pd.DataFrame:
    """Return requests as the ledger has them; without gaps times of tokens are unknown."""
    first = requests.arrival + requests.first_token
    token_times = []
    for start, gaps in zip(first, requests.gaps, strict=True):
        times = list[float]()
        if len(gaps):
            times = [start, *(start + np.cumsum(gaps))]
        token_times.append(times)
    table = requests[list(LENGTHS)].assign(
        arrival_time=requests.arrival,
        first_token_time=first,
        finish_time=np.maximum(requests.arrival + requests.latency, first),
    )
    return in_ledgers_columns(table, token_times)


def _with_drawn_arrivals(
    requests: pd.DataFrame, client: Client
) -> tuple[pd.DataFrame, Client, str]:
    """Draw arrivals at the client's rate, with at most so many unanswered as it has users."""
    due = client.drawn(len(requests))
    sent = _sent(requests.latency, due, client.users)
    how = client.timing
    if client.rate < math.inf:
        how = f"drawn {how}"
    if client.users:
        how += f", at most {client.users} at a time"
    caution = f"the file has no times at which requests were sent: here {how}"
    client = replace(client, due=tuple(due - due[0]))
    arrivals = pd.Series(sent, index=requests.index)
    requests = requests.assign(arrival=arrivals - arrivals.min())
    return requests.sort_values("arrival", kind="stable", ignore_index=True), client, caution


def _sent(latency: pd.Series, due: NDArray[np.float64], limit: int | None) -> list[float]:
    """Hold each request that is `due` until fewer than `limit` are unanswered."""
    running = list[float]()
    sent = list[float]()
    for time, seconds in zip(due, latency, strict=True):
        begin = float(time)
        if limit and len(running) >= limit:
            begin = max(begin, heapq.heappop(running))
        sent.append(begin)
        heapq.heappush(running, begin + seconds)
    return sent


def _caution_of_chunks(requests: pd.DataFrame) -> str:
    """Warn where clients record times of chunks of several tokens, as drafts give; else ""."""
    num_gaps = requests.gaps.map(len)
    is_timed = num_gaps > 0
    num_tokens = int(requests.output_len[is_timed].sum())
    num_chunks = int((num_gaps[is_timed] + 1).sum())
    if num_chunks >= TOKENS_TIMED * num_tokens:
        return ""
    return (
        f"{num_tokens:,} tokens came in {num_chunks:,} chunks, as of drafts: times between tokens "
        "(tbt) are not compared; time per output token (tpot) counts tokens, and the replay has no "
        "drafts"
    )


def _cautions_of_totals(
    requests: pd.DataFrame, totals: Mapping[str, float], *, is_drawn: bool
) -> list[str]:
    """Hold what a file states of all its requests against those that were read."""
    if not totals:
        return []
    read = quantities_of(requests, end_of(requests))
    read["num_requests"] = len(requests)
    read["num_prompt_tokens"] = float(requests.prompt_len.sum())
    read["num_output_tokens"] = float(requests.output_len.sum())
    differences = []
    for name, stated in totals.items():
        # Times that were drawn have another end than the run.
        is_of_clock = name == "duration" or name.endswith("throughput")
        if name not in read or (is_drawn and is_of_clock) or not stated > 0:
            continue
        if abs(read[name] / stated - 1) > SAME_TOTALS:
            differences.append(f"{name} {stated:.4g} ({read[name]:.4g} read)")
    if not differences:
        return []
    return [
        "the file's own totals differ by more than 2 % from what was read: "
        f"{', '.join(differences)}; look at its units, and whether it has all requests"
    ]


def _conversation(requests: pd.DataFrame) -> pd.DataFrame:
    """Return `CONVERSATION` of each request; what is not recorded of delays follows from times."""
    table = requests[list(CONVERSATION)].reset_index(drop=True)
    finish = (requests.arrival + requests.latency).reset_index(drop=True)
    last_answer = dict[str, float]()
    delays = list[float]()
    rows = zip(table.session, requests.arrival, finish, table.delay, strict=True)
    for session, arrival, end, recorded_delay in rows:
        delay = math.nan
        if session and session in last_answer:
            delay = recorded_delay
            if math.isnan(delay):
                delay = max(0.0, arrival - last_answer[session])
        delays.append(delay)
        last_answer[session] = end
    return table.assign(delay=delays)


def _cautions_of_conversations(requests: pd.DataFrame) -> list[str]:
    """Warn where the prompts of later turns do not have room for what was said before."""
    num_later = 0
    num_short = 0
    num_said = dict[str, int]()
    for session, prompt_len, output_len in zip(
        requests.session, requests.prompt_len, requests.output_len, strict=True
    ):
        if session and session in num_said:
            num_later += 1
            num_short += prompt_len < num_said[session]
        num_said[session] = prompt_len + output_len
    if num_short == 0:
        return []
    return [
        f"{num_short} of {num_later} later turns have shorter prompts than what was said before: "
        "they are replayed with as much of it as they have room for"
    ]

"""One load on a server, as a benchmark client recorded it: its requests, how they were sent, what
the file states of the server, and what of the file is not replayed.

A reader of `readers` gives a `Load` in the file's own terms, which `benchmark_of` checks and turns
into a `Benchmark`. Every time counts from when the client sent the request, as the clients count it
themselves, so that waiting in the client is in none of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.extensions.replay.clients import CLOCK, Client
from sarathi_lab.extensions.replay.json_values import count_of
from sarathi_lab.extensions.replay.server_arguments import Statement
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import latency
from sarathi_lab.workload.recording import (
    DAMAGED,
    FINISHED,
    Recording,
    RowCheck,
    completed,
    recorded,
)

# What every finished request has, tokens and seconds.
LENGTHS = ["prompt_len", "output_len"]
SECONDS = ["first_token", "latency"]
WAITS = ("ttft", "tpot", "latency")  # of metrics.md, whose means clients state
# What a summary states, and how messages call it.
OF_SUMMARY = {
    "num_requests": "the number of requests",
    "prompt_len": "the mean tokens of a prompt",
    "output_len": "the mean tokens of an answer",
}
# Share of tokens that have a time each, below which a client has recorded chunks of several.
TOKENS_TIMED = 0.9
# Share by which what was read may differ from what the file states of all its requests.
SAME_TOTALS = 0.02
# Ratio of a mean time per token to what other means say, beyond which they are contradictory.
MOST_DIFFERENT = 1.5
NOT_STREAMED = "has no times of first tokens, as answers were not streamed; run it again streaming"
# What of a conversation is kept for a replay, a row a request.
CONVERSATION = ["cached_len", "session", "delay"]

Row = Mapping[str, object]


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
    conversation: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=CONVERSATION))

    @property
    def summary(self) -> dict[str, float]:
        """Return quantities by the names of metrics.md."""
        quantities = {f"{name}_mean": value for name, value in self.means.items()}
        if not self.means:
            quantities = quantities_of(self.requests, end_of(self.requests))
        return {**quantities, "num_failed": self.num_failed}

    @property
    def has_conversations(self) -> bool:
        """Whether some requests continue others."""
        return bool(self.conversation.delay.notna().any())


@dataclass(frozen=True, kw_only=True)
class Load:
    """One load as a reader takes it from a file.

    Attributes:
        client_name: Of the program that wrote the file.
        rows: All requests, with columns of `Recording.requests`: tokens and seconds. None: the file
            is a summary.
        record: Of a summary, the client's file that has each request.
        arrivals: Of a summary whose requests were sent at known times, these (seconds).
        numbers: What the file states of all its requests: mean waits (seconds) as ttft, tpot and
            latency, num_requests, num_failed, prompt_len and output_len (mean tokens), and others
            of metrics.md.
        client: How requests were sent.
        labels: Further ones for tables.
        server: What is recorded of the server's arguments.
        policy: A name of conf/policy.
        cautions: What of the requests is not known.
    """

    client_name: str
    rows: Iterable[Row] | None = None
    record: str = ""
    arrivals: Sequence[float] | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    client: Client = CLOCK
    labels: Mapping[str, object] = field(default_factory=dict)
    server: Sequence[Statement] = ()
    policy: str = "vllm_v1"
    cautions: Sequence[str] = ()

    @property
    def means(self) -> dict[str, float]:
        """Mean waits in seconds that the file states."""
        return {wait: self.numbers[wait] for wait in WAITS if self.numbers.get(wait, 0) > 0}


def benchmark_of(load: Load, path: Path, damaged: Sequence[str]) -> Benchmark:
    """Make a benchmark of a load in a file with `damaged` parts. Raises UserError where it has no
    request that can be used.
    """
    labels = {
        "policy": load.client_name,
        **load.labels,
        "executor": "server",
        "is_baseline": False,
        "path": str(path),
    }
    benchmark = Benchmark(
        labels=labels,
        requests=pd.DataFrame(),
        num_failed=0,
        server=load.server,
        policy=load.policy,
    )
    if load.rows is None:
        return _of_summary(benchmark, load, path)
    table, check = _checked_rows(path, load.rows)
    recording = recorded(table, check, damaged)
    return _of_requests(benchmark, load, path, recording)


def _of_requests(
    benchmark: Benchmark,
    load: Load,
    path: Path,
    recording: Recording,
) -> Benchmark:
    """Complete a benchmark by the requests of a file that can be used."""
    requests = recording.requests
    if requests.empty:
        reason = recording.describe_left_out() or "it has no request"
        remedy = "see the server's log"
        if DAMAGED in recording.left_out:
            remedy = "correct what is damaged"
        raise UserError(f"{path}: {reason}; {remedy}")
    cautions = [recording.describe_left_out(), *load.cautions]
    client = load.client
    is_drawn = bool(requests.arrival.isna().all())
    if is_drawn:
        requests, client = _with_drawn_arrivals(requests, client)
        cautions.append(
            f"the file has no times at which requests were sent: they are sent {client.sending}"
        )
    caution_of_chunks = _caution_of_chunks(requests)
    if caution_of_chunks:
        # Times between chunks are no times between tokens.
        cautions.append(caution_of_chunks)
        requests = completed(requests.drop(columns="gaps"))
    in_ledger = _in_ledger(requests)
    if DAMAGED not in recording.left_out:
        cautions.append(_caution_of_totals(in_ledger, load, is_drawn=is_drawn))
    conversation = requests[CONVERSATION].assign(delay=_delays(requests))
    return replace(
        benchmark,
        requests=in_ledger,
        num_failed=sum(recording.left_out.values()),
        cautions=[caution for caution in cautions if caution],
        client=client.limited_to(len(in_ledger)),
        conversation=conversation,
    )


def _of_summary(benchmark: Benchmark, load: Load, path: Path) -> Benchmark:
    """Complete a benchmark by as many requests of the mean lengths, at the stated rate or from as
    many users.
    """
    numbers = load.numbers
    num_failed = count_of(numbers.get("num_failed"))
    number = count_of(numbers.get("num_requests"))
    if num_failed and not number:
        raise UserError(f"{path}: all {num_failed} requests failed; see the server's log")
    missing = [what for name, what in OF_SUMMARY.items() if not numbers.get(name, 0) > 0]
    if not load.means:
        missing.append("a mean latency")
    if missing:
        stated = " and ".join(missing)
        raise UserError(f"{path} has no requests, and does not state {stated}; name {load.record}")
    columns: dict[str, float] = {name: max(1, round(numbers[name])) for name in LENGTHS}
    columns["latency"] = load.means.get("latency", load.means.get("ttft", 0.0))
    requests = pd.DataFrame(columns, index=range(number))
    client = load.client
    if load.arrivals is None:
        requests, client = _with_drawn_arrivals(requests, client)
    else:
        requests = requests.assign(arrival=load.arrivals)
    requests = requests[LENGTHS].assign(arrival_time=requests.arrival)
    return replace(
        benchmark,
        requests=in_ledgers_columns(requests),
        num_failed=num_failed,
        means=load.means,
        cautions=[*load.cautions, *_cautions_of_summary(load, requests, num_failed)],
        client=client.limited_to(number),
    )


def _cautions_of_summary(load: Load, requests: pd.DataFrame, num_failed: int) -> list[str]:
    cautions = []
    number = len(requests)
    sending = load.client.sending
    if load.arrivals is not None:
        sending = "at the client's times"
    elif not load.client.is_stated:
        cautions.append("the file does not state how requests were sent, as workload.users may")
    num_incomplete = count_of(load.numbers.get("num_incomplete"))
    left_out = {"failed": num_failed, "incomplete": num_incomplete}
    cautions.append(Recording(requests, left_out).describe_left_out())
    cautions.append(_caution_of_means(load))
    first = requests.iloc[0]
    cautions.append(
        f"the file has means only: {number} requests of {first.prompt_len:.0f} prompt and "
        f"{first.output_len:.0f} output tokens are sent {sending}, and only means "
        "are compared"
    )
    return list(filter(None, cautions))


def _caution_of_means(load: Load) -> str:
    """Name a mean time per token that the other means contradict, as milliseconds for seconds do;
    "": none is contradicted.
    """
    means = load.means
    num_gaps = load.numbers["output_len"] - 1
    if num_gaps < 1 or not {"ttft", "tpot", "latency"} <= means.keys():
        return ""
    follows = (means["latency"] - means["ttft"]) / num_gaps
    ratio = means["tpot"] / max(follows, 1e-9)
    if 1 / MOST_DIFFERENT < ratio < MOST_DIFFERENT:
        return ""
    return (
        f"the file's mean time per token is {1e3 * means['tpot']:.3g} ms, and by its latency, time "
        f"to the first token and output tokens {1e3 * follows:.3g} ms; look at its units"
    )


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


def _checked_rows(path: Path, rows: Iterable[Row]) -> tuple[pd.DataFrame, RowCheck]:
    """Make a table of a reader's rows, and check those of finished requests. Raises UserError where
    no answer was streamed.
    """
    table = pd.DataFrame(list(rows), dtype=object)  # ids of sessions may be numbers
    columns = table.columns.union(LENGTHS)
    table = completed(table.reindex(columns=columns))
    table.index += 1
    table["cached_len"] = table.cached_len.map(count_of)
    table["session"] = table.session.map(lambda session: str(session or ""))
    finished = table[table.status == FINISHED]
    if _is_not_streamed(finished):
        raise UserError(f"{path} {NOT_STREAMED}")
    check = RowCheck(finished.index, "row")
    has_arrivals = finished.arrival.notna().any()
    for name in (*LENGTHS, *SECONDS, "arrival"):
        # Numbers of requests that have not finished count as unknown.
        table[name] = np.nan
        is_length = name in LENGTHS
        if name != "arrival" or has_arrivals:
            least = 1 if is_length else 0
            table[name] = check.numbers(finished[name], least, is_whole=is_length)
    are_numbers = finished.gaps.map(_has_numbers)
    check.require(finished.gaps, are_numbers.astype(bool))
    return table, check


def _has_numbers(gaps: Sequence[float]) -> bool:
    return not any(map(math.isnan, gaps))


def _is_not_streamed(finished: pd.DataFrame) -> bool:
    """Return whether no answer has a time of its first token, or all of them that of their end."""
    numbers = finished[["output_len", *SECONDS]].apply(pd.to_numeric, errors="coerce")
    # Of one token the first is the last.
    is_longer = ~(numbers.output_len <= 1)
    answered = numbers[numbers.latency.notna() & is_longer]
    is_streamed = answered.first_token < answered.latency
    return len(answered) > 0 and not is_streamed.any()


def in_ledgers_columns(requests: pd.DataFrame) -> pd.DataFrame:
    """Return requests of a file as the ledger has them.

    Args:
        requests: A row each, with those of the ledger's columns that the file states.

    Returns:
        All columns of the ledger, NaN where the file does not tell; lists of token times, empty
        ones where they are not recorded.
    """
    table = requests.reindex(columns=list(REQUEST_COLUMNS))
    if "token_times" not in requests:
        table["token_times"] = [[] for _ in range(len(requests))]
    return table.assign(request_id=requests.index)


def _in_ledger(requests: pd.DataFrame) -> pd.DataFrame:
    """Return requests as the ledger has them; without gaps times of tokens are unknown."""
    first = requests.arrival + requests.first_token
    token_times = []
    for start, gaps in zip(first, requests.gaps, strict=True):
        times = list[float]()
        if len(gaps):
            times = [start, *(start + np.cumsum(gaps))]
        token_times.append(times)
    table = requests[LENGTHS].assign(
        arrival_time=requests.arrival,
        first_token_time=first,
        finish_time=np.maximum(requests.arrival + requests.latency, first),
        token_times=pd.Series(token_times, requests.index, dtype=object),
    )
    return in_ledgers_columns(table)


def _with_drawn_arrivals(requests: pd.DataFrame, client: Client) -> tuple[pd.DataFrame, Client]:
    """Draw arrivals at the client's rate, with at most so many unanswered as it has users."""
    due = client.drawn(len(requests))
    sent = _sent(requests.latency, due, client.users)
    requests = requests.assign(arrival=sent - sent.min())
    in_order = requests.sort_values("arrival", kind="stable", ignore_index=True)
    due -= due[0]
    return in_order, replace(client, due=tuple(due))


def _sent(latency: pd.Series, due: NDArray[np.float64], limit: int | None) -> NDArray[np.float64]:
    """Hold each request that is `due` until fewer than `limit` are unanswered."""
    sent = due.copy()
    ends = list[float]()  # of unanswered requests, the soonest first
    for i, seconds in enumerate(latency):
        if limit and len(ends) >= limit:
            soonest = heapq.heappop(ends)
            sent[i] = max(sent[i], soonest)
        end = sent[i] + seconds
        heapq.heappush(ends, end)
    return sent


def _caution_of_chunks(requests: pd.DataFrame) -> str:
    """Warn where clients record times of chunks of several tokens, as drafts give; else ""."""
    num_gaps = requests.gaps.map(len)
    is_timed = num_gaps > 0
    num_tokens = requests.output_len[is_timed].sum()
    num_chunks = num_gaps.sum() + is_timed.sum()  # of an answer one more than gaps
    if num_chunks >= TOKENS_TIMED * num_tokens:
        return ""
    return (
        f"{num_tokens:,} tokens came in {num_chunks:,} chunks, as of drafts: times between tokens "
        "(tbt) are not compared; time per output token (tpot) counts tokens, and the replay has no "
        "drafts"
    )


def _caution_of_totals(requests: pd.DataFrame, load: Load, *, is_drawn: bool) -> str:
    """Hold what a file states of all its requests against those that were read; "": they agree."""
    read = quantities_of(requests, end_of(requests))
    means = {f"{wait}_mean": mean for wait, mean in load.means.items()}
    differences = []
    for name, stated in {**load.numbers, **means}.items():
        # Times that were drawn have another end than the run.
        is_of_clock = name == "duration" or name.endswith("throughput")
        if name not in read or (is_drawn and is_of_clock) or not stated > 0:
            continue
        if abs(read[name] / stated - 1) > SAME_TOTALS:
            differences.append(f"{name} {stated:.4g} ({read[name]:.4g} read)")
    if not differences:
        return ""
    return (
        "the file's own totals differ by more than 2 % from what was read: "
        f"{', '.join(differences)}; look at its units, and whether it has all requests"
    )


def _delays(requests: pd.DataFrame) -> pd.Series:
    """Return the seconds between the answer of the turn before and each request; NaN: none was."""
    answered = requests.arrival + requests.latency
    by_session = answered.groupby(requests.session)
    answered_before = by_session.shift()
    delays = requests.arrival - answered_before
    in_session = requests.session != ""
    return delays.clip(lower=0.0).where(in_session)

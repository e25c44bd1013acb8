"""Answers as the tables and the summary of a run, in the names of `ledger` and METRICS.md.

What only the server knows stays unknown (NaN): when it first scheduled a request, and how often it
preempted it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.results.metrics import latency, throughput
from sarathi_lab.tasks.endpoint.client import Answer
from sarathi_lab.tasks.endpoint.load import is_closed

OWN_COLUMNS = (
    "sent_time",
    "wanted_output_len",
    "num_retries",
    "output_text",
)  # behind the ledger's
FAILURE_COLUMNS = (
    "request_id",
    "arrival_time",
    "sent_time",
    "failed_time",
    "prompt_len",
    "wanted_output_len",
    "num_pieces",
    "num_retries",
    "status",
    "reason",
)
NUM_INTERVALS = 200  # of a run's time, for its curves
SHORTEST_INTERVAL = 0.02  # seconds
LATE = 0.01  # seconds; a client that sends later than this is itself part of what it measures


def requests_table(answers: Sequence[Answer]) -> pd.DataFrame:
    """One row per finished request, by request id: the ledger's columns and OWN_COLUMNS."""
    rows = [_request_row(answer) for answer in answers if not answer.error]
    table = pd.DataFrame(rows, columns=[*REQUEST_COLUMNS, *OWN_COLUMNS])
    return table.sort_values("request_id", ignore_index=True)


def failures_table(answers: Sequence[Answer]) -> pd.DataFrame:
    """One row per failed request, by request id, with its `reason`."""
    rows = [_failure_row(answer) for answer in answers if answer.error]
    table = pd.DataFrame(rows, columns=list(FAILURE_COLUMNS))
    return table.sort_values("request_id", ignore_index=True)


def intervals_table(answers: Sequence[Answer]) -> pd.DataFrame:
    """One row per interval of time, in the names of the ledger's iterations, which can't be seen
    from outside.

    A prompt counts where its first token came. `num_running` have a token and are not finished at
    the interval's end, `num_waiting` have arrived and wait for their first token. Failed requests
    count as long as they were there.
    """
    duration = max(_end(answer) for answer in answers)
    width = max(SHORTEST_INTERVAL, duration / NUM_INTERVALS)
    edges = width * np.arange(max(1, math.ceil(duration / width)) + 1)
    edges[-1] = max(edges[-1], duration)  # whatever rounding says
    ends = edges[1:]
    firsts = np.array([answer.piece_times[0] for answer in answers if answer.piece_times])
    prompts = np.array([_prompt_len(answer) for answer in answers if answer.piece_times])
    laters = np.array([time for answer in answers for time in answer.piece_times[1:]])
    arrived = _counts_until(ends, [answer.request.arrival_time for answer in answers])
    answered = _counts_until(
        ends, [min([*answer.piece_times[:1], _end(answer)]) for answer in answers]
    )
    ended = _counts_until(ends, [_end(answer) for answer in answers])
    return pd.DataFrame(
        {
            "iteration": range(len(ends)),
            "start": edges[:-1],
            "end": ends,
            "num_prefills": np.histogram(firsts, edges)[0],
            "num_prefill_tokens": np.histogram(firsts, edges, weights=prompts)[0].astype(int),
            "num_decode_tokens": np.histogram(laters, edges)[0],
            "num_running": answered - ended,
            "num_waiting": arrived - answered,
        }
    )


def summarise_answers(answers: Sequence[Answer], requests: pd.DataFrame) -> dict[str, float]:
    """Flat names to numbers, as `metrics.summarise`; what a client can't tell is left out."""
    summary = {
        **throughput(requests, float(requests.finish_time.max())),
        **latency(requests),
        "num_failed": sum(bool(answer.error) for answer in answers),
        "num_retries": sum(answer.num_retries for answer in answers),
    }
    if not is_closed([answer.request for answer in answers]):  # else they wait for their turn
        delays = [
            answer.sent_time - answer.request.arrival_time
            for answer in answers
            if answer.sent_time is not None
        ]
        summary["send_delay_p99"] = float(np.quantile(delays, 0.99))
    return {name: float(value) for name, value in summary.items() if np.isfinite(value)}


def cautions(answers: Sequence[Answer], summary: dict[str, float]) -> list[str]:
    """What to keep in mind of these figures, in words."""
    finished = [answer for answer in answers if not answer.error]
    uncounted = [answer for answer in finished if answer.completion_tokens is None]
    found = []
    if uncounted:
        found.append(
            f"no usage from the server for {len(uncounted)} of {len(finished)} requests: output "
            "tokens are counted as "
            "streamed pieces, prompt tokens as wished"
        )
    counted = sum(answer.completion_tokens or 0 for answer in finished)
    pieces = sum(len(answer.pieces) for answer in finished if answer.completion_tokens is not None)
    if pieces and counted != pieces:
        found.append(
            f"{counted} tokens came in {pieces} pieces: times between tokens are those between "
            "pieces"
        )
    if short := sum(_output_len(answer) < answer.request.output_len for answer in finished):
        found.append(
            f"{short} of {len(finished)} answers ended before the workload's length; see "
            "wanted_output_len"
        )
    if prompts := sum(_prompt_len(answer) != answer.request.prompt_len for answer in finished):
        found.append(
            f"{prompts} of {len(finished)} prompts have another number of tokens than the "
            "workload's"
        )
    if (late := summary.get("send_delay_p99", 0.0)) > LATE:
        found.append(
            f"this client sent its requests up to {late * 1e3:.0f} ms late (P99), which counts "
            "in latencies"
        )
    return found


def reasons(failures: pd.DataFrame) -> dict[str, int]:
    """How many failed why, the commonest first."""
    return {str(reason): int(count) for reason, count in failures.reason.value_counts().items()}


def _request_row(answer: Answer) -> tuple[object, ...]:
    request = answer.request
    known = {
        "request_id": request.request_id,
        "arrival_time": request.arrival_time,
        "first_scheduled_time": math.nan,
        "first_token_time": answer.piece_times[0],
        "finish_time": answer.piece_times[-1],
        "prompt_len": _prompt_len(answer),
        "output_len": _output_len(answer),
        "num_preemptions": math.nan,
        "bubble_time": math.nan,
        "output_token_ids": [],
        "token_times": list(answer.piece_times),
        "sent_time": answer.sent_time,
        "wanted_output_len": request.output_len,
        "num_retries": answer.num_retries,
        "output_text": "".join(answer.pieces),
    }
    return tuple(known.get(column) for column in (*REQUEST_COLUMNS, *OWN_COLUMNS))


def _failure_row(answer: Answer) -> tuple[object, ...]:
    request = answer.request
    return (
        request.request_id,
        request.arrival_time,
        answer.sent_time,
        answer.end_time,
        request.prompt_len,
        request.output_len,
        len(answer.pieces),
        answer.num_retries,
        answer.status,
        answer.error,
    )


def _prompt_len(answer: Answer) -> int:
    """As the server counted, else as wished."""
    return answer.request.prompt_len if answer.prompt_tokens is None else answer.prompt_tokens


def _output_len(answer: Answer) -> int:
    return len(answer.pieces) if answer.completion_tokens is None else answer.completion_tokens


def _end(answer: Answer) -> float:
    """When the last token came, or the failure."""
    assert answer.end_time is not None, "the answer has come to its end"
    return answer.end_time if answer.error else answer.piece_times[-1]


def _counts_until(ends: np.ndarray, times: Sequence[float]) -> np.ndarray:
    return np.searchsorted(np.sort(times), ends, side="right")

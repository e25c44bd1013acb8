"""Answers as the tables and the summary of a run, in the names of `engine.ledger` and METRICS.md.
What only the server knows (when it first scheduled a request, its preemptions) is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.results.metrics import latency, throughput
from sarathi_lab.tasks.endpoint.protocol import Answer, is_closed

# Of finished requests, those of the ledger and a client's own; and of failed ones.
FINISHED = (*REQUEST_COLUMNS, "sent_time", "wanted_output_len", "num_retries", "output_text")
FAILED = (
    *("request_id", "arrival_time", "sent_time", "failed_time", "prompt_len", "wanted_output_len"),
    *("num_pieces", "num_retries", "status", "reason"),
)
NUM_INTERVALS = 200  # of a run's time, for its curves
SHORTEST_INTERVAL = 0.02  # seconds
LATE = 0.01  # seconds; a client that sends later than this is itself part of what it measures


def table_of(answers: Sequence[Answer], columns: Sequence[str]) -> pd.DataFrame:
    """A row per answer, by request id, in the columns FINISHED or FAILED."""
    rows = [
        {
            "request_id": answer.request.request_id,
            "arrival_time": answer.request.arrival_time,
            "sent_time": answer.sent_time,
            "first_token_time": next(iter(answer.piece_times), None),
            "finish_time": answer.finish_time,
            "failed_time": answer.end_time,
            "prompt_len": answer.request.prompt_len if answer.error else answer.prompt_len,
            "wanted_output_len": answer.request.output_len,
            "output_len": answer.output_len,
            "output_token_ids": [],
            "token_times": list(answer.piece_times),
            "output_text": "".join(answer.pieces),
            "num_pieces": len(answer.pieces),
            "num_retries": answer.num_retries,
            "status": answer.status,
            "reason": answer.error,
        }
        for answer in answers
    ]
    table = pd.DataFrame(rows, columns=list(columns))
    return table.sort_values("request_id", ignore_index=True)


def intervals_table(answers: Sequence[Answer]) -> pd.DataFrame:
    """One row per interval of time, in the names of the ledger's iterations (unknown to a client).

    A prompt counts where its first token came. `num_running` have a token and are not finished at
    the interval's end, `num_waiting` have arrived and wait for their first token. Failed requests
    count as long as they were there.
    """
    duration = max(answer.finish_time for answer in answers)
    width = max(SHORTEST_INTERVAL, duration / NUM_INTERVALS)
    edges = width * np.arange(max(1, math.ceil(duration / width)) + 1)
    edges[-1] = max(edges[-1], duration)  # against rounding
    begun = [(answer.piece_times[0], answer.prompt_len) for answer in answers if answer.piece_times]
    firsts, prompts = zip(*begun, strict=True) if begun else ([], [])
    laters = [time for answer in answers for time in answer.piece_times[1:]]

    def count_until(times: Sequence[float]) -> np.ndarray:
        return np.searchsorted(np.sort(times), edges[1:], side="right")

    arrived = count_until([answer.request.arrival_time for answer in answers])
    answered = count_until([min([*one.piece_times[:1], one.finish_time]) for one in answers])
    ended = count_until([answer.finish_time for answer in answers])
    return pd.DataFrame(
        {
            "iteration": range(len(edges) - 1),
            "start": edges[:-1],
            "end": edges[1:],
            "num_prefills": np.histogram(firsts, edges)[0],
            "num_prefill_tokens": np.histogram(firsts, edges, weights=prompts)[0].astype(int),
            "num_decode_tokens": np.histogram(laters, edges)[0],
            "num_running": answered - ended,
            "num_waiting": arrived - answered,
        }
    )


def summarise_answers(answers: Sequence[Answer], requests: pd.DataFrame) -> dict[str, float]:
    """Names to numbers as `metrics.summarise` has them; what a client can't know is left out."""
    summary = {
        **throughput(requests, float(requests.finish_time.max())),
        **latency(requests),
        "num_failed": sum(bool(answer.error) for answer in answers),
        "num_retries": sum(answer.num_retries for answer in answers),
    }
    if not is_closed([answer.request for answer in answers]):  # else they wait for their turn
        sent = [(answer.sent_time, answer.request.arrival_time) for answer in answers]
        delays = [time - arrival for time, arrival in sent if time is not None]
        summary["send_delay_p99"] = float(np.quantile(delays, 0.99))
    return {name: float(value) for name, value in summary.items() if np.isfinite(value)}


def cautions(answers: Sequence[Answer], summary: dict[str, float]) -> list[str]:
    """Limits of these figures, a sentence each."""
    finished = [answer for answer in answers if not answer.error]
    counted = [answer for answer in finished if answer.completion_tokens is not None]
    tokens = sum(answer.output_len for answer in counted)
    pieces = sum(len(answer.pieces) for answer in counted)
    total, uncounted = len(finished), len(finished) - len(counted)
    short = sum(answer.output_len < answer.request.output_len for answer in finished)
    prompts = sum(answer.prompt_len != answer.request.prompt_len for answer in finished)
    late = summary.get("send_delay_p99", 0.0)
    found = {
        f"no usage from the server for {uncounted} of {total} requests: output tokens are counted "
        "as streamed pieces, prompt tokens as wished": uncounted,
        f"{tokens} tokens came in {pieces} pieces: times between tokens are those between "
        "pieces": tokens != pieces,
        f"{short} of {total} answers ended before the workload's length; see "
        "wanted_output_len": short,
        f"{prompts} of {total} prompts have another number of tokens than the workload's": prompts,
        f"this client sent its requests up to {late * 1e3:.0f} ms late (P99), which counts in "
        "latencies": late > LATE,
    }
    return [caution for caution, is_due in found.items() if is_due]

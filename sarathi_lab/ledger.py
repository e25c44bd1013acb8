"""The record of a run: one row per iteration, one per request. Counts only; costs are derived in `metrics`."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from sarathi_lab.executor import StepResult
from sarathi_lab.request import Sequence
from sarathi_lab.scheduler import Scheduler

ITERATION_COLUMNS = (
    "start",
    "end",
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "prefill_kv_tokens",
    "decode_kv_tokens",
    "prefill_query_key_pairs",
    "num_emits",
    "num_running",
    "num_waiting",
    "num_blocks_used",
    "num_preemptions",
)
REQUEST_COLUMNS = (
    "request_id",
    "arrival_time",
    "first_scheduled_time",
    "first_token_time",
    "finish_time",
    "prompt_len",
    "output_len",
    "num_preemptions",
    "output_token_ids",
    "token_times",
)


class Ledger:
    """Recorder of `run_engine`. `on_iteration` is called with the tokens of each iteration (a progress bar)."""

    def __init__(self, on_iteration: Callable[[int], None] = lambda num_tokens: None) -> None:
        self._on_iteration = on_iteration
        self._iterations: list[tuple[float, ...]] = []
        self._requests: list[tuple[object, ...]] = []
        self._preemptions_seen = 0

    def record(self, result: StepResult, finished: list[Sequence], scheduler: Scheduler) -> None:
        """Append one finished iteration and the requests that finished with it."""
        batch = result.batch
        self._iterations.append(
            (
                result.start,
                result.end,
                batch.num_prefills,
                batch.num_prefill_tokens,
                batch.num_decode_tokens,
                batch.prefill_kv_tokens,
                batch.decode_kv_tokens,
                batch.prefill_query_key_pairs,
                batch.num_emits,
                len(scheduler.running),
                len(scheduler.waiting),
                scheduler.blocks.num_used,
                scheduler.num_preemptions - self._preemptions_seen,
            )
        )
        self._preemptions_seen = scheduler.num_preemptions
        self._requests.extend(_request_row(sequence) for sequence in finished)
        self._on_iteration(batch.num_tokens)

    def iterations(self) -> pd.DataFrame:
        """One row per iteration, in the order they were collected; queue lengths are those after it."""
        table = pd.DataFrame(self._iterations, columns=list(ITERATION_COLUMNS))
        table.insert(0, "iteration", range(len(table)))
        return table

    def requests(self) -> pd.DataFrame:
        """One row per finished request, by request id."""
        table = pd.DataFrame(self._requests, columns=list(REQUEST_COLUMNS))
        return table.sort_values("request_id", ignore_index=True)


def _request_row(sequence: Sequence) -> tuple[object, ...]:
    request = sequence.request
    return (
        request.request_id,
        request.arrival_time,
        sequence.first_scheduled_time,
        sequence.token_times[0],
        sequence.token_times[-1],
        request.prompt_len,
        request.output_len,
        sequence.num_preemptions,
        list(sequence.output_token_ids),
        list(sequence.token_times),
    )

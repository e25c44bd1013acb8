"""The record of a run: one row per iteration, one per request. Counts only; costs are derived in
`metrics`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pandas as pd

from sarathi_lab.engine.executor import Bubble, StepResult
from sarathi_lab.engine.request import SequenceState

ITERATION_COLUMNS = (
    "start",
    "end",
    "busy",
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
    "num_swapped_blocks",
    "num_swapped_tokens",
    "prefix_hit_tokens",
    "num_padding_tokens",
    "host_time",
    "is_replayed",
)
REQUEST_COLUMNS = (
    "request_id",
    "arrival_time",
    "first_scheduled_time",
    "first_token_time",
    "finish_time",
    "prompt_len",
    "output_len",
    "priority",
    "num_preemptions",
    "prefix_hit_tokens",
    "bubble_time",
    "output_token_ids",
    "token_times",
)


class Ledger:
    """Recorder of `run_engine`. `on_iteration` is called with the tokens each iteration settles,
    cached ones too.
    """

    def __init__(self) -> None:
        self.on_iteration: Callable[[int], None] = lambda num_tokens: None
        self._iterations: list[tuple[float, ...]] = []
        self._requests: list[tuple[object, ...]] = []
        self._spans = array(
            "d"
        )  # start and end by stage, flat: a run of ten thousand requests has millions
        self._num_stages = 1
        self._bubbles: list[Bubble] = []
        self._bubble_times: defaultdict[SequenceState, float] = defaultdict(float)
        self._preemptions_seen = 0

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        """Append one finished iteration and the requests that finished with it."""
        batch = result.batch
        queues = batch.queues
        assert queues is not None, "the scheduler has booked the batch"
        self._iterations.append(
            (
                result.start,
                result.end,
                result.busy,
                batch.num_prefills,
                batch.num_prefill_tokens,
                batch.num_decode_tokens,
                batch.prefill_kv_tokens,
                batch.decode_kv_tokens,
                batch.prefill_query_key_pairs,
                batch.num_emits,
                queues.num_running,
                queues.num_waiting,
                queues.num_blocks_used,
                queues.num_preemptions - self._preemptions_seen,
                len(batch.copies),
                batch.num_swapped_tokens,
                batch.prefix_hit_tokens,
                result.num_padding_tokens,
                result.host_time,
                result.is_replayed,
            )
        )
        self._preemptions_seen = queues.num_preemptions
        self._record_stages(result)
        for sequence in finished:
            self._requests.append(_request_row(sequence, self._bubble_times.pop(sequence, 0.0)))
        self.on_iteration(batch.num_tokens + batch.prefix_hit_tokens)

    def _record_stages(self, result: StepResult) -> None:
        spans = result.stages or [(result.start, result.end)]
        self._num_stages = len(spans)
        for span in spans:
            self._spans.extend(span)
        if result.bubbles:
            self._bubbles.extend(result.bubbles)
            seconds = sum(bubble.end - bubble.start for bubble in result.bubbles)
            for chunk in result.batch.chunks:
                self._bubble_times[chunk.sequence] += seconds

    def iterations(self) -> pd.DataFrame:
        """One row per iteration, in the order they were collected; queue lengths are those after
        it.
        """
        table = pd.DataFrame(self._iterations, columns=list(ITERATION_COLUMNS))
        table.insert(0, "iteration", range(len(table)))
        return table

    def requests(self) -> pd.DataFrame:
        """One row per finished request, by request id."""
        table = pd.DataFrame(self._requests, columns=list(REQUEST_COLUMNS))
        return table.sort_values("request_id", ignore_index=True)

    def stages(self) -> pd.DataFrame:
        """One row per iteration and stage (one stage, 0, on a device that is no pipeline): its
        start and end.
        """
        spans = np.array(self._spans).reshape(-1, 2)
        iteration, stage = np.divmod(np.arange(len(spans)), self._num_stages)
        return pd.DataFrame(
            {"iteration": iteration, "stage": stage, "start": spans[:, 0], "end": spans[:, 1]}
        )

    def bubbles(self) -> pd.DataFrame:
        """One row per idle gap of a stage between iteration - 1 and `iteration`; none but on a
        pipeline.
        """
        return pd.DataFrame(self._bubbles, columns=list(Bubble._fields))


def _request_row(sequence: SequenceState, bubble_time: float) -> tuple[object, ...]:
    request = sequence.request
    return (
        request.request_id,
        request.arrival_time,
        sequence.first_scheduled_time,
        sequence.token_times[0],
        sequence.token_times[-1],
        request.prompt_len,
        request.output_len,
        request.priority,
        sequence.num_preemptions,
        sequence.prefix_hit_tokens,
        bubble_time,
        list(sequence.output_token_ids),
        list(sequence.token_times),
    )

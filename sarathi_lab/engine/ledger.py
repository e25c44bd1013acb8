"""The record of a run: one row per iteration, one per request. Counts only; costs come later."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pandas as pd

from sarathi_lab.engine.executor import Bubble, StepResult
from sarathi_lab.engine.request import Queues, SequenceState

# Where each column is found, from a StepResult and a finished SequenceState; its name is the end.
_OF_ITERATION = (
    *("start", "end", "busy"),
    *("batch.num_prefills", "batch.num_prefill_tokens", "batch.num_decode_tokens"),
    *("batch.prefill_kv_tokens", "batch.decode_kv_tokens", "batch.prefill_query_key_pairs"),
    *("batch.num_emits", "batch.num_draft_tokens", "batch.num_accepted_tokens"),
    *(f"batch.queues.{name}" for name in Queues._fields),
    *("batch.num_swapped_blocks", "batch.num_swapped_tokens", "batch.prefix_hit_tokens"),
    *("num_padding_tokens", "host_time", "is_replayed", "launching_time"),
    *("batch.instance", "batch.layer_share"),
)
_OF_REQUEST = (
    *("request.request_id", "request.arrival_time"),
    *("first_scheduled_time", "first_token_time", "finish_time"),
    *("request.prompt_len", "request.output_len", "request.priority"),
    *("num_preemptions", "prefix_hit_tokens", "bubble_time", "output_token_ids", "token_times"),
)
ITERATION_COLUMNS = tuple(path.rpartition(".")[-1] for path in _OF_ITERATION)
REQUEST_COLUMNS = tuple(path.rpartition(".")[-1] for path in _OF_REQUEST)
_iteration_row = attrgetter(*_OF_ITERATION)
_request_row = attrgetter(*_OF_REQUEST)


class Ledger:
    """Records a run; `on_iteration` hears the tokens that each settles, cached ones too."""

    def __init__(self) -> None:
        self.on_iteration: Callable[[int], None] = lambda num_tokens: None
        self._iterations: list[tuple[float, ...]] = []
        self._requests: list[tuple[object, ...]] = []
        # Start and end by stage, flat: a run of ten thousand requests has millions.
        self._spans = array("d")
        self._num_stages = 1
        self._bubbles: list[Bubble] = []

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        assert result.batch.queues is not None, "the scheduler has booked the batch"
        self._iterations.append(_iteration_row(result))
        spans = result.stages or [(result.start, result.end)]
        self._num_stages = len(spans)
        for span in spans:
            self._spans.extend(span)
        if result.bubbles:
            self._bubbles.extend(result.bubbles)
            seconds = sum(bubble.end - bubble.start for bubble in result.bubbles)
            for chunk in result.batch.chunks:
                chunk.sequence.bubble_time += seconds
        self._requests.extend(map(_request_row, finished))
        self.on_iteration(result.batch.num_tokens + result.batch.prefix_hit_tokens)

    @property
    def replayed_share(self) -> float:
        """Of the iterations, those that ran as recorded CUDA graphs; 0 without any."""
        place = ITERATION_COLUMNS.index("is_replayed")
        return sum(row[place] for row in self._iterations) / max(1, len(self._iterations))

    def iterations(self) -> pd.DataFrame:
        """One row per iteration, as collected; queue lengths are those after it, of its `instance`.
        One engine has no such column, a run without drafts none of these, and none has
        `layer_share` where all pass all layers.
        """
        table = pd.DataFrame(self._iterations, columns=list(ITERATION_COLUMNS))
        counts = table.groupby("instance").num_preemptions  # from 0
        table["num_preemptions"] -= counts.shift(fill_value=0)
        if not table.instance.any():
            del table["instance"]
        if (table.layer_share == 1).all():
            del table["layer_share"]
        if not table.num_draft_tokens.any():
            table = table.drop(columns=["num_draft_tokens", "num_accepted_tokens"])
        table.insert(0, "iteration", range(len(table)))
        return table

    def requests(self) -> pd.DataFrame:
        """One row per finished request, by request id."""
        table = pd.DataFrame(self._requests, columns=list(REQUEST_COLUMNS))
        return table.sort_values("request_id", ignore_index=True)

    def stages(self) -> pd.DataFrame:
        """Start and end by iteration and stage; a device that is no pipeline is one stage, 0."""
        spans = np.array(self._spans).reshape(-1, 2)
        iteration, stage = np.divmod(np.arange(len(spans)), self._num_stages)
        table = pd.DataFrame(spans, columns=["start", "end"])
        return table.assign(iteration=iteration, stage=stage)[["iteration", "stage", *table]]

    def bubbles(self) -> pd.DataFrame:
        """One row per idle gap of a pipeline's stage between iteration - 1 and `iteration`."""
        return pd.DataFrame(self._bubbles, columns=list(Bubble._fields))

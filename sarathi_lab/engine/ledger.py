"""The record of a run: a row per iteration and per request, counts without costs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.engine.executor import Bubble, StepResult
from sarathi_lab.engine.request import Queues, SequenceState
from sarathi_lab.model.layers import WindowSums

# Attributes of a StepResult and of a finished SequenceState; their last parts name the columns.
_OF_ITERATION = (
    *("start", "end", "busy"),
    *("batch.num_prefills", "batch.num_prefill_tokens", "batch.num_decode_tokens"),
    *("batch.prefill_kv_tokens", "batch.decode_kv_tokens", "batch.prefill_query_key_pairs"),
    *("batch.num_emits", "batch.num_draft_tokens", "batch.num_accepted_tokens"),
    *(f"batch.queues.{name}" for name in Queues._fields),
    "batch.prefix_hit_tokens",
    *("num_padding_tokens", "host_time", "is_replayed", "graph_use", "launching_time"),
    "batch.instance",
)
_OF_REQUEST = (
    *("request.request_id", "request.arrival_time"),
    *("first_scheduled_time", "first_token_time", "finish_time"),
    *("request.prompt_len", "request.output_len", "request.priority"),
    *("num_preemptions", "prefix_hit_tokens", "bubble_time", "output_token_ids", "token_times"),
)
ITERATION_COLUMNS = tuple(path.rpartition(".")[-1] for path in _OF_ITERATION)
REQUEST_COLUMNS = tuple(path.rpartition(".")[-1] for path in _OF_REQUEST)
Row = tuple[Any, ...]  # numbers of many types, of a request with lists of its tokens
_iteration_row = attrgetter(*_OF_ITERATION)
_request_row = attrgetter(*_OF_REQUEST)


class Ledger:
    """Records a run; `on_iteration` is called with the tokens of each, cached ones included."""

    def __init__(self) -> None:
        self.on_iteration: Callable[[int], None] = lambda num_tokens: None
        self._iterations: list[Row] = []
        self._windows: list[WindowSums] = []  # of each iteration, if layers have a window
        self._requests: list[Row] = []
        # Start and end by stage, flat, as there may be millions.
        self._spans = array("d")
        self.num_stages = 1  # of a pipeline, whose times were measured
        self._bubbles: list[Bubble] = []

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        assert result.batch.queues is not None, "set by Scheduler.advance"
        self._iterations.append(_iteration_row(result))
        if result.batch.window is not None:
            self._windows.append(result.batch.window_sums())
        spans = result.stages or [(result.start, result.end)]
        self.num_stages = len(spans)
        for span in spans:
            self._spans.extend(span)
        if result.bubbles:
            self._bubbles.extend(result.bubbles)
            idle = [bubble.end - bubble.start for bubble in result.bubbles]
            seconds = sum(idle)
            for chunk in result.batch.chunks:
                chunk.sequence.bubble_time += seconds
        self._requests.extend(map(_request_row, finished))
        num_tokens = result.batch.num_tokens + result.batch.prefix_hit_tokens
        self.on_iteration(num_tokens)

    @property
    def replayed_share(self) -> float:
        """The share of iterations that ran as recorded CUDA graphs; 0 without any."""
        if not self._iterations:
            return 0.0
        column = ITERATION_COLUMNS.index("is_replayed")
        is_replayed = [row[column] for row in self._iterations]
        return sum(is_replayed) / len(is_replayed)

    def columns_of_iterations(self, *names: str) -> pd.DataFrame:
        """Return some of `ITERATION_COLUMNS`, in a tenth of the time of all of them."""
        columns = {}
        for name in names:
            position = ITERATION_COLUMNS.index(name)
            columns[name] = [row[position] for row in self._iterations]
        return pd.DataFrame(columns)

    def iterations(self) -> pd.DataFrame:
        """Return a row per iteration, as collected; queue lengths are those after it, of its
        `instance`. Columns of clusters, drafts, CUDA graphs and windows are in runs with these
        only.
        """
        table = pd.DataFrame(self._iterations, columns=list(ITERATION_COLUMNS))
        # Schedulers count preemptions from the start of the run; a row has its iteration's.
        counts = table.groupby("instance").num_preemptions
        table["num_preemptions"] -= counts.shift(fill_value=0)
        if not table.instance.any():
            del table["instance"]
        if (table.graph_use == "none").all():
            del table["graph_use"]
        if not table.num_draft_tokens.any():
            table = table.drop(columns=["num_draft_tokens", "num_accepted_tokens"])
        table.insert(0, "iteration", range(len(table)))
        if self._windows:
            sums = pd.DataFrame(self._windows, columns=list(WindowSums._fields))
            return pd.concat([table, sums], axis=1)
        return table

    def requests(self) -> pd.DataFrame:
        """Return a row per finished request, by request id."""
        table = pd.DataFrame(self._requests, columns=list(REQUEST_COLUMNS))
        return table.sort_values("request_id", ignore_index=True)

    def stages(self) -> pd.DataFrame:
        """Return start and end by iteration and stage; without a pipeline there is one stage, 0."""
        spans = np.array(self._spans).reshape(-1, 2)
        numbers = np.arange(len(spans))
        iteration, stage = np.divmod(numbers, self.num_stages)
        table = pd.DataFrame({"iteration": iteration, "stage": stage})
        return table.assign(start=spans[:, 0], end=spans[:, 1])

    def bubbles(self) -> pd.DataFrame:
        """Return a row per idle gap of a pipeline's stage between iteration - 1 and `iteration`."""
        return pd.DataFrame(self._bubbles, columns=list(Bubble._fields))

"""The steady part of a run whose requests all wait from the start: as many begin as end."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.results.table import Requests
from sarathi_lab.results.window import ADMISSION, RunPart

LEAST_DRIFT = 0.01  # share of a batch's time; edges of the part differ by less
BATCHES_OF_STEADY_RUN = 3  # at least: one fills, one counts, one drains
NEARLY_FULL = 0.9  # share of a cache, from which it holds few sequences more


def steady_part(requests: Requests, num_slots: int) -> RunPart | None:
    """Return the part between filling and draining; None where a run is too short for one.

    It begins when the first request is admitted to a place that another has left, and ends whole
    batches later, when enough requests still wait to take the places of all that were admitted in
    it. A policy that admits batches (request-level batching, Orca) repeats itself with each.

    Args:
        requests: The ledger's table, with all requests of the run.
        num_slots: The most sequences that the engines hold at a time.
    """
    size = batch_in_flight(requests, num_slots)
    num_batches = len(requests) // size
    num_counted = num_batches - 2  # one fills, one drains
    if num_counted < 1:
        return None
    admitted = _ascending(requests, ADMISSION)
    start = admitted[size]
    # A batch's time ends where the next one begins.
    first_of_draining = size + size * num_counted
    end = admitted[first_of_draining]
    if end <= start:  # all were admitted at once
        return None
    return RunPart(
        start=float(start),
        end=float(end),
        column=ADMISSION,
    )


def batch_in_flight(requests: Requests, num_slots: int) -> int:
    """Return how many requests were in flight at once at the most.

    Args:
        requests: The ledger's table, with all requests of the run.
        num_slots: The most sequences that the engines hold at a time.

    Returns:
        `num_slots`, or fewer where the cache or the policy holds fewer.
    """
    admitted = _ascending(requests, ADMISSION)
    finished = _ascending(requests, "finish_time")
    num_admitted = np.arange(1, len(admitted) + 1)
    num_finished = np.searchsorted(finished, admitted, side="right")
    in_flight = num_admitted - num_finished
    most_in_flight = int(in_flight.max())
    # A device that is scheduled ahead admits the next request while its predecessor ends.
    return min(most_in_flight, num_slots)


def sequences_in_cache(
    blocks_used: pd.Series, requests: Requests, engine: EngineConfig
) -> int | None:
    """Return the sequences of a batch (the setting `batch`) that the cache has room for where all
    that the engines may hold are in use, and so keep requests waiting; None where they are not, or
    the cache is nearly full.

    Args:
        blocks_used: Blocks in use after each iteration, of an instance.
        requests: The ledger's table, with all requests of the run.
        engine: What ran, with the cache of an instance.
    """
    most_used = max(1, int(blocks_used.max()))
    num_in_flight = batch_in_flight(requests, engine.num_slots)
    is_in_use = num_in_flight == engine.num_slots
    is_nearly_full = most_used > NEARLY_FULL * engine.num_blocks
    if not is_in_use or is_nearly_full:
        return None
    return engine.batch_size * engine.num_blocks // most_used


def requests_for_steady_part(requests: Requests, num_slots: int) -> int:
    """Return the fewest requests that have a steady part: a batch to fill, one that counts, and one
    to drain.

    Args:
        requests: The ledger's table of a run that is too short for one.
        num_slots: The most sequences that the engines hold at a time. A batch is that many, or
            fewer where the run shows that the cache or the policy holds fewer.
    """
    size = batch_in_flight(requests, num_slots)
    if size == len(requests):
        # All requests were in flight together, so that the run does not show how many fit.
        size = num_slots
    return BATCHES_OF_STEADY_RUN * size


def drift(
    requests: Requests,
    part: RunPart,
    num_slots: int,
) -> float:
    """Return the relative change of a batch's time from the earlier to the later half of a part.

    Args:
        requests: The ledger's table, with all requests of the run.
        part: Its steady part.
        num_slots: The most sequences that the engines hold at a time.

    Returns:
        Seconds of the later batches / those of the earlier ones - 1: above 0 where the later took
        longer, below 0 where they took less time. 0 for requests that differ in length, whose
        batches differ anyway, and for a single batch.
    """
    lengths = requests[["prompt_len", "output_len"]]
    num_kinds = len(lengths.drop_duplicates())
    if num_kinds > 1:
        return 0.0
    admitted = _ascending(requests, ADMISSION)
    size = batch_in_flight(requests, num_slots)
    has_begun = admitted >= part.start
    # Also the request at the end: its admission ends the last batch.
    is_counted = has_begun & (admitted <= part.end)
    starts_of_requests = admitted[is_counted]
    starts_of_batches = starts_of_requests[::size]
    seconds = np.diff(starts_of_batches)
    half = len(seconds) // 2
    earlier = float(seconds[:half].sum())
    if not earlier:
        return 0.0
    later = float(seconds[-half:].sum())
    return later / earlier - 1


def _ascending(requests: Requests, column: str) -> np.ndarray:
    """Return a time of each request, ascending [R]."""
    times = requests[column].to_numpy(dtype=float)
    return np.sort(times)

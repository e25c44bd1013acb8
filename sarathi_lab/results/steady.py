"""The steady part of a run whose requests all wait from the start: as many begin as end."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sarathi_lab.results.window import ADMISSION, Part

LEAST_DRIFT = 0.01  # share of a batch's time; edges of the part differ by less


def steady_part(requests: pd.DataFrame, num_slots: int) -> Part | None:
    """Return the part between filling and draining; None where a run is too short for one.

    It begins when the first request is admitted to a place that another has left, and ends whole
    batches later, when enough requests still wait to take the places of all that were admitted in
    it. A policy that admits batches (request-level batching, Orca) repeats itself with each.

    Args:
        requests: The ledger's table, with all requests of the run.
        num_slots: The most sequences that the engines hold at a time.
    """
    size = batch_in_flight(requests, num_slots)
    admitted = _admissions(requests)
    num_batches = len(admitted) // size - 2
    if num_batches < 1:
        return None
    start, end = admitted[size], admitted[size * (num_batches + 1)]
    return Part(float(start), float(end), ADMISSION) if start < end else None


def batch_in_flight(requests: pd.DataFrame, num_slots: int) -> int:
    """Return how many requests were in flight at once at the most: `num_slots`, or fewer where the
    cache or the policy holds fewer.
    """
    admitted = _admissions(requests)
    finished = np.sort(requests.finish_time.to_numpy(dtype=float))
    num_finished = np.searchsorted(finished, admitted, side="right")
    in_flight = int((np.arange(1, len(admitted) + 1) - num_finished).max())
    # A device that is scheduled ahead admits the next request while its predecessor ends.
    return min(in_flight, num_slots)


def requests_for_steady_part(requests: pd.DataFrame, num_slots: int) -> int:
    """Return the fewest requests that have a steady part: a batch to fill, one that counts, and one
    to drain.
    """
    size = batch_in_flight(requests, num_slots)
    had_no_successor = size == len(requests)
    return 3 * (num_slots if had_no_successor else size)


def drift(requests: pd.DataFrame, part: Part, num_slots: int) -> float:
    """Return by which share the later batches of a steady part took longer than the earlier ones.

    0 for requests that differ in length, whose batches differ anyway, and for a single batch.
    """
    lengths = requests[["prompt_len", "output_len"]].drop_duplicates()
    admitted = _admissions(requests)
    size = batch_in_flight(requests, num_slots)
    is_counted = (admitted >= part.start) & (admitted <= part.end)
    starts_of_batches = admitted[is_counted][::size]
    seconds = np.diff(starts_of_batches)
    half = len(seconds) // 2
    if len(lengths) > 1 or not seconds[:half].any():
        return 0.0
    return float(seconds[-half:].sum() / seconds[:half].sum() - 1)


def _admissions(requests: pd.DataFrame) -> np.ndarray:
    """Return when each request was first put into a batch, ascending [R]."""
    return np.sort(requests.first_scheduled_time.to_numpy(dtype=float))

"""What a file records of requests: one table for traces of services and results of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

FINISHED = "finished"  # status of a request with an answer
FAILED = "failed"
# Columns that a reader may leave out, with what stands for "not recorded".
OPTIONAL: Mapping[str, str | float] = {
    "arrival": np.nan,
    "cached_len": 0,
    "priority": 0,
    "session": "",
    "turn": 0,
    "delay": np.nan,
    "first_token": np.nan,
    "latency": np.nan,
    "status": FINISHED,
}
# Columns with a tuple each.
OPTIONAL_TUPLES = ("gaps", "block_ids")
LENGTHS = ("prompt_len", "output_len")
DAMAGED = "damaged"
MOST_TOKENS = 2**31  # of a request, beyond which a number is no length
SHOWN_VALUE = 40  # characters of a value in a message


@dataclass(frozen=True)
class Recording:
    """Requests of a file, by their arrival, and what of the file is not among them.

    Attributes:
        requests: A row each.

            - `arrival`: seconds since the first one; NaN where no time is recorded.
            - `prompt_len`, `output_len`: tokens.
            - `cached_len`: tokens of the prompt that the server took from its cache.
            - `priority`: lower ones first, with queue_order=priority.
            - `session`, `turn`: the conversation ("": none), and which of its requests, from 0.
            - `delay`: seconds between the answer of the turn before and this request.
            - `first_token`, `latency`: seconds after the request was sent.
            - `gaps`: seconds between its tokens, a tuple.
            - `block_ids`: what identifies each block of its prompt, a tuple.
            - `status`: `FINISHED`, in all rows.
        left_out: Numbers of other requests by the reason, such as "failed" or `DAMAGED`.
        example: Where the first damaged one is and what is wrong with it.
    """

    requests: pd.DataFrame
    left_out: Mapping[str, int]
    example: str = ""

    def describe_left_out(self) -> str:
        """Describe what is not replayed, such as "39 of 40 requests replayed; 1 failed"; "" if
        nothing is left out.
        """
        counts = []
        num_left_out = 0
        for reason, number in self.left_out.items():
            if number:
                counts.append(f"{number} {reason}")
                num_left_out += number
        if not counts:
            return ""
        num_used = len(self.requests)
        num_all = num_used + num_left_out
        line = f"{num_used} of {num_all} requests replayed; {', '.join(counts)}"
        if self.example:
            line += f" ({self.example})"
        return line


def completed(table: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of a `Recording` that a reader has left out."""
    table = table.copy()
    for name, value in OPTIONAL.items():
        if name not in table:
            table[name] = value
    for name in OPTIONAL_TUPLES:
        if name not in table:
            table[name] = [()] * len(table)
    return table


class RowCheck:
    """Which rows of a table have values that can be used, and where the first other one is.

    Attributes:
        is_usable: A truth value for each row.
        example: The first value that can't be used, such as "line 3: ContextTokens=x".
    """

    def __init__(self, index: pd.Index, unit: str) -> None:
        """Take all rows of `index` for usable; it counts `unit`, such as "line"."""
        self.is_usable = pd.Series(True, index=index)
        self.example = ""
        self._unit = unit

    def numbers(self, column: pd.Series, least: float, *, is_whole: bool = False) -> pd.Series:
        """Read finite numbers from `least` on; other values become NaN, and their rows unusable."""
        # pandas would take true for 1.
        is_no_boolean = column.map(lambda value: not isinstance(value, bool))
        candidates = column.where(is_no_boolean)
        numbers = pd.to_numeric(candidates, errors="coerce")
        numbers = numbers.astype(float)
        is_valid = numbers >= least
        is_valid &= numbers < np.inf
        if is_whole:
            is_valid &= numbers % 1 == 0
            is_valid &= numbers <= MOST_TOKENS
        self.require(column, is_valid)
        return numbers.where(is_valid)

    def require(self, column: pd.Series, is_valid: pd.Series) -> None:
        """Take rows for unusable in which a column's value is not valid."""
        is_first_fault = self.is_usable & ~is_valid
        wrong = column.index[is_first_fault]
        if len(wrong) and not self.example:
            row = wrong[0]
            name = str(column.name)
            fault = _fault(name, column[row])
            self.example = f"{self._unit} {row}: {fault}"
        self.is_usable &= is_valid


def _fault(column: str, value: object) -> str:
    """Describe a value that can't be used, such as "ContextTokens=x"."""
    is_nan = isinstance(value, float) and np.isnan(value)
    if value is None or is_nan:
        return f"{column} is missing"
    shown = str(value)[:SHOWN_VALUE]
    return f"{column}={shown}"


def recorded(table: pd.DataFrame, check: RowCheck, damaged: Sequence[str] = ()) -> Recording:
    """Make a recording of the requests that finished and can be used, by their arrival.

    Args:
        table: A row for each request of a file.
        check: Which rows can be used.
        damaged: Parts of the file that are no request, described.

    Returns:
        The requests, the first of which arrives at 0, and how many others there were.
    """
    requests = completed(table)
    is_finished = requests.status == FINISHED
    left_out = Counter(requests.status[~is_finished])
    is_used = is_finished & check.is_usable
    is_damaged = is_finished & ~check.is_usable
    num_damaged = int(is_damaged.sum())
    num_damaged += len(damaged)
    if num_damaged:
        left_out[DAMAGED] = num_damaged
    usable = requests[is_used].copy()
    for name in LENGTHS:
        usable[name] = usable[name].astype("int64")
    if usable.arrival.notna().all():
        # Stable: turns that have the time of an earlier one follow it in the file's order.
        usable = usable.sort_values("arrival", kind="stable")
        usable["arrival"] -= usable.arrival.min()
    example = check.example
    if damaged and not example:
        example = damaged[0]
    usable = usable.reset_index(drop=True)
    return Recording(usable, dict(left_out), example)

"""Which part of a run its metrics count, without warm-up and drain."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import RunError, UserError, require_number
from sarathi_lab.workload import LoadedRequests

ROUNDING = 1e-9  # 29 % of 100 are 29, not 28.999999999999996
FIX = "use seconds such as 30, a share of the requests such as 10%, or null"


class Cut(NamedTuple):
    """What is cut off at one end: seconds, or a share of the requests by arrival."""

    amount: float
    is_share: bool

    def requests(self, total: int) -> int:
        """How many of `total` requests it cuts off, if it is a share of them."""
        return math.floor(self.amount * total + ROUNDING) if self.is_share else 0


@dataclass(frozen=True)
class Window:
    """What is left of a run without its first `warmup` and its last `cooldown`.

    Either is seconds, or a share of the requests as text ("10%"); None cuts nothing off. In
    symbols: METRICS.md.
    """

    warmup: float | str | None = None
    cooldown: float | str | None = None

    def __post_init__(self) -> None:
        start, end = (self._cut(name) for name in ("warmup", "cooldown"))
        if start.is_share and end.is_share and start.amount + end.amount >= 1:
            raise UserError(
                f"window.warmup={self.warmup} and window.cooldown={self.cooldown} leave "
                "nothing; lower one"
            )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.warmup is None and self.cooldown is None

    def check(self, load: LoadedRequests) -> None:
        """Raise UserError if no request arrives after the warm-up."""
        if self.is_whole or load.num_users is not None:
            return
        if not load.has_times:
            raise UserError(
                f"window.warmup={self.warmup}, window.cooldown={self.cooldown}: all requests "
                "arrive at once, so there is no steady part; drop them, or add "
                "workload.arrivals=poisson and workload.rate"
            )
        start, last = self._cut("warmup"), max(request.arrival_time for request in load.requests)
        if not start.is_share and start.amount > last:
            raise UserError(
                f"window.warmup={self.warmup} is longer than the {last:.1f} s in which requests "
                "arrive; lower it or raise workload.num_requests"
            )

    def of(self, iterations: pd.DataFrame, requests: pd.DataFrame) -> Part:
        """The part that counts, from the ledger's tables. Raises RunError if nothing is left."""
        duration = float(iterations.end.max())
        arrivals = np.sort(requests.arrival_time.to_numpy(dtype=float))
        start, end = self._cut("warmup"), self._cut("cooldown")
        num_late = end.requests(len(arrivals))
        first = arrivals[start.requests(len(arrivals))] if start.is_share else start.amount
        last = duration if end.is_share else duration - end.amount
        part = Part(float(first), float(arrivals[-num_late]) if num_late else last)
        if part.requests(requests).empty or part.iterations(iterations).empty:
            raise RunError(
                f"window.warmup={self.warmup} and window.cooldown={self.cooldown} leave nothing "
                f"of a run of {duration:.1f} s; lower them or raise workload.num_requests"
            )
        return part

    def _cut(self, name: str) -> Cut:
        value = getattr(self, name)
        if value is None:
            return Cut(0.0, False)
        if not isinstance(value, str):
            return Cut(require_number(f"window.{name}", value, minimum=0, fix=FIX), False)
        is_share = re.fullmatch(r"\d+(\.\d+)?\s*%", value)
        if not is_share or (share := float(value.rstrip("% ")) / 100) >= 1:
            raise UserError(
                f"window.{name}={value} is neither seconds nor a share below 100%; {FIX}"
            )
        return Cut(share, True)


class Part(NamedTuple):
    """A part of a run, in seconds."""

    start: float
    end: float

    def requests(self, requests: pd.DataFrame) -> pd.DataFrame:
        """Those that arrived in it, whenever they finished."""
        return requests[(requests.arrival_time >= self.start) & (requests.arrival_time < self.end)]

    def iterations(self, iterations: pd.DataFrame) -> pd.DataFrame:
        """Those that began and ended in it."""
        return iterations[(iterations.start >= self.start) & (iterations.end <= self.end)]

    def bubbles(self, bubbles: pd.DataFrame) -> pd.DataFrame:
        """The idle gaps that began and ended in it."""
        return bubbles[(bubbles.start >= self.start) & (bubbles.end <= self.end)]

    def throughput(self, requests: pd.DataFrame) -> dict[str, float]:
        """Counts and rates (METRICS.md) of what came out in this part, of all `requests`."""
        times = [np.asarray(own, dtype=float) for own in requests.token_times]
        num_output = float(self._holds(np.concatenate(times)).sum())
        started = self._holds(requests.first_token_time.to_numpy())
        num_prompt = float(requests.prompt_len[started].sum())
        num_finished = float(self._holds(requests.finish_time.to_numpy()).sum())
        seconds = self.end - self.start
        return {
            "window_start": self.start,
            "window_end": self.end,
            "duration": seconds,
            "num_prompt_tokens": num_prompt,
            "num_output_tokens": num_output,
            "throughput": (num_prompt + num_output) / seconds,
            "output_throughput": num_output / seconds,
            "request_throughput": num_finished / seconds,
        }

    def _holds(self, times: np.ndarray) -> np.ndarray:
        return (times >= self.start) & (times <= self.end)

"""How often servers of a known load are called overloaded (docs/reference/metrics.md).

    python tools/overload_test.py [RUNS]

A simulated server shares itself among its requests: with `n` of them in service, each of which
needs a second alone, it takes `BASE + n` seconds for what it does in one second. So answers end one
by one, or, where it works in iterations of which each gives a token to all, many at once. Printed
is the share of RUNS runs (150) that `load_trend` calls overloaded and long enough to tell.
"""

from __future__ import annotations

import heapq
import math
import sys
from itertools import product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.results.load_trend import load_trend

Floats = NDArray[np.float64]
LOADS = (0.9, 1.2, 1.5)  # of what the server takes
NUM_REQUESTS = (1000, 1440)
BASES = (20.0, 40.0)  # seconds of an iteration that do not depend on the requests
TOKENS = 20  # of an answer in the mean, where there are iterations


def ends_alone(arrivals: Floats, base: float, draw: np.random.Generator) -> Floats:
    """Return when requests end that share a server continuously."""
    sizes = draw.exponential(1.0, len(arrivals))
    ends = np.empty(len(arrivals))
    in_service: list[tuple[float, int]] = []
    work = 0.0  # seconds of its size that a request in service has had since the beginning
    now = 0.0
    number = 0
    while number < len(arrivals) or in_service:
        speed = 1 / (base + len(in_service))
        next_arrival = arrivals[number] if number < len(arrivals) else math.inf
        next_end = math.inf
        if in_service:
            next_end = now + (in_service[0][0] - work) / speed
        if next_arrival <= next_end:
            work += (next_arrival - now) * speed
            now = next_arrival
            heapq.heappush(in_service, (work + sizes[number], number))
            number += 1
        else:
            work, ended = heapq.heappop(in_service)
            now = next_end
            ends[ended] = now
    return ends


def ends_together(arrivals: Floats, base: float, draw: np.random.Generator) -> Floats:
    """Return when requests end that get a token in each iteration."""
    num_tokens = draw.geometric(1 / TOKENS, len(arrivals))
    ends = np.empty(len(arrivals))
    in_service: list[tuple[int, int]] = []
    iteration = 0
    now = 0.0
    number = 0
    while number < len(arrivals) or in_service:
        if not in_service:
            now = max(now, arrivals[number])
        while number < len(arrivals) and arrivals[number] <= now:
            heapq.heappush(in_service, (iteration + int(num_tokens[number]), number))
            number += 1
        iteration += 1
        now += (base + len(in_service)) / TOKENS
        while in_service and in_service[0][0] <= iteration:
            _, ended = heapq.heappop(in_service)
            ends[ended] = now
    return ends


def share_called(kind: str, load: float, num_requests: int, base: float, num_runs: int) -> float:
    """Return the share of runs that are called overloaded."""
    num_called = 0.0
    for seed in range(num_runs):
        draw = np.random.default_rng(seed)
        # Requests that need a second alone are served at most one a second.
        arrivals = np.cumsum(draw.exponential(1 / load, num_requests))
        ends = KINDS[kind](arrivals, base, draw)
        requests = pd.DataFrame({"arrival_time": arrivals, "finish_time": ends})
        requests["first_scheduled_time"] = arrivals
        trend = load_trend(requests)
        assert trend is not None, "the run is long enough"
        num_called += trend.metrics()["is_overloaded"]
    return num_called / num_runs


KINDS = {"alone": ends_alone, "together": ends_together}

if __name__ == "__main__":
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    for kind, load in product(KINDS, LOADS):
        shares = [
            share_called(kind, load, num_requests, base, num_runs)
            for num_requests, base in product(NUM_REQUESTS, BASES)
        ]
        print(f"ends {kind}, load {load}: {min(shares):.0%} to {max(shares):.0%}", flush=True)

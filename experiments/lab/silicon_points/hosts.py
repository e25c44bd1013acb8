"""What a server's host adds to an iteration, fitted to what a token takes beyond the device.

    python experiments/lab/silicon_points/hosts.py POINTS.csv    # four minutes

Serves the 16-bit points with a host that takes no time, and prints milliseconds an iteration and
microseconds a sequence, fitted to prompts of 1,024 tokens, with the errors of a token's time there
and on all longer prompts, before and after. Then the same of a host that works while the device
runs (TensorRT-LLM's), fitted to the time of a whole answer, which hardly depends on who rides with
whom; held out is a second model as well.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from answers import answer
from simulate import Point, chosen, served

from sarathi_lab import Request
from sarathi_lab.engine.arrivals import ClosedLoop
from sarathi_lab.executor.simulated.backend import SimulatedBackend

FITTED_PROMPT = 1024  # tokens
LEAST = 10  # points that are enough to fit two constants to
ROUNDS = 3  # answers of each user that count, after a first one
# Whether users' first answers end together, so that all prompts come at once again and again: as
# times to the first token tell of SGLang's points (a prompt's own time times the users), not of
# the others'.
TOGETHER = ("sglang",)
SEED = 0
OVERLAPPING = "trtllm"
# Searched costs of an iteration and of each of its sequences (ms).
ITERATIONS = np.arange(0, 9, 0.1)
SEQUENCES = np.arange(0, 0.16, 0.004)
NO_HOST = (0.0, 0.0)


class Free(Point):
    """A point whose host takes no time."""

    @property
    def device(self) -> SimulatedBackend:
        host = replace(self.host, iteration=0.0, sequence=0.0)
        host = replace(host, overlaps=False, visible=0.0, visible_sequence=0.0)
        return replace(super().device, host=host)


def token_time(point: Point) -> float:
    """Mean milliseconds of a token, with a host that takes none. Where users are not together they
    come apart by a first answer of any length.
    """
    num_users = point.concurrency
    first_lengths = np.random.default_rng(SEED).integers(1, point.osl + 1, num_users)
    if point.backend in TOGETHER:
        first_lengths[:] = point.osl
    later_lengths = [point.osl] * (ROUNDS * num_users)
    requests = []
    for request_id, length in enumerate([*first_lengths.tolist(), *later_lengths]):
        requests.append(Request(request_id, 0.0, point.isl, length))
    device = Free(**vars(point)).device
    waits = served(point, device, ClosedLoop(requests, num_users), 1 + ROUNDS)
    arrivals, _, token_seconds = waits.T
    return 1e3 * float(token_seconds[arrivals > 0].mean())


def fitted(rows: pd.DataFrame) -> dict[str, float]:
    """The two costs, by least squares of relative errors, and mean absolute errors."""
    is_fitted = (rows.isl == FITTED_PROMPT).to_numpy()
    real = rows.real_tpot.to_numpy()
    # A host's milliseconds of a token, over the measured ones: an iteration's and its sequences'.
    features = np.stack([np.ones(len(rows)), rows.concurrency], axis=1) / real[:, None]
    missing = 1 - rows.token_time.to_numpy() / real
    costs, *_ = np.linalg.lstsq(features[is_fitted], missing[is_fitted], rcond=None)
    still_missing = missing - features @ costs
    figures = {"iteration_ms": costs[0], "sequence_us": 1e3 * costs[1]}
    for name, is_counted in (("fitted", is_fitted), ("held_out", ~is_fitted)):
        figures[f"{name}_points"] = int(is_counted.sum())
        figures[f"{name}_before"] = np.abs(missing[is_counted]).mean()
        figures[f"{name}_after"] = np.abs(still_missing[is_counted]).mean()
    return figures


def overlapped(rows: pd.DataFrame, iteration: float, sequence: float) -> pd.Series:
    """Milliseconds of whole answers where the longer of device and host counts."""
    step = np.maximum(rows.step, iteration + sequence * rows.concurrency)
    return (rows.osl - 1) * step + rows.concurrency * rows.prompt


def overlapping(rows: pd.DataFrame) -> pd.DataFrame:
    """Print the two costs that fit one model's short prompts best, and mean errors by model."""
    is_fitted = (rows.isl == FITTED_PROMPT) & (rows.weights == "auto")
    rows_to_fit = rows[is_fitted]

    def squares(costs: tuple[float, float]) -> tuple[float, tuple[float, float]]:
        errors = overlapped(rows_to_fit, *costs) / rows_to_fit.real - 1
        return float(np.square(errors).sum()), costs  # of equal sums the lowest costs

    costs = min(product(ITERATIONS, SEQUENCES), key=squares)
    iteration, sequence = costs
    print(f"{iteration:.1f} ms an iteration, {1e3 * sequence:.0f} us a sequence, overlapping:")
    errors = {}
    for name, costs_of_host in (("before", NO_HOST), ("after", costs)):
        errors[name] = (overlapped(rows, *costs_of_host) / rows.real - 1).abs()
    by = [rows.model, is_fitted.rename("fitted")]
    return pd.DataFrame(errors).groupby(by).agg(["size", "mean"])


def main() -> None:
    with Path(sys.argv[1]).open(newline="") as file:
        points, _ = chosen(csv.DictReader(file))
    answers = []
    token_times = []
    for point in points:
        if point.backend != OVERLAPPING and point.weights == "auto":
            token_times.append(vars(point) | {"token_time": token_time(point)})
        elif point.backend == OVERLAPPING and point.gpu == "h100":
            answers.append(answer(Free(**vars(point))))
    rows = pd.DataFrame(answers)
    print(overlapping(rows[rows.fits]).to_string(float_format="{:.3f}".format))
    figures = {}
    for server, points_of_server in pd.DataFrame(token_times).groupby(["backend", "version"]):
        num_fitted = (points_of_server.isl == FITTED_PROMPT).sum()
        if num_fitted >= LEAST:
            figures[server] = fitted(points_of_server)
    print(pd.DataFrame(figures).T.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()

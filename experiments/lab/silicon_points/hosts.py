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
ITERATIONS, SEQUENCES = np.arange(0, 9, 0.1), np.arange(0, 0.16, 0.004)  # ms, searched


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
    users, output = point.concurrency, point.osl
    first = np.random.default_rng(SEED).integers(1, output + 1, users)
    if point.backend in TOGETHER:
        first[:] = output
    lengths = [*first.tolist(), *[output] * (ROUNDS * users)]
    requests = [Request(i, 0.0, point.isl, length) for i, length in enumerate(lengths)]
    waits = served(point, Free(**vars(point)).device, ClosedLoop(requests, users), 1 + ROUNDS)
    return 1e3 * float(waits[waits[:, 0] > 0, 2].mean())


def fitted(rows: pd.DataFrame) -> dict[str, float]:
    """The two costs, by least squares of relative errors, and mean absolute errors."""
    is_fitted = (rows.isl == FITTED_PROMPT).to_numpy()
    real = rows.real_tpot.to_numpy()
    features = np.stack([np.ones(len(rows)), rows.concurrency], axis=1) / real[:, None]
    before = 1 - rows.token_time.to_numpy() / real
    costs, *_ = np.linalg.lstsq(features[is_fitted], before[is_fitted], rcond=None)
    found = {"iteration_ms": costs[0], "sequence_us": 1e3 * costs[1]}
    for name, part in (("fitted", is_fitted), ("held_out", ~is_fitted)):
        found |= {f"{name}_points": int(part.sum()), f"{name}_before": np.abs(before[part]).mean()}
        found |= {f"{name}_after": np.abs(before - features @ costs)[part].mean()}
    return found


def overlapped(rows: pd.DataFrame, iteration: float, sequence: float) -> pd.Series:
    """Milliseconds of whole answers where the longer of device and host counts."""
    step = np.maximum(rows.step, iteration + sequence * rows.concurrency)
    return (rows.osl - 1) * step + rows.concurrency * rows.prompt


def overlapping(rows: pd.DataFrame) -> pd.DataFrame:
    """Print the two costs that fit one model's short prompts best, and mean errors by model."""
    is_fitted = (rows.isl == FITTED_PROMPT) & (rows.weights == "auto")
    part = rows[is_fitted]
    _, *costs = min(
        (np.square(overlapped(part, one, each) / part.real - 1).sum(), one, each)
        for one, each in product(ITERATIONS, SEQUENCES)
    )
    print(f"{costs[0]:.1f} ms an iteration, {1e3 * costs[1]:.0f} us a sequence, overlapping:")
    errors = {
        name: (overlapped(rows, *pair) / rows.real - 1).abs()
        for name, pair in (("before", (0.0, 0.0)), ("after", costs))
    }
    by = [rows.model, is_fitted.rename("fitted")]
    return pd.DataFrame(errors).groupby(by).agg(["size", "mean"])


def main() -> None:
    with Path(sys.argv[1]).open(newline="") as file:
        known = chosen(csv.DictReader(file))[0]
    ahead = [Free(**vars(p)) for p in known if (p.gpu, p.backend) == ("h100", OVERLAPPING)]
    rows = pd.DataFrame([answer(point) for point in ahead])
    print(overlapping(rows[rows.fits]).to_string(float_format="{:.3f}".format))
    points = [point for point in known if point.weights == "auto" and point.backend != OVERLAPPING]
    table = pd.DataFrame([vars(point) | {"token_time": token_time(point)} for point in points])
    servers = table.groupby(["backend", "version"])
    kept = {
        key: fitted(rows) for key, rows in servers if (rows.isl == FITTED_PROMPT).sum() >= LEAST
    }
    print(pd.DataFrame(kept).T.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()

"""What a server's host adds to an iteration, fitted to what a token takes beyond the device.

    python experiments/lab/silicon_points/hosts.py POINTS.csv    # four minutes

Serves the 16-bit points with a host that takes no time, and prints milliseconds an iteration and
microseconds a sequence, fitted to prompts of 1,024 tokens, with the errors of a token's time there
and on all longer prompts, before and after.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from simulate import Point, chosen, served

from sarathi_lab import Request, load_option
from sarathi_lab.engine.arrivals import ClosedLoop

FITTED_PROMPT = 1024  # tokens
LEAST = 10  # points that are enough to fit two constants to
ROUNDS = 3  # answers of each user that count, after a first one
# Whether users' first answers end together, so that all prompts come at once again and again: as
# times to the first token tell of SGLang's points (a prompt's own time times the users), not of
# the others'.
TOGETHER = ("sglang",)
SEED = 0


def token_time(point: Point) -> float:
    """Mean milliseconds of a token, with a host that takes none. Where users are not together they
    come apart by a first answer of any length.
    """
    free = replace(point.device, host=load_option("host", "none"))  # hardware has no overhead here
    users, output = point.concurrency, point.osl
    first = np.random.default_rng(SEED).integers(1, output + 1, users)
    if point.backend in TOGETHER:
        first[:] = output
    lengths = [*first.tolist(), *[output] * (ROUNDS * users)]
    requests = [Request(i, 0.0, point.isl, length) for i, length in enumerate(lengths)]
    waits = served(point, free, ClosedLoop(requests, users), 1 + ROUNDS)
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


def main() -> None:
    with Path(sys.argv[1]).open(newline="") as file:
        points = [point for point in chosen(csv.DictReader(file))[0] if point.weights == "auto"]
    table = pd.DataFrame([vars(point) | {"token_time": token_time(point)} for point in points])
    servers = table.groupby(["backend", "version"])
    kept = {
        key: fitted(rows) for key, rows in servers if (rows.isl == FITTED_PROMPT).sum() >= LEAST
    }
    print(pd.DataFrame(kept).T.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()

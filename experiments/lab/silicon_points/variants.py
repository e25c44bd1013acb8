"""What brings TensorRT-LLM's and vLLM's whole answers on a B200 near the measured ones?

    python experiments/lab/silicon_points/variants.py POINTS.csv    # ten seconds

Computes answers with one change of the servers after the other, and records the errors and how many
pairs of the two servers are in order, vLLM's variants against TensorRT-LLM as it is simulated.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from answers import answer
from report import FOLDER, GAP
from simulate import Point, chosen

from sarathi_lab.executor.simulated.hardware import Host

SAME = ["tp", "isl", "osl", "concurrency"]
NOW = "as simulated"
HIDDEN = {"visible": 0.0, "visible_sequence": 0.0}
VARIANTS = {  # changes of the host as it is simulated, and the level of the cost model
    ("trtllm", "host beside the device, vLLM's attention, nothing fused"): (
        {"attention_kernel": None, "fused": None},
        "analytic",
    ),
    ("trtllm", "its attention"): ({"fused": None}, "analytic"),
    ("trtllm", "attention and activation convert"): (
        {"fused": ("attention", "activation")},
        "analytic",
    ),
    ("trtllm", NOW): ({}, "analytic"),
    ("vllm", "nothing fused, nothing of the host visible"): (
        {"fused": None, **HIDDEN},
        "analytic",
    ),
    ("vllm", "attention and all-reduce, nothing of the host visible"): (HIDDEN, "analytic"),
    ("vllm", NOW): ({}, "analytic"),
    ("vllm", "by its measured products"): ({}, "profiled"),
}


@dataclass(frozen=True)
class Changed(Point):
    """A point with changes of its host."""

    changes: tuple[tuple[str, object], ...] = ()

    @property
    def host(self) -> Host:
        return replace(super().host, **dict(self.changes))


def main(path: Path) -> None:
    with path.open(newline="") as file:
        points = [point for point in chosen(csv.DictReader(file))[0] if point.gpu == "b200"]
    times = {}
    for key, (changes, level) in VARIANTS.items():
        own = [replace(point, cost_model=level) for point in points if point.backend == key[0]]
        rows = [answer(Changed(**vars(point), changes=tuple(changes.items()))) for point in own]
        table = pd.DataFrame(rows)
        times[key] = table[table.fits].set_index(SAME)[["real", "told", "error"]]
    reference = times["trtllm", NOW]
    found = []
    for (backend, name), table in times.items():
        error = table.error
        row = {"server": backend, "variant": name, "points": len(table)}
        row |= {"error": error.abs().mean(), "bias": error.median()}
        if backend == "vllm":
            pairs = table.merge(reference, on=SAME, suffixes=("", "_other"))
            real, told = pairs.real - pairs.real_other, pairs.told - pairs.told_other
            counts = real.abs() > GAP * np.maximum(pairs.real, pairs.real_other)
            right = counts & (real * told > 0)
            row |= {"pairs": counts.sum(), "right": right.sum()}
        found.append(row)
    kept = pd.DataFrame(found).round(4).astype({"pairs": "Int64", "right": "Int64"})
    print(kept.to_string(index=False))
    kept.to_csv(FOLDER / "variants.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

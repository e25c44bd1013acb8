"""Can one host of TensorRT-LLM serve all of its points?

    python experiments/lab/silicon_points/trtllm_hosts.py POINTS.csv    # half a minute

Computes whole answers with the host as it is simulated and with three others, and records the mean
error and the bias of each GPU and model.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pandas as pd
from answers import answer
from report import FOLDER
from simulate import chosen
from variants import NOW, Changed

BETWEEN = {"iteration": 0.32e-3, "sequence": 29e-6, "overlaps": False}  # seconds
HOSTS = {  # changes of the host as it is simulated
    NOW: {},
    # Fitted to the same points of Llama-3.1-8B, with two constants more.
    "beside the device, and a part that nothing hides": {
        "iteration": 2.1e-3,
        "sequence": 64e-6,
        "visible": 0.5e-3,
        "visible_sequence": 5e-6,
    },
    "between iterations": BETWEEN,
    "between iterations, with vLLM's attention": {**BETWEEN, "attention_kernel": None},
}


def main(path: Path) -> None:
    with path.open(newline="") as file:
        points = [point for point in chosen(csv.DictReader(file))[0] if point.backend == "trtllm"]
    tables = []
    for name, changes in HOSTS.items():
        rows = []
        for point in points:
            changed = Changed(**vars(point), changes=tuple(changes.items()))
            rows.append(answer(changed))
        table = pd.DataFrame(rows)
        fitting = table[table.fits]
        errors = fitting.groupby(["gpu", "model"]).error
        means = errors.agg(
            points="size", error=lambda error: error.abs().mean(), bias="median"
        ).reset_index()
        means.insert(0, "host", name)
        tables.append(means)
    recorded = pd.concat(tables).round(4)
    print(recorded.to_string(index=False))
    recorded.to_csv(FOLDER / "trtllm_hosts.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

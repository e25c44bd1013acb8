"""TensorRT-LLM on a B200 with a host that works while the device runs: does it pass vLLM?

    python experiments/lab/silicon_points/ahead.py POINTS.csv    # half a minute

Serves its points again with `overlaps=true`, records the times, and prints the errors and how many
pairs are in order.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
from report import SERIES, orders, with_errors
from simulate import RESULTS, Point, chosen, simulate

from sarathi_lab.executor.simulated.backend import SimulatedBackend


class Ahead(Point):
    """A point whose host overlaps the device."""

    @property
    def device(self) -> SimulatedBackend:
        device = super().device
        return replace(device, host=replace(device.host, overlaps=True))


def main(path: Path) -> None:
    known = pd.read_csv(RESULTS).query("cost_model == 'analytic' and gpu == 'b200'")
    table = known.set_index("id")
    with path.open(newline="") as file:
        points = [point for point in chosen(csv.DictReader(file))[0] if point.id in table.index]
    for point in points:
        if point.backend == "trtllm":
            row = simulate(Ahead(**vars(point)))
            table.loc[point.id, ["sim_ttft", "sim_tpot"]] = row["sim_ttft"], row["sim_tpot"]
    both = with_errors(table.reset_index())
    print(both.groupby(SERIES).sim_tpot_error.median().to_string())
    print(orders(both).to_string(index=False))
    kept = both[both.backend == "trtllm"][["id", "sim_ttft", "sim_tpot"]]
    kept.round(3).to_csv(RESULTS.with_name("ahead.csv"), index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

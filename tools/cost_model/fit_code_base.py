"""Fit the two costs of the paper's code base that Fig 12 shows and no datasheet has, and predict
the rest of it.

    python tools/cost_model/fit_code_base.py
    python tools/cost_model/fit_code_base.py --host added --links priced

Fitted to two completion times of Fig 12b, of SARATHI on the pipeline and of the 8 replicas: the
host's seconds a layer and the overhead per iteration. Orca on the pipeline and all bubbles take no
part. `--host` says how a layer's seconds on the host and on the device make one: "added", "bound"
(the larger) or "overlapped" (a smooth maximum, as the cost model has it). `--links` says what
all-reduces and sends cost: "priced" as in a100_2023.yaml, "peak" at the datasheet's bandwidth and
without a latency, or "free". The defaults are those of a100_fig12.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.optimize import root

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.executor.simulated.kernel_times import overlapped
from sarathi_lab.experiment.pipeline import SYSTEMS, StageTimes, completion_time, serve
from sarathi_lab.results.load import load_paper

HOSTS: dict[
    str, Callable[[float, float], float]
] = {  # seconds of a layer, from those of the device and the host
    "added": lambda device, host: device + host,
    "bound": max,
    "overlapped": overlapped,
}
FREE = 1e18  # bytes/s
LINKS: dict[str, dict[str, float]] = {  # what is changed in the hardware file
    "priced": {},
    "peak": {"link_latency": 0.0, "link_efficiency": 1.0},
    "free": {"link_latency": 0.0, "link_bytes_per_second": FREE, "network_bytes_per_second": FREE},
}
FITTED = ("sarathi", "tp_8rep")
START = np.array([0.95e-3, 5.8e-3])  # seconds per layer and per iteration
# Powell's hybrid method: slopes from steps of 3% (`eps` is the square), improved along the way.
SEARCH = {"eps": 9e-4, "xtol": 2e-3, "maxfev": 9}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=tuple(HOSTS), default="overlapped")
    parser.add_argument("--links", choices=tuple(LINKS), default="peak")
    arguments = parser.parse_args()
    host, links = arguments.host, arguments.links
    points = load_paper("fig12").query("panel == 'b'").groupby("series").y.max()
    targets = points[list(FITTED)].to_numpy()

    def relative(costs: np.ndarray) -> np.ndarray:
        times = np.array(
            [completion_time(_finish_times(name, host, links, costs)[0]) for name in FITTED]
        )
        print(f"{host}, links {links}: {costs * 1e3} ms, completion {times} s", flush=True)
        return times / targets - 1

    costs = START * root(lambda share: relative(share * START), np.ones(2), options=SEARCH).x
    for name in SYSTEMS:
        finish_times, bubble_times = _finish_times(name, host, links, costs)
        time = completion_time(finish_times)
        print(
            f"{name}: completion {time:.0f} s (paper {points[name]:.0f}), bubbles "
            f"{bubble_times.median():.2f} s, "
            f"{'fitted' if name in FITTED else 'predicted'}"
        )


def _finish_times(
    name: str, host: str, links: str, costs: Sequence[float]
) -> tuple[pd.Series, pd.Series]:
    """Finish and bubble times of the requests of one system, if a layer and an iteration cost so
    many seconds more.
    """
    layer, iteration = map(float, costs)
    hardware = load_option("hardware", "a100_2023")
    hardware = replace(hardware, iteration_overhead=iteration)
    hardware = replace(hardware, **LINKS[links])
    spec = load_option("model", "gpt3-175b")
    ledgers = serve(name, spec, hardware, stage_times=_beside(layer, HOSTS[host]))
    requests = pd.concat([ledger.requests() for ledger in ledgers])
    return requests.finish_time, requests.bubble_time


def _beside(host: float, together: Callable[[float, float], float]) -> StageTimes:
    """Stage times in which a layer takes what `together` makes of the device's seconds and those of
    the host.
    """

    def stage_times(cost: CostModel) -> Callable[[Batch], list[float]]:
        num_layers = cost.parallel.layers_per_stage(cost.spec)

        def times(batch: Batch) -> list[float]:
            device = cost.layer_time(batch)
            added = num_layers * (together(device, host) - device)
            return [seconds + added for seconds in cost.stage_times(batch)]

        return times

    return stage_times


if __name__ == "__main__":
    main()

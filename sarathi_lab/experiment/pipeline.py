"""Fig 12: bubbles and completion of GPT-3 on 64 A100, SARATHI and Orca on a pipeline beside
replicas without one.

Set-up of section 5.3: a backlog of 10,000 requests of 1K to 4K tokens (Zipf 0.4) at P:D = 10. The
pipeline is 8 stages of 8 devices with micro-batches of 27 requests; the alternative is 8 replicas
of 8 devices, each with batches of 11. The cost model, policies and the engine's loop are those of
every other run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import require_int
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve_replicas
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.analytic import AnalyticCostModel
from sarathi_lab.executor.simulated.hardware import Hardware, Parallel
from sarathi_lab.executor.simulated.pipeline import PipelineExecutor
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Policy, Sarathi
from sarathi_lab.workload.synthetic import Zipf

NUM_REQUESTS = 10_000
COMPLETED = 0.9981  # the last of the paper's points is the 9,981st of 10,000 requests
MAX_LEN = 4096
BLOCK_SIZE = 16
ROWS = ("panel", "series", "x", "y")
StageTimes = Callable[[AnalyticCostModel], Callable[[Batch], Sequence[float]]]


@dataclass(frozen=True)
class System:
    """What serves the requests: a policy on `replicas` copies of the model, each spread as
    `parallel` says.
    """

    policy: Policy
    batch_size: int
    parallel: Parallel
    replicas: int = 1

    def scheduler(self) -> Scheduler:
        """A fresh scheduler with room for all micro-batches at the longest length."""
        num_stages = self.parallel.pipeline
        blocks = BlockManager(self.batch_size * num_stages * (MAX_LEN // BLOCK_SIZE), BLOCK_SIZE)
        return Scheduler(
            self.policy,
            blocks,
            batch_size=self.batch_size,
            max_model_len=MAX_LEN,
            num_micro_batches=num_stages,
        )


# Under the names of the paper's points.
SYSTEMS: Mapping[str, System] = {
    "sarathi": System(Sarathi(chunk=256), 27, Parallel(8, 8)),
    "tp_pp_orca": System(Orca(), 27, Parallel(8, 8)),
    "tp_8rep": System(Orca(), 11, Parallel(8, 1), replicas=8),
}


@dataclass(frozen=True)
class Fig12:
    """`rows` in long format (panel, series, x, y), the `summary` of a run in flat names, and
    `bubbles` by cause.

    Panel "a" is the CDF of a request's bubble time (x in seconds); panel "b" the time (y, seconds)
    at which x requests were done. `bubbles` has a row per system, cause and stage: its `seconds` in
    all.
    """

    rows: pd.DataFrame
    summary: dict[str, float]
    bubbles: pd.DataFrame


def fig12(
    spec: ModelSpec, hardware: Hardware, num_requests: int = NUM_REQUESTS, seed: int = 0
) -> Fig12:
    """Serve the paper's requests with its three systems. Raises UserError for less than one
    request.
    """
    ledgers = {name: serve(name, spec, hardware, num_requests, seed) for name in SYSTEMS}
    requests = {
        name: pd.concat([ledger.requests() for ledger in parts]) for name, parts in ledgers.items()
    }
    pipelines = [name for name, system in SYSTEMS.items() if system.parallel.pipeline > 1]
    rows = [_cdf(name, requests[name].bubble_time) for name in pipelines]
    rows += [_completion(name, requests[name].finish_time) for name in SYSTEMS]
    return Fig12(
        pd.concat(rows, ignore_index=True),
        _summary(requests),
        pd.concat([_bubbles(name, ledgers[name][0]) for name in pipelines], ignore_index=True),
    )


def serve(
    name: str,
    spec: ModelSpec,
    hardware: Hardware,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    stage_times: StageTimes = lambda cost: cost.stage_times,
) -> list[Ledger]:
    """The ledgers of the system called `name`, one for each of its replicas.

    `stage_times` takes the seconds of the stages from the cost model; another function tries other
    costs.
    """
    system = SYSTEMS[name]
    cost = AnalyticCostModel(spec, hardware, hardware.dtype_bytes, system.parallel)

    def executor() -> Executor:
        return PipelineExecutor(system.parallel.pipeline, stage_times(cost), cost.send_time)

    return serve_replicas(workload(num_requests, seed), system.replicas, system.scheduler, executor)


def workload(num_requests: int, seed: int) -> Sequence[Request]:
    """The requests of section 5.3, all waiting from the start."""
    require_int("num_requests", num_requests, 1, f"use a number such as {NUM_REQUESTS}")
    lengths = Zipf(
        num_requests=num_requests,
        pd_ratio=10.0,
        seed=seed,
        min_len=1024,
        max_len=MAX_LEN,
        theta=0.4,
    )
    return lengths.generate(None).requests


def completion_time(finish_times: Sequence[float] | pd.Series) -> float:
    """Seconds until all but the last few requests are done, the paper's last point: 9,981 of
    10,000.
    """
    return float(np.sort(finish_times)[round(COMPLETED * len(finish_times)) - 1])


def at_points(found: Fig12, points: pd.DataFrame) -> pd.DataFrame:
    """What `found` has where the paper has its `points` (panels "a" and "b" of
    `points.paper_points`): rows with y.

    In panel "a" x is the share of requests and y its quantile of the bubble time, in seconds. Of a
    run of fewer requests than the paper's, the curve is stretched.
    """
    rows = []
    for (panel, series), line in points.groupby(["panel", "series"]):
        own = found.rows[(found.rows.panel == panel) & (found.rows.series == series)]
        if panel == "a":
            y = np.interp(line.x, own.y, own.x)
        else:
            stretch = NUM_REQUESTS / len(own)
            y = np.interp(line.x, own.x * stretch, own.y * stretch)
        rows.append(line[["panel", "series", "x"]].assign(y=y))
    return pd.concat(rows, ignore_index=True)


def _cdf(series: str, bubble_times: pd.Series) -> pd.DataFrame:
    x = np.sort(bubble_times)
    return _rows("a", series, x, np.arange(1, len(x) + 1) / len(x))


def _completion(series: str, finish_times: pd.Series) -> pd.DataFrame:
    y = np.sort(finish_times)
    return _rows("b", series, np.arange(1, len(y) + 1), y)


def _rows(panel: str, series: str, x: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"panel": panel, "series": series, "x": x, "y": y}, columns=list(ROWS))


def _summary(requests: Mapping[str, pd.DataFrame]) -> dict[str, float]:
    bubbles = {
        name: float(requests[name].bubble_time.median()) for name in ("sarathi", "tp_pp_orca")
    }
    times = {name: completion_time(table.finish_time) for name, table in requests.items()}
    return {
        **{f"bubble_median_{name}": seconds for name, seconds in bubbles.items()},
        "bubble_ratio": bubbles["tp_pp_orca"] / bubbles["sarathi"],
        **{f"completion_{name}": seconds for name, seconds in times.items()},
        "tp_pp_orca_over_sarathi": times["tp_pp_orca"] / times["sarathi"],
        "tp_8rep_over_sarathi": times["tp_8rep"] / times["sarathi"],
        "tp_pp_orca_over_tp_8rep": times["tp_pp_orca"] / times["tp_8rep"],
    }


def _bubbles(series: str, ledger: Ledger) -> pd.DataFrame:
    bubbles = ledger.bubbles()
    seconds = (bubbles.end - bubbles.start).groupby([bubbles.cause, bubbles.stage]).sum()
    return (
        seconds.rename("seconds")
        .reset_index()
        .assign(series=series)[["series", "cause", "stage", "seconds"]]
    )

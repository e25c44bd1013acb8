"""Hold simulated servers against the end-to-end points of aiconfigurator-core (Apache-2.0).

    python experiments/lab/silicon_points/simulate.py POINTS.csv             # all; again: the rest
    python experiments/lab/silicon_points/simulate.py POINTS.csv --only vllm --processes 2
    python experiments/lab/silicon_points/simulate.py POINTS.csv --report    # tables and picture

POINTS.csv is that package's `systems/silicon_sample.csv` (README.md says which version). What was
simulated is kept in results/points.csv.gz, and not simulated again; delete the file after a change
of the cost model.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import pandas as pd
from report import write_report

from sarathi_lab import Policy, Request, load_option
from sarathi_lab.config.csv_files import write_csv
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.arrivals import ClosedLoop
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import SequenceState
from sarathi_lab.engine.served_system import ServerSetup
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import Host
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import SGLang, TensorRTLLM, VllmV1
from sarathi_lab.policy.systems import setup_of, vllm_memory

COLUMNS = (
    *("id", "gpu", "model", "backend", "version", "weights", "tp", "isl", "osl", "concurrency"),
    *("cost_model", "real_ttft", "real_tpot", "sim_ttft", "sim_tpot", "first_ttft", "later_ttft"),
    *("spread_ttft", "spread_tpot"),
)
RESULTS = Path(__file__).parent / "results" / "points.csv.gz"
GPUS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
MIXTURES = ("DeepSeek", "MiniMax", "gpt-oss", "A17B", "A22B", "Kimi", "GLM")
WEIGHTS = {"": "auto", "fp8": "fp8"}  # by gemm_quant_mode; a row that names none is in 16 bits
HOSTS = {"vllm": "vllm_0_12", "sglang": "sglang_0_5", "trtllm": "trtllm_1_0"}
AHEAD = "vllm_async"  # InferenceMAX asks vLLM to schedule ahead
# Kernels of Llama-3.1-70B that include what follows: TensorRT-LLM's layers have them on every GPU
# where scales are static (modeling_llama.py, attention.py, gated_mlp.py).
TRTLLM_FUSED = ("attention", "activation", "all_reduce")
# How InferenceMAX launched the vLLM of October 2025: its fusions and CUDA graphs, read in the
# script of the B200 (70b_fp8_b200_docker.sh). They are that version's, whatever the GPU.
VLLM_FUSED = ("attention", "all_reduce")
VLLM_GRAPHS = "full_decode_only"
# The scripts of these GPUs leave both to vLLM's defaults.
BY_DEFAULT = ("h100", "h200")
DEFAULT_GRAPHS = "full_and_piecewise"
ROUNDS = 10  # requests for each of the concurrent ones; the benchmarks count all
COUNTED = 2  # simulated of them: the first, of users who all come at once, and a later one
USERS = "silicon_concurrency="  # where a row says that its batch_size is that
BLOCK_SIZE = 16
EVERY = 50  # points between two lines of progress
BUDGET = 8192  # tokens of an iteration
# InferenceMAX's own settings (70b_fp8_*.sh of October 2025), by how its rows' ids begin.
INFERENCE_MAX = "2026_04_06"
SHORTEST = 0.8  # lengths are drawn evenly from this share of the nominal one up to it
TRTLLM_BUDGET = 16384


@dataclass(frozen=True)
class Point:
    """A measured point that can be simulated, and how its benchmark is taken to have run."""

    id: str
    gpu: str
    model: str
    backend: str
    version: str
    weights: str
    tp: int
    isl: int
    osl: int
    concurrency: int
    real_ttft: float  # ms
    real_tpot: float  # ms
    cost_model: str = "analytic"

    @property
    def is_inference_max(self) -> bool:
        return self.id.startswith(INFERENCE_MAX)

    @property
    def policy(self) -> Policy:
        if self.backend == "vllm":
            return VllmV1(max_num_batched_tokens=BUDGET)
        if self.backend == "sglang":
            return SGLang(chunked_prefill_size=BUDGET)
        budget = TRTLLM_BUDGET if self.is_inference_max else BUDGET
        return TensorRTLLM(max_num_tokens=budget)

    @property
    def requests(self) -> list[Request]:
        """In the benchmark's order; which lengths it drew is not known, only from where."""
        lowest = SHORTEST if self.is_inference_max else 1.0
        rng = np.random.default_rng(0)
        number = (COUNTED + 1) * self.concurrency  # so that the last that count are not alone
        prompts, outputs = (
            rng.integers(int(lowest * length), length + 1, number).tolist()
            for length in (self.isl, self.osl)
        )
        return [
            Request(i, 0.0, prompt, output)
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    @property
    def host(self) -> Host:
        if not self.is_inference_max:
            return load_option("host", HOSTS[self.backend])
        if self.backend != "vllm":
            return replace(load_option("host", HOSTS[self.backend]), fused=TRTLLM_FUSED)
        host = load_option("host", AHEAD)
        if self.gpu in BY_DEFAULT:
            return replace(host, graphs=replace(host.graphs, mode=DEFAULT_GRAPHS))
        graphs = replace(host.graphs, mode=VLLM_GRAPHS)
        return replace(host, fused=VLLM_FUSED, graphs=graphs)

    @property
    def device(self) -> SimulatedBackend:
        hardware = load_option("hardware", self.gpu)
        return SimulatedBackend(
            hardware,
            tensor_parallel=self.tp,
            weights=self.weights,
            host=self.host,
            cost_model=self.cost_model,
        )

    @property
    def setup(self) -> ServerSetup:
        setup = setup_of(self.policy, self.concurrency, self.isl + self.osl)
        if self.backend == "vllm":
            setup = replace(setup, rule=vllm_memory(self.version))
        return setup

    @property
    def spec(self) -> ModelSpec:
        kv_dtype = "fp8" if self.weights == "fp8" else "auto"
        return replace(load_option("model", self.model), kv_dtype=kv_dtype)


def chosen(rows: Iterable[dict[str, str]]) -> tuple[list[Point], Counter[str]]:
    """The points that can be simulated, and how many others there are for each reason."""
    points, reasons = [], Counter[str]()
    for row in rows:
        if reason := why_not(row):
            reasons[reason] += 1
        else:
            points.append(point_of(row))
    return points, reasons


def why_not(row: dict[str, str]) -> str:
    """The first reason why a row can't be simulated; empty if there is none."""
    if row["mode"] != "agg":
        return "prefill and decode on different GPUs"
    if any(name in row["model_path"] for name in MIXTURES):
        return "mixture of experts"
    if row["system"] not in GPUS:
        return "GPU whose kernels were not measured (GB200, whose file is by its datasheet)"
    if row["gemm_quant_mode"] not in WEIGHTS or row["model_path"] not in MODELS:
        return "4-bit weights"
    if USERS not in row["silicon_data_source"]:
        return "how many users is not stated"
    return ""


def point_of(row: dict[str, str]) -> Point:
    return Point(
        row["id"],
        GPUS[row["system"]],
        MODELS[row["model_path"]],
        row["backend"],
        row["backend_version"],
        WEIGHTS[row["gemm_quant_mode"]],
        int(float(row["tp_size"])),
        int(row["isl"]),
        int(row["osl"]),
        int(float(row["batch_size"])),
        float(row["silicon_ttft_ms"]),
        float(row["silicon_tpot_ms"]),
    )


class Enough(Exception):
    """All requests that count are done."""


class Waits:
    """A recorder that keeps what clients waited for the first `number` requests, then ends."""

    def __init__(self, number: int) -> None:
        self.rows: list[tuple[float, float, float]] = []  # seconds: arrival, TTFT, TPOT
        self._number = number

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        for sequence in finished:
            request = sequence.request
            if request.request_id < self._number:
                first, last = sequence.first_token_time, sequence.finish_time
                tpot = (last - first) / max(1, request.output_len - 1)
                self.rows.append((request.arrival_time, first - request.arrival_time, tpot))
        if len(self.rows) == self._number:
            raise Enough


class SpreadUsers(ClosedLoop):
    """Users who start evenly over `span` seconds rather than all at once."""

    def __init__(self, requests: Iterable[Request], num_users: int, span: float) -> None:
        super().__init__(requests, num_users)
        first = [self.pop() for _ in self.requests[:num_users]]
        for place, request in enumerate(first):
            self._send(request, span * place / num_users)


def simulate(point: Point) -> dict[str, object] | str:
    """The point's row of results, or why it can't be simulated. Times are in ms.

    `sim`: users who all come at once; `spread`: users who come evenly over the time of an answer,
    for benchmarks of equal lengths alone, as there requests that begin together stay together.
    """
    backend = point.device
    try:
        burst = served(point, backend, ClosedLoop(point.requests, point.concurrency))
    except UserError as error:
        return str(error)
    first, later = (burst[own].mean(axis=0) for own in (burst[:, 0] == 0, burst[:, 0] > 0))
    both = (first + (ROUNDS - 1) * later) / ROUNDS
    row: dict[str, object] = dict(vars(point))
    row |= in_ms("sim", both) | {"first_ttft": 1e3 * first[1], "later_ttft": 1e3 * later[1]}
    if not point.is_inference_max:
        spreading = both[1] + point.osl * both[2]
        users = SpreadUsers(point.requests, point.concurrency, spreading)
        spread = served(point, backend, users)
        row |= in_ms("spread", spread[spread[:, 0] >= spreading].mean(axis=0))
    return row


def in_ms(whose: str, means: np.ndarray) -> dict[str, object]:
    return {f"{whose}_ttft": 1e3 * means[1], f"{whose}_tpot": 1e3 * means[2]}


def served(
    point: Point, backend: SimulatedBackend, users: ClosedLoop, counted: int = COUNTED
) -> np.ndarray:
    """What each request that counts waited, seconds [requests, (arrival, TTFT, TPOT)]; `counted` of
    each user do.
    """
    waits, spec = Waits(counted * point.concurrency), point.spec
    num_blocks = backend.kv_blocks(spec, BLOCK_SIZE, point.setup)
    engine = EngineConfig(
        point.policy, point.concurrency, num_blocks, BLOCK_SIZE, max_model_len=point.isl + point.osl
    )
    with suppress(Enough):
        serve(users, engine, backend.build(spec, None, engine.sizes()), waits)
    return np.array(waits.rows)


def has_tables(point: Point) -> bool:
    """Tables are of vLLM's kernels; 8-bit ones stand for no other server."""
    return point.weights == "auto" or point.backend == "vllm"


def known() -> set[tuple[str, str]]:
    """Id and cost model of what the results have."""
    if not RESULTS.exists():
        return set()
    return set(pd.read_csv(RESULTS)[["id", "cost_model"]].itertuples(index=False, name=None))


def run(points: Sequence[Point], processes: int) -> Counter[str]:
    """Simulate `points` and append each to the results as it is done; why others can't be."""
    reasons = Counter[str]()
    with Pool(processes) as pool:
        for done, row in enumerate(pool.imap_unordered(simulate, points), 1):
            if isinstance(row, str):
                reasons[row] += 1
            else:
                kept = pd.DataFrame([row], columns=COLUMNS).round(3)
                kept.to_csv(RESULTS, mode="a", header=not RESULTS.exists(), index=False)
            if done % EVERY == 0:
                print(f"{done} of {len(points)}", flush=True)
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("points", type=Path)
    parser.add_argument("--only", default="", help="points whose id has this")
    parser.add_argument("--cost-model", default="analytic", choices=["analytic", "profiled"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="simulate nothing")
    own = parser.parse_args()
    with own.points.open(newline="") as file:
        points, reasons = chosen(csv.DictReader(file))
    if not own.report:
        RESULTS.parent.mkdir(exist_ok=True)
        done = known()
        tried = [
            replace(point, cost_model=own.cost_model)
            for point in points
            if own.only in point.id and (own.cost_model == "analytic" or has_tables(point))
        ]
        left = [point for point in tried if (point.id, point.cost_model) not in done]
        random.Random(0).shuffle(left)  # what an early end leaves is of all kinds
        for reason, count in run(left, own.processes).items():
            print(f"{count}: {reason}")
        # As one part, where each point was appended as a part of its own.
        write_csv(RESULTS.with_suffix(""), gzip.decompress(RESULTS.read_bytes()).decode())
    write_report(pd.read_csv(RESULTS), len(points), reasons)


if __name__ == "__main__":
    main()

"""The lab's host beside vLLM's on vLLM's workers: time of an iteration without any, and of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.vllm.backend import VllmBackend
from sarathi_lab.executor.vllm.executor import VllmExecutor
from sarathi_lab.extensions import vllm_server
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import VllmV1
from sarathi_lab.results.intervals import summary

BLOCK, ROUNDS = 32, 7
BATCHES = (8, 64, 256)
TINY = ModelSpec("tiny-vllm", 2, 64, 2, 1, ffn_size=96, vocab_size=211, head_size=32)
BUDGETS = (256, 2048)
REQUESTS, BATCH, PROMPT, OUTPUT = 32, 16, 480, 32  # of the runs


def requests_of(number: int, prompt_len: int, output_len: int, spec: ModelSpec) -> list[Request]:
    """Requests of random tokens, all there at the start."""
    chosen = np.random.default_rng(0)
    prompts = chosen.integers(spec.vocab_size, size=(number, prompt_len), dtype=np.int32)
    return [Request(i, 0.0, prompt_len, output_len, one) for i, one in enumerate(prompts)]


def without_work() -> Any:
    """The class of an executor of vLLM that answers every batch at once, with equal tokens."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.outputs import ModelRunnerOutput

    class WithoutWork(UniProcExecutor):
        called: list[float] = []  # noqa: RUF012

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            self.called.append(time.perf_counter())
            self._names = list(scheduler_output.num_scheduled_tokens)
            return _answer(None, non_block)

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            index = {name: i for i, name in enumerate(self._names)}
            output = ModelRunnerOutput(self._names, index, [[7] for _ in index])
            return _answer(output, non_block)

    return WithoutWork


def _answer(result: Any, non_block: bool) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return future if non_block else result


def build(spec: ModelSpec, batch: int, longest: int, tokens: int, **options: Any) -> VllmExecutor:
    """An executor on a new engine of `batch` sequences of up to `longest` tokens."""
    sizes = Sizes(batch * -(-longest // BLOCK) + 1, BLOCK, batch, longest, tokens)
    return VllmBackend(eager=True, options=options).build(spec, None, sizes)


def run_lab(executor: VllmExecutor, requests: list[Request], batch: int, budget: int) -> float:
    """Serve by the lab's loop and its policy `vllm_v1`; returns the seconds."""
    engine = EngineConfig(VllmV1(budget), batch, executor.num_blocks, BLOCK)
    return float(serve(requests, engine, executor).iterations().end.max())


def run_vllm(executor: VllmExecutor, requests: list[Request], batch: int, budget: int) -> float:
    """Serve by the step() of vLLM's engine core and its scheduler; returns the seconds."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    executor.start()  # sequences of the run before leave the workers
    core = executor.workers.core
    core.scheduler.max_num_scheduled_tokens = budget
    start = time.perf_counter()
    for one in requests:
        prompt: Any = one.prompt_token_ids
        sampling = SamplingParams(temperature=0.0, max_tokens=one.output_len, ignore_eos=True)
        name, now = f"{start}-{one.request_id}", time.time()
        made = EngineCoreRequest(name, prompt.tolist(), None, sampling, None, now, None, None, None)
        core.add_request(*core.preprocess_add_request(made))
    while core.scheduler.has_requests():
        core.step_fn()
    return time.perf_counter() - start


def run_server(executor: VllmExecutor, requests: list[Request], batch: int, budget: int) -> float:
    """Serve as `run_vllm` does, by the scheduler of `extensions.vllm_server`."""
    core, usual = executor.workers.core, executor.workers.core.scheduler
    config, manager = usual.vllm_config, core.structured_output_manager
    config.additional_config = {"sarathi_lab": {"policy": "vllm_v1", "chunk": budget}}
    led = vllm_server.Scheduler(config, usual.kv_cache_config, manager, block_size=usual.block_size)
    core.scheduler, led.finished_req_ids = led, usual.finished_req_ids  # for workers to forget
    seconds = run_vllm(executor, requests, batch, budget)
    core.scheduler, usual.finished_req_ids = usual, led.finished_req_ids
    return seconds


HOSTS = {"lab": run_lab, "vllm": run_vllm, "server": run_server}


def host() -> Iterator[dict[str, Any]]:
    """Yield the microseconds from batch to batch of decodes alone, without workers."""
    for batch in BATCHES:
        stub = without_work()
        executor = build(TINY, batch, 160, batch * 20, distributed_executor_backend=stub)
        requests = requests_of(batch, 16, 128, TINY)
        for name, run in HOSTS.items():
            times = []
            for _ in range(ROUNDS):
                stub.called.clear()
                run(executor, requests, batch, batch * 20)
                steps = [after - before for before, after in pairwise(stub.called)]
                times.append(1e6 * median(steps[8:-8]))
            yield {"host": name, "batch": batch, **summary(times, "us")}


def runs() -> Iterator[dict[str, Any]]:
    """Yield the seconds of the same requests by both hosts, in turns, on the same workers."""
    spec, longest = load_option("model", "30m"), PROMPT + OUTPUT
    executor = build(spec, BATCH, longest, max(BUDGETS))
    requests = requests_of(REQUESTS, PROMPT, OUTPUT, spec)
    for budget in BUDGETS:
        seconds: dict[str, list[float]] = {name: [] for name in HOSTS}
        for _ in range(ROUNDS + 1):
            for name, run in HOSTS.items():
                seconds[name].append(run(executor, requests, BATCH, budget))
        for name, values in seconds.items():
            yield {"host": name, "budget": budget, **summary(values[1:], "s")}
        for name in ("lab", "server"):
            ratios = np.divide(seconds[name], seconds["vllm"])[1:].tolist()
            yield {"host": f"{name} / vllm", "budget": budget, **summary(ratios, "ratio")}


PARTS = {"host": host, "runs": runs}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        table = pd.DataFrame(PARTS[part]())
        table.to_csv(Path(__file__).parent / "results" / "cpu" / f"{part}.csv", index=False)
        print(table.to_string(index=False), flush=True)

"""The lab's host beside vLLM's on vLLM's workers: time of an iteration without any, and of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
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
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import VllmV1
from sarathi_lab.results.intervals import summary

BLOCK, ROUNDS = 32, 7
BATCHES = (8, 64, 256)
TINY = ModelSpec("tiny-vllm", 2, 64, 2, 1, ffn_size=96, vocab_size=211, head_size=32)
BUDGETS = (256, 2048)
REQUESTS, BATCH, PROMPT, OUTPUT = 32, 16, 480, 32  # of the runs
ENGINES = [
    *("executor=torch,vllm", "policy=request_level,orca,sarathi,sarathi_serve,vllm_v1"),
    *("chunk=256", "batch=8", "seq_len=1024", "pd_ratio=31", "workload.num_requests=16"),
    *("cache.block_size=32", "baselines=[]", "repeat=3", "tracking=none", "-m"),
]


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
            return _done(None) if non_block else None

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            index = {name: i for i, name in enumerate(self._names)}
            output = ModelRunnerOutput(self._names, index, [[7] for _ in index])
            return _done(output) if non_block else output

    return WithoutWork


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def build(spec: ModelSpec, batch: int, longest: int, tokens: int, **options: Any) -> VllmExecutor:
    """An executor on a new engine of `batch` sequences of up to `longest` tokens."""
    backend = VllmBackend(device="auto", eager=True, options=options or None)
    sizes = Sizes(batch * -(-longest // BLOCK) + 1, BLOCK, batch, longest, tokens)
    return backend.build(spec, None, sizes)


def run_lab(executor: VllmExecutor, requests: list[Request], batch: int, budget: int) -> float:
    """Serve by the lab's loop and its policy `vllm_v1`; returns the seconds."""
    assert executor.num_blocks is not None
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
        made = EngineCoreRequest(
            request_id=f"{start}-{one.request_id}",
            prompt_token_ids=one.prompt_token_ids.tolist(),  # type: ignore[union-attr]
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=one.output_len, ignore_eos=True
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(made))
    while core.scheduler.has_requests():
        core.step_fn()
    return time.perf_counter() - start


ENGINES_OF = {"lab": run_lab, "vllm": run_vllm}


def host() -> Iterator[dict[str, Any]]:
    """Yield the microseconds from batch to batch of decodes alone, without workers."""
    for batch in BATCHES:
        stub = without_work()
        executor = build(TINY, batch, 160, batch * 20, distributed_executor_backend=stub)
        requests = requests_of(batch, 16, 128, TINY)
        for name, run in ENGINES_OF.items():
            times = list[float]()
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
        seconds: dict[str, list[float]] = {name: [] for name in ENGINES_OF}
        for _ in range(ROUNDS + 1):
            for name, run in ENGINES_OF.items():
                seconds[name].append(run(executor, requests, BATCH, budget))
        pairs = zip(seconds["lab"][1:], seconds["vllm"][1:], strict=True)
        ratio = summary([lab / vllm for lab, vllm in pairs], "ratio")
        for name, values in seconds.items():
            yield {"host": name, "budget": budget, **summary(values[1:], "s")}
        yield {"host": "lab / vllm", "budget": budget, **ratio}


def engines() -> Iterator[dict[str, Any]]:
    """Yield the runs of a sweep over both engines and several policies."""
    from sarathi_lab.run import main

    folder = Path("outputs/vllm_host") / time.strftime("%Y%m%d-%H%M%S")
    main([*ENGINES, f"hydra.sweep.dir={folder}"])
    yield from pd.read_csv(folder / "sweep.csv").to_dict("records")


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "host": host,
    "runs": runs,
    "engines": engines,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        table = pd.DataFrame(PARTS[part]())
        table.to_csv(Path(__file__).parent / "results" / "cpu" / f"{part}.csv", index=False)
        print(table.to_string(index=False), flush=True)

"""Chunked prefill on a model small enough to look at: the cost of batches, and schedules.

Policies are served on a virtual clock that takes the fastest measured time of a composition, so
that every picture shows the same device without its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine import loop
from sarathi_lab.engine.compositions import make_batch, run_once
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes, StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.experiment.measured_cost import MeasuredCostModel, composition, describe
from sarathi_lab.model.spec import DTYPE_BYTES
from sarathi_lab.policy import Orca, Policy, PrefillFirst, RequestLevel, Sarathi, SarathiServe
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.serving_metrics import waits
from sarathi_lab.workload.synthetic import split_length

IterationTime = Callable[[Batch], float]  # seconds of one iteration

BATCH_SIZE = 4
NUM_DECODES = BATCH_SIZE - 1
BLOCK_SIZE = 16  # tokens
LONGEST = 1024  # tokens of a sequence, and of an iteration


def tiny_on_this_cpu(repetitions: int = 15) -> IterationTime:
    """Seconds of a batch of the tiny model on one thread of this CPU, measured when first asked
    for.

    The fastest of `repetitions`: an iteration takes a tenth of a millisecond, and whatever else
    runs only adds to it.
    """
    torch.set_num_threads(1)
    num_blocks = 2 * BATCH_SIZE * LONGEST // BLOCK_SIZE
    cache = Sizes(num_blocks, BLOCK_SIZE, BATCH_SIZE, LONGEST, LONGEST)
    executor = TorchBackend(device="cpu").build(load_option("model", "tiny"), None, cache)
    device, known = MeasuredCostModel(executor), {}

    def iteration_time(batch: Batch) -> float:
        key = composition(batch)
        if key not in known:
            if (placed := device.placed(batch)) is None:
                raise UserError(
                    f"{describe(batch)} exceeds the cache of {num_blocks * BLOCK_SIZE} tokens; "
                    "use fewer"
                )
            run_once(executor, placed)  # the first run of a shape pays for its memory
            known[key] = min(run_once(executor, placed).busy for _ in range(repetitions))
        return known[key]

    return iteration_time


def paper_gpu() -> IterationTime:
    """Seconds of a batch of 13B on an A6000 in float16, by the profiled cost model."""
    model, hardware = load_option("model", "13b"), load_option("hardware", "a6000")
    return make_cost_model("profiled", model, hardware, DTYPE_BYTES["float16"]).iteration_time


def token_costs(
    iteration_time: IterationTime, sizes: Iterable[int] = (1, 2, 4), context: int = 64
) -> pd.DataFrame:
    """Prompts and decodes: kind, batch (sequences), tokens, seconds, per_token (seconds)."""
    rows = []
    for size in sizes:
        prompts = make_batch(prefill_tokens=context, num_prefills=size)
        decodes = make_batch(num_decodes=size, context=context)
        for kind, batch in (("prefill", prompts), ("decode", decodes)):
            rows.append((kind, size, batch.num_tokens, iteration_time(batch)))
    table = pd.DataFrame(rows, columns=["kind", "batch", "tokens", "seconds"])
    return table.assign(per_token=table.seconds / table.tokens)


def hybrid_costs(
    iteration_time: IterationTime, chunks: Iterable[int], context: int = 64
) -> pd.DataFrame:
    """Seconds of a chunk, of `NUM_DECODES` decodes, and of both in one batch (Table 2)."""
    with_decodes = partial(make_batch, num_decodes=NUM_DECODES, context=context)
    rows = []
    for chunk in chunks:
        alone = make_batch(prefill_tokens=chunk - NUM_DECODES)
        batches = (alone, with_decodes(), with_decodes(prefill_tokens=chunk - NUM_DECODES))
        rows.append((chunk, *map(iteration_time, batches)))
    table = pd.DataFrame(rows, columns=["chunk", "chunk_alone", "decodes_alone", "hybrid"])
    added = (table.hybrid - table.chunk_alone) / NUM_DECODES
    return table.assign(alone=table.decodes_alone / NUM_DECODES, added=added)


def prefill_times(iteration_time: IterationTime, num_tokens: Iterable[int]) -> pd.DataFrame:
    """Seconds of one prompt by its tokens; columns tokens, seconds."""
    rows = [(n, iteration_time(make_batch(prefill_tokens=n))) for n in num_tokens]
    return pd.DataFrame(rows, columns=["tokens", "seconds"])


def requests_of(num_requests: int, seq_len: int, pd_ratio: float) -> list[Request]:
    """Requests of `seq_len` tokens that all wait, every second one with half the output: were they
    all alike, a batch would start and end together under every policy.
    """
    prompt_len, output_len = split_length(seq_len, pd_ratio)
    return [
        Request(i, 0.0, prompt_len, max(1, output_len if i % 2 == 0 else output_len // 2))
        for i in range(num_requests)
    ]


def policies(chunk: int) -> Mapping[str, Policy]:
    """The walkthrough's five policies by name; raises UserError for a chunk below the batch."""
    if chunk < BATCH_SIZE:
        raise UserError(
            f"chunk={chunk} is smaller than a batch of {BATCH_SIZE}; use chunk>={BATCH_SIZE}"
        )
    chunked = (Sarathi(chunk=chunk), SarathiServe(chunk=chunk))
    chosen: tuple[Policy, ...] = (RequestLevel(), PrefillFirst(), Orca(), *chunked)
    return {policy.name: policy for policy in chosen}


class Schedule(Ledger):
    """A ledger that also keeps the chunks of every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: list[tuple[float, float, Batch]] = []

    def record(self, result: StepResult, finished: list[SequenceState]) -> None:
        self._batches.append((result.start, result.end, result.batch))
        super().record(result, finished)

    def chunks(self) -> pd.DataFrame:
        """One row per chunk: its iteration with start and end (seconds), request and tokens."""
        rows = [
            (i, start, end, c.sequence.request.request_id, c.start, c.num_tokens, c.is_decode)
            for i, (start, end, batch) in enumerate(self._batches)
            for c in batch.chunks
        ]
        columns = ["iteration", "start", "end", "request_id", "first", "num_tokens", "is_decode"]
        return pd.DataFrame(rows, columns=columns)


def serve(
    policy: Policy, requests: Sequence[Request], iteration_time: IterationTime, num_stages: int = 1
) -> Schedule:
    """The schedule of `requests` on a virtual clock, on a pipeline of `num_stages` equal stages."""
    batch_size = BATCH_SIZE * num_stages
    num_blocks = (batch_size + 1) * (max(r.total_len for r in requests) / BLOCK_SIZE + 1)
    schedule = Schedule()
    num_blocks = math.ceil(num_blocks / (1 - policy.watermark))
    engine = EngineConfig(policy, batch_size, num_blocks, BLOCK_SIZE, num_micro_batches=num_stages)
    loop.serve(
        requests,
        engine,
        PipelineExecutor(num_stages, lambda b: [iteration_time(b) / num_stages] * num_stages),
        schedule,
    )
    return schedule


def outcomes(schedules: Mapping[str, Schedule]) -> pd.DataFrame:
    """A row per schedule: tokens/s, iterations, hybrid ones, latencies in seconds (metrics.md)."""
    rows = {}
    for name, schedule in schedules.items():
        iterations, requests = schedule.iterations(), schedule.requests()
        waited = waits(requests)
        prompts, duration = iterations.num_prefill_tokens, iterations.end.max()
        rows[name] = {
            "throughput": throughput(requests, duration)["throughput"],
            "duration": duration,
            "iterations": len(iterations),
            "hybrid": int(((prompts > 0) & (iterations.num_decode_tokens > 0)).sum()),
            "ttft_p50": float(np.median(waited["ttft"])),
            "tbt_max": max(waited["tbt"], default=math.nan),
            "kv_reread_factor": iterations.prefill_kv_tokens.sum() / prompts.sum(),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("policy")


def by_chunk(
    chunks: Iterable[int], requests: Sequence[Request], iteration_time: IterationTime
) -> pd.DataFrame:
    """`outcomes` of SARATHI by chunk (tokens), and `gain` over request-level batching."""
    policies = {"baseline": RequestLevel(), **{str(c): Sarathi(chunk=c) for c in chunks}}
    served = {name: serve(policy, requests, iteration_time) for name, policy in policies.items()}
    table = outcomes(served)
    table["gain"] = table.throughput / table.throughput["baseline"]
    table = table.drop("baseline").rename_axis("chunk").reset_index()
    return table.astype({"chunk": int})

"""vLLM's scheduler on fake workers, which compute nothing and sample one token, for tests marked
`vllm`; and the lab's on the same requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from vllm_engine import SIZES, TINY, backend_of, tiny_checkpoint

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.policy import Policy
from sarathi_lab.engine.request import Batch, Request

MAX_LEN = 64  # tokens of a request
TOKEN = 7  # that all requests sample
MOST_STEPS = 20_000
Steps = list[dict[int, int]]  # by iteration: tokens by request


@dataclass(frozen=True)
class Case:
    """Requests, which arrive before a step (`arrival_time`), and the engine that serves them."""

    requests: tuple[Request, ...]
    engine: EngineConfig

    @property
    def policy(self) -> Any:
        return self.engine.policy


def case(policy: Policy, requests: tuple[Request, ...], spare: int, **sizes: Any) -> Case:
    """Make a case whose cache has room for the longest request and `spare` blocks."""
    longest = max(one.total_len for one in requests)
    num_blocks = -(-longest // sizes["block_size"]) + spare
    engine = EngineConfig(policy, num_blocks=num_blocks, **{"max_model_len": MAX_LEN, **sizes})
    return Case(requests, engine)


def lab_steps(tried: Case, num_in_flight: int = 1) -> Steps:
    """Serve a case by the lab's scheduler, with up to two batches in flight."""
    scheduler, waiting = tried.engine.make_engine(tried.policy), deque(tried.requests)
    flying: deque[Batch] = deque()
    steps: Steps = []
    for now in range(MOST_STEPS):
        while waiting and waiting[0].arrival_time <= now:
            scheduler.add(waiting.popleft())
        batch = None
        if scheduler.has_work:
            batch = scheduler.step(float(now))  # vLLM counts empty steps, too
            chunks = batch.chunks if batch else []
            steps.append({chunk.sequence.request.request_id: chunk.num_tokens for chunk in chunks})
        if batch is not None:
            flying.append(batch)
            if num_in_flight > 1:
                scheduler.advance(batch)
        if flying and (batch is None or len(flying) == num_in_flight):
            oldest = flying.popleft()
            tokens = [TOKEN for chunk in oldest.chunks if chunk.emits_token]
            scheduler.update(StepResult(oldest, float(now), now + 1.0, tokens))
        if not (scheduler.has_work or waiting or flying):
            return steps
    raise AssertionError("it does not end")


@cache
def base_config() -> Any:
    from sarathi_lab.executor.vllm.workers import make_config

    return make_config(backend_of().arguments(TINY, tiny_checkpoint(), SIZES), "auto")


def make_scheduler(
    cls: Any, engine: EngineConfig, settings: Mapping[str, Any], additional: Mapping[str, Any]
) -> Any:
    """Make a scheduler of vLLM, or a subclass, for an engine's sizes and fields of its config."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = copy(base_config())
    config.additional_config = dict(additional)
    for part in ("scheduler_config", "cache_config", "model_config"):
        setattr(config, part, copy(getattr(config, part)))
    config.model_config.max_model_len = engine.max_model_len
    of_scheduler = {"max_num_seqs": engine.batch_size, "policy": engine.queue_order, **settings}
    for name, value in of_scheduler.items():
        setattr(config.scheduler_config, name, value)
    blocks = {"num_gpu_blocks": engine.num_blocks + 1, "block_size": engine.block_size}
    for name, value in {**blocks, "enable_prefix_caching": engine.shares_prefixes}.items():
        setattr(config.cache_config, name, value)
    spec = FullAttentionSpec(engine.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache_config = KVCacheConfig(engine.num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return cls(config, cache_config, manager, block_size=engine.block_size)


def as_vllm(request: Request, block_size: int = 0) -> Any:
    """Make vLLM's request; with hashes of its blocks of `block_size`."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as VllmRequest

    if block_size:
        init_none_hash(sha256)
    return VllmRequest(
        str(request.request_id),
        np.asarray(request.prompt_token_ids).tolist(),
        SamplingParams(max_tokens=request.output_len, temperature=0, ignore_eos=True),
        None,
        arrival_time=float(request.request_id),
        priority=request.priority,
        block_hasher=get_request_block_hasher(block_size, sha256) if block_size else None,
    )


class FakeWorkers:
    """Run of a vLLM scheduler, with `depth` batches in flight, on workers that sample TOKEN."""

    def __init__(self, scheduler: Any, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.steps: Steps = []
        self.num_tokens: dict[int, int] = {}  # generated, by request
        self._flying: deque[Any] = deque()

    def serve(
        self,
        tried: Case,
        throttles: Callable[[int], bool] = lambda number: False,
        before_step: Callable[[Any], object] = id,
    ) -> None:
        """Serve a case; `throttles` says whether prompts wait in the step of a number, counted
        since the engine was idle.
        """
        scheduler, waiting, number = self.scheduler, deque(tried.requests), 0
        block_size = tried.engine.block_size if tried.engine.shares_prefixes else 0
        for now in range(MOST_STEPS):
            while waiting and waiting[0].arrival_time <= now:
                scheduler.add_request(as_vllm(waiting.popleft(), block_size))
            before_step(scheduler)
            has_batch = scheduler.has_unfinished_requests()
            if has_batch:
                has_batch = self._submit(scheduler.schedule(throttles(number)))
                number += 1
            if self._flying and (not has_batch or len(self._flying) == self.depth):
                scheduler.update_from_output(*self._flying.popleft())
            if not scheduler.has_unfinished_requests():
                number = 0
                if not waiting and not self._flying:
                    return
        raise AssertionError("it does not end")

    def _submit(self, output: Any) -> bool:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        self.steps.append({int(name): n for name, n in output.num_scheduled_tokens.items()})
        if not names:
            return False
        emits = [not self.scheduler.requests[name].is_prefill_chunk for name in names]
        for name, emitted in zip(names, emits, strict=True):
            self.num_tokens[int(name)] = self.num_tokens.get(int(name), 0) + emitted
        index = {name: i for i, name in enumerate(names)}
        sampled = [[TOKEN] if emitted else [] for emitted in emits]
        self._flying.append((output, ModelRunnerOutput(names, index, sampled_token_ids=sampled)))
        return True

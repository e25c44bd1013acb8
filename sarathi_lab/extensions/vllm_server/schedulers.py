"""vLLM's schedulers, whose `schedule` sees only what a policy of the lab has chosen, with a limit
of tokens each. All else is vLLM's. That interface is not public: `limits` has the versions
that it was run with.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import count
from typing import Any

import vllm
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as ServerRequest
from vllm.v1.request import RequestStatus

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.extensions.vllm_server.decider import Decider
from sarathi_lab.extensions.vllm_server.limits import check_config, version_caution
from sarathi_lab.extensions.vllm_server.settings import policy_of

logger = logging.getLogger("vllm.sarathi_lab")  # below vLLM's, which prints it
Base: Any = object  # vLLM's class follows it


class _ByPolicy(Base):
    """Part of both schedulers."""

    is_async = False
    waiting: RequestQueue

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        caution = version_caution(vllm.__version__)
        if caution is not None:
            logger.warning(caution)
        check_config(self.vllm_config, self.is_async)
        refuse_layers(self)
        self.scheduler_reserve_full_isl = False  # the policy chooses what it reserves
        sizes = {"batch_size": self.max_num_running_reqs, "max_model_len": self.max_model_len}
        self._decider = Decider(
            policy_of(self.vllm_config.additional_config.get("sarathi_lab", {}), **sizes),
            BlockManager(self.kv_cache_config.num_blocks - 1, self.block_size),  # 0 is padding
            **sizes,
            queue_order=self.policy.value,
            most_tokens=self.max_num_scheduled_tokens,
            is_async=self.is_async,
        )
        self._decider.check_fits(Request(0, 0.0, self.max_model_len - 1, 1))  # as all will
        self._numbers = count()
        self._sequences: dict[str, SequenceState] = {}  # by the name of the request
        self._requests: dict[SequenceState, ServerRequest] = {}
        self._limits: dict[str, int] = {}  # tokens of this iteration
        self._batches: deque[tuple[Batch, float]] = deque()  # in flight, with their start
        self._unqueued: list[ServerRequest] = []  # new requests, maybe with a grammar to compile

    def add_request(self, request: ServerRequest) -> None:
        super().add_request(request)
        self._unqueued.append(request)

    def _enqueue(self) -> None:
        """Queue requests that are ready."""
        unqueued = self._unqueued
        self._unqueued = []
        for request in unqueued:
            if not self._handle_blocked_waiting_request(request):
                self._unqueued.append(request)
                continue
            longest_output = self.max_model_len - request.num_prompt_tokens
            as_lab_has_it = Request(
                next(self._numbers),
                time.monotonic(),
                request.num_prompt_tokens,
                min(request.max_tokens, longest_output),
                None,
                request.priority,
            )
            sequence = self._decider.add(as_lab_has_it)
            self._sequences[request.request_id] = sequence
            self._requests[sequence] = request

    def _free_request(
        self, request: ServerRequest, *args: object, **kwargs: object
    ) -> dict[str, object] | None:
        sequence = self._sequences.pop(request.request_id, None)
        if sequence:
            del self._requests[sequence]
            self._decider.drop(sequence)
        else:
            self._unqueued.remove(request)
        return super()._free_request(request, *args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: ServerRequest, _: int, num_new_tokens: int
    ) -> int:
        return min(num_new_tokens, self._limits.get(request.request_id, 0))

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        self._enqueue()
        batch = self._decide()
        # First of all, as the policy may have put an evicted sequence into the same batch.
        self._evict()
        admitted = self._limit_to(batch)
        # vLLM admits all that it finds in its queue: it finds what the policy has chosen.
        hidden = self.waiting
        self.waiting = create_request_queue(self.policy)
        if admitted:
            hidden.remove_requests(admitted)
        for request in admitted:
            self.waiting.add_request(request)
        output = super().schedule(*args, **kwargs)
        self.waiting = hidden
        if output.num_scheduled_tokens != self._limits:
            raise RuntimeError(
                f"vLLM scheduled {output.num_scheduled_tokens}, not the policy's {self._limits}"
            )
        if batch is not None:
            self._decider.advance(batch)
            self._batches.append((batch, time.monotonic()))
        return output

    def _decide(self) -> Batch | None:
        """Let the policy make a batch, as far as the server is not paused."""
        pause = self.pause_state
        self._decider.admits = pause == PauseState.UNPAUSED
        if pause == PauseState.PAUSED_ALL:
            return None
        return self._decider.schedule(time.monotonic())

    def _evict(self) -> None:
        """Preempt in vLLM what the policy has evicted."""
        for sequence in self._decider.evicted:
            request = self._requests[sequence]
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
        self._decider.evicted.clear()

    def _limit_to(self, batch: Batch | None) -> list[ServerRequest]:
        """Limit each request to its tokens of the batch; return those that do not run yet."""
        self._limits = {}
        admitted: list[ServerRequest] = []
        if batch is None:
            return admitted
        for chunk in batch.chunks:
            request = self._requests[chunk.sequence]
            self._limits[request.request_id] = chunk.num_tokens
            if request.status != RequestStatus.RUNNING:
                admitted.append(request)
        return admitted

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.num_scheduled_tokens:
            batch, start = self._batches.popleft()
            self._decider.update(StepResult(batch, start, time.monotonic(), []))
        return super().update_from_output(scheduler_output, model_runner_output)


class Scheduler(_ByPolicy, scheduler.Scheduler):
    """vLLM's scheduler for `--no-async-scheduling`, by a policy of the lab."""


class AsyncScheduler(_ByPolicy, async_scheduler.AsyncScheduler):
    """vLLM's scheduler for async scheduling, its default, by a policy of the lab."""

    is_async = True


def refuse_layers(scheduler: scheduler.Scheduler) -> None:
    """Raise UserError for layers of several kinds, which a list of blocks does not serve."""
    if len(scheduler.kv_cache_config.kv_cache_groups) != 1 or scheduler.has_mamba_layers:
        raise UserError(
            "a policy of the lab can't run with layers of several kinds; serve a model with one"
        )

"""Executor of batches on vLLM's workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.executor import NO_TOKEN, StepResult
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.executor.device import explain_lack_of_memory
from sarathi_lab.executor.timeline import HostTimeline, Mark, WallClock
from sarathi_lab.executor.vllm.worker_errors import first_error, last_line
from sarathi_lab.executor.vllm.workers import NewSequence, Pending, Step, Workers


class Held(NamedTuple):
    """A sequence as the workers hold it: its name, the tokens it came with, its blocks, and the end
    of what they have computed.
    """

    name: str
    num_given: int
    num_blocks: int
    num_preemptions: int
    end: int


class SubmittedBatch(NamedTuple):
    """A submitted batch, its marks (the end's after the wait, unless a stream has it), and the
    names of the sequences that emit a token.
    """

    batch: Batch
    pending: Pending
    names: list[str]
    start: Mark
    end: Mark | None
    launched: float
    host_time: float


class VllmExecutor(WallClock):
    """`Executor` over vLLM's `workers`, which one run after another may share; `close` ends them.

    A preempted sequence leaves the workers and comes back as a new one with all its tokens. Times
    are those of the current stream of a GPU in this process, else from the submission of a batch,
    or the end of the one before, to its result. Stages of a pipeline: `stages`.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        num_blocks: int | None = None,
        timeline: HostTimeline | None = None,
        close: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.workers = workers
        self.close = close
        self._sleep = sleep
        self.num_blocks = num_blocks or workers.num_blocks
        self.block_size = workers.block_size
        self.feeds_tokens = workers.is_async
        self.capacity = 2 if workers.is_async else workers.num_stages
        self.timeline = timeline or HostTimeline()
        self._in_flight: deque[SubmittedBatch] = deque()
        self._held: dict[SequenceState, Held] = {}
        self._ended: set[str] = set()  # that the workers hold no more after the next step
        self._before: dict[str, int] = {}  # tokens by name in the step before
        self._num_named = 0
        self._last_end = 0.0
        self._stop: UserError | None = None  # the first one, which ended the workers

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(self) -> None:
        if self._stop is not None:
            raise self._stop
        # Workers outlive a run, and must forget what it left with them.
        self._in_flight.clear()  # of a run that stopped half-way
        self._ended |= {held.name for held in self._held.values()}
        self._held.clear()
        with self._explained("the end of the run before"):
            self.workers.forget(self._ended)
        self._ended = set()
        self._before = {}
        self._last_end = 0.0
        self.timeline.reset()

    def submit(self, batch: Batch) -> None:
        """Launch `batch`. Raises RunError if vLLM stops."""
        begun = time.perf_counter()
        start = self.timeline.mark()
        end = None
        step, names = self._step(batch)
        if self.timeline.has_stream:
            start = self.timeline.mark()
        packed = time.perf_counter()
        with self._explained(f"an iteration of {batch.num_tokens} tokens"):
            pending = self.workers.run(step)
        if self.timeline.has_stream:
            end = self.timeline.mark()
            packed = time.perf_counter()
        submitted = SubmittedBatch(
            batch,
            pending,
            names,
            start,
            end,
            launched=self.timeline.launched,
            host_time=packed - begun,
        )
        self._in_flight.append(submitted)

    def collect(self) -> StepResult:
        """Wait for the oldest batch in flight. Raises RunError if vLLM stops."""
        done = self._in_flight.popleft()
        with self._explained(f"an iteration of {done.batch.num_tokens} tokens"):
            token_ids = done.pending.tokens(done.names)
            graph_use, num_padding = done.pending.graph_use()
        start = self.timeline.wait(done.start)
        end_mark = self.timeline.mark() if done.end is None else done.end
        end = self.timeline.wait(end_mark)
        # A batch that was submitted ahead begins when the one before it ends.
        start = max(start, self._last_end)
        self._last_end = end
        return StepResult(
            done.batch,
            start,
            end,
            token_ids,
            host_time=done.host_time,
            num_padding_tokens=num_padding,
            graph_use=graph_use,
            launching_time=max(0.0, min(end, done.launched) - start),
        )

    def write_profile(self, directory: Path) -> None:
        """Write nothing: vLLM's operations are not timed."""

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn what vLLM raises during `what` into a RunError, and end its workers."""
        try:
            with explained(what):
                yield
        except UserError as error:
            self._stop = error
            if self.workers.is_lost:
                self._stop = RunError(f"a worker process of vLLM was killed during {what}")
            self._in_flight.clear()
            self.close()
            raise self._stop from None

    def _step(self, batch: Batch) -> tuple[Step, list[str]]:
        """Return what the workers need, and the names of the sequences that emit a token."""
        step = Step(ended=self._ended)
        self._ended = set()
        emitting: list[str] = []
        num_absent = len(self._held)  # sequences of the workers without a chunk
        for chunk in batch.chunks:
            sequence, start, num_tokens, _, emits = chunk
            held = self._held.get(sequence)
            if held is not None:
                num_absent -= 1
                is_evicted = held.num_preemptions != sequence.num_preemptions
                # Evicted and back within one iteration, or a probe's batch again.
                if is_evicted or held.end != start:
                    step.ended.add(held.name)
                    held = None
            if held is None:
                held = self._enter(step, sequence, start)
            else:
                self._continue(step, sequence, held, start, num_tokens)
            step.num_tokens[held.name] = num_tokens
            if emits:
                emitting.append(held.name)
            # After its last token a sequence is over: the next step tells the workers.
            if emits and chunk.output_index >= sequence.request.output_len - 1:
                self._ended.add(held.name)
                self._held.pop(sequence, None)
            else:
                self._held[sequence] = held._replace(
                    num_blocks=len(sequence.block_ids), end=start + num_tokens
                )
        if num_absent:
            self._drop_preempted(step, batch)
        self._before = step.num_tokens
        return step, emitting

    def _enter(self, step: Step, sequence: SequenceState, start: int) -> Held:
        """Send a sequence that the workers do not hold."""
        if NO_TOKEN in sequence.output_token_ids:
            self._fetch_tokens(sequence)
        self._num_named += 1
        name = str(self._num_named)
        token_ids = _token_ids(sequence)
        step.new.append(NewSequence(name, token_ids, sequence.block_ids, start))
        number = len(sequence.block_ids)
        return Held(name, len(token_ids), number, sequence.num_preemptions, start)

    def _continue(
        self, step: Step, sequence: SequenceState, held: Held, start: int, num_tokens: int
    ) -> None:
        """Send what is new of a sequence that the workers hold."""
        name = held.name
        step.names.append(name)
        new_blocks = sequence.block_ids[held.num_blocks :]
        step.new_blocks.append(new_blocks or None)
        step.num_computed.append(start)
        step.num_generated.append(sequence.num_known - held.num_given)
        if self.workers.wants_newest_tokens:
            # Positions of the output count from the prompt's end, before which it has none.
            first_output = start - sequence.request.prompt_len
            end_of_output = max(0, first_output + num_tokens)
            outputs = sequence.output_token_ids[max(0, first_output) : end_of_output]
            step.newest_tokens.append(outputs)
        if name not in self._before:
            step.rejoined[name] = _token_ids(sequence)

    def _drop_preempted(self, step: Step, batch: Batch) -> None:
        """Let the workers forget sequences that have left the engine without their last token:
        preempted ones, and those of probes.
        """
        in_batch = {chunk.sequence for chunk in batch.chunks}
        for sequence in list(self._held):
            if not sequence.is_running and sequence not in in_batch:
                step.ended.add(self._held.pop(sequence).name)

    def _fetch_tokens(self, sequence: SequenceState) -> None:
        """Wait for the token of a sequence that was preempted while the token was on its way."""
        for done in self._in_flight:
            emitting = (chunk for chunk in done.batch.chunks if chunk.emits_token)
            for name, chunk in zip(done.names, emitting, strict=True):
                if chunk.sequence is sequence:
                    token = done.pending.tokens([name])[0]
                    sequence.output_token_ids[chunk.output_index] = token


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what vLLM raises during `what` into a RunError of one line."""
    try:
        with explain_lack_of_memory(what), _of_workers():
            yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, WorkerError) else last_line(error)
        raise RunError(
            f"vLLM stopped during {what} ({reason}); VLLM_LOGGING_LEVEL=INFO shows what it did"
        ) from None


class WorkerError(Exception):
    """The exception that a worker process has logged."""


@contextmanager
def _of_workers() -> Iterator[None]:
    """Raise what a worker process has logged instead of the executor's notice of it."""
    try:
        yield
    except Exception as error:
        logged = first_error()
        if logged is None:
            raise
        raise WorkerError(logged) from error


def _token_ids(sequence: SequenceState) -> list[int]:
    """Return the prompt and what was generated."""
    prompt = sequence.request.prompt_token_ids
    assert prompt is not None, "workload of an executor that computes tokens"
    prompt_ids = np.asarray(prompt).tolist()  # vLLM sends Python's integers to its workers
    return prompt_ids + list(sequence.output_token_ids)

"""Executors, which run batches and measure or predict time, and backends, which build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.served_system import ServerSetup, ServingDevice
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec

NO_TOKEN = -1  # emitted by executors without a model

Span = tuple[float, float]  # start and end, in seconds since `Executor.start`
Cause = Literal["PB1", "PB2", "PB3", "starved"]
# How much of an iteration was replayed as recorded CUDA graphs: all of it; all but attention, in
# pieces that the host launches one by one; or nothing.
GraphUse = Literal["full", "piecewise", "none"]


class Bubble(NamedTuple):
    """Idle time of a pipeline stage between two micro-batches, from `start` to `end` (seconds).

    `iteration` counts submissions from zero and names the micro-batch that ends the gap. `cause` is
    the paper's (section 3.3) by the two micro-batches: "PB1" prefills of different length, "PB2" a
    prefill and decodes only, "PB3" equal numbers of prompt tokens (mostly none), so that only
    contexts differ; or "starved", where the pipeline had room before and no request. Gaps from
    sends and unequal stages count by their neighbours, too.
    """

    stage: int
    start: float
    end: float
    cause: Cause
    iteration: int


@dataclass(slots=True)  # not frozen: that takes three times as long to make, in each iteration
class StepResult:
    """One finished iteration. Times in seconds since `Executor.start`."""

    batch: Batch
    start: float
    end: float
    # One per chunk with emits_token, in the order of the chunks; empty in simulations.
    token_ids: list[int]
    stages: Sequence[Span] = ()  # by stage of a pipeline; empty without one
    bubbles: Sequence[Bubble] = ()  # the idle gaps that this micro-batch ended
    host_time: float = 0.0  # seconds that the host spent on packing and launching it
    num_padding_tokens: int = 0  # computed in addition, to reach a fixed shape
    graph_use: GraphUse = "none"
    launching_time: float = 0.0  # seconds of it in which the host was still launching it

    @property
    def is_replayed(self) -> bool:
        """Whether all of it ran as a recorded CUDA graph."""
        return self.graph_use == "full"

    @property
    def busy(self) -> float:
        """Seconds that a stage was busy, the mean over stages."""
        if not self.stages:
            return self.end - self.start
        seconds_of_stages = [end - start for start, end in self.stages]
        return sum(seconds_of_stages) / len(self.stages)


def bubbles_between(
    before: Batch | None,
    after: Batch,
    free_at: Sequence[float],
    spans: Sequence[Span],
    is_starved: bool,
    iteration: int,
) -> list[Bubble]:
    """List the idle gaps that `after` ends: on each stage from `free_at`, when it ended `before`
    (None for the first of a run), to the start of its span.
    """
    if before is None:
        return []
    cause: Cause = "starved" if is_starved else _cause(before, after)
    bubbles = []
    for stage, (start, _) in enumerate(spans):
        free = free_at[stage]
        if start > free:
            bubbles.append(Bubble(stage, free, start, cause, iteration))
    return bubbles


def _cause(before: Batch, after: Batch) -> Cause:
    """Classify the bubble between two micro-batches (section 3.3)."""
    if before.num_prefill_tokens == after.num_prefill_tokens:
        return "PB3"
    return "PB1" if before.num_prefill_tokens and after.num_prefill_tokens else "PB2"


class Executor(Protocol):
    """Runs batches and owns the clock, in seconds since `start`; collects them in the order of
    submission.
    """

    capacity: int  # batches in flight: stages of a pipeline; 2 with overlap
    feeds_tokens: bool  # to the next batch, so a sequence in flight may be submitted again

    @property
    def num_blocks(self) -> int | None:
        """Blocks of its cache; None in simulations."""

    @property
    def now(self) -> float: ...

    @property
    def num_in_flight(self) -> int: ...

    def start(self) -> None:
        """Set the clock to zero, after loading and warm-up."""

    def submit(self, batch: Batch) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the oldest batch in flight."""

    @property
    def next_end(self) -> float:
        """When the oldest batch in flight ends; `now` where that is unknown."""

    def wait_until(self, time: float) -> None:
        """Let the clock reach `time`; nothing in flight ends before."""

    def write_profile(self, directory: Path) -> None:
        """Write the profile of the run, if there is one."""


@dataclass(frozen=True)
class Predictor:
    """Predicted seconds of an iteration: by operation, or, called, their sum."""

    operation_times: Callable[[Batch], dict[str, float]]

    def __call__(self, batch: Batch) -> float:
        return sum(self.operation_times(batch).values())


@dataclass(frozen=True)
class Sizes:
    """Sizes that an executor is built for."""

    num_blocks: int  # as planned with
    block_size: int
    batch_size: int
    max_model_len: int | None = None  # None: as long as the cache
    max_batch_tokens: int | None = None  # None: those of the warm-up
    chunk: int | None = None  # None: batches with prompts may have any number of tokens
    fills_memory: bool = False  # with the cache, regardless of `num_blocks`
    num_drafts: int = 0  # of a decode, at most


class Backend(Protocol):
    """A device, real or simulated. Its constructor is cheap and checks arguments (UserError).

    Where a body returns something, that is what a subclass has which states nothing else.
    """

    @property
    def name(self) -> str:
        """The option of the config group: "torch", "vllm" or "simulated"."""

    @property
    def device_name(self) -> str: ...

    @property
    def dtype_name(self) -> str:
        """ "float32", "bfloat16" or "float16", resolved from "auto"."""

    def dtype_of(self, spec: ModelSpec) -> str:
        """Return the type of a model's elements: as stated, as its file has it, or as the device's
        default is.
        """

    @property
    def dtype_bytes(self) -> int: ...

    @property
    def computes_tokens(self) -> bool:
        """Whether prompts need token ids and outputs have them."""

    @property
    def request_time(self) -> float:
        """Seconds of a server's front end for a request, one after the other; 0 if measured."""
        return 0.0

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, so batches in flight; 1 without one."""

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""

    @property
    def num_threads(self) -> int | None:
        """Threads that a CPU computes with, where they can be stated; None elsewhere."""
        return None

    @property
    def facts(self) -> Mapping[str, object]:
        """What ran the last batches, such as a library's version; empty if the name says it."""
        return {}

    @property
    def without_overlap(self) -> str:
        """The setting that makes each batch after the one before has ended; empty if that is so."""
        return ""

    @property
    def serving_device(self) -> ServingDevice | None:
        """One of its devices, by which a server chooses defaults; None where none are taken."""
        return None

    @property
    def default_model(self) -> str:
        """The model that model=auto selects."""

    def check(self, spec: ModelSpec, kv_tokens: int, window_pool: float | None = None) -> None:
        """Raise UserError if the model can't run here with a cache of so many tokens.

        Args:
            spec: The model.
            kv_tokens: Of the cache.
            window_pool: Tokens of a pool for layers with a window, for each token of the others;
                None: all layers have blocks of one pool. Executors that run no such layers do not
                read it.
        """

    def peaks(self) -> Peaks:
        """Peak FLOP/s and bytes/s of all devices together, measured or from the hardware file."""

    def size(self) -> tuple[int, int]:
        """Bytes of memory and multiprocessors, or threads of a CPU, of all devices together."""

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """Limits of predicted figures, a line each; none if measured."""

    def predictor(self, spec: ModelSpec) -> Predictor | None:
        """The cost model for `spec`, by which `chunk=auto` is chosen; None if measured."""
        return None

    def kv_blocks(self, spec: ModelSpec, block_size: int, setup: ServerSetup) -> int:
        """Blocks that a server started by `setup` has; on a real device, an estimate of those that
        fit beside the weights, before they are loaded.
        """

    def describe_cache(self, spec: ModelSpec, setup: ServerSetup) -> str:
        """How `kv_blocks` is calculated, such as "0.92 of 85.1 GB, less ..."."""

    def state_tokens(self, spec: ModelSpec) -> int:
        """Tokens whose cache is as large here as the states of one sequence."""

    def window_in_cache(self, spec: ModelSpec, pool: float | None) -> CachedWindow | None:
        """`ModelSpec.window_in_cache` on one of the devices."""

    def read_model(self, checkpoint: Path) -> ModelSpec | None:
        """The spec of a checkpoint that `model.huggingface` does not read; None if this backend
        does not compute it, either.
        """
        return None

    def with_weights(self, spec: ModelSpec, checkpoint: Path | None) -> ModelSpec:
        """The spec with the weights as this backend holds them. Raises UserError for a type that it
        does not have.
        """
        return spec

    def expect(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> None:
        """Take note of a run to come, where several share what `build` makes first."""
        return

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Executor:
        """A warmed-up executor of `sizes`, with the weights of `checkpoint`."""

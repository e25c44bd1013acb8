"""The interface between the engine loop and what owns time, such as a device or a cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from sarathi_lab.engine.request import Batch
from sarathi_lab.model.power import PowerModel
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import ModelSpec

NO_TOKEN = -1  # what executors without a model emit: a token was due, nobody computed it

Span = tuple[float, float]  # start and end, in seconds since `Executor.start`
Cause = Literal["PB1", "PB2", "PB3", "starved"]


class Bubble(NamedTuple):
    """A stage of a pipeline idle between two micro-batches, from `start` to `end` (seconds).

    `iteration` counts submissions from zero and names the micro-batch that ends the gap; the one
    before it began it. `cause` is the paper's (section 3.3) by what the two carry: "PB1" prefills
    of different length, "PB2" a prefill beside decodes only, "PB3" as many prompt tokens in both
    (as a rule none), so that only their contexts differ; or "starved", where the pipeline had room
    before and no request to put in. Sending and unequal stages leave gaps, too; they count under
    what the neighbours carry.
    """

    stage: int
    start: float
    end: float
    cause: Cause
    iteration: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished iteration. Times in seconds since `Executor.start`."""

    batch: Batch
    start: float
    end: float
    # One per chunk with emits_token, in the order of the chunks; empty where nobody computes them.
    token_ids: list[int]
    stages: Sequence[Span] = ()  # by stage of a pipeline; empty where one device does it all
    bubbles: Sequence[Bubble] = ()  # the idle gaps that this micro-batch ended
    host_time: float = 0.0  # seconds that the host spent on packing and launching it
    num_padding_tokens: int = 0  # computed beside the batch's own, to reach a fixed shape
    is_replayed: bool = False  # whether it ran as a recorded CUDA graph
    launching_time: float = 0.0  # seconds of it in which the host was still launching it

    @property
    def busy(self) -> float:
        """Seconds that it kept a stage busy, in the mean over stages."""
        if not self.stages:
            return self.end - self.start
        return sum(end - start for start, end in self.stages) / len(self.stages)


def bubbles_between(
    before: Batch | None,
    after: Batch,
    free_at: Sequence[float],
    spans: Sequence[Span],
    is_starved: bool,
    iteration: int,
) -> list[Bubble]:
    """The idle gaps that `after` ends: on each stage from `free_at`, when it ended `before` (None
    for the first of a run), to the start of its span.
    """
    if before is None:
        return []
    cause: Cause = "starved" if is_starved else _cause(before, after)
    return [
        Bubble(stage, free, start, cause, iteration)
        for stage, (free, (start, _)) in enumerate(zip(free_at, spans, strict=True))
        if start > free
    ]


def _cause(before: Batch, after: Batch) -> Cause:
    """The bubble (section 3.3) that separates two micro-batches, by what they carry."""
    if before.num_prefill_tokens == after.num_prefill_tokens:
        return "PB3"
    return "PB1" if before.num_prefill_tokens and after.num_prefill_tokens else "PB2"


class Executor(Protocol):
    """Runs batches and owns the clock, in seconds since `start`; collects them in the order of
    submission.
    """

    capacity: int  # batches in flight: of a pipeline its stages, 2 where one is made as one runs
    feeds_tokens: bool  # from batch to batch, so a sequence in flight may be submitted again

    @property
    def num_blocks(self) -> int | None:
        """Blocks of its cache; None where there is no real one."""

    @property
    def num_layers(self) -> int | None:
        """Layers that prompts may pass in groups (`Batch.layers`); None: only all at once."""

    @property
    def now(self) -> float: ...

    @property
    def num_in_flight(self) -> int: ...

    def start(self) -> None:
        """Set the clock to zero; whatever ran before (warm-up, loading) is not part of the run."""

    def submit(self, batch: Batch) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the oldest batch in flight."""

    @property
    def next_end(self) -> float:
        """When the oldest batch in flight ends; `now` where only waiting tells."""

    def wait_until(self, time: float) -> None:
        """Let the clock reach `time`; nothing in flight ends before."""

    def write_profile(self, directory: Path) -> Mapping[str, float]:
        """Write what was watched of the run; returns what the summary should hold of it."""


@dataclass(frozen=True)
class Predictor:
    """Seconds of an iteration: by operation, or, called, one after the other. Prompts may pass
    `num_layers` in groups, unless None.
    """

    operation_times: Callable[[Batch], dict[str, float]]
    num_layers: int | None = None

    def __call__(self, batch: Batch) -> float:
        return sum(self.operation_times(batch).values())


@dataclass(frozen=True)
class Sizes:
    """What an executor is made for: tokens and sequences of an iteration, and the cache."""

    num_blocks: int  # as planned with
    block_size: int
    batch_size: int
    max_model_len: int | None = None  # None: as long as the cache
    max_batch_tokens: int | None = None  # None: whatever the warm-up runs
    chunk: int | None = None  # None: batches with prompts may have any number of tokens
    fills_memory: bool = False  # with the cache, whatever `num_blocks`
    num_host_blocks: int = 0  # of the cache in host memory, for what is swapped out
    num_drafts: int = 0  # of a decode, at most


class Backend(Protocol):
    """A device, real or simulated. Making one is cheap and checks its arguments (UserError)."""

    @property
    def name(self) -> str:
        """The option of the config group: "torch" or "simulated"."""

    @property
    def device_name(self) -> str: ...

    @property
    def dtype_name(self) -> str:
        """ "float32", "bfloat16", "float16" or "int8", resolved from "auto"."""

    @property
    def dtype_bytes(self) -> int: ...

    @property
    def computes_tokens(self) -> bool:
        """Whether prompts need token ids and outputs have them."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, so batches in flight; 1 on a device that is none."""

    @property
    def num_devices(self) -> int:
        """That compute together, those of all stages."""

    @property
    def power(self) -> PowerModel | None:
        """What each of its devices draws; None where nothing is known of it."""

    @property
    def default_model(self) -> str:
        """What model=auto stands for on this device."""

    def check(self, spec: ModelSpec, kv_tokens: int, host_kv_tokens: int = 0) -> None:
        """Raise UserError if the model can't run here with caches of so many tokens."""

    def peaks(self) -> Peaks:
        """Peak FLOP/s and bytes/s of all devices together, measured or from the hardware file."""

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """What to keep in mind of figures from here, a line each; none if measured."""

    def predictor(self, spec: ModelSpec) -> Predictor | None:
        """The device's cost model for `spec`, which `chunk=auto` is chosen by; None without."""

    def kv_blocks(self, spec: ModelSpec, block_size: int) -> int:
        """Blocks that fit beside the weights; an estimate where only loading can tell."""

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Executor:
        """A warmed-up executor of `sizes`, with the weights of `checkpoint`."""

"""What a run needs to know of a device before and while it runs; `conf/executor/*.yaml` picks one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sarathi_lab.executor import Executor
from sarathi_lab.floor import Ceilings
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.request import Batch


@dataclass(frozen=True)
class Predictor:
    """Seconds of an iteration by operation, known without running it; products come in tiles of `tile` tokens."""

    operation_times: Callable[[Batch], dict[str, float]]
    tile: int

    def __call__(self, batch: Batch) -> float:
        """Seconds of `batch`: its operations one after the other."""
        return sum(self.operation_times(batch).values())


@dataclass(frozen=True)
class Sizes:
    """What an executor is made for: tokens and sequences of an iteration, and the cache.

    `chunk` is set where no batch with prompts exceeds so many tokens. With `fills_memory` the cache takes what the
    memory holds, and `num_blocks` is what was planned with.
    """

    num_blocks: int
    block_size: int
    batch_size: int
    max_model_len: int | None = None  # None: as long as the cache
    max_batch_tokens: int | None = None  # None: whatever the warm-up runs
    chunk: int | None = None
    fills_memory: bool = False
    num_host_blocks: int = 0  # of the cache in host memory, for what is swapped out


class Backend(Protocol):
    """A device, real or simulated. Making one is cheap and checks its arguments (UserError)."""

    @property
    def name(self) -> str:
        """The option of the config group: "torch" or "simulated"."""
        ...

    @property
    def device_name(self) -> str:
        """The device in words, as tables and tags show it."""
        ...

    @property
    def dtype_name(self) -> str:
        """ "float32", "bfloat16" or "float16", resolved from "auto"."""
        ...

    @property
    def dtype_bytes(self) -> int: ...

    @property
    def computes_tokens(self) -> bool:
        """Whether prompts need token ids and outputs have them."""
        ...

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, so batches in flight; 1 on a device that is none."""
        ...

    @property
    def default_model(self) -> str:
        """What model=auto stands for on this device."""
        ...

    def check(self, spec: ModelSpec, kv_tokens: int, host_kv_tokens: int = 0) -> None:
        """Raise UserError if the model can't run here with a cache of `kv_tokens`, and another in host memory."""
        ...

    def ceilings(self) -> Ceilings:
        """Peak FLOP/s and bytes/s of all devices together, measured or from the hardware file."""
        ...

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """What to keep in mind of figures from this device, a line each; none where they are measured."""
        ...

    def predictor(self, spec: ModelSpec) -> Predictor | None:
        """The device's cost model for `spec`, or None if it has none: what `chunk=auto` is chosen by."""
        ...

    def kv_blocks(self, spec: ModelSpec, block_size: int) -> int:
        """Blocks that fit the memory beside the weights; where only loading the model can tell, an estimate."""
        ...

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Executor:
        """Load the weights and return a warmed-up executor of `sizes`."""
        ...

"""CUDA graphs of a serving system: the batches that it has captured, and launching the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from sarathi_lab.config.checked import check_fields, listed, number, one_of, refuse_unread, whole
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.engine.request import Batch

# vLLM's modes, by what it replays for decodes alone and for any other batch.
Replay = Literal["full", "piecewise", "none"]
REPLAYS: dict[str, tuple[Replay, Replay]] = {
    "full": ("full", "full"),
    "piecewise": ("piecewise", "piecewise"),
    "full_and_piecewise": ("full", "piecewise"),
    "full_decode_only": ("full", "none"),
    "none": ("none", "none"),
}
SIZE = "use tokens such as [1,2,4,8], or null for vLLM's up to host.graphs.largest"
_seconds = partial(number, 0.0, minimum=0, fix="use seconds from 0")
_tokens = partial(whole, minimum=1, fix="use tokens such as 512")


@dataclass(frozen=True, kw_only=True)
class CudaGraphs:
    """Captured batches, each padded to the next captured size.

    Replayed whole ("full") a batch launches in no time; "piecewise", its attention is launched
    between captured pieces. The device computes meanwhile, so that the longer of the two counts.

    Attributes:
        mode: One of `REPLAYS`; None: nothing is padded, and launches take no time.
        sizes: Tokens of the captured batches; None: vLLM's up to `largest`.
        largest: Tokens of the largest captured batch.
        layer_launch: Seconds of launching a layer of a batch that is not captured.
        piece_launch: Seconds of launching the attention of a layer between captured pieces.
    """

    mode: str | None = one_of(None, name="host.graphs.mode", valid=tuple(REPLAYS))
    sizes: Sequence[int] | None = listed(
        None, each=partial(require_int, minimum=1, fix=SIZE), complaint=f"names no size; {SIZE}"
    )
    largest: int = _tokens(512)
    layer_launch: float = _seconds()
    piece_launch: float = _seconds()

    def __post_init__(self) -> None:
        check_fields(self, "host.graphs.")
        if self.mode is None:
            reason = ", as no mode captures any; add host.graphs.mode=full_and_piecewise"
            refuse_unread(self, ["sizes", "largest"], reason, "host.graphs.")
        if self.sizes is not None:
            refuse_unread(self, ["largest"], ", as sizes are named; drop one", "host.graphs.")
        if self.piece_launch > self.layer_launch:
            raise UserError(
                f"host.graphs.piece_launch={self.piece_launch} exceeds layer_launch="
                f"{self.layer_launch}, of the same layer and more; lower it"
            )

    @cached_property
    def captured(self) -> Sequence[int]:
        """Ascending sizes, without any in mode "none"."""
        if self.mode == "none":
            return ()
        return vllm_sizes(self.largest) if self.sizes is None else sorted(set(self.sizes))

    def launched(self, batch: Batch) -> tuple[int, float]:
        """Return the tokens that a layer of `batch` computes, padded to a captured size, and the
        seconds of launching it.
        """
        replay = REPLAYS[self.mode or "none"][bool(batch.num_prefill_tokens)]
        i = bisect_left(self.captured, batch.num_tokens)
        if i == len(self.captured) or replay == "none":
            return batch.num_tokens, self.layer_launch
        launch = self.piece_launch if replay == "piecewise" else 0.0
        return self.captured[i], launch


def vllm_sizes(largest: int) -> list[int]:
    """List the sizes that vLLM 0.32 captures up to `largest` (`_set_cudagraph_sizes`)."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16), largest]
    return sorted({size for size in steps if size <= largest})

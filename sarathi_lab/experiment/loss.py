"""The price of chunking alone, by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sarathi_lab.executor.simulated.cost_model import KINDS, OperationTimes
from sarathi_lab.executor.simulated.hardware import EXPERTS
from sarathi_lab.experiment.work import chunked

MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]


@dataclass(frozen=True)
class LossSplit:
    """Extra seconds of a prompt in chunks over `whole`, by cause; a gain is below zero.

    `attention` is the cache read again by every chunk (and smaller kernels), `matmul` part-filled
    tiles and waves and weights read once per chunk (a product overlaps the two), `fixed` the costs
    of an iteration of any size. Of `matmul`, `experts` is a mixture's.
    """

    whole: float
    attention: float
    matmul: float
    fixed: float
    experts: float = 0.0

    @classmethod
    def of(cls, whole: Mapping[str, float], cut: Mapping[str, float]) -> LossSplit:
        """Split the difference of seconds by operation. The causes sum up to it: all but matrix
        products and attention is `fixed`.
        """
        extra = {name: cut.get(name, 0.0) - whole.get(name, 0.0) for name in {**whole, **cut}}
        attention = sum(extra.get(name, 0.0) for name in ATTENTION)
        matmul = sum(extra.get(name, 0.0) for name in MATMUL)
        fixed = sum(s for name, s in extra.items() if name not in (*ATTENTION, *MATMUL))
        return cls(sum(whole.values()), attention, matmul, fixed, extra.get(EXPERTS, 0.0))

    @property
    def total(self) -> float:
        return self.attention + self.matmul + self.fixed


def chunking_loss(prompt_len: int, chunk: int, operation_times: OperationTimes) -> LossSplit:
    """Return the extra time of a prompt, prefilled alone in chunks (section 4.2, Fig 13)."""

    def seconds_in(tokens: int) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for batch in chunked(prompt_len, tokens, emits=True).batches:
            for name, seconds in operation_times(batch).items():
                total[name] += seconds
        return total

    return LossSplit.of(seconds_in(prompt_len), seconds_in(chunk))

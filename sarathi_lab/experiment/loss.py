"""The price of chunking alone, by cause."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import KINDS, OperationTimes
from sarathi_lab.executor.simulated.hardware import EXPERTS
from sarathi_lab.model.spec import ModelSpec

MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]


@dataclass(frozen=True)
class LossSplit:
    """Seconds that a prompt in chunks takes more than `whole`, by cause; below zero is a gain.

    `attention` is the cache read again by every chunk (and smaller kernels), `matmul` part-filled
    tiles and waves and weights read once per chunk (a product overlaps the two), `fixed` what an
    iteration costs whatever its size. Of `matmul`, `experts` is a mixture's.
    """

    whole: float
    attention: float
    matmul: float
    fixed: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.matmul + self.fixed


def chunking_loss(prompt_len: int, chunk: int, operation_times: OperationTimes) -> LossSplit:
    """The extra time of a prompt, prefilled alone in chunks (section 4.2, Fig 13).

    What is neither a matrix product nor attention counts as fixed, so that the parts add up.
    """

    def seconds_in(tokens: int) -> pd.Series:
        starts = range(0, prompt_len, tokens)
        sizes = [(start, min(tokens, prompt_len - start)) for start in starts]
        batches = [
            make_batch(prefill_tokens=size, start=start, emits=start + size == prompt_len)
            for start, size in sizes
        ]
        return pd.DataFrame(map(operation_times, batches)).sum()

    whole = seconds_in(prompt_len)
    extra = seconds_in(chunk).sub(whole, fill_value=0.0)
    attention = float(extra[extra.index.isin(ATTENTION)].sum())
    matmul = float(extra[extra.index.isin(MATMUL)].sum())
    fixed = float(extra[~extra.index.isin((*ATTENTION, *MATMUL))].sum())
    experts = float(extra.get(EXPERTS, 0.0))
    return LossSplit(float(whole.sum()), attention, matmul, fixed, experts)


def why_of_experts(spec: ModelSpec, prompt_len: int, chunk: int, loss: LossSplit) -> str:
    """What a chunk loads again of the experts of a mixture `spec`, and what that takes."""
    reads = {tokens: float(spec.share_of_experts(tokens)) for tokens in (chunk, prompt_len)}
    each = {
        tokens: tokens * spec.experts_per_token / spec.num_experts / share
        for tokens, share in reads.items()
    }
    return (
        f"experts: a chunk of {chunk} tokens loads {reads[chunk]:.0%} of a layer's "
        f"{spec.num_experts}, each for {each[chunk]:.0f} tokens, the whole prompt for "
        f"{each[prompt_len]:.0f}; loading them again for every chunk takes "
        f"{1e3 * loss.experts:.1f} of the {1e3 * loss.total:.1f} ms that cutting takes more"
    )

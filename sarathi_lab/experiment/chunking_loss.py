"""The price of chunking alone: what a prompt cut into chunks takes more than whole, by cause."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.simulated.cost_model import KINDS, OperationTimes

MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]


@dataclass(frozen=True)
class LossSplit:
    """Seconds that a prompt cut into chunks takes more than whole, by cause; `whole` is its time
    uncut.

    `attention` is the cache read again by every chunk (and smaller attention kernels), `matmul` the
    smaller matrix products (part-filled tiles and waves, weights read once per chunk: a product
    overlaps the two, so there is no telling them apart), `fixed` what an iteration costs whatever
    its size. A part below zero is a gain.
    """

    whole: float
    attention: float
    matmul: float
    fixed: float

    @property
    def total(self) -> float:
        """Seconds lost in all."""
        return self.attention + self.matmul + self.fixed


def chunking_loss(prompt_len: int, chunk: int, operation_times: OperationTimes) -> LossSplit:
    """The extra time of a prompt of `prompt_len` tokens, prefilled alone in chunks of `chunk`
    (section 4.2, Fig 13).

    `operation_times` names its operations as `cost_model.KINDS` does; what is neither a matrix
    product nor attention counts as fixed, so that the parts add up to the whole difference.
    """
    whole = _prefill_times(prompt_len, prompt_len, operation_times)
    cut = _prefill_times(prompt_len, chunk, operation_times)
    extra = cut.sub(whole, fill_value=0.0)
    attention = float(extra[extra.index.isin(ATTENTION)].sum())
    matmul = float(extra[extra.index.isin(MATMUL)].sum())
    fixed = float(extra[~extra.index.isin((*ATTENTION, *MATMUL))].sum())
    return LossSplit(float(whole.sum()), attention, matmul, fixed)


def _prefill_times(prompt_len: int, chunk: int, operation_times: OperationTimes) -> pd.Series:
    """Seconds by operation, summed over the chunks of one prompt."""
    sequence = SequenceState(Request(0, 0.0, prompt_len, 1), order=0)
    rows = []
    while sequence.num_pending:
        batch = Batch()
        batch.add(sequence, min(chunk, sequence.num_pending))
        rows.append(operation_times(batch))
        sequence.in_flight = False
        sequence.num_computed += batch.num_prefill_tokens
    return pd.DataFrame(rows).sum()

"""Chunks that shrink as a prompt's context grows, so that each takes a pipeline's stages equally
long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sarathi_lab.config.checked import share, whole
from sarathi_lab.engine.policy import Reserve
from sarathi_lab.engine.request import Batch, SequenceState
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.extensions.after_sarathi.prefill_cost import KnowsPrefillCost

LEAST_SHARE = 4  # a chunk is at least this part of the first


@dataclass(frozen=True)
class DynamicChunks(KnowsPrefillCost):
    """Decodes, then prompts in order of arrival, whose chunks follow one another through a pipeline
    and shrink: SGLang's dynamic chunking.

    A prompt's time is taken for a quadratic f of its length. The next chunk x behind L tokens
    solves f(L + x) - f(L) = f(`chunk`) - f(0), is brought nearer to `chunk` by 1 -
    `smooth_factor`, is at least a quarter of that, and a multiple of `alignment` tokens.
    `smooth_factor=0` leaves all chunks alike. Rule and defaults are those of
    `scheduler_pp_mixin.py` and its environment variable SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR.

    There f is fitted to whole prompts of up to 1.25 chunks, here to those of up to the model
    length. There a batch has prompts or decodes unless they are mixed, here both.

    The next chunk of a prompt is begun before the one before has left the pipeline
    (`Policy.follows_up`), as every stage takes them in order.
    """

    name = "dynamic_chunks"
    budget_field = "chunk"
    follows_up = True
    chunk: int = 8192
    smooth_factor: float = share(0.75, fix="use 0 for chunks that are alike, or 0.75")
    alignment: int = whole(64, minimum=1, fix="use the tokens of a page such as 64")
    watermark: float = 0.01
    reserve: Reserve = "prompt"

    def check(self, batch_size: int, max_model_len: int) -> None:
        if self.smooth_factor:
            self.check_seconds(f"policy={self.name}")

    def fill(self, batch: Batch, scheduler: Scheduler) -> None:
        def size(sequence: SequenceState, left: int) -> int:
            return min(left, max(0, self.next_chunk(sequence.num_computed) - batch.num_tokens))

        scheduler.sort_running()
        scheduler.add_decodes(batch, self.chunk)
        scheduler.continue_prefills(batch, self.chunk, size=size)
        scheduler.admit(batch, self.chunk, size=size)

    def next_chunk(self, context: int) -> int:
        """Tokens of an iteration whose prompt has `context` tokens behind it."""
        square, linear = cost = self.prefill_cost
        # Behind nothing the solution is `chunk` itself, which rounding would take a page from.
        if not (square and context):
            return self.chunk
        whole_chunk = cost(self.chunk)
        slope = 2 * square * context + linear
        equal = (math.sqrt(slope * slope + 4 * square * whole_chunk) - slope) / (2 * square)
        smoothed = int(self.chunk + self.smooth_factor * (equal - self.chunk))
        tokens = max(smoothed, self.chunk // LEAST_SHARE)
        return min(self.chunk, max(self.alignment, tokens // self.alignment * self.alignment))

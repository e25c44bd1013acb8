"""The price of chunking alone: what a prompt in chunks costs more than whole, and its figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.executor.simulated.cost_model import KINDS, OperationTimes
from sarathi_lab.experiment.clock import Clock, Estimate, Point, Unit
from sarathi_lab.experiment.registry import Ints, figure
from sarathi_lab.model.spec import ModelSpec

MATMUL = (*KINDS["preproj"], *KINDS["postproj"], *KINDS["ffn"], "lm_head")
ATTENTION = KINDS["attn"]
KV_BYTES = 2  # an element's in the panel of bytes, whatever the device computes in


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
    return LossSplit(float(whole.sum()), attention, matmul, fixed)


@figure(question="What does chunking cost when no decode rides along?", seconds=30)
def kv_reread(spec: ModelSpec, *, prompts: Ints, chunks: Ints) -> Iterator[Unit]:
    """By prompt and chunk the prompt as a whole beside itself in chunks; by chunk and context one
    chunk alone.
    """
    for prompt in prompts:
        for chunk in chunks:
            if chunk <= prompt:
                yield partial(_prompt_in_chunks, prompt, chunk)
    longest = max(prompts)
    for chunk in chunks[:3]:
        for start in sorted({0, longest // 4, longest // 2, longest - chunk}):
            yield partial(_chunk_at_context, spec, start, chunk)


def _prompt_in_chunks(prompt: int, chunk: int, clock: Clock) -> Iterator[Point]:
    """Ratios of cut to whole, and the split of the price by cause as shares of the whole prompt's
    time.

    Bytes of keys and values are counted from the batches, beside the N(N+1)/2 of section 4.2.
    """
    name, batches = str(prompt), chunks_of(prompt, chunk)
    whole, cut = clock.batch(*chunks_of(prompt, prompt)), clock.batch(*batches)
    loss = chunking_loss(prompt, chunk, clock.cost.operation_times)
    formula = (len(batches) + 1) / 2
    read = sum(batch.prefill_kv_tokens for batch in batches) / prompt
    slower = clock.seconds(cut, ("attn",)).over(clock.seconds(whole, ("attn",)))
    error = clock.seconds(whole).error
    yield Point("KV bytes / whole", name, chunk, Estimate(read))
    yield Point("N(N+1)/2 / N", name, chunk, Estimate(formula))
    yield Point("counted / N(N+1)/2", name, chunk, Estimate(read / formula))
    yield Point("attention time / whole", name, chunk, slower)
    yield Point("prefill time / whole", name, chunk, Estimate(1 + loss.total / loss.whole, error))
    causes = {"re-read": loss.attention, "smaller products": loss.matmul, "fixed cost": loss.fixed}
    for cause, seconds in causes.items():
        share = Estimate(seconds / loss.whole, error)
        yield Point(f"price: {cause}", name, chunk, share, kind="share")


def _chunk_at_context(spec: ModelSpec, start: int, chunk: int, clock: Clock) -> Iterator[Point]:
    """Milliseconds of one chunk's attention behind `start` cached tokens, and megabytes of keys and
    values it reads.
    """
    batch, series = make_batch(prefill_tokens=chunk, start=start), f"C={chunk}"
    megabytes = Estimate(float(spec.kv_read_bytes(batch, KV_BYTES)) / 1e6)
    attention = clock.duration(batch, kinds=("attn",)).times(1e3)
    yield Point("attention [ms]", series, start, attention, "ms")
    yield Point("KV read [MB]", series, start, megabytes, "MB")

"""What chunks cost more than a whole prompt: keys and values read again, smaller products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.experiment.advisor import chunking_loss
from sarathi_lab.experiment.clock import Clock, Estimate, Point, Unit
from sarathi_lab.experiment.registry import Ints, figure
from sarathi_lab.model.spec import ModelSpec

KV_BYTES = 2  # an element's in the panel of bytes, whatever the device computes in


@figure(question="What does chunking cost when no decode rides along?", seconds=30)
def kv_reread(spec: ModelSpec, *, prompts: Ints, chunks: Ints) -> Iterator[Unit]:
    """Prompts whole beside themselves in chunks; by chunk and context one chunk alone."""
    for prompt in prompts:
        for chunk in chunks:
            if chunk <= prompt:
                yield partial(_prompt_in_chunks, prompt, chunk)
    longest = max(prompts)
    for chunk in chunks[:3]:
        for start in sorted({0, longest // 4, longest // 2, longest - chunk}):
            yield partial(_chunk_at_context, spec, start, chunk)


def _prompt_in_chunks(prompt: int, chunk: int, clock: Clock) -> Iterator[Point]:
    """Ratios of cut to whole, bytes beside the N(N+1)/2 of section 4.2, and the price by cause as
    shares of the whole prompt's time.
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
    """One chunk's attention behind `start` cached tokens, and the keys and values it reads."""
    batch, series = make_batch(prefill_tokens=chunk, start=start), f"C={chunk}"
    megabytes = Estimate(float(spec.kv_read_bytes(batch, KV_BYTES)) / 1e6)
    attention = clock.duration(batch, kinds=("attn",)).times(1e3)
    yield Point("attention [ms]", series, start, attention, "ms")
    yield Point("KV read [MB]", series, start, megabytes, "MB")

"""What a prompt in chunks costs more than whole: keys and values read again, smaller products, more
iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.experiment.bench import Bench, Estimate, Point
from sarathi_lab.experiment.chunking_loss import chunking_loss
from sarathi_lab.experiment.sizes import Setup
from sarathi_lab.experiment.timed_figures import Unit
from sarathi_lab.model.spec import ModelSpec

ATTENTION = ("attn",)
KV_BYTES = (
    2  # an element's, of the panel in bytes: of 16-bit elements, whatever the device computes in
)


def reread_units(setup: Setup, spec: ModelSpec) -> list[Unit]:
    """By prompt and chunk the prompt as a whole beside itself in chunks; by chunk and context one
    chunk alone.
    """
    units = [
        Unit("kv_reread", _points(prompt_in_chunks, spec, prompt, chunk))
        for prompt in setup.reread_prompts
        for chunk in setup.reread_chunks
        if chunk <= prompt
    ]
    longest = max(setup.reread_prompts)
    return units + [
        Unit("kv_reread", _points(chunk_at_context, spec, start, chunk))
        for chunk in setup.reread_chunks[:3]
        for start in sorted({0, longest // 4, longest // 2, longest - chunk})
    ]


def prompt_in_chunks(bench: Bench, spec: ModelSpec, prompt: int, chunk: int) -> Iterator[Point]:
    """Ratios of cut to whole, and the split of the price by cause as shares of the whole prompt's
    time.

    Bytes of keys and values are counted from the batches, beside the N(N+1)/2 of section 4.2; the
    causes are those of `chunking_loss`.
    """
    name, batches = str(prompt), chunks_of(prompt, chunk)
    whole, cut = bench.batch(*chunks_of(prompt, prompt)), bench.batch(*batches)
    num_chunks = len(batches)
    loss = chunking_loss(prompt, chunk, bench.cost.operation_times)
    read = sum(batch.prefill_kv_tokens for batch in batches)
    yield Point("KV bytes / whole", name, chunk, Estimate(read / prompt, 0.0))
    yield Point("N(N+1)/2 / N", name, chunk, Estimate((num_chunks + 1) / 2, 0.0))
    yield Point(
        "counted / N(N+1)/2", name, chunk, Estimate(2 * read / prompt / (num_chunks + 1), 0.0)
    )
    slower = bench.seconds(cut, ATTENTION).over(bench.seconds(whole, ATTENTION))
    yield Point("attention time / whole", name, chunk, slower)
    error = bench.seconds(whole).error
    yield Point("prefill time / whole", name, chunk, Estimate(1 + loss.total / loss.whole, error))
    for cause, seconds in (
        ("re-read", loss.attention),
        ("smaller products", loss.matmul),
        ("fixed cost", loss.fixed),
    ):
        yield Point(f"price: {cause}", name, chunk, Estimate(seconds / loss.whole, error))


def chunk_at_context(bench: Bench, spec: ModelSpec, start: int, chunk: int) -> Iterator[Point]:
    """Milliseconds of one chunk's attention behind `start` cached tokens, and megabytes of keys and
    values it reads.
    """
    batch = make_batch(prefill_tokens=chunk, start=start)
    yield Point(
        "attention [ms]",
        f"C={chunk}",
        start,
        bench.seconds(bench.batch(batch), ATTENTION).times(1e3),
    )
    yield Point(
        "KV read [MB]",
        f"C={chunk}",
        start,
        Estimate(float(spec.kv_read_bytes(batch, KV_BYTES)) / 1e6, 0.0),
    )


def _points(
    points: Callable[..., Iterable[Point]], *arguments: object
) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: points(bench, *arguments)

"""What attention takes for a prompt whole and in chunks, which read their context again: time and
bytes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import chunks_of
from sarathi_lab.experiment.loading import load
from sarathi_lab.experiment.measured_clock import MeasuredCostModel
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import coarse_to_fine, summary
from sarathi_lab.tasks.gpu.context import Context

NUM_LAYERS = (
    4  # enough that no layer finds its context in the device's cache; times are given for one
)
PROMPTS, CHUNKS = (4096, 16384), (256, 512, 1024, 2048)
DRY_PROMPTS, DRY_CHUNKS = (64, 128), (16, 32)
FEWEST_ROUNDS, MOST_ROUNDS = 2, 20


def measure(context: Context) -> None:
    """Write kv_reread.csv: microseconds of a layer's attention, and bytes of keys and values read,
    by prompt and chunk.

    Rounds over all chunks, so that whole and cut are compared at the same time; the whole prompt is
    the chunk of its own length.
    """
    spec = replace(
        load_option("model", "tiny" if context.is_dry else "13b"),
        num_layers=2 if context.is_dry else NUM_LAYERS,
    )
    prompts, chunks = (DRY_PROMPTS, DRY_CHUNKS) if context.is_dry else (PROMPTS, CHUNKS)
    backend, executor = load(
        context, spec, kv_tokens=max(prompts), batch_size=1, longest=max(prompts)
    )
    cost = MeasuredCostModel(executor)
    cases = [(prompt, chunk) for prompt in prompts for chunk in (prompt, *coarse_to_fine(chunks))]
    samples: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and context.is_over:
            break
        for prompt, chunk in cases:
            samples[prompt, chunk].append(_seconds(cost, prompt, chunk) / spec.num_layers)
    rows = [
        _row(spec, backend.dtype_bytes, *case, samples[case], samples[case[0], case[0]])
        for case in cases
    ]
    context.write("kv_reread", "kv_reread", [row for pair in rows for row in pair])
    context.say(f"{len(cases)} ways to cut a prompt, {min(map(len, samples.values()))} rounds")


def _seconds(cost: MeasuredCostModel, prompt: int, chunk: int) -> float:
    """Attention of all chunks, one after the other, over all layers."""
    total = 0.0
    for batch in chunks_of(prompt, chunk):
        placed = cost.placed(batch)
        assert placed is not None, "the cache was made for the longest prompt"
        total += cost.attention(placed)
    return total


def _row(
    spec: ModelSpec,
    dtype_bytes: int,
    prompt: int,
    chunk: int,
    seconds: list[float],
    whole: list[float],
) -> list[dict[str, object]]:
    batches = chunks_of(prompt, chunk)
    num_bytes = sum(spec.kv_read_bytes(batch, dtype_bytes) for batch in batches) / spec.num_layers
    labels = {
        "model": spec.name,
        "prompt_len": prompt,
        "chunk": chunk,
        "kv_bytes": num_bytes,
        "reread_factor": sum(batch.prefill_kv_tokens for batch in batches) / prompt,
    }
    slower = [mine / theirs for mine, theirs in zip(seconds, whole, strict=True)]
    return [
        {**labels, "quantity": "attention of a layer", **summary([1e6 * s for s in seconds], "us")},
        {**labels, "quantity": "time / whole", **summary(slower, "ratio")},
    ]

"""What chunks cost where the FFN is a mixture of experts: every chunk loads the experts again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sarathi_lab.experiment.bench import EVERYTHING, Bench
from sarathi_lab.experiment.grid import Grid
from sarathi_lab.experiment.points import Parts, Point, part
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, experiment
from sarathi_lab.experiment.scenario import Work, batch, chunked
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.spec import PlotSpec

FFN = "FFN / whole"
PREFILL = "prefill / whole"
BESIDE = "beside {} decodes / apart"
LONGEST = "longest gap / whole"


@experiment(
    Grid,
    question="Does decode-maximal batching still pay where chunks load experts again?",
    seconds=120,
    # Each mixture, and dense models of as many active parameters, or in all. Mixtral does not fit
    # one device; what it is compared with is on two, too, as is what leaves one no cache.
    papers=[
        Platform("qwen3-30b-a3b", "h100"),
        Platform("llama3.2-3b", "h100"),
        Platform("qwen3-32b", "h100", 2),
        Platform("mixtral-8x7b", "h100", 2),
        Platform("13b", "h100", 2),
    ],
    simulated=PROFILED,
    look=PlotSpec(
        "A prompt in chunks, in dense models and mixtures of experts",
        "tokens of a chunk",
        "in chunks / at once",
        log_x=True,
        log_y=True,
        legend="model",
        panels={
            FFN: "time of the FFN",
            PREFILL: "time of the prefill",
            LONGEST: "longest gap between tokens",
        },
    ),
)
def expert_reload(
    spec: ModelSpec,
    *,
    prompt_len: int,
    chunks: Ints,
    decodes: Ints,
    context: int,
    models: Sequence[str] = (),
) -> Parts:
    """A prompt in chunks over the same at once, in the FFN and as a whole; with decodes of
    `context` tokens riding on every chunk over the whole prompt and as many iterations of them
    after it; and the longest iteration that the most decodes ride on, over the whole prompt. The
    task measures `models` one after the other, unless one was chosen.
    """
    for chunk in chunks:
        yield part(_alone, spec.name, prompt_len, chunk)
        for number in decodes:
            yield part(_beside_decodes, spec.name, prompt_len, chunk, number, context)
        yield part(_longest_gap, spec.name, prompt_len, chunk, max(decodes), context)


def _alone(bench: Bench, model: str, prompt_len: int, chunk: int) -> Iterator[Point]:
    uncut = chunked(prompt_len, prompt_len)
    cut = chunked(prompt_len, chunk)
    for panel, kinds in ((FFN, ("ffn",)), (PREFILL, EVERYTHING)):
        ratio = bench.seconds(cut, kinds) / bench.seconds(uncut, kinds)
        yield Point(panel, model, chunk, ratio)


def _beside_decodes(
    bench: Bench, model: str, prompt_len: int, chunk: int, number: int, context: int
) -> Iterator[Point]:
    riding = chunked(prompt_len, chunk, num_decodes=number, context=context)
    # As many iterations of decodes alone as chunks carry them.
    decoding = len(riding.terms) * batch(num_decodes=number, context=context)
    separate = chunked(prompt_len, prompt_len) + decoding
    ratio = bench.seconds(riding) / bench.seconds(separate)
    yield Point(BESIDE.format(number), model, chunk, ratio)


def _longest_gap(
    bench: Bench, model: str, prompt_len: int, chunk: int, number: int, context: int
) -> Iterator[Point]:
    """The last full chunk; no decode rides with the whole prompt."""
    riding = chunked(prompt_len, chunk, num_decodes=number, context=context)
    num_full = prompt_len // chunk
    last = Work((riding.terms[num_full - 1],))
    uncut = chunked(prompt_len, prompt_len)
    ratio = bench.seconds(last) / bench.seconds(uncut)
    yield Point(LONGEST, model, chunk, ratio)

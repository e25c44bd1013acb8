"""What chunks cost where the FFN is a mixture of experts: every chunk loads the experts again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.experiment.clock import EVERYTHING, Clock, Point, Unit, weighted
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, figure
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.look import Look

FFN, PREFILL = "FFN / whole", "prefill / whole"
BESIDE, LONGEST = "beside {} decodes / apart", "longest gap / whole"


@figure(
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
    look=Look(
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
) -> Iterator[Unit]:
    """A prompt in chunks over the same at once, in the FFN and as a whole; with decodes of
    `context` tokens riding on every chunk over the whole prompt and as many iterations of them
    after it; and the longest iteration that the most decodes ride on, over the whole prompt. The
    task measures `models` one after the other, unless one was chosen.
    """
    for chunk in chunks:
        yield partial(_alone, spec.name, prompt_len, chunk)
        for number in decodes:
            yield partial(_with_decodes, spec.name, prompt_len, chunk, number, context)
        yield partial(_longest, spec.name, prompt_len, chunk, max(decodes), context)


def _alone(model: str, prompt_len: int, chunk: int, clock: Clock) -> Iterator[Point]:
    whole, cut = (clock.batch(*chunks_of(prompt_len, tokens)) for tokens in (prompt_len, chunk))
    for panel, kinds in ((FFN, ("ffn",)), (PREFILL, EVERYTHING)):
        ratio = clock.seconds(cut, kinds).over(clock.seconds(whole, kinds))
        yield Point(panel, model, chunk, ratio)


def _with_decodes(
    model: str, prompt_len: int, chunk: int, number: int, context: int, clock: Clock
) -> Iterator[Point]:
    riding = chunks_of(prompt_len, chunk, num_decodes=number, context=context)
    alone = clock.batch(make_batch(num_decodes=number, context=context))
    whole = clock.batch(*chunks_of(prompt_len, prompt_len))
    apart = clock.seconds(weighted((1.0, whole), (float(len(riding)), alone)))
    yield Point(BESIDE.format(number), model, chunk, clock.duration(*riding).over(apart))


def _longest(
    model: str, prompt_len: int, chunk: int, number: int, context: int, clock: Clock
) -> Iterator[Point]:
    """Of the last full chunk, over the whole prompt, with which no decode rides."""
    last = chunks_of(prompt_len, chunk, num_decodes=number, context=context)[
        prompt_len // chunk - 1
    ]
    whole = clock.duration(*chunks_of(prompt_len, prompt_len))
    yield Point(LONGEST, model, chunk, clock.duration(last).over(whole))

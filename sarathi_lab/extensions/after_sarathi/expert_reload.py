"""What chunks cost where the FFN is a mixture of experts: every chunk loads the experts again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sarathi_lab.experiment.cases import Case, Cases, seconds
from sarathi_lab.experiment.registry import PROFILED, Ints, Platform, figure
from sarathi_lab.experiment.scenario import WorkSum, batch, chunked
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.plots.spec import PlotSpec

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
) -> Cases:
    """A prompt in chunks over the same at once, in the FFN and as a whole; with decodes of
    `context` tokens riding on every chunk over the whole prompt and as many iterations of them
    after it; and the longest iteration that the most decodes ride on, over the whole prompt. The
    task measures `models` one after the other, unless one was chosen.
    """
    whole = seconds(chunked(prompt_len, prompt_len))
    for chunk in chunks:
        yield _alone(spec.name, prompt_len, chunk)
        for number in decodes:
            riding = chunked(prompt_len, chunk, num_decodes=number, context=context)
            decoding = len(riding.parts) * batch(num_decodes=number, context=context)
            separate = seconds(chunked(prompt_len, prompt_len) + decoding)
            yield Case(BESIDE.format(number), spec.name, chunk, seconds(riding) / separate)
        # The last full chunk; no decode rides with the whole prompt.
        most = chunked(prompt_len, chunk, num_decodes=max(decodes), context=context)
        last = WorkSum((most.parts[prompt_len // chunk - 1],))
        yield Case(LONGEST, spec.name, chunk, seconds(last) / whole)


def _alone(model: str, prompt_len: int, chunk: int) -> Iterator[Case]:
    whole, cut = chunked(prompt_len, prompt_len), chunked(prompt_len, chunk)
    yield Case(FFN, model, chunk, seconds(cut, ("ffn",)) / seconds(whole, ("ffn",)))
    yield Case(PREFILL, model, chunk, seconds(cut) / seconds(whole))

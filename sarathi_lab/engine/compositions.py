"""Batches made to order: the compositions that the paper's tables and figures time."""

from __future__ import annotations

from sarathi_lab.engine.request import Batch, Request, SequenceState


def make_batch(
    *,
    prefill_tokens: int = 0,
    start: int = 0,
    num_prefills: int = 1,
    num_decodes: int = 0,
    context: int = 1,
) -> Batch:
    """`num_prefills` chunks of `prefill_tokens` tokens at offset `start`, and decodes that each see
    `context` tokens.

    The context of a decode counts its own token, as the paper does. The prompts are unfinished: no
    chunk emits.
    """
    batch = Batch()
    for _ in range(num_decodes):
        decode = SequenceState(Request(0, 0.0, context - 1, 2), order=0)
        decode.num_computed = context - 1
        decode.output_token_ids.append(0)  # the pending token
        batch.add(decode, 1)
    for _ in range(num_prefills if prefill_tokens else 0):
        prompt = SequenceState(Request(0, 0.0, start + prefill_tokens + 1, 2), order=0)
        prompt.num_computed = start
        batch.add(prompt, prefill_tokens)
    return batch


def chunks_of(
    prompt_len: int, chunk: int, *, num_decodes: int = 0, context: int = 1
) -> list[Batch]:
    """A prompt in chunks of `chunk` tokens, the last one shorter, each beside `num_decodes`
    decodes.
    """
    return [
        make_batch(
            prefill_tokens=min(chunk, prompt_len - start),
            start=start,
            num_decodes=num_decodes,
            context=context,
        )
        for start in range(0, prompt_len, chunk)
    ]

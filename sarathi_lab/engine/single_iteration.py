"""The time of one iteration as served runs have it, without the host's work where that is hidden.

In a served run the host packs and launches a batch while the device computes the one before. A
batch that is submitted to an idle device waits for all of that, which may be a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sarathi_lab.engine.compositions import run_once
from sarathi_lab.engine.executor import NO_TOKEN, Executor, StepResult
from sarathi_lab.engine.request import Batch

HOST_SHARE = 0.05  # of a time; above it a caution is due, as the time is partly the host's


@dataclass(frozen=True, slots=True)
class SingleIteration:
    """The seconds of an iteration, and in how many of them the host was still launching it, or, on
    a CPU that has no batch in flight beside it, packing it.
    """

    seconds: float
    launching: float
    result: StepResult

    @property
    def host_share(self) -> float:
        """The share of the time in which the device may have waited for the host."""
        return self.launching / self.seconds if self.seconds > 0 else 0.0


def single_iteration(executor: Executor, batch: Batch) -> SingleIteration:
    """Time `batch`, which can be run again afterwards.

    Where tokens pass from one batch to the next on the device, an equal batch goes first, and the
    time is from its end to the end of `batch`: what the host does for `batch` counts only as far as
    it takes longer than the device. Decodes are one token back in the first batch, so that
    they go on from there as in a served run. Where only one batch is in flight (a CPU, stages of a
    pipeline, vLLM without async scheduling), the host's work is part of the time, as it is of every
    iteration that is served there. A simulated iteration has its time already.
    """
    is_measured = executor.num_blocks is not None
    if is_measured and executor.feeds_tokens:
        return _behind_an_equal_one(executor, batch)
    result = run_once(executor, batch)
    launching = result.launching_time
    if is_measured and not launching:
        launching = result.host_time
    return SingleIteration(result.busy, min(launching, result.busy), result)


def _behind_an_equal_one(executor: Executor, batch: Batch) -> SingleIteration:
    executor.start()  # so that the clocks of host and device agree, which drift apart
    with _restored(batch):
        executor.submit(_one_token_earlier(batch))
        _advance(batch)
        executor.submit(batch)
        before = executor.collect()
        result = executor.collect()
    seconds = result.end - before.end
    # From the end of the first batch: the host may not even have begun to launch the second.
    launching = result.start - before.end + result.launching_time
    return SingleIteration(seconds, min(max(0.0, launching), seconds), result)


def _one_token_earlier(batch: Batch) -> Batch:
    """Step the decodes of `batch` back, and return their batch with its prompts."""
    earlier = Batch()
    for sequence, start, num_tokens, is_decode, _ in batch.chunks:
        sequence.in_flight = False
        if is_decode and start > 0:
            sequence.num_computed -= 1
            sequence.output_token_ids.pop()
        earlier.add(sequence, num_tokens)
    return earlier


def _advance(batch: Batch) -> None:
    """Step the decodes of `batch` forward again, to a token that only the device has."""
    for sequence, start, _, is_decode, _ in batch.chunks:
        if is_decode and start > 0:
            sequence.num_computed += 1
            sequence.output_token_ids.append(NO_TOKEN)


def host_caution(what: str, host_share: float) -> list[str]:
    """Return a caution if more than `HOST_SHARE` of the iterations of `what` is the host's work."""
    if host_share <= HOST_SHARE:
        return []
    return [
        f"  in {what}, up to {host_share:.0%} of an iteration is the host's work, not the "
        "device's; a larger model or batch has less of it"
    ]


@contextmanager
def _restored(batch: Batch) -> Iterator[None]:
    """Give the sequences of `batch` their present state back afterwards, out of flight."""
    sequences = [chunk.sequence for chunk in batch.chunks]
    counts = [sequence.num_computed for sequence in sequences]
    tokens = [list(sequence.output_token_ids) for sequence in sequences]
    try:
        yield
    finally:
        for sequence, num_computed, token_ids in zip(sequences, counts, tokens, strict=True):
            sequence.num_computed = num_computed
            sequence.output_token_ids[:] = token_ids
            sequence.in_flight = False

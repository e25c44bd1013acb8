"""Seconds of a pipeline's stages by what a micro-batch has to compute, fitted to runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch

Floats = NDArray[np.float64]
WORK = ("prefill_query_key_pairs", "decode_kv_tokens", "num_emits")  # of a batch, and of a ledger


@dataclass(frozen=True)
class StagedRun:
    """What each micro-batch of a run had to compute, and when each stage did."""

    tokens: Floats  # [micro-batches]
    work: Floats  # [micro-batches, WORK]
    starts: Floats  # [micro-batches, stages], in seconds
    ends: Floats

    @classmethod
    def of(cls, ledger: Ledger) -> StagedRun:
        iterations = ledger.iterations()
        stages = ledger.stages()
        shape = (len(iterations), ledger.num_stages)
        tokens = iterations.num_prefill_tokens + iterations.num_decode_tokens
        return cls(
            tokens=tokens.to_numpy(float),
            work=iterations[[*WORK]].to_numpy(float),
            starts=stages.start.to_numpy().reshape(shape),
            ends=stages.end.to_numpy().reshape(shape),
        )


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the stages of a pipeline, as its simulation takes them.

    A stage's time is interpolated over a batch's tokens between `knots`, and linear in the
    query-key pairs of prompts, the context of decodes and the tokens emitted.
    """

    knots: Sequence[int]
    weights: Floats  # [stages, features]
    sending: Floats  # seconds, and seconds a token, to a stage that waits
    turnarounds: Sequence[float]  # by stage, of a worker that goes on to the next micro-batch

    @classmethod
    def fit(cls, ledgers: Sequence[Ledger]) -> StageTimes:
        """Fit them to all micro-batches of the `ledgers`, by least squares of relative errors with
        no part below zero.
        """
        runs = [StagedRun.of(ledger) for ledger in ledgers]
        largest = int(max(run.tokens.max() for run in runs))
        powers_of_two = {2**power for power in range(largest.bit_length())}
        knots = sorted(powers_of_two | {largest})
        features_of_runs = []
        seconds_of_runs = []
        for run in runs:
            features_of_run = features_of(run.tokens, run.work, knots)
            features_of_runs.append(features_of_run)
            seconds_of_runs.append(run.ends - run.starts)
        features = np.concatenate(features_of_runs)
        seconds = np.concatenate(seconds_of_runs)
        weights = []
        for seconds_of_stage in seconds.T:
            # Each row over its time, so that all errors count as shares of the time.
            relative = features / seconds_of_stage[:, None]
            ones = np.ones(len(relative))
            solution, _ = nnls(relative, ones)
            weights.append(solution)
        stages = range(len(weights))
        return cls(
            knots,
            weights=np.array(weights),
            sending=fit_sending(runs),
            turnarounds=[mean_turnaround(runs, stage) for stage in stages],
        )

    def stage_times(self, batch: Batch) -> list[float]:
        """Return the seconds of a batch on each stage."""
        work_of_batch = [
            batch.prefill_query_key_pairs,
            batch.decode_kv_tokens,
            batch.num_emits,
        ]
        tokens = np.array([batch.num_tokens])
        work = np.array([work_of_batch])
        (features,) = features_of(tokens, work, self.knots)
        seconds: list[float] = (self.weights @ features).tolist()
        return seconds

    def send_time(self, batch: Batch) -> float:
        fixed, of_token = self.sending
        return float(fixed + of_token * batch.num_tokens)


def features_of(tokens: Floats, work: Floats, knots: Sequence[int]) -> Floats:
    """Return of each batch the shares of the two nearest knots, and `work`."""
    shares = []
    for at_knots in np.eye(len(knots)):  # 1 at one knot, 0 at the others
        share = np.interp(tokens, knots, at_knots)
        shares.append(share)
    shares_of_knots = np.stack(shares, axis=1)
    # Past the largest measured batch, time grows in proportion to tokens.
    beyond = np.maximum(1.0, tokens / knots[-1])
    return np.hstack([beyond[:, None] * shares_of_knots, work])


def fit_sending(runs: Sequence[StagedRun]) -> Floats:
    """Return the seconds, and seconds a token, from the end of a stage to the start of the next
    one, of the micro-batches that this one waited for.
    """
    tokens = []
    gaps = []
    for run in runs:
        # Of each micro-batch but the first, and of each stage but the first.
        sent = run.ends[1:, :-1]
        started = run.starts[1:, 1:]
        # A stage that was still busy began late for another reason than the sending.
        was_free = run.ends[:-1, 1:]
        has_waited = sent > was_free
        gaps_of_run = started - sent
        tokens_of_run = np.broadcast_to(run.tokens[1:, None], sent.shape)
        gaps.append(gaps_of_run[has_waited])
        tokens.append(tokens_of_run[has_waited])
    seconds = np.concatenate(gaps)
    if len(seconds) == 0:
        return np.zeros(2)
    ones = np.ones(len(seconds))
    rows = np.stack([ones, np.concatenate(tokens)], axis=1)
    solution: Floats
    solution, _ = nnls(rows, seconds)
    return solution


def mean_turnaround(runs: Sequence[StagedRun], stage: int) -> float:
    """Return the mean seconds from when a stage could begin a micro-batch to when it did."""
    gaps = np.concatenate([_turnarounds(run, stage) for run in runs])
    if len(gaps) == 0:
        return 0.0
    return float(gaps.mean())


def _turnarounds(run: StagedRun, stage: int) -> Floats:
    """Return the gaps before micro-batches that did not wait for the stage before. The first stage
    waits for itself and for a place in the pipeline, which the oldest micro-batch leaves.
    """
    if stage == 0:
        num_stages = run.starts.shape[1]
        pipeline_was_free = run.ends[:-num_stages, -1]
        stage_was_free = run.ends[num_stages - 1 : -1, 0]
        could_begin = np.maximum(pipeline_was_free, stage_was_free)
        begun = run.starts[num_stages:, 0]
        gaps: Floats = begun - could_begin
        return gaps
    was_free = run.ends[:-1, stage]
    got_input = run.ends[1:, stage - 1]
    begun = run.starts[1:, stage]
    gaps_of_all = begun - was_free
    had_input = got_input < was_free
    return gaps_of_all[had_input]

"""Seconds of a pipeline's stages by what a micro-batch has to compute, fitted to runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Batch

WORK = ("prefill_query_key_pairs", "decode_kv_tokens", "num_emits")  # of a batch, and of a ledger


@dataclass(frozen=True)
class StagedRun:
    """What each micro-batch of a run had to compute, and when each stage did."""

    tokens: np.ndarray  # [micro-batches]
    work: np.ndarray  # [micro-batches, WORK]
    starts: np.ndarray  # [micro-batches, stages], in seconds
    ends: np.ndarray

    @classmethod
    def of(cls, ledger: Ledger) -> StagedRun:
        iterations = ledger.iterations()
        stages = ledger.stages()
        shape = (len(iterations), ledger.num_stages)
        tokens = iterations.num_prefill_tokens + iterations.num_decode_tokens
        return cls(
            tokens=tokens.to_numpy(),
            work=iterations[[*WORK]].to_numpy(float),
            starts=stages.start.to_numpy().reshape(shape),
            ends=stages.end.to_numpy().reshape(shape),
        )

    @property
    def num_stages(self) -> int:
        return self.starts.shape[1]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the stages of a pipeline, as its simulation takes them.

    A stage's time is interpolated over a batch's tokens between `knots`, and linear in the
    query-key pairs of prompts, the context of decodes and the tokens emitted.
    """

    knots: Sequence[int]
    weights: np.ndarray  # [stages, features]
    sending: tuple[float, float]  # seconds, and seconds a token, to a stage that waits
    turnarounds: Sequence[float]  # by stage, of a worker that goes on to the next micro-batch

    @classmethod
    def fit(cls, ledgers: Sequence[Ledger]) -> StageTimes:
        """Fit them to all micro-batches of the `ledgers`, by least squares of relative errors with
        no part below zero.
        """
        runs = [StagedRun.of(ledger) for ledger in ledgers]
        tokens = np.concatenate([run.tokens for run in runs])
        work = np.concatenate([run.work for run in runs])
        seconds = np.concatenate([run.ends - run.starts for run in runs])
        knots = _powers_up_to(int(tokens.max()))
        features_of_batches = []
        for num_tokens, work_of_batch in zip(tokens, work, strict=True):
            features_of_batch = features_of(num_tokens, work_of_batch, knots)
            features_of_batches.append(features_of_batch)
        features = np.array(features_of_batches)
        weights = []
        for seconds_of_stage in seconds.T:
            # Each row over its time, so that all errors count as shares of the time.
            seconds_of_rows = seconds_of_stage[:, None]
            relative = features / seconds_of_rows
            ones = np.ones(len(relative))
            solution, _ = nnls(relative, ones)
            weights.append(solution)
        return cls(
            knots,
            np.array(weights),
            sending=fit_sending(runs),
            turnarounds=mean_turnarounds(runs),
        )

    def stage_times(self, batch: Batch) -> list[float]:
        """Return the seconds of a batch on each stage."""
        pairs = batch.prefill_query_key_pairs
        work = np.array([pairs, batch.decode_kv_tokens, batch.num_emits])
        features = features_of(batch.num_tokens, work, self.knots)
        seconds: list[float] = (self.weights @ features).tolist()
        return seconds

    def send_time(self, batch: Batch) -> float:
        fixed, of_token = self.sending
        return fixed + of_token * batch.num_tokens


def _powers_up_to(largest: int) -> list[int]:
    """Return the powers of two up to a number, and the number."""
    powers = {2**power for power in range(largest.bit_length())}
    return sorted(powers | {largest})


def features_of(tokens: int, work: np.ndarray, knots: Sequence[int]) -> np.ndarray:
    """Return the shares of the two nearest knots, beyond the last one in proportion, and `work`."""
    shares = []
    for at_knots in np.eye(len(knots)):  # 1 at one knot, 0 at the others
        share = np.interp(tokens, knots, at_knots)
        shares.append(share)
    # Past the largest measured batch, time grows in proportion to tokens.
    beyond = max(1.0, tokens / knots[-1])
    shares_of_knots = beyond * np.array(shares)
    return np.concatenate([shares_of_knots, work])


def fit_sending(runs: Sequence[StagedRun]) -> tuple[float, float]:
    """Return the seconds, and seconds a token, from the end of a stage to the start of the next
    one, of the micro-batches that this one waited for.
    """
    tokens: list[float] = []
    seconds: list[float] = []
    for run in runs:
        tokens_behind_first = run.tokens[1:]
        for stage in range(1, run.num_stages):
            sent = run.ends[1:, stage - 1]
            started = run.starts[1:, stage]
            was_free = run.ends[:-1, stage]
            # A stage that was still busy began late for another reason than the sending.
            has_waited = sent > was_free
            gaps = started - sent
            tokens.extend(tokens_behind_first[has_waited])
            seconds.extend(gaps[has_waited])
    if not seconds:
        return 0.0, 0.0
    ones = np.ones(len(tokens))
    rows = np.stack([ones, tokens], axis=1)
    solution, _ = nnls(rows, np.array(seconds))
    fixed, of_token = solution
    return float(fixed), float(of_token)


def mean_turnarounds(runs: Sequence[StagedRun]) -> list[float]:
    """Return by stage the mean seconds from when it could begin a micro-batch to when it did."""
    num_stages = runs[0].num_stages
    means = []
    for stage in range(num_stages):
        gaps_of_runs = [_turnarounds(run, stage) for run in runs]
        gaps = np.concatenate(gaps_of_runs)
        mean = 0.0
        if len(gaps):
            mean = float(gaps.mean())
        means.append(mean)
    return means


def _turnarounds(run: StagedRun, stage: int) -> np.ndarray:
    """Return the gaps before micro-batches that did not wait for the stage before. The first stage
    waits for itself and for a place in the pipeline, which the oldest micro-batch leaves.
    """
    if stage == 0:
        num_stages = run.num_stages
        pipeline_was_free = run.ends[:-num_stages, -1]
        stage_was_free = run.ends[num_stages - 1 : -1, 0]
        could_begin = np.maximum(pipeline_was_free, stage_was_free)
        begun = run.starts[num_stages:, 0]
        gaps: np.ndarray = begun - could_begin
        return gaps
    was_free = run.ends[:-1, stage]
    got_input = run.ends[1:, stage - 1]
    begun = run.starts[1:, stage]
    gaps_of_all = begun - was_free
    return gaps_of_all[got_input < was_free]

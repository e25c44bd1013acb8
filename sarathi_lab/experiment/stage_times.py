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

        largest = int(tokens.max())
        powers = [2**power for power in range(largest.bit_length())]
        knots = sorted({*powers, largest})
        rows = []
        for num_tokens, work_of_batch in zip(tokens, work, strict=True):
            rows.append(features_of(num_tokens, work_of_batch, knots))
        features = np.array(rows)
        weights = []
        for of_stage in seconds.T:
            relative = features / of_stage[:, None]
            solution, _ = nnls(relative, np.ones(len(relative)))
            weights.append(solution)
        return cls(knots, np.array(weights), fit_sending(runs), mean_turnarounds(runs))

    def stage_times(self, batch: Batch) -> list[float]:
        """Return the seconds of a batch on each stage."""
        pairs = batch.prefill_query_key_pairs
        work = np.array([pairs, batch.decode_kv_tokens, batch.num_emits])
        seconds = self.weights @ features_of(batch.num_tokens, work, self.knots)
        return [float(value) for value in seconds]

    def send_time(self, batch: Batch) -> float:
        fixed, of_token = self.sending
        return fixed + of_token * batch.num_tokens


def features_of(tokens: int, work: np.ndarray, knots: Sequence[int]) -> np.ndarray:
    """Return the shares of the two nearest knots, beyond the last one in proportion, and `work`."""
    shares = [np.interp(tokens, knots, corner) for corner in np.eye(len(knots))]
    beyond = max(1.0, tokens / knots[-1])
    return np.concatenate([beyond * np.array(shares), work])


def fit_sending(runs: Sequence[StagedRun]) -> tuple[float, float]:
    """Return the seconds, and seconds a token, from the end of a stage to the start of the next
    one, of the micro-batches that this one waited for.
    """
    tokens: list[float] = []
    seconds: list[float] = []
    for run in runs:
        for stage in range(1, run.num_stages):
            sent = run.ends[1:, stage - 1]
            has_waited = sent > run.ends[:-1, stage]
            gaps = run.starts[1:, stage] - sent
            tokens.extend(run.tokens[1:][has_waited])
            seconds.extend(gaps[has_waited])
    if not seconds:
        return 0.0, 0.0
    rows = np.stack([np.ones(len(tokens)), tokens], axis=1)
    (fixed, of_token), _ = nnls(rows, np.array(seconds))
    return float(fixed), float(of_token)


def mean_turnarounds(runs: Sequence[StagedRun]) -> list[float]:
    """Return by stage the mean seconds from when it could begin a micro-batch to when it did."""
    num_stages = runs[0].num_stages
    means = []
    for stage in range(num_stages):
        gaps = np.concatenate([_turnarounds(run, stage) for run in runs])
        means.append(float(gaps.mean()) if len(gaps) else 0.0)
    return means


def _turnarounds(run: StagedRun, stage: int) -> np.ndarray:
    """Return the gaps before micro-batches that did not wait for the stage before. The first stage
    waits for itself and for a place in the pipeline, which the oldest micro-batch leaves.
    """
    num_stages = run.num_stages
    if stage == 0:
        pipeline_is_free = run.ends[:-num_stages, -1]
        stage_is_free = run.ends[num_stages - 1 : -1, 0]
        gaps: np.ndarray = run.starts[num_stages:, 0] - np.maximum(pipeline_is_free, stage_is_free)
        return gaps
    free = run.ends[:-1, stage]
    has_input = run.ends[1:, stage - 1] < free
    return (run.starts[1:, stage] - free)[has_input]

"""Prompts that were answered sooner than the device can compute them, so that a cache had them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.console import amount
from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.extensions.replay.sent_again import cached_text
from sarathi_lab.model.roofline import Peaks, prompt_flops
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.serving_metrics import waits

FIX = (
    "so a prefix cache had them; name a client's file that states cached tokens, or run the "
    "benchmark again without a cache (vLLM: --no-enable-prefix-caching)"
)


def require_possible(run: RealRun, spec: ModelSpec, peaks: Peaks) -> None:
    """Raise UserError if prompts need more FLOP/s than the devices have, by the mean time to the
    first token or by the time of all requests, and the file states no cached tokens.
    """
    rate = peaks.rate(spec)
    is_known = spec.has_formulas and not run.requests.empty and math.isfinite(rate)
    if not is_known or run.has_conversations or cached_text(run):
        return
    flops = prompt_flops(spec, run.requests)
    for computed, seconds, meant in _bounds(run, flops):
        needed = computed / seconds
        if needed > rate:
            raise UserError(
                f"{run.source}: {meant} {amount(needed / 1e12)} TFLOP/s, more than the "
                f"{amount(rate / 1e12)} {peaks.source}, {FIX}"
            )


def _bounds(run: RealRun, flops: NDArray[np.float64]) -> Iterator[tuple[float, float, str]]:
    """Yield FLOPs, seconds in which they were done, and what they are in words."""
    first_token = run.means.get("ttft", math.nan)
    if not run.means:
        requests = run.requests
        first_tokens = pd.Series(waits(requests)["ttft"])
        first_token = float(first_tokens.mean())
        duration = float(requests.finish_time.max() - requests.arrival_time.min())
        if duration > 0:
            of_all = float(flops.sum())
            yield of_all, duration, "all its prompts in the time of the run need"
    if first_token > 0:
        of_one = float(flops.mean())
        yield of_one, first_token, "a prompt in the mean time to the first token needs"

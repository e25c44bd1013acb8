"""The roofline: the least time that work can take on a device whose peaks are known. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.model.spec import ModelSpec, Work

# tokens of a tile of large matrix products on a GPU, in which they are computed (section 4.4)
TILE = 128


@dataclass(frozen=True)
class Peaks:
    """What a device can do at best, in FLOP/s and bytes/s, and where the figures are from."""

    flops_per_second: float
    bytes_per_second: float
    source: str

    def describe(self) -> str:
        """In words, such as "measured: 1.2 TFLOP/s, 20 GB/s"."""
        return (
            f"{self.source}: {self.flops_per_second / 1e12:.3g} TFLOP/s, "
            f"{self.bytes_per_second / 1e9:.3g} GB/s"
        )


def roofline_time(spec: ModelSpec, work: Work, dtype_bytes: int, peaks: Peaks) -> Any:
    """Seconds of the roofline time of one iteration: max(FLOPs / peak, bytes / bandwidth).

    Elementwise if `work` holds arrays. Whole-iteration maximum, so it assumes perfect overlap of
    all operations.
    """
    compute = spec.flops(work) / peaks.flops_per_second
    memory = spec.min_bytes(work, dtype_bytes) / peaks.bytes_per_second
    return np.maximum(compute, memory)


def request_roofline(
    spec: ModelSpec, requests: pd.DataFrame, dtype_bytes: int, peaks: Peaks
) -> NDArray[np.float64]:
    """Least seconds of each request [R] alone on an idle device: its prompt whole, then a token an
    iteration.

    The decodes are taken at their mean context, P + D/2: exact where they are bound by memory, as
    single ones are.
    """
    prompt, output = (
        requests.prompt_len.to_numpy(dtype=float),
        requests.output_len.to_numpy(dtype=float),
    )
    nothing, one = np.zeros(len(requests)), np.ones(len(requests))
    prefill = _work(prompt, nothing, prompt, nothing, prompt * (prompt + 1) / 2, one)
    decode = _work(nothing, one, nothing, prompt + output / 2, nothing, one)
    seconds = roofline_time(spec, prefill, dtype_bytes, peaks)
    return np.asarray(
        seconds + (output - 1) * roofline_time(spec, decode, dtype_bytes, peaks), dtype=float
    )


def _work(*columns: NDArray[np.float64]) -> pd.DataFrame:
    names = ("num_prefill_tokens", "num_decode_tokens", "prefill_kv_tokens", "decode_kv_tokens")
    return pd.DataFrame(
        dict(zip((*names, "prefill_query_key_pairs", "num_emits"), columns, strict=True))
    )

"""The roofline: the least time that work can take on a device whose peaks are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.console import amount
from sarathi_lab.model.spec import ModelSpec, Work

TILE = 128  # tokens of a tile of a GPU's large matrix products (SARATHI, section 4.4)


@dataclass(frozen=True)
class Peaks:
    """What a device can do at best, in FLOP/s and bytes/s, and where the figures are from."""

    flops_per_second: float
    bytes_per_second: float
    source: str

    def describe(self) -> str:
        """Such as "measured: 1.2 TFLOP/s, 20 GB/s"."""
        return (
            f"{self.source}: {amount(self.flops_per_second / 1e12)} TFLOP/s, "
            f"{amount(self.bytes_per_second / 1e9)} GB/s"
        )


def roofline_time(spec: ModelSpec, work: Work, dtype_bytes: int, peaks: Peaks) -> Any:
    """Seconds of one iteration: max(FLOPs / peak, bytes / bandwidth), all operations overlapping.
    Elementwise if `work` holds arrays.
    """
    compute = spec.flops(work) / peaks.flops_per_second
    memory = spec.min_bytes(work, dtype_bytes) / peaks.bytes_per_second
    return np.maximum(compute, memory)


def request_roofline(
    spec: ModelSpec, requests: pd.DataFrame, dtype_bytes: int, peaks: Peaks
) -> NDArray[np.float64]:
    """Least seconds of each request [R] alone: its prompt whole, then a token an iteration.

    Decodes are taken at their mean context, P + D/2: exact where memory bounds them, as it does
    single ones.
    """
    prompt, output = requests.prompt_len.astype(float), requests.output_len.astype(float)
    idle = pd.DataFrame(0.0, index=requests.index, columns=list(Work.__annotations__))
    prefill = idle.assign(
        num_prefill_tokens=prompt,
        prefill_kv_tokens=prompt,
        prefill_query_key_pairs=prompt * (prompt + 1) / 2,
        num_emits=1.0,
    )
    decode = idle.assign(num_decode_tokens=1.0, decode_kv_tokens=prompt + output / 2, num_emits=1.0)
    first = roofline_time(spec, prefill, dtype_bytes, peaks)
    each = roofline_time(spec, decode, dtype_bytes, peaks)
    return np.asarray(first + (output - 1) * each, dtype=float)

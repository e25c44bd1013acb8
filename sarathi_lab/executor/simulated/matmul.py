"""Time of one matrix product on a GPU: whole tiles, in whole waves over the SMs, beside memory.

A product [rows, in] x [in, out] is cut into tiles of the output. Each tile occupies one
multiprocessor (SM), so `tiles` of them take ceil(tiles / num_sms) waves: one row more can cost a
tile of rows, and one tile more a whole wave (SARATHI, section 4.4 and Fig 7). Kernels that spread
their last tiles over all SMs take part of a wave for them (`Hardware.partial_waves`). The library
picks among a few tile shapes and may split the inner dimension (split-K) to occupy more SMs; the
model takes the fastest. These constants are shared by all GPUs, those that differ are fields of
`Hardware`; both are fitted by `experiments/lab/cost_model/fit.py`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from sarathi_lab.executor.simulated.hardware import Hardware

TILES = ((128, 256), (128, 128), (64, 128), (64, 64))  # rows x columns of the output
SPLITS = (1, 2, 4, 8)  # parts of the inner dimension
# A tile's step along the inner dimension loads rows + columns elements: FLOPs lost for each.
OPERAND_FLOPS = 20.0
OVERLAP = 3.0  # exponent of `overlapped`; the larger, the closer to max(compute, memory)
PARTIAL_SUM_BYTES = 8  # split-K writes and reads a 4-byte sum for each output and part


def num_waves(blocks: int, num_sms: int) -> int:
    """Rounds in which `num_sms` multiprocessors work off `blocks` equal pieces of work."""
    return -(-blocks // num_sms)


def overlapped(compute: float, memory: float) -> float:
    """Seconds of work that computes and streams at the same time: a smooth maximum of the two. Near
    the ridge of the roofline neither hides wholly behind the other.
    """
    longer = max(compute, memory)
    if longer == 0:
        return 0.0
    both = (compute / longer) ** OVERLAP + (memory / longer) ** OVERLAP
    return float(longer * both ** (1 / OVERLAP))


@lru_cache(maxsize=2**17)
def matmul_time(
    rows: int, in_features: int, out_features: int, hardware: Hardware, dtype_bytes: int
) -> float:
    """Seconds of one product [rows, in_features] x [in_features, out_features]; 0 for no rows. With
    tensor parallelism: of a device's share of the columns or rows.
    """
    if rows == 0:
        return 0.0
    sm_rate = hardware.flops_per_second * hardware.matmul_efficiency / hardware.num_sms
    moved = (in_features * out_features + rows * (in_features + out_features)) * dtype_bytes

    def seconds(tile: tuple[int, int], splits: int) -> float:
        """Without the launch of the first kernel; where it is split, a second one sums."""
        tile_rows, tile_columns = tile
        tiles = -(-rows // tile_rows) * -(-out_features // tile_columns)
        flops_per_step = 2 * tile_rows * tile_columns + OPERAND_FLOPS * (tile_rows + tile_columns)
        waves: float = num_waves(tiles * splits, hardware.num_sms)
        if hardware.partial_waves:
            waves = max(1.0, tiles * splits / hardware.num_sms)
        compute = waves * (in_features / splits) * flops_per_step / sm_rate
        if splits == 1:
            return overlapped(compute, moved / hardware.memory_rate)
        num_bytes = moved + splits * rows * out_features * PARTIAL_SUM_BYTES
        return hardware.kernel_launch + overlapped(compute, num_bytes / hardware.memory_rate)

    return hardware.kernel_launch + min(seconds(*pair) for pair in product(TILES, SPLITS))

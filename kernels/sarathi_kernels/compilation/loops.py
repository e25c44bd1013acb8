"""What a launch's hot loop could reach at most, worked out from its machine code without a GPU.

A multiprocessor issues one instruction of a warp a cycle from each of its four schedulers, whatever
else it waits for. So the instructions of one pass bound what the loop reads and computes: no kernel
reaches this bound, but none exceeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from sarathi_kernels.attention.support import E4M3_CAPABILITY
from sarathi_kernels.compilation.compiled import WARP_SIZE, Compiled
from sarathi_kernels.compilation.sass import by_class, disassembled, hot_loop
from sarathi_kernels.runtime.chip import CHIPS, Chip
from sarathi_kernels.runtime.launch import Launch

SCHEDULERS = 4  # of a multiprocessor, from sm_80 to sm_100


@dataclass(frozen=True)
class Peaks:
    """Dense 16-bit products and memory, of NVIDIA's data sheets; products a cycle, of its
    architecture white papers.
    """

    flops_per_second: float
    bytes_per_second: float
    flops_per_cycle: int  # of a multiprocessor


PEAKS = {
    80: Peaks(312e12, 2.039e12, 2048),  # A100 SXM, 80 GB
    86: Peaks(154.8e12, 0.768e12, 1024),  # RTX A6000
    90: Peaks(989.4e12, 3.35e12, 4096),  # H100 SXM
    100: Peaks(2250e12, 8.0e12, 8192),  # B200
}
# Of the chip's peak, what the loop must allow at least: with a cache in 16 bits, in 8, and in 8 on
# chips that do not convert e4m3.
LIMITS = {
    "prefill_kernel": ("products", (0.8, 0.3, 0.2)),
    "fused_kernel": ("products", (0.8,)),
    "decode_kernel": ("memory", (2.0, 1.1, 0.72)),
    "tiled_matmul_kernel": ("products", (0.9,)),
    "persistent_matmul_kernel": ("products", (0.9,)),
    "expert_up_kernel": ("products", (0.6,)),  # of 16 rows, twelve times what memory feeds
    "expert_down_kernel": ("products", (0.6,)),
    "combine_kernel": ("memory", (0.75,)),
    "rotate_and_store_kernel": ("memory", (0.75,)),
    "add_norm_kernel": ("memory", (0.75,)),
    "gated_activation_kernel": ("memory", (0.75,)),
    "best_of_part_kernel": ("memory", (0.75,)),
}


@dataclass(frozen=True)
class Pass:
    """One pass through a program's hot loop; the whole program where it has no loop."""

    instructions: dict[str, int]  # of one warp by class, see `sass`
    warps: int
    bytes: int  # read from memory or the L2 cache, scales aside
    flops: int  # of matrix products or what stands for them

    def issue_bound(self, chip: Chip) -> tuple[float, float]:
        """Bytes and FLOPs a second that `chip` cannot exceed: all its schedulers issue an
        instruction of the loop in each cycle of the clock at which the data sheet's peak is
        reached.
        """
        peaks = PEAKS[chip.capability]
        cycles = sum(self.instructions.values()) * self.warps / SCHEDULERS
        passes = peaks.flops_per_second / peaks.flops_per_cycle / cycles
        return passes * self.bytes, passes * self.flops


def hot_pass(launch: Launch, compiled: Compiled) -> Pass:
    """One pass through the hot loop of what a launch compiled to."""
    counts = by_class(hot_loop(disassembled(compiled.cubin)))
    return Pass(counts, compiled.threads // WARP_SIZE, *work_of(launch))


def work_of(launch: Launch) -> tuple[int, int]:
    """Bytes and FLOPs of one pass through the launch's hot loop."""
    sizes, first = launch.options, launch.arguments[0]
    if "TILE_K" in sizes:
        m, n, k = (sizes[name] for name in ("TILE_M", "TILE_N", "TILE_K"))
        return (m + n) * k * 2, 2 * m * n * k
    if "BLOCK_N" in sizes:  # keys and values of so many tokens
        entries = sizes["BLOCK_N"] * sizes["HEAD_SIZE"]
        flops = 4 * sizes.get("BLOCK_M", sizes["GROUP"]) * entries
        return 2 * entries * launch.arguments[1].element_size(), flops
    if "NAN_TOKEN" in sizes:  # logits of so many tokens
        return sizes["BLOCK"] * first.element_size(), 0
    rows = [
        each for each in launch.arguments if isinstance(each, Tensor) and len(each) == len(first)
    ]
    return sum(each.numel() * each.element_size() for each in rows) // prod(launch.grid), 0


def limit_complaints(launch: Launch, kernel: str, passed: Pass, chip: Chip) -> list[str]:
    """What its instructions keep the loop from, where that is more than LIMITS allow.

    A B200 has memory and products twice as fast as an H100's, but its schedulers issue no more: it
    is judged as an H100.
    """
    if kernel not in LIMITS:
        return []
    of, shares = LIMITS[kernel]
    is_8_bit = len(shares) > 1 and launch.arguments[1].element_size() == 1
    share = shares[is_8_bit + (is_8_bit and chip.capability < E4M3_CAPABILITY)]
    judged = CHIPS[min(chip.capability, 90)]
    peaks, (bytes_per_second, flops_per_second) = (
        PEAKS[judged.capability],
        passed.issue_bound(judged),
    )
    found = {
        "memory": bytes_per_second / peaks.bytes_per_second,
        "products": flops_per_second / peaks.flops_per_second,
    }[of]
    if found >= share:
        return []
    count = sum(passed.instructions.values())
    return [f"{count} instructions in the hot loop allow {found:.0%} of peak {of}, not {share:.0%}"]

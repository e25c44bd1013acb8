"""Choice of the attention kernels' launch configurations by time, on the GPU that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from sarathi_kernels.attention.decode import DecodeConfig, decode_attention
from sarathi_kernels.attention.prefill import CAN_COMPUTE_AHEAD, PrefillConfig, prefill_attention
from sarathi_kernels.benchmarks.attention_cases import AttentionCase, AttentionInputs, make_inputs
from sarathi_kernels.benchmarks.measure import Benchmark, measure
from sarathi_kernels.runtime.chip import Chip, chip_of
from sarathi_kernels.runtime.testing import relative_error
from sarathi_kernels.runtime.tuned import name_of

MAX_ERROR = 1e-2  # of a configuration's output beside that of the rules' choice
HEAD_SIZE = 128  # of most models
HEADS = {1: (40, 40), 4: (32, 8), 8: (64, 8)}  # by those that share a cache: 13B, 8B, 70B
CHUNKS = (512, 2048)  # tokens, which a plan for 40 heads cuts into tiles of 64 and of 128 rows
WIDTHS = (32, 64, 128)  # keys that a step of a kernel's loop reads
WARPS = (4, 8)
STAGES = (2, 3, 5)  # steps whose loads are under way at a time


@dataclass(frozen=True)
class Search:
    """Configurations of one kernel, and a batch to time them on."""

    name: str  # of the entry
    attend: Callable[..., None]
    inputs: AttentionInputs
    configs: Sequence[Any]


def searches(
    device: torch.device, dtype: torch.dtype, head_size: int, *, quick: bool
) -> Iterator[Search]:
    """Yield a search for each entry; `quick` ones have tiny batches and few configurations."""
    chip = chip_of(device)
    make = partial(make_inputs, device=device, dtype=dtype, num_sms=chip.num_sms)
    heads = HEADS
    chunks: tuple[int, ...] = CHUNKS
    decodes: tuple[tuple[int, int], ...] = ((1, 2048),) * 32  # new tokens, and contexts
    max_configs = None
    if quick:
        heads = {group: (group, 1) for group in HEADS}
        chunks = (20,)
        decodes = ((1, 40),)
        max_configs = 2
    for chunk in chunks:
        inputs = make(AttentionCase(((chunk, 2 * chunk),), *heads[1], head_size))
        rows = inputs.plan.tile_rows
        name = name_of("prefill", chip, head_size, dtype, rows)
        configs = prefill_configs(chip, rows)[:max_configs]
        yield Search(name, prefill_attention, inputs, configs)
    for group in HEADS:
        inputs = make(AttentionCase(decodes, *heads[group], head_size))
        name = name_of("decode", chip, head_size, dtype, group)
        yield Search(name, decode_attention, inputs, decode_configs()[:max_configs])


def prefill_configs(chip: Chip, tile_rows: int) -> list[PrefillConfig]:
    """List the configurations whose block divides tiles of `tile_rows`."""
    ahead = [False]
    if CAN_COMPUTE_AHEAD and chip.is_hopper:
        ahead.append(True)
    rows = sorted({64, tile_rows})
    return [PrefillConfig(*sizes) for sizes in product(rows, WIDTHS, WARPS, STAGES[1:], ahead)]


def decode_configs() -> list[DecodeConfig]:
    """List the configurations of decodes."""
    return [DecodeConfig(*sizes) for sizes in product(WIDTHS, WARPS, STAGES)]


def tune(
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[str], object],
    head_size: int = HEAD_SIZE,
    *,
    quick: bool = False,
) -> dict[str, list[int]]:
    """Return the fastest configuration of each search, by entry. What does not compile, does not
    fit or computes something else is none.
    """
    fastest = {}
    for search in searches(device, dtype, head_size, quick=quick):
        work = partial(search.attend, *search.inputs.arguments)
        expected = torch.empty_like(search.inputs.query)
        work(out=expected)
        seconds = _seconds(work, None, expected, device, dtype, quick)
        best = None
        for config in search.configs:
            by_config = _seconds(work, config, expected, device, dtype, quick)
            if by_config is not None and (seconds is None or by_config < seconds):
                best = config
                seconds = by_config
        chosen = "as the rules choose"
        if best is not None:
            fastest[search.name] = list(map(int, astuple(best)))
            chosen = str(best)
        report(f"{search.name}: {chosen}, {(seconds or 0) * 1e6:.1f} µs")
    return fastest


def _seconds(
    work: Callable[..., None],
    config: Any,
    expected: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    quick: bool,
) -> float | None:
    """Return the median seconds of `work` by `config`; None where it can't be used."""
    out = torch.empty_like(expected)
    run = partial(work, out=out, config=config)
    row = measure(Benchmark("", "", "", run, 0, 0), device, dtype, quick=quick)
    if row["error"] or not relative_error(out, expected) < MAX_ERROR:
        return None
    return float(row["median_seconds"])

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
WIDTHS, WARPS, STAGES = (32, 64, 128), (4, 8), (2, 3, 5)


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
    chip, most = chip_of(device), 2 if quick else None
    make = partial(make_inputs, device=device, dtype=dtype, num_sms=chip.num_sms)
    heads = {group: (group, 1) for group in HEADS} if quick else HEADS
    for chunk in (20,) if quick else CHUNKS:
        inputs = make(AttentionCase(((chunk, 2 * chunk),), *heads[1], head_size))
        rows = inputs.plan.tile_rows
        name = name_of("prefill", chip, head_size, dtype, rows)
        yield Search(name, prefill_attention, inputs, prefill_configs(chip, rows)[:most])
    sequences = ((1, 40),) if quick else ((1, 2048),) * 32
    for group in HEADS:
        inputs = make(AttentionCase(sequences, *heads[group], head_size))
        configs = [DecodeConfig(*sizes) for sizes in product(WIDTHS, WARPS, STAGES)]
        name = name_of("decode", chip, head_size, dtype, group)
        yield Search(name, decode_attention, inputs, configs[:most])


def prefill_configs(chip: Chip, tile_rows: int) -> list[PrefillConfig]:
    """List the configurations whose block divides tiles of `tile_rows`."""
    ahead = (False, True) if CAN_COMPUTE_AHEAD and chip.is_hopper else (False,)
    sizes = product(sorted({64, tile_rows}), WIDTHS, WARPS, STAGES[1:], ahead)
    return [PrefillConfig(*one) for one in sizes]


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
    found = {}
    for search in searches(device, dtype, head_size, quick=quick):
        work = partial(search.attend, *search.inputs.arguments)
        expected = torch.empty_like(search.inputs.query)
        work(out=expected)
        seconds = _seconds(work, None, expected, device, dtype, quick)
        best = None
        for config in search.configs:
            taken = _seconds(work, config, expected, device, dtype, quick)
            if taken is not None and (seconds is None or taken < seconds):
                best, seconds = config, taken
        if best is not None:
            found[search.name] = list(map(int, astuple(best)))
        chosen = "as the rules choose" if best is None else str(best)
        report(f"{search.name}: {chosen}, {(seconds or 0) * 1e6:.1f} µs")
    return found


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

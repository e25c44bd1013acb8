"""Ways to attend for chunks and decodes of one batch, all of which must give the same: the engine's
three, and the benchmarks' by the prefill kernel alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import AWKWARD, reference

from sarathi_kernels.attention.fused import place_in_order
from sarathi_kernels.attention.hybrid import Variant, hybrid_attention
from sarathi_kernels.attention.plan import PADDING, interleave, with_parts_of
from sarathi_kernels.benchmarks.attention_benchmarks import unified_attention
from sarathi_kernels.benchmarks.attention_cases import AttentionCase, make_inputs
from sarathi_kernels.runtime.chip import assumed, chip_of
from sarathi_kernels.runtime.testing import poisoned, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# Of few multiprocessors, so that small batches have several waves of tiles and of decodes.
SMALL_CHIP = replace(chip_of(DEVICE), num_sms=3)


def by_triton(*inputs: Any, **settings: Any) -> None:
    with assumed(SMALL_CHIP):
        hybrid_attention(*inputs, **settings)


WAYS = {
    **{name: partial(by_triton, variant=name) for name in get_args(Variant)},
    "unified": unified_attention,
}


@pytest.mark.parametrize(
    ("name", "part_tokens"),
    [("hybrid", 64), ("window over tiles", 128), ("decodes", 256), ("whole prompts", 256)],
)
def test_all_ways_give_the_same(name: str, part_tokens: int) -> None:
    case = AWKWARD[name]
    inputs = make_inputs(case, device=DEVICE, dtype=torch.float16, num_sms=2)
    plan = with_parts_of(inputs.plan, part_tokens, case.sliding_window)
    inputs = replace(inputs, plan=plan)
    expected = reference(case, inputs)
    for name, attend in WAYS.items():
        out = poisoned(*inputs.query.shape, device=DEVICE, dtype=torch.float16)
        attend(*inputs.arguments, sliding_window=case.sliding_window, out=out)
        assert relative_error(out, expected) < 2e-3, name


@pytest.mark.parametrize("name", WAYS)
def test_padding_of_the_plan_changes_nothing(name: str) -> None:
    case = AttentionCase(((20, 70), (1, 40), (1, 17)), 2, 2)
    inputs = make_inputs(case, device=DEVICE, dtype=torch.float32, num_sms=2)
    plan = with_parts_of(inputs.plan, 32)
    padded = {
        name: torch.nn.functional.pad(getattr(plan, name), (0, 0, 0, 3), value=PADDING)
        for name in ("tiles", "parts", "reductions")
    }
    decodes = torch.nn.functional.pad(plan.decodes, (0, 3), value=PADDING)
    plan = replace(plan, **padded, decodes=decodes)
    out = poisoned(*inputs.query.shape, device=DEVICE, dtype=torch.float32)
    arguments = (inputs.query, inputs.key_cache, inputs.value_cache, plan, inputs.scale)
    WAYS[name](*arguments, out=out)
    assert relative_error(out, reference(case, inputs)) < 1e-5


@triton.jit
def record_order(
    are_tiles: tl.tensor,
    numbers: tl.tensor,
    wave_size: tl.tensor,
    tile_waves: tl.tensor,
    part_waves: tl.tensor,
) -> None:
    program = tl.program_id(0)
    is_tile, number = place_in_order(program, wave_size, tile_waves, part_waves)
    tl.store(are_tiles + program, is_tile.to(tl.int32))
    tl.store(numbers + program, number)


@pytest.mark.parametrize(("num_tiles", "num_parts"), [(7, 20), (20, 7), (9, 9), (1, 40), (40, 1)])
def test_one_launch_has_each_tile_and_each_decode_once_and_side_by_side(
    num_tiles: int, num_parts: int
) -> None:
    waves = interleave(num_tiles, num_parts, num_sms=3)
    are_tiles = torch.zeros(waves.num_programs, dtype=torch.int32, device=DEVICE)
    numbers = torch.zeros_like(are_tiles)
    record_order[(waves.num_programs,)](
        are_tiles, numbers, waves.size, waves.of_tiles, waves.of_parts
    )
    for is_tile, count in ((1, num_tiles), (0, num_parts)):
        of_kind = numbers[are_tiles == is_tile].tolist()
        assert of_kind == list(range(len(of_kind)))
        assert count <= len(of_kind) < count + waves.size
    by_wave = are_tiles.view(-1, waves.size)
    assert (by_wave == by_wave[:, :1]).all()
    is_tile_wave = by_wave[:, 0].tolist()
    assert (is_tile_wave[0], is_tile_wave[-1]) == (1, 0)
    share = waves.of_tiles / len(is_tile_wave)
    for count in range(len(is_tile_wave) + 1):
        assert 0 <= sum(is_tile_wave[:count]) - count * share < 1


def test_empty_phases_leave_nothing_to_launch() -> None:
    assert interleave(0, 0, num_sms=3).num_programs == 0
    assert interleave(4, 0, num_sms=3).num_programs == 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_ways_are_right_for_a_13b_model_and_inside_a_graph(name: str) -> None:
    sequences = ((512, 1024), *((1, 1024 + i) for i in range(17)))
    case = AttentionCase(sequences, 40, 40, head_size=128)
    inputs = make_inputs(case, device=DEVICE, dtype=torch.bfloat16, num_sms=132)
    out = torch.empty_like(inputs.query)
    attend = partial(WAYS[name], *inputs.arguments, out=out)
    attend()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    out.fill_(float("nan"))
    graph.replay()
    assert relative_error(out, reference(case, inputs)) < 1e-2

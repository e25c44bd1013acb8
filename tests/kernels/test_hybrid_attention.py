"""Ways to attend for chunks and decodes of one batch, all of which must give the same: the engine's
two, and the benchmarks' in one launch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from attention_cases import AWKWARD, reference

from sarathi_kernels.attention.cases import AttentionCase, make_inputs
from sarathi_kernels.attention.hybrid import HybridAttention, Variant
from sarathi_kernels.attention.plan import PADDING, with_parts_of
from sarathi_kernels.benchmarks.attention_benchmarks import unified_attention
from sarathi_kernels.runtime.testing import poisoned, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def by_triton(variant: Variant, *inputs: Any, sliding_window: int | None = None, out: Any) -> None:
    HybridAttention(variant).attend(*inputs, sliding_window, out)


WAYS = {
    **{name: partial(by_triton, name) for name in get_args(Variant)},
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

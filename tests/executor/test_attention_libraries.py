"""Attention by FlashAttention 3 and FlashInfer, over plain torch with their signatures: what they
are given, when it may be written, and which of them a run takes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import attention_libraries as fakes
import pytest
import torch
from attention_cases import AWKWARD, reference
from cuda_stub import stubbed
from late_device import LateDevice
from plain_kernels import plain_kernels
from torch.nn.functional import pad
from toy_executors import SPEC as TOY
from toy_executors import requests_with_tokens

from sarathi_kernels.attention.cases import AttentionCase, make_inputs
from sarathi_kernels.attention.flash import FLASH, FlashPrompts
from sarathi_kernels.attention.flash_infer import FlashInferDecodes
from sarathi_kernels.attention.hybrid import HybridAttention
from sarathi_kernels.attention.plan import PADDING, AttentionPlan
from sarathi_kernels.benchmarks.attention_peers import library_attention
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.testing import poisoned, relative_error
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.policy import SarathiServe

CPU = torch.device("cpu")
CASES = {
    **AWKWARD,
    "pages of one token": AttentionCase(((20, 90), (1, 64), (1, 1), (3, 3)), 4, 2, block_size=1),
    "pages of 32": AttentionCase(((1, 33), (40, 96), (1, 32), (33, 33)), 6, 2, block_size=32),
    "prompts of one token": AttentionCase(((1, 1), (1, 1), (2, 2)), 2, 2),
    "largest batch": AttentionCase(tuple((1, 1 + i % 40) for i in range(512)), 2, 1),
}


@pytest.fixture
def installed() -> Iterator[None]:
    with fakes.installed():
        yield


def padded(plan: AttentionPlan, number: int) -> AttentionPlan:
    """With so many sequences and decodes of padding."""
    fields = ("prompt_lens", "query_starts")
    by_name = {name: pad(getattr(plan, name), (0, number)) for name in fields}
    by_name["query_starts"][-number:] = plan.query_starts[-1]
    by_name["kv_lens"] = pad(plan.kv_lens, (0, number), value=3)  # a context without new tokens
    by_name["decodes"] = pad(plan.decodes, (0, number), value=PADDING)
    return replace(plan, **by_name, block_table=pad(plan.block_table, (0, 0, 0, number)))


@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_both_give_what_attention_is(name, num_padding, installed):
    case = CASES[name]
    inputs = make_inputs(case, device=CPU, dtype=torch.float32, num_sms=2)
    is_hybrid = inputs.plan.num_tiles > 0 and inputs.plan.num_decodes > 0
    plan = padded(inputs.plan, num_padding) if num_padding and is_hybrid else inputs.plan
    attention = HybridAttention(
        "series",
        FlashPrompts(),
        FlashInferDecodes(_spec(case), torch.float32, case.block_size, CPU),
    )
    names = ("query_starts", "kv_lens", "block_table", "decodes", "prompt_lens")
    views = {name: getattr(plan, name).numpy() for name in names}
    views["prompt_lens"][:] = -1  # to be written
    sizes = {"num_tokens": case.num_tokens, "max_blocks": plan.block_table.shape[1]}
    sizes |= {"num_decodes": plan.num_decodes, "num_tiles": plan.num_tiles}
    out = poisoned(*inputs.query.shape, device=CPU, dtype=torch.float32)
    for slot in (0, 1):
        attention.begin(views, SimpleNamespace(**sizes), slot)
        tensors = inputs.query, inputs.key_cache, inputs.value_cache
        attention.attend(*tensors, plan, inputs.scale, case.sliding_window, out)
        assert relative_error(out, reference(case, inputs)) < 1e-5


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("chunks at an offset", ["flash"]),
        ("grouped decodes", ["flashinfer"]),
        ("window over tiles", ["flash + flashinfer", "flash"]),
    ],
)
def test_benchmarks_compare_with_what_is_installed(name, ways, installed):
    case = AWKWARD[name]
    inputs = make_inputs(case, device=CPU, dtype=torch.float16, num_sms=2)
    out = torch.empty_like(inputs.query)
    works = library_attention(case, inputs, out)
    assert list(works) == ways
    for work in works.values():
        out.fill_(float("nan"))
        work()
        assert relative_error(out, reference(case, inputs)) < 2e-3
    wide = make_inputs(case, device=CPU, dtype=torch.float32, num_sms=2)
    assert library_attention(case, wide, torch.empty_like(wide.query)) == {}


def _spec(case: AttentionCase, **given: Any) -> Any:
    names = ("num_heads", "num_kv_heads", "head_size", "sliding_window")
    return SimpleNamespace(kv_dtype="auto", **{name: getattr(case, name) for name in names})


@pytest.mark.parametrize(("module", "fake"), fakes.FAKES.items())
def test_the_signatures_are_those_of_the_libraries(module, fake):
    """Of what is installed: parameters in their order, and their defaults."""
    try:
        library = importlib.import_module(module)
        real = getattr(library, fake.__name__)
    except (ImportError, AttributeError):
        pytest.skip(f"no {module}")
    if not getattr(library, "__version__", "0.7").startswith("0.7"):
        pytest.skip("the signatures are of FlashInfer 0.7")
    pairs = [(fake, real)]
    if inspect.isclass(fake):
        names = [name for name in vars(fake) if callable(getattr(fake, name))]
        pairs = [(getattr(fake, name), getattr(real, name)) for name in names]
    for one, other in pairs:
        ours, theirs = (inspect.signature(function).parameters for function in (one, other))
        assert list(ours) == list(theirs)
        assert [each.default for each in ours.values()] == [e.default for e in theirs.values()]


# -- which of them a run takes ---------------------------------------------------------------------

HALF = {"device": "cuda", "dtype": "float16"}


@pytest.fixture
def late() -> Iterator[None]:
    with stubbed(LateDevice()), plain_kernels():
        yield


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("auto", ["triton", "triton"]),
        ("flash", ["flash", "triton"]),
        ("flashinfer", ["triton", "flashinfer"]),
        ("triton", ["triton", "triton"]),
    ],
)
def test_the_setting_is_what_attends(setting, chosen, installed, late, monkeypatch):
    calls = []
    for module, fake in fakes.FAKES.items():
        made = partial(_recorded, calls, module, fake)
        monkeypatch.setattr(sys.modules[module], fake.__name__, made)
    backend = TorchBackend(attention=setting, **HALF)
    backend.check(TOY, 160)
    executor = backend.build(TOY, None, Sizes(10, 16, batch_size=2, max_model_len=32))
    engine = EngineConfig(SarathiServe(chunk=16), num_blocks=10, block_size=16, batch_size=2)
    serve(requests_with_tokens([(20, 3), (7, 2)]), engine, executor)
    assert backend.attention_kernels(TOY) == " + ".join(chosen)
    assert ("flash_attn_interface" in calls, "flashinfer" in calls) == (
        chosen[0] == "flash",
        chosen[1] == "flashinfer",
    )


def _recorded(calls: list[str], module: str, fake: Any, *args: Any, **given: Any) -> Any:
    calls.append(module)
    return fake(*args, **given)


@pytest.mark.parametrize(
    ("given", "spec", "reason"),
    [
        ({}, {"head_size": 80}, r"heads of \(64, 96, 128, 192, 256\), not 80"),
        ({}, {"kv_dtype": "fp8"}, "no cache in fp8 with a scale for each head"),
        ({"dtype": "float32"}, {}, "float16 and bfloat16, not float32"),
        ({"hybrid": "streams"}, {}, "executor.hybrid=streams is for Triton's two kernels"),
    ],
)
def test_a_model_that_a_library_does_not_take_is_a_line(given, spec, reason, installed, late):
    model = replace(TOY, **spec)
    wanted = {**HALF, **given}
    message = (
        rf"executor.attention=flash does not run here: .*{reason}; use executor.attention=auto"
    )
    with pytest.raises(UserError, match=message):
        TorchBackend(attention="flash", **wanted).check(model, 160)


@pytest.mark.parametrize("module", fakes.FAKES)
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, r"is not installed \("),
        (ModuleType("other"), "has no "),
    ],
)
def test_a_library_that_is_not_there_is_a_line(module, found, reason, late, monkeypatch):
    monkeypatch.setitem(sys.modules, module, found)
    setting = {"flash_attn_interface": "flash"}.get(module, module)
    with pytest.raises(UserError, match=f"executor.attention={setting} .*{module} {reason}"):
        TorchBackend(attention=setting, **HALF).check(TOY, 160)


def test_other_chips_unknown_values_and_a_cpu_are_a_line(late):
    assert FLASH.why_not(TOY, torch.float16, 16, CHIPS[80]).endswith("a GPU of sm_80")
    with pytest.raises(UserError, match=r"executor.attention=fast .*auto, triton, flash, flashi"):
        TorchBackend(attention="fast", **HALF)
    with pytest.raises(UserError, match=r"executor.attention=flash is for Triton's kernels"):
        TorchBackend(attention="flash", device="cpu")


def test_a_kernel_that_a_library_cannot_compile_names_the_fix(installed, late, monkeypatch):
    def plan(*args: Any, **given: Any) -> None:
        raise RuntimeError("Ninja build failed.\nmore")

    monkeypatch.setattr(fakes.BatchDecodeWithPagedKVCacheWrapper, "plan", plan)
    backend = TorchBackend(attention="flashinfer", **HALF)
    line = "FlashInfer: Ninja build failed.; use executor.attention=triton$"
    with pytest.raises(RunError, match=line):
        backend.build(TOY, None, Sizes(10, 16, batch_size=2, max_model_len=32))

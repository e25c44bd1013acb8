"""What the real device refuses before it loads anything, and how much cache it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from commands import SMALL
from hydra import compose, initialize_config_dir

from sarathi_kernels.runtime.chip import Chip, assumed
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.executor.device import explain_device_errors
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.memory import KvBudget
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.run import main
from sarathi_lab.tasks.plan import Plan, make_plan

CPU = torch.device("cpu")


def plan_of(*overrides: str) -> Plan:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return make_plan(compose("config", list(overrides)))


def spec_of(name: str):
    return AutoModel().resolve(name)[0]


def test_kernels_refuse_heads_that_they_have_no_tiles_for():
    odd = replace(spec_of("30m"), head_size=72)
    with pytest.raises(
        UserError, match=r"model 30m: head size 72 is not supported.*use executor\.kernels=torch"
    ):
        backend.require_supported(odd, CPU, torch.float32)


def test_an_old_gpu_is_refused_in_one_line():
    with assumed(Chip(75, num_sms=40, shared_memory=65_536)), pytest.raises(UserError) as caught:
        backend.require_supported(spec_of("30m"), CPU, torch.float16)
    assert str(caught.value) == (
        "model 30m: the GPU has compute capability 7.5; the Triton kernels need 8.0 (Ampere) or "
        "newer; "
        "use executor.kernels=torch"
    )


def test_a_kernel_that_cannot_be_launched_is_said_in_one_line():
    OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    with (
        pytest.raises(
            RunError,
            match=r"^Triton can't compile .* during x \(OutOfResources: shared memory\); use exec",
        ),
        explain_device_errors("x"),
    ):
        raise OutOfResources("\nshared memory\nRequired: 300000")


def test_memory_that_a_library_refuses_is_said_so():
    with pytest.raises(RunError, match=r"^out of memory during x "), explain_device_errors("x"):
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def test_kernels_need_a_gpu_unless_they_are_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"executor\.kernels=triton needs a GPU, the device is cpu"):
        TorchBackend(device="cpu", kernels="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TorchBackend(device="cpu", kernels="triton").uses_kernels
    assert not TorchBackend(device="cpu").uses_kernels


def test_a_pool_beyond_what_a_real_iteration_leaves_is_refused():
    room = KvBudget(free=100 * 10**9, block=10**9, activations=3 * 10**9, num_tokens=18432)
    assert room.fit(None) == 100
    assert room.fit(100) == 100
    with pytest.raises(
        RunError,
        match=r"KV cache of 101 blocks needs 101\.0 GB.*3\.0 GB for an iteration of 18432.*",
    ):
        room.fit(101)
    with pytest.raises(RunError, match="room for 0 blocks"):
        replace(room, free=10**8).fit(None)


def test_a_cache_of_all_memory(monkeypatch, tmp_path):
    """cache.num_blocks=auto: half of a CPU's free memory, less the weights."""
    monkeypatch.setattr("sarathi_lab.executor.memory.free_memory_bytes", lambda device: 40_000_000)
    spec = spec_of("tiny")
    plan = plan_of(*SMALL, "cache.num_blocks=auto", "chunk=16")
    block = 16 * spec.kv_bytes_per_token(4)
    assert plan.engine.num_blocks == int((20_000_000 - spec.weight_bytes(4)) // block)
    assert (
        main([*SMALL, "cache.num_blocks=auto", "chunk=16", f"output={tmp_path}", "baselines=[]"])
        == 0
    )


def test_the_most_tokens_of_an_iteration_bound_what_is_set_aside():
    chunked = plan_of(*SMALL, "policy=sarathi_serve", "chunk=16")
    assert chunked.sizes.max_batch_tokens == 16
    whole = plan_of(*SMALL, "policy=request_level")
    assert whole.sizes.max_batch_tokens == 2 * 48 + 2
    assert plan_of(*SMALL, "policy=orca").sizes.max_batch_tokens == 48 + 2


def test_a_mixture_of_experts_is_computed_elsewhere(refused):
    line = refused("model=tiny-moe", "device=cpu")
    assert "tiny-moe is a mixture of experts" in line
    assert "use executor=vllm or executor=simulated" in line


@pytest.mark.parametrize("setting", ["executor.attention=flash", "+executor.attention=flash"])
def test_a_setting_that_is_gone_names_what_does_it_now(setting, refused):
    assert "use executor=vllm +executor.options.attention_backend=" in refused(setting)

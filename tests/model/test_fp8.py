"""Products of layers in 8 bits on the real engine: by hand, in a model, and what refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.weights import E4M3, Fp8Linear, load_model, why_not_fp8

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPEC = ModelSpec(
    name="toy",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_size=48,
    vocab_size=50,
)
FP8 = replace(SPEC, weight_dtype="fp8")


def linear_of(dtype: torch.dtype, *, bias: bool, device: torch.device = CPU) -> nn.Linear:
    """Channels of very different sizes, which one scale for all would lose."""
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    sizes = 10.0 ** torch.linspace(-4, 2, 48)[:, None]
    linear.weight.copy_(torch.randn(48, 64, generator=generator) * sizes)
    return linear.to(device, dtype)


def tokens(dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.tensor([1e-3, 1.0, 50.0, 0.0])[:, None]
    return (torch.randn(4, 64, generator=generator) * sizes).to(device, dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row as e4m3 has it, in float64."""
    scales = x.double().abs().amax(-1, keepdim=True) / 448
    steps = torch.where(scales > 0, x.double() / scales, 0.0)
    return steps.float().to(E4M3).double() * scales


@pytest.mark.parametrize(
    ("dtype", "tolerance", "bias"), [(torch.float32, 1e-5, False), (torch.bfloat16, 8e-3, True)]
)
def test_a_product_is_that_of_the_rounded_sides(dtype, tolerance, bias):
    linear, x = linear_of(dtype, bias=bias), tokens(dtype)
    found = Fp8Linear(linear)(x)
    expected = rounded(x) @ rounded(linear.weight).t()
    if bias:
        expected += linear.bias.double()
    assert found.dtype == dtype
    scale = expected.abs().amax(0)  # of each channel: an error of a small one counts
    assert ((found.double() - expected).abs() / scale.clamp(min=1e-30)).max() < tolerance
    exact = x.double() @ linear.weight.double().t()
    if not bias:
        errors = (found.double() - exact)[:3].norm(dim=1) / exact[:3].norm(dim=1)
        assert 1e-3 < errors.max() < 0.1  # it is in 8 bits, and of each token alike


@pytest.mark.gpu
def test_a_gpu_multiplies_as_the_cpu_emulates():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("has no products in 8 bits")
    linear, x = linear_of(torch.bfloat16, bias=True), tokens(torch.bfloat16)
    expected = Fp8Linear(linear)(x).float()
    found = Fp8Linear(linear.to(GPU))(x.to(GPU)).float().cpu()
    scale = expected.abs().amax(0).clamp(min=1e-30)
    assert ((found - expected).abs() / scale).max() < 1.6e-2


def test_the_layers_are_in_8_bits_and_the_rest_as_before():
    model = load_model(FP8, None, CPU, torch.float32, seed=0)
    plain = load_model(SPEC, None, CPU, torch.float32, seed=0)
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 4 * SPEC.num_layers
    wide = {name for name, value in model.named_parameters() if value.dtype == E4M3}
    assert wide == {name for name, _ in plain.named_parameters() if "_proj.weight" in name} | {
        f"layers.{layer}.ffn_{way}.weight" for layer in range(2) for way in ("up", "down")
    }
    matrices = [v for name, v in model.named_parameters() if v.ndim == 2 and "scales" not in name]
    assert sum(value.nbytes for value in matrices) == FP8.weight_bytes(4)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "told"),
    [
        ((8, 6), torch.bfloat16, 64, "compute capability is 8.6, below 8.9"),
        ((9, 0), torch.float16, 64, "dtype is float16"),
        ((9, 0), torch.bfloat16, 40, "40, is no multiple of 16"),
        ((9, 0), torch.bfloat16, 64, None),
    ],
)
def test_what_a_gpu_refuses(capability, dtype, size, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = why_not_fp8([(64, 128), (128, size)], GPU, dtype)
    assert told in reason if told else reason is None
    assert why_not_fp8([(64, size)], CPU, torch.float32) is None


def test_the_backend_says_what_computes_them():
    with pytest.raises(UserError, match=r"kernels=native does not run here: .*8 bits") as raised:
        TorchBackend("cpu", kernels="native", weights="fp8").check(SPEC, 0)
    assert "\n" not in str(raised.value)
    backend = TorchBackend("cpu", weights="fp8")
    backend.check(SPEC, 0)
    assert any("emulates products in 8 bits" in line for line in backend.cautions(SPEC))
    with pytest.raises(UserError, match=r"executor\.weights=int4 is unknown"):
        TorchBackend("cpu", weights="int4")

"""Products in 8 bits: by hand, in C++ as in plain torch, in a model, and what refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kv_quality import Cuts, teacher_forced_logits
from native_library import is_missing, needs_library
from torch import nn
from toy_executors import SPEC as TOY

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.packing import MOST_BYTES, PANEL, pack_linear
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model import native_operations
from sarathi_lab.model.roofline import Peaks, operation_rooflines
from sarathi_lab.model.spec import SCALE_BYTES
from sarathi_lab.model.weights import E4M3, Fp8Linear, Int8Linear, load_model, why_not_fp8
from tests.support.simulated import batch_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPEC = replace(TOY, qkv_bias=True)
INT8, FP8 = replace(SPEC, weight_dtype="int8"), replace(SPEC, weight_dtype="fp8")
SIZES = Sizes(num_blocks=8, block_size=16, batch_size=1)


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    if not is_missing():
        library.start(2)


@pytest.fixture(params=[True, False], ids=["amx", "dots"])
def allows_amx(request: pytest.FixtureRequest) -> Iterator[bool]:
    library.start(2, allows_amx=request.param)
    yield request.param
    library.start(2)


def linear_of(in_features: int, out_features: int, *, bias: bool = True) -> nn.Linear:
    """Channels of very different sizes, which one scale for all would lose."""
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)
    sizes = 10.0 ** torch.linspace(-4, 2, out_features)[:, None]
    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * sizes)
    return linear


def rows_of(num_rows: int, in_features: int) -> torch.Tensor:
    """Tokens of very different sizes, the last of zeros."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num_rows, in_features, generator=generator)
    return x * torch.linspace(30, 0, num_rows)[:, None]


def packed(linear: Int8Linear, **settings: bool):
    bias = None if linear.bias is None else linear.bias.detach()
    return pack_linear(linear.weight.detach(), bias, linear.scales.detach(), **settings)


def test_a_product_is_that_of_the_rounded_sides():
    linear, x = linear_of(1500, 48), rows_of(4, 1500)
    sides = []
    for side in (x.double(), linear.weight.double()):
        scales = side.abs().amax(1, keepdim=True) / 127
        sides.append((side / scales.clamp(min=1e-300)).round() * scales)
    expected = sides[0] @ sides[1].t() + linear.bias.double()
    found = Int8Linear(linear)(x)
    scale = expected.abs().amax(0)  # of each channel: an error of a small one counts
    assert ((found.double() - expected).abs() / scale).max() < 1e-6
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    errors = (found.double() - exact)[:3].norm(dim=1) / exact[:3].norm(dim=1)
    assert 1e-3 < errors.max() < 0.03  # it is in 8 bits, and of each token alike


@needs_library
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(1, 48, 97), (7, 1100, 31), (65, 100, 70)], ids=str)
def test_the_product_is_that_of_torch(allows_amx, sizes, bias):
    linear, x = Int8Linear(linear_of(*sizes[1:], bias=bias)), rows_of(*sizes[:2])
    found, expected = library.linear(x, packed(linear)), linear(x)
    # sums are exact, and products with scales the same; a bias may be added without rounding first
    assert torch.equal(found, expected) if not bias else torch.allclose(found, expected, rtol=1e-6)


@needs_library
def test_the_largest_numbers_and_those_that_are_none(allows_amx):
    linear = nn.Linear(300, 33, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.where(torch.arange(300) % 2 == 1, -1.0, 1.0).expand(33, 300))
    x = linear.weight[:5].clone()  # every product is 127 * 127
    x[1], x[2, 5] = -x[1], float("nan")
    quantized = Int8Linear(linear)
    for found in (library.linear(x, packed(quantized)), quantized(x)):
        assert torch.allclose(found[:2], torch.tensor([[300.0], [-300.0]]).expand(2, 33))
        assert found[2].isnan().all()
        assert torch.allclose(found[3:], torch.tensor(300.0).expand(2, 33))


@needs_library
def test_a_gated_weight_pairs_gates_with_what_they_scale():
    linear, x = Int8Linear(linear_of(70, 80)), rows_of(3, 70)
    pairs = library.linear(x, packed(linear, is_gated=True)).view(3, -1, 2, PANEL // 2)
    found = torch.cat([part.flatten(1)[:, :40] for part in pairs.unbind(2)], 1)
    assert torch.allclose(found, linear(x), rtol=1e-6)


def test_what_can_not_be_packed():
    weight = torch.zeros(2, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="int8 with scales"):
        pack_linear(weight, None)
    with pytest.raises(ValueError, match="not the packed weight"):
        replace(pack_linear(weight, None, torch.ones(2)), sums=None)
    with pytest.raises(ValueError, match=f"use up to {MOST_BYTES}"):
        pack_linear(torch.zeros(1, MOST_BYTES + 1, dtype=torch.int8), None, torch.ones(1))
    wide = replace(INT8, ffn_size=MOST_BYTES + 1)
    assert "inputs, not 66312" in native_operations.why_not(wide, torch.bfloat16)


def test_all_products_are_in_int8_and_bytes_are_those_of_the_spec():
    for tied in (False, True):
        spec = replace(INT8, tie_embeddings=tied)
        model = load_model(spec, None, CPU, torch.bfloat16, seed=0)
        small = {name for name, value in model.named_parameters() if value.dtype == torch.int8}
        assert len(small) == 4 * SPEC.num_layers + 1
        assert "lm_head.weight" in small
        counted = [v for name, v in model.named_parameters() if v.ndim == 2 or "scales" in name]
        assert sum(value.nbytes for value in counted) == spec.weight_bytes(2)
    one = batch_of(decodes=1)
    scales = SCALE_BYTES * sum(
        x.out_features * x.count for x in (*SPEC.layer_linears, SPEC.lm_head)
    )
    products = SPEC.num_linear_params + SPEC.lm_head.num_params
    assert INT8.weight_read_bytes(one, 2) == products + scales
    peaks = Peaks(1e30, 1.0, "nothing but bytes")
    times = [operation_rooflines(spec, one, 2, peaks)["lm_head"] for spec in (SPEC, INT8)]
    assert times[0] - times[1] == pytest.approx(SPEC.lm_head.num_params)


@pytest.fixture(scope="module")
def logits() -> dict[str, torch.Tensor]:
    tokens = torch.randint(97, (60,), generator=torch.Generator().manual_seed(1)).int().numpy()
    found = {}
    for name, settings in {
        "float32": {"dtype": "float32", "kernels": "torch"},
        "torch": {"dtype": "int8", "kernels": "torch"},
        "native": {"dtype": "int8"},
    }.items():
        executor = TorchBackend("cpu", threads=2, **settings).build(SPEC, None, SIZES)
        found[name] = teacher_forced_logits(executor, tokens, Cuts(17)).float()
    return found


@pytest.mark.parametrize("path", ["torch", pytest.param("native", marks=needs_library)])
def test_a_models_logits_are_near_those_of_float32(logits, path):
    """Found: 0.02 to 0.03 of the largest, and 0.004 of it with weights alone in bfloat16."""
    errors = (logits[path] - logits["float32"]).abs().amax(1) / logits["float32"].abs().amax(1)
    assert 1e-3 < errors.max() < 0.1
    agreement = (logits[path].argmax(1) == logits["float32"].argmax(1)).float().mean()
    assert agreement > 0.8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": "fp8"}, "executor.weights=fp8 is another type of the same weights"),
        ({"tensor_parallel": 2}, "tensor_parallel=2 cuts; use executor.pipeline_parallel"),
        ({"kernels": "triton"}, "Triton has no int8 products; use executor.kernels=auto"),
    ],
)
def test_what_has_no_such_products_is_refused(settings, words, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match=words):
        TorchBackend("cpu", "int8", **settings)


def test_a_gpu_is_refused(monkeypatch):
    backend = TorchBackend("cpu", "int8", kernels="torch")
    assert any("emulates products in int8" in line for line in backend.cautions(SPEC))
    assert backend.dtype_bytes == 2  # of the cache and the embedding
    monkeypatch.setattr(TorchBackend, "uses_gpus", True)
    with pytest.raises(UserError, match=r"int8 .* it needs a CPU.*executor\.weights=fp8"):
        TorchBackend("cpu", "int8")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row as e4m3 has it, in float64."""
    scales = x.double().abs().amax(-1, keepdim=True) / 448
    steps = torch.where(scales > 0, x.double() / scales, 0.0)
    return steps.float().to(E4M3).double() * scales


@pytest.mark.parametrize(
    ("dtype", "tolerance", "bias"), [(torch.float32, 1e-5, False), (torch.bfloat16, 8e-3, True)]
)
def test_a_product_in_fp8_is_that_of_the_rounded_sides(dtype, tolerance, bias):
    linear, x = linear_of(64, 48, bias=bias).to(dtype), rows_of(4, 64).to(dtype)
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
    linear, x = linear_of(64, 48).bfloat16(), rows_of(4, 64).bfloat16()
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
    ("capability", "dtype", "size", "words"),
    [
        ((8, 6), torch.bfloat16, 64, "compute capability is 8.6, below 8.9"),
        ((9, 0), torch.float16, 64, "dtype is float16"),
        ((9, 0), torch.bfloat16, 40, "40, is no multiple of 16"),
        ((9, 0), torch.bfloat16, 64, None),
    ],
)
def test_what_a_gpu_refuses(capability, dtype, size, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = why_not_fp8([(64, 128), (128, size)], GPU, dtype)
    assert words in reason if words else reason is None
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

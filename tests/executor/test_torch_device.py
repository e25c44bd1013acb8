"""Names of devices and dtypes, default models, memory and measured peaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.sweeper import compose
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.torch import backend as torch_backend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.roofline import Peaks, ridge_tokens

CPU = torch.device("cpu")


def test_auto_takes_what_is_there():
    assert devices.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert devices.resolve_dtype("auto", CPU) == ("float32", torch.float32)
    assert devices.resolve_dtype("auto", torch.device("cuda")) == ("bfloat16", torch.bfloat16)
    assert devices.resolve_dtype("float16", CPU) == ("float16", torch.float16)


@pytest.mark.parametrize("name", ["tpu", "cpu:1", "cuda:x", ""])
def test_unknown_devices_are_refused(name):
    with pytest.raises(UserError, match="is unknown"):
        devices.resolve_device(name)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU"):
        devices.resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match="only 2 GPUs"):
        devices.resolve_device("cuda:2")


@pytest.mark.parametrize("file", ["nvidia0", "wsl/libcuda.so.1"])
@pytest.mark.parametrize(("cuda", "built"), [("13.0", "for CUDA 13.0"), (None, "without CUDA")])
def test_a_gpu_that_torch_cant_use_is_never_passed_over(file, cuda, built, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    files = (f"{tmp_path}/nvidia[0-9]*", f"{tmp_path}/wsl/libcuda.so*")
    monkeypatch.setattr(devices, "GPU_FILES", files)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert devices.resolve_device("auto") == CPU  # there is none
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    for name in ("auto", "cuda"):
        with pytest.raises(UserError) as raised:
            devices.resolve_device(name)
        assert f"torch {torch.__version__}, built {built}, can't use" in str(raised.value)
        assert "or use device=cpu" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert devices.resolve_device("cpu") == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.resolve_device("auto") == CPU


@pytest.mark.parametrize(
    ("card", "taken", "dtype_bytes", "expected"),
    [
        (85.0e9, 1e9, 2, "13b"),  # an H100 or A100 of 80 GB
        (47.6e9, 1e9, 2, "13b"),  # an A40 with ECC
        (42.3e9, 1e9, 2, "llama3-8b"),  # an A100 of 40 GB
        (23.6e9, 1e9, 2, "llama3-8b"),  # an A10
        (16.6e9, 1e9, 2, "llama3.2-3b"),
        (10.4e9, 1e9, 2, "llama3.2-3b"),
        (8.3e9, 1e9, 2, "120m"),
        (85.0e9, 1e9, 4, "llama3-8b"),
        (25.2e9, 1e9, 4, "llama3.2-3b"),
        (85.0e9, 60e9, 2, "llama3-8b"),  # others are on it
    ],
)
def test_default_models(monkeypatch, card, taken, dtype_bytes, expected):
    free = int(card - taken)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 10**9, int(card)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * 10**9)
    properties = SimpleNamespace(total_memory=int(card))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert devices.free_memory_bytes(torch.device("cuda", 0)) == free
    assert devices.default_model_name(torch.device("cuda", 0), dtype_bytes) == expected
    assert devices.default_model_name(CPU, dtype_bytes) == "30m"


def test_the_default_gpu_models_are_as_large_as_assumed():
    for model in devices.GPU_MODELS:
        spec, _ = AutoModel().resolve(model.name)
        assert spec.num_params == pytest.approx(model.num_params, rel=0.02)


def test_peaks_are_plausible_and_only_rise(monkeypatch):
    monkeypatch.setattr(devices, "best_peaks", {})
    monkeypatch.setattr(devices, "FIRST_ROUNDS", 1)
    peaks = devices.measure_peaks(CPU, torch.float32)
    monkeypatch.setattr(devices, "product_speed", lambda device, dtype: 1.0)
    again = devices.measure_peaks(CPU, torch.float32)
    assert again.flops_per_second >= peaks.flops_per_second
    assert again.bytes_per_second >= peaks.bytes_per_second
    assert peaks.source == "measured"
    assert 1e9 < peaks.flops_per_second < 1e14
    assert 1e9 < peaks.bytes_per_second < 1e13


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(monkeypatch):
    backend = TorchBackend(device="cpu", dtype="float32")
    spec, _ = AutoModel().resolve("30m")
    backend.check(spec, kv_tokens=1024)
    monkeypatch.setattr("sarathi_lab.executor.memory.free_memory_bytes", lambda device: 10**8)
    with pytest.raises(UserError, match=r"30m needs 0\.1 GB for weights and 0\.0 GB for KV"):
        backend.check(spec, kv_tokens=1024)


def test_description_names_the_processor_and_its_threads():
    assert f", {torch.get_num_threads()} thread" in devices.device_description(CPU)
    assert devices.device_description(CPU, 1).endswith(", 1 thread)")
    assert devices.device_description(CPU, 2).endswith(", 2 threads)")


@pytest.mark.parametrize(
    ("flags", "settings", "expected"),
    [
        ({"avx512f", "amx_bf16"}, {"is_model_stated": False}, ("140m", "bfloat16")),
        ({"avx512f"}, {"is_model_stated": False}, ("30m", "float32")),
        ({"amx_bf16"}, {}, ("30m", "float32")),  # a model is stated
        ({"amx_bf16"}, {"is_model_stated": False, "dtype": "float32"}, ("30m", "float32")),
        ({"amx_bf16"}, {"is_model_stated": False, "dtype": "bfloat16"}, ("30m", "bfloat16")),
        ({"amx_bf16"}, {"is_model_stated": False, "kernels": "torch"}, ("30m", "float32")),
        ({"amx_bf16"}, {"is_model_stated": False, "isa": "avx2"}, ("30m", "float32")),
    ],
)
def test_a_cpu_with_matrix_tiles_has_its_own_defaults(monkeypatch, flags, settings, expected):
    monkeypatch.setattr(torch_backend, "cpu_flags", lambda: flags)
    monkeypatch.setattr(torch_backend, "why_not_built", lambda isa: None)
    backend = TorchBackend(device="cpu", **settings)
    assert (backend.default_model, backend.dtype_name) == expected


def test_a_cpu_with_matrix_tiles_and_no_compiler_has_the_usual_defaults(monkeypatch):
    monkeypatch.setattr(torch_backend, "cpu_flags", lambda: {"amx_bf16"})
    monkeypatch.setattr(torch_backend, "why_not_built", lambda isa: "no compiler")
    backend = TorchBackend(device="cpu", is_model_stated=False)
    assert (backend.default_model, backend.dtype_name) == ("30m", "float32")


def test_the_command_says_whether_a_model_is_stated():
    for setting, is_stated in (("model=auto", False), ("model=tiny", True), ("model.path=x", True)):
        (job,) = compose([setting, "tracking=none"]).jobs
        assert job.cfg.executor.is_model_stated is is_stated


def test_chunks_are_few_ridges_of_the_model_for_matrix_tiles():
    spec = load_option("model", devices.TILES_CPU.model)
    peaks = Peaks(1.9e12, 24.9e9, "of a Xeon with AMX")  # experiments/lab/iteration_time
    assert 140e6 < spec.num_params < 150e6
    assert 3 < 256 / ridge_tokens(spec, 2, peaks) < 4

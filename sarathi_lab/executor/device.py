"""Device and dtype of a run: names, threads, measured peaks, and errors."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import NamedTuple
from warnings import catch_warnings

import torch

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.build import NotBuilt
from sarathi_kernels.cpu.packing import DTYPES as PACKED_DTYPES
from sarathi_kernels.cpu.packing import pack_linear
from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.memory import free_memory_bytes
from sarathi_lab.executor.placement import most_threads
from sarathi_lab.executor.timeline import durations, timeline_of
from sarathi_lab.model.operations import NAN_TOKEN
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.transformer import Transformer


class DefaultModel(NamedTuple):
    """A model of model=auto, the least memory of a card that is to have it, and its size."""

    name: str
    card_bytes: float
    num_params: float


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# In 16 bits, by a card's memory as torch.cuda reports it: 47.6e9 bytes of 48 GB with ECC, 51.0e9
# without, 23.7e9 to 25.3e9 of 24 GB.
GPU_MODELS = (
    DefaultModel("13b", card_bytes=47.0e9, num_params=13.0e9),  # the paper's
    DefaultModel("llama3-8b", card_bytes=20.0e9, num_params=8.03e9),
    DefaultModel("llama3.2-3b", card_bytes=10.0e9, num_params=3.21e9),
)
EIGHT_BITS = (
    "for weights in 8 bits executor.weights=fp8 with executor=simulated, or "
    '"executor.options={quantization: fp8_per_channel}" with executor=vllm'
)
SMALL_GPU_MODEL = "120m"
FIRST_ROUNDS = 4  # of peaks, before anything is announced
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}  # of square matrices, for the peak of products
# Of the product by C++: rows of the input, and shape of the weight.
NATIVE_ROWS = 256
NATIVE_SIZE = (8192, 2048)
# For the peak of memory: far larger than the caches, as what is wanted is the memory's rate.
STREAM_BYTES = {"cpu": 192 << 20, "cuda": 512 << 20}
# Parameters of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
# Where there is a GPU of NVIDIA's: a node of Linux, or the driver that Windows hands to WSL2, which
# has no node of its own.
GPU_FILES = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so*")
# Memory errors without a class in torch: of a CPU, the driver, cuBLAS, and another process.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
)
ROOM = 1.2  # weights plus a fifth for cache and activations
BYTES_IN_16_BITS = 2


def resolve_device(name: str) -> torch.device:
    """Return the device `name` (auto, cpu, cuda or cuda:N). Raises UserError for a missing one."""
    kind, _, index = str(name).partition(":")
    is_numbered_gpu = kind == "cuda" and index.isdecimal()
    if kind not in ("auto", "cpu", "cuda") or (index and not is_numbered_gpu):
        raise UserError(f"device={name} is unknown; use auto, cpu, cuda or cuda:1")
    if kind == "cpu":
        return torch.device("cpu")
    with catch_warnings(action="ignore"):  # torch's of an old driver: the error below has it
        is_usable = torch.cuda.is_available()
    if is_usable:
        number = int(index or 0)
        count = torch.cuda.device_count()
        if number >= count:
            raise UserError(f"device={name}, but there are only {count} GPUs; count from cuda:0")
        return torch.device("cuda", number)
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    has_gpu = any(glob(pattern) for pattern in GPU_FILES)
    if has_gpu and not is_hidden:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UserError(
            f"device={name}, but torch {torch.__version__}, built {built}, can't use the GPU here; "
            "install a driver (nvidia-smi prints yours) and a torch of the same CUDA "
            "(https://pytorch.org/get-started), or use device=cpu"
        )
    if kind == "auto":
        return torch.device("cpu")
    raise UserError(
        f"device={name}, but torch {torch.__version__} finds no GPU; use device=cpu or device=auto"
    )


class CpuDefault(NamedTuple):
    """Model and dtype of model=auto and dtype=auto on a CPU."""

    model: str
    dtype: str


USUAL_CPU = CpuDefault("30m", "float32")
# Only with matrix tiles are products of 16 bits so fast that a small model has the paper's
# proportions: attention a few percent of an iteration, and chunks of a few ridges.
TILES_CPU = CpuDefault("140m", "bfloat16")
TILES = "amx_bf16"


def default_on_cpu(flags: Collection[str]) -> CpuDefault:
    """Return what a CPU with these `flags` (`cpu_flags`) serves by default."""
    return TILES_CPU if TILES in flags else USUAL_CPU


def resolve_dtype(name: str, device: torch.device) -> tuple[str, torch.dtype]:
    """Return the dtype and its name; auto is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name not in DTYPES:
        is_8_bits = name in ("int8", "fp8")
        hint = f", or {EIGHT_BITS}" if is_8_bits else ""
        raise UserError(f"dtype={name} is unknown; use one of auto, {', '.join(DTYPES)}{hint}")
    return name, DTYPES[name]


def default_model_name(device: torch.device, dtype_bytes: int) -> str:
    """Return the model of model=auto: on a GPU the largest of GPU_MODELS for a card of its size
    that has room in what is free, with elements of `dtype_bytes`.
    """
    if device.type == "cpu":
        return "30m"
    card_bytes = torch.cuda.get_device_properties(device).total_memory
    free_bytes = free_memory_bytes(device)
    for model in GPU_MODELS:
        is_of_card = card_bytes >= model.card_bytes * dtype_bytes / BYTES_IN_16_BITS
        if is_of_card and free_bytes > ROOM * model.num_params * dtype_bytes:
            return model.name
    return SMALL_GPU_MODEL


def device_description(
    device: torch.device, num_threads: int | None = None, isa: str | None = None
) -> str:
    """Describe a GPU by its name, a CPU as "cpu (Intel Xeon, 2 threads, avx512)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    number = num_threads or torch.get_num_threads()
    facts = [_cpu_name(), "1 thread" if number == 1 else f"{number} threads"]
    if isa:
        facts.append(isa)
    return f"cpu ({', '.join(facts)})"


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


engine_ends: list[Callable[[], None]] = []  # of engines that keep a GPU's memory between runs


def prepare_memory(device: torch.device) -> None:
    """Release memory of earlier runs of a GPU; on a CPU let the C library keep freed memory (glibc
    only).

    Otherwise it maps large tensors at every allocation, and the kernel zeroes their pages at first
    touch: a fifth of the time of a long prefill. The process then holds its peak memory.
    """
    if device.type == "cuda":
        for end in engine_ends:
            end()
        gc.collect()  # a run that stopped may have left its memory in a cycle
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


Computing = tuple[torch.device, torch.dtype, int]  # with so many threads
best_peaks: dict[Computing, Peaks] = {}


def measure_peaks(device: torch.device, dtype: torch.dtype, isa: str = "auto") -> Peaks:
    """Measure large products, copies and sums; return the best that this process has seen.

    A shared machine may be slow for seconds, so every call measures and a peak only rises. A copy
    counts the bytes read and written. Products are torch's or, on a CPU, those of the C++ by the
    instructions `isa`, whichever are faster.
    """
    ways = [product_speed]
    if device.type == "cpu" and dtype in PACKED_DTYPES:
        with suppress(NotBuilt):
            library.start(torch.get_num_threads(), isa=isa)
            ways.append(native_product_speed)
    kind = (device, dtype, torch.get_num_threads())
    seen = best_peaks.get(kind)
    flops = num_bytes = 0.0
    num_rounds = FIRST_ROUNDS
    if seen is not None:  # the best of all measurements counts
        flops = seen.flops_per_second
        num_bytes = seen.bytes_per_second
        num_rounds = 1
    with torch.inference_mode():
        try:
            for _ in range(num_rounds):
                flops = max(flops, *(way(device, dtype) for way in ways))
                num_bytes = max(num_bytes, stream_speed(device))
        except torch.OutOfMemoryError:
            if seen is None:
                raise
            return seen  # beside a cache that fills the memory nothing can be measured
    best_peaks[kind] = Peaks(flops, num_bytes, "measured")
    return best_peaks[kind]


def native_product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large product by the C++ of a CPU."""
    columns, inputs = NATIVE_SIZE
    weight = pack_linear(torch.ones(NATIVE_SIZE, dtype=dtype), None)
    x = torch.ones(NATIVE_ROWS, inputs)
    flops = 2.0 * NATIVE_ROWS * columns * inputs
    return flops / _best_time(lambda: library.linear(x, weight), device)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large product by torch."""
    size = PRODUCT_SIZE[device.type]
    a = torch.rand(size, size, device=device).to(dtype)
    b = torch.rand(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    seconds = _best_time(lambda: torch.matmul(a, b, out=out), device)
    return 2.0 * size**3 / seconds


def stream_speed(device: torch.device) -> float:
    """Return the bytes/s of a large copy or sum, whichever is faster."""
    num_bytes = STREAM_BYTES[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source).zero_()
    copied = 2 * num_bytes / _best_time(lambda: target.copy_(source), device)
    read = num_bytes / _best_time(lambda: source.sum(), device)
    return max(copied, read)


def _best_time(operation: Callable[[], object], device: torch.device) -> float:
    return min(durations(operation, timeline_of(device), repetitions=5))


ORIGINAL_THREADS = torch.get_num_threads()


def num_threads(setting: int | None) -> int:
    """Return `setting`; None is torch's first number, limited to the fast cores and the share of
    time of this process.
    """
    return setting or min(ORIGINAL_THREADS, most_threads() or ORIGINAL_THREADS)


def use_threads(setting: int | None) -> None:
    """Let torch compute on `num_threads(setting)` threads from now on."""
    number = num_threads(setting)
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextmanager
def explain_lack_of_memory(what: str) -> Iterator[None]:
    """Turn errors of memory during `what` into a RunError."""
    try:
        yield
    except Exception as error:
        text = str(error)
        says_so = any(message in text for message in OUT_OF_MEMORY)
        if says_so or isinstance(error, torch.OutOfMemoryError):
            match = re.search(r"ried to allocate ([\d.]+ \w+)", text)
            missing = "some" if match is None else match[1]
            raise RunError(
                f"out of memory during {what} ({missing} more were wanted); "
                "lower batch, chunk, seq_len or cache.num_blocks"
            ) from None
        raise


@contextmanager
def explain_device_errors(what: str) -> Iterator[None]:
    """Turn errors of memory, graphs and kernels of the lab during `what` into a RunError."""
    try:
        with explain_lack_of_memory(what):
            yield
    except RunError:
        raise
    except Exception as error:
        lines = (line.strip() for line in str(error).splitlines())
        line = next(filter(None, lines), "no message")
        if isinstance(error, RuntimeError) and "captur" in line.lower():  # CUDA's, torch's words
            reason = f"{what} failed ({line}); use executor.cuda_graphs=false"
        elif type(error).__module__.startswith("triton"):
            reason = (
                f"Triton can't compile or launch a kernel during {what} "
                f"({type(error).__name__}: {line}); use executor.kernels=torch"
            )
        else:
            raise
        raise RunError(reason) from None


def nan_error(model: Transformer, batch: Batch, token_ids: list[int]) -> RunError:
    """Name the first request whose logits are not numbers."""
    chunk_of_token = []  # in the order of `token_ids`
    for chunk in batch.chunks:
        if chunk.emits_token:
            chunk_of_token += [chunk] * chunk.num_rows
    chunk = chunk_of_token[token_ids.index(NAN_TOKEN)]
    is_half = model.dtype == torch.float16
    advice = "use dtype=bfloat16 or float32" if is_half else "check the model's weights"
    return RunError(
        f"request {chunk.sequence.request.request_id}: the logits of its token "
        f"{chunk.output_index} are not numbers; {advice}"
    )

"""Backend of vLLM's workers, and the engine that the runs of a sweep share."""

from __future__ import annotations

import atexit
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import torch

from sarathi_lab.config.checked import check_fields, flag, one_of, whole
from sarathi_lab.config.console import print_words
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.compositions import rehearse
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor import device as devices
from sarathi_lab.executor.measured_backend import MeasuredBackend
from sarathi_lab.executor.memory import USABLE, free_memory_bytes
from sarathi_lab.executor.placement import allowed_cores
from sarathi_lab.executor.timeline import HostTimeline, timeline_of
from sarathi_lab.executor.vllm import workers as vllm
from sarathi_lab.executor.vllm.engine_arguments import (
    check_options,
    check_overrides,
    mapping_of,
    with_options,
)
from sarathi_lab.executor.vllm.executor import VllmExecutor, explained
from sarathi_lab.executor.vllm.model_reading import (
    quantised_setting,
    read_spec,
    shape_of,
    with_quantised_weights,
)
from sarathi_lab.executor.vllm.stages import StagedExecutor
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.seeded_checkpoint import (
    config_folder,
    config_of,
    path_of,
    path_of_config,
    require_architecture,
    seeded_checkpoint,
)
from sarathi_lab.model.spec import ModelSpec

AUTO = "auto"
SEEDED = "seeded"
BLOCK_MULTIPLES = {"cpu": 32, "cuda": 16}  # of tokens, that vLLM's attention reads
DEVICES_FIX = "use a number of devices"
WARM_UP_TOKENS = 256
WARM_UPS = 3
PIECEWISE = "PIECEWISE"  # CUDA graphs of what is between attention, so that the model is called
# Tokens of the largest batch that vLLM's server replays as CUDA graphs by default (0.28 to 0.33).
# Left to itself vLLM captures up to twice max_num_seqs, which here is the batch of the runs:
# decodes would be replayed, and the chunks that they are compared with launched.
LARGEST_GRAPH = 512


@dataclass(frozen=True)
class VllmBackend(MeasuredBackend):
    """Backend that runs the lab's batches on vLLM's workers. Raises UserError for invalid settings,
    and if vLLM is missing or too old.

    `random_weights` of a model without a checkpoint are "dummy", drawn by the workers from `seed`,
    which times do not depend on, or "seeded", those of executor=torch, which are saved once as a
    checkpoint, so that tokens can be compared; "auto" is dummy on a GPU. `tensor_parallel` devices
    share a layer, `pipeline_parallel` stages share the layers. `eager` leaves out graphs and
    compilation. With `async_scheduling` the next batch is made while one runs. `runner` is vLLM's
    model runner. `options` are further engine arguments, by vLLM's names.
    """

    name: ClassVar[str] = "vllm"
    device: str = AUTO
    dtype: str = one_of(AUTO, valid=(AUTO, "float32", "bfloat16", "float16"))
    seed: int = 0
    random_weights: str = one_of(AUTO, valid=(AUTO, vllm.DUMMY, SEEDED))
    tensor_parallel: int = whole(1, minimum=1, fix=DEVICES_FIX)
    pipeline_parallel: int = whole(1, minimum=1, fix=DEVICES_FIX)
    eager: bool = flag(False)
    async_scheduling: bool | str = one_of(AUTO, valid=(AUTO, True, False))
    runner: str = one_of(AUTO, valid=vllm.RUNNERS)
    options: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "executor.")
        vllm.version()
        _ = self.torch_device  # refuse a device that is not there
        if self.async_scheduling is True and self.pipeline_parallel > 1:
            raise UserError(
                "executor.async_scheduling=true has no effect with executor.pipeline_parallel="
                f"{self.pipeline_parallel}, whose stages have a batch each; drop it"
            )
        check_options(self.options or {})
        mode = self._stated_compilation.get("cudagraph_mode", PIECEWISE)
        if self._times_stages_in_graphs and "FULL" in str(mode).upper():
            raise UserError(
                f"executor.options.compilation_config.cudagraph_mode={mode}: whole graphs skip the "
                f"hooks that time the stages of executor.pipeline_parallel={self.num_stages}; use "
                f"{PIECEWISE}, or executor.eager=true"
            )

    @cached_property
    def torch_device(self) -> torch.device:
        kind = vllm.device_type()
        name = kind if self.device == AUTO else self.device
        device = devices.resolve_device(name)
        if device.type != kind or device.index:
            advice = f"use device={kind}"
            if device.index:
                advice = "choose a GPU by CUDA_VISIBLE_DEVICES"
            raise UserError(
                f"device={self.device}, but the installed vLLM runs on {kind}; {advice}"
            )
        return device

    @property
    def device_name(self) -> str:
        name = devices.device_description(self.torch_device, devices.num_threads(None))
        several = f", {self.degrees.description}" if self.num_devices > 1 else ""
        return f"{name}{several}, vLLM's workers, the lab's host"

    @property
    def block_multiple(self) -> int:
        return BLOCK_MULTIPLES.get(self.torch_device.type, 1)

    @property
    def facts(self) -> dict[str, object]:
        """What ran the last batches (`Workers.facts`)."""
        return _engine.facts

    def check(self, spec: ModelSpec, kv_tokens: int, window_pool: float | None = None) -> None:
        """Raise UserError for a model or cache that does not run here."""
        self._check_devices()
        spec.require_runnable()
        if spec.kv_dtype == "int8":
            raise UserError("cache.dtype=int8: vLLM has no such cache; use fp8 or auto")
        if spec.has_formulas:
            self._check_heads(spec)
            check_overrides(self.options or {}, config_of(spec, self.dtype_name))
        self.check_memory(spec, kv_tokens)

    def _check_heads(self, spec: ModelSpec) -> None:
        sizes = () if self.uses_gpus else vllm.head_sizes_of_cpu()
        if sizes and spec.head_size not in sizes:
            raise UserError(
                f"model {spec.name} has heads of {spec.head_size}, which vLLM's attention does not "
                f"compute on a CPU; use model=30m, or model.head_size of {_listed(sizes)}"
            )

    def with_weights(self, spec: ModelSpec, checkpoint: Path | None) -> ModelSpec:
        """Return the spec with the bytes of the weights as `options` have vLLM quantise them.
        Raises UserError for what vLLM refuses, and for a way whose bytes are not known.
        """
        setting = quantised_setting(self.options or {})
        if setting is None or not spec.has_formulas or spec.quantisation is not None:
            return spec
        if checkpoint is None:
            checkpoint = config_folder(spec, self.torch_dtype)
        arguments = self._arguments_of_model(checkpoint)
        return with_quantised_weights(spec, arguments, self.runner, setting=setting)

    def read_model(self, checkpoint: Path) -> ModelSpec | None:
        """Return the spec of a checkpoint by vLLM's reading; None for a folder without one. Raises
        UserError for one that does not run here.
        """
        if not (checkpoint / "config.json").is_file():
            return None
        arguments = self._arguments_of_model(checkpoint)
        return read_spec(checkpoint, arguments, self.runner, on_gpu=self.uses_gpus)

    def _arguments_of_model(self, folder: Path) -> dict[str, object]:
        """Return the engine arguments by which vLLM reads a model's configuration."""
        arguments = {
            "model": str(folder),
            "dtype": self.dtype_name,
            "block_size": self.block_multiple,
            **vllm.ALWAYS,
        }
        return with_options(arguments, self.options or {})

    def _check_devices(self) -> None:
        """Raise UserError for more GPUs than this machine has, unless Ray has those of others."""
        if not self.uses_gpus or "distributed_executor_backend" in (self.options or {}):
            return
        number = torch.cuda.device_count()
        if self.num_devices > number:
            raise UserError(
                f"executor.tensor_parallel={self.tensor_parallel} times executor."
                f"pipeline_parallel={self.pipeline_parallel} needs {self.num_devices} GPUs, this "
                f"machine has {number}; use fewer, or executor=simulated"
            )

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """Return what differs from a server's run."""
        cautions: list[str] = []
        if self._times_stages_in_graphs:
            cautions.append(
                "CUDA graphs are piecewise: whole ones skip the hooks that time the stages"
            )
        if spec.num_experts and self._draws_dummies(None):
            cautions.append(
                "with dummy weights (no model.path) tokens choose experts about evenly; those of a "
                "trained router may take another time"
            )
        release = vllm.release_of(vllm.version())
        if release is None or release > vllm.NEWEST:
            newest = ".".join(map(str, vllm.NEWEST))
            cautions.append(f"vLLM {vllm.version()}: tested up to {newest}")
        return cautions

    def _draws_dummies(self, checkpoint: Path | None) -> bool:
        """Whether the workers draw the weights."""
        if checkpoint is not None:
            return False
        is_default = self.random_weights == AUTO and self.uses_gpus
        return is_default or self.random_weights == vllm.DUMMY

    @property
    def _times_stages_in_graphs(self) -> bool:
        return self.num_stages > 1 and self.uses_gpus and not self.eager

    def peaks(self) -> Peaks:
        """Measure the peaks of this device, times the number of GPUs."""
        with devices.explain_lack_of_memory("the measurement of its peaks"):
            peaks = devices.measure_peaks(self.torch_device, self.torch_dtype)
        # Products of 8 and 4 bits are not measured: their rooflines are left blank.
        return replace(
            self.of_all_devices(peaks),
            fp8_flops_per_second=math.nan,
            fp4_flops_per_second=math.nan,
            int8_flops_per_second=math.nan,
        )

    def expect(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> None:
        """Have an engine made with room for `sizes`. Raises UserError for what vLLM refuses."""
        if checkpoint is None:
            require_architecture(spec)
            if not self._draws_dummies(checkpoint):
                self._check_room_for_checkpoint(spec)
        elif self.random_weights != AUTO:
            raise UserError(
                f"executor.random_weights={self.random_weights} is of models without a checkpoint, "
                f"and model.path={checkpoint} names one; drop one of the two"
            )
        self._check_block_size(spec, checkpoint, sizes.block_size)
        if sizes.num_drafts:
            raise UserError("executor=vllm verifies no drafts; use speculation=none")
        max_model_len, max_batch_tokens = _limits(sizes)
        expected = replace(sizes, max_model_len=max_model_len, max_batch_tokens=max_batch_tokens)
        _engine.expect(self._key(spec, checkpoint, expected), expected)

    def _check_block_size(self, spec: ModelSpec, checkpoint: Path | None, block_size: int) -> None:
        """Raise UserError for blocks that vLLM's attention does not read."""
        kind = self.torch_device.type
        multiple = self.block_multiple
        if checkpoint is not None and not spec.has_formulas:
            needed = shape_of(self._arguments_of_model(checkpoint), self.runner).block_size
            if needed == block_size:
                return
            if needed != multiple:  # that was asked for
                raise UserError(
                    f"cache.block_size={block_size}: vLLM's attention of {spec.name} reads blocks "
                    f"of {needed} tokens on a {kind}; use cache.block_size={needed}"
                )
        if block_size % multiple:
            raise UserError(
                f"cache.block_size={block_size}: vLLM's attention on a {kind} reads blocks "
                f"of a multiple of {multiple} tokens; use cache.block_size={multiple}"
            )

    def _check_room_for_checkpoint(self, spec: ModelSpec) -> None:
        """Raise UserError if the disk or the host's memory is too small for the seeded weights."""
        folder = path_of(spec, self.torch_device, self.torch_dtype, self.seed)
        if folder.is_dir():
            return
        num_bytes = spec.unquantised().weight_bytes(self.dtype_bytes)
        needed = f"the seeded weights of {spec.name} need {num_bytes / 1e9:.1f} GB"
        advice = "use executor.random_weights=dummy, which needs neither, or a smaller model"
        existing = next(parent for parent in folder.parents if parent.is_dir())
        free_disk = shutil.disk_usage(existing).free
        if num_bytes > USABLE * free_disk:
            raise UserError(
                f"{needed} of disk in {folder.parent.parent}, which has {free_disk / 1e9:.1f} GB "
                f"free; free some, name another disk by XDG_CACHE_HOME, {advice}"
            )
        free_memory = free_memory_bytes(torch.device("cpu"))
        if num_bytes > USABLE * free_memory:
            raise UserError(
                f"{needed} of the host's memory while they are saved, which has "
                f"{free_memory / 1e9:.1f} GB free; {advice}"
            )

    def build(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> VllmExecutor:
        """Return a warmed-up executor on the engine of earlier runs, or on a new one. Raises
        RunError if it does not start.
        """
        self.expect(spec, checkpoint, sizes)
        start = partial(self._start, spec, checkpoint)
        with explained(f"the start of its engine for {spec.name}"):
            workers = _engine.get(self._key(spec, checkpoint, sizes), start)
        if workers.block_size != sizes.block_size:
            raise UserError(
                f"cache.block_size={sizes.block_size}: vLLM has made blocks of "
                f"{workers.block_size} tokens for {spec.name}; use "
                f"cache.block_size={workers.block_size}"
            )
        timeline = HostTimeline()
        if workers.in_process and self.uses_gpus:  # events on the stream that the workers use
            timeline = timeline_of(self.torch_device)
        num_blocks = None if sizes.fills_memory else sizes.num_blocks
        executor_class = StagedExecutor if self.num_stages > 1 else VllmExecutor
        executor = executor_class(
            workers, num_blocks=num_blocks, timeline=timeline, close=_engine.close
        )
        executor.start()
        max_model_len, max_batch_tokens = _limits(sizes)
        chunk = sizes.chunk or WARM_UP_TOKENS
        tokens = min(chunk, max_batch_tokens, (max_model_len - 1) // 2)
        for _ in range(WARM_UPS):
            rehearse(executor, executor.num_blocks, sizes.block_size, sizes.batch_size, tokens)
        return executor

    def _start(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> vllm.Workers:
        devices.prepare_memory(self.torch_device)  # seeded weights are drawn on the device
        if self._draws_dummies(checkpoint):
            config_folder(spec, self.torch_dtype)
        elif checkpoint is None:
            self._save_seeded_weights(spec)
        arguments = self.arguments(spec, checkpoint, sizes)
        config = vllm.make_config(arguments, self.runner, self._cores)
        if self.async_scheduling is True and not config.scheduler_config.async_scheduling:
            raise UserError(
                "executor.async_scheduling=true, which vLLM does not have on a "
                f"{self.torch_device.type}; use auto"
            )
        workers = vllm.Workers(config, self.seed, _announce)
        _announce("running warm-up iterations")  # as `build` does
        return workers

    def _save_seeded_weights(self, spec: ModelSpec) -> None:
        folder = path_of(spec, self.torch_device, self.torch_dtype, self.seed)
        if folder.is_dir():
            return
        _announce(f"drawing seeded weights, which are saved once in {folder}")
        seeded_checkpoint(spec, self.torch_device, self.torch_dtype, self.seed)
        devices.prepare_memory(self.torch_device)  # vLLM refuses a GPU that torch keeps taken

    def _folder(self, spec: ModelSpec, checkpoint: Path | None) -> Path:
        if checkpoint is not None:
            return checkpoint
        if self._draws_dummies(checkpoint):
            return path_of_config(spec, self.torch_dtype)
        return path_of(spec, self.torch_device, self.torch_dtype, self.seed)

    def _key(self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> str:
        """Equal for runs that an engine can serve in turn."""
        folder = self._folder(spec, checkpoint)
        return f"{self} {(folder, spec.kv_dtype, sizes.block_size, sizes.fills_memory)}"

    def arguments(
        self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes
    ) -> dict[str, object]:
        """Return vLLM's engine arguments."""
        arguments: dict[str, object] = {
            "model": str(self._folder(spec, checkpoint)),
            "dtype": self.dtype_name,
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "enforce_eager": self.eager,
            "async_scheduling": self._stated_async_scheduling,
            **self._arguments_of_batches(sizes),
            **self._arguments_of_cache(spec, sizes),
            **vllm.ALWAYS,
        }
        if self._draws_dummies(checkpoint):
            arguments["load_format"] = vllm.DUMMY
        max_model_len, _ = _limits(sizes)
        # Random weights have no positions that they were trained for, so that any length will do.
        if checkpoint is None and max_model_len > spec.max_position:
            arguments["hf_overrides"] = {"max_position_embeddings": max_model_len}
        arguments = with_options(arguments, self.options or {})
        return {**arguments, **self._arguments_of_graphs(sizes)}

    @property
    def _stated_async_scheduling(self) -> bool | None:
        """Whether the next batch is made while one runs; None leaves it to vLLM."""
        if self.num_stages > 1:
            return False
        if isinstance(self.async_scheduling, bool):
            return self.async_scheduling
        return None

    def _arguments_of_batches(self, sizes: Sizes) -> dict[str, int]:
        max_num_seqs = sizes.batch_size * self.num_stages
        max_model_len, max_batch_tokens = _limits(sizes)
        return {
            "max_num_seqs": max_num_seqs,
            # vLLM refuses a budget in which not every sequence has a token.
            "max_num_batched_tokens": max(max_batch_tokens, max_num_seqs),
            "max_model_len": max_model_len,
        }

    def _arguments_of_cache(self, spec: ModelSpec, sizes: Sizes) -> dict[str, object]:
        arguments: dict[str, object] = {
            "kv_cache_dtype": spec.kv_dtype,
            "block_size": sizes.block_size,
        }
        num_blocks = sizes.num_blocks + vllm.FIRST_BLOCK
        fills_gpu = self.uses_gpus and sizes.fills_memory
        if not fills_gpu:  # which leaves the number to vLLM
            arguments["num_gpu_blocks_override"] = num_blocks
        if not self.uses_gpus:  # else a share of the whole memory, which others use, too
            block_bytes = sizes.block_size * spec.kv_bytes_per_token(self.dtype_bytes)
            arguments["kv_cache_memory_bytes"] = num_blocks * block_bytes
        return arguments

    def _arguments_of_graphs(self, sizes: Sizes) -> dict[str, object]:
        arguments: dict[str, object] = {}
        if self._times_stages_in_graphs:
            graphs = {"cudagraph_mode": PIECEWISE}
            arguments["compilation_config"] = {**graphs, **self._stated_compilation}
        has_graphs = self.uses_gpus and not self.eager
        if has_graphs and not vllm.states_graph_sizes(self.options or {}):
            max_num_batched_tokens = self._arguments_of_batches(sizes)["max_num_batched_tokens"]
            largest = min(LARGEST_GRAPH, max_num_batched_tokens)
            arguments["max_cudagraph_capture_size"] = largest
        return arguments

    @property
    def _stated_compilation(self) -> Mapping[str, object]:
        """The user's settings of compilation and graphs."""
        return mapping_of("compilation_config", self.options or {})

    @property
    def _cores(self) -> str | None:
        """The cores of each of several workers on a CPU: vLLM would give each a memory node."""
        cores = allowed_cores()
        number = self.num_devices
        if number == 1 or self.uses_gpus or len(cores) < number:
            return None
        # As VLLM_CPU_OMP_THREADS_BIND lists them: workers by "|", cores of a worker by ",".
        cores_of_workers = []
        for worker in range(number):
            cores_of_worker = map(str, cores[worker::number])
            cores_of_workers.append(",".join(cores_of_worker))
        return "|".join(cores_of_workers)


def _announce(phase: str) -> None:
    """State what begins, as it may take minutes."""
    print_words(f"  vLLM: {phase}")


def _larger(number: int | None, other: int | None) -> int:
    """Return the larger of two numbers; None, of an engine without one, is the smallest."""
    return max(number or 0, other or 0)


def _limits(sizes: Sizes) -> tuple[int, int]:
    """Return the tokens of the longest sequence and of the largest batch: without a number those of
    the cache, and of the warm-up.
    """
    longest = sizes.max_model_len or sizes.num_blocks * sizes.block_size
    return longest, sizes.max_batch_tokens or WARM_UP_TOKENS


def _listed(sizes: Sequence[int]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


class SharedEngine:
    """The vLLM engine of this process: one for all runs that were expected before it was made, so
    that memory, buffers and graphs are the same for all policies.
    """

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}
        self._workers: vllm.Workers | None = None
        self._made_for: tuple[str, Sizes] | None = None
        self._largest: dict[str, Sizes] = {}  # expected, by key

    def expect(self, key: str, sizes: Sizes) -> None:
        """Make room for `sizes` in the engine of `key`."""
        before = self._largest.get(key, sizes)
        self._largest[key] = replace(
            sizes,
            num_blocks=max(before.num_blocks, sizes.num_blocks),
            batch_size=max(before.batch_size, sizes.batch_size),
            max_model_len=_larger(before.max_model_len, sizes.max_model_len),
            max_batch_tokens=_larger(before.max_batch_tokens, sizes.max_batch_tokens),
        )

    def get(self, key: str, start: Callable[[Sizes], vllm.Workers]) -> vllm.Workers:
        """Return the workers of `key`, which `start` makes for the largest sizes expected."""
        wanted = key, replace(self._largest[key], chunk=None)
        if self._workers is None or wanted != self._made_for:
            self.close()
            try:
                self._workers = start(wanted[1])
            except BaseException:
                del self._largest[key]  # smaller ones may fit
                raise
            self._made_for = wanted
            self.facts = self._workers.facts()
        return self._workers

    def close(self) -> None:
        """End the workers, if there are any."""
        workers = self._workers
        self._workers = None
        if workers is not None:
            workers.close()


_engine = SharedEngine()
atexit.register(_engine.close)
devices.engine_ends.append(_engine.close)

"""A simulated device: hardware figures, a cost model and a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, get_args

from sarathi_lab.config.checked import check_fields, number, one_of, whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Backend, Executor, Predictor, Sizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.engine.served_system import ServerSetup, ServingDevice
from sarathi_lab.executor.simulated.cautions import cautions_of
from sarathi_lab.executor.simulated.cost_model import MEASURED_KERNELS, CostModel, make_cost_model
from sarathi_lab.executor.simulated.drawn_times import (
    AS_STATED,
    NUM_DRAWS,
    SHAPES_OF_BATCHES,
    BatchShape,
    CostVariant,
    DrawnTimes,
    IterationTime,
    StageTimes,
)
from sarathi_lab.executor.simulated.executor import PipelineExecutor, SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import (
    NO_HOST,
    WEIGHTS,
    Hardware,
    Host,
    Parallel,
)
from sarathi_lab.executor.simulated.kv_capacity import (
    check_room,
    device_memory,
    served_tokens,
    tokens_in,
)
from sarathi_lab.executor.tables import newest_change, read_tables
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.quantisation import STORED
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec, StoredDtype

# Meaning of dtype=auto, by the hardware file's element size.
DEFAULT_DTYPES = {2: "float16", 4: "float32"}

MOST_COST_MODELS = 16  # that a process keeps
# By all that they depend on: to read tables takes as long as a run of a hundred requests.
cost_models: dict[str, CostModel] = {}


def _no_option(group: str, value: object) -> UserError:
    return UserError(f"executor.{group}={value} is not one; choose one by {group}=NAME")


@dataclass(frozen=True)
class SimulatedBackend(Backend):
    """Predicted times of devices, without token ids.

    Attributes:
        hardware: One device.
        dtype: Element type of the model and its cache; "auto": the hardware's.
        cost_model: Where the times come from, one of `cost_model.Level`.
        tensor_parallel: Devices that share each layer.
        pipeline_parallel: Stages that share the layers.
        host: Replaces the hardware's `iteration_overhead`, if it states seconds.
        weights: In "fp8" weights and activations of the layers' products have 8 bits (W8A8). In
            "w8a8" they are integers of 8 bits, in "nvfp4" numbers of 4. In "int4" (AWQ, GPTQ),
            "int8" and "mxfp4" (experts), and on hardware without such products, weights are stored
            so, and products computed in the type of the rest.
        draw: Which draw of the cost model's constants within its errors (`DrawnTimes`); 0: none.
        slower_shape: Which of `SHAPES_OF_BATCHES` is slower by the error that it has alone.
        slowdown: Factor on the times of iterations that are served, such as 1.36 for a card whose
            kernels all take 36 % longer than predicted; None: 1. Single predictions are without it.
    """

    name: ClassVar[str] = "simulated"
    computes_tokens: ClassVar[bool] = False
    default_model: ClassVar[str] = "13b"
    hardware: Hardware
    dtype: str = "auto"
    cost_model: str = "analytic"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    host: Host = NO_HOST
    weights: StoredDtype = one_of("auto", name=WEIGHTS, valid=get_args(StoredDtype))
    draw: int = whole(
        0,
        name="executor.draw",
        minimum=0,
        maximum=NUM_DRAWS,
        fix=f"use 1 to {NUM_DRAWS}, or 0 for the constants as they are stated; a shape of batches "
        f"is slower with executor.slower_shape={SHAPES_OF_BATCHES[0]}",
    )
    slower_shape: BatchShape | None = one_of(
        None, name="executor.slower_shape", valid=SHAPES_OF_BATCHES
    )
    slowdown: float | None = number(
        None, name="executor.slowdown", above=0, fix="use a factor such as 1.36, or null for none"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.hardware, Hardware):
            raise _no_option("hardware", self.hardware)
        if not isinstance(self.host, Host):
            raise _no_option("host", self.host)
        check_fields(self)
        self._refuse_host_of_other_makers()
        _ = self.parallel, self.attending  # checks the degrees and the kernel
        if self.draw and self.slower_shape is not None:
            raise UserError(
                f"executor.draw={self.draw} and executor.slower_shape={self.slower_shape}: a run "
                "shows one error at a time; use executor.draw=0 or executor.slower_shape=null"
            )
        host = self.host
        if self.num_stages > 1 and (host.is_stated or host.sequence or host.overlaps):
            stated = []
            for name in ("iteration", "sequence", "overlaps"):
                value = getattr(host, name)
                if value:
                    stated.append(f"host.{name}={value}")
            raise UserError(
                f"a pipeline of {self.num_stages} stages has no host, so that {', '.join(stated)} "
                f"(host={host.name}) would have no effect; use host=none, and leave out the rest"
            )
        size = self.hardware.dtype_bytes
        valid = ["auto", *(name for name, number in DTYPE_BYTES.items() if number == size)]
        if self.dtype not in valid:
            raise UserError(
                f"dtype={self.dtype} is not an element type of {size} bytes, of which hardware "
                f"{self.hardware.name} has the peaks; use one of {', '.join(valid)}"
            )

    def _refuse_host_of_other_makers(self) -> None:
        makers = self.host.makers
        maker = self.hardware.maker
        if makers is None or maker is None or maker in makers:
            return
        raise UserError(
            f"host={self.host.name} is of a system for cards of {', '.join(makers)}, and "
            f"{self.hardware.name} is of {maker}; use host=vllm_0_19 or host=sglang_0_5"
        )

    @property
    def device_name(self) -> str:
        spread = f", {self.parallel.description}" if self.parallel.num_devices > 1 else ""
        if self.composes_kernels and self.hardware.tables is not None:
            tables = read_tables(self.hardware.tables, tensor=self.tensor_parallel)
            return f"{self.hardware.name}{spread}: {tables.origin}"
        return f"simulated {self.hardware.name}{spread}"

    @property
    def variant(self) -> CostVariant:
        """What of the cost model errs in this backend's runs."""
        return CostVariant(self.draw, self.slower_shape)

    @property
    def request_time(self) -> float:
        return self.host.request

    @property
    def without_overlap(self) -> str:
        return "host=none" if self.host.overlaps else ""

    @property
    def composes_kernels(self) -> bool:
        """Whether times are those of measured kernels alone, of which single iterations consist."""
        return self.cost_model == MEASURED_KERNELS

    @property
    def parallel(self) -> Parallel:
        return Parallel(self.tensor_parallel, self.pipeline_parallel)

    @property
    def num_devices(self) -> int:
        return self.parallel.num_devices

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel

    @property
    def serving_device(self) -> ServingDevice:
        hardware = self.hardware
        return ServingDevice(hardware.name, int(hardware.memory_bytes), hardware.maker)

    @property
    def dtype_name(self) -> str:
        return DEFAULT_DTYPES[self.hardware.dtype_bytes] if self.dtype == "auto" else self.dtype

    def dtype_of(self, spec: ModelSpec) -> str:
        # A file of 32 bits is served in 16 where the device's products have 16, as vLLM does.
        is_of_file = DTYPE_BYTES.get(spec.published_dtype) == self.dtype_bytes
        return spec.published_dtype if self.dtype == "auto" and is_of_file else self.dtype_name

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype_name]

    def check(
        self,
        spec: ModelSpec,
        kv_tokens: int,
        window_pool: float | None = None,
    ) -> None:
        """Raise UserError for a model that does not fit, can't be split or has no cost model, or
        one without the errors that are drawn. Host memory is unlimited.
        """
        cost = self.cost_of(spec)
        if self.variant != AS_STATED:
            self._require_errors(cost)
        held = self._held(spec)
        check_room(
            held,
            self.hardware,
            self.dtype_bytes,
            self.parallel,
            kv_tokens,
            window_pool,
        )

    def _require_errors(self, cost: CostModel) -> None:
        """Raise UserError where the cost model does not state an error that is drawn."""
        unknown = [kind for kind, error in cost.uncertainty.items() if math.isnan(error)]
        if not unknown:
            return
        fix = "use executor.draw=0, executor.slower_shape=null and task.draws=0"
        if self.cost_model == "analytic" and unknown[0] in self.hardware.uncertainty:
            fix = f"state it, such as hardware.uncertainty.{unknown[0]}=0.1, or {fix}"
        settings = [f"executor.{name}={value}" for name, value in self.altered.items()]
        raise UserError(
            f"{' '.join(settings)}: times err by the errors that the cost model states, and it "
            f"states none of {', '.join(unknown)}; {fix}"
        )

    def peaks(self) -> Peaks:
        """Return the hardware file's peaks, of all devices together."""
        hardware = self.hardware
        of_one = Peaks(
            hardware.flops_per_second,
            hardware.bytes_per_second,
            f"of hardware {hardware.name}",
            fp8_flops_per_second=hardware.fp8_flops_per_second,
            fp4_flops_per_second=hardware.fp4_flops_per_second,
            int8_flops_per_second=hardware.int8_flops_per_second,
        )
        return of_one.times(self.parallel.num_devices)

    def size(self) -> tuple[int, int]:
        """Return the hardware file's memory and multiprocessors, of all devices together."""
        hardware = self.hardware
        return self.num_devices * int(hardware.memory_bytes), self.num_devices * hardware.num_sms

    @property
    def assumptions(self) -> Sequence[str]:
        """What is taken where neither a figure nor a table states it, a line each."""
        return []

    def cautions(self, spec: ModelSpec) -> Sequence[str]:
        """List the cost model's error on held-out shapes, and effects that favour chunks."""
        cost = self.cost_of(spec)
        if self.composes_kernels:
            return cost.cautions
        return cautions_of(cost, self.host, self.altered)

    @property
    def altered(self) -> Mapping[str, object]:
        """The settings by which times are not as predicted."""
        altered: dict[str, object] = {}
        if self.draw:
            altered["draw"] = self.draw
        if self.slower_shape is not None:
            altered["slower_shape"] = self.slower_shape
        if self.slowdown not in (None, 1):
            altered["slowdown"] = self.slowdown
        return altered

    def predictor(self, spec: ModelSpec) -> Predictor:
        """Return the cost model with the host: what it leaves the device waiting is overhead."""
        cost = self.cost_of(spec)

        def operation_times(batch: Batch) -> dict[str, float]:
            times = cost.operation_times(batch)
            times["overhead"] += self.host.exposed(batch, sum(times.values()))
            return times

        return Predictor(operation_times)

    def kv_blocks(
        self,
        spec: ModelSpec,
        block_size: int,
        setup: ServerSetup,
    ) -> int:
        """Compute the blocks that a server has by its rule. Raises UserError for none."""
        num_tokens = served_tokens(
            self._held(spec),
            self.hardware,
            self.dtype_bytes,
            setup,
            self.parallel,
        )
        return max(1, num_tokens // block_size)

    def blocks_in(
        self,
        spec: ModelSpec,
        block_size: int,
        num_bytes: int,
    ) -> int:
        """Compute the blocks of a cache of `num_bytes` on each device."""
        tokens = tokens_in(self._held(spec), num_bytes, self.dtype_bytes, self.parallel)
        return max(1, tokens // block_size)

    def describe_cache(self, spec: ModelSpec, setup: ServerSetup) -> str:
        """Describe how `kv_blocks` is calculated for one device."""
        memory = device_memory(
            self._held(spec),
            self.hardware,
            self.dtype_bytes,
            self.parallel,
            setup,
        )
        return setup.describe(memory)

    def state_tokens(self, spec: ModelSpec) -> int:
        parallel = self.parallel
        parallel.check(spec)
        token_bytes = parallel.tensor * parallel.cache_bytes_per_token(spec, self.dtype_bytes)
        return math.ceil(spec.state_bytes(self.dtype_bytes) / token_bytes)

    def window_in_cache(self, spec: ModelSpec, pool: float | None) -> CachedWindow | None:
        """Return the room of layers with a window by the heads of one device."""
        self.parallel.check(spec)
        return self.parallel.with_heads_of_device(spec).window_in_cache(pool)

    def build(
        self,
        spec: ModelSpec,
        checkpoint: Path | None,
        sizes: Sizes,
    ) -> Executor:
        """Make the virtual clock over the cost model; no size costs time or memory here. Raises
        UserError where only iterations of some sizes have times.
        """
        if self.composes_kernels:
            raise UserError(
                f"executor.cost_model={MEASURED_KERNELS} has times at measured sizes only, and "
                "serving takes any; use executor.cost_model=profiled, or task=measure"
            )
        cost = self.cost_of(spec)
        if self.num_stages > 1:
            return self._pipeline(cost)
        iteration_time: IterationTime = cost.iteration_time
        if self.variant != AS_STATED:
            iteration_time = DrawnTimes(cost).iteration_time_of(self.variant)
        return SimulatedExecutor(self.slowed(iteration_time), self.host)

    def _pipeline(self, cost: CostModel) -> PipelineExecutor:
        stage_times: StageTimes = cost.stage_times
        send_time: IterationTime = cost.send_time
        if self.variant != AS_STATED:
            drawn = DrawnTimes(cost)
            stage_times = drawn.stage_times_of(self.variant, stage_times)
            send_time = drawn.send_time_of(self.variant, send_time)
        slowdown = self.slowdown or 1.0

        def slowed_stages(batch: Batch) -> list[float]:
            return [slowdown * seconds for seconds in stage_times(batch)]

        return PipelineExecutor(self.num_stages, slowed_stages, self.slowed(send_time))

    def slowed(self, iteration_time: IterationTime) -> IterationTime:
        """Return the function of a batch's seconds with the `slowdown`."""
        slowdown = self.slowdown
        if slowdown is None:
            return iteration_time
        return lambda batch: slowdown * iteration_time(batch)

    @property
    def attending(self) -> Hardware:
        """The hardware with the host's attention kernel."""
        return self.hardware.with_kernel(self.host.attention_kernel)

    def cost_of(self, spec: ModelSpec) -> CostModel:
        """Return the cost model of a replica, with this backend's weights, kernels and graphs."""
        hardware = self.attending
        spec = SimulatedBackend._held(self, spec)
        if self.host.is_stated:
            hardware = replace(hardware, iteration_overhead=0.0)
        changed = None if self.cost_model == "analytic" else newest_change(hardware.tables)
        graphs = self.host.graphs
        fused = tuple(self.host.fused or ())
        settings = (self.cost_model, spec, hardware, self.dtype_bytes, self.parallel, graphs, fused)
        key = repr((settings, changed))
        if key not in cost_models:
            if len(cost_models) == MOST_COST_MODELS:
                oldest = next(iter(cost_models))
                del cost_models[oldest]
            cost_models[key] = make_cost_model(*settings)
        return cost_models[key]

    def _held(self, spec: ModelSpec) -> ModelSpec:
        """Return the part of `spec` that one replica holds, with this backend's weights. Raises
        UserError for one that can't be split, or weights of a checkpoint that has others.
        """
        self.parallel.check(spec)
        if self.weights != "auto" and spec.quantisation is not None:
            raise UserError(
                f"{WEIGHTS}={self.weights}: the weights of model {spec.name} are stored in "
                f"{spec.quantisation.name} already; use {WEIGHTS}=auto"
            )
        if self.weights != "auto" and STORED[self.weights].of == "experts" and not spec.num_experts:
            raise UserError(
                f"{WEIGHTS}={self.weights} is of experts, which model {spec.name} has not; use "
                f"{WEIGHTS}=int4, nvfp4, int8, fp8 or auto"
            )
        return replace(spec, weight_dtype=self.weights)

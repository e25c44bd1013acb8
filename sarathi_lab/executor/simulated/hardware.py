"""A GPU in a few figures (datasheet peaks, and the shares of them that real kernels reach), and the
host of a serving system.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import (
    check_fields,
    checked,
    flag,
    listed,
    number,
    one_of,
    refuse_unread,
    text,
    whole,
)
from sarathi_lab.config.errors import UserError, require_number, require_one_of
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import stated_beside
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.model.degrees import Degrees, kv_heads_of_device, refuse_kv_heads, uneven
from sarathi_lab.model.quantisation import Quantisation
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec

FIX = "correct the hardware file"
WEIGHTS = "executor.weights"  # the setting that selects 8-bit products
# Kernels that may include what follows them: conversions to 8 bits, and an all-reduce its norm.
FUSING = ("attention", "activation", "norm", "all_reduce")
# Kinds of operation with an entry in `Hardware.uncertainty`; EXPERTS is optional.
UNCERTAIN = ("matmul", "attention")
EXPERTS = "experts"
OPERATIONS = stated_beside(__file__, "operations.yaml")
# Products on every device that shares a layer.
REPLICATED = frozenset(OPERATIONS["replicated"])
MAKERS = ("nvidia", "amd")  # of cards, whose servers and kernels differ
# Figures that a datasheet states, by their names in `datasheet`; from the links on they may be
# unknown.
OF_DATASHEET = {
    "flops_per_second": "peak",
    "bytes_per_second": "bandwidth",
    "memory_bytes": "memory",
    "link_bytes_per_second": "link",
    "network_bytes_per_second": "network",
    "fp8_flops_per_second": "fp8_peak",
    "fp4_flops_per_second": "fp4_peak",
    "int8_flops_per_second": "int8_peak",
}


Figures = Mapping[str, Any]  # values of any of `Hardware`'s fields, by name


def _require_efficiency(name: str, value: object) -> None:
    if require_number(name, value, above=0, fix=FIX) > 1:
        raise UserError(f"{name}={value} exceeds 1, the peak; {FIX}")


_peak = partial(number, above=0, fix=FIX)
_efficiency = partial(checked, _require_efficiency)  # share of a peak, in (0, 1]
_link = partial(number, None, above=0, fix="use bytes/s, null if unknown")
_seconds = partial(number, minimum=0, fix="use seconds from 0")
_slowdown = partial(number, 0.0, minimum=0, fix="use 0 or more")
_count = partial(whole, minimum=1, fix=FIX)


def none_as_nan(errors: Mapping[str, float | None]) -> dict[str, float]:
    """Replace unknown errors by NaN."""
    stated = {kind: error for kind, error in errors.items() if error is not None}
    return dict.fromkeys(errors, math.nan) | stated


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of one device for cost models; `conf/hardware/*.yaml` gives each figure's source.

    Where a figure may be None it is unknown, unless another meaning is stated, and what needs it
    can't be simulated. Defaults of kernel behaviour are those of the paper's kernels.

    Attributes:
        name: The device's.
        flops_per_second: Peak of dense products, on elements of `dtype_bytes`.
        bytes_per_second: Peak of its memory.
        memory_bytes: Size of its memory.
        num_sms: Multiprocessors, or cores.
        matmul_efficiency: Share of the peak that matrix products reach.
        attention_efficiency: Share of the peak that attention to tokens before a chunk reaches.
        causal_efficiency: The same of attention within a chunk.
        memory_efficiency: Share of the bandwidth that streaming reaches.
        kv_efficiency: Share of the bandwidth that decodes reach as they read the KV cache.
        kernel_launch: Seconds of any kernel beside its work.
        attention_launch: Seconds of a call of attention beside its work.
        iteration_overhead: Seconds of an iteration beside its kernels, unless `Host` states them.
        uncertainty: Mean absolute relative error by kind of operation (`UNCERTAIN`, maybe
            `EXPERTS`) on held-out shapes; None: none were held out.
        tables: Folder of measured times (`executor.tables`); None: there is none.
        dtype_bytes: Bytes of an element, of which the peak of products is.
        maker: One of `MAKERS`.
        layer_host_time: Seconds of launching a layer, overlapped with the device.
        link_bytes_per_second: Bytes/s to another device of its node, in one direction.
        network_bytes_per_second: Bytes/s to another node, in one direction.
        fp8_flops_per_second: Peak of dense products in 8 bits.
        fp8_efficiency: Share of it that products reach, also of the next peak, as none was
            measured.
        fp4_flops_per_second: Peak of dense products in 4 bits.
        int8_flops_per_second: Peak of dense products of integers in 8 bits, which reach
            `fp8_efficiency`, or `matmul_efficiency` where the card has no other 8 bits. None:
            integers are only stored, and computed in 16 bits.
        link_efficiency: Share of their rates that links reach, within and between nodes.
        link_latency: Seconds of a transfer beside its bytes.
        link_step: Seconds that an all-reduce takes longer for each device beyond two.
        link_sharing: What each device beyond two adds to the divisor of its rate, 1.
        two_shot_latency: Seconds that an all-reduce takes longer if it sums in parts; 0: it always
            does.
        partial_waves: Whether products spread the tiles of a last wave over all SMs.
        query_ramp: Start and end of a tile of queries, in keys.
        prompt_efficiency: Share of the bandwidth in a prompt's call, of queries, outputs, keys and
            values; None: `kv_efficiency`, of keys and values alone.
        chunk_splits: Most parts that the keys of a chunk's query tile are split into, to occupy
            idle SMs.
        decode_splits: The same of decodes.
        ungrouped_splits: The same of decodes without grouped heads; None: as of other decodes.
        decode_launch: Seconds of a call of decodes; None: `attention_launch`.
        decode_block_time: Least seconds of one SM for each sequence and KV head.
        ungrouped_launch: `decode_launch` of decodes without grouped heads; None: as of others.
        ungrouped_block_time: `decode_block_time` of these; None: as of others.
        decode_fill: Seconds until decodes read at their full rate.
        regroup_time: Seconds of ordering grouped queries in a call of decodes.
        expert_efficiency: Share of `matmul_efficiency` that a mixture's experts reach.
        expert_launch: Seconds of a mixture's layer beside its work and its kernels' launches.
        expert_traffic: Factor on the time of moving the activations of experts between and after
            their products, where moving each once has 1.
        block_queries: Queries of a tile whose keys are not split, so that a call lasts as long as
            its longest tile; None: tiles of `kernel_times.QUERY_TILE`, which fill the SMs evenly.
        hybrid_call: Whether prefills and decodes attend in one call, as in vLLM, where each head of
            a decode takes a query tile; None: only if operation tables have such calls.
        l2_bytes: Bytes of the L2 cache, which in such a call hold keys between the heads that share
            them; None: they always do.
        tiles_per_sm: Query tiles that fit the shared memory of an SM at once, in such a call.
        kernel: The attention kernel, if it is not that of the `tables`.
        kernels: Attention kernels that `Host.attention_kernel` selects: figures in place of those
            above.
        latent: Of latent attention, figures in place of those above.
        linear: Of linear attention, by the gated delta rule: `launch`, `step`, `conv_efficiency`
            and `decode_launch` (`mixed_layers`).
        is_datasheet: Whether none of its kernels was measured (`datasheet`).
    """

    name: str = text(fix=FIX)
    flops_per_second: float = _peak()
    bytes_per_second: float = _peak()
    memory_bytes: float = _peak()
    num_sms: int = _count()
    matmul_efficiency: float = _efficiency()
    attention_efficiency: float = _efficiency()
    causal_efficiency: float = _efficiency()
    memory_efficiency: float = _efficiency()
    kv_efficiency: float = _efficiency()
    kernel_launch: float = _seconds()
    attention_launch: float = _seconds()
    iteration_overhead: float = _seconds()
    uncertainty: Mapping[str, float | None] = field(compare=False)
    tables: str | None = text(None, fix=FIX)
    dtype_bytes: int = 2
    maker: str | None = one_of(None, name="hardware.maker", valid=MAKERS)
    layer_host_time: float = _seconds(0.0)
    link_bytes_per_second: float | None = _link()
    network_bytes_per_second: float | None = _link()
    fp8_flops_per_second: float | None = _peak(None)
    fp8_efficiency: float = _efficiency(1.0)
    fp4_flops_per_second: float | None = _peak(None)
    int8_flops_per_second: float | None = _peak(None)
    link_efficiency: float = _efficiency(1.0)
    link_latency: float = _seconds(0.0)
    link_step: float = _seconds(0.0)
    link_sharing: float = _slowdown()
    two_shot_latency: float = _seconds(0.0)
    partial_waves: bool = flag(False, fix=FIX)
    query_ramp: float = _slowdown()
    prompt_efficiency: float | None = _efficiency(None)
    chunk_splits: int = _count(16)
    decode_splits: int = _count(16)
    ungrouped_splits: int | None = _count(None)
    decode_launch: float | None = _seconds(None)
    decode_block_time: float = _seconds(0.0)
    ungrouped_launch: float | None = _seconds(None)
    ungrouped_block_time: float | None = _seconds(None)
    decode_fill: float = _seconds(0.0)
    regroup_time: float = _seconds(0.0)
    expert_efficiency: float = _efficiency(1.0)
    expert_launch: float = _seconds(0.0)
    expert_traffic: float = _slowdown()
    block_queries: int | None = _count(None)
    hybrid_call: bool | None = flag(None, fix=FIX)
    l2_bytes: float | None = number(None, above=0, fix=FIX)
    tiles_per_sm: int = _count(1)
    kernel: str | None = text(None, fix=FIX)
    kernels: Mapping[str, Figures] = field(default_factory=dict, compare=False)
    latent: Figures = field(default_factory=dict, compare=False)
    linear: Mapping[str, float] = field(default_factory=dict, compare=False)
    is_datasheet: bool = flag(False, fix=FIX)

    def __post_init__(self) -> None:
        check_fields(self, "hardware.")
        sizes = sorted(set(DTYPE_BYTES.values()))
        if self.dtype_bytes not in sizes:
            raise UserError(
                f"hardware.dtype_bytes={self.dtype_bytes} is not an element size; use one of "
                f"{', '.join(map(str, sizes))}"
            )
        errors = self.uncertainty
        if not isinstance(errors, Mapping) or set(errors) - {EXPERTS} != set(UNCERTAIN):
            kinds = " and ".join(UNCERTAIN)
            raise UserError(f"hardware.uncertainty={errors} does not map {kinds}; {FIX}")
        for kind, error in errors.items():
            if error is not None:
                share = "use a share from 0, null if nothing was held out"
                require_number(f"hardware.uncertainty.{kind}", error, minimum=0, fix=share)

    @classmethod
    def at_peaks(
        cls,
        name: str,
        peaks: Peaks,
        dtype_bytes: int,
        *,
        num_sms: int,
        memory_bytes: float = 1,
        tables: str | None = None,
    ) -> Self:
        """Make a device whose kernels reach its peaks without a fixed cost.

        Args:
            name: As in `conf/hardware/`.
            peaks: Of the device.
            dtype_bytes: Bytes of an element.
            num_sms: Multiprocessors, or cores.
            memory_bytes: Of its memory, which nothing fits in by default.
            tables: The folder of its measured times.
        """
        return cls(
            name=name,
            flops_per_second=peaks.flops_per_second,
            bytes_per_second=peaks.bytes_per_second,
            memory_bytes=memory_bytes,
            num_sms=num_sms,
            matmul_efficiency=1.0,
            attention_efficiency=1.0,
            causal_efficiency=1.0,
            memory_efficiency=1.0,
            kv_efficiency=1.0,
            kernel_launch=0.0,
            attention_launch=0.0,
            iteration_overhead=0.0,
            uncertainty=dict.fromkeys(UNCERTAIN),
            tables=tables,
            dtype_bytes=dtype_bytes,
        )

    def with_kernel(self, name: str | None) -> Hardware:
        """Return the device with the figures of an attention kernel; None: its file's. Raises
        UserError for an unknown one.
        """
        if name is None:
            return self
        if name not in self.kernels:
            kernels = ", ".join([*self.kernels, "null"])
            raise UserError(
                f"host.attention_kernel={name} has no figures in hardware {self.name}; use one of "
                f"{kernels} (the file's), or add it to the hardware file"
            )
        figures = self.kernels[name]
        if not figures:
            return self
        return replace(self, kernel=name, **figures)

    def setting_of(self, figure: str) -> str:
        """Return the setting that states a figure."""
        if self.is_datasheet:
            figure = OF_DATASHEET[figure]
        return f"hardware.{figure}"

    @property
    def held_out_errors(self) -> Mapping[str, float]:
        """`uncertainty`, with NaN for unknown."""
        return none_as_nan(self.uncertainty)

    @property
    def memory_rate(self) -> float:
        return self.bytes_per_second * self.memory_efficiency

    @property
    def kv_rate(self) -> float:
        """Bytes/s of reading the KV cache with all multiprocessors at work."""
        return self.bytes_per_second * self.kv_efficiency

    @property
    def link_rate(self) -> float:
        """Bytes/s within a node. Raises UserError if unknown."""
        rate = self.required("link_bytes_per_second", "executor.tensor_parallel above 1")
        return self.link_efficiency * rate

    @property
    def network_rate(self) -> float:
        """Bytes/s to another node. Raises UserError if unknown."""
        rate = self.required("network_bytes_per_second", "executor.pipeline_parallel above 1")
        return self.link_efficiency * rate

    def for_products(self, stored: Quantisation | None) -> Hardware | None:
        """Return the device with the peak of products in 8 or 4 bits, if weights that are `stored`
        so run at it here; None where they are only read in fewer bytes.
        """
        if stored is None:
            return None
        peak = stored.rate_of_products(
            fp8=self.fp8_flops_per_second,
            fp4=self.fp4_flops_per_second,
            int8=self.int8_flops_per_second,
        )
        if peak is None:
            return None
        efficiency = self.fp8_efficiency
        if stored.product_type == "int8" and self.fp8_flops_per_second is None:
            efficiency = self.matmul_efficiency
        return replace(self, flops_per_second=peak, matmul_efficiency=efficiency)

    def required(self, figure: str, setting: str) -> float:
        """Return the rate of a link that `setting` needs. Raises UserError if unknown."""
        rates = {
            "link_bytes_per_second": self.link_bytes_per_second,
            "network_bytes_per_second": self.network_bytes_per_second,
        }
        rate = rates[figure]
        if rate is None:
            raise UserError(
                f"hardware {self.name} has no {figure}, which {setting} needs; state "
                f"{self.setting_of(figure)}"
            )
        return rate


@dataclass(frozen=True)
class Host:
    """Time of a serving system outside its device: scheduling, launching, sampling, streaming.

    `conf/host/*.yaml` has the sources.

    Attributes:
        name: The option in `conf/host/`.
        iteration: Seconds of an iteration; None: the hardware's `iteration_overhead`.
        sequence: Seconds more for each sequence of the batch.
        request: Seconds of the front end for each request, one after the other, before the engine
            has it: a server of short requests serves no more than 1 / `request` a second.
        overlaps: It works while the device runs the iteration before (vLLM's asynchronous
            scheduling).
        visible: Seconds between two iterations that a host which overlaps leaves the device
            waiting all the same.
        visible_sequence: Seconds more for each sequence of the batch.
        attention_kernel: One of `Hardware.kernels`; None: the hardware file's.
        graphs: They launch a layer's kernels; None: launches take no time.
        fused: Kernels (`FUSING`) that include the conversion to 8 bits which follows; an all-reduce
            includes its norm as well.
        makers: Whose cards the system runs on, of `MAKERS`; None: not stated.
    """

    name: str
    iteration: float | None = number(None, minimum=0, fix="use seconds from 0")
    sequence: float = number(0.0, minimum=0, fix="use seconds from 0")
    request: float = number(0.0, minimum=0, fix="use seconds from 0, such as 8e-3")
    overlaps: bool = flag(False)
    visible: float = number(0.0, minimum=0, fix="use seconds from 0")
    visible_sequence: float = number(0.0, minimum=0, fix="use seconds from 0")
    attention_kernel: str | None = text(None, fix="use a kernel's name, or null")
    graphs: CudaGraphs | None = None
    fused: Sequence[str] | None = listed(
        None,
        each=partial(require_one_of, valid=FUSING),
        complaint=f"is no list of kernels; use some of [{','.join(FUSING)}], or null for none",
    )
    makers: Sequence[str] | None = listed(
        None,
        each=partial(require_one_of, valid=MAKERS),
        complaint=f"is no list of makers; use some of [{','.join(MAKERS)}], or null for any",
    )

    def __post_init__(self) -> None:
        check_fields(self, "host.")
        if not (self.graphs is None or isinstance(self.graphs, CudaGraphs)):
            raise UserError(
                f"host.graphs={self.graphs} is not a CudaGraphs; use null, or its fields"
            )
        if not self.overlaps:
            # The device waits for all of such a host, so that none of it is left to be visible.
            reason = ", as host.overlaps=false hides nothing of the host; use 0"
            refuse_unread(self, ["visible", "visible_sequence"], reason, "host.")

    @property
    def is_stated(self) -> bool:
        """Whether it replaces the hardware's `iteration_overhead`."""
        return self.iteration is not None

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of scheduling and launching `batch`."""
        return (self.iteration or 0.0) + self.sequence * len(batch)

    def exposed(self, batch: Batch, device: float) -> float:
        """Compute the seconds added to an iteration of `device` seconds in steady state."""
        host = self.seconds(batch)
        if not self.overlaps:
            return host
        return max(self.between(batch), host - device)

    def between(self, batch: Batch) -> float:
        """Compute the seconds between `batch` and the one before that nothing hides."""
        return self.visible + self.visible_sequence * len(batch)


NO_HOST = Host("none")


def hardware_of_tables(name: str, tables: str | None = None) -> Hardware:
    """Read the hardware file that task=calibrate left beside its `tables`, for hardware=auto; that
    of a run comes from task=validate. Raises UserError without one.
    """
    if tables is None:
        raise _no_files("")
    for path in sorted(Path(tables).glob("*.yaml")):
        settings = OmegaConf.load(path)
        assert isinstance(settings, DictConfig), "task=calibrate has written mappings"
        target = settings.get("_target_", "")
        if target.endswith(f".{Hardware.__name__}"):
            return build(OmegaConf.merge(settings, {"tables": tables}), Hardware)
    raise _no_files(f" (hardware.tables={tables} has no hardware file)")


def host_of_run(name: str, graphs: Mapping[str, object]) -> Host:
    """Stand for the host that task=validate reads from a run, with the CUDA graphs that the user
    states. Raises UserError without a run.
    """
    raise _no_files("")


def _no_files(looked_in: str) -> UserError:
    return UserError(
        "hardware=auto and host=auto stand for what task=calibrate leaves beside its tables"
        f"{looked_in}, or task=validate reads from a run; name one, such as hardware=h100 or "
        "host=none"
    )


@dataclass(frozen=True)
class Parallel(Degrees):
    """One copy of a model on several devices; SARATHI's GPT-3 runs on 8 x 8 (section 5.3)."""

    def layers_per_stage(self, spec: ModelSpec) -> int:
        return spec.num_layers // self.pipeline

    def kv_heads(self, spec: ModelSpec) -> int:
        """Return the KV heads on one device."""
        return kv_heads_of_device(spec.num_kv_heads, self.tensor)

    def with_heads_of_device(self, spec: ModelSpec) -> ModelSpec:
        """Return `spec` with the KV heads of one device in layers of each kind, for the bytes of
        its cache: its share, or one that several devices hold. Latents are whole on each device.
        """
        layers = spec.layers
        if layers.latent or self.tensor == 1:
            return spec
        window = layers.window
        if window is not None and window.heads is not None:
            num_kv_heads = kv_heads_of_device(window.heads.num_kv_heads, self.tensor)
            heads = replace(window.heads, num_kv_heads=num_kv_heads)
            layers = replace(layers, window=replace(window, heads=heads))
        return replace(spec, num_kv_heads=self.kv_heads(spec), layers=layers)

    def cache_bytes_per_token(
        self,
        spec: ModelSpec,
        dtype_bytes: int,
        window_pool: float | None = None,
    ) -> float:
        """Return `ModelSpec.cache_bytes_per_token` on one device, if it had all layers."""
        on_device = self.with_heads_of_device(spec)
        return on_device.cache_bytes_per_token(dtype_bytes, window_pool)

    def copied_columns(self, spec: ModelSpec, name: str) -> int:
        """Return the columns of the product `name` that all devices have beyond the model's: keys
        and values of heads that several hold.
        """
        if self.tensor == 1 or spec.layers.latent:
            return 0
        if name == "qkv_proj":
            heads = spec.heads
        elif name == "window_qkv_proj":
            heads = spec.window_heads
        else:
            return 0
        num_kv_heads = kv_heads_of_device(heads.num_kv_heads, self.tensor)
        on_device = replace(heads, num_kv_heads=num_kv_heads)
        return self.tensor * on_device.projected_size - heads.projected_size

    def device_weight_bytes(self, spec: ModelSpec, dtype_bytes: int) -> float:
        """Return the bytes of weights on a device of the largest stage: an equal share of the
        layers, with products that every device has and copied KV heads, and of the embedding with
        other tables, or the output head, which only the first and the last of several stages have.
        """
        layers = spec.layer_weight_bytes(dtype_bytes)
        tables = spec.weight_bytes(dtype_bytes) - layers
        if self.pipeline > 1:
            # The first stage, which has no less than the last.
            tables = spec.lm_head.num_params * dtype_bytes
        copied = 0.0
        for linear in spec.layer_linears:
            columns = self.copied_columns(spec, linear.name)
            num_params = linear.in_features * columns * linear.count
            if linear.name in REPLICATED:
                num_params = (self.tensor - 1) * linear.num_params
            copied += num_params * spec.product_bytes(linear.name, dtype_bytes)
        return ((layers + copied) / self.pipeline + tables) / self.tensor

    def complaint(self, spec: ModelSpec) -> UserError | None:
        """Return the error of a model without equal stages or equal shares of heads; None: it
        splits.
        """
        of_model = f"of model {spec.name}"
        if spec.num_layers % self.pipeline:
            return uneven("pipeline", self.pipeline, spec.num_layers, f"layers {of_model}")
        if spec.num_heads % self.tensor:
            heads_of_model = f"heads {of_model}"
            kv_heads = [spec.heads.num_kv_heads, spec.window_heads.num_kv_heads]
            return uneven(
                "tensor",
                self.tensor,
                spec.num_heads,
                heads_of_model,
                kv_heads,
            )
        for heads in (spec.heads, spec.window_heads):
            complaint = refuse_kv_heads(self.tensor, heads.num_heads, heads.num_kv_heads, of_model)
            if complaint is not None:
                return complaint
        return None

    def check(self, spec: ModelSpec) -> None:
        """Raise UserError unless `spec` splits into equal stages and equal shares of heads."""
        complaint = self.complaint(spec)
        if complaint is not None:
            raise complaint


ONE_DEVICE = Parallel()

"""A GPU in a few figures: datasheet peaks, and the share of them that real kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sarathi_lab.config.checked import check_fields, checked, flag, number, whole
from sarathi_lab.config.errors import UserError, require_number
from sarathi_lab.model.parts import Degrees, uneven
from sarathi_lab.model.power import PowerModel
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec

FIX = "correct the hardware file"
WEIGHTS = "executor.weights"  # the setting that asks for products in 8 bits
# The kinds of operation that `Hardware.uncertainty` speaks of, and one that it may add.
UNCERTAIN, EXPERTS = ("matmul", "attention"), "experts"


def _require_efficiency(name: str, value: Any) -> None:
    if require_number(name, value, above=0, fix=FIX) > 1:
        raise UserError(f"{name}={value} exceeds 1, the peak; {FIX}")


_peak = partial(number, above=0, fix=FIX)
_efficiency = partial(checked, _require_efficiency)
_link = partial(number, None, above=0, fix="use bytes/s, null if unknown")
_seconds = partial(number, minimum=0, fix="use seconds from 0")
_slowdown = partial(number, 0.0, minimum=0, fix="use 0 or more")
_count = partial(whole, minimum=1, fix=FIX)


def known_or_nan(stated: Mapping[str, float | None]) -> dict[str, float]:
    """Errors as they are stated, NaN for those that are not."""
    return {kind: math.nan if error is None else error for kind, error in stated.items()}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device as cost models see it; `conf/hardware/*.yaml` gives each figure's source.

    Peaks are dense FLOP/s on elements of `dtype_bytes` bytes, bytes/s of memory and bytes of
    memory; `num_sms` multiprocessors, or cores, share them. The efficiencies are the shares of a
    peak, in (0, 1], that real kernels reach at best: of compute in matrix products (`matmul`),
    attention to the tokens before a chunk (`attention`) and within it (`causal`); of bandwidth in
    streaming (`memory`) and reading the KV cache (`kv`). Costs whatever the shape, in seconds: of a
    kernel, an attention call (`attention_launch`, of decodes alone `decode_launch` unless None), an
    iteration; `layer_host_time` is what the host takes to launch a layer while the device works off
    those before.

    What sets generations of kernels apart, by default that of the paper's: `partial_waves`, whether
    products spread the tiles of a last wave over all multiprocessors; `query_ramp`, the keys that a
    tile of queries could attend to in the time of its start and end; `prompt_efficiency`, the share
    of bandwidth at which a prompt's call moves queries, keys, values and outputs (None: keys and
    values alone, as from the cache); `chunk_splits` and `decode_splits`, the parts into which the
    keys of one tile may be cut to occupy idle multiprocessors, `ungrouped_splits` the same of
    decodes with a KV head for each head (None: no other number); `decode_block_time`, the seconds
    of one multiprocessor for a sequence and KV head of decodes, however short; `decode_fill`, those
    until decodes read at their full rate; `regroup_time`, the
    seconds in which a call of decodes puts the queries of several grouped heads in order.
    `hybrid_call` is whether prefills and decodes of a batch attend in one call, as in vLLM, where a
    decode takes a tile of queries of each head (None: only where operation tables have such calls).

    `uncertainty` is the mean absolute relative error by kind of operation, on shapes of this device
    that the fit did not see (None: there were none). `tables` is a folder of measured operation
    times (`executor.tables`), as a path from the current folder or the repository or an absolute
    one.

    Several devices need bytes/s that each sends over its links to the others of its node (`link`)
    and to another node (`network`), while it receives as many; `link_efficiency` is the share of
    both in use, `link_latency` the seconds of a transfer. In an all-reduce each device beyond two
    adds `link_step` seconds and divides the rate by 1 + `link_sharing` times their number;
    `two_shot_latency` is what summing by parts takes longer than sending all to all, 0: always by
    parts. `host_bytes_per_second` is what each device reaches to or from host memory.
    `fp8_flops_per_second` is the peak of products in 8 bits and `fp8_efficiency` the share of it
    that these reach at best. None: not known, so what needs it can't be simulated. Without `power`
    runs have no energy.
    """

    name: str
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
    # Costs are cached by hardware, and don't depend on the next two.
    uncertainty: Mapping[str, float | None] = field(compare=False)
    tables: str | None = field(default=None, compare=False)
    dtype_bytes: int = 2
    layer_host_time: float = _seconds(0.0)
    link_bytes_per_second: float | None = _link()
    network_bytes_per_second: float | None = _link()
    host_bytes_per_second: float | None = _link()
    fp8_flops_per_second: float | None = _peak(None)
    fp8_efficiency: float = _efficiency(1.0)
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
    decode_launch: float | None = _seconds(None)
    ungrouped_splits: int | None = _count(None)
    decode_block_time: float = _seconds(0.0)
    decode_fill: float = _seconds(0.0)
    regroup_time: float = _seconds(0.0)
    expert_efficiency: float = _efficiency(1.0)
    expert_launch: float = _seconds(0.0)
    expert_traffic: float = _slowdown()
    hybrid_call: bool | None = flag(None, fix=FIX)
    power: PowerModel | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"hardware.name={self.name} is no name; {FIX}")
        check_fields(self, "hardware.")
        if self.dtype_bytes not in (sizes := sorted(set(DTYPE_BYTES.values()))):
            raise UserError(
                f"hardware.dtype_bytes={self.dtype_bytes} is no size of an element; use one of "
                f"{', '.join(map(str, sizes))}"
            )
        errors = self.uncertainty
        if not isinstance(errors, Mapping) or set(errors) - {EXPERTS} != set(UNCERTAIN):
            kinds = " and ".join(UNCERTAIN)
            raise UserError(f"hardware.uncertainty={errors} does not map {kinds}; {FIX}")
        for kind in [kind for kind, error in errors.items() if error is not None]:
            share = "use a share from 0, null if nothing was held out"
            require_number(f"hardware.uncertainty.{kind}", errors[kind], minimum=0, fix=share)
        if self.tables is not None and not (self.tables and isinstance(self.tables, str)):
            raise UserError(f"hardware.tables={self.tables} is no path of a folder; {FIX}")
        if self.power is not None and not isinstance(self.power, PowerModel):
            raise UserError(f"hardware.power={self.power} is no power model; {FIX}")

    @property
    def held_out_errors(self) -> Mapping[str, float]:
        """`uncertainty`, NaN where there is none."""
        return known_or_nan(self.uncertainty)

    @property
    def memory_rate(self) -> float:
        return self.bytes_per_second * self.memory_efficiency

    @property
    def kv_rate(self) -> float:
        """Bytes/s at which attention reads the KV cache with all multiprocessors at work."""
        return self.bytes_per_second * self.kv_efficiency

    @property
    def launch_of_decodes(self) -> float:
        """Seconds of a call of decodes, whatever they read."""
        return self.attention_launch if self.decode_launch is None else self.decode_launch

    def splits_of_decodes(self, grouped: bool) -> int:
        """Parts into which a sequence's keys may be cut, by whether heads share KV heads."""
        if grouped or self.ungrouped_splits is None:
            return self.decode_splits
        return self.ungrouped_splits

    @property
    def link_rate(self) -> float:
        """Bytes/s to the others of its node. Raises UserError if not known."""
        return self._rate("link_bytes_per_second", "executor.tensor_parallel")

    @property
    def network_rate(self) -> float:
        """Bytes/s to another node. Raises UserError if not known."""
        return self._rate("network_bytes_per_second", "executor.pipeline_parallel")

    @property
    def host_rate(self) -> float:
        """Bytes/s to or from host memory, one way at a time. Raises UserError if not known."""
        if self.host_bytes_per_second is None:
            raise UserError(
                f"hardware {self.name} does not say how fast its host is connected, which "
                "preemption=swap needs; add host_bytes_per_second to its file, or use "
                "preemption=recompute"
            )
        return float(self.host_bytes_per_second)

    @property
    def fp8_peak(self) -> float:
        """FLOP/s of products of 8-bit weights and activations. Raises UserError if not known."""
        if self.fp8_flops_per_second is None:
            raise UserError(
                f"hardware {self.name} has no peak of products in 8 bits, which {WEIGHTS}=fp8 "
                f"needs; add fp8_flops_per_second to its file, or set {WEIGHTS}=auto"
            )
        return self.fp8_flops_per_second

    def _rate(self, name: str, setting: str) -> float:
        if (rate := getattr(self, name)) is None:
            raise UserError(
                f"hardware {self.name} does not say how fast its devices are connected, which "
                f"{setting} above 1 needs; add {name} to its file, or set {setting}=1"
            )
        return self.link_efficiency * rate


@dataclass(frozen=True)
class Parallel(Degrees):
    """One copy of a model over several devices; SARATHI's GPT-3 runs on 8 x 8 (section 5.3)."""

    def layers_per_stage(self, spec: ModelSpec) -> int:
        """Layers of one stage; `check` tells whether the stages are equal."""
        return spec.num_layers // self.pipeline

    def divides(self, spec: ModelSpec) -> bool:
        """Whether `spec` comes apart into equal stages and equal shares of heads."""
        return not any(size % degree for _, degree, _, size in self._parts(spec))

    def check(self, spec: ModelSpec) -> None:
        for kind, degree, what, size in self._parts(spec):
            if size % degree:
                raise uneven(kind, degree, size, f"{what} of model {spec.name}", most=size)

    def _parts(self, spec: ModelSpec) -> tuple[tuple[str, int, str, int], ...]:
        """Kind, degree, and the name and number of what it has to divide."""
        return (
            ("pipeline", self.pipeline, "layers", spec.num_layers),
            ("tensor", self.tensor, "heads", spec.num_heads),
            ("tensor", self.tensor, "KV heads", spec.num_kv_heads),
        )


ONE_DEVICE = Parallel()
MAX_TENSOR = 8  # devices of a node; a suggestion goes no further within a layer


def check_memory(
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    kv_tokens: int,
    parallel: Parallel = ONE_DEVICE,
) -> None:
    """Raise UserError if weights and a KV cache of `kv_tokens` tokens, spread evenly, exceed the
    devices' memory; it names the least number of devices that would do.
    """
    weights = spec.weight_bytes(dtype_bytes)
    cache = kv_tokens * spec.kv_bytes_per_token(dtype_bytes)
    num_devices = parallel.num_devices
    if weights + cache <= num_devices * hardware.memory_bytes:
        return
    devices, has = (num_devices, "have") if num_devices > 1 else ("one", "has")
    advice = _advice(spec, hardware, weights, cache / parallel.pipeline)
    raise UserError(
        f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for "
        f"KV, {devices} {hardware.name} {has} {num_devices * hardware.memory_bytes / 1e9:.0f} GB"
        f"{advice}; lower batch, shorten the requests or max_model_len, or take a smaller model or "
        "another hardware"
    )


def kv_capacity(
    spec: ModelSpec, hardware: Hardware, dtype_bytes: int, parallel: Parallel = ONE_DEVICE
) -> int:
    """Tokens of KV cache that fit beside the weights. Raises UserError if these alone do not."""
    check_memory(spec, hardware, dtype_bytes, 0, parallel)
    free = parallel.num_devices * hardware.memory_bytes - spec.weight_bytes(dtype_bytes)
    return int(free // spec.kv_bytes_per_token(dtype_bytes))


def _advice(spec: ModelSpec, hardware: Hardware, weights: float, cache_per_stage: float) -> str:
    """The fewest devices that hold the model; a stage brings a micro-batch, so its own cache."""
    max_tensor = MAX_TENSOR if hardware.link_bytes_per_second else 1
    max_pipeline = spec.num_layers if hardware.network_bytes_per_second else 1
    fitting = [
        parallel
        for tensor in range(1, max_tensor + 1)
        for pipeline in range(1, max_pipeline + 1)
        if (parallel := Parallel(tensor, pipeline)).divides(spec)
        and weights + pipeline * cache_per_stage <= parallel.num_devices * hardware.memory_bytes
    ]
    if not fitting:
        return ""
    best = min(fitting, key=lambda parallel: (parallel.num_devices, parallel.pipeline))
    return (
        f" ({best.num_devices} would do: executor.tensor_parallel={best.tensor} "
        f"executor.pipeline_parallel={best.pipeline})"
    )

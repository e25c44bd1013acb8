"""A GPU in a few figures: datasheet peaks, and the share of them that real kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.model.power import PowerModel
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec

PEAKS = ("flops_per_second", "bytes_per_second", "memory_bytes", "fp8_flops_per_second")
EFFICIENCIES = (
    *("matmul_efficiency", "attention_efficiency", "causal_efficiency"),
    *("memory_efficiency", "kv_efficiency", "link_efficiency", "prompt_efficiency"),
    *("fp8_efficiency", "expert_efficiency"),
)
FIXED_COSTS = (
    *("kernel_launch", "attention_launch", "decode_launch"),
    *("decode_block_time", "decode_fill", "regroup_time"),
    *("iteration_overhead", "layer_host_time"),
    *("link_latency", "link_step", "two_shot_latency", "expert_launch"),
)
COUNTS = ("num_sms", "chunk_splits", "decode_splits", "ungrouped_splits")
SLOWDOWNS = ("query_ramp", "link_sharing", "expert_traffic")
LINKS = ("link_bytes_per_second", "network_bytes_per_second", "host_bytes_per_second")
OPTIONAL = (  # may be None
    *("prompt_efficiency", "decode_launch", "ungrouped_splits", "fp8_flops_per_second"),
    *("hybrid_call", *LINKS),
)
WEIGHTS = "executor.weights"  # the setting that asks for products in 8 bits
LINK_FIX = "use bytes/s, null if unknown"
# The kinds of operation that `Hardware.uncertainty` speaks of, and one that it may add.
UNCERTAIN, EXPERTS = ("matmul", "attention"), "experts"


def known_or_nan(stated: Mapping[str, float | None]) -> dict[str, float]:
    """Errors as they are stated, NaN for those that are not."""
    return {kind: math.nan if error is None else error for kind, error in stated.items()}


@dataclass(frozen=True)
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
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    num_sms: int
    matmul_efficiency: float
    attention_efficiency: float
    causal_efficiency: float
    memory_efficiency: float
    kv_efficiency: float
    kernel_launch: float
    attention_launch: float
    iteration_overhead: float
    # Costs are cached by hardware, and don't depend on the next two.
    uncertainty: Mapping[str, float | None] = field(compare=False)
    tables: str | None = field(default=None, compare=False)
    dtype_bytes: int = 2
    layer_host_time: float = 0.0
    link_bytes_per_second: float | None = None
    network_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    fp8_flops_per_second: float | None = None
    fp8_efficiency: float = 1.0
    link_efficiency: float = 1.0
    link_latency: float = 0.0
    link_step: float = 0.0
    link_sharing: float = 0.0
    two_shot_latency: float = 0.0
    partial_waves: bool = False
    query_ramp: float = 0.0
    prompt_efficiency: float | None = None
    chunk_splits: int = 16
    decode_splits: int = 16
    decode_launch: float | None = None
    ungrouped_splits: int | None = None
    decode_block_time: float = 0.0
    decode_fill: float = 0.0
    regroup_time: float = 0.0
    expert_efficiency: float = 1.0
    expert_launch: float = 0.0
    expert_traffic: float = 0.0
    hybrid_call: bool | None = None
    power: PowerModel | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        fix = "correct the hardware file"
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"hardware.name={self.name} is no name; {fix}")
        for name in self._given(COUNTS):
            require_int(f"hardware.{name}", getattr(self, name), 1, fix)
        for name in ("partial_waves", "hybrid_call"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name not in OPTIONAL or value is not None):
                raise UserError(f"hardware.{name}={value} is not true or false; {fix}")
        for name in self._given((*PEAKS, *EFFICIENCIES, *LINKS)):
            peak_fix = LINK_FIX if name in LINKS else fix
            require_number(f"hardware.{name}", getattr(self, name), above=0, fix=peak_fix)
        for name in self._given(EFFICIENCIES):
            if getattr(self, name) > 1:
                raise UserError(f"hardware.{name}={getattr(self, name)} exceeds 1, the peak; {fix}")
        for name in self._given((*FIXED_COSTS, *SLOWDOWNS)):
            cost_fix = "use seconds from 0" if name in FIXED_COSTS else "use 0 or more"
            require_number(f"hardware.{name}", getattr(self, name), minimum=0, fix=cost_fix)
        if self.dtype_bytes not in (sizes := sorted(set(DTYPE_BYTES.values()))):
            raise UserError(
                f"hardware.dtype_bytes={self.dtype_bytes} is no size of an element; use one of "
                f"{', '.join(map(str, sizes))}"
            )
        errors = self.uncertainty
        if not isinstance(errors, Mapping) or set(errors) - {EXPERTS} != set(UNCERTAIN):
            kinds = " and ".join(UNCERTAIN)
            raise UserError(f"hardware.uncertainty={errors} does not map {kinds}; {fix}")
        for kind in [kind for kind, error in errors.items() if error is not None]:
            share = "use a share from 0, null if nothing was held out"
            require_number(f"hardware.uncertainty.{kind}", errors[kind], minimum=0, fix=share)
        if self.tables is not None and not (self.tables and isinstance(self.tables, str)):
            raise UserError(f"hardware.tables={self.tables} is no path of a folder; {fix}")
        if self.power is not None and not isinstance(self.power, PowerModel):
            raise UserError(f"hardware.power={self.power} is no power model; {fix}")

    def _given(self, names: tuple[str, ...]) -> list[str]:
        """Those of `names` that have a value; None is checked where it is not allowed."""
        return [name for name in names if name not in OPTIONAL or getattr(self, name) is not None]

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
class Parallel:
    """Degrees of parallelism of one copy of a model; SARATHI's GPT-3 runs on 8 x 8 (section 5.3).
    Raises UserError for a degree below 1.
    """

    tensor: int = 1  # devices that share every layer, by heads and columns
    pipeline: int = 1  # stages that hold equally many layers each

    def __post_init__(self) -> None:
        share = "use the number of devices that share a layer, such as 8"
        require_int("executor.tensor_parallel", self.tensor, 1, share)
        stages = "use the number of stages, such as 8"
        require_int("executor.pipeline_parallel", self.pipeline, 1, stages)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def layers_per_stage(self, spec: ModelSpec) -> int:
        """Layers of one stage; `check` tells whether the stages are equal."""
        return spec.num_layers // self.pipeline

    @property
    def description(self) -> str:
        """The devices in words, tensor by pipeline: "8 x 8 devices"."""
        return f"{self.tensor} x {self.pipeline} devices"

    def divides(self, spec: ModelSpec) -> bool:
        """Whether `spec` comes apart into equal stages and equal shares of heads."""
        return not any(number % degree for _, degree, _, number in self._parts(spec))

    def check(self, spec: ModelSpec) -> None:
        for name, degree, what, number in self._parts(spec):
            if number % degree:
                valid = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
                raise UserError(
                    f"executor.{name}={degree} does not divide the {number} {what} of model "
                    f"{spec.name}; use one of {valid}"
                )

    def _parts(self, spec: ModelSpec) -> tuple[tuple[str, int, str, int], ...]:
        """Setting, degree, and the name and number of what it has to divide."""
        return (
            ("pipeline_parallel", self.pipeline, "layers", spec.num_layers),
            ("tensor_parallel", self.tensor, "heads", spec.num_heads),
            ("tensor_parallel", self.tensor, "KV heads", spec.num_kv_heads),
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

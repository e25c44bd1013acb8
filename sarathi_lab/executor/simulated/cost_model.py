"""Seconds of an iteration, composed of one layer's operations at one of two levels of detail."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import ClassVar, Literal, get_args

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.paths import stated_beside
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.executor.simulated.hardware import (
    EXPERTS,
    ONE_DEVICE,
    Hardware,
    Parallel,
    none_as_nan,
)
from sarathi_lab.executor.simulated.iteration_table import IterationTable
from sarathi_lab.executor.simulated.kernel_times import overlapped
from sarathi_lab.executor.simulated.measured_kernels import MeasuredExperts, MeasuredKernels
from sarathi_lab.executor.simulated.mixed_layers import MixedOperations
from sarathi_lab.executor.simulated.profiled import ProfiledOperations, tables_for
from sarathi_lab.executor.tables import OperationTables
from sarathi_lab.model.layers import ALIKE
from sarathi_lab.model.spec import ModelSpec

Level = Literal["analytic", "profiled", "measured_kernels"]
MEASURED_KERNELS = "measured_kernels"  # single iterations of measured sizes, and nothing else
OperationTimes = Callable[[Batch], dict[str, float]]  # seconds by operation
# Seconds by operation on one device, of its share where several devices share a layer.
Operations = AnalyticOperations | ProfiledOperations | MeasuredKernels

ITERATIONS = "iterations"  # the table of whole ones
WHOLE = "iteration"  # the operation of a whole one, where parts of it have no times
# Operations by kind, as the paper's figures name them; any other is overhead.
KINDS: Mapping[str, Sequence[str]] = stated_beside(__file__, "operations.yaml")["kinds"]


class CostModel:
    """Seconds of an iteration by `operations` of a layer, or by `formula`, which has the model and
    the devices that it is spread over; their links carry sends. `experts` are those of a
    mixture's layers; `graphs` pad batches and launch layers in place of the hardware's
    `layer_host_time`. Raises UserError for a model that can't be split so, or unknown links.
    """

    has_operations: ClassVar[bool] = True

    def __init__(
        self,
        formula: AnalyticOperations,
        operations: Operations | None = None,
        experts: Experts | MeasuredExperts | None = None,
        graphs: CudaGraphs | None = None,
    ) -> None:
        self.spec = formula.spec
        self.parallel = formula.parallel
        self.hardware = formula.hardware
        self.parallel.check(self.spec)
        self.operations = operations or formula
        self.experts = experts
        self._graphs = graphs if graphs is not None and graphs.mode else None
        self._layers_per_stage = self.parallel.layers_per_stage(self.spec)
        # A server's launches run layers ahead of the device, so that the slower of the two counts.
        self._overlapped = overlapped if self._graphs is None else max
        if self.parallel.pipeline > 1:
            self._token_bytes = self.spec.hidden_size * formula.dtype_bytes
            self._network_rate = self.hardware.network_rate
            self._link_rate = self.hardware.link_rate if self.parallel.tensor > 1 else math.inf
        # Cached by number of tokens: a run has few different ones.
        self._times = cache(self.operations.times)

    @property
    def cautions(self) -> Sequence[str]:
        """Sources of the times that are no formula's, a line each."""
        cautions = [self.operations.caution]
        if self.experts:
            cautions.append(self.experts.caution)
        return [caution for caution in cautions if caution]

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Mean relative error by kind on held-out shapes, NaN if there were none."""
        errors = dict(self.operations.uncertainty)
        if not self.experts:
            errors.pop(EXPERTS, None)
        return errors

    def iteration_time(self, batch: Batch) -> float:
        """Compute the seconds of one iteration: its stages in sequence, and the sends."""
        seconds = sum(self.stage_times(batch))
        if self.parallel.pipeline > 1:  # no other batch is there to compute meanwhile
            seconds += (self.parallel.pipeline - 1) * self.send_time(batch)
        return seconds

    def stage_times(self, batch: Batch) -> list[float]:
        """Compute the seconds of each pipeline stage, without sends.

        Stages have equally many layers; the last adds the output head, sampling and the iteration's
        overhead.
        """
        # All layers of a stage take equally long: a layer of a mixed model is their mean.
        layers_time = self._layers_per_stage * self.layer_time(batch)
        times = [layers_time] * self.parallel.pipeline
        times[-1] += sum(self._once_times(batch).values())
        return times

    def layer_time(self, batch: Batch) -> float:
        """Compute the seconds of one layer, with its launches by the host overlapped."""
        return sum(self._layer_times(batch).values())

    def _layer_times(self, batch: Batch) -> dict[str, float]:
        num_tokens = batch.num_tokens
        launching = self.hardware.layer_host_time
        if self._graphs is not None:
            num_tokens, launching = self._graphs.launched(batch)
        times = dict(self._times("layer", num_tokens))
        prefill, decode = self.operations.attention_times(batch)
        times["prefill_attention"] = prefill
        times["decode_attention"] = decode
        if self.experts:
            times["experts"] = self.experts.seconds(num_tokens)
        if launching:  # else a graph is replayed, or launches take no time
            # The device waits where the host takes longer to launch a layer than it to compute it.
            device = sum(times.values())
            times["overhead"] = self._overlapped(device, launching) - device
        return times

    def _once_times(self, batch: Batch) -> dict[str, float]:
        """Compute the seconds of what an iteration has once, after its layers."""
        times = {"overhead": self.operations.iteration_overhead}
        times |= self._times("iteration", batch.num_tokens)
        times |= self._times("emit", batch.num_emits)
        return times

    def send_time(self, batch: Batch) -> float:
        """Compute the seconds from a stage to the next, on another node; 0 for one stage. Each
        device sends its share of the hidden states, and gathers the others' over its node.
        """
        if self.parallel.pipeline == 1:
            return 0.0
        num_bytes = batch.num_tokens * self._token_bytes
        latency = self.hardware.link_latency
        share = 1 / self.parallel.tensor  # of the hidden states, which all devices of a stage have
        seconds = latency + share * num_bytes / self._network_rate
        if self.parallel.tensor > 1:
            seconds += latency + (1 - share) * num_bytes / self._link_rate
        return seconds

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Compute the seconds by operation over all layers and stages; they sum to
        `iteration_time`.

        Linear operations run once over the tokens of all sequences (SARATHI fuses these), attention
        separately for prefills and decodes (section 4.3.2). "all_reduce" and "send" exist
        where the batch has them.
        """
        num_stages = self.parallel.pipeline
        num_layers = num_stages * self._layers_per_stage
        times = {name: num_layers * time for name, time in self._layer_times(batch).items()}
        for name, time in self._once_times(batch).items():
            times[name] = times.get(name, 0.0) + time
        if num_stages > 1:
            times["send"] = (num_stages - 1) * self.send_time(batch)
        return times


class IterationCostModel(CostModel):
    """Seconds of whole iterations that were measured as such (`IterationTable`): operations and
    layers have no times, and a pipeline's stages take equal shares of one. Raises UserError for
    weights of another type.
    """

    has_operations: ClassVar[bool] = False

    def __init__(self, formula: AnalyticOperations, tables: OperationTables) -> None:
        weights = formula.spec.weight_dtype
        if weights != "auto":
            raise UserError(
                f"executor.weights={weights}: {tables.source} has times of whole iterations "
                "without it; use executor.weights=auto, or executor.cost_model=analytic"
            )
        super().__init__(formula)
        self._table = IterationTable(tables.frames[ITERATIONS])
        self._tables = tables

    @property
    def cautions(self) -> Sequence[str]:
        table = self._table
        cautions = [
            f"times are of whole iterations of {self._tables.source}: past {table.most_tokens:g} "
            f"prompt tokens, {table.most_decodes:g} decodes or a context of {table.longest:g} the "
            "costs fitted to them are extrapolated"
        ]
        if self.parallel.pipeline > 1:
            cautions.append(
                f"each of {self.parallel.pipeline} stages takes an equal share of an iteration, "
                "as the table has no times of layers"
            )
        return cautions

    @property
    def uncertainty(self) -> Mapping[str, float]:
        return none_as_nan(self._tables.meta.get("uncertainty") or {"iterations": None})

    def stage_times(self, batch: Batch) -> list[float]:
        num_stages = self.parallel.pipeline
        return [self._table.seconds(batch) / num_stages] * num_stages

    def operation_times(self, batch: Batch) -> dict[str, float]:
        times = {WHOLE: self._table.seconds(batch), "overhead": 0.0}
        if self.parallel.pipeline > 1:
            times["send"] = (self.parallel.pipeline - 1) * self.send_time(batch)
        return times


def make_cost_model(
    level: str,
    spec: ModelSpec,
    hardware: Hardware,
    dtype_bytes: int,
    parallel: Parallel = ONE_DEVICE,
    graphs: CudaGraphs | None = None,
    fused: Collection[str] = (),
) -> CostModel:
    """Make the cost model of a device, or of several.

    Args:
        level: Where the times come from, one of `Level`.
        spec: The model's shapes.
        hardware: One device.
        dtype_bytes: Bytes of an element of weights and activations.
        parallel: How devices share the model.
        graphs: CUDA graphs of a host; None: every layer is launched.
        fused: Kernels that a host's server fuses others into (`Host.fused`).

    Raises:
        UserError: The level is unknown, or has no table for the model, its cache or `parallel`.
    """
    require_one_of("executor.cost_model", level, get_args(Level))
    parallel.check(spec)
    kind = AnalyticOperations if spec.layers == ALIKE else MixedOperations
    formula = kind(
        spec,
        hardware,
        dtype_bytes,
        parallel,
        fused,
    )
    operations = experts = None
    if level == MEASURED_KERNELS:
        if spec.stored is not None:
            raise UserError(
                f"executor.cost_model={level} has times of weights in the model's type, and those "
                f"of model {spec.name} are in {spec.stored.name}; use executor.cost_model=analytic"
            )
        tables = tables_for(formula, level)
        measured_experts = None
        if spec.num_experts:
            measured_experts = MeasuredExperts(tables, spec)
        return CostModel(formula, MeasuredKernels(tables, formula), measured_experts)
    if level == "profiled":
        tables = tables_for(formula)
        if ITERATIONS in tables.frames:
            return IterationCostModel(formula, tables)
        operations = ProfiledOperations(tables, formula)
    if spec.num_experts:
        rows = None
        if operations:
            rows = operations.tables.frames.get("moe")
        experts = Experts(
            spec,
            hardware,
            dtype_bytes,
            rows,
            parallel.tensor,
        )
    return CostModel(formula, operations, experts, graphs)

"""What limits the times of a simulated run: errors of its cost model, and what is simplified."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.attention_calls import caution_of
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.executor.simulated.hardware import WEIGHTS, Hardware, Host
from sarathi_lab.model.quantisation import Quantisation
from sarathi_lab.model.spec import ModelSpec

ROUND_MEMORY = 1e9  # bytes; no device reports a multiple


def cautions_of(cost: CostModel, host: Host, altered: Mapping[str, object]) -> list[str]:
    """List the cost model's error on held-out shapes, effects that favour chunks, and what of the
    model is simplified.

    Args:
        cost: The cost model.
        host: Of the serving system.
        altered: Settings of the executor by which times are not as predicted.
    """
    spec = cost.spec
    cautions = [_error_of(cost)]
    for name, value in altered.items():
        cautions.append(
            f"executor.{name}={value}: times are not as predicted, to show what "
            "errors of the cost model may change; the values are no prediction"
        )
    cautions += _cautions_of_card(cost)
    cautions += cost.cautions
    if not cost.has_operations:
        cautions += _unread_kernels(host)
    attention = caution_of(cost, host)
    if attention is not None:
        cautions.append(attention)
    if spec.kv_dtype != "auto":
        cautions.append(
            f"no time is counted for the conversion of cache.dtype={spec.kv_dtype}, which was not "
            "measured: attention to long contexts is a lower bound"
        )
    simplified = _simplifications(spec, cost.hardware)
    return cautions + [f"model {spec.name}: {simplification}" for simplification in simplified]


def _error_of(cost: CostModel) -> str:
    errors = []
    for kind, error in cost.uncertainty.items():
        size = "none stated" if math.isnan(error) else f"{error:.0%}"
        errors.append(f"{kind} {size}")
    stated = ", ".join(errors)
    if cost.hardware.is_datasheet:
        return (
            f"hardware {cost.hardware.name} is by its datasheet, with kernels as on a measured "
            f"card; none was measured on it, and their mean error is assumed: {stated}"
        )
    return f"the cost model's mean error on held-out shapes: {stated}"


def _cautions_of_card(cost: CostModel) -> list[str]:
    cautions = []
    hardware = cost.hardware
    within = hardware.causal_efficiency
    before = hardware.attention_efficiency
    is_by_formula = cost.has_operations and isinstance(cost.operations, AnalyticOperations)
    if is_by_formula and within < before:
        cautions.append(
            f"hardware {hardware.name} attends within a chunk at {within:.0%} of the peak, to "
            f"tokens before it at {before:.0%}: cutting a long prompt makes its attention faster "
            f"here; compare with hardware.causal_efficiency={before:g}"
        )
    if hardware.memory_bytes % ROUND_MEMORY == 0:
        setting = hardware.setting_of("memory_bytes")
        cautions.append(
            f"{setting} of {hardware.name} is a round {hardware.memory_bytes / 1e9:g} GB; a GPU "
            "sold as such reports about 6 % more: state its total_memory in torch.cuda's properties"
        )
    return cautions


def _unread_kernels(host: Host) -> list[str]:
    """Name what is stated of a host's kernels, where iterations were measured as wholes."""
    of_kernels = {
        "attention_kernel": host.attention_kernel,
        "fused": host.fused,
        "graphs": host.graphs,
    }
    names = [f"host.{name}" for name, value in of_kernels.items() if value is not None]
    if not names:
        return []
    return [
        f"no effect of {', '.join(names)}: the table has whole iterations, with the kernels and "
        "launches that they had"
    ]


def _simplifications(spec: ModelSpec, hardware: Hardware) -> list[str]:
    """List what of a published model is simplified."""
    lines = []
    stored = spec.stored
    if stored is None and spec.usual_weights != "auto":
        lines.append(
            "its config.json states no quantization_config, so weights have "
            f"{8 * hardware.dtype_bytes} bits; they are published in {spec.usual_weights}: "
            f"{WEIGHTS}={spec.usual_weights}"
        )
    if stored is not None:
        rate = _rate_of(stored, hardware)
        lines.append(f"the {stored.description} ({stored.name}), and their products run at {rate}")
    if spec.sliding_window is not None:
        lines.append(
            f"contexts are counted whole, also what its window of {spec.sliding_window} tokens "
            "spares: longer ones take more time and cache here than on a server; model=auto "
            "model.path=CONFIG.JSON counts the time in the window"
        )
    window = spec.layers.window
    if window is not None:
        room = "the server's rule"
        if spec.num_full_layers == 0:
            room = "whole contexts, of which vLLM frees what all layers have left behind"
        lines.append(
            f"{window.num_layers} of {spec.num_layers} layers see a window of {window.size} "
            f"tokens; their cache is counted as by {room}"
        )
    if spec.uncounted:
        lines.append(f"{', '.join(spec.uncounted)} is not counted, in time or memory")
    return lines


def _rate_of(stored: Quantisation, hardware: Hardware) -> str:
    """Describe the rate at which products of `stored` weights run."""
    product_type = stored.product_type
    if hardware.for_products(stored) is not None:
        rate = "the device's rate of such products"
        if product_type == "fp4":
            rate = f"{rate}, at the efficiency of 8 bits, as none in 4-bit products was measured"
        return rate
    rate = "the rate of the model's type, with no time for their conversion"
    if product_type == "model":
        return rate
    # vLLM has kernels for such weights on these devices, too (Marlin).
    setting = hardware.setting_of(f"{product_type}_flops_per_second")
    return f"{rate}: {setting} of {hardware.name} is not stated"

"""Every figure of a device has an effect on some batch: none is stated in vain."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from itertools import product

import pytest
from simulated import batch_of

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import Hardware

# What names the device, is read beside times, or is a mapping of such figures.
OF_NO_TIME = ("name", "maker", "memory_bytes", "uncertainty", "tables", "dtype_bytes", "kernel")
OF_NO_TIME += ("kernels", "latent", "linear", "is_datasheet")
# One call of attention and two read other figures.
TWO_CALLS = replace(
    load_option("hardware", "a100"),
    fp8_flops_per_second=6e14,
    fp4_flops_per_second=1.2e15,
    hybrid_call=False,
    layer_host_time=1e-5,
    iteration_overhead=1e-4,
    chunk_splits=4,
)
ONE_CALL = replace(TWO_CALLS, hybrid_call=True)
BASES = (TWO_CALLS, ONE_CALL)
OTHERWISE = {  # values of figures that are None, False or zero
    "partial_waves": True,
    "block_queries": 64,
    "link_step": 1e-6,
    "link_sharing": 0.5,
    "hybrid_call": True,
    "expert_launch": 1e-5,
    "expert_traffic": 1.0,
}
BATCHES = (
    batch_of(chunk=1000),
    batch_of(chunk=90),
    batch_of(chunk=300, start=8000),
    batch_of(decodes=3, context=16_000),
    batch_of(decodes=64, context=900),
    # Keys of a head that are about as large as the L2 cache.
    batch_of(chunk=64, decodes=90, context=1000),
)
# Models with and without grouped heads and experts, by their weights and degrees.
CASES = (
    ("13b", "auto", 1, 1),
    ("llama3-8b", "auto", 4, 2),
    ("llama3-8b", "fp8", 1, 1),
    ("llama3-8b", "nvfp4", 1, 1),
    ("llama3-8b", "w8a8", 1, 1),
    ("mixtral-8x7b", "auto", 1, 1),
)
model = cache(load_option)


def seconds(hardware: Hardware, case: tuple[str, str, int, int]) -> list[float]:
    """The seconds of the batches on devices of these figures."""
    name, weights, tensor, pipeline = case
    backend = SimulatedBackend(
        hardware, weights=weights, tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    cost = backend.cost_of(model("model", name))
    return [cost.iteration_time(batch) for batch in BATCHES]


base_seconds = cache(seconds)


@pytest.mark.parametrize(
    "figure", [field.name for field in fields(Hardware) if field.name not in OF_NO_TIME]
)
def test_every_figure_of_a_device_has_an_effect(figure):
    stated = getattr(TWO_CALLS, figure)
    value = OTHERWISE.get(figure) or type(stated)(0.8 * stated)
    pairs = [(base, replace(base, **{figure: value})) for base in BASES]
    assert any(
        seconds(changed, case) != base_seconds(base, case)
        for (base, changed), case in product(pairs, CASES)
    )

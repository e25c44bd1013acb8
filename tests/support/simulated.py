"""What the tests of the simulator share: the configured GPUs and models, a toy of each, and
batches.
"""

from __future__ import annotations

from dataclasses import replace

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.model.spec import ModelSpec

GPUS = (
    *("a6000", "a40", "a100_2023", "a100", "h100", "h200", "b200"),
    *("l40s", "rtx-4090", "rtx-pro-6000"),
)

# One layer of four 2 x 2-ish products: small enough to work out by hand.
SPEC = ModelSpec(
    name="toy",
    num_layers=1,
    hidden_size=2,
    num_heads=1,
    num_kv_heads=1,
    head_size=2,
    ffn_size=4,
    vocab_size=10,
    gated_ffn=False,
)
# 2 layers, hidden 4, 2 heads of 2, plain FFN of 16: per layer 4*12 + 4*4 + 4*16 + 16*4 = 192 = 12
# H^2 parameters.
TWO_LAYERS = replace(
    SPEC,
    num_layers=2,
    hidden_size=4,
    num_heads=2,
    num_kv_heads=2,
    ffn_size=16,
    norm="layer",
    activation="gelu",
)
# 4 SMs of 1e9 FLOP/s in products, 1e9 bytes/s of streaming and 5e8 of reading the cache. One second
# for each launch.
TOY = Hardware(
    name="toy",
    flops_per_second=8e9,
    bytes_per_second=2e9,
    memory_bytes=1000.0,
    num_sms=4,
    matmul_efficiency=0.5,
    attention_efficiency=0.5,
    causal_efficiency=0.25,
    memory_efficiency=0.5,
    kv_efficiency=0.25,
    kernel_launch=1.0,
    attention_launch=3.0,
    iteration_overhead=0.125,
    uncertainty={"matmul": 0.1, "attention": 0.2},
)
# The same among others.
LINKED = replace(
    TOY,
    link_bytes_per_second=1e6,
    network_bytes_per_second=1e5,
    link_efficiency=0.5,
    link_latency=0.25,
)


def batch_of(*, chunk: int = 0, start: int = 0, decodes: int = 0, context: int = 1) -> Batch:
    """One chunk of an unfinished prompt, and decodes that each see `context` tokens, their own
    included.
    """
    return make_batch(prefill_tokens=chunk, start=start, num_decodes=decodes, context=context)

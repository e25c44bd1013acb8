"""What a run on a CPU takes of its memory: the weights once, the cache as it was asked for, and
little else.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref

import pytest
import torch
from native_library import needs_library

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.weights import load_model

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 100, 16
# 134 MB of weights, of which no matrix has more than a sixteenth.
SPEC = {
    "name": "toy",
    "num_layers": 8,
    "hidden_size": 512,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_size": 64,
    "ffn_size": 2048,
    "vocab_size": 256,
}
# bytes: activations and logits of the warm-up's iterations, and what the allocator rounds up
OTHERS = 64e6

# A small model goes before, so that what libraries take at first use is not counted.
SCRIPT = """
import json
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.spec import ModelSpec

def resident(field):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(field)]
    return 1024 * int(line.split()[1])

backend = TorchBackend(device="cpu", dtype="float32", kernels="native", threads=1)
sizes = Sizes(num_blocks={num_blocks}, block_size={block_size}, batch_size=8, chunk=64)
backend.build(load_option("model", "tiny"), None, sizes)
before = resident("VmRSS")
executor = backend.build(ModelSpec(**{spec}), None, sizes)
print(json.dumps([resident("VmHWM") - before, resident("VmRSS") - before]))
"""


def largest_matrix(spec) -> int:
    """Bytes in float32."""
    layer = max(linear.in_features * linear.out_features for linear in spec.layer_linears)
    return 4 * max(layer, spec.vocab_size * spec.hidden_size)


@needs_library
def test_packed_weights_are_there_once():
    """While they are packed there are three copies of a matrix at a time: paired, padded and
    packed.
    """
    script = SCRIPT.format(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, spec=SPEC)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, kept = json.loads(done.stdout)
    spec = ModelSpec(**SPEC)
    needed = spec.weight_bytes(4) + NUM_BLOCKS * BLOCK_SIZE * spec.kv_bytes_per_token(4)
    assert 0.95 * needed < kept < needed + OTHERS
    assert peak < needed + 3 * largest_matrix(spec) + OTHERS


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_take_the_place_of_the_models_own(dtype):
    spec = load_option("model", "tiny")
    model = load_model(spec, None, CPU, dtype, seed=0)
    own = {
        name: weakref.ref(parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
    }
    backend.use_native(model)
    assert [name for name, reference in own.items() if reference() is not None] == [
        "embedding.weight"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_cache_is_as_large_as_asked_for(dtype):
    spec = load_option("model", "tiny")
    executor = TorchBackend(device="cpu", dtype=dtype, threads=1).build(
        spec, None, Sizes(30, BLOCK_SIZE, batch_size=2)
    )
    cache = executor.cache
    assert cache.keys.shape == cache.values.shape
    assert math.prod(cache.keys.shape[1:3]) == 30 * BLOCK_SIZE
    stored = sum(tensor.untyped_storage().nbytes() for tensor in (cache.keys, cache.values))
    assert stored == 30 * BLOCK_SIZE * spec.kv_bytes_per_token({"float32": 4}.get(dtype, 2))

"""What a run on a CPU takes of its memory: the weights once, the cache as it was asked for, and
little else.
"""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from native_library import needs_library

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.model.weights import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16


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

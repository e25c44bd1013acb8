"""Random weights of vLLM's workers: of every type none is mostly zero, as vLLM's dummies may be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sarathi_lab.executor.vllm import dummy_weights
from sarathi_lab.executor.vllm.dummy_weights import draw_weights

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
PACKED = {"weight": torch.int8, "qweight": torch.int32, "weight_packed": torch.uint8}


def model_of(**parameters: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, values in parameters.items():
        model.register_parameter(name, nn.Parameter(values, requires_grad=False))
    return model


def nonzero_share(values: torch.Tensor) -> float:
    return float((values.float() != 0).float().mean())


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_random_and_not_zero(dtype, monkeypatch):
    monkeypatch.setattr(dummy_weights, "PART", 1 << 10)
    model = model_of(weight=torch.zeros(64, 128).to(dtype), other_weight=torch.zeros(64, 128))
    draw_weights(model, seed=1)
    drawn = model.weight.float()
    assert nonzero_share(drawn) > 0.99
    assert drawn.std() == pytest.approx(1.0 if dtype.itemsize == 1 else 128**-0.5, rel=0.1)
    if dtype.itemsize > 1:  # products of products remain numbers in float16
        assert nonzero_share((drawn * drawn * 1e-2).half()) > 0.9
    again = model_of(weight=torch.zeros(64, 128).to(dtype))
    draw_weights(again, seed=1)
    assert torch.equal(again.weight.float(), drawn)
    assert not torch.equal(model.other_weight, drawn)


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_have_random_bits(name):
    model = model_of(**{name: torch.zeros(64, 64, dtype=PACKED[name])})
    draw_weights(model, seed=0)
    values = getattr(model, name)
    assert nonzero_share(values) > 0.9
    assert values.unique().numel() > 100


def test_what_is_no_weight_stays():
    parameters = {
        "weight_scale": torch.full((8, 8), 3.0),
        "weight_shape": torch.full((2,), 8),
        "g_idx": torch.arange(8, dtype=torch.int32),
        "weight_g_idx": torch.arange(8, dtype=torch.int32),
        "qzeros": torch.zeros(8, dtype=torch.int32),
        "A_log": torch.full((8,), 2.0),
    }
    model = model_of(**{name: values.clone() for name, values in parameters.items()})
    draw_weights(model, seed=0)
    for name, values in parameters.items():
        assert torch.equal(getattr(model, name), values), name
    norm = model_of(weight=torch.zeros(8), bias=torch.full((8,), 5.0))
    draw_weights(norm, seed=0)
    assert (norm.weight == 1).all()
    assert not norm.bias.any()

"""Fused activations and greedy sampling: the kernels, interpreted or on a GPU, against plain
torch.
"""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import BOUNDS, DEVICE, DTYPES, random

from sarathi_kernels.elementwise.activation import Activation, activate_, gated_activate_
from sarathi_kernels.elementwise.fused_activation import activation_, gated_activation
from sarathi_kernels.elementwise.sampling import NAN_TOKEN, greedy, greedy_reference
from sarathi_kernels.runtime.chip import CHIPS, Chip, assumed
from sarathi_kernels.runtime.testing import relative_error

# Of numpy, in the interpreter: a sigmoid of 1 / (1 + inf) is the right 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh"]
SIZES = [(1, 2560), (3, 80), (2, 1027)]  # rows and columns, of blocks of 1,024
# Each activation in each dtype, in one of the sizes.
CASES = [
    (*SIZES[(i + j) % 3], activation, dtype)
    for i, activation in enumerate(ACTIVATIONS)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("num_rows", "size", "activation", "dtype"), CASES, ids=str)
def test_gated_activation(
    num_rows: int, size: int, activation: Activation, dtype: torch.dtype
) -> None:
    gate_up = 4 * random(num_rows, 2 * size + 3, dtype=dtype)[:, : 2 * size]
    wide = torch.full((num_rows, 2 * size + 3), float("nan"), device=DEVICE, dtype=dtype)
    wide[:, : 2 * size] = gate_up
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = gated_activate_(gate.clone(), up, activation)
    assert (
        relative_error(gated_activation(wide[:, : 2 * size], activation), expected) < BOUNDS[dtype]
    )


@pytest.mark.parametrize(("num_rows", "size", "activation", "dtype"), CASES, ids=str)
def test_activation_in_place(
    num_rows: int, size: int, activation: Activation, dtype: torch.dtype
) -> None:
    wide = 4 * random(num_rows, size + 3, dtype=dtype)
    before, x = wide.clone(), wide[:, :size]
    expected = activate_(x.float().clone(), activation)
    assert activation_(x, activation) is x
    assert relative_error(x, expected) < BOUNDS[dtype]
    assert torch.equal(wide[:, size:], before[:, size:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_extreme_values_is_finite(activation: Activation) -> None:
    x = torch.tensor([[-3e4, -100.0, -9.0, -0.0, 0.0, 1e-6, 9.0, 100.0, 3e4]], device=DEVICE)
    expected = activate_(x.double(), activation)
    torch.testing.assert_close(activation_(x, activation).double(), expected, atol=1e-6, rtol=3e-6)


SMALL_CHIP = Chip(90, num_sms=4, shared_memory=CHIPS[90].shared_memory)


@pytest.mark.parametrize("chip", [CHIPS[90], SMALL_CHIP], ids=["many parts", "many steps"])
@pytest.mark.parametrize(
    ("num_rows", "vocab"), [(1, 32_000), (17, 2049), (2, 7), (1, 1), (5, 2048)]
)
def test_greedy_takes_the_lowest_of_the_largest(num_rows: int, vocab: int, chip: Chip) -> None:
    dtype = DTYPES[num_rows % len(DTYPES)]
    logits = random(num_rows, vocab + 1, dtype=dtype).round(decimals=1)  # so that many are equal
    logits[:, vocab] = 100.0  # beyond the row: not to be read
    logits = logits[:, :vocab]
    with assumed(chip):
        tokens = greedy(logits)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, greedy_reference(logits))
    assert torch.equal(tokens.cpu(), logits.cpu().argmax(dim=1))


@pytest.mark.parametrize("where", [0, 2047, 2048, 4999])
def test_greedy_finds_a_maximum_anywhere_and_prefers_the_first_of_equal_ones(where: int) -> None:
    logits = torch.full((2, 5000), -1e30, device=DEVICE)
    logits[:, where] = 3.0
    logits[1, 4999] = 3.0
    assert greedy(logits).tolist() == [where, where]
    assert greedy(torch.full_like(logits, float("-inf"))).tolist() == [0, 0]


@pytest.mark.parametrize("where", [0, 2500, 4999])
def test_greedy_marks_the_rows_that_hold_a_nan(where: int) -> None:
    logits = random(3, 5000, dtype=torch.float32)
    expected = logits.cpu().argmax(dim=1).tolist()
    logits[1, where] = float("nan")
    logits[2, 10], expected[2] = float("inf"), 10
    tokens = greedy(logits)
    assert tokens.tolist() == [expected[0], NAN_TOKEN, 10]
    assert torch.equal(tokens, greedy_reference(logits))

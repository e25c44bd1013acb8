"""Routing and grouped products of experts: the kernels, interpreted or on a GPU, against plain
torch.
"""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import BOUNDS, DEVICE, DTYPES, random
from torch import Tensor

from sarathi_kernels.experts import mixture, routing
from sarathi_kernels.experts.mixture import (
    mixture_of_experts,
    mixture_reference,
)
from sarathi_kernels.experts.routing import UNUSED, Routing, route
from sarathi_kernels.runtime.testing import poisoned, relative_error

# Of numpy, in the interpreter: infinity from infinity is the right NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")


@pytest.fixture
def poisoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the functions allocate be NaN, or -7 where it is whole, until a kernel writes it."""

    def empty(sizes: tuple[int, ...] | int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        value = float("nan") if dtype.is_floating_point else -7
        whole = sizes if isinstance(sizes, tuple) else (sizes,)
        return torch.full(whole, value, device=device, dtype=dtype)

    for module in (mixture, routing):
        monkeypatch.setattr(module.torch, "empty", empty)


def check_order(found: Routing, num_experts: int) -> None:
    """Every pair once, in a tile of its expert, in order; the rest of the tile says so."""
    pairs = found.chosen.numel()
    experts = found.chosen.flatten().tolist()
    tiles = found.order.view(-1, found.tile_rows).tolist()
    owners = found.tile_experts.tolist()
    used = [owner for owner in owners if owner != UNUSED]
    assert owners == used + [UNUSED] * (len(owners) - len(used))
    assert used == sorted(used)
    for expert in range(num_experts):
        rows = [
            row
            for tile, owner in zip(tiles, owners, strict=True)
            if owner == expert
            for row in tile
        ]
        own = [pair for pair in range(pairs) if experts[pair] == expert]
        assert rows[: len(own)] == own
        assert rows[len(own) :] == [pairs] * (-len(own) % found.tile_rows)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "tile_rows"),
    [(1, 8, 2, 16), (37, 8, 2, 16), (5, 60, 4, 16), (70, 5, 5, 64), (9, 1, 1, 16), (3, 128, 8, 16)],
)
def test_routing(
    poisoning: None,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    tile_rows: int,
    normalised: bool,
) -> None:
    wide = 3 * random(num_tokens, num_experts + 1, dtype=torch.float32)
    logits = wide[:, :num_experts]
    wide[:, num_experts] = float("nan")  # not to be read
    found = route(logits, top_k, normalised=normalised, tile_rows=tile_rows)
    shares, chosen = logits.softmax(dim=1).topk(top_k, dim=1)
    shares = shares / shares.sum(dim=1, keepdim=True) if normalised else shares
    assert torch.equal(found.chosen.long(), chosen)
    assert relative_error(found.shares, shares) < BOUNDS[torch.float32]
    check_order(found, num_experts)


def test_equal_logits_and_those_that_are_no_numbers() -> None:
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[1] = float("-inf")
    logits[2, 4] = float("nan")
    logits[3, 5] = 100.0
    found = route(logits, 2, normalised=True, tile_rows=16)
    assert found.chosen.tolist() == [[0, 1], [0, 1], [4, 0], [5, 0]]
    assert found.shares[[1, 2]].isnan().all()
    assert found.shares[0].tolist() == [0.5, 0.5]
    check_order(found, 6)


def test_more_pairs_than_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "PAIRS_PER_STEP", 64)
    found = route(random(75, 7, dtype=torch.float32), 3, normalised=True, tile_rows=16)
    check_order(found, 7)


def inputs(
    num_tokens: int, hidden: int, size: int, experts: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = poisoned(num_tokens, hidden + 8, device=DEVICE, dtype=dtype)
    wide[:, :hidden] = random(num_tokens, hidden, dtype=dtype)
    gate_up = random(experts, 2 * size, hidden, dtype=dtype, seed=2) / hidden**0.5
    down = random(experts, hidden, size, dtype=dtype, seed=3)
    return wide[:, :hidden], random(num_tokens, experts, dtype=dtype, seed=1), gate_up, down


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "size", "experts", "top_k"),
    [(1, 48, 20, 4, 2), (3, 72, 136, 5, 5), (70, 130, 33, 3, 1), (140, 40, 17, 2, 2)],
)
def test_mixture(
    poisoning: None,
    num_tokens: int,
    hidden: int,
    size: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
) -> None:
    given = inputs(num_tokens, hidden, size, experts, dtype)
    out = mixture_of_experts(*given, top_k=top_k, normalised=True)
    wide = (each.double() for each in given)
    expected = mixture_reference(*wide, top_k=top_k, normalised=True)
    assert relative_error(out, expected) < 2 * BOUNDS[dtype]
    assert torch.equal(out, mixture_of_experts(*given, top_k=top_k, normalised=True))


def test_no_tokens_and_what_does_not_match() -> None:
    hidden, logits, gate_up, down = inputs(3, 48, 20, 4, torch.float32)
    assert mixture_of_experts(
        hidden[:0], logits[:0], gate_up, down, top_k=2, normalised=True
    ).shape == (0, 48)
    for change in (
        {"hidden": hidden[:, :40]},
        {"hidden": hidden.t()},
        {"router_logits": logits[:2]},
        {"router_logits": logits[:, :3]},
        {"gate_up": gate_up[:, :38]},
        {"gate_up": gate_up.half()},
        {"down": down.transpose(1, 2)},
        {"down": down[0]},
        {"top_k": 5},
        {"top_k": 0},
    ):
        named = {"hidden": hidden, "router_logits": logits, "gate_up": gate_up, "down": down}
        with pytest.raises(ValueError, match=r"\d|one dtype|one piece"):
            mixture_of_experts(**{**named, "top_k": 2, "normalised": True, **change})  # type: ignore[arg-type]

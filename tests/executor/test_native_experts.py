"""Mixtures of experts in C++, against sums in float64 by expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from every_policy import POLICIES
from helpers import scheduler_for
from native_library import needs_library
from torch import Tensor

from sarathi_kernels.cpu import library
from sarathi_kernels.cpu.mixture import experts as experts_of
from sarathi_kernels.cpu.packing import pack_linear, packed_nbytes
from sarathi_kernels.runtime.testing import relative_error
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Orca, Policy, SarathiServe

pytestmark = needs_library
BOUND = 3e-6  # of sums in float32


@pytest.fixture(params=[True, False], ids=["amx", "avx512"])
def allows_amx(request: pytest.FixtureRequest) -> bool:
    yield library.start(2, allows_amx=request.param)
    library.start(2)


def made(*sizes: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_expert(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, *, normalised: bool
) -> Tensor:
    """In float64, all experts for all rows, most of them weighted by zero."""
    shares = logits.double().softmax(dim=1)
    chosen = shares.topk(top_k, dim=1)
    weights = torch.zeros_like(shares).scatter(1, chosen.indices, chosen.values)
    if normalised:
        weights /= weights.sum(dim=1, keepdim=True)
    gate, up = torch.einsum("th,eoh->eto", x.double(), gate_up.double()).chunk(2, dim=2)
    results = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, down.double())
    return torch.einsum("te,eth->th", weights, results).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "size", "experts", "top_k"),
    [(1, 48, 20, 4, 2), (70, 40, 17, 60, 4), (700, 32, 16, 2, 1)],
)
@pytest.mark.parametrize("normalised", [True, False])
def test_experts(
    allows_amx: bool,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
    size: int,
    experts: int,
    top_k: int,
    normalised: bool,
) -> None:
    x, logits = made(rows, hidden, seed=0, dtype=dtype).float(), 3 * made(rows, experts, seed=1)
    gate_up = made(experts, 2 * size, hidden, seed=2, dtype=dtype) / hidden**0.5
    down = made(experts, hidden, size, seed=3, dtype=dtype)
    packed = pack_linear(gate_up, None, is_gated=True), pack_linear(down, None)
    assert packed[0].weight.nbytes == packed_nbytes(gate_up, is_gated=True)
    assert packed[1].weight.nbytes == packed_nbytes(down)
    found = experts_of(x, logits, *packed, top_k=top_k, normalised=normalised)
    expected = by_expert(x, logits, gate_up, down, top_k, normalised=normalised)
    is_rounded = dtype == torch.bfloat16  # where the CPU multiplies it, also between the products
    assert relative_error(found, expected) < (8e-3 if is_rounded else BOUND)


def test_what_is_no_number_stays_none_and_spoils_no_other_row() -> None:
    x, logits = made(4, 16, seed=0), made(4, 3, seed=1)
    gate_up, down = made(3, 32, 16, seed=2), made(3, 16, 16, seed=3)
    packed = pack_linear(gate_up, None, is_gated=True), pack_linear(down, None)
    clean = experts_of(x, logits, *packed, top_k=2, normalised=True)
    x[0, 3], logits[2, 1] = float("nan"), float("nan")
    found = experts_of(x, logits, *packed, top_k=2, normalised=True)
    assert found[[0, 2]].isnan().all()
    assert torch.equal(found[[1, 3]], clean[[1, 3]])


def test_no_rows_and_sizes_that_do_not_match() -> None:
    packed = (
        pack_linear(torch.ones(3, 32, 16), None, is_gated=True),
        pack_linear(torch.ones(3, 16, 16), None),
    )
    empty = experts_of(torch.ones(0, 16), torch.ones(0, 3), *packed, top_k=1, normalised=True)
    assert empty.shape == (0, 16)
    for x, logits, top_k in (
        (torch.ones(2, 15), torch.ones(2, 3), 1),
        (torch.ones(2, 16), torch.ones(2, 4), 1),
        (torch.ones(2, 16), torch.ones(1, 3), 1),
        (torch.ones(2, 16), torch.ones(2, 3), 4),
        (torch.ones(2, 16), torch.ones(2, 3), 0),
    ):
        with pytest.raises(ValueError, match="do not match"):
            experts_of(x, logits, *packed, top_k=top_k, normalised=True)


# -- whole models ----------------------------------------------------------------------------------

CPU = torch.device("cpu")
TINY = load_option("model", "tiny-moe")
SHARED = replace(TINY, shared_expert_size=24, normalise_experts=False, experts_per_token=3)
NUM_BLOCKS, BLOCK_SIZE = 40, 4


def requests() -> list[Request]:
    rng = np.random.default_rng(11)
    lengths = [(19, 5), (7, 7), (25, 2), (5, 1), (13, 4)]
    return [
        Request(i, 0.0, prompt, output, rng.integers(0, TINY.vocab_size, prompt, dtype=np.int32))
        for i, (prompt, output) in enumerate(lengths)
    ]


def tokens_of(model: Transformer, policy: Policy) -> dict[int, list[int]]:
    """Greedy tokens by request."""
    scheduler = scheduler_for(
        policy, batch_size=4, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=28
    )
    ledger = Ledger()
    executor = TorchExecutor(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    run_engine(requests(), scheduler, executor, ledger)
    table = ledger.requests()
    return dict(zip(table.request_id, table.output_token_ids, strict=True))


def made_model(spec: ModelSpec, *, is_native: bool = True, is_whole: bool = True) -> Transformer:
    model = load_model(spec, None, CPU, torch.float32, seed=0)
    if is_native:
        backend.use_native(model, is_whole=is_whole)
    return model


def test_tokens_are_those_of_plain_torch_under_every_policy() -> None:
    """Whose tokens are transformers', see test_torch_experts."""
    expected, model = tokens_of(made_model(TINY, is_native=False), Orca()), made_model(TINY)
    for name, policy in POLICIES.items():
        assert tokens_of(model, policy) == expected, name


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "by operation"])
def test_a_shared_expert_and_shares_of_the_whole_softmax(is_whole: bool) -> None:
    expected = tokens_of(made_model(SHARED, is_native=False), Orca())
    assert tokens_of(made_model(SHARED, is_whole=is_whole), SarathiServe(chunk=8)) == expected

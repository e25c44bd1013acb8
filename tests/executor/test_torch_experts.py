"""Mixtures of experts in plain torch: the products alone, against sums in float64; checkpoints,
their layouts and tokens against transformers'.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from checkpoints import DEVICE, MIXTURES, greedy_tokens, make_checkpoint
from every_policy import POLICIES
from helpers import scheduler_for
from torch import Tensor

from sarathi_kernels.runtime.testing import relative_error
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.operations import mix_experts
from sarathi_lab.model.weights import load_model

SPEC = load_option("model", "tiny-moe")
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 0.03, torch.float16: 0.002}
LENGTHS = [(19, 4), (7, 7), (14, 3), (5, 1), (17, 4)]  # of prompts and outputs
SHARED = 8  # tokens that all longer prompts begin with
CHUNKS = (3, 4, 5, 8, 16, 64)
BATCH_SIZE, BLOCK_SIZE, MAX_LEN = 4, 4, 25
ROOMY, TIGHT = 40, 11  # blocks


def made(*sizes: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(sizes, generator=generator) * sizes[-1] ** -0.5).to(DEVICE, dtype)


def by_token(
    hidden: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, *, normalised: bool
) -> Tensor:
    """In float64, expert by expert of token by token."""
    hidden, gate_up, down = (one.double() for one in (hidden, gate_up, down))
    out = torch.zeros_like(hidden)
    for i, shares in enumerate(logits.double().softmax(dim=-1)):
        chosen = shares.argsort(descending=True)[:top_k].tolist()
        whole = sum(shares[chosen]) if normalised else 1.0
        for one in chosen:
            gate, up = (gate_up[one] @ hidden[i]).chunk(2)
            out[i] += shares[one] / whole * (down[one] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "size", "num_experts", "top_k"),
    [(3, 33, 31, 5, 5), (40, 64, 96, 8, 2), (7, 13, 3, 60, 4)],
)
@pytest.mark.parametrize("normalised", [True, False])
def test_experts(dtype, num_tokens, hidden_size, size, num_experts, top_k, normalised):
    hidden = made(num_tokens, hidden_size, dtype=dtype, seed=0)
    logits = 3 * made(num_tokens, num_experts, dtype=dtype, seed=1) * num_experts**0.5
    gate_up = made(num_experts, 2 * size, hidden_size, dtype=dtype, seed=2)
    down = made(num_experts, hidden_size, size, dtype=dtype, seed=3)
    found = mix_experts(hidden, logits, gate_up, down, top_k=top_k, normalised=normalised)
    expected = by_token(hidden, logits, gate_up, down, top_k, normalised=normalised)
    assert (found.dtype, found.shape) == (dtype, hidden.shape)
    assert relative_error(found, expected) < BOUNDS[dtype]


def test_no_tokens_and_tokens_that_all_choose_the_same():
    gate_up, down = (made(*sizes, dtype=torch.float32, seed=2) for sizes in ((4, 12, 8), (4, 8, 6)))
    for rows in (0, 5):
        hidden = made(rows, 8, dtype=torch.float32, seed=0)
        logits = torch.tensor([0.0, 9.0, 0.0, 8.0], device=DEVICE).repeat(rows, 1)
        found = mix_experts(hidden, logits, gate_up, down, top_k=2, normalised=True)
        expected = by_token(hidden, logits, gate_up, down, 2, normalised=True)
        assert torch.allclose(found.double(), expected, atol=1e-6)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_in_one_tensor_are_read_as_one_by_one(tmp_path, family):
    models = []
    for is_fused in (False, True):
        directory = tmp_path / str(is_fused)
        theirs = make_checkpoint(family, directory, is_fused=is_fused)
        models.append(
            load_model(*AutoModel(str(directory)).resolve("unused"), DEVICE, torch.float32, 0)
        )
    one, fused = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(one[name], fused[name]) for name in one)
    held = dict(theirs.named_parameters())
    for ours, name in (("gate_up", "experts.gate_up_proj"), ("router.weight", "gate.weight")):
        assert torch.equal(one[f"layers.1.{ours}"].cpu(), held[f"model.layers.1.mlp.{name}"])


def test_layers_without_experts_are_refused(tmp_path):
    make_checkpoint("qwen3_moe", tmp_path, mlp_only_layers=[1])
    with pytest.raises(UserError, match=r"mlp_only_layers=\[1\] is not supported"):
        AutoModel(str(tmp_path)).resolve("unused")


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, 97, SHARED, dtype=np.int32)
    prompts = [rng.integers(0, 97, length, dtype=np.int32) for length, _ in LENGTHS]
    for prompt in prompts:
        if len(prompt) > SHARED:
            prompt[:SHARED] = prefix
    return [
        Request(i, 0.0, len(prompt), output_len, prompt)
        for i, (prompt, (_, output_len)) in enumerate(zip(prompts, LENGTHS, strict=True))
    ]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """(our model, transformers' greedy tokens of every request) of each family."""
    pairs = []
    for family in MIXTURES:
        directory = tmp_path_factory.mktemp("mixture")
        theirs = make_checkpoint(family, directory)
        spec, found = AutoModel(str(directory)).resolve("unused")
        ours = load_model(spec, found, DEVICE, torch.float32, seed=0)
        pairs.append((ours, greedy_tokens(theirs, requests())))
    return pairs


def served(model, policy, num_blocks: int, *, shares_prefixes: bool):
    """Tokens by request, and how many preemptions and cached tokens there were."""
    scheduler = scheduler_for(policy, batch_size=BATCH_SIZE, max_model_len=MAX_LEN)
    scheduler.blocks = BlockManager(num_blocks, BLOCK_SIZE, shares_prefixes=shares_prefixes)
    executor = TorchExecutor(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    ledger = Ledger()
    run_engine(requests(), scheduler, executor, ledger)
    table = ledger.requests()
    tokens = dict(zip(table.request_id, table.output_token_ids, strict=True))
    return tokens, table.num_preemptions.sum(), table.prefix_hit_tokens.sum()


def test_tokens_equal_transformers_under_every_policy(mixtures):
    """Families, chunks, and caches take turns; with a cache so small that most policies preempt."""
    families, chunks, rooms = cycle(mixtures), cycle(CHUNKS), cycle((ROOMY, TIGHT, TIGHT))
    wrong, preempted, hits, as_wanted = [], 0, 0, 0
    for name, policy in POLICIES.items():
        (model, expected), chunk, num_blocks = next(families), next(chunks), next(rooms)
        cut = policy.with_budget(chunk) if policy.budget_field else policy
        try:
            run = served(model, cut, num_blocks, shares_prefixes=chunk != 4)
            as_wanted += 1
        except UserError:  # a policy that has no such budget, or needs more blocks
            run = served(model, policy, ROOMY, shares_prefixes=True)
        if run[0] != expected:
            wrong.append((name, chunk, num_blocks))
        preempted, hits = preempted + run[1], hits + run[2]
    assert wrong == []
    assert as_wanted > len(POLICIES) / 2
    assert preempted > 0
    assert hits > 0


# -- what the backend says -------------------------------------------------------------------------


def test_what_does_not_run_is_refused_in_a_line():
    TorchBackend(device="cpu").check(SPEC, 100)
    reason = r"weights=fp8 .* model tiny-moe is a mixture of experts; use executor\.weights=auto"
    with pytest.raises(UserError, match=reason):
        TorchBackend(device="cpu", weights="fp8").check(SPEC, 100)
    for other in ({"gated_ffn": False}, {"activation": "gelu"}, {"ffn_bias": True}):
        with pytest.raises(UserError, match=r"tiny-moe has experts without SiLU .*=simulated"):
            load_model(replace(SPEC, **other), None, DEVICE, torch.float32, seed=0)


def test_weights_take_the_memory_that_is_said():
    for spec in (SPEC, replace(SPEC, shared_expert_size=24)):
        model = load_model(spec, None, DEVICE, torch.float32, seed=0)
        matrices = [one.nbytes for one in model.parameters() if one.ndim > 1]
        assert sum(matrices) == spec.weight_bytes(4)
        hidden = made(50, 64, dtype=torch.float32, seed=1) * 8
        update = model.layers[0].feed_forward(hidden, model.operations)
        assert 0.1 < update.std() * (2 * spec.num_layers) ** 0.5 < 1.5  # of order one, by residual

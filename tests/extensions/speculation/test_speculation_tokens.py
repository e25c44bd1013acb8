"""Greedy tokens with drafts are those without: in plain torch, C++ and Triton's path, under all
policies, with preemption, prefix caching and chunks of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_stub import stubbed
from every_policy import POLICIES
from helpers import scheduler_for
from integrity import check_integrity
from late_device import DEVICE, LateDevice
from native_library import needs_library
from plain_kernels import plain_kernels
from toy_executors import SPEC, model_on, on_kernels

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request, SequenceState
from sarathi_lab.engine.speculation import NO_SPECULATION
from sarathi_lab.executor.torch.checks import use_triton
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.extensions.speculation import Drafts, PromptLookup
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Orca, Sarathi, SarathiServe, VllmV1

KINDS = ["torch", pytest.param("native", marks=needs_library), "triton"]
LOOKUP = PromptLookup(tokens=3)


@dataclass
class Scripted(Drafts):
    """Drafts from an answer, every fourth token of which is wrong."""

    answer: list[int]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        at = range(len(sequence.output_token_ids), len(sequence.output_token_ids) + most)
        return [(self.answer[i] + (i % 4 == 3)) % SPEC.vocab_size for i in at]


class FromAnswers(PromptLookup):
    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(tokens=3)
        object.__setattr__(self, "answers", answers)

    def drafts(self, request: Request) -> Drafts:
        return Scripted(self.answers[request.request_id])


def repetitive(lengths, seed: int = 5) -> list[Request]:
    """Prompts that repeat a few tokens."""
    dice = np.random.default_rng(seed)
    prompts = [np.resize(dice.integers(0, SPEC.vocab_size, 4), p) for p, _ in lengths]
    return [
        Request(i, 0.0, p, d, prompt.astype(np.int32))
        for i, ((p, d), prompt) in enumerate(zip(lengths, prompts, strict=True))
    ]


def served(requests, executor, policy, speculation, num_blocks=60, **settings):
    scheduler = scheduler_for(
        policy,
        batch_size=4,
        num_blocks=num_blocks,
        block_size=executor.block_size,
        max_model_len=40,
        speculation=speculation,
        **settings,
    )
    ledger = Ledger()
    run_engine(requests, scheduler, executor, ledger)
    check_integrity(scheduler.blocks, [])
    return ledger.requests().output_token_ids.tolist(), ledger.iterations(), scheduler


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_unchanged_on_every_path(kind):
    """Also that drafts are right now and then, and save iterations."""
    model, executor = model_on(kind), None
    requests = repetitive([(19, 14), (5, 12), (9, 8)])
    if kind == "triton":
        requests = repetitive([(19, 6)])  # few: the interpreter takes its time
        executor = on_kernels(model, capacity=1)
        executor.warm_up(batch_size=3, chunk_tokens=16, longest=40, num_drafts=3)
    executor = executor or TorchExecutor(model, num_blocks=60, block_size=4)
    for policy in (Sarathi(chunk=16), *([] if kind == "triton" else [Orca(), VllmV1(6)])):
        expected, without, _ = served(requests, executor, policy, NO_SPECULATION)
        tokens, iterations, _ = served(requests, executor, policy, FromAnswers(expected))
        assert tokens == expected
        assert 0 < iterations.num_accepted_tokens.sum() < iterations.num_draft_tokens.sum()
        assert len(iterations) < len(without)
        drafting = iterations[iterations.num_draft_tokens > 0]
        assert drafting.num_padding_tokens.any() == (kind == "triton")


def test_drafts_are_replayed_as_graphs(plain):
    requests = repetitive([(19, 14), (5, 12), (9, 8)])
    expected, _, _ = served(requests, plain, Orca(), NO_SPECULATION)
    with stubbed(LateDevice(3, earliness=0.3)), plain_kernels():
        model = load_model(SPEC, None, DEVICE, torch.float32, seed=0)
        use_triton(model, "series")
        executor = on_kernels(model, capacity=1)
        executor.warm_up(batch_size=3, chunk_tokens=32, longest=40, num_drafts=3)
        for policy in (Sarathi(chunk=16), VllmV1(12)):
            tokens, iterations, _ = served(requests, executor, policy, FromAnswers(expected))
            assert tokens == expected
            assert iterations.num_draft_tokens.any()
            assert iterations.is_replayed.all()


@pytest.fixture(scope="module")
def plain() -> TorchExecutor:
    return TorchExecutor(model_on("torch"), num_blocks=60, block_size=4)


def test_tokens_are_unchanged_under_every_policy(plain):
    requests = repetitive([(11, 6), (4, 12), (7, 9), (13, 5)])
    expected, _, _ = served(requests, plain, Orca(), NO_SPECULATION)
    wrong = [
        name
        for name, policy in POLICIES.items()
        if served(requests, plain, policy, FromAnswers(expected))[0] != expected
    ]
    assert wrong == []


def test_tokens_are_unchanged_through_preemption(plain):
    requests = repetitive([(11, 14), (10, 13), (9, 15)])
    expected, _, _ = served(requests, plain, Orca(), NO_SPECULATION)
    executor = TorchExecutor(plain.model, num_blocks=8, block_size=4)
    tokens, iterations, scheduler = served(
        requests,
        executor,
        SarathiServe(chunk=5, reserve="chunk", watermark=0.0),
        LOOKUP,
        num_blocks=8,
    )
    assert tokens == expected
    assert scheduler.num_preemptions > 0
    assert iterations.num_accepted_tokens.sum() > 0

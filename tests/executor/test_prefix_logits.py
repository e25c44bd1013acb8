"""Prefix caching in the executors: the same logits with hits and without, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import scheduler_for
from native_library import needs_library
from toy_executors import executor_of, model_on

from sarathi_kernels.runtime.testing import relative_error
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.policy import SarathiServe, VllmV1

BOUND = 2e-5  # of float32 logits whose products were taken over other shapes


class Recorded:
    """The logits of every output token, by request and index, while an executor of the model
    runs.
    """

    def __init__(self, model: Transformer, executor: TorchExecutor) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self._operations, self._greedy = model.operations, model.operations.greedy
        self._submit = executor.submit
        self._batch = Batch()
        executor.submit = self._submitted  # type: ignore[method-assign]

    def __enter__(self) -> Recorded:
        self._operations.greedy = self._recorded  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._operations.greedy = self._greedy  # type: ignore[method-assign]

    def _submitted(self, batch: Batch) -> None:
        self._batch = batch
        self._submit(batch)

    def _recorded(self, logits: torch.Tensor) -> torch.Tensor:
        emitting = [chunk for chunk in self._batch.chunks if chunk.emits_token]
        for chunk, row in zip(emitting, logits, strict=False):  # kernels pad
            self.logits[chunk.sequence.request.request_id, chunk.output_index] = row.cpu().clone()
        return self._greedy(logits)


def conversations(shared: int) -> list[Request]:
    """Prompts with `shared` equal first tokens, one after the other; the last one is equal to the
    first.
    """
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 97, shared)
    own = [np.concatenate([prefix, rng.integers(0, 97, n)]) for n in (9, 14, 3)]
    prompts = [*own, own[0]]
    return [Request(i, 0.0, len(p), 4, p.astype(np.int32)) for i, p in enumerate(prompts)]


def logits_of(
    model, kind, requests, *, shares_prefixes: bool, chunk: int, block_size: int, num_blocks: int
):
    # Two at a time, so that the later ones find some; of long chunks all, in one batch.
    at_once = chunk >= 100
    policy = VllmV1(chunk) if at_once else SarathiServe(chunk=chunk, watermark=0.0)
    scheduler = scheduler_for(policy, batch_size=4 if at_once else 2, max_model_len=80)
    scheduler.blocks = BlockManager(num_blocks, block_size, shares_prefixes=shares_prefixes)
    executor = executor_of(model, kind, num_blocks, block_size)
    executor.cache.keys.fill_(float("nan"))  # whoever reads what was never written shows it
    executor.cache.values.fill_(float("nan"))
    ledger = Ledger()
    with Recorded(model, executor) as recorded:
        run_engine(requests, scheduler, executor, ledger)
    return recorded.logits, ledger.requests()


SMALL = [(3, 3, 16), (3, 33, 4), (16, 16, 4), (16, 33, 16), (100, 33, 4)]
CASES = [
    *[pytest.param("torch", *case, id=f"torch {case}") for case in SMALL],
    *[pytest.param("native", *case, id=f"native {case}", marks=needs_library) for case in SMALL],
    pytest.param("triton", 64, 16, 16, id="triton, two batches in flight"),
]


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {}


@pytest.mark.parametrize(("kind", "chunk", "shared", "block_size"), CASES)
def test_hits_change_no_logit(models, kind, chunk, shared, block_size):
    if kind not in models:
        models[kind] = model_on(kind)
    requests = conversations(shared)[
        1 if kind == "triton" else 0 :
    ]  # the interpreter takes its time
    settings = {"chunk": chunk, "block_size": block_size, "num_blocks": 240 // block_size}
    computed, _ = logits_of(models[kind], kind, requests, shares_prefixes=False, **settings)
    found, table = logits_of(models[kind], kind, requests, shares_prefixes=True, **settings)
    assert (table.prefix_hit_tokens.sum() > 0) == (
        shared >= block_size or (kind != "triton" and block_size == 4)
    )
    assert computed.keys() == found.keys()
    for place, logits in computed.items():
        assert relative_error(found[place], logits) < BOUND
        assert found[place].argmax() == logits.argmax()

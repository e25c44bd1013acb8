"""A tiny checkpoint and vLLM's workers for it, for tests marked `vllm`."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.model.seeded_checkpoint import seeded_checkpoint
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy

HAS_VLLM = find_spec("vllm") is not None
if HAS_VLLM:  # workers in this process start in half the time
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# Two layers, of the smallest head that vLLM's attention on a CPU takes.
TINY = ModelSpec("tiny-vllm", 2, 64, 2, 1, ffn_size=96, vocab_size=211, head_size=32)
SIZES = Sizes(
    num_blocks=48, block_size=32, batch_size=4, max_model_len=256, max_batch_tokens=1024, chunk=64
)


def tiny_checkpoint() -> Path:
    """The folder of the weights of TINY in float32, seed 0."""
    return seeded_checkpoint(TINY, torch.device("cpu"), torch.float32, 0)


def backend_of(**settings: Any) -> Any:
    """A `VllmBackend` without graphs or compilation."""
    from sarathi_lab.executor.vllm.backend import VllmBackend

    return VllmBackend(**{"device": "cpu", "dtype": "float32", "eager": True, **settings})


def requests_of_tokens(number: int = 8, *, prefix: int = 0, longest: int = 180) -> list[Request]:
    """Requests of random tokens, the first `prefix` of which are the same."""
    chosen = random.Random(1)
    shared = [chosen.randrange(TINY.vocab_size) for _ in range(prefix)]
    requests = []
    for i in range(number):
        prompt = [
            chosen.randrange(TINY.vocab_size) for _ in range(chosen.randint(20, longest - prefix))
        ]
        token_ids = np.array(shared + prompt, dtype=np.int32)
        requests.append(Request(i, 0.0, len(token_ids), 9 + i % 5, token_ids))
    return requests


def served(
    executor: Any, policy: Policy, requests: list[Request], num_blocks: int, **settings: Any
) -> Ledger:
    """The ledger of `requests` served with a cache of `num_blocks`."""
    sizes = {"block_size": SIZES.block_size, "max_model_len": SIZES.max_model_len}
    engine = EngineConfig(policy, SIZES.batch_size, num_blocks, **{**sizes, **settings})
    return serve(requests, engine, executor)


def tokens_of(ledger: Ledger) -> list[list[int]]:
    """The generated tokens of all requests, in their order."""
    table = ledger.requests().sort_values("request_id")
    return [list(map(int, one)) for one in table.output_token_ids]

"""`vllm_v1` beside vLLM's schedulers, step by step: which request gets how many tokens.

`tests/vllm_conformance.py` tries more. What differs is listed in
experiments/sarathi_serve/policies.
"""

from __future__ import annotations

import pytest
from vllm_queues import Kind, cases, difference

pytestmark = pytest.mark.vllm

NUM_CASES = 30


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("is_scarce", "shares"), [(True, False), (False, True)], ids=["scarce", "prefixes"]
)
def test_vllm_v1_takes_the_tokens_that_vllm_does(num_in_flight, is_scarce, shares):
    kind = Kind(num_in_flight, is_scarce, shares)
    for tried in cases(kind, seed=1, number=NUM_CASES):
        assert difference(tried, kind) is None, tried

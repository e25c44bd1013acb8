"""The greedy tokens of two policies on vLLM's runner V2, whose kernels Triton interprets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from triton.backends import backends

# vLLM looks for a compiler for the CPU, which PyPI's Triton lacks and the interpreter does without.
driver = SimpleNamespace(is_active=lambda: True)
backends["cpu"] = SimpleNamespace(driver=driver)  # type: ignore[assignment]

from vllm_engine import (  # noqa: E402
    SIZES,
    TINY,
    backend_of,
    requests_of_tokens,
    served,
    tiny_checkpoint,
    tokens_of,
)

from sarathi_lab.policy import Sarathi, SarathiServe  # noqa: E402

if __name__ == "__main__":
    executor = backend_of(runner="v2").build(TINY, tiny_checkpoint(), SIZES)
    assert executor.workers.facts()["runner"] == "v2"
    found = []
    for policy, num_blocks in ((Sarathi(48), 48), (SarathiServe(48, reserve="chunk"), 9)):
        found.append(tokens_of(served(executor, policy, requests_of_tokens(), num_blocks)))
    Path(sys.argv[1]).write_text(json.dumps(found))

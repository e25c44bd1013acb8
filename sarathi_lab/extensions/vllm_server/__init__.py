"""A policy of the lab in vLLM's server (experiments/lab/vllm_server has the whole recipe):

    python -m sarathi_lab.extensions.vllm_server --model MODEL \\
        --additional-config '{"sarathi_lab": {"policy": "sarathi", "chunk": 512}}'

checks the configuration, then starts the server, as this does without the check:

    vllm serve MODEL --no-enable-prefix-caching \\
        --scheduler-cls sarathi_lab.extensions.vllm_server.AsyncScheduler \\
        --additional-config '{"sarathi_lab": {"policy": "sarathi", "chunk": 512}}'
"""

from __future__ import annotations

from importlib import import_module

from sarathi_lab.extensions.vllm_server.decider import Decider
from sarathi_lab.extensions.vllm_server.settings import policy_of

__all__ = ["Decider", "policy_of"]


def __getattr__(name: str) -> object:
    if name not in ("Scheduler", "AsyncScheduler"):  # which need vLLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.schedulers"), name)

"""Rules of vLLM's first engine (V0), which versions before 0.8 have by default: whole prompts
unless chunked, no prefixes, and no block that is never allocated.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sarathi_lab.extensions.replay.server_arguments import Statement
from sarathi_lab.policy.systems import NULL_BLOCKS, WHOLE_PROMPT_TOKENS

# Its policies in conf/policy.
CHUNKED_V0 = "vllm_v0_chunked"
WHOLE_PROMPTS_V0 = "prefill_first"
FIRST_OF_V1 = (0, 8)  # version whose default is the second engine
VERSION = re.compile(r"v?(\d+)\.(\d+)")
LONG_CONTEXT = 32_768  # positions above which it chunks by default,
UNCHUNKED = ("speculative", "num_speculative", "enable_lora")  # but not with these


def with_rules_of_version(statement: Statement) -> Statement:
    """Let a server have the rules of the engine that its version of vLLM has by default."""
    version = statement.settings.get("version", "")
    if is_of_v0(version) and not statement.policy:
        return with_rules_of_v0(statement)
    return statement


def is_of_v0(version: object) -> bool:
    """Return whether a version of vLLM has its first engine by default."""
    numbers = VERSION.match(str(version))
    if numbers is None:
        return False
    major_and_minor = (int(numbers[1]), int(numbers[2]))
    return major_and_minor < FIRST_OF_V1


def with_rules_of_v0(statement: Statement) -> Statement:
    """Let a server of vLLM's first engine have its rules."""
    settings = {"cache.prefix": False, **statement.settings}
    not_simulated = [*statement.not_simulated]
    longest = settings.get("max_model_len")
    if "cache.num_blocks" in settings:
        settings["cache.num_blocks"] += NULL_BLOCKS
    is_chunked = settings.pop("policy.enable_chunked_prefill", None)
    if is_chunked is None:
        never_chunks = any(name.startswith(UNCHUNKED) for name in not_simulated)
        is_chunked = longest is not None and longest > LONG_CONTEXT and not never_chunks
        if longest is None and not never_chunks:
            not_simulated.append(
                f"chunked prefill by default above {LONG_CONTEXT} positions (max_model_len is not "
                "stated)"
            )
    policy = CHUNKED_V0
    if not is_chunked:
        policy = WHOLE_PROMPTS_V0
        if longest is not None:
            settings.setdefault("chunk", max(longest, WHOLE_PROMPT_TOKENS))
        if "chunk" in settings:
            settings["policy.max_num_batched_tokens"] = settings["chunk"]
    return replace(statement, settings=settings, not_simulated=not_simulated, policy=policy)

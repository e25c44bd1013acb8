"""The KV cache of a run: its fields from the settings, and errors that name its size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from omegaconf import DictConfig

from sarathi_lab.config.errors import UserError, require_bool, require_int, require_number
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.scheduler import LARGER_CACHE
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.policy.systems import setup_of

FILLS_MEMORY, HOLDS_BATCH = "auto", "batch"  # for cache.num_blocks
CACHE_HEADROOM = 0.01  # that a policy's default watermark keeps free, beyond all sequences
MOST_BLOCKS = 10_000_000  # of a cache; each is a number in a list


class CacheFields(TypedDict):
    """Fields of `EngineConfig` that the settings `cache` decide."""

    aligns_chunks: bool
    block_size: int
    num_blocks: int
    fills_memory: bool
    state_tokens: int
    window: CachedWindow | None
    shares_prefixes: bool


def cache_fields(
    cfg: DictConfig, backend: Backend, spec: ModelSpec, policy: Policy, max_model_len: int
) -> CacheFields:
    """Return the fields of `EngineConfig` that the settings `cache` stand for. Without a size it
    holds all batches in flight. Raises UserError.
    """
    cache = cfg.cache
    if cache.memory_share is not None and cache.num_blocks != FILLS_MEMORY:
        reason = "has no effect on a cache of a stated size; add cache.num_blocks=auto"
        raise UserError(f"cache.memory_share={cache.memory_share} {reason}")
    advice = "use a number of tokens such as 16"
    block_size = require_int("cache.block_size", cache.block_size, 1, advice)
    setup = setup_of(policy, cfg.batch, max_model_len, memory_share(cfg))
    window_pool = setup.rule.window_pool
    window = backend.window_in_cache(spec, window_pool)
    state_tokens = backend.state_tokens(spec)
    if cache.num_blocks == FILLS_MEMORY:
        # A small model on a large device would have more than any run needs (`cap_caution`).
        num_blocks = min(backend.kv_blocks(spec, block_size, setup), MOST_BLOCKS)
    elif cache.num_blocks in (None, HOLDS_BATCH):
        state_blocks = math.ceil(state_tokens / block_size)
        sized = BlockManager(0, block_size, state_blocks=state_blocks, window=window)
        blocks_in_flight = cfg.batch * backend.num_stages * sized.room_for(max_model_len)
        num_blocks = math.ceil(blocks_in_flight / (1 - CACHE_HEADROOM))
    else:
        advice = "use batch for a cache that holds all batches in flight, auto for a server's"
        num_blocks = require_int("cache.num_blocks", cache.num_blocks, 1, advice)
    # Before a cache of that many blocks is made.
    backend.check(spec, num_blocks * block_size, window_pool)
    advice = "use fewer, or a larger cache.block_size"
    require_int("cache.num_blocks", num_blocks, 0, advice, maximum=MOST_BLOCKS)
    advice = "use true for chunks that end where blocks of the cache do, else false"
    return {
        "aligns_chunks": require_bool("cache.align_chunks", cache.align_chunks, advice),
        "block_size": block_size,
        "num_blocks": num_blocks,
        "fills_memory": cache.num_blocks == FILLS_MEMORY,
        "state_tokens": state_tokens,
        "window": window,
        "shares_prefixes": _shares_prefixes(cache.prefix, spec, state_tokens),
    }


def _shares_prefixes(stated: object, spec: ModelSpec, state_tokens: int) -> bool:
    """Return whether equal prefixes share blocks. Raises UserError for a model with states."""
    advice = "use true to share the cache of equal prefixes, else false"
    shares_prefixes = require_bool("cache.prefix", stated, advice)
    if shares_prefixes and state_tokens:
        reason = "has states, of which no copies at the ends of blocks are simulated"
        raise UserError(f"cache.prefix=true: model {spec.name} {reason}; use cache.prefix=false")
    return shares_prefixes


def cap_caution(engine: EngineConfig) -> list[str]:
    """Return a caution if a cache that fills the memory was cut to the most blocks."""
    if not engine.fills_memory or engine.num_blocks < MOST_BLOCKS:
        return []
    return [
        f"cache.num_blocks={FILLS_MEMORY} is cut to {MOST_BLOCKS:,} blocks of {engine.block_size} "
        "tokens, the most that a cache has; a larger cache.block_size fills more of the memory"
    ]


def memory_share(cfg: DictConfig) -> float | None:
    """Return the stated share of a device's memory. Raises UserError for one that is none."""
    share = cfg.cache.memory_share
    if share is None:
        return None
    advice = "use a share above 0 up to 1 such as 0.9, or null for the served system's"
    if require_number("cache.memory_share", share, above=0, fix=advice) > 1:
        raise UserError(f"cache.memory_share={share} exceeds 1; {advice}")
    return float(share)


@contextmanager
def explained_cache(
    engine: EngineConfig, backend: Backend, spec: ModelSpec, share: float | None
) -> Iterator[None]:
    """State in errors of what does not fit a cache that fills the memory how that is sized."""
    try:
        yield
    except UserError as error:
        if not engine.fills_memory or LARGER_CACHE not in str(error):
            raise
        longest = engine.max_model_len or spec.max_position
        setup = setup_of(engine.policy, engine.batch_size, longest, share)
        size = backend.describe_cache(spec, setup)
        helps = (
            f"the cache of a device is {size}; raise cache.memory_share, shorten the requests, or "
            "take more devices"
        )
        raise UserError(str(error).replace(LARGER_CACHE, helps)) from None

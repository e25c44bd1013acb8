"""The longest context and the cache of a run, from its settings or from what its requests need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from sarathi_lab.config.errors import UserError, require_bool, require_int
from sarathi_lab.engine.executor import Backend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.workload import LoadedRequests

# Room that a policy's default watermark (1 %) keeps free must not cost a sequence of the default
# cache.
CACHE_HEADROOM = 0.01
FILLS_MEMORY = "auto"  # for cache.num_blocks


class CacheSizes(NamedTuple):
    """The fields of a plan that say what its cache is like."""

    block_size: int
    num_blocks: int
    fills_memory: bool
    num_host_blocks: int
    shares_prefixes: bool


def longest_len(
    cfg: DictConfig, load: LoadedRequests, spec: ModelSpec, checkpoint: Path | None
) -> int:
    """`max_model_len`, or the longest request's. Raises UserError if a checkpoint's positions do
    not suffice for that.
    """
    longest = max(request.total_len for request in load.requests)
    if checkpoint is not None and longest > spec.max_position:
        raise UserError(
            f"the longest request has {longest} tokens, but {spec.name} was made for "
            f"{spec.max_position}; shorten it"
        )
    return named_max_model_len(cfg) or longest


def named_max_model_len(cfg: DictConfig) -> int | None:
    """`max_model_len` as the user set it."""
    if cfg.max_model_len is None:
        return None
    return require_int(
        "max_model_len", cfg.max_model_len, 2, "use null for the longest request of the workload"
    )


def read_cache(
    cfg: DictConfig, backend: Backend, spec: ModelSpec, num_sequences: int, max_model_len: int
) -> CacheSizes:
    """The settings below `cache`, with room for `num_sequences` of the longest if they name no
    number of blocks. Raises UserError.
    """
    cache = cfg.cache
    block_size = require_int(
        "cache.block_size", cache.block_size, 1, "use a number of tokens such as 16"
    )
    fills_memory = cache.num_blocks == FILLS_MEMORY
    if fills_memory:
        num_blocks = backend.kv_blocks(spec, block_size)
    elif cache.num_blocks is None:
        needed = num_sequences * math.ceil(max_model_len / block_size)
        num_blocks = math.ceil(needed / (1 - CACHE_HEADROOM))
    else:
        fix = "use null for a cache that holds all batches in flight, or auto for all memory"
        num_blocks = require_int("cache.num_blocks", cache.num_blocks, 1, fix)
    fix = "use true to share the cache of equal prefixes, else false"
    return CacheSizes(
        block_size,
        num_blocks,
        fills_memory,
        _num_host_blocks(cfg, num_blocks),
        require_bool("cache.prefix", cache.prefix, fix),
    )


def _num_host_blocks(cfg: DictConfig, num_blocks: int) -> int:
    named = cfg.cache.num_host_blocks
    if cfg.preemption == "swap":
        if named is None:
            return num_blocks
        return require_int("cache.num_host_blocks", named, 0, "use null for num_blocks")
    if named is not None:
        raise UserError(
            f"cache.num_host_blocks={named} has no effect without preemption=swap; add it"
        )
    return 0

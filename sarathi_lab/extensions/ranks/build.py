"""Assembly on all ranks at once, each with its part of the model: `TorchBackend.ranks`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.extensions.ranks import by_torchrun
from sarathi_lab.extensions.ranks.executor import Driver, Follower, RankExecutor
from sarathi_lab.extensions.ranks.group import Group, RankExchange, group_of
from sarathi_lab.extensions.ranks.sharded import Ranks, ShardedTransformer, load_part
from sarathi_lab.model.spec import ModelSpec


def ranks_of(backend: TorchBackend) -> Ranks:
    return Ranks(backend.tensor_parallel, backend.pipeline_parallel)


def check_settings(backend: TorchBackend) -> None:
    """Raise UserError for settings that ranks do not support, or GPUs that are missing."""
    ranks, count = ranks_of(backend), backend.num_devices
    if backend.profile != "none":
        raise UserError(
            f"executor.profile={backend.profile} looks into one device, not {ranks.description}; "
            "leave it out"
        )
    if backend.weights != "auto" and ranks.tensor > 1:
        raise UserError(
            f"executor.weights={backend.weights} has scales of whole rows, which "
            f"executor.tensor_parallel={ranks.tensor} cuts; use executor.pipeline_parallel"
        )
    if backend.uses_gpus and not by_torchrun() and (present := torch.cuda.device_count()) < count:
        raise UserError(
            f"executor.tensor_parallel={ranks.tensor} times executor.pipeline_parallel="
            f"{ranks.pipeline} needs {count} GPUs, and {present} are here; use fewer, several "
            "machines by torchrun, or device=cpu"
        )


def check_model(backend: TorchBackend, spec: ModelSpec) -> None:
    """Raise UserError for a model that does not split evenly, or torchrun's other ranks."""
    ranks_of(backend).check(spec)
    count = backend.num_devices
    if by_torchrun() and (size := int(os.environ["WORLD_SIZE"])) != count:
        raise UserError(
            f"torchrun started {size} ranks, but executor.tensor_parallel times "
            f"executor.pipeline_parallel is {count}; use torchrun --nproc-per-node {count}, or "
            "leave torchrun out"
        )


def part_spec(backend: TorchBackend, spec: ModelSpec) -> ModelSpec:
    return ranks_of(backend).part(0).spec(spec)


def build(backend: TorchBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Driver:
    """Build a warmed-up executor over all ranks. Raises RunError."""
    group = group_of(backend.num_devices)
    try:
        with group.end_if_lost():
            group.call("build", backend, spec, checkpoint, sizes)
            driver = build_part(group, backend, spec, checkpoint, sizes)
        assert isinstance(driver, Driver), "this is rank 0"
        backend.warm_up(driver, sizes)
    except BaseException:
        group.close()  # others may wait for this rank
        raise
    return driver


def build_part(
    group: Group, backend: TorchBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes
) -> RankExecutor:
    """Build the executor of this rank, not warmed up."""
    ranks = ranks_of(backend)
    group.arrange(ranks, backend.rank_timeout)
    device = f"cuda:{group.local_rank}" if backend.uses_gpus else backend.device
    backend = replace(backend, device=device)
    part, place = ranks.part(group.rank), (backend.torch_device, backend.torch_dtype)
    exchange = RankExchange(group, ranks, spec.hidden_size, *place)

    def load(spec: ModelSpec) -> ShardedTransformer:
        return load_part(spec, checkpoint, part, exchange, *place, backend.seed)

    def agree(num_blocks: int) -> int:
        least = torch.tensor([num_blocks])
        with group.exchange():
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group.all)
        return int(least)

    model = backend.load(spec, load, is_whole=False)  # ranks exchange between calls of C++
    assert isinstance(model, ShardedTransformer), "of `load`"
    model.share_sums()
    make = partial(Follower if group.rank else Driver, group=group, exchange=exchange)
    executor = backend.assemble(make, model, sizes, agree)
    assert isinstance(executor, RankExecutor), "of `make`"
    return executor

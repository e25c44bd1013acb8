"""Building on all ranks at once: each does the same with its part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.maker import Maker
from sarathi_lab.executor.torch.ranks.exchange import RankExchange
from sarathi_lab.executor.torch.ranks.executor import Driver, Follower
from sarathi_lab.executor.torch.ranks.group import Group, Kind, Lost, group_of
from sarathi_lab.model.parts import Ranks
from sarathi_lab.model.sharded import ShardedTransformer, load_part
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import Transformer

_driver: Driver | None = None  # whom the other ranks follow


class RankedBackend(Protocol):
    """What ranks need of a backend to build their parts of it."""

    @property
    def ranks(self) -> Ranks: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def rank_timeout(self) -> int: ...

    def on_rank(self, local_rank: int) -> RankedBackend: ...
    def built(
        self, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes, maker: Maker
    ) -> TorchExecutor: ...
    def warm_up(self, executor: TorchExecutor, sizes: Sizes) -> None: ...


class PartMaker(Maker):
    """Makes what one rank has."""

    is_whole = False  # in C++: what ranks exchange is between its calls

    def __init__(self, group: Group, ranks: Ranks) -> None:
        self._group = group
        self._part = ranks.part(group.rank)

    def load(
        self,
        spec: ModelSpec,
        directory: Path | None,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> Transformer:
        self.exchange = RankExchange(self._group, self._part, spec.hidden_size, device, dtype)
        return load_part(spec, directory, self._part, self.exchange, device, dtype, seed)

    def agreed(self, num_blocks: int) -> int:
        least = torch.tensor([num_blocks])
        with self._group.exchanging():
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group.active)
        return int(least)

    def executor(self, model: Transformer, **settings: Any) -> Driver | Follower:
        assert isinstance(model, ShardedTransformer), "it is from `load`"
        model.share_sums()
        make: type[Driver | Follower] = Follower if self._group.rank else Driver
        return make(model, self._group, self.exchange, **settings)


def build(backend: RankedBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes) -> Driver:
    """A warmed-up executor over all ranks, which leave the last one. Raises RunError."""
    global _driver
    if _driver is not None:
        _driver.close()
        _driver = None
    group = group_of(backend.ranks.num_devices)
    group.signs.timeout = backend.rank_timeout
    try:
        with group.signs.expecting(counts_cpu=True):
            group.tell(Kind.BUILD, (backend, spec, checkpoint, sizes))
            made = build_part(backend, spec, checkpoint, sizes, group)
            assert isinstance(made, Driver), "this is rank 0"
            made.listen()
        _driver = made
        backend.warm_up(made, sizes)
    except Lost:
        raise group.broken() from None
    except BaseException:
        group.close()  # others may wait for what never comes
        raise
    return made


def build_part(
    backend: RankedBackend, spec: ModelSpec, checkpoint: Path | None, sizes: Sizes, group: Group
) -> Driver | Follower | None:
    """The executor of this rank, not warmed up; None where there are more ranks than parts."""
    group.arrange(backend.ranks)
    if group.rank >= backend.num_devices:
        return None
    own = backend.on_rank(group.local_rank)
    made = own.built(spec, checkpoint, sizes, PartMaker(group, backend.ranks))
    assert isinstance(made, Driver | Follower)
    return made

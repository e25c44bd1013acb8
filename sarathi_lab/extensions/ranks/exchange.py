"""Exchanges between the ranks of a model within an iteration: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_lab.executor.torch.timeline import HostTimeline, Mark
from sarathi_lab.extensions.ranks.group import Group
from sarathi_lab.extensions.ranks.parts import Part


class RankExchange:
    """Exchanges of `part`, and the marks between which its stage computed an iteration: waiting is
    not work.
    """

    def __init__(
        self, group: Group, part: Part, hidden_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._group = group
        self._before, self._next = (group.rank + step * part.ranks.tensor for step in (-1, 1))
        self._hidden_size, self._device, self._dtype = hidden_size, device, dtype
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._max_sent = 2 * part.ranks.pipeline
        self.timeline = HostTimeline()
        self.began: Mark = 0.0
        self.ended: Mark | None = None

    def begin(self) -> None:
        self.began, self.ended = self.timeline.mark(), None

    def sum(self, tensor: Tensor) -> Tensor:
        with self._group.exchange():
            dist.all_reduce(tensor, group=self._group.stage)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        stage = self._group.stage
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(stage))]
        with self._group.exchange():
            dist.all_gather(parts, tensor, group=stage)
        return torch.stack(parts)

    def receive(self, num_tokens: int) -> Tensor:
        size = (num_tokens, self._hidden_size)
        hidden = torch.empty(size, device=self._device, dtype=self._dtype)
        with self._group.exchange():
            work = dist.irecv(hidden, self._before, group=self._group.all)
            assert work is not None, "this rank is in the group"
            work.wait()
        self.begin()
        return hidden

    def send(self, hidden: Tensor) -> None:
        self.ended = self.timeline.mark()
        with self._group.exchange():
            work = dist.isend(hidden, self._next, group=self._group.all)
            self._sent.append((work, hidden))  # dropped, the message would not arrive
            if len(self._sent) > self._max_sent:
                self._sent.popleft()[0].wait()

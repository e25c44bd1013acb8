"""What the ranks of a model exchange within an iteration: by NCCL on GPUs, by gloo on CPUs."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_lab.executor.torch.ranks.group import HIDDEN, Group
from sarathi_lab.executor.torch.timeline import HostTimeline, Mark
from sarathi_lab.model.parts import Part


class RankExchange:
    """The exchanges of `part`; also when its stage `began` and `ended` an iteration: what is
    waited for is not work.
    """

    def __init__(
        self,
        group: Group,
        part: Part,
        hidden_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._group = group
        self._shared = group.shared
        self._before = group.rank - part.ranks.tensor  # in the stage before, and the next one
        self._next = group.rank + part.ranks.tensor
        self._hidden_size, self._device, self._dtype = hidden_size, device, dtype
        self._expected: deque[tuple[Any, Tensor]] = deque()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._most_sent = 2 * part.ranks.pipeline
        self.timeline = HostTimeline()
        self.began: Mark = 0.0
        self.ended: Mark | None = None

    def begin(self) -> None:
        self.began, self.ended = self.timeline.mark(), None

    def sum(self, tensor: Tensor) -> Tensor:
        with self._group.exchanging():
            dist.all_reduce(tensor, group=self._shared)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._shared))]
        with self._group.exchanging():
            dist.all_gather(found, tensor, group=self._shared)
        return torch.stack(found)

    def expect(self, num_tokens: int) -> None:
        """Let the hidden states of a batch to come arrive while this rank computes others."""
        size = (num_tokens, self._hidden_size)
        hidden = torch.empty(size, device=self._device, dtype=self._dtype)
        with self._group.exchanging():
            self._expected.append((dist.irecv(hidden, self._before, tag=HIDDEN), hidden))

    def receive(self, num_tokens: int) -> Tensor:
        if not self._expected:
            self.expect(num_tokens)
        work, hidden = self._expected.popleft()
        with self._group.exchanging():
            work.wait()
        self.begin()
        return hidden

    def send(self, hidden: Tensor) -> None:
        self.ended = self.timeline.mark()
        with self._group.exchanging():
            self._sent.append((dist.isend(hidden, self._next, tag=HIDDEN), hidden))
            if len(self._sent) > self._most_sent:
                self._sent.popleft()[0].wait()

"""How many threads torch computes on. It has one number for the whole process, while backends may differ in theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Change:
    own: int  # what torch took by itself
    told: int


_last: _Change | None = None


def num_threads(setting: int | None) -> int:
    """How many threads `setting` stands for; None: as many as torch takes when no setting of ours told it otherwise."""
    if setting is not None:
        return setting
    current = torch.get_num_threads()
    return _last.own if _last is not None and _last.told == current else current


def use_threads(setting: int | None) -> None:
    """Let torch compute on `num_threads(setting)` threads from now on."""
    global _last
    own, told = num_threads(None), num_threads(setting)
    if told != torch.get_num_threads():
        torch.set_num_threads(told)
    _last = _Change(own, told)

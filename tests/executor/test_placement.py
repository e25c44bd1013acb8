"""Which cores threads get, on machines that are told as files; and memory that threads touch."""

from __future__ import annotations

import os

import pytest
import torch
from native_library import needs_library

from sarathi_kernels.cpu import library
from sarathi_lab.executor import placement
from sarathi_lab.executor.placement import most_threads, physical_cores, place


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes, each with two fast cores of two hardware threads (0-3, 4-7; siblings are
    neighbours) and a slow one (8, 9); returns how to write another file and who may use what.
    """

    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    for number in range(10):
        first = number // 2 * 2
        siblings = f"{first}-{first + 1}" if number < 8 else number
        write(f"system/cpu/cpu{number}/topology/thread_siblings_list", siblings)
    write("cpu_atom/cpus", "8-9")
    write("system/node/node0/cpulist", "0-3,8")
    write("system/node/node1/cpulist", "4-7,9")
    monkeypatch.setattr(placement, "SYSTEM", tmp_path)
    monkeypatch.setattr(placement, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(placement, "PROCESS_CGROUP", tmp_path / "own")

    def allow(numbers: set[int]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: numbers)

    allow(set(range(10)))
    return write, allow


def test_fast_cores_are_taken_first_one_thread_each_node_by_node(machine):
    assert most_threads() == 4
    assert place(4) == ([0, 2, 4, 6], [0, 0, 1, 1])
    assert place(5) == ([0, 2, 8, 4, 6], [0, 0, 0, 1, 1])


def test_threads_move_where_there_are_cores_to_spare_or_too_few(machine):
    for number in (1, 3, 7):
        assert place(number) == ([-1] * number, [0] * number)


def test_only_cores_that_the_process_may_use_count(machine):
    machine[1]({5, 6, 7, 9})
    assert [core.number for core in physical_cores()] == [5, 6, 9]
    assert place(2) == ([5, 6], [0, 0])  # the only node is the first
    machine[1]({8, 9})
    assert place(2)[0] == [8, 9]  # none is faster


def test_without_intels_list_all_cores_are_fast(machine):
    write, _ = machine
    write("cpu_atom/cpus", "")
    assert most_threads() == 6


@pytest.mark.parametrize(
    ("own", "path"), [("0::/a/b", "cgroup/a/b/cpu.max"), ("0::/", "cgroup/cpu.max")]
)
def test_a_share_of_time_limits_the_threads(machine, own, path):
    write, _ = machine
    write("own", own)
    write(path, "250000 100000")
    assert most_threads() == 2
    write(path, "max 100000")
    assert most_threads() == 4


@needs_library
def test_threads_of_several_nodes_do_each_task_once_and_copy_all():
    library.start(3)
    library.place([-1] * 3, [0, 1, 1])
    try:
        for size in (1, 4095, 50_000):
            source = torch.randint(0, 99, (size,), dtype=torch.uint8)
            copied = library.copy_by_thread(torch.zeros_like(source), source)
            assert torch.equal(copied, source)
        logits = torch.randn(97, 5)
        assert torch.equal(library.greedy(logits, -1), logits.argmax(dim=-1))
    finally:
        library.start(2)
    with pytest.raises(ValueError, match="do not ascend from 0"):
        library.place([0, 1], [1, 0])


@needs_library
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux binds threads")
def test_threads_are_bound_to_their_cores_and_the_caller_only_while_it_computes():
    allowed = os.sched_getaffinity(0)
    core, before = min(allowed), set(os.listdir("/proc/self/task"))
    library.start(4)
    library.place([core] * 4, [0] * 4)
    try:
        library.greedy(torch.randn(8, 5), -1)
        own = set(os.listdir("/proc/self/task")) - before
        assert sum(os.sched_getaffinity(int(thread)) == {core} for thread in own) >= 3
        assert os.sched_getaffinity(0) == allowed
    finally:
        library.start(2)

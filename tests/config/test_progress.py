"""What is said of work while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sarathi_lab.config import console
from sarathi_lab.config.console import Progress, lines_of, progress_of


@contextmanager
def call_once(function, seconds=0.0):
    yield
    function()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Seconds that pass only when a test says so."""
    own = SimpleNamespace(now=100.0, monotonic=lambda: own.now)
    monkeypatch.setattr(console, "time", own)
    monkeypatch.setattr(console, "repeated", call_once)
    return own


def look(clock: SimpleNamespace, capsys, seconds: float) -> list[str]:
    """The lines that are printed in the next `seconds`, by a look each second."""
    for _ in range(round(seconds)):
        clock.now += 1
        console.print_if_due()
    return capsys.readouterr().out.splitlines()


def test_lines_come_at_least_every_10_s_with_what_is_done_and_left(clock, capsys):
    with progress_of("serving", 4000, "tokens") as advance:
        assert look(clock, capsys, 8) == []  # a short phase says nothing
        assert look(clock, capsys, 2) == ["  serving: 0 of 4,000 tokens, 9 s"]
        advance(1000)
        (line,) = look(clock, capsys, 10)
        assert line == "  serving: 1,000 of 4,000 tokens, 18 s, about 54 s left"
        advance(4000)  # more than was expected: nobody knows how much is left
        assert look(clock, capsys, 10) == ["  serving: 4,000 of 4,000 tokens, 27 s"]
    assert look(clock, capsys, 60) == []


def test_the_innermost_phase_speaks_and_short_ones_do_not_put_off_the_next_line(clock, capsys):
    lines = []
    with lines_of(Progress("a run")):
        for number in range(5):
            with progress_of(f"part {number}", 2):
                lines += look(clock, capsys, 4)
            lines += look(clock, capsys, 2)
    assert lines == ["  part 1: 0 of 2, 3 s", "  a run, 18 s", "  part 4: 0 of 2, 3 s"]


def test_a_thread_looks_while_a_step_takes_long(monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(console, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(console, "print_if_due", looked.set)
    with lines_of(Progress("a run")):
        assert looked.wait(60)


def test_a_terminal_gets_a_bar_and_no_lines(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with lines_of(Progress("a run")), progress_of("serving", 40, "tokens") as advance:
        clock.now += 60
        advance(10)
        console.print_if_due()
    out = capsys.readouterr().out
    assert "10/40" in out
    assert "━" in out
    assert "of 40" not in out

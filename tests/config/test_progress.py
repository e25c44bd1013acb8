"""What is said of work while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time

import pytest

from sarathi_lab.api import recorded
from sarathi_lab.config import console
from sarathi_lab.config.console import progress_of


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.02)


def test_lines_come_while_a_step_takes_long_with_what_is_done_and_left(capsys):
    with progress_of("a run"), progress_of("serving", 4000, "tokens") as advance:
        advance(1000)
        time.sleep(0.2)
        lines = capsys.readouterr().out.splitlines()
        assert {"  serving: 1,000 of 4,000 tokens, 1 s, about 1 s left"} == {*lines}
        advance(0, 8000)  # as it turns out
        time.sleep(0.2)
        text = "  serving: 1,000 of 8,000 tokens, 1 s, about "
        assert any(one.startswith(text) for one in capsys.readouterr().out.splitlines())
        advance(8000)  # more than was expected: nobody knows how much is left
        time.sleep(0.2)
    assert "  serving: 8,000 of 8,000 tokens, 1 s" in capsys.readouterr().out.splitlines()


def test_a_line_without_a_total_comes_while_nothing_else_is_in_progress(capsys):
    with progress_of("a run"):
        time.sleep(0.2)
        with progress_of("serving", 40, "tokens"):
            pass
        assert {"  a run, 1 s"} == {*capsys.readouterr().out.splitlines()}


def test_a_terminal_gets_a_bar_and_no_lines(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(console, "BAR_SECONDS", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    with progress_of("a run"), progress_of("serving", 40, "tokens") as advance:
        advance(10)
        time.sleep(0.2)
    out = capsys.readouterr().out
    assert "25%" in out
    assert "━" in out
    assert "of 40" not in out


def test_judging_all_claims_from_python_shows_how_many_are_judged(capsys, monkeypatch):
    def judge(claims, advance):
        advance(len(claims) - 1)
        time.sleep(0.1)
        return []

    monkeypatch.setattr(recorded.judged, "verdicts", judge)
    monkeypatch.setattr(recorded.judged, "load_claims", lambda: list("abcd"))
    recorded._verdicts.__wrapped__()
    assert "  judging: 3 of 4 claims, 1 s, about 1 s left" in capsys.readouterr().out.splitlines()

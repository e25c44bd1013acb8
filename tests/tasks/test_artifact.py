"""What claims need, run in turn with what it takes, and ARTIFACT.md, which says so."""

from __future__ import annotations

import re
import sys

import pytest

from sarathi_lab.__main__ import main
from sarathi_lab.config.command_line import read_command_line
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.tasks import artifact
from sarathi_lab.tasks.claims import load_costs


@pytest.mark.parametrize("job", [("fig08", "simulated"), ("token_budget", "measured")])
def test_its_commands_are_accepted(job, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    read_command_line(artifact.command(job, tmp_path)).check()


def test_what_failed_is_run_again_and_what_finished_is_not(tmp_path, monkeypatch, capsys):
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *simulated*) exit 3; esac\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    args = ["artifact", "--only", "decode_tenfold", "--results", str(tmp_path / "found")]
    for _ in range(2):
        assert main(args) == 1
        assert "failed: fig08, simulated" in capsys.readouterr().out
    started = log.read_text().splitlines()
    assert [re.findall("executor=simulated|experiment=fig08", one)[::-1] for one in started] == [
        ["executor=simulated", "experiment=fig08"],
        ["experiment=fig08"],
        ["executor=simulated", "experiment=fig08"],
    ]
    costs = load_costs(tmp_path / "found" / "costs.csv")
    assert list(costs.index) == [("fig08", "measured")]
    assert costs.memory.iloc[0] > 0
    assert "decode_tenfold" in (tmp_path / "found" / "verdicts.csv").read_text()


def test_an_unknown_claim_is_one_line_and_code_2(capsys):
    assert main(["artifact", "--only", "fig99"]) == 2
    assert "--only=fig99 is unknown (did you mean fig13?); use one of " in capsys.readouterr().err


def test_the_image_is_built_of_what_is_there():
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert all((REPOSITORY / name).exists() for name in copied)
    assert "FROM python:3.11-slim" in lines
    hosts = set(re.findall(r"https?://([^/\s]+)", "\n".join(lines)))
    assert hosts == {"download.pytorch.org"}

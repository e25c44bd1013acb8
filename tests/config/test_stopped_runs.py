"""A run that the device stops leaves its finished part, and the next one of the sweep begins."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from commands import SMALL

from sarathi_lab.config.errors import RunError
from sarathi_lab.model.operations import Operations
from sarathi_lab.run import main


@pytest.fixture
def refusing(monkeypatch):
    """Let the device's memory end in attention over 80 tokens, both whole prompts at once, which
    only the baseline runs, and after six batches of 16, four of them the warm-up of `chunk=16`.
    """
    seen = 0
    attend = Operations.attend

    def refuse(self, query, inputs, keys, values):
        nonlocal seen
        seen += len(query) == 16
        if len(query) == 80 or (len(query) == 16 and seen > 6):
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
            )
        return attend(self, query, inputs, keys, values)

    monkeypatch.setattr(Operations, "attend", refuse)


def test_the_sweep_goes_on_runs_a_stopped_baseline_no_second_time_and_ends_with_2(
    tmp_path, capfd, refusing
):
    args = [*SMALL, "executor.kernels=torch", "baselines=[request_level]", "repeat=1", "-m", "-v"]
    args += [f"output={tmp_path}", f"hydra.sweep.dir={tmp_path}/s", "chunk=16,24,32"]
    assert main(args) == 2
    stopped, *finished = (tmp_path / "s" / number for number in "012")
    assert all((run / "run.json").is_file() for run in finished)
    assert not (stopped / "run.json").exists()
    error = json.loads((stopped / "failed.json").read_text())["error"]
    assert "4096 bytes more were wanted" in error
    rows = [len(pd.read_parquet(run / "iterations.parquet")) for run in (stopped, finished[0])]
    assert 0 < rows[0] < rows[1]
    assert list((tmp_path / "s" / "baselines").glob("request_level-*/failed.json"))
    out, err = capfd.readouterr()
    assert "[1/3] chunk=16 failed: out of memory during an iteration of" in out
    assert out.count("\nbaseline request_level") == 1
    assert err.count("error:") == 1
    assert "error: 3 runs stopped, the first as: " in err


def test_other_errors_are_not_mistaken_for_memory():
    from sarathi_lab.executor.device import explain_device_errors

    with (
        pytest.raises(RuntimeError, match="something else") as caught,
        explain_device_errors("x"),
    ):
        raise RuntimeError("something else")
    assert not isinstance(caught.value, RunError)

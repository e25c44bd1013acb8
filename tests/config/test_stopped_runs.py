"""A run that the device stops leaves its finished part, and the next one of the sweep begins."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from commands import SMALL

from sarathi_lab.config.errors import RunError
from sarathi_lab.model.operations import Operations
from sarathi_lab.run import main

ON_TORCH = [*SMALL, "executor.kernels=torch"]


@pytest.fixture
def refusing(monkeypatch):
    """Let the device's memory end in the n-th attention of `chunk=16`, whose batches carry 16
    tokens.
    """

    def install(of_tokens: int, after: int) -> None:
        seen = 0
        attend = Operations.attend

        def refuse(self, query, inputs, keys, values):
            nonlocal seen
            seen += len(query) == of_tokens
            if len(query) == of_tokens and seen > after:
                raise RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
                )
            return attend(self, query, inputs, keys, values)

        monkeypatch.setattr(Operations, "attend", refuse)

    return install


def test_the_sweep_goes_on_and_ends_with_2(tmp_path, capfd, refusing):
    refusing(of_tokens=16, after=6)  # four in the warm-up
    args = [
        *ON_TORCH,
        "baselines=[]",
        f"output={tmp_path}",
        f"hydra.sweep.dir={tmp_path}/s",
        "chunk=16,24",
        "-m",
    ]
    assert main(args) == 2
    stopped, finished = tmp_path / "s" / "0", tmp_path / "s" / "1"
    assert (finished / "run.json").is_file()
    assert not (stopped / "run.json").exists()
    assert (
        "4096 bytes more were wanted" in json.loads((stopped / "failed.json").read_text())["error"]
    )
    assert (
        0
        < len(pd.read_parquet(stopped / "iterations.parquet"))
        < len(pd.read_parquet(finished / "iterations.parquet"))
    )
    out, err = capfd.readouterr()
    assert "stopped: out of memory during an iteration of" in out
    assert err.count("error:") == 1


def test_a_stopped_baseline_leaves_the_run(tmp_path, capfd, refusing):
    refusing(of_tokens=80, after=0)  # both whole prompts at once, which only the baseline runs
    args = [
        *ON_TORCH,
        "baselines=[request_level]",
        f"output={tmp_path}",
        f"hydra.run.dir={tmp_path}/r",
        "chunk=16",
    ]
    assert main(args) == 2
    assert (tmp_path / "r" / "run.json").is_file()
    assert list((tmp_path / "r" / "baselines").glob("request_level-*-failed/failed.json"))
    assert "error: baseline request_level: out of memory" in capfd.readouterr().err


def test_a_baseline_that_stopped_is_not_run_again_in_its_sweep(tmp_path, capfd, refusing):
    refusing(of_tokens=80, after=0)
    args = [
        *ON_TORCH,
        "baselines=[request_level]",
        f"output={tmp_path}",
        f"hydra.sweep.dir={tmp_path}/s",
        "chunk=16,24",
        "repeat=1",
    ]
    assert main([*args, "-m"]) == 2
    out, err = capfd.readouterr()
    assert out.count("\nbaseline request_level") == 1
    assert "error: 2 runs stopped, the first as: baseline request_level: out of memory" in err
    assert (tmp_path / "s" / "1" / "run.json").is_file()


def test_other_errors_are_not_mistaken_for_memory(refusing, monkeypatch):
    from sarathi_lab.executor.torch.device_errors import explain_device_errors

    with (
        pytest.raises(RuntimeError, match="something else") as caught,
        explain_device_errors(None, "x"),
    ):
        raise RuntimeError("something else")
    assert not isinstance(caught.value, RunError)

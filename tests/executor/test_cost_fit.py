"""The constants of the A6000's hardware file are what `experiments/lab/cost_model/fit.py` finds in the
paper's figures.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS

NAMES = (
    "matmul_efficiency",
    "memory_efficiency",
    "kernel_launch",
    "causal_efficiency",
    "kv_efficiency",
)
NAMES += ("attention_efficiency", "attention_launch", "iteration_overhead")


def fit(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(EXPERIMENTS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXPERIMENTS / "lab" / "cost_model" / "fit.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_recorded_constants_are_the_fitted_ones():
    done = fit()
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    fitted = {name: float(words[words.index(name) + 1]) for name in NAMES}
    assert fitted == pytest.approx(
        {name: getattr(load_option("hardware", "a6000"), name) for name in NAMES}, rel=0.02
    )


def test_a_table_that_is_not_there_is_named():
    done = fit("--gemm", "nowhere.csv")
    assert done.returncode == 2
    assert "nowhere.csv" in done.stderr
    assert "Traceback" not in done.stderr

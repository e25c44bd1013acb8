"""Looking into iterations: every operation is named and timed, and watching is told from
running.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest

from sarathi_lab.run import main

SMALL = [
    "model=tiny",
    "tracking=none",
    "seq_len=48",
    "pd_ratio=5",
    "batch=2",
    "workload.num_requests=3",
    "device=cpu",
]
OPERATIONS = {
    "embedding",
    "elementwise",
    "qkv_proj",
    "rotary",
    "attention",
    "out_proj",
    "ffn",
    "logits",
}


def run(tmp_path, *args: str):
    assert (
        main(
            [
                *SMALL,
                "baselines=[]",
                f"output={tmp_path}",
                f"hydra.run.dir={tmp_path}/r",
                "chunk=16",
                *args,
            ]
        )
        == 0
    )
    return tmp_path / "r"


def test_operations_are_timed_in_every_iteration(tmp_path):
    folder = run(tmp_path, "executor.profile=operations")
    operations = pd.read_parquet(folder / "operations.parquet")
    iterations = pd.read_parquet(folder / "iterations.parquet")
    assert set(operations.operation) == OPERATIONS
    assert set(operations.iteration) == set(iterations.iteration)
    assert (operations.seconds > 0).all()
    assert (
        operations.groupby("iteration").seconds.sum() < iterations.set_index("iteration").busy
    ).all()
    assert json.loads((folder / "summary.json").read_text())["profiling_slowdown"] > 0


def test_a_trace_names_the_operations(tmp_path):
    folder = run(tmp_path, "executor.profile=trace")
    events = json.loads((folder / "torch_trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= OPERATIONS
    assert "profiling_slowdown" not in json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_no_profile_unless_asked(tmp_path):
    folder = run(tmp_path)
    assert not (folder / "operations.parquet").exists()
    assert not (folder / "torch_trace.json").exists()


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "executor.profile=nvtx",
            "executor.profile=nvtx names ranges of a GPU, the device is a CPU",
        ),
        (
            "executor.profile=all",
            "executor.profile=all is unknown; use one of none, nvtx, operations, trace",
        ),
        (
            "executor.hybrid=both",
            "executor.hybrid=both is unknown; use one of series, streams, unified, fused",
        ),
        (
            "executor.kernels=cuda",
            "executor.kernels=cuda is unknown; use one of auto, triton, native, torch",
        ),
        (
            "executor.overlap=false",
            "executor.overlap=False is for Triton's kernels, which do not run here (device cpu",
        ),
        ("executor.cuda_graphs=false", "executor.cuda_graphs=False is for Triton's kernels"),
        ("executor.hybrid=fused", "executor.hybrid=fused is for Triton's kernels"),
        ("executor.overlap=2", "executor.overlap=2 is neither true nor false"),
        ("executor.cuda_graphs=maybe", "executor.cuda_graphs=maybe is neither true nor false"),
    ],
)
def test_settings_that_cannot_be(tmp_path, capsys, setting, line):
    assert main([*SMALL, f"output={tmp_path}", setting]) == 2
    assert line in capsys.readouterr().err

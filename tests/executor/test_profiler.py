"""Looking into iterations: every operation is named and timed, and watching is told from
running.
"""

from __future__ import annotations

import pandas as pd
import pytest
from commands import SMALL
from native_library import needs_library

from sarathi_lab.config.errors import UserError
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.run import main

OPERATIONS = {
    "embedding",
    "elementwise",
    "qkv_proj",
    "rotary",
    "attention",
    "out_proj",
    "ffn",
    "logits",
    "sampling",
}
IN_CPP = OPERATIONS - {"attention", "ffn", "logits"} | {
    *("attention_prefill", "attention_decode", "ffn_up", "ffn_down", "lm_head", "waiting")
}
UNBOUNDED = {"embedding", "rotary", "sampling", "waiting"}  # without a roofline of their own


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


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [("torch", OPERATIONS), pytest.param("native", IN_CPP, marks=needs_library)],
)
def test_operations_are_timed_in_every_iteration(tmp_path, kernels, expected):
    folder = run(tmp_path, "executor.profile=operations", f"executor.kernels={kernels}")
    operations = pd.read_parquet(folder / "operations.parquet")
    iterations = pd.read_parquet(folder / "iterations.parquet")
    assert set(operations.operation) == expected
    assert set(operations.iteration) == set(iterations.iteration)
    assert (operations.seconds > 0).all()
    assert (
        operations.groupby("iteration").seconds.sum() < iterations.set_index("iteration").busy
    ).all()
    table = pd.read_csv(folder / "operations.csv").set_index("operation")
    assert set(table.index) == expected | {"others"}
    assert table.seconds.sum() == pytest.approx(iterations.busy.sum())
    assert (table.share > 0).all()
    bound = table.time_over_roofline.dropna()
    assert set(bound.index) == expected - UNBOUNDED
    assert (bound > 0).all()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"profile": "all"}, "executor.profile=all is unknown; use one of none, operations"),
        (
            {"overlap": False},
            "executor.overlap=False is for Triton's kernels, which do not run here (device cpu",
        ),
        ({"hybrid": "fused"}, "executor.hybrid=fused is for Triton's kernels"),
        ({"overlap": 2}, "executor.overlap=2 is neither true nor false"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings, line):
    with pytest.raises(UserError) as caught:
        TorchBackend(device="cpu", **settings)
    assert str(caught.value).startswith(line)

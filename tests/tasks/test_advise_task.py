"""The task `advise` from the command line: what it predicts, prints and writes, and the mistakes
that it refuses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import requests_of
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.analytic import AnalyticCostModel
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.experiment.advisor import Prediction, advise
from sarathi_lab.experiment.chunking_loss import chunking_loss
from sarathi_lab.experiment.server_flags import flags
from sarathi_lab.policy import SarathiServe
from sarathi_lab.run import main
from sarathi_lab.tasks.advise import flags_table

COST = AnalyticCostModel(load_option("model", "13b"), load_option("hardware", "a6000"), 2)
LOAD = ["task=advise", "workload.num_requests=12", "batch=6"]
SMALL = [*LOAD, "tracking=none"]
TABLES = ("advice", "loss", "flags")


def advised(tmp_path: Path, *args: str) -> dict[str, pd.DataFrame]:
    """The tables of one run with `args`."""
    assert main([*SMALL, *args, f"output={tmp_path}"]) == 0
    (run,) = {path.parent for path in tmp_path.rglob("advice.csv")}
    return {name: pd.read_csv(run / f"{name}.csv") for name in TABLES}


def test_the_tables_are_the_advice_the_loss_and_the_flags(tmp_path, capsys):
    tables = advised(tmp_path)
    advice = advise(Prediction(requests_of(*[(992, 32)] * 12), 6, COST.iteration_time), 128)
    pd.testing.assert_frame_equal(tables["advice"], advice.table)
    for row in tables["loss"].itertuples():
        split = chunking_loss(992, row.chunk, COST.operation_times)
        assert (row.attention, row.matmul, row.fixed) == pytest.approx(
            (split.attention, split.matmul, split.fixed)
        )
        assert row.loss == pytest.approx(split.total / split.whole)
    assert list(tables["loss"].chunk) == list(advice.table.chunk)
    rows = flags(advice.chunk, batch_size=6, max_model_len=1024)
    pd.testing.assert_frame_equal(tables["flags"], flags_table(rows))
    text = capsys.readouterr().out
    assert f"chunk=auto is {advice.chunk}" in text
    assert "a prompt of 992 tokens takes" in text
    assert all(f"    {' '.join(row.flags)}\n" in text for row in rows)
    (config,) = tmp_path.rglob("[!.]*/config.yaml")
    assert OmegaConf.load(config).policy.chunk == advice.chunk


def test_every_setting_that_it_reads_has_an_effect(tmp_path):
    plain = advised(tmp_path / "plain")
    others = (
        "hardware=a100",
        "model=7b",
        "policy=sarathi_serve",
        "executor.cost_model=profiled",
        "pd_ratio=10",
        "seq_len=512",
        "max_model_len=2000",
        "cache.num_blocks=100",
        "task.chunks=[256,1024]",
        "task.page_size=32",
        "baselines=[orca]",
    )
    for i, other in enumerate(others):
        tables = advised(tmp_path / str(i), other)
        assert any(not tables[name].equals(plain[name]) for name in TABLES), other


def test_policy_and_cost_model_are_those_of_the_command_line(tmp_path):
    tables = advised(
        tmp_path, "policy=sarathi_serve", "executor.cost_model=profiled", "task.chunks=[512,256]"
    )
    profiled = make_cost_model("profiled", COST.spec, COST.hardware, 2)
    server = {"max_model_len": 1024, "num_blocks": 388, "block_size": 16}
    prediction = Prediction(requests_of(*[(992, 32)] * 12), 6, profiled.iteration_time, **server)
    advice = advise(prediction, 128, policy=SarathiServe, chunks=[256, 512])
    pd.testing.assert_frame_equal(tables["advice"], advice.table)


def test_without_baselines_a_cache_too_small_for_them_will_do(tmp_path):
    small = ("policy=sarathi_serve", "max_model_len=4096", "cache.num_blocks=100")
    assert not [
        name for name in advised(tmp_path, *small, "baselines=[]")["advice"] if "_vs_" in name
    ]


def test_a_sweep_advises_every_job(tmp_path):
    assert (
        main([*SMALL, "hardware=a6000,a100", "task.chunks=[256]", "-m", f"output={tmp_path}"]) == 0
    )
    assert len(list(tmp_path.rglob("flags.csv"))) == 2


def test_tables_and_the_chosen_chunk_go_to_the_tracker(tmp_path):
    args = [*LOAD, "task.chunks=[256]", f"output={tmp_path}"]
    assert main(args) == 0
    (run,) = tmp_path.rglob("offline-run-*/*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    shown = json.loads(
        subprocess.run(
            [wandb, "leet", "inspect", "--summary", "--json", run], capture_output=True, check=True
        ).stdout
    )
    assert shown["summary"]["chunk"] == 256
    staged = {path.read_bytes() for path in tmp_path.rglob("wandb/data/**/*") if path.is_file()}
    assert {
        path.read_bytes() for name in TABLES for path in tmp_path.rglob(f"{name}.csv")
    } <= staged


MISTAKES = [
    (["policy=orca"], ["policy=orca has no chunk", "policy=sarathi"]),
    (["executor=torch", "model=tiny"], ["executor=torch has no cost model", "executor=simulated"]),
    (["chunk=300"], ["chunk=300 has no effect", "does not read chunk", "task.chunks"]),
    (["policy.chunk=300"], ["policy.chunk=300 has no effect", "task.chunks"]),
    (["trace=true"], ["trace=true has no effect"]),
    (["device=cpu"], ["device=cpu has no effect"]),
    (["task.chunks=[]"], ["task.chunks=[] names no chunk"]),
    (["task.chunks=256"], ["task.chunks=256 names no chunk", "[256,512]"]),
    (["task.chunks=[256,x]"], ["task.chunks=x is not a whole number"]),
    (["task.chunks=[4,256]"], ["chunk=4 is smaller than the 5 decodes", "chunk>=6"]),
    (["task.page_size=0"], ["task.page_size=0 is below 1"]),
    (["task.page_size=4096"], ["max_model_len=1024 is less than one page of 4096"]),
    (["task.pages=2"], ["task.pages is not a parameter of Advise", "did you mean task.page_size"]),
    (["baselines=[sarathi]"], ["sarathi is not predicted", "request_level, orca"]),
    (["cache.num_blocks=3"], ["can never fit the KV cache"]),
    (["model=33b"], ["model 33b needs 64.6 GB"]),
]


@pytest.mark.parametrize(("args", "words"), MISTAKES, ids=lambda value: " ".join(value))
def test_what_cannot_be_advised_is_one_line(args, words, tmp_path, capsys):
    assert main([*SMALL, *args, f"output={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()

"""The task `advise` from the command line: what it predicts, prints and writes, and the mistakes
that it refuses.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from composed import refusal_of, run
from helpers import prediction_of, requests_of
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.experiment.advisor import advise
from sarathi_lab.experiment.clock import LossSplit, times_by
from sarathi_lab.extensions.advice.server_flags import server_flags
from sarathi_lab.run import main

COST = make_cost_model("analytic", load_option("model", "13b"), load_option("hardware", "a6000"), 2)
SMALL = ["task=advise", "workload.num_requests=12", "batch=6", "tracking=none"]
TABLES = ("advice", "loss", "flags")


def advised(folder: Path, *args: str) -> dict[str, pd.DataFrame]:
    """The tables of one run with `args`, of few chunks."""
    return dict(run(folder, *SMALL, "task.chunks=[128,512]", *args).tables)


def test_the_tables_are_the_advice_the_loss_and_the_flags(tmp_path, capsys):
    assert main([*SMALL, f"output={tmp_path}"]) == 0
    tables = {name: pd.read_csv(next(tmp_path.rglob(f"{name}.csv"))) for name in TABLES}
    advice = advise(prediction_of(requests_of(*[(992, 32)] * 12), 6, COST.iteration_time), 128)
    pd.testing.assert_frame_equal(tables["advice"], advice.table)
    for row in tables["loss"].itertuples():
        split = LossSplit.of(times_by(COST.operation_times), 992, row.chunk)
        assert (row.attention, row.matmul, row.fixed) == pytest.approx(
            (split.attention, split.matmul, split.fixed)
        )
        assert row.loss == pytest.approx(split.total / split.whole)
    assert list(tables["loss"].chunk) == list(advice.table.chunk)
    rows = server_flags(advice.chunk, batch_size=6, max_model_len=1024)
    pd.testing.assert_frame_equal(tables["flags"], rows)
    text = capsys.readouterr().out
    assert f"chunk=auto is {advice.chunk}" in text
    assert "a prompt of 992 tokens takes" in text
    assert all(f"    {flags}\n" in text for flags in rows["flags"])
    (config,) = tmp_path.rglob("[!.]*/config.yaml")
    assert OmegaConf.load(config).policy.chunk == advice.chunk


def test_where_chunks_do_not_pay_it_says_so_first_and_no_flag_cuts_a_prompt(tmp_path, capsys):
    assert main([*SMALL, "hardware=h100", "model=llama3-8b", f"output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert text.index("do not chunk here: ") < text.index("the best chunk, chunk=auto, is 512")
    assert "as settings of servers that leave prompts whole, where they have any\n" in text
    assert "--no-enable-chunked-prefill --max-num-batched-tokens 1029 " in text  # 1024 + 5 decodes
    assert not re.search(r"(?<!no)[-_]enable[-_](chunked[-_]prefill|mixed-chunk)", text)


def test_every_setting_that_it_reads_has_an_effect(tmp_path):
    plain = advised(tmp_path / "plain")
    others = (
        *("hardware=a100", "policy=sarathi_serve", "executor.cost_model=profiled", "slo=strict"),
        *("max_model_len=2000", "cache.num_blocks=100", "task.page_size=32", "baselines=[orca]"),
        "host=vllm_0_19",
    )
    for i, other in enumerate(others):
        tables = advised(tmp_path / str(i), other)
        assert any(not tables[name].equals(plain[name]) for name in TABLES), other


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        # 40 layers launched eagerly in 5 ms each take longer than their products.
        ("0.005", "captured to 512 tokens, 64 now, the best chunk is 512"),
        ("0.0001", "captured beyond the 64 tokens of now gain nothing"),
        (None, ""),
    ],
)
def test_larger_graphs_are_advised_where_launches_are_known_and_outlast_the_device(
    launch, words, tmp_path
):
    graphs = "host.graphs.mode=full_and_piecewise", "host.graphs.largest=64"
    host = ["host=vllm_0_19", *([*graphs, f"host.graphs.layer_launch={launch}"] if launch else ())]
    shown = run(tmp_path, *SMALL, "task.chunks=[128,512]", *host).shown
    lines = [one for one in shown if isinstance(one, str) and "CUDA graphs" in one]
    assert len(lines) == bool(launch)
    assert words in "".join(lines)
    flags = "vLLM: --max-num-batched-tokens 512 --max-cudagraph-capture-size 512"
    assert (flags in "".join(lines)) == (launch == "0.005")


def test_a_mixture_is_advised_larger_chunks(tmp_path):
    long = ("hardware=h100", "seq_len=8192", "pd_ratio=32", "task.chunks=[512,4096]")
    found = {
        model: run(tmp_path / model, *SMALL, *long, f"model={model}")
        for model in ("llama3-8b", "qwen3-30b-a3b")
    }
    dense, mixture = (result.tables["loss"].set_index("chunk") for result in found.values())
    assert [result.summary["chunk"] for result in found.values()] == [512, 4096]
    assert (dense.experts == 0).all()
    assert mixture.experts[512] > 0.5 * mixture.whole[512]


def test_the_predictions_of_the_chosen_chunk_are_the_summary(tmp_path):
    result = run(tmp_path, *SMALL, "task.chunks=[256,1024]")
    (row,) = result.tables["advice"].query(f"chunk == {result.summary['chunk']}").to_dict("records")
    assert row["is_as_good"]
    predicted = {name: row[name] for name in row if not name.startswith("is_")}
    assert result.summary == {**predicted, "chunking_pays": True}
    assert list(result.tables) == list(TABLES)
    assert result.config["policy"]["chunk"] == result.summary["chunk"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["policy=orca"], ["policy=orca has no chunk", "policy=sarathi"]),
        (["executor=torch", "model=tiny"], ["executor=torch has no cost model", "use executor="]),
        (["policy.chunk=300"], ["policy.chunk=300 has no effect", "task.chunks"]),
        (["task.chunks=[4,256]"], ["chunk=4 is smaller than the 5 decodes", "chunk>=6"]),
        (["task.page_size=4096"], ["max_model_len=1024 is less than one page of 4096"]),
        (["baselines=[sarathi]"], ["sarathi is not predicted", "request_level, orca"]),
        (["cache.num_blocks=3"], ["can never fit the KV cache"]),
        (["model=33b"], ["model 33b needs 64.6 GB"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_advised_is_one_line(args, words):
    said = refusal_of(*SMALL, *args)
    assert all(word in said for word in words), said

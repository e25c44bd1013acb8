"""Clusters from settings: what a run of one leaves, and what is refused."""

from __future__ import annotations

import pandas as pd
import pytest
from plans import plan_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.load import load_summary
from sarathi_lab.run import main

COMMON = ("executor=simulated", "hardware=h100", "model=llama3-8b", "tracking=none", "baselines=[]")
SMALL = ("batch=4", "pd_ratio=7", "seq_len=512", "workload.num_requests=12", "chunk=64")


def test_a_run_leaves_what_each_engine_did_and_what_moved(tmp_path):
    cluster = ("cluster=disaggregated", "cluster.prefill=2", "cluster.prefill_chunk=512")
    places = (f"output={tmp_path}", f"hydra.run.dir={tmp_path}/run")
    assert main([*COMMON, *SMALL, *cluster, *places, "slo=mlperf-llama3-8b"]) == 0
    folder = tmp_path / "run"
    iterations, requests, moves = (
        pd.read_parquet(folder / f"{name}.parquet")
        for name in ("iterations", "requests", "transfers")
    )
    summary = load_summary(folder)
    assert set(iterations.instance) == {0, 1, 2}
    assert iterations[iterations.instance == 2].num_prefill_tokens.sum() == 0
    assert iterations[iterations.instance < 2].num_prefill_tokens.max() == 512 - 64
    assert sorted(moves.request_id) == list(requests.request_id)
    assert summary["transfer_bytes"] == moves.num_bytes.sum() == 131072 * requests.prompt_len.sum()
    assert summary["num_devices"] == 3
    for rate in ("throughput", "goodput"):
        assert summary[f"{rate}_per_device"] == pytest.approx(summary[rate] / 3)
    busy = iterations.busy.sum() / (3 * iterations.end.max())
    assert summary["instance_idle_fraction"] == pytest.approx(1 - busy)


@pytest.mark.parametrize(
    ("policy", "arguments", "words"),
    [
        ("sarathi", ["cluster=replicas", "executor.pipeline_parallel=2"], "are no pipelines"),
        ("sarathi", ["cluster=replicas", "cluster.router=prefix_aware"], "add cache.prefix=true"),
        ("sarathi", ["cluster=disaggregated", "host=vllm_0_19"], "schedules ahead"),
        ("orca", ["cluster=disaggregated", "cluster.prefill_chunk=64"], "never cuts prompts"),
        ("sarathi", ["cluster=replicas", "cluster.num=0"], "use a number of engines such as 2"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(policy, arguments, words):
    with pytest.raises(UserError, match=words) as refused:
        plan_of(policy, *COMMON, *SMALL, *arguments)
    assert "\n" not in str(refused.value)

"""The same seeds give the same schedules and simulated numbers as when `data/schedules.json` was
recorded.

Run as a program (with tests/support on the path) it records them anew: only after a change that is
meant to change them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from plans import plan_of, serve_plan

from sarathi_lab.results.load import load_summary
from sarathi_lab.results.metrics import add_costs, summarise
from sarathi_lab.results.serving_metrics import latency
from sarathi_lab.run import main
from sarathi_lab.tasks.plan import Plan

RECORDED = Path(__file__).parents[1] / "data" / "schedules.json"
COMMON = ("executor=simulated", "tracking=none", "baselines=[]", "-m")
SMALL = ("pd_ratio=7", "seq_len=512", "batch=4", "chunk=256", "workload.num_requests=10")
TIGHT = (
    "workload=uniform",
    "workload.arrivals=poisson",
    "workload.rate=20",
    "pd_ratio=1",
    "workload.num_requests=24",
    "batch=8",
    "chunk=256",
    "cache.num_blocks=100",
)
TWO_CALLS = ("hardware=a100", "hardware.hybrid_call=false")  # of attention, as recorded
PIPELINE = (*TWO_CALLS, "executor.pipeline_parallel=4", "workload=zipf", *SMALL[2:])
POLICIES = (
    "ascend,ascend_dynamic,ascend_v0_9,chunked_only,fastdeploy,hybrid_only,lightllm,llama_cpp,lmdeploy,"
    "lmdeploy_pytorch,nano_vllm,openvino,orca,p_pas,prefill_first,request_level,sarathi,sarathi_serve,"
    "sarathi_serve_dynamic,sglang,splitfuse,tgi,transformers_fifo,transformers_prefill_first,trtllm,"
    "vllm_v0_chunked,vllm_v1"
)
SWEEPS = {
    "every policy": (f"policy={POLICIES}", *SMALL),
    "short of cache": (
        "policy=sarathi_serve,vllm_v1,prefill_first,tgi",
        *TIGHT,
    ),
    "priorities": (
        "queue_order=priority,shortest",
        "workload.priorities=[0,1]",
        "policy=sarathi_serve",
        *TIGHT,
    ),
    "prefixes": (
        "policy=sarathi_serve,sglang",
        "cache.prefix=true",
        "workload.shared_prefix_len=100",
        "workload.num_prefixes=3",
        *SMALL,
    ),
    "pipeline": (
        "policy=orca,sarathi",
        *PIPELINE,
    ),
    "trace": (
        "policy=sarathi,vllm_v1",
        "workload=trace",
        "workload.path=tests/data/trace.csv",
        "model=llama3-8b",
        "hardware=h100",
        "batch=8",
        "chunk=256",
        "cache.num_blocks=batch",
    ),
    "advice": ("chunk=auto", *SMALL[:3], "workload.num_requests=16"),
    "profiled": ("executor.cost_model=profiled", "model=13b", "hardware=a6000", *SMALL),
    "ranked": (
        "policy=highest_response_ratio,shortest_remaining,lars,preflow,short_request_first,"
        "reserve_for_short",
        *TIGHT,
    ),
    "following chunks": ("policy=dynamic_chunks", *PIPELINE),
}
COUNTED = {  # whole numbers: equal to the last one
    "iterations": [
        "num_prefills",
        "num_prefill_tokens",
        "num_decode_tokens",
        "prefill_kv_tokens",
        "decode_kv_tokens",
        "num_emits",
        "num_running",
        "num_waiting",
        "num_blocks_used",
        "num_preemptions",
        "prefix_hit_tokens",
        "flops",
        "kv_bytes",
    ],
    "requests": ["request_id", "prompt_len", "output_len", "num_preemptions", "prefix_hit_tokens"],
}
TIMED = [
    "duration",
    "throughput",
    "ttft_p50",
    "ttft_p99",
    "tbt_p50",
    "tbt_p99",
    "latency_p50",
    "mfu",
    "mbu",
    "tile_efficiency",
]


Run = dict[str, object]


def _run(name: str) -> dict[str, Run]:
    """What is compared of every run of a sweep, by the run's name; planned and served in this
    process, below the command line, with the jobs that the command makes: the last setting varies
    fastest.
    """
    swept = [setting.split("=", 1) for setting in SWEEPS[name] if _is_chosen(setting)]
    fixed = [setting for setting in SWEEPS[name] if not _is_chosen(setting)]
    runs = {}
    for values in product(*(choices.split(",") for _, choices in swept)):
        chosen = dict(zip((key for key, _ in swept), values, strict=True))
        policy = chosen.pop("policy", "sarathi")
        run = " ".join([policy, *(f"{key}={value}" for key, value in chosen.items())])
        runs[run] = _served(plan_of(policy, "executor=simulated", *fixed, changes=chosen))
    return runs


def _is_chosen(setting: str) -> bool:
    """Whether it is swept, or names the policy, which every job does."""
    return setting.startswith("policy=") or ("," in setting and "[" not in setting)


def _served(plan: Plan) -> Run:
    ledger, peaks = serve_plan(plan), plan.backend.peaks()
    requests = ledger.requests()
    iterations = add_costs(ledger.iterations(), plan.spec, plan.backend.dtype_bytes, peaks)
    summary = summarise(iterations, requests, peaks, None) | latency(requests)
    return _compared({"iterations": iterations, "requests": requests}, summary)


def _compared(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, float]) -> Run:
    counted = "".join(
        tables[table][columns].astype("int64").to_csv(index=False)
        for table, columns in COUNTED.items()
    )
    digest = hashlib.sha256(counted.encode()).hexdigest()[:16]
    return {"schedule": digest, **{metric: summary[metric] for metric in TIMED}}


def _run_by_command(name: str, output: Path) -> dict[str, Run]:
    """The same from the folders that the command leaves."""
    assert main([*SWEEPS[name], *COMMON, f"output={output}"]) == 0
    runs = {}
    for path in sorted(output.glob("*/*/*/run.json"), key=lambda path: int(path.parent.name)):
        tables = {table: pd.read_parquet(path.parent / f"{table}.parquet") for table in COUNTED}
        summary = load_summary(path.parent)
        runs[json.loads(path.read_text())["name"]] = _compared(tables, summary)
    return runs


def _check(runs: dict[str, Run], name: str) -> None:
    expected = json.loads(RECORDED.read_text())[name]
    assert list(runs) == list(expected)
    for run, recorded in expected.items():
        schedule = recorded.pop("schedule")
        assert runs[run].pop("schedule") == schedule, run
        assert runs[run] == pytest.approx(recorded, rel=1e-9), run


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_gives_what_was_recorded(name: str) -> None:
    _check(_run(name), name)


def test_the_command_leaves_what_was_recorded(tmp_path: Path) -> None:
    _check(_run_by_command("prefixes", tmp_path), "prefixes")


if __name__ == "__main__":
    found = {name: _run(name) for name in SWEEPS}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit()

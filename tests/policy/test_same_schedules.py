"""The same seeds give the same schedules and simulated numbers as when `data/schedules.json` was
recorded.

`python tests/policy/test_same_schedules.py` records them anew: only after a change that is meant to
change them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab.run import main

RECORDED = Path(__file__).parents[1] / "data" / "schedules.json"
COMMON = ("executor=simulated", "tracking=none", "baselines=[]", "-m")
SMALL = ("pd_ratio=7", "seq_len=512", "batch=4", "chunk=256", "workload.num_requests=10")
TIGHT = (
    "workload=uniform",
    "workload.arrivals=poisson",
    "workload.rate=20",
    "pd_ratio=1",
    "workload.num_requests=24",
    "cache.num_blocks=100",
)
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
        "preemption=recompute,swap",
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
        "hardware=a100",
        "executor.pipeline_parallel=4",
        "workload=zipf",
        *SMALL[2:],
    ),
    "trace": (
        "policy=sarathi,vllm_v1",
        "workload=trace",
        "workload.path=tests/data/trace.csv",
        "model=llama3-8b",
        "hardware=h100",
    ),
    "advice": ("chunk=auto", *SMALL[:3]),
    "profiled": ("executor.cost_model=profiled", "model=13b", "hardware=a6000", *SMALL),
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
        "num_swapped_blocks",
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


def _run(name: str, output: Path) -> dict[str, dict[str, object]]:
    """What is compared of every run of a sweep, by the run's name."""
    assert main([*SWEEPS[name], *COMMON, f"output={output}"]) == 0
    runs: dict[str, dict[str, object]] = {}
    for path in sorted(output.glob("*/*/*/run.json"), key=lambda path: int(path.parent.name)):
        tables = [
            pd.read_parquet(path.parent / f"{table}.parquet")[columns]
            for table, columns in COUNTED.items()
        ]
        counted = "".join(table.astype("int64").to_csv(index=False) for table in tables)
        summary = json.loads((path.parent / "summary.json").read_text())
        runs[json.loads(path.read_text())["name"]] = {
            "schedule": hashlib.sha256(counted.encode()).hexdigest()[:16],
            **{metric: summary[metric] for metric in TIMED},
        }
    return runs


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_gives_what_was_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    expected = json.loads(RECORDED.read_text())[name]
    runs = _run(name, tmp_path)
    assert list(runs) == list(expected)
    for run, recorded in expected.items():
        schedule = recorded.pop("schedule")
        assert runs[run].pop("schedule") == schedule, run
        assert runs[run] == pytest.approx(recorded, rel=1e-9), run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {name: _run(name, Path(folder) / str(number)) for number, name in enumerate(SWEEPS)}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit()

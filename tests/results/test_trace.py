"""The trace is valid JSON in Chrome's format, with a row per stage, every micro-batch and every
bubble.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from helpers import ScriptedExecutor, requests_of, scheduler_for

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.executor.simulated.executor import PipelineExecutor
from sarathi_lab.policy import Sarathi
from sarathi_lab.results.trace import write_trace
from sarathi_lab.run import main


def trace_of(executor, path):
    ledger = Ledger()
    scheduler = scheduler_for(Sarathi(chunk=8), batch_size=3, num_micro_batches=executor.capacity)
    run_engine(requests_of((20, 3), (7, 4), (5, 2), (3, 3), (9, 2)), scheduler, executor, ledger)
    write_trace(path, ledger.iterations(), ledger.stages(), ledger.bubbles())
    return ledger, json.loads(path.read_text())


def test_a_pipeline_has_a_row_per_stage_with_its_bubbles(tmp_path):
    executor = PipelineExecutor(3, lambda batch: [float(batch.num_tokens)] * 3)
    ledger, events = trace_of(executor, tmp_path / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 2"}
    assert sum(event.get("cat") == "iteration" for event in events) == 3 * len(ledger.iterations())
    bubbles = [event["name"] for event in events if event.get("cat") == "bubble"]
    assert bubbles == [f"bubble {cause}" for cause in ledger.bubbles().cause]
    assert {"bubble PB1", "bubble PB2"} <= set(bubbles)
    for stage in range(3):
        row = [event for event in events if event["tid"] == stage and event["ph"] == "X"]
        row.sort(key=lambda event: event["ts"])
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(row))


def test_one_device_has_one_row_and_names_of_what_ran(tmp_path):
    ledger, events = trace_of(ScriptedExecutor(), tmp_path / "trace.json")
    assert {event["tid"] for event in events} == {0}
    runs = [event for event in events if event["ph"] == "X"]
    assert len(runs) == len(ledger.iterations())
    assert runs[0]["name"] == "iteration 0: 20 prefill"
    assert runs[1]["name"] == "iteration 1: 7 prefill + 1 decode"
    assert (runs[1]["ts"], runs[1]["dur"], runs[1]["args"]["num_decode_tokens"]) == (1e6, 1e6, 1)


def test_the_setting_writes_it_into_the_run_folder(tmp_path):
    args = ["executor=simulated", "tracking=none", "workload.num_requests=3", "batch=2"]
    assert main([*args, "baselines=[]", "trace=true", f"output={tmp_path}"]) == 0
    (path,) = tmp_path.rglob("trace.json")
    assert json.loads(path.read_text())

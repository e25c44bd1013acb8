"""Logs of `benchmark_vLLM.py` of ppas-vllm: a mapping of Python's a line, with means of a run.

Requests are not recorded: their arrivals follow from their phases and seed.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pandas as pd

from sarathi_lab.engine.ledger import REQUEST_COLUMNS
from sarathi_lab.extensions.replay.benchmark import Benchmark
from sarathi_lab.extensions.replay.readers.content import Content, Object
from sarathi_lab.extensions.replay.server_arguments import read_arguments

MEANS = {"avg_latency": "latency", "avg_ttft": "ttft", "avg_tpot": "tpot"}
SERVER = re.compile(r"START SERVER: vllm serve (\S+)")
RUN = "{'trace_id'"  # how a line of a run begins


def is_of_ppas(content: Content) -> bool:
    """Whether the file is a log of ppas-vllm."""
    return any(line.startswith(RUN) for line in content.text.splitlines())


def runs_of_ppas(content: Content) -> list[Object]:
    """Return the line of each run, and the model that was served."""
    runs = list[Object]()
    model = None
    for line in content.text.splitlines():
        started = SERVER.match(line)
        if started is not None:
            model = started[1]
        elif line.startswith(RUN):
            runs.append({"line": line, "model": model})
    return runs


def read_ppas(content: Content, run: Object) -> Benchmark:
    """Read one run. Raises ValueError and SyntaxError for a damaged line."""
    # Imported here, as that takes seconds.
    from sarathi_lab.extensions.after_sarathi.adaptive_budgets import phased

    row = ast.literal_eval(run["line"])
    phases = [tuple(map(float, phase.split(":"))) for phase in row["phase_schedule"].split(",")]
    requests = pd.DataFrame({"arrival_time": phased(phases, int(row["seed"]))})
    unknown: list[Any] = [[] for _ in range(len(requests))]
    requests = requests.assign(
        request_id=requests.index,
        prompt_len=int(row["configured_prompt_tokens"]),
        output_len=int(row["configured_output_tokens"]),
        token_times=unknown,
    )
    arguments = {name: row[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    label = f"{row['config_name']}, {row['phase_schedule']}, seed {row['seed']}"
    return Benchmark(
        {"policy": label, "executor": "server", "is_baseline": False},
        requests.reindex(columns=list(REQUEST_COLUMNS)),
        int(row["failed"]),
        [read_arguments("vllm", {"model": run["model"], **arguments}, str(content.path))],
        "p_pas" if row["config_name"].startswith("ppas") else "vllm_v1",
        {wait: float(row[name]) for name, wait in MEANS.items()},
        ["the log has means only, of a client that takes time for each prompt token"],
    )

"""Logs of `benchmark_vLLM.py` of ppas-vllm: a mapping of Python's a line, with means of a run.

Requests are not recorded: their arrivals follow from their phases and seed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.extensions.replay.benchmark import Benchmark, Load, in_ledgers_columns
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


@dataclass(frozen=True, kw_only=True)
class PhasedLoad(Load):
    """One run of phases, whose arrivals follow from them.

    Attributes:
        row: The mapping of its line.
    """

    row: Mapping[str, Any]

    def benchmark(self, path: Path, damaged: Sequence[str]) -> Benchmark:
        # Imported here, as that takes seconds.
        from sarathi_lab.extensions.after_sarathi.adaptive_budgets import phased

        phases = []
        for phase in self.row["phase_schedule"].split(","):
            phases.append(tuple(map(float, phase.split(":"))))
        requests = pd.DataFrame({"arrival_time": phased(phases, int(self.row["seed"]))})
        requests = requests.assign(
            prompt_len=int(self.row["configured_prompt_tokens"]),
            output_len=int(self.row["configured_output_tokens"]),
        )
        return Benchmark(
            {"policy": self.client_name, "executor": "server", "is_baseline": False},
            in_ledgers_columns(requests),
            int(self.row["failed"]),
            self.server,
            self.policy,
            self.means,
            ["the log has means only, of a client that takes time for each prompt token"],
        )


def read_ppas(content: Content, run: Object) -> Load:
    """Read one run. Raises ValueError and SyntaxError for a damaged line."""
    row = ast.literal_eval(str(run["line"]))
    arguments = {name: row[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    arguments["model"] = run["model"]
    return PhasedLoad(
        client_name=f"{row['config_name']}, {row['phase_schedule']}, seed {row['seed']}",
        row=row,
        numbers={wait: float(row[name]) for name, wait in MEANS.items()},
        server=[read_arguments("vllm", arguments, str(content.path))],
        policy="p_pas" if row["config_name"].startswith("ppas") else "vllm_v1",
    )

"""Logs of `benchmark_vLLM.py` of ppas-vllm: a mapping of Python's a line, with means of a run.

Requests are not recorded: their arrivals follow from their phases and seed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from sarathi_lab.extensions.replay.benchmark import Load
from sarathi_lab.extensions.replay.readers.content import Content, Object, stated_numbers
from sarathi_lab.extensions.replay.server_arguments import read_arguments

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


def read_ppas(content: Content, run: Object) -> Load:
    """Read one run. Raises ValueError and SyntaxError for a damaged line."""
    row = ast.literal_eval(str(run["line"]))
    arguments = {name: row[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    arguments["model"] = run["model"]
    arrivals = _arrivals(row["phase_schedule"], int(row["seed"]))
    return Load(
        client_name=f"{row['config_name']}, {row['phase_schedule']}, seed {row['seed']}",
        arrivals=arrivals,
        numbers={**stated_numbers(row, "ppas"), "num_requests": len(arrivals)},
        server=[read_arguments("vllm", arguments, str(content.path))],
        policy="p_pas" if row["config_name"].startswith("ppas") else "vllm_v1",
        cautions=["the client takes time for each prompt token"],
    )


def _arrivals(schedule: str, seed: int) -> Sequence[float]:
    """Return when requests were sent in phases such as 120:2.0, seconds and requests a second."""
    # Imported here, as that takes seconds.
    from sarathi_lab.extensions.after_sarathi.adaptive_budgets import phased

    phases = []
    for phase in schedule.split(","):
        phases.append(tuple(map(float, phase.split(":"))))
    return phased(phases, seed)

"""Iterations of two policies side by side: what each gave to prompts and decodes, and when.

    python experiments/lab/leaderboard/schedules.py SWEEP POLICY OTHER [--workload azure_code]
        [--model mistral-7b] [--seed 0] [--rows 12] [--at SECONDS]

SWEEP is the folder of a leaderboard. Shown are the iterations from the last that both have alike,
or those from SECONDS on, and below them the requests whose waits differ most.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from sarathi_lab.config.paths import read_object
from sarathi_lab.results.load import find_runs, load_iterations, load_requests

MS = 1e3
SHOWN = {"prefills": "num_prefills", "prompt tokens": "num_prefill_tokens"}
SHOWN |= {"decodes": "num_decode_tokens", "waiting": "num_waiting"}


def run_of(folder: Path, wanted: dict[str, object]) -> Path:
    """Return the run in `folder` whose labels are those wanted."""
    for run in find_runs(folder):
        labels = read_object(run / "run.json", "")
        if all(labels.get(name) == value for name, value in wanted.items()):
            return run
    raise SystemExit(f"{folder} has no run of {wanted}")


def iterations(run: Path) -> pd.DataFrame:
    """Return start and length [ms] of iterations, and what was in them."""
    table = load_iterations(run)
    lengths = {"start": MS * table.start, "ms": MS * (table.end - table.start)}
    return pd.DataFrame(lengths | {name: table[column] for name, column in SHOWN.items()})


def waits(run: Path) -> pd.DataFrame:
    """Return of each request the times [ms] to the first token and its longest gap."""
    table = load_requests(run).set_index("request_id")
    gaps = table.token_times.map(lambda times: max(pd.Series(times).diff().max(), 0.0))
    ttft = table.first_token_time - table.arrival_time
    return pd.DataFrame({"prompt": table.prompt_len, "ttft": MS * ttft, "longest gap": MS * gaps})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sweep", type=Path)
    parser.add_argument("policies", nargs=2)
    parser.add_argument("--workload", default="azure_code")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--at", type=float)
    given = parser.parse_args()
    place = {"workload": given.workload, "model": given.model, "seed": given.seed}
    runs = {name: run_of(given.sweep, place | {"policy": name}) for name in given.policies}
    one, other = (iterations(run) for run in runs.values())
    both = min(len(one), len(other))
    is_same = (one[[*SHOWN]][:both] == other[[*SHOWN]][:both]).all(axis="columns")
    start = one.start[max(0, int((~is_same).argmax()) - 1)] if given.at is None else MS * given.at
    side = {
        name: table[table.start >= start][: given.rows].reset_index(drop=True)
        for name, table in zip(runs, (one, other), strict=True)
    }
    print(pd.concat(side, axis="columns").round(1).to_string(), "\n")
    both_waits = pd.concat({name: waits(run) for name, run in runs.items()}, axis="columns")
    a, b = (both_waits[name] for name in runs)
    order = ((a.ttft - b.ttft).abs() + (a["longest gap"] - b["longest gap"]).abs()).sort_values()
    print(both_waits.loc[order.index[::-1][: given.rows]].round(1).to_string())


if __name__ == "__main__":
    main()

"""Iterations of two policies side by side: what each gave to prompts and decodes, and when.

    python experiments/lab/leaderboard/schedules.py POLICY OTHER [--workload azure_code]
        [--server a100] [--seed 0] [--budget TOKENS] [--rows 12] [--at SECONDS]

Both are simulated, with the budget TOKENS, or each with the default of its system; a policy without
a budget as it is. Shown are the iterations from the last that both have alike, or those from
SECONDS on, and below them the requests whose waits differ most.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pandas as pd

from sarathi_lab.config.sweeper import compose
from sarathi_lab.extensions.leaderboard.runs import Contest, serve

MS = 1e3
SHOWN = {
    "prefills": "num_prefills",
    "prompt tokens": "num_prefill_tokens",
    "decodes": "num_decode_tokens",
    "waiting": "num_waiting",
}


def tables_of(policy: str, options: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Simulate `policy` and return the tables of its iterations and requests."""
    settings = [
        "experiment=leaderboard",
        f"policy={policy}",
        f"experiment/leaderboard/workload={options.workload}",
        f"experiment/leaderboard/server={options.server}",
    ]
    job = compose(settings).jobs[0]
    contest = Contest(job.cfg, options.workload, policy, {})
    budget = options.budget or contest.default_budget(options.seed)
    _, iterations, requests = serve(contest.plan(options.seed, budget))
    return iterations, requests


def shown_of(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return start and length [ms] of iterations, and what was in them."""
    table = pd.DataFrame({"start": MS * iterations.start})
    table["ms"] = MS * (iterations.end - iterations.start)
    for name, column in SHOWN.items():
        table[name] = iterations[column]
    return table


def last_alike(first: pd.DataFrame, second: pd.DataFrame) -> float:
    """Return when the last iteration began [ms] that two schedules, `shown_of`, have alike."""
    length = min(len(first), len(second))
    is_equal = first[[*SHOWN]][:length] == second[[*SHOWN]][:length]
    differs = ~is_equal.all(axis="columns")
    first_difference = int(differs.argmax())
    return float(first.start[max(0, first_difference - 1)])


def waits_of(requests: pd.DataFrame) -> pd.DataFrame:
    """Return of each request the times [ms] to the first token and its longest gap."""
    table = requests.set_index("request_id")
    gaps = table.token_times.map(lambda times: max(pd.Series(times).diff().max(), 0.0))
    ttft = table.first_token_time - table.arrival_time
    return pd.DataFrame({"prompt": table.prompt_len, "ttft": MS * ttft, "longest gap": MS * gaps})


def parsed(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line; of this process's where there are no `args`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("policies", nargs=2)
    parser.add_argument("--workload", default="azure_code")
    parser.add_argument("--server", default="a100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--at", type=float)
    return parser.parse_args(args)


def main() -> None:
    options = parsed()
    schedules = {}
    waits = {}
    for policy in options.policies:
        iterations, requests = tables_of(policy, options)
        schedules[policy] = shown_of(iterations)
        waits[policy] = waits_of(requests)
    start = MS * (options.at or 0.0)
    if options.at is None:
        start = last_alike(*schedules.values())
    shown = {}
    for policy, schedule in schedules.items():
        from_start = schedule[schedule.start >= start]
        shown[policy] = from_start[: options.rows].reset_index(drop=True)
    print(pd.concat(shown, axis="columns").round(1).to_string(), "\n")

    of_first, of_second = waits.values()
    differences = (of_first - of_second).abs()
    total_difference = differences["ttft"] + differences["longest gap"]
    most_different = total_difference.sort_values(ascending=False).index[: options.rows]
    both = pd.concat(waits, axis="columns")
    print(both.loc[most_different].round(1).to_string())


if __name__ == "__main__":
    main()

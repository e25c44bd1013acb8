"""Keeps recorded runs that are the same today, after settings or policies were removed.

    python experiments/lab/leaderboard/restamp.py [FOLDER]

A leaderboard compares only runs whose settings have the same hash (the column `requests`), so a
setting that goes would part the record from every later run, even if it changed no schedule. This
runs each recorded policy again in each contest, with its first seed at its default budget. Where
the schedule is the recorded one, all rows of the policy in the contest get today's hash. Rows of
other schedules are dropped, to be recorded again, and so are those of policies that are no longer
there. Then all tables and pictures in FOLDER (default: results) are written again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from joblib import Parallel, delayed

from sarathi_lab.config.instantiate import option_files
from sarathi_lab.config.paths import CONF, EXPERIMENTS
from sarathi_lab.config.sweeper import compose
from sarathi_lab.extensions.leaderboard import board, pages
from sarathi_lab.extensions.leaderboard.runs import DEFAULT, Contest, fingerprint, serve
from sarathi_lab.extensions.leaderboard.task import publish
from sarathi_lab.tasks.serve import schedule_of

RESULTS = EXPERIMENTS / "lab" / "leaderboard" / "results"
OPTIONS = CONF / "experiment" / "leaderboard"
REFERENCE = "sarathi_serve"  # the policy that a contest's device and hashes are asked with


def contest_of(workload: str, server: str, policy: str) -> Contest:
    """Return the contest of a workload on a server with `policy` in it."""
    settings = [
        "experiment=leaderboard",
        f"policy={policy}",
        f"experiment/leaderboard/workload={workload}",
        f"experiment/leaderboard/server={server}",
    ]
    return Contest(compose(settings).jobs[0].cfg, workload, policy, {})


def has_recorded_schedule(workload: str, server: str, rows: pd.DataFrame) -> bool:
    """Return whether the policy of `rows` has its recorded schedule on the first recorded seed."""
    row = rows[rows.role == DEFAULT].iloc[0]
    budget = None if pd.isna(row.budget) else int(row.budget)
    contest = contest_of(workload, server, row.policy)
    _, iterations, _ = serve(contest.plan(int(row.seed), budget))
    return schedule_of(iterations) == row.schedule


def same_runs(workload: str, server: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a contest whose policy has its recorded schedule, with today's hashes."""
    by_policy = list(rows.groupby("policy", sort=False))
    calls = (
        delayed(has_recorded_schedule)(workload, server, of_policy) for _, of_policy in by_policy
    )
    is_same = Parallel(n_jobs=-1)(calls)
    changed = [name for (name, _), same in zip(by_policy, is_same, strict=True) if not same]
    print(f"{workload} on {server}: other schedules of {', '.join(changed) or 'no policy'}")
    reference = contest_of(workload, server, REFERENCE)
    hashes = {}
    for seed in rows.seed.unique():
        hashes[seed] = fingerprint(reference.plan(int(seed), None).config)
    kept = rows[~rows.policy.isin(changed)]
    return kept.assign(requests=kept.seed.map(hashes))


def contests_of(runs: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield workload, server and rows of each recorded contest."""
    for workload in sorted(OPTIONS.glob("workload/*.yaml")):
        for server in sorted(OPTIONS.glob("server/*.yaml")):
            contest = contest_of(workload.stem, server.stem, REFERENCE)
            device = contest.plan(0, None).backend.device_name
            rows = runs[(runs.workload == workload.stem) & (runs.device == device)]
            if len(rows):
                yield workload.stem, server.stem, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    runs = board.as_recorded(pd.read_csv(folder / pages.RUNS))
    is_there = runs.policy.isin(option_files("policy"))
    gone = sorted(runs.policy[~is_there].unique())
    print(f"no longer there: {', '.join(gone) or 'no policy'}")
    tables = [same_runs(*contest) for contest in contests_of(runs[is_there])]
    pages.write_runs(pd.concat(tables).sort_index(), folder)
    publish(folder)


if __name__ == "__main__":
    main()

"""Marks recorded runs as runs of today's settings, after settings were renamed or removed.

    python experiments/lab/leaderboard/restamp.py

A leaderboard compares only runs whose settings have the same hash (the column `requests`), so a
setting that goes would part the record from every later run, even if it changed no schedule. This
runs one recorded policy again in each contest. Where its schedule is the recorded one, all rows of
the contest get today's hash; where it is not, the script stops, and the contest is to be recorded
again. Rows of policies that the lab no longer has are dropped. Then all tables and pictures are
written again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pandas as pd

from sarathi_lab.config.instantiate import option_files
from sarathi_lab.config.paths import CONF, EXPERIMENTS
from sarathi_lab.config.sweeper import compose
from sarathi_lab.extensions.leaderboard import board, pages
from sarathi_lab.extensions.leaderboard.runs import DEFAULT, Contest, fingerprint, serve
from sarathi_lab.extensions.leaderboard.task import publish
from sarathi_lab.tasks.serve import schedule_of

RESULTS = EXPERIMENTS / "lab" / "leaderboard" / "results"
OPTIONS = CONF / "experiment" / "leaderboard"
WITNESS = "sarathi_serve"  # the policy that is run again


def contests() -> Iterator[Contest]:
    """Yield every contest with `WITNESS` in it."""
    for workload in sorted(OPTIONS.glob("workload/*.yaml")):
        for server in sorted(OPTIONS.glob("server/*.yaml")):
            settings = [
                "experiment=leaderboard",
                f"policy={WITNESS}",
                f"experiment/leaderboard/workload={workload.stem}",
                f"experiment/leaderboard/server={server.stem}",
            ]
            yield Contest(compose(settings).jobs[0].cfg, workload.stem, WITNESS, {})


def check_schedule(contest: Contest, rows: pd.DataFrame) -> None:
    """Exit unless the witness has its recorded schedule on the first recorded seed."""
    witness = rows[(rows.policy == WITNESS) & (rows.role == DEFAULT)].iloc[0]
    _, iterations, _ = serve(contest.plan(int(witness.seed), int(witness.budget)))
    if schedule_of(iterations) != witness.schedule:
        raise SystemExit(
            f"{contest.workload} on {witness.device}: the schedule of {WITNESS} is not the "
            "recorded one; record the leaderboard again"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args()
    runs = pd.read_csv(RESULTS / pages.RUNS)
    runs = board.kept(runs)
    is_there = runs.policy.str.split().str[0].isin(option_files("policy"))
    gone = sorted(runs.policy[~is_there].unique())
    runs = runs[is_there].reset_index(drop=True)
    for contest in contests():
        device = contest.plan(0, None).backend.device_name
        is_of_contest = (runs.workload == contest.workload) & (runs.device == device)
        if not is_of_contest.any():
            continue
        check_schedule(contest, runs[is_of_contest])
        for seed in runs.seed[is_of_contest].unique():
            today = fingerprint(contest.plan(int(seed), None).config)
            runs.loc[is_of_contest & (runs.seed == seed), "requests"] = today
        print(f"{contest.workload} on {device}: {is_of_contest.sum()} runs")
    pages.write_runs(runs, RESULTS)
    print(f"dropped: {', '.join(gone) or 'no policy'}")
    publish(RESULTS)


if __name__ == "__main__":
    main()

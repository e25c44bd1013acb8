"""Ranking of policies: `experiment=leaderboard`, or `python -m sarathi_lab leaderboard`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.console import print_place, print_words
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import Job, load_option, option_files
from sarathi_lab.config.paths import of_lab, readable
from sarathi_lab.config.run_context import RunContext, SweepRecord
from sarathi_lab.extensions.leaderboard import pages, ranks
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.result import REQUESTS, Result, show
from sarathi_lab.results.serving_metrics import Slo, is_good
from sarathi_lab.tasks.plan import Plan
from sarathi_lab.tasks.serve import READ, Serve

SAME = [one for one in READ if one != "policy"]  # of runs that are ranked together


@dataclass(frozen=True)
class Leaderboard(Serve):
    """Serves a workload as `task=serve` does, judges the run by several `objectives`, and ranks
    the policies of a sweep among those whose runs on the same requests are recorded in `beside`.
    """

    workload: str = "workload"
    objectives: Sequence[str] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    beside: str | None = None

    def check(self, cfg: DictConfig) -> tuple[Plan, dict[str, Plan]]:
        if not self.objectives or isinstance(self.objectives, str):
            fix = "list options of slo, such as [strict]"
            raise UserError(f"task.objectives={self.objectives} ranks by nothing; {fix}")
        for name in self.objectives:
            require_one_of("task.objectives", name, option_files("slo"))
            slo: Slo = load_option("slo", name)
            if slo.is_relative and cfg.slo.get("tbt_factor") is None:
                why = f"task.objectives={name} refers to a decode iteration that is not timed"
                raise UserError(f"{why}; add slo={name}, for which it is")
        self._recorded()
        return super().check(cfg)

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Run the policy, and add the goodput by each objective and what ranking needs."""
        result = super().run(cfg, context)
        requests, summary = result.tables[REQUESTS], dict(result.summary)
        for name in self.objectives:
            slo: Slo = load_option("slo", name).resolved(summary.get("slo_decode_time"))
            good = is_good(requests, slo)["all"].sum()
            summary[f"{ranks.GOODPUT}{name}"] = float(good / summary["duration"])
        if {"slowdown_long_mean", "slowdown_short_mean"} <= summary.keys():
            summary[ranks.FAIRNESS] = summary["slowdown_long_mean"] / summary["slowdown_short_mean"]
        labels = {"workload": self.workload, "rate": cfg.workload.rate}
        if context.policy is None:  # a class of the user's
            labels["policy"] = str(cfg.policy._target_).rpartition(".")[2]
        labels["requests"] = fingerprint(result.config or {})
        return replace(result, summary=summary, labels={**result.labels, **labels})

    def report_sweep(self, job: Job, record: SweepRecord, *, is_tracked: bool) -> None:
        """Rank what has finished, among what is recorded, and write tables, pictures and page."""
        runs = load_runs(record.folder)
        if runs.empty:
            print_words(f"no finished runs in {record.folder}")
            return
        recorded = self._recorded()
        if len(recorded) and not runs.requests.isin(recorded.requests).any():
            show([f"warning: {self.beside} has no run of these requests; ranked without it"])
        runs = ranks.beside(ranks.kept(runs), recorded)
        groups = runs.groupby("workload", sort=False)
        boards = {str(name): ranks.board(group) for name, group in groups}
        show([pages.places(boards)])
        for path in pages.write(boards, runs, record.folder):
            print_place(path.stem, path)

    def _recorded(self) -> pd.DataFrame:
        """Read the runs of an earlier leaderboard. Raises UserError."""
        if self.beside is None:
            return pd.DataFrame(columns=ranks.LABELS)
        fix = "name the runs.csv of a leaderboard, or use null for none"
        with readable(f"task.beside={self.beside}", fix):
            return _read(of_lab(Path(self.beside)))


@cache  # for all jobs that are checked
def _read(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file)
    if missing := [name for name in ranks.LABELS if name not in table]:
        raise ValueError(f"it has no column {missing[0]}")
    return table


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for runs which differ in nothing but the policy. What is null or
    false does not count, as settings that are added later are by default.
    """

    def set_in(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        return {key: set_in(value) for key, value in node.items() if value not in (None, False)}

    same = json.dumps(set_in({name: config[name] for name in SAME}), sort_keys=True)
    return hashlib.sha256(same.encode()).hexdigest()[:8]


def main(args: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the sweep by the command `run`; returns its exit code."""
    return run(["experiment=leaderboard", *args])

"""Simulated runs of one policy in one contest, a workload on a server: a row for each budget and
seed. Tables of iterations and requests are not kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import reads_chunk
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.results.decode_cost import slo_in_seconds
from sarathi_lab.results.metrics import throughput
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.serving_metrics import Slo, is_good, quantiles, waits
from sarathi_lab.tasks.executed import serving_summary_of
from sarathi_lab.tasks.plan import Plan, changed, make_plan
from sarathi_lab.tasks.serve import READ, schedule_of

GOODPUT = "goodput_"  # and the objective
FAIRNESS = "slowdown_long_to_short"
QUANTITIES = ["ttft_p99", "tbt_p99", FAIRNESS, "throughput"]
CONTEST = ["workload", "model", "device"]  # within which policies are compared
LABELS = [*CONTEST, "policy", "role", "budget", "seed", "requests", "rate", "schedule"]
LABELS += ["git_commit"]
# What a run is for: the policy at its system's budget, the choice of another budget, and the
# policy at the budget that was chosen.
DEFAULT = "default"
SELECTION = "selection"
BEST = "best"
# The settings that runs have in common which are compared: all that decide a run but the policy.
SAME_WORK = [name for name in READ if name not in ("policy", "slo", "metrics")]


@dataclass(frozen=True)
class Contest:
    """One workload on one server, with the policy of `cfg` in it.

    Attributes:
        cfg: The settings of a run. The seed is replaced, and `chunk` where it is null.
        workload: The name of the workload in tables.
        policy: The name of the policy in tables.
        objectives: What a run is judged by, by name.
    """

    cfg: DictConfig
    workload: str
    policy: str
    objectives: Mapping[str, Slo]

    @property
    def has_budget(self) -> bool:
        """Whether the setting `chunk` is the policy's budget."""
        return reads_chunk(self.cfg.policy)

    @property
    def is_budget_open(self) -> bool:
        """Whether the policy has a budget that is not stated."""
        return self.has_budget and self.cfg.chunk is None

    def default_budget(self, seed: int) -> int | None:
        """Return the budget as stated, else that of the policy's system on this device; None for a
        policy without one.
        """
        if not self.has_budget:
            return None
        return self.plan(seed, self.cfg.chunk).policy.budget

    def plan(self, seed: int, budget: int | None) -> Plan:
        """Make the plan of a run. Raises UserError for a budget that the policy can't have."""
        settings: dict[str, object] = {"seed": seed}
        if self.has_budget:
            settings["chunk"] = budget
        plan = make_plan(changed(self.cfg, **settings))
        if plan.backend.computes_tokens:
            raise UserError(
                f"executor={plan.backend.name} measures, and a leaderboard compares simulated "
                "runs; use executor=simulated"
            )
        return plan

    def run(self, seed: int, budget: int | None, role: str) -> dict[str, object]:
        """Run the policy, and return the row of the run. Raises UserError."""
        plan = self.plan(seed, budget)
        executor, iterations, requests = serve(plan)
        seconds = float(iterations.end.max())
        return {
            "workload": self.workload,
            "model": plan.spec.name,
            "device": plan.backend.device_name,
            "policy": self.policy,
            "role": role,
            "budget": budget,
            "seed": seed,
            "requests": fingerprint(plan.config),
            "rate": plan.config["workload"].get("rate"),
            "schedule": schedule_of(iterations),
            "git_commit": provenance()["git_commit"],
            **self._goodputs(plan, executor, requests, seconds),
            **_quantities(plan, iterations, requests),
        }

    def _goodputs(
        self, plan: Plan, executor: Executor, requests: pd.DataFrame, seconds: float
    ) -> dict[str, float]:
        """Return the requests a second that are within each objective."""
        goodputs = {}
        for name, slo in self.objectives.items():
            in_seconds = slo_in_seconds(slo, plan.engine, executor)
            are_good = is_good(requests, in_seconds)["all"]
            goodputs[f"{GOODPUT}{name}"] = float(are_good.sum() / seconds)
        return goodputs


def serve(plan: Plan) -> tuple[Executor, pd.DataFrame, pd.DataFrame]:
    """Run `plan`; return its executor and the tables of its iterations and of its requests."""
    scheduler, executor = plan.build()
    ledger = Ledger()
    arrivals = plan.load.arrivals()
    run_engine(arrivals, scheduler, executor, ledger)
    return executor, ledger.iterations(), ledger.requests()


def _quantities(plan: Plan, iterations: pd.DataFrame, requests: pd.DataFrame) -> dict[str, float]:
    """Return those of `QUANTITIES` that the run has."""
    peaks = plan.backend.peaks()
    seconds = float(iterations.end.max())
    summary = throughput(requests, seconds)
    times = waits(requests)
    for name in ("ttft", "tbt"):
        summary |= quantiles(name, times[name], (0.99,))
    summary |= serving_summary_of(plan, requests, seconds, peaks, plan.targets.slo)
    of_long = summary.get("slowdown_long_mean")
    of_short = summary.get("slowdown_short_mean")
    if of_long is not None and of_short is not None:
        summary[FAIRNESS] = of_long / of_short
    return {name: summary[name] for name in QUANTITIES if name in summary}


class Trial(NamedTuple):
    """A run to do."""

    seed: int
    budget: int | None
    role: str


def run_all(
    contest: Contest,
    seeds: Sequence[int],
    selection_seeds: Sequence[int],
    budgets: Sequence[int],
    run: Callable[[Contest, Sequence[Trial]], list[dict[str, object]]],
) -> pd.DataFrame:
    """Run the policy at its default budget, and at its best.

    The best is the one of `budgets` and the default with the highest mean goodput on
    `selection_seeds`, by each objective. It runs again on `seeds`, with which it was not chosen.

    Args:
        contest: The policy, the workload and the server.
        seeds: Of the requests that policies are compared on.
        selection_seeds: Of those that a budget is chosen on.
        budgets: The grid.
        run: Does trials, and returns the rows of those that the policy can have.

    Returns:
        A row a run.
    """
    default = contest.default_budget(seeds[0])
    trials = [Trial(seed, default, DEFAULT) for seed in seeds]
    if default is None or not contest.is_budget_open:
        return pd.DataFrame(run(contest, trials))
    for budget in dict.fromkeys([default, *budgets]):
        trials += [Trial(seed, budget, SELECTION) for seed in selection_seeds]
    table = pd.DataFrame(run(contest, trials))
    chosen = set[int]()
    for objective in contest.objectives:
        # None where no budget of the grid is possible.
        best = best_budgets(table, f"{GOODPUT}{objective}")
        chosen.update(best.astype(int))
    at_best = []
    for budget in sorted(chosen - {default}):
        at_best += [Trial(seed, budget, BEST) for seed in seeds]
    table_at_best = pd.DataFrame(run(contest, at_best))
    return pd.concat([table, table_at_best], ignore_index=True)


def row_of(contest: Contest, trial: Trial) -> dict[str, object] | None:
    """Run a trial and return its row; None for a budget to choose from that the policy can't have.

    Raises UserError for other runs that are not possible.
    """
    try:
        return contest.run(*trial)
    except RunError:
        raise
    except UserError:
        if trial.role != SELECTION:
            raise
        return None


def in_recorded_digits(value: float) -> float:
    """Round to the five digits that a leaderboard's record has."""
    return float(f"{value:.5g}")


def best_budgets(runs: pd.DataFrame, quantity: str) -> pd.Series:
    """Return the budget with the highest mean `quantity` on the seeds that choose, by contest and
    policy; of equal ones the default, then the smallest. Policies without a choice are missing.

    Means are of the digits that are recorded, so that a record has the choice of its sweep.
    """
    of_policy = [*CONTEST, "policy"]
    selection = runs[runs.role == SELECTION]
    goodput = selection[quantity].map(in_recorded_digits)
    by_budget = goodput.groupby([selection[name] for name in (*of_policy, "budget")])
    means = by_budget.mean().round(9).rename("goodput").reset_index()
    default = runs[runs.role == DEFAULT].groupby(of_policy).budget.first().rename("default")
    means = means.join(default, on=of_policy)
    means["is_default"] = means.budget == means["default"]
    best_first = means.sort_values(
        ["goodput", "is_default", "budget"],
        ascending=[False, False, True],
        kind="stable",
    )
    return best_first.groupby(of_policy).budget.first()


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for runs which differ in nothing but the policy.

    What is null or false does not count, as settings that are added later are so by default. Of a
    class only its name counts, as modules move.
    """
    work = {name: _that_count(config[name]) for name in SAME_WORK}
    same_work = json.dumps(work, sort_keys=True)
    digest = hashlib.sha256(same_work.encode())
    return digest.hexdigest()[:8]


def _that_count(node: object) -> object:
    """Return a node's settings that count in a `fingerprint`, nested ones, too."""
    if not isinstance(node, Mapping):
        return node
    values: dict[str, object] = {}
    for key, value in node.items():
        if key == "_target_":
            values[key] = str(value).rpartition(".")[2]
        elif value not in (None, False):
            values[key] = _that_count(value)
    return values

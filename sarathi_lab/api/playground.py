"""`lab.Playground`: a configuration whose changes are simulated in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.api.session import UNTRACKED, read
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import option_files, read_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.experiment.advise import AS_GOOD
from sarathi_lab.results.serving_metrics import latency
from sarathi_lab.tasks.plan import Plan, changed, make_plans
from sarathi_lab.tasks.serve import fingerprint

MOST_KNOWN = 64  # cached runs, such as the baseline's when the chunk changes
GROUPS = ("hardware", "model", "policy")


class Playground:
    """Configuration that is composed once and simulated with changes.

    `settings` are those of `lab.serve`. Raises UserError as that does.
    """

    def __init__(self, **settings: Any) -> None:
        self._known: dict[str, Ledger] = {}  # of equal work: the newest
        self._cfg = read({**UNTRACKED, "executor": "simulated", "baselines": ["orca"], **settings})

    @staticmethod
    def options(group: str) -> list[str]:
        """Return the options of "hardware", "model" or "policy"."""
        return [name for name in option_files(group) if name != "auto"]

    def serve(self, **changes: Any) -> PlaygroundRun:
        """Simulate it with changed settings: values, and names of options for hardware, model and
        policy. What the policy does not read has no effect. Raises UserError.
        """
        groups = [name for name in GROUPS if name in changes]
        cfg = changed(self._cfg, **{name: _option(name, changes[name]) for name in groups})
        for name in changes.keys() - set(groups):
            OmegaConf.update(cfg, name, changes[name])
        plan, baselines = make_plans(cfg)
        name = str(changes.get("policy", plan.policy.name))  # some options share a class
        plans = {name: plan, **{key: one for key, one in baselines.items() if key != name}}
        return PlaygroundRun(plan, {name: self._ledger(one) for name, one in plans.items()})

    def _ledger(self, plan: Plan) -> Ledger:
        if (key := fingerprint(plan)) not in self._known:
            if len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            ledger, (scheduler, executor) = Ledger(), plan.build()
            run_engine(plan.load.arrivals(), scheduler, executor, ledger)
            self._known[key] = ledger
        return self._known[key]


@dataclass(frozen=True)
class PlaygroundRun:
    """Ledgers of a configuration's policy and of its baselines, by name."""

    plan: Plan
    ledgers: dict[str, Ledger]

    @cached_property
    def iterations(self) -> dict[str, pd.DataFrame]:
        """Tables of iterations by policy (metrics.md)."""
        return {name: ledger.iterations() for name, ledger in self.ledgers.items()}

    @cached_property
    def requests(self) -> dict[str, pd.DataFrame]:
        """Tables of requests by policy."""
        return {name: ledger.requests() for name, ledger in self.ledgers.items()}

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """Table with a row a policy: throughput (tokens/s), `gain`, its ratio to the last policy's,
        the share of decodes that ride along with prompts, and latencies (seconds).
        """
        rows = {}
        for name, iterations in self.iterations.items():
            tokens = sum(request.total_len for request in self.plan.load.requests)
            decodes = iterations.num_decode_tokens
            rows[name] = {
                "throughput": tokens / float(iterations.end.max()),
                "riding": decodes[iterations.num_prefill_tokens > 0].sum() / max(1, decodes.sum()),
                **latency(self.requests[name]),
            }
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("policy")
        return table.assign(gain=table.throughput / table.throughput.iloc[-1])

    def why(self) -> str:
        """Explain in a sentence the throughput beside that of the last baseline."""
        chosen, base = self.outcomes.iloc[0], self.outcomes.iloc[-1]
        name, other = chosen.name, base.name
        text = f"{name} serves {chosen.throughput:,.0f} tokens/s"
        if len(self.ledgers) == 1:
            return f"{text}, which others are held against."
        is_equal = abs(chosen.gain - 1) <= AS_GOOD
        text += f", as many as {other}" if is_equal else f", {chosen.gain:.2f} times {other}'s"
        gaps = [f"{1e3 * one.get('tbt_p99', math.nan):,.0f} ms" for one in (chosen, base)]
        beside = f"where {other} has {gaps[1]}" if gaps[0] != gaps[1] else f"as {other}"
        text += f", with {gaps[0]} between tokens at P99 {beside}: "
        rides = f"{chosen.riding:.0%} of its decodes ride along with prompts"
        rides += f", {base.riding:.0%} of {other}'s"
        return f"{text}{rides}."


def _option(group: str, name: str) -> DictConfig:
    options = option_files(group)
    if name not in options:
        raise UserError(f"{group}={name} is unknown; use one of {', '.join(options)}")
    return read_option(group, options[name])

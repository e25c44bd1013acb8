"""`lab.Playground`: a configuration whose changes are simulated in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.api.session import UNTRACKED, read
from sarathi_lab.config.errors import require_one_of
from sarathi_lab.config.instantiate import option_files, read_option
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.results.serving_metrics import latency
from sarathi_lab.tasks.plan import Plan, changed, make_plans
from sarathi_lab.tasks.serve import fingerprint

MOST_LEDGERS = 64  # cached runs, such as the baseline's when the chunk changes
GROUPS = ("hardware", "model", "policy")


class Playground:
    """Configuration that is composed once and simulated with changes.

    `settings` are those of `lab.serve`. Raises UserError as that does.
    """

    def __init__(self, **settings: object) -> None:
        self._ledgers: dict[str, Ledger] = {}  # of equal work: the newest
        defaults: dict[str, object] = {
            **UNTRACKED,
            "executor": "simulated",
            "baselines": ["orca"],
        }
        self._cfg = read(defaults | settings)

    @staticmethod
    def options(group: str) -> list[str]:
        """Return the options of "hardware", "model" or "policy"."""
        files = option_files(group)
        files.pop("auto", None)  # it looks at this machine, which a simulation has no use for
        return list(files)

    def serve(self, **changes: object) -> PlaygroundRun:
        """Simulate it with changed settings: values, and names of options for hardware, model and
        policy. What the policy does not read has no effect. Raises UserError.
        """
        options = {}
        values = {}
        for name, value in changes.items():
            if name in GROUPS:
                options[name] = _option(name, value)
            else:
                values[name] = value
        cfg = changed(self._cfg, **options)
        for name, value in values.items():
            OmegaConf.update(cfg, name, value)
        plan, baselines = make_plans(cfg)
        # The option's name where it is chosen, as some options share a class.
        chosen = changes.get("policy", plan.policy.name)
        policy = str(chosen)
        ledgers = {policy: self._ledger(plan)}
        # A baseline last: `gain` is a ratio to the last row.
        for name, baseline in baselines.items():
            if name != policy:
                ledgers[name] = self._ledger(baseline)
        return PlaygroundRun(plan, ledgers)

    def _ledger(self, plan: Plan) -> Ledger:
        work = fingerprint(plan)
        if work in self._ledgers:
            return self._ledgers[work]
        if len(self._ledgers) >= MOST_LEDGERS:
            # Dictionaries keep the order of insertion.
            oldest = next(iter(self._ledgers))
            del self._ledgers[oldest]
        ledger = Ledger()
        scheduler, executor = plan.build()
        arrivals = plan.load.arrivals()
        run_engine(arrivals, scheduler, executor, ledger)
        self._ledgers[work] = ledger
        return ledger


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
        requests = self.plan.load.requests
        num_tokens = sum(request.total_len for request in requests)
        for name, iterations in self.iterations.items():
            seconds = float(iterations.end.max())
            times = latency(self.requests[name])
            decodes = iterations.num_decode_tokens
            # A decode rides along where its iteration also computes tokens of a prompt.
            has_prompts = iterations.num_prefill_tokens > 0
            num_riding = decodes[has_prompts].sum()
            num_decodes = max(1, decodes.sum())
            rows[name] = {
                "throughput": num_tokens / seconds,
                "riding": num_riding / num_decodes,
                **times,
            }
        table = pd.DataFrame.from_dict(rows, orient="index")
        table = table.rename_axis("policy")
        throughput = table.throughput
        gain = throughput / throughput.iloc[-1]
        return table.assign(gain=gain)

    def why(self) -> str:
        """Explain in a sentence the throughput beside that of the last baseline."""
        chosen = self.outcomes.iloc[0]
        base = self.outcomes.iloc[-1]
        serves = f"{chosen.name} serves {chosen.throughput:,.0f} tokens/s"
        if len(self.ledgers) == 1:
            return f"{serves}, which others are held against."
        baseline = base.name
        gain = f"{chosen.gain:.2f} times {baseline}'s"
        gap = _gap(chosen)
        gap_of_baseline = _gap(base)
        gaps = f"{gap} between tokens at P99 where {baseline} has {gap_of_baseline}"
        riding = f"{chosen.riding:.0%} of its decodes ride along with prompts"
        riding_of_baseline = f"{base.riding:.0%} of {baseline}'s"
        return f"{serves}, {gain}, with {gaps}: {riding}, {riding_of_baseline}."


def _gap(outcome: pd.Series) -> str:
    seconds = outcome.get("tbt_p99", math.nan)
    return f"{1e3 * seconds:,.0f} ms"


def _option(group: str, stated: object) -> DictConfig:
    options = option_files(group)
    name = str(stated)
    require_one_of(group, name, options)
    return read_option(group, options[name])

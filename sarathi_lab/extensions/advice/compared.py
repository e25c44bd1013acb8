"""The policies that are compared: for each the chunks that were tried, in simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError, require_one_of, unknown_name
from sarathi_lab.config.instantiate import (
    build,
    class_of,
    option_files,
    parameters_of,
    read_option,
)
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.experiment.advisor import Prediction, Row, advise, marked
from sarathi_lab.extensions.advice.server_flags import (
    chosen_parameters,
    typed,
    unit_of,
    whole_variant,
)
from sarathi_lab.model.roofline import TILE
from sarathi_lab.policy import Policy
from sarathi_lab.results.decode_cost import slo_in_seconds
from sarathi_lab.results.objective import outcome
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.tasks.plan import Plan, changed, make_plan

AN_OPTION = "name an option of policy, or one with parameters as in {sglang:{page_size:16}}"
LONGER = 4  # times the requests of a run that is to be advised
FIRST_CHUNK = 256  # of the plan, before the chunks are tried


@dataclass(frozen=True)
class Option:
    """A policy to compare.

    Attributes:
        label: Its name, with the parameters that are not at their defaults.
        typed: The settings that choose it on a command line; None: as they were typed.
        cfg: The run's configuration with it.
    """

    label: str
    typed: tuple[str, ...] | None
    cfg: DictConfig

    @property
    def reads_chunk(self) -> bool:
        """Whether its token budget is the setting `chunk`."""
        return "${chunk}" in OmegaConf.to_yaml(self.cfg.policy, resolve=False)

    def with_chunk(self, chunk: int, parameters: Mapping[str, Any] | None = None) -> DictConfig:
        """Return a copy of its configuration with a token budget, and other parameters."""
        cfg = self.cfg.copy()
        if self.reads_chunk:
            cfg.chunk = chunk
        else:
            cfg.policy[_budget_field(build(cfg.policy))] = chunk
        cfg.policy.update(parameters or {})
        return cfg

    def typed_chunk(self, chunk: int) -> str:
        """Return the setting of its token budget."""
        if self.reads_chunk:
            return f"chunk={chunk}"
        return f"policy.{_budget_field(build(self.cfg.policy))}={chunk}"


@dataclass(frozen=True)
class Compared:
    """A policy with the runs that were simulated for it.

    Attributes:
        option: The policy.
        plan: A run under it; the chunk is any.
        slo: The objective in seconds; None without bounds.
        table: A row for each chunk that was tried, as `advisor.Prediction.table` has them, with
            the `policy` and whether prompts are left whole (`is_whole`).
    """

    option: Option
    plan: Plan
    slo: Slo | None
    table: pd.DataFrame

    def plan_of(self, row: Row) -> Plan:
        """Return the plan of the run of a row of the table."""
        return make_plan(self._config_of(row))

    @property
    def has_longer(self) -> bool:
        """Whether `longer` has a run: of requests that arrive over time, in any number."""
        number = self.option.cfg.workload.get("num_requests")
        return self.slo is not None and isinstance(number, int) and self.plan.load.has_times

    def longer(self, row: Row) -> dict[str, float] | None:
        """Hold a run with `LONGER` times the requests against the objective, as waits that grow
        show in a long run only; None where their number is given, or they do not arrive over time.
        """
        cfg = self._config_of(row)
        if self.slo is None or not self.has_longer:
            return None
        cfg.workload.num_requests = LONGER * cfg.workload.num_requests
        plan = make_plan(cfg)
        ledger = serve(plan.load.arrivals(), plan.engine, plan.build()[1])
        return outcome(ledger.requests(), self.slo)

    def _config_of(self, row: Row) -> DictConfig:
        parameters = whole_variant(self.plan.policy) if row["is_whole"] else None
        return self.option.with_chunk(int(row["chunk"]), parameters)


def options_of(cfg: DictConfig, entries: Sequence[Any]) -> list[Option]:
    """Return the run's policy, then those of `entries` (names, or a name with parameters) that are
    others. Raises UserError for what is no policy, or cuts no prompts.
    """
    first = build(cfg.policy, Policy)
    _budget_field(first)
    options = [Option(_label(first), None, cfg)]
    policies = [first]
    for entry in entries:
        name, parameters = _named(entry)
        node = _node(name, parameters)
        other = changed(cfg, policy=node)
        policy = build(other.policy, Policy)
        _budget_field(policy)
        if policy not in policies:
            policies.append(policy)
            settings = [f"policy.{key}={typed(value)}" for key, value in parameters.items()]
            options.append(Option(_label(policy), (f"policy={name}", *settings), other))
    return options


def compare(option: Option, chunks: Sequence[int] | None) -> Compared:
    """Simulate the requests under a policy with each of `chunks`, or with those that `advise` tries
    if they are None. Raises UserError for a run that there can't be.
    """
    cfg = option.cfg
    plan = make_plan(_first_config(option))
    executor = plan.build()[1]
    plan = replace(plan, engine=plan.engine.with_cache_of(executor))
    slo = slo_in_seconds(plan.targets.slo, plan.engine, executor)
    # With fewer tokens than sequences, a server that chooses both lowers the sequences.
    fewest = min(plan.engine.batch_size, TILE) if _is_free(cfg) else plan.engine.batch_size
    prediction = Prediction(
        plan.load.requests,
        replace(plan.engine, batch_size=fewest),
        partial(_run, option, plan, executor, None),
        baselines=() if slo.bounds else tuple(cfg.baselines),
        slo=slo if slo.bounds else None,
    )
    unit = unit_of(plan.policy)
    advice = advise(
        prediction,
        max(TILE, unit),
        policy=plan.policy.with_budget,
        chunks=chunks,
        unit=unit,
    )
    table = advice.table.assign(is_whole=False)
    parameters = whole_variant(plan.policy)
    prompt_len = max(request.prompt_len for request in plan.load.requests)
    # Where smaller chunks miss the objective, no whole prompt was tried.
    is_tried = chunks is None and table.chunk.max() >= prompt_len
    if is_tried and parameters is not None:
        # Any prompt beside all decodes, as one that does not fit would wait for them.
        longest = plan.max_model_len + plan.engine.batch_size - 1
        whole = replace(prediction, run=partial(_run, option, plan, executor, parameters))
        row = whole.table([longest], plan.policy.with_budget).assign(is_whole=True)
        table = marked(pd.concat([table, row], ignore_index=True))
    table.insert(0, "policy", option.label)
    return Compared(option, plan, slo if slo.bounds else None, table)


def _run(
    option: Option,
    plan: Plan,
    executor: Executor,
    parameters: Mapping[str, Any] | None,
    engine: EngineConfig,
) -> Ledger:
    """Serve the requests of `plan` by the option's policy with the budget of the engine's, and with
    other `parameters`, as planned for it: cache and sequences may hang on the budget. A baseline
    has the plan's.
    """
    if engine.policy.name != plan.policy.name:
        return serve(plan.load.arrivals(), replace(plan.engine, policy=engine.policy), executor)
    budget = engine.policy.budget
    assert budget is not None, "options have one"
    planned = make_plan(option.with_chunk(budget, parameters))
    return serve(planned.load.arrivals(), planned.engine, executor)


def _is_free(cfg: DictConfig) -> bool:
    return cfg.batch is None


def _first_config(option: Option) -> DictConfig:
    """Return a configuration whose token budget suits the policy and its sequences: the server's
    where both are left to it.
    """
    if option.cfg.chunk is None and _is_free(option.cfg):
        return option.cfg
    unit = unit_of(build(option.cfg.policy))
    least = max(FIRST_CHUNK, option.cfg.batch or 0)
    return option.with_chunk(-(-least // unit) * unit)


def _named(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of an entry of `task.policies`, and the parameters stated there."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        name, parameters = next(iter(entry.items()))
        if isinstance(parameters, Mapping):
            return str(name), parameters
    raise UserError(f"task.policies: {entry} is no policy; {AN_OPTION}")


def _node(name: str, parameters: Mapping[str, Any]) -> DictConfig:
    """Return the settings of a policy with other parameters. Raises UserError."""
    files = option_files("policy")
    require_one_of("task.policies", name, files)
    node = read_option("policy", files[name])
    valid = parameters_of(class_of({"policy": node}, "policy")) or []
    for key, value in parameters.items():
        if key not in valid:
            raise unknown_name(f"task.policies: {name}.{key}", valid, "a parameter")
        node[key] = value
    return node


def _budget_field(policy: Policy) -> str:
    """Return the parameter that is the policy's chunk. Raises UserError for one without."""
    if policy.budget_field is None:
        raise UserError(
            f"policy={policy.name} has no chunk to choose; use policy=vllm_v1 or "
            "policy=sarathi_serve"
        )
    return policy.budget_field


def _label(policy: Policy) -> str:
    """Return a policy's name with its parameters that are not at their defaults."""
    parameters = chosen_parameters(policy).items()
    return " ".join([policy.name, *(f"{name}={typed(value)}" for name, value in parameters)])

"""The policies that are compared: for each the chunks that were tried, in simulated runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError, require_one_of, unknown_name
from sarathi_lab.config.instantiate import (
    build,
    class_of,
    copied,
    option_files,
    parameters_of,
    read_option,
    reads_chunk,
)
from sarathi_lab.engine.loop import serve
from sarathi_lab.experiment.advise import (
    ChunkSearch,
    Row,
    candidates,
    choose,
    marked,
    quantities_of_run,
)
from sarathi_lab.extensions.advise.server_flags import (
    chosen_parameters,
    least_budget,
    typed,
    unit_of,
    whole_variant,
)
from sarathi_lab.model.roofline import TILE
from sarathi_lab.policy import Policy
from sarathi_lab.results.decode_cost import slo_in_seconds
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.results.steady import sequences_in_cache
from sarathi_lab.tasks.plan import Plan, Setup, changed, make_plan, make_setup

AN_OPTION = "name an option of policy, or one with parameters as in {sglang:{page_size:16}}"
LONGER = 4  # times the requests of a run that is to be advised
FIRST_CHUNK = 256  # of the plan, before the chunks are tried


class Budget(NamedTuple):
    """The token budget of a run, and whether a setting of its server leaves prompts whole."""

    chunk: int
    is_whole: bool = False

    @classmethod
    def of(cls, row: Row) -> Budget:
        """Return that of the run of a row, whose numbers may be floats of a table."""
        chunk = int(row["chunk"])
        is_whole = bool(row["is_whole"])
        return cls(chunk, is_whole)


class SimulatedRun(NamedTuple):
    """What a simulated run gave: its quantities, and the sequences of a batch that the cache has
    room for where all are in use (None where they are not).
    """

    quantities: Mapping[str, float]
    fitting_sequences: int | None


@dataclass(frozen=True)
class Option:
    """A policy to compare.

    Attributes:
        label: Its name, with the parameters that are not at their defaults.
        typed: The settings that choose it on a command line; empty: as they were typed.
        cfg: The run's configuration with it.
        runs: What was simulated.
    """

    label: str
    typed: tuple[str, ...]
    cfg: DictConfig
    runs: dict[Budget, SimulatedRun] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def chunk_setting(self) -> str:
        """The name of the setting that is its token budget."""
        if reads_chunk(self.cfg.policy):
            return "chunk"
        return f"policy.{budget_field(build(self.cfg.policy))}"

    @cached_property
    def setup(self) -> Setup:
        """Device, model and requests, which do not depend on the chunk."""
        return make_setup(self.cfg)

    @cached_property
    def longer(self) -> Option:
        """The same with `LONGER` times the requests, as waits that grow show in a long run only."""
        cfg = copied(self.cfg)
        cfg.workload.num_requests *= LONGER
        return replace(self, cfg=cfg)

    def with_budget(self, budget: Budget) -> DictConfig:
        """Return a copy of its configuration with a token budget."""
        cfg = copied(self.cfg)
        OmegaConf.update(cfg, self.chunk_setting, budget.chunk)
        cfg.policy.update(self.parameters(budget))
        return cfg

    def plan(self, budget: Budget) -> Plan:
        """Plan a run with a token budget, on which cache and sequences may hang. Raises UserError.

        Where the server has more sequences than it can cut a prompt beside within the budget, the
        run has as many as it can: its flags are then those of what was simulated.
        """
        cfg = self.with_budget(budget)
        plan = make_plan(cfg, self.setup)
        fitting = with_fitting_sequences(cfg, plan)
        if fitting is cfg:
            return plan
        return make_plan(fitting, self.setup)

    def simulate(self, budget: Budget, slo: Slo | None) -> dict[str, Any]:
        """Return the row of a run, which is simulated once. Raises UserError.

        Args:
            budget: Its token budget.
            slo: The objective in seconds; None without bounds.
        """
        if budget not in self.runs:
            plan = self.plan(budget)
            self.runs[budget] = simulated_run(plan, slo)
        run = self.runs[budget]
        return {
            "policy": self.label,
            "chunk": budget.chunk,
            "is_whole": budget.is_whole,
            **run.quantities,
        }

    def repeat(self, row: Row, slo: Slo | None) -> dict[str, Any]:
        """Return the row of a run like that of another option."""
        budget = Budget.of(row)
        return self.simulate(budget, slo)

    def parameters(self, budget: Budget) -> Mapping[str, object]:
        """Return what is to be set of the policy to leave prompts whole, or not to."""
        if not budget.is_whole:
            return {}
        policy = build(self.cfg.policy, Policy)
        return whole_variant(policy)


@dataclass(frozen=True)
class PolicyRuns:
    """A policy with the runs that were simulated for it.

    Attributes:
        option: The policy.
        plan: A run under it; the chunk is any.
        slo: The objective in seconds; None without bounds.
        table: A row for each chunk that was tried, with what `predict` returns, the `policy` (its
            label), whether prompts are left whole (`is_whole`) and `num_requests`.
        confirmed: Such rows of longer runs; empty where there are none.
    """

    option: Option
    plan: Plan
    slo: Slo | None
    table: pd.DataFrame
    confirmed: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def judged(self) -> pd.DataFrame:
        """The rows that are chosen from, all of as many requests, the best of them marked."""
        if self.confirmed.empty:
            return self.table
        return marked(self.confirmed)

    @cached_property
    def best(self) -> pd.Series:
        """The row that is chosen of these."""
        return choose(self.judged)

    @property
    def best_short(self) -> pd.Series:
        """The row of `table` with its chunk."""
        return self.tried(self.best)

    def tried(self, row: Row) -> pd.Series:
        """Return the row of `table` with the chunk of `row`, which may be of a longer run."""
        table = self.table
        has_chunk = table["chunk"] == row["chunk"]
        cuts_alike = table["is_whole"] == row["is_whole"]
        rows = table[has_chunk & cuts_alike]
        return rows.iloc[0]

    def run_of(self, row: Row) -> SimulatedRun:
        """Return the run of a row of `table` or of `confirmed`."""
        option = self.option.longer
        if row["num_requests"] == len(self.plan.load.requests):
            option = self.option
        budget = Budget.of(row)
        return option.runs[budget]

    def config_of(self, row: Row) -> DictConfig:
        """Return the configuration of the run of a row of the table."""
        budget = Budget.of(row)
        return self.option.with_budget(budget)

    def plan_of(self, row: Row) -> Plan:
        """Return the plan of that run."""
        budget = Budget.of(row)
        return self.option.plan(budget)

    def settings_of(self, row: Row) -> list[str]:
        """Return the settings that make a typed command the run of a row."""
        budget = Budget.of(row)
        parameters = self.option.parameters(budget)
        settings = policy_settings(parameters)
        # Last, as the command of a remedy whose task names its chunks drops it.
        settings.append(f"{self.option.chunk_setting}={budget.chunk}")
        return settings

    @property
    def longest_prompt(self) -> int:
        requests = self.plan.load.requests
        return max(request.prompt_len for request in requests)

    @property
    def has_longer(self) -> bool:
        """Whether `longer` has a run: of requests that arrive over time, in any number."""
        workload = self.option.cfg.workload
        is_any_number = isinstance(workload.get("num_requests"), int)
        arrive = self.plan.load.has_times
        return self.slo is not None and is_any_number and arrive

    def longer(self, row: Row) -> dict[str, Any]:
        """Return the row of a run of `LONGER` times the requests."""
        return self.option.longer.repeat(row, self.slo)

    def with_row(self, row: Row) -> PolicyRuns:
        """Return the same with another row of `table`."""
        added = pd.DataFrame([row])
        table = pd.concat([self.table, added], ignore_index=True)
        return replace(self, table=marked(table))


def simulated_run(plan: Plan, slo: Slo | None) -> SimulatedRun:
    """Serve the requests of a plan in simulation. Raises UserError."""
    _, executor = plan.build()
    engine = plan.engine
    ledger = serve(plan.load.arrivals(), engine, executor)
    quantities = quantities_of_run(ledger, engine, slo)
    iterations = ledger.columns_of_iterations("num_blocks_used")
    fitting = sequences_in_cache(iterations.num_blocks_used, ledger.requests(), engine)
    num_requests = len(plan.load.requests)
    row = {"num_requests": num_requests, **quantities}
    return SimulatedRun(row, fitting)


def with_fitting_sequences(cfg: DictConfig, plan: Plan) -> DictConfig:
    """Return the configuration of a run with as many sequences as its server can cut a prompt
    beside within the token budget, where those of its defaults are more; else as it is.

    Args:
        cfg: The configuration, in which a stated `batch` is the user's to decide.
        plan: The run.
    """
    batch_size = plan.engine.batch_size
    budget = plan.policy.budget
    if cfg.batch is not None or budget is None:
        return cfg
    needed = least_budget(plan.policy, batch_size)
    excess = needed - budget
    if not 0 < excess < batch_size:
        return cfg
    # A decode takes one token of the budget, so that each sequence less leaves one more.
    num_fitting = batch_size - excess
    return changed(cfg, batch=num_fitting)


def options_of(cfg: DictConfig, entries: Sequence[object]) -> list[Option]:
    """Return the run's policy, then those of `entries` (names, or a name with parameters) that are
    others. Raises UserError for what is no policy, or cuts no prompts.
    """
    first = Option(_label(cfg), (), cfg)
    options = {first.label: first}
    for entry in entries:
        name, parameters = _named(entry)
        node = _node(name, parameters)
        with_policy = changed(cfg, policy=node)
        label = _label(with_policy)
        settings = (f"policy={name}", *policy_settings(parameters))
        options.setdefault(label, Option(label, settings, with_policy))
    return list(options.values())


def policy_settings(parameters: Mapping[str, object]) -> list[str]:
    """Return parameters of a policy as they are typed."""
    settings = []
    for name, value in parameters.items():
        settings.append(f"policy.{name}={typed(value)}")
    return settings


def try_chunks(
    option: Option,
    chunks: Sequence[int] | None,
    rivals: Sequence[PolicyRuns] = (),
    *,
    is_thorough: bool = True,
) -> PolicyRuns:
    """Simulate the requests under a policy with each of `chunks`, or with those that a search
    tries if they are None. Raises UserError for a run that there can't be.

    Args:
        option: The policy.
        chunks: Token budgets.
        rivals: Policies before. A policy that gives the same with the best chunk of one of these
            is its twin, has its runs, and is searched no further.
        is_thorough: Whether it is searched further than its best chunk needs.
    """
    plan = first_plan(option)
    _, executor = plan.build()
    stated = slo_in_seconds(plan.targets.slo, plan.engine, executor)
    slo = None
    if stated.bounds:
        slo = stated

    def predict_chunk(chunk: int) -> Row:
        return option.simulate(Budget(chunk), slo)

    unit = unit_of(plan.policy)
    tile = max(TILE, unit)
    batch_size = plan.engine.batch_size
    fewest = least_budget(plan.policy, batch_size)
    if option.cfg.batch is None:
        # With fewer tokens than sequences, a server that chooses both lowers the sequences.
        fewest = min(fewest, tile)
    chunk_search = ChunkSearch(predict_chunk, slo, tile, unit)
    tried = chunks
    if chunks is None:
        tried = _chunk_of_twin(option, chunk_search, rivals, slo)
    if tried is not None:
        best = chunk_search.among(tried)
    else:
        first = candidates(plan.load.requests, fewest, tile)
        first_with_room = with_room(option, first)
        arrive = plan.load.has_times
        best = chunk_search.search(first_with_room, arrive=arrive, is_thorough=is_thorough)
    runs = PolicyRuns(option, plan, slo, best.table)
    # Where smaller chunks miss the objective, no whole prompt was tried.
    has_largest = chunks is None and best.table.chunk.max() >= runs.longest_prompt
    if has_largest and whole_variant(plan.policy):
        # Any prompt beside all decodes, as one that does not fit would wait for them.
        longest = plan.max_model_len + batch_size - 1
        budget = Budget(longest, is_whole=True)
        row = option.simulate(budget, slo)
        return runs.with_row(row)
    return runs


def with_room(option: Option, chunks: Sequence[int]) -> Sequence[int]:
    """Return ascending `chunks` without the largest ones, whose iterations leave the cache no room.
    The smallest stays, whose plan says what lacks.
    """
    number = len(chunks)
    while number > 1:
        largest = chunks[number - 1]
        if _has_room(option, largest):
            break
        number -= 1
    return chunks[:number]


def _has_room(option: Option, chunk: int) -> bool:
    """Whether a run with this chunk can be: its iterations leave the cache room."""
    try:
        option.plan(Budget(chunk))
    except UserError:
        return False
    return True


def _chunk_of_twin(
    option: Option, chunk_search: ChunkSearch, rivals: Sequence[PolicyRuns], slo: Slo | None
) -> list[int] | None:
    """Return the chunk with which a policy gives the same in every digit of all quantities as the
    first such one of the `rivals`: then it scheduled the same, and has its longer run. None without
    such a rival, whose chunk is tried all the same.
    """
    for rival in rivals:
        row = _with_chunk(option, rival.best, slo)
        if row is None:
            continue
        chunk = row["chunk"]
        chunk_search.rows[chunk] = row
        if is_same_run(row, rival.best_short):
            if not rival.confirmed.empty:
                longer_run = rival.run_of(rival.best)
                option.longer.runs[Budget(chunk)] = longer_run
            return [chunk]
    return None


def is_same_run(row: Mapping[str, Any], rival: Row) -> bool:
    """Return whether two policies gave the same in every digit of all quantities."""
    for name, value in row.items():
        if name == "policy":
            continue
        rival_value = rival[name]
        are_unknown = pd.isna(value) and pd.isna(rival_value)
        if value != rival_value and not are_unknown:
            return False
    return True


def with_chunk_of(runs: PolicyRuns, leader: Row) -> PolicyRuns:
    """Return the runs of a policy with one of the `leader`'s chunk, where it may have it."""
    row = _with_chunk(runs.option, leader, runs.slo)
    if row is None:
        return runs
    tried = set(runs.table["chunk"])
    if row["chunk"] in tried:
        return runs
    return runs.with_row(row)


def _with_chunk(option: Option, leader: Row, slo: Slo | None) -> dict[str, Any] | None:
    """Return the row of a run with the chunk of another policy; None where it may not have that."""
    if leader["is_whole"]:
        return None
    chunk = int(leader["chunk"])
    policy = build(option.cfg.policy, Policy)
    is_in_units = chunk % unit_of(policy) == 0
    is_large_enough = chunk >= least_budget(policy, 1)
    # Planned last, which takes longest.
    if is_in_units and is_large_enough and _has_room(option, chunk):
        return option.simulate(Budget(chunk), slo)
    return None


def first_plan(option: Option) -> Plan:
    """Plan a run whose token budget suits the policy and its sequences: the server's where both are
    left to it. Raises UserError.
    """
    cfg = option.cfg
    batch = cfg.batch
    if cfg.chunk is None and batch is None:
        return make_plan(cfg, option.setup)
    policy = build(cfg.policy)
    unit = unit_of(policy)
    least = max(FIRST_CHUNK, batch or 0)
    num_units = math.ceil(least / unit)
    chunk = num_units * unit
    return option.plan(Budget(chunk))


def _named(entry: object) -> tuple[str, Mapping[str, object]]:
    """Return the name of an entry of `task.policies`, and the parameters stated there."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, parameters),) = entry.items()
        if isinstance(parameters, Mapping):
            return str(name), parameters
    raise UserError(f"task.policies: {entry} is no policy; {AN_OPTION}")


def _node(name: str, parameters: Mapping[str, object]) -> DictConfig:
    """Return the settings of a policy with other parameters. Raises UserError."""
    files = option_files("policy")
    require_one_of("task.policies", name, files)
    node = read_option("policy", files[name])
    policy_class = class_of({"policy": node}, "policy")
    valid = parameters_of(policy_class) or []
    for key, value in parameters.items():
        if key not in valid:
            raise unknown_name(f"task.policies: {name}.{key}", valid, "a parameter")
        node[key] = value
    return node


def budget_field(policy: Policy) -> str:
    """Return the parameter that is the policy's chunk. Raises UserError for one without."""
    if policy.budget_field is None:
        raise UserError(
            f"policy={policy.name} has no chunk to choose; use policy=vllm_v1 or "
            "policy=sarathi_serve"
        )
    return policy.budget_field


def _label(cfg: DictConfig) -> str:
    """Return the policy's name with its parameters that are not at their defaults."""
    policy = build(cfg.policy, Policy)
    budget_field(policy)  # refuses one that has no chunk to compare
    label = str(policy.name)
    for name, value in chosen_parameters(policy).items():
        label += f" {name}={typed(value)}"
    return label

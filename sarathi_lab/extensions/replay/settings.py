"""Settings of a replay: what the files state of the server, what the user states, what is assumed.

One rule for all of them: a file's statement holds for the run as it was, and one with all arguments
of a server states its defaults, too. Where no file states a setting, the user's holds, and else the
server's default. What the user states otherwise than a file is the setting of a further replay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError, require_bool, require_int, require_one_of
from sarathi_lab.config.instantiate import (
    as_written,
    class_name,
    class_of,
    name_of,
    option_files,
    read_option,
    top_level,
)
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.extensions.replay.argument_values import GRAPH_MODE, UNCUT
from sarathi_lab.extensions.replay.real_run import BLOCK_SIZE, VERSION_OF_RULES, RealRun
from sarathi_lab.policy import Policy, VllmV1
from sarathi_lab.policy.vllm import rules_of

Settings = Mapping[str, object]  # by the lab's dotted names
AUTO = "auto"  # of a chunk: as advised; of blocks: all memory
# What the command line can state of a server, beside `policy.*`.
SETTINGS = (
    "chunk",
    "batch",
    "max_model_len",
    "queue_order",
    "executor.tensor_parallel",
    "executor.pipeline_parallel",
    "executor.weights",
    "cache.block_size",
    "cache.num_blocks",
    "cache.prefix",
    "cache.dtype",
    "cache.align_chunks",
    "cache.memory_share",
)
OF_GRAPHS = (GRAPH_MODE, "host.graphs.sizes", "host.graphs.largest")
OF_WORKLOAD = ("workload.arrivals", "workload.users", "workload.think_time")
# A server's defaults, of what depends neither on its device nor on its model.
SERVER_DEFAULTS: Settings = {
    "executor.tensor_parallel": 1,
    "executor.pipeline_parallel": 1,
    "executor.weights": "auto",
    "cache.block_size": BLOCK_SIZE,
    "cache.num_blocks": None,
    "cache.memory_share": None,
    "cache.prefix": True,
    "cache.dtype": "auto",
    "cache.align_chunks": False,
    "max_model_len": None,
    "queue_order": "fcfs",
}
# What the description of every replay has, of these and of policies.
ALWAYS_SHOWN = (
    "executor.tensor_parallel",
    "executor.pipeline_parallel",
    "cache.block_size",
    "cache.num_blocks",
    "cache.prefix",
    "policy.page_size",
)
GRAPHS_BY_DEFAULT = "full_and_piecewise"
# Of these, what a reader asks for where it is assumed.
NAMED_WHERE_ASSUMED = ("executor.tensor_parallel", "cache.block_size", "cache.prefix")
# On which the number of blocks depends.
SIZING = (
    "executor.tensor_parallel",
    "executor.pipeline_parallel",
    "executor.weights",
    "cache.block_size",
    "cache.dtype",
    "cache.memory_share",
)


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of the run as it was and of what the user asks besides.

    Attributes:
        policy: The run's policy, as its file in conf/policy has it.
        as_run: Settings of the run, chunk and batch missing where nothing states them.
        by_user: Those that the user states.
        of_other_policy: Whether the user names another policy, whose chunk `by_user` has.
        assumed: What nothing states, such as "cache.prefix=true".
        notes: What is taken from the user, and what is stated and not read.
    """

    policy: DictConfig
    as_run: Settings
    by_user: Settings
    of_other_policy: bool
    assumed: Sequence[str]
    notes: Sequence[str]

    def config_what_if(self, cfg: DictConfig, as_run: DictConfig) -> DictConfig:
        """Return `as_run` with the user's settings, those of another policy from `cfg`."""
        node = cfg.policy if self.of_other_policy else as_run.policy
        settings = {"policy": node, **self.by_user}
        for name in SIZING:
            of_run = OmegaConf.select(as_run, name)
            if self.by_user.get(name, of_run) != of_run:
                # The run's number of blocks is not that of other sizes.
                settings.setdefault("cache.num_blocks", None)
        return with_settings(as_run, settings)


def check_values(cfg: DictConfig) -> None:
    """Raise UserError for a value that a setting can't have; null is as it was run."""
    if cfg.chunk == AUTO:
        raise UserError("chunk=auto is chosen for a workload, not for a run; name tokens")
    for name in ("chunk", "batch", "max_model_len", "cache.block_size", "cache.num_blocks"):
        value = OmegaConf.select(cfg, name)
        is_all_memory = name == "cache.num_blocks" and value == AUTO
        if value is not None and not is_all_memory:
            require_int(name, value, 1, "use a whole number, or null for the run's")
    for name in ("cache.prefix", "cache.align_chunks"):
        require_bool(name, OmegaConf.select(cfg, name))
    require_one_of("queue_order", cfg.queue_order, get_args(QueueOrder))
    if cfg.queue_order == "priority":
        raise UserError(
            "queue_order=priority has no effect on a replay, as recorded requests have no "
            "priorities; drop it"
        )


def replay_settings(cfg: DictConfig, run: RealRun) -> ReplaySettings:
    """Find the settings of a run's replays. Raises UserError for a value that one can't have."""
    check_values(cfg)
    policy = option("policy", run.policy)
    chosen = class_of(cfg, "policy")
    typed = typed_settings(cfg)
    is_named = any(name.partition(".")[0] == "policy" for name in typed)
    is_of_run = chosen is class_of({"policy": policy}, "policy")
    of_other_policy = not is_of_run and (is_named or chosen is not VllmV1)
    by_user = _stated_by_user(cfg, typed)
    if is_of_run:
        by_user |= _policy_of_user(cfg, policy, run, typed)
    # Of the server, not of the command line; its defaults are looked up later.
    as_run = {**SERVER_DEFAULTS, "chunk": None, "batch": None}
    if "version" in policy:
        as_run[VERSION_OF_RULES] = rules_of(run.version)
    notes = []
    assumed = []
    for name, value in by_user.items():
        is_of_other_policy = of_other_policy and name == "chunk"
        if not run.settings.tell(name) and not is_of_other_policy:
            as_run[name] = value
            notes.append(f"as you state: {name}={shown(value)}")
    of_files, notes_of_files = _settings_of_files(run, policy)
    as_run |= of_files
    notes += notes_of_files
    if as_run["chunk"] == UNCUT:
        as_run["chunk"] = _chunk_of_longest_prompt(run, as_run["cache.block_size"])
        notes.append(
            f"chunked_prefill_size={UNCUT} cuts no prompt: chunk={as_run['chunk']}, the longest "
            "prompt's tokens in whole pages, is taken"
        )
    for name in NAMED_WHERE_ASSUMED:
        if not run.settings.tell(name) and name not in by_user:
            assumed.append(f"{name}={shown(as_run[name])}")
    return ReplaySettings(policy, as_run, by_user, of_other_policy, assumed, notes)


def _settings_of_files(run: RealRun, policy: DictConfig) -> tuple[dict[str, object], list[str]]:
    """Return the settings that files state of a run, and notes on those that its policy has not."""
    settings = dict[str, object]()
    notes = []
    for name, value in run.settings.stated.items():
        is_of_policy = name.startswith("policy.")
        if is_of_policy and name.removeprefix("policy.") not in policy:
            notes.append(f"not simulated: {name}={shown(value)}, which {run.policy} has not")
        elif is_of_policy or name in SETTINGS:
            settings[name] = value
    # Also where files state it in tokens.
    if run.settings.num_blocks is not None:
        settings["cache.num_blocks"] = run.settings.num_blocks
    return settings, notes


def _chunk_of_longest_prompt(run: RealRun, page_size: object) -> int:
    """Return the tokens of whole pages that hold the longest prompt."""
    assert isinstance(page_size, int), "as check_values and the table of arguments have it"
    longest = 1
    if len(run.requests):
        longest = int(run.requests.prompt_len.max())
    return math.ceil(longest / page_size) * page_size


def _stated_by_user(cfg: DictConfig, typed: Mapping[str, str]) -> dict[str, object]:
    """Return what is typed, or otherwise than the lab's files have it; null states nothing."""
    # A server's chunk and batch are not those of the lab's files.
    own = {
        "executor": option("executor", "simulated"),
        "chunk": None,
        "batch": None,
    }
    defaults = OmegaConf.create({**top_level(), **own})
    stated = {}
    for name in SETTINGS:
        value = OmegaConf.select(cfg, name)
        is_stated = name in typed or value != OmegaConf.select(defaults, name)
        if value is not None and is_stated:
            stated[name] = value
    return stated


def _policy_of_user(
    cfg: DictConfig,
    policy: DictConfig,
    run: RealRun,
    typed: Mapping[str, str],
) -> dict[str, object]:
    """Return the fields of the run's policy that the user states; its budget is the chunk."""
    # An option that the user has made, as of an object in Python, states all fields.
    states_all = typed.get("policy", run.policy) != run.policy
    of_run = as_written(policy)
    stated = {}
    for key, value in as_written(cfg.policy).items():
        name = f"policy.{key}"
        is_other = key not in of_run or value != of_run[key]
        if key != "_target_" and (states_all or is_other or name in typed):
            stated[name] = value
    return stated


def further_facts(run: RealRun, policy: Policy) -> list[str]:
    """Describe the settings that files state otherwise than servers have them by default, but for
    those that every description of a replay has.
    """
    fields = as_written(option("policy", run.policy))
    defaults = {f"policy.{name}": value for name, value in fields.items()}
    defaults |= {**SERVER_DEFAULTS, GRAPH_MODE: GRAPHS_BY_DEFAULT}
    shown_elsewhere = (*ALWAYS_SHOWN, f"policy.{policy.budget_field}")
    facts = []
    for name, default in defaults.items():
        value = run.settings.stated.get(name, default)
        if value != default and name not in shown_elsewhere:
            facts.append(f"{name}={shown(value)}")
    return facts


def typed_settings(cfg: DictConfig) -> dict[str, str]:
    """Return the settings of the command line, by name."""
    return {name_of(setting): setting.partition("=")[2] for setting in cfg.task.stated or ()}


def option(group: str, name: str) -> DictConfig:
    """Read an option's file in conf/."""
    return read_option(group, option_files(group)[name])


def with_settings(cfg: DictConfig, settings: Settings) -> DictConfig:
    """Return a copy of `cfg` with other values of settings, by their dotted names."""
    cfg = cfg.copy()
    for name, value in settings.items():
        OmegaConf.update(cfg, name, value, merge=False)
    return cfg


def differences(first: DictConfig, second: DictConfig) -> list[str]:
    """Describe what `second` has otherwise, such as "batch=8 (256)"."""
    changed = []
    names = [*SETTINGS]
    if class_of(first, "policy") is not class_of(second, "policy"):
        changed.append(f"policy {class_name(second.policy)} ({class_name(first.policy)})")
    else:
        names += [f"policy.{key}" for key in second.policy]
    if first.host.name != second.host.name:
        changed.append(f"host={second.host.name} ({first.host.name})")
    if first.host.get("graphs") and second.host.get("graphs"):
        names = [*OF_GRAPHS, *names]
    for name in names:
        before = OmegaConf.select(first, name)
        after = OmegaConf.select(second, name)
        # A policy's budget is another name of the chunk.
        is_said = name.startswith("policy.") and after == second.chunk
        if before != after and not is_said:
            changed.append(f"{name}={shown(after)} ({shown(before)})")
    return changed


def shown(value: object) -> str:
    """Return a value as it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

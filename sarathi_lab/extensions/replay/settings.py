"""Settings of a replay: what the files state of the server, what the user states, what is assumed.

One rule for all of them: a file's statement holds for the run as it was, and one with all arguments
of a server states its defaults, too. Where no file states a setting, the user's holds, and else the
server's default. What the user states otherwise than a file is the setting of a further replay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast, get_args

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError, require_bool, require_int, require_one_of
from sarathi_lab.config.instantiate import (
    as_written,
    class_name,
    class_of,
    name_of,
    option_files,
    read_option,
    resolved,
    top_level,
)
from sarathi_lab.engine.queues import QueueOrder
from sarathi_lab.extensions.replay.argument_values import GRAPH_MODE, UNCUT
from sarathi_lab.extensions.replay.real_run import BLOCK_SIZE, VERSION_OF_RULES, RealRun
from sarathi_lab.policy import Policy, VllmV1
from sarathi_lab.policy.vllm import rules_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AUTO = "auto"  # of a chunk: as advised; of blocks: all memory
# What the command line can state of a server, beside `policy.*`.
SETTINGS = (
    *("chunk", "batch", "max_model_len", "queue_order"),
    *("executor.tensor_parallel", "executor.pipeline_parallel", "executor.weights"),
    *("cache.block_size", "cache.num_blocks", "cache.prefix", "cache.dtype", "cache.align_chunks"),
    "cache.memory_share",
)
OF_WORKLOAD = ("workload.arrivals", "workload.users", "workload.think_time")
# A server's defaults, of what depends neither on its device nor on its model.
SERVER_DEFAULTS: dict[str, object] = {
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
    *("executor.tensor_parallel", "executor.pipeline_parallel", "cache.block_size"),
    *("cache.num_blocks", "cache.prefix", "policy.page_size"),
)
GRAPHS_BY_DEFAULT = "full_and_piecewise"
# Of these, what a reader asks for where it is assumed.
NAMED_WHERE_ASSUMED = ("executor.tensor_parallel", "cache.block_size", "cache.prefix")
# On which the number of blocks depends.
SIZING = (
    *("executor.tensor_parallel", "executor.pipeline_parallel", "executor.weights"),
    *("cache.block_size", "cache.dtype", "cache.memory_share"),
)
HOST = "executor.host."  # the same as `host`, in an executor's settings
GRAPHS = f"{HOST}graphs."
COMPARED = ("chunk", "batch", "policy", "executor", "cache", "max_model_len", "queue_order")


@dataclass(frozen=True)
class ReplaySettings:
    """Settings by the lab's names, of the run as it was and of what the user asks besides.

    Attributes:
        policy: The run's policy, as its file in conf/policy has it.
        as_run: Settings of the run, chunk and batch missing where nothing states them.
        by_user: Those that the user states.
        of_other_policy: Whether the user names another policy, whose chunk `by_user` has.
        assumed: What nothing states, such as "cache.prefix=true".
        notes: What is taken from the user, and what is stated and not read.
    """

    policy: DictConfig
    as_run: Mapping[str, object]
    by_user: Mapping[str, object]
    of_other_policy: bool
    assumed: Sequence[str]
    notes: Sequence[str]

    def config_as_run(self, cfg: DictConfig) -> DictConfig:
        """Return `cfg` with the run's settings."""
        return with_settings(cfg, {"policy": self.policy, **self.as_run})

    def config_what_if(self, cfg: DictConfig, as_run: DictConfig) -> DictConfig:
        """Return `as_run` with the user's settings, those of another policy from `cfg`."""
        node = cfg.policy if self.of_other_policy else as_run.policy
        settings = {"policy": node, **self.by_user}
        if "cache.num_blocks" not in settings and self._needs_other_cache(as_run):
            settings["cache.num_blocks"] = None
        return with_settings(as_run, settings)

    def _needs_other_cache(self, as_run: DictConfig) -> bool:
        """Return whether the run's number of blocks is not that of the user's settings."""
        for name in SIZING:
            if name in self.by_user and self.by_user[name] != OmegaConf.select(as_run, name):
                return True
        return False


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
    typed = typed_settings(cfg)
    policy = read_option("policy", option_files("policy")[run.policy])
    of_other_policy = _names_other_policy(cfg, policy, run, typed)
    by_user = _stated_by_user(cfg, typed)
    if not of_other_policy:
        by_user |= _policy_fields(cfg, policy, run, typed)
    notes = []
    # Of the server, not of the command line; its defaults are looked up later.
    as_run = {**SERVER_DEFAULTS, "chunk": None, "batch": None}
    if "version" in policy:
        as_run[VERSION_OF_RULES] = rules_of(run.version)
    for name, value in by_user.items():
        is_of_other_policy = of_other_policy and name == "chunk"
        if not run.settings.tell(name) and not is_of_other_policy:
            as_run[name] = value
            notes.append(f"as you state: {name}={_shown(value)}")
    of_files, notes_of_files = _settings_of_files(run, policy)
    as_run |= of_files
    notes += notes_of_files
    if as_run.get("chunk") == UNCUT:
        page_size = int(str(as_run["cache.block_size"]))
        as_run["chunk"] = _chunk_of_longest_prompt(run, page_size)
        notes.append(
            f"chunked_prefill_size={UNCUT} cuts no prompt: chunk={as_run['chunk']}, the longest "
            "prompt's tokens in whole pages, is taken"
        )
    assumed = []
    if not run.settings.is_complete:
        for name in NAMED_WHERE_ASSUMED:
            if not run.settings.tell(name) and name not in by_user:
                assumed.append(f"{name}={_shown(as_run[name])}")
    return ReplaySettings(policy, as_run, by_user, of_other_policy, assumed, notes)


def _settings_of_files(run: RealRun, policy: DictConfig) -> tuple[dict[str, object], list[str]]:
    """Return the settings that files state of a run, and notes on those that its policy has not."""
    settings = dict[str, object]()
    notes = []
    for name, value in run.settings.stated.items():
        of_policy = name.startswith("policy.")
        if of_policy and name.removeprefix("policy.") not in policy:
            notes.append(f"not simulated: {name}={_shown(value)}, which {run.policy} has not")
        elif of_policy or name in SETTINGS:
            settings[name] = value
    # Also where files state it in tokens.
    if run.settings.num_blocks is not None:
        settings["cache.num_blocks"] = run.settings.num_blocks
    return settings, notes


def _chunk_of_longest_prompt(run: RealRun, page_size: int) -> int:
    """Return the tokens of whole pages that hold the longest prompt."""
    num_tokens = 1
    if len(run.requests):
        num_tokens = int(run.requests.prompt_len.max())
    return math.ceil(num_tokens / page_size) * page_size


def further_facts(run: RealRun, policy: Policy) -> list[str]:
    """Describe the settings that files state otherwise than servers have them by default, but for
    those that every description of a replay has.
    """
    defaults: dict[str, object] = {}
    for rule in fields(cast("DataclassInstance", policy)):  # every policy is a dataclass
        defaults[f"policy.{rule.name}"] = rule.default
    defaults |= {**SERVER_DEFAULTS, GRAPH_MODE: GRAPHS_BY_DEFAULT}
    stated = run.settings.stated
    shown_elsewhere = (*ALWAYS_SHOWN, f"policy.{policy.budget_field}")
    facts = []
    for name, default in defaults.items():
        is_other = stated.get(name, default) != default
        if is_other and name not in shown_elsewhere:
            facts.append(f"{name}={_shown(stated[name])}")
    return facts


def typed_settings(cfg: DictConfig) -> dict[str, str]:
    """Return the settings of the command line, by name."""
    return {name_of(setting): setting.partition("=")[2] for setting in cfg.task.stated or ()}


def with_settings(cfg: DictConfig, settings: Mapping[str, object]) -> DictConfig:
    """Return a copy of `cfg` with other values of settings, by their dotted names."""
    cfg = cfg.copy()
    for name, value in settings.items():
        OmegaConf.update(cfg, name, value, merge=False)
    return cfg


def differences(first: DictConfig, second: DictConfig) -> list[str]:
    """Describe what `second` has otherwise, such as "batch=8 (256)"."""
    before = _compared(first)
    changed = []
    is_other_policy = class_of(first, "policy") is not class_of(second, "policy")
    if is_other_policy:
        changed.append(f"policy {class_name(second.policy)} ({class_name(first.policy)})")
    is_other_host = first.host.name != second.host.name
    if is_other_host:
        changed.append(f"host={second.host.name} ({first.host.name})")
    for name, value in _compared(second).items():
        if before.get(name) == value:
            continue
        if name.startswith("policy.") and (is_other_policy or value == second.chunk):
            continue  # which is said already: a policy's budget is another name of the chunk
        if is_other_host and name.startswith(HOST) and not name.startswith(GRAPHS):
            continue  # which its name says
        typed_name = name.replace(HOST, "host.")
        changed.append(f"{typed_name}={_shown(value)} ({_shown(before.get(name))})")
    return changed


def _compared(cfg: DictConfig) -> dict[str, object]:
    config = resolved(cfg)
    return _flat({key: config[key] for key in COMPARED})


def _stated_by_user(cfg: DictConfig, typed: Mapping[str, str]) -> dict[str, object]:
    """Return what is typed, or otherwise than the lab's files have it; null states nothing."""
    executor = read_option("executor", option_files("executor")["simulated"])
    # A server's chunk and batch are not those of the lab's files.
    own = {"executor": executor, "chunk": None, "batch": None}
    defaults = OmegaConf.create({**top_level(), **own})
    stated = {}
    for name in SETTINGS:
        value = OmegaConf.select(cfg, name)
        is_stated = name in typed or value != OmegaConf.select(defaults, name)
        if value is not None and is_stated:
            stated[name] = value
    return stated


def _names_other_policy(
    cfg: DictConfig, policy: DictConfig, run: RealRun, typed: Mapping[str, str]
) -> bool:
    """Return whether the user names another policy than the run's."""
    chosen = class_of(cfg, "policy")
    of_run = class_of({"policy": policy}, "policy")
    is_named = any(name.partition(".")[0] == "policy" for name in typed)
    return chosen is not of_run and (is_named or chosen is not VllmV1)


def _policy_fields(
    cfg: DictConfig, policy: DictConfig, run: RealRun, typed: Mapping[str, str]
) -> dict[str, object]:
    """Return the fields of the run's policy that the user states; its budget is the chunk."""
    if class_of(cfg, "policy") is not class_of({"policy": policy}, "policy"):
        return {}  # the default of the command line, which names none
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


def _flat(node: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested values by their dotted names."""
    flat: dict[str, object] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

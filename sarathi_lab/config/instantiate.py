"""Objects from configuration nodes, and from the files of `conf/` by their names."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from sarathi_lab.config.arrivals import IMPLIED_BY, implied_arrivals
from sarathi_lab.config.errors import (
    UserError,
    require_int,
    require_number,
    require_text,
    unknown_name,
)
from sarathi_lab.config.paths import CONF

GROUPS = (
    *("task", "policy", "workload", "executor", "model", "hardware", "host", "cluster", "slo"),
    *("speculation", "tracking"),
)
CHOICES = (*GROUPS, "experiment")  # what has options
ROUND = "repetition"  # the setting that numbers the rounds of a sweep
# Names that some option of a group reads and others don't.
READ_BY = {
    "chunk": ("policy",),
    "pd_ratio": ("workload",),
    "seq_len": ("workload",),
    "seed": ("workload", "executor", "speculation"),
    "device": ("executor",),
    "dtype": ("executor",),
    "hardware": ("executor",),
    "host": ("executor",),
}
OF_SIMULATION = ("hardware", "host")
READ_BY_ALL_TASKS = (
    *("task", "experiment", "tracking", "output", "resume", "limit", "skip_invalid", "hydra"),
)
MOST_ROUNDS = 1000
OF_RUNS = ("repeat", ROUND, "plot")  # read for tasks whose runs a sweep compares
ENGINES = ("executor.pipeline_parallel", "cluster.num", "cluster.decode")  # numbers of them
PAPER_BATCH = 8  # sequences of a batch where nothing else is stated
TURNS = 4  # of each user
MINUTE = 60.0  # seconds of arrivals
FEWEST_ARRIVALS = 128  # requests of an engine
MOST_ARRIVALS = 8192  # requests


def _batches(num_measured: int, num_simulated: int, *, _root_: DictConfig) -> int:
    """Return how many requests a workload has that does not state it.

    Where all wait from the start, so many times what all stages and engines serve at once: in
    simulation more, as more batches there take hardly any time. Where they arrive over time at a
    simulated device, it is a minute of arrivals, so that a queue that grows has the time to show,
    and four turns of each user. The batch does not count then: it is no load.
    """
    numbers = [OmegaConf.select(_root_, name) for name in ENGINES]
    num_engines = math.prod(number for number in numbers if isinstance(number, int))
    batch = _root_.batch if isinstance(_root_.batch, int) else PAPER_BATCH
    is_simulated = not is_measured(_root_)
    if not _arrive_over_time(_root_):
        return (num_simulated if is_simulated else num_measured) * num_engines * batch
    users = OmegaConf.select(_root_, "workload.users")
    num_turns = TURNS * users if isinstance(users, int) else 0  # users are those of all engines
    if not is_simulated:  # a measured run takes the minutes of the machine at hand
        return max(num_measured * num_engines * batch, num_turns)
    return max(FEWEST_ARRIVALS * num_engines, num_turns, _minute_of_arrivals(_root_))


def _drawn(number: int, *, _root_: DictConfig) -> int:
    """Return `number` requests of a data set's lengths, or as many as come within a minute at a
    simulated device.
    """
    if is_measured(_root_) or not _arrive_over_time(_root_):
        return number
    return max(number, _minute_of_arrivals(_root_))


def _minute_of_arrivals(cfg: DictConfig) -> int:
    """Return the requests of a minute, and no more than a minute's simulation serves."""
    rate = OmegaConf.select(cfg, "workload.rate")
    num_arrivals = math.ceil(MINUTE * rate) if isinstance(rate, int | float) else 0
    return min(num_arrivals, MOST_ARRIVALS)


def _arrive_over_time(cfg: DictConfig) -> bool:
    """Return whether a generated workload's requests come one after the other, by its settings."""
    kind = OmegaConf.select(cfg, "workload.arrivals")
    if kind is None:
        # Only these: another setting may be the number that is asked for.
        settings = {name: OmegaConf.select(cfg, f"workload.{name}") for name in IMPLIED_BY}
        kind, _ = implied_arrivals(settings)
    return bool(kind != "closed")


OmegaConf.register_new_resolver("batches", _batches, replace=True)
OmegaConf.register_new_resolver("drawn", _drawn, replace=True)


def is_measured(cfg: DictConfig) -> bool:
    """Return whether the executor's times are a real device's; True for a class that is none."""
    try:
        executor = class_of(cfg, "executor")
    except UserError:
        return True  # it is refused where it is built
    return bool(getattr(executor, "computes_tokens", True))


def name_of(setting: str) -> str:
    """The name that a setting sets, such as "policy" of "+policy=orca"."""
    return setting.partition("=")[0].lstrip("+~")


def build(node: DictConfig | ListConfig, kind: Any = object) -> Any:
    """Instantiate a config node, which must make a `kind`. Raises UserError as constructors do."""
    try:
        built = instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(cause := error.__cause__, UserError):
            raise cause from None
        if isinstance(cause, TypeError):  # of a parameter deleted with `~`, or of another kind
            fix = "put back or correct its settings"
            raise UserError(f"{dict(node)['_target_']}: {cause}; {fix}") from None
        if cause is None or isinstance(cause, ImportError):
            reason, fix = " ".join(str(cause or error).split()), "name a class as module.Class"
            raise UserError(f"a _target_ can't be imported ({reason}); {fix}") from None
        raise
    if not isinstance(built, kind):
        raise UserError(f"_target_={type(built).__name__} is no {kind.__name__}; name one")
    return built


def class_of(cfg: Mapping[Any, Any], group: str) -> type:
    """The class that `GROUP._target_` names. Raises UserError if it can't be imported."""
    target = target_of(cfg, group)
    if isinstance(target, type):
        return target
    name = cfg[group]["_target_"]
    raise UserError(f"{group}._target_={name} is no class; name a class as module.Class")


def target_of(cfg: Mapping[Any, Any], group: str) -> Callable[..., object]:
    """Return the class or function that `GROUP._target_` names, which makes the group's object.
    Raises UserError if it can't be imported.
    """
    target = str(cfg[group]["_target_"])
    return imported(target, f"{group}._target_={target}", "a class as module.Class")


def imported(dotted: str, setting: str, kind: str) -> Callable[..., object]:
    """Import what a user names by `module.name`.

    Args:
        dotted: The name.
        setting: The setting with its value, for the error.
        kind: What it should name, for the error: "a class as module.Class".

    Raises:
        UserError: if it can't be imported, or can't be called.
    """
    module, _, name = dotted.rpartition(".")
    reason = "it can't be called"
    try:
        target: object = getattr(import_module(module or name), name)
    except Exception as error:  # any of importing a user's module
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    else:
        if callable(target):
            return target
    fix = f"name {kind}, with the module in the current folder or installed"
    raise UserError(f"{setting} can't be imported ({reason}); {fix}")


def parameters_of(target: Callable[..., object]) -> list[str] | None:
    """The names that a class or function takes; None if it takes any."""
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # of some that are built in
        return None
    takes_any = any(found.kind is found.VAR_KEYWORD for found in parameters.values())
    return None if takes_any else list(parameters)


def parameter_names(node: DictConfig, group: str) -> list[str]:
    """A group's parameters as a user types them: the short name where it is an interpolation."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    return [
        short[1] if (short := re.fullmatch(r"\$\{(\w+)\}", str(value))) else f"{group}.{key}"
        for key, value in raw.items()
        if key != "_target_"
    ]


def fit_targets(cfg: DictConfig, settings: Sequence[str]) -> None:
    """Drop what the option's file lists for a class that `GROUP._target_=...` has exchanged, where
    the new one does not take it. Raises UserError for other keys that a class does not take.
    """
    named = set(map(name_of, settings))
    nodes = [str(key) for key in cfg if OmegaConf.is_dict(cfg[key]) and "_target_" in cfg[key]]
    for group in nodes:
        # Only hardware is made by functions: of the others, attributes of the class are read.
        target = target_of(cfg, group) if group == "hardware" else class_of(cfg, group)
        if (valid := parameters_of(target)) is None:
            continue
        for key in [one for one in cfg[group] if one not in valid and not one.startswith("_")]:
            name = f"{group}.{key}"
            if f"{group}._target_" not in named or name in named:
                raise unknown_name(name, [f"{group}.{one}" for one in valid], "a parameter")
            with open_dict(cfg[group]):
                del cfg[group][key]


@cache
def top_level() -> dict[str, Any]:
    """The settings of conf/config.yaml, Hydra's left out."""
    settings: Any = OmegaConf.load(CONF / "config.yaml")
    return {str(key): settings[key] for key in settings if key not in ("defaults", "hydra")}


def check_structure(cfg: DictConfig) -> None:
    """Refuse settings that were added or taken out, and a value in place of settings."""
    defaults = {**dict.fromkeys(GROUPS), **top_level()}
    _check_keys(cfg, [*defaults, "hydra"], "")
    for key, default in defaults.items():
        if key in GROUPS and not (OmegaConf.is_dict(cfg[key]) and "_target_" in cfg[key]):
            raise UserError(f"{key}={cfg[key]} is none of its options; --help shows them")
        if OmegaConf.is_dict(default):
            _check_keys(cfg[key], list(map(str, default)), f"{key}.")
    require_text("output", cfg.output, "name a folder, such as output=outputs")
    if cfg.limit is not None:
        require_number("limit", cfg.limit, above=0, fix="use seconds, or null for none")
    if not OmegaConf.is_list(cfg.baselines):
        fix = "write baselines=[orca], or baselines=[] for none"
        raise UserError(f"baselines={cfg.baselines} is not a list; {fix}")


def _check_keys(node: Any, known: Collection[str], prefix: str) -> None:
    names = [f"{prefix}{name}" for name in known if name not in ("_target_", "hydra")]
    if not OmegaConf.is_dict(node):
        raise UserError(f"{prefix[:-1]}={node} is no setting itself; use {', '.join(names)}")
    for name in map(str, node):
        if name not in known:
            raise unknown_name(f"{prefix}{name}", names, "a setting")
    for name in known:
        if name not in node and name != "hydra":
            raise UserError(f"{prefix}{name} is missing; put it back (~{prefix}{name} removed it)")


@dataclass
class Job:
    """The configuration of one run, and what its task's check has prepared for it."""

    settings: tuple[str, ...]
    composed: DictConfig  # with Hydra's node
    prepared: Any = None

    @cached_property
    def cfg(self) -> DictConfig:
        """The configuration without Hydra's node. Raises UserError if it can't be resolved."""
        keys = [str(key) for key in self.composed if key != "hydra"]
        cfg: DictConfig = OmegaConf.masked_copy(self.composed, keys)
        resolved(cfg)
        return cfg

    def named(self, swept: Collection[str]) -> str:
        """The settings of the sweep that it has, as they are typed."""
        return " ".join(one for one in self.settings if name_of(one) in swept)

    def reads(self, name: str) -> bool:
        """Whether its options read a short name of READ_BY, or have the field GROUP.NAME."""
        parent, _, field = name.rpartition(".")
        if parent:
            node = OmegaConf.select(self.cfg, parent)
            return OmegaConf.is_dict(node) and field in node
        texts = (OmegaConf.to_yaml(self.cfg[group], resolve=False) for group in READ_BY[name])
        return any(f"${{{name}}}" in text for text in texts)

    def reader(self, name: str) -> str:
        """The classes that a setting is for."""
        groups = READ_BY.get(name, (name.partition(".")[0],))
        return " and ".join(class_of(self.cfg, group).__name__ for group in groups)

    def num_rounds(self, swept: Collection[str]) -> int:
        """How many rounds of its sweep it is part of (`repeat`). Raises UserError."""
        repeat = self.cfg.repeat
        takes_time = is_measured(self.cfg)
        if repeat == "auto":
            rounds = getattr(class_of(self.cfg, "task"), "num_rounds", 1)
            return 1 if {ROUND, "seed"} & {*swept} or not takes_time else rounds
        require_int("repeat", repeat, 1, "use a number of rounds such as 6, or auto", MOST_ROUNDS)
        if repeat > 1 and ROUND in swept:
            raise UserError(f"repeat={repeat} has no effect: {ROUND} numbers them; drop it")
        return int(repeat) if takes_time else 1

    def in_round(self, number: int) -> Self:
        """A copy for a round of the sweep, as composing takes longer."""
        composed, setting = self.composed.copy(), f"{ROUND}={number}"
        with read_write(composed):
            composed[ROUND] = number
            composed.hydra.overrides.task.append(setting)
        return replace(self, settings=(*self.settings, setting), composed=composed)

    def refuse_unread(self) -> None:
        """Refuse what its task does not read, and a short name that no chosen option reads."""
        task = class_of(self.cfg, "task")
        read: Collection[str] | None = getattr(task, "reads", None)
        of_all = (*READ_BY_ALL_TASKS, *(OF_RUNS if getattr(task, "has_runs", False) else ()))
        for setting in self.settings:
            typed = name_of(setting)
            name = re.split(r"[./]", typed)[0]
            if read is not None and not {name, typed} & {*read, *of_all}:
                name, reader = typed, task.__name__
            elif name in READ_BY and not self.reads(name):
                reader = self.reader(name)
            else:
                continue
            is_simulated = read is None and name in OF_SIMULATION
            fix = "drop it" + ", or simulate it by executor=simulated" * is_simulated
            raise UserError(f"{setting} has no effect: {reader} does not read {name}; {fix}")


def option_files(group: str, folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """The options of a group by name: those of conf/, and those in `folders` (None: that the
    running job's `--config-dir` or `hydra.searchpath` adds), which do not replace them.
    """
    if folders is None:
        sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
        folders = [Path(source.path) for source in sources if source.schema == "file"]
    found = [folder.glob(f"{group}/*.yaml") for folder in (*reversed(folders), CONF)]
    return dict(sorted((path.stem, path) for paths in found for path in paths))


def make_loader() -> ConfigLoader:
    """Hydra's loader of conf/."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="sarathi_lab"):
        return GlobalHydra.instance().config_loader()


def read_option(group: str, path: Path) -> DictConfig:
    """The settings in an option's file, those of its defaults list included."""
    node: Any = OmegaConf.load(path)
    if "defaults" not in node:
        return node
    settings = [f"hydra.searchpath=['file://{path.parents[1]}']", f"{group}={path.stem}"]
    return make_loader().load_configuration("config", settings, RunMode.RUN)[group]


def load_option(group: str, name: str) -> Any:
    """The object that `conf/GROUP/NAME.yaml` describes, such as ("model", "13b")."""
    return build(read_option(group, CONF / group / f"{name}.yaml"))


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, all interpolations filled in."""
    container: Any = OmegaConf.to_container(cfg, resolve=True)
    return dict(container)

"""Objects from configuration nodes, and from the files of `conf/` by their names."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, overload

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from sarathi_lab.config.arrivals import IMPLIED_BY, implied_arrivals
from sarathi_lab.config.errors import (
    UserError,
    require_one_of,
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
Settings = Sequence[str]  # NAME=VALUE, as they are typed
Values = Mapping[str, object]  # of settings, by their names
Built = TypeVar("Built")
ENGINES = ("executor.pipeline_parallel", "cluster.num", "cluster.decode")  # numbers of them
PAPER_BATCH = 8  # sequences of a batch where nothing else is stated
TURNS = 4  # of each user
MINUTE = 60.0  # seconds of arrivals
FEWEST_ARRIVALS = 128  # requests of an engine
MOST_ARRIVALS = 8192  # requests
# Groups of which some option is a function; of others the class is read.
MADE_BY_FUNCTIONS = ("hardware", "host")


def _batches(num_measured: int, num_simulated: int, *, _root_: DictConfig) -> int:
    """Return how many requests a workload has that does not state it.

    Where all wait from the start, so many times what all stages and engines serve at once: in
    simulation more, as more batches there take hardly any time. Where they arrive over time at a
    simulated device, it is a minute of arrivals, so that a queue that grows has the time to show,
    and four turns of each user. The batch does not count then: it is no load.
    """
    num_slots = _number_at(_root_, "batch") or PAPER_BATCH
    num_engines = 1
    for name in ENGINES:
        num_engines *= _number_at(_root_, name) or 1
    num_slots *= num_engines
    takes_time = is_measured(_root_)
    num_waiting = num_simulated * num_slots
    if takes_time:
        num_waiting = num_measured * num_slots
    if not _arrive_over_time(_root_):
        return num_waiting
    num_turns = TURNS * _number_at(_root_, "workload.users")  # users of all engines
    if takes_time:  # the minutes of the machine at hand
        return max(num_waiting, num_turns)
    return max(FEWEST_ARRIVALS * num_engines, num_turns, _minute_of_arrivals(_root_))


def _number_at(cfg: DictConfig, name: str) -> int:
    """Return the whole number that a setting states; 0 where it states none."""
    value = OmegaConf.select(cfg, name)
    if isinstance(value, int):
        return value
    return 0


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
    if not isinstance(rate, int | float):
        return 0
    return min(math.ceil(MINUTE * rate), MOST_ARRIVALS)


def _arrive_over_time(cfg: DictConfig) -> bool:
    """Return whether a generated workload's requests come one after the other, by its settings."""
    kind = OmegaConf.select(cfg, "workload.arrivals")
    if kind is None:
        # Only these: another setting may be the number that is asked for.
        settings = {}
        for name in IMPLIED_BY:
            settings[name] = OmegaConf.select(cfg, f"workload.{name}")
        kind, _ = implied_arrivals(settings)
    return bool(kind != "closed")


def is_model_stated(cfg: DictConfig) -> bool:
    """Return whether a model is chosen, by its name or by its files."""
    model = cfg.model
    # model=auto is the default, which a path makes a stated one.
    target = str(model.get("_target_"))
    if "AutoModel" in target:
        return model.get("path") is not None
    return True


def _is_model_stated(*, _root_: DictConfig) -> bool:
    return is_model_stated(_root_)


OmegaConf.register_new_resolver("batches", _batches, replace=True)
OmegaConf.register_new_resolver("drawn", _drawn, replace=True)
OmegaConf.register_new_resolver("is_model_stated", _is_model_stated, replace=True)


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


def settings_of(settings: Iterable[str], names: Container[str]) -> list[str]:
    """Return the settings that set one of these names."""
    return [setting for setting in settings if name_of(setting) in names]


def settings_without(settings: Iterable[str], names: Container[str]) -> list[str]:
    """Return the settings that set none of these names."""
    return [setting for setting in settings if name_of(setting) not in names]


A_CLASS = "a class as module.Class"  # what a user is to name, in errors
Node = DictConfig | ListConfig | Mapping[str, object]
Groups = DictConfig | Mapping[str, DictConfig]  # nodes of options by their groups
Target = Callable[..., object]  # a class or function that a user or an option names


@overload
def build(node: Node) -> Any: ...


@overload
def build(node: Node, kind: type[Built]) -> Built: ...


def build(node: Node, kind: type[object] | None = None) -> object:
    """Make the object that a node of the configuration describes by `_target_` and arguments.

    Raises:
        UserError: A class can't be imported or does not take the arguments, or what it makes is no
            `kind`; or what constructors raise.
    """
    built = _made(plain(node))
    if kind is None:
        return built
    return require_kind(built, kind)


def require_kind(built: object, kind: type[Built]) -> Built:
    """Return `built`, what a `_target_` made. Raises UserError if it is no `kind`."""
    if isinstance(built, kind):
        return built
    made = type(built)
    setting = f"_target_={made.__module__}.{made.__name__}"
    raise UserError(f"{setting} is no {kind.__name__}; name one")


def _made(settings: object) -> object:
    if isinstance(settings, list):
        return [_made(item) for item in settings]
    if not isinstance(settings, dict):
        return settings
    arguments = {name: _made(value) for name, value in settings.items()}
    if "_target_" not in settings:
        return arguments
    dotted = str(arguments.pop("_target_"))
    target = imported(dotted, f"_target_={dotted}", A_CLASS)
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if missing:
        raise UserError(f"_target_={dotted} lacks {', '.join(missing)}; define it in the class")
    try:
        return target(**arguments)
    except TypeError as error:  # of a parameter deleted with `~`, or of another kind
        raise UserError(f"{dotted}: {error}; put back or correct its settings") from None


def class_of(cfg: Groups, group: str) -> type:
    """The class that `GROUP._target_` names. Raises UserError if it can't be imported."""
    target = target_of(cfg, group)
    if isinstance(target, type):
        return target
    setting = f"{group}._target_={cfg[group]['_target_']}"
    raise UserError(f"{setting} is no class; name {A_CLASS}")


def target_of(cfg: Groups, group: str) -> Target:
    """Return the class or function that `GROUP._target_` names, which makes the group's object.
    Raises UserError if it can't be imported.
    """
    node = cfg[group]
    target = str(node["_target_"])
    setting = f"{group}._target_={target}"
    return imported(target, setting, A_CLASS)


def imported(dotted: str, setting: str, kind: str) -> Target:
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
        # A name without a dot is tried as a module, whose error a user understands.
        code = import_module(module or name)
        target: object = getattr(code, name)
    except Exception as error:  # any of importing a user's module
        lines = str(error).splitlines()
        reason = next(iter(lines), type(error).__name__)
    else:
        if callable(target):
            return target
    remedy = f"name {kind}, with the module in the current folder or installed"
    raise UserError(f"{setting} can't be imported ({reason}); {remedy}")


@cache
def parameters_of(target: Target) -> list[str] | None:
    """Return the names that a class or function takes; None if it takes any."""
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # of some that are built in
        return None
    for parameter in parameters.values():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            return None
    return list(parameters)


def parameter_names(node: DictConfig, group: str) -> list[str]:
    """A group's parameters as a user types them: the short name where it is an interpolation."""
    names = []
    for parameter, value in as_written(node).items():
        # Of `chunk: ${chunk}` users type the short name.
        short_name = re.fullmatch(r"\$\{(\w+)\}", str(value))
        if short_name is not None:
            names.append(short_name[1])
        elif parameter != "_target_":
            names.append(f"{group}.{parameter}")
    return names


def fit_targets(cfg: DictConfig, settings: Settings) -> None:
    """Drop what the option's file lists for a class that `GROUP._target_=...` has exchanged, where
    the new one does not take it. Raises UserError for other keys that a class does not take.
    """
    typed = set(map(name_of, settings))
    for group in map(str, cfg):
        node = cfg[group]
        if not OmegaConf.is_dict(node):
            continue
        if "_target_" in node:
            _fit_target(cfg, group, typed)


def _fit_target(cfg: DictConfig, group: str, typed: Collection[str]) -> None:
    """Fit the node of one group to its class, where settings of the names `typed` are stated."""
    if group not in MADE_BY_FUNCTIONS:
        class_of(cfg, group)  # raises for a function
    target = target_of(cfg, group)
    valid = parameters_of(target)
    if valid is None:
        return  # the class takes any
    node = cfg[group]
    is_exchanged = f"{group}._target_" in typed
    for parameter in list(map(str, node)):
        if parameter in valid or parameter.startswith("_"):
            continue
        name = f"{group}.{parameter}"
        # What is typed, or what the file of its own class lists, must be a parameter.
        if name in typed or not is_exchanged:
            valid_names = []
            for valid_parameter in valid:
                valid_names.append(f"{group}.{valid_parameter}")
            raise unknown_name(name, valid_names, "a parameter")
        with open_dict(node):
            del node[parameter]


@cache
def top_level() -> dict[str, object]:
    """The settings of conf/config.yaml, Hydra's left out."""
    config = read_yaml(CONF / "config.yaml")
    settings = {str(key): config[key] for key in config}
    del settings["defaults"]
    del settings["hydra"]
    return settings


@cache
def read_by() -> dict[str, tuple[str, ...]]:
    """Return the settings that options read by ${name}, with the groups that have such options.

    Only an option of these groups reads them, so they have no effect on another option.
    """
    settings = {*GROUPS, *top_level()}
    settings.remove("output")  # where each run leaves its results
    readers: dict[str, tuple[str, ...]] = {}
    for group in GROUPS:
        names = set()
        for path in CONF.glob(f"{group}/*.yaml"):
            text = path.read_text()
            interpolated = re.findall(r"\$\{(\w+)\}", text)
            names.update(interpolated)
        for name in names & settings:
            earlier = readers.get(name, ())
            readers[name] = (*earlier, group)
    return readers


def check_structure(cfg: DictConfig) -> None:
    """Refuse settings that were added or taken out, and a value in place of settings."""
    _check_keys(cfg, [*GROUPS, *top_level(), "hydra"], "")
    for group in GROUPS:
        node = cfg[group]
        has_class = OmegaConf.is_dict(node) and "_target_" in node
        if not has_class:
            raise UserError(f"{group}={node} is none of its options; --help shows them")
    for name, default in top_level().items():
        if isinstance(default, DictConfig):
            keys = list(map(str, default))
            _check_keys(cfg[name], keys, f"{name}.")


def check_values(cfg: DictConfig) -> None:
    """Refuse values of settings that no class checks."""
    require_text("output", cfg.output, "name a folder, such as output=outputs")


def check_baselines(baselines: object) -> None:
    """Refuse baselines that are no list of options of `policy`."""
    if not isinstance(baselines, ListConfig):
        remedy = "write baselines=[orca], or baselines=[] for none"
        raise UserError(f"baselines={baselines} is not a list; {remedy}")
    options = option_files("policy")
    for name in baselines:
        require_one_of("baselines", name, options)


def _check_keys(node: object, valid: Collection[str], prefix: str) -> None:
    """Raise UserError unless the keys of a node are those that are `valid`, all of them."""
    shown = []
    for name in valid:
        if name not in ("_target_", "hydra"):
            shown.append(f"{prefix}{name}")
    if not isinstance(node, DictConfig):
        setting = prefix.removesuffix(".")
        raise UserError(f"{setting}={node} is no setting itself; use {', '.join(shown)}")
    keys = list(map(str, node))
    for name in keys:
        if name not in valid:
            raise unknown_name(f"{prefix}{name}", shown, "a setting")
    for name in valid:
        if name not in keys and name != "hydra":
            setting = f"{prefix}{name}"
            raise UserError(f"{setting} is missing; put it back (~{setting} removed it)")


def option_files(group: str, folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """The options of a group by name: those of conf/, and those in `folders` (None: that the
    running job's `--config-dir` or `hydra.searchpath` adds), which do not replace them.
    """
    sources = [CONF]  # first, as its options count
    if folders is None:
        sources += _added_folders()
    else:
        sources += folders
    options: dict[str, Path] = {}
    for source in sources:
        for path in source.glob(f"{group}/*.yaml"):
            options.setdefault(path.stem, path)
    return dict(sorted(options.items()))


def _added_folders() -> list[Path]:
    if not HydraConfig.initialized():
        return []
    folders = []
    for source in HydraConfig.get().runtime.config_sources:
        if source.schema == "file":
            folders.append(Path(source.path))
    return folders


def make_loader() -> ConfigLoader:
    """Hydra's loader of conf/."""
    GlobalHydra.instance().clear()
    # The loader outlives the block, and the global state does not: another call may follow.
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="sarathi_lab"):
        return GlobalHydra.instance().config_loader()


def read_option(group: str, path: Path) -> DictConfig:
    """The settings in an option's file, those of its defaults list included."""
    changed_at = path.stat().st_mtime_ns
    node = copied(_read(path, changed_at))
    if "defaults" not in node:
        return node  # Hydra, which composes defaults, takes a fifth of a second
    folder = path.parents[1]
    settings = [f"hydra.searchpath=['file://{folder}']", f"{group}={path.stem}"]
    loader = make_loader()
    return loader.load_configuration("config", settings, RunMode.RUN)[group]


@lru_cache(maxsize=256)
def _read(path: Path, changed_at: int) -> DictConfig:
    """Read an option's file, or what was read of it when it last changed."""
    return read_yaml(path)


def read_yaml(path: Path) -> DictConfig:
    """Read a file of conf/, whose interpolations stay."""
    node = OmegaConf.load(path)
    assert isinstance(node, DictConfig), f"{path} is a list"
    return node


def load_option(group: str, name: str) -> Any:
    """The object that `conf/GROUP/NAME.yaml` describes, such as ("model", "13b")."""
    path = CONF / group / f"{name}.yaml"
    node = read_option(group, path)
    return build(node)


def plain(value: object) -> Any:
    """Return a setting's value, of a list or mapping a plain one."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def as_written(node: DictConfig) -> dict[str, object]:
    """Return a node's settings by name; interpolations stay, so that ${chunk} equals ${chunk}."""
    return _by_name(node, resolve=False)


def _by_name(node: DictConfig, *, resolve: bool) -> dict[str, Any]:
    container = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def reads_chunk(policy: DictConfig) -> bool:
    """Return whether the budget of a policy is the setting `chunk`."""
    values = as_written(policy).values()
    return any("${chunk}" in str(value) for value in values)


def class_name(node: DictConfig) -> str:
    """Return the name of the class that a node's `_target_` names, without its module."""
    target = str(node["_target_"])
    _, _, name = target.rpartition(".")
    return name


def copier(cfg: DictConfig) -> Callable[[], DictConfig]:
    """Return a function that makes deep copies, in a sixth of the time that `cfg.copy()` takes."""
    return partial(pickle.loads, pickle.dumps(cfg))


def copied(cfg: DictConfig) -> DictConfig:
    """Return a deep copy, in a third of the time that `cfg.copy()` takes."""
    return copier(cfg)()


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, all interpolations filled in."""
    return _by_name(cfg, resolve=True)

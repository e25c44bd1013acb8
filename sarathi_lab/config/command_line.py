"""Checks a command line before anything runs: every job of a sweep is composed and planned first.

Hydra accepts some things that would be mistakes here (a parameter that the chosen policy does not
read) and explains others in several lines; this module turns both into one line with the value, the
reason and the fix.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from hydra.utils import get_class, get_method
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.config.sweep_search import OptunaSearch

LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
WITHOUT_EFFECT = ("hydra.sweep.subdir", "hydra.sweeper.max_batch_size")


def explain_missing(message: str) -> UserError | None:
    """One line for what Hydra says of a launcher or sweeper that is not there; None if it says
    something else.
    """
    if (match := re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']+)'", message)) is None:
        return None
    kind, name = match.groups()
    if kind == "sweeper":
        return UserError(
            f"hydra/sweeper={name} is unknown; use basic (all combinations) or optuna_search"
        )
    if (package := LAUNCHERS.get(name)) is None:
        return UserError(
            f"hydra/launcher={name} is unknown; use one of basic, {', '.join(LAUNCHERS)}"
        )
    return UserError(
        f"hydra/launcher={name} needs the package {package}, which is missing; pip install "
        f"{package}"
    )


def check_single(overrides: Sequence[str]) -> None:
    """Refuse what only a sweep reads. Raises UserError."""
    for override in overrides:
        if re.match(r"\+*hydra[/.](launcher|sweeper|sweep)\b", override):
            raise UserError(f"{override} has no effect on one run; add -m for a sweep, or drop it")


def make_search(master: DictConfig) -> OptunaSearch | None:
    """The search that the sweeper makes, None for all combinations.

    Raises UserError for another sweeper, and for settings of Hydra's that would have no effect.
    """
    for setting in master.hydra.overrides.hydra:
        if (name := setting.partition("=")[0]) in WITHOUT_EFFECT:
            raise UserError(
                f"{setting} has no effect: runs are numbered, and launched together; drop {name}"
            )
    sweeper = master.hydra.sweeper
    if (target := sweeper["_target_"].rpartition(".")[2]) == BasicSweeper.__name__:
        return None
    if target != OptunaSearch.__name__:
        name = master.hydra.runtime.choices["hydra/sweeper"]
        raise UserError(
            f"hydra/sweeper={name} is not one of the lab's; use basic (all combinations) or "
            "optuna_search"
        )
    return build(sweeper)


# Names that some option of a group reads and others don't: overriding one that nobody reads is
# refused.
READ_BY = {
    "chunk": ("policy",),
    "pd_ratio": ("workload",),
    "seq_len": ("workload",),
    "seed": ("workload", "executor"),
    "device": ("executor",),
    "dtype": ("executor",),
    "hardware": ("executor",),
}
READ_BY_ALL_TASKS = ("task", "experiment", "tracking", "output", "resume", "hydra")
GROUPS = ("task", "policy", "workload", "executor", "model", "hardware", "slo", "tracking")


@dataclass(frozen=True)
class CommandLine:
    """A checked command line: the composed configuration of every job, and where the results will
    go.
    """

    jobs: list[DictConfig]  # of a search: those at the ends of its space
    results_dir: Path
    is_sweep: bool
    swept: tuple[str, ...] = ()  # the settings that a sweep varies
    arguments: tuple[str, ...] = ()  # as typed
    overrides: tuple[str, ...] = ()  # the settings among them
    settings: tuple[
        Override, ...
    ] = ()  # what decides the jobs of a sweep, its experiment's parameters included
    job_overrides: tuple[tuple[str, ...], ...] = ()  # of each of the jobs
    search: OptunaSearch | None = None  # chooses the jobs as it goes

    @property
    def results_setting(self) -> str:
        """The setting of Hydra's that names `results_dir`."""
        return "hydra.sweep.dir" if self.is_sweep else "hydra.run.dir"


def flags_first(args: Sequence[str]) -> list[str]:
    """The same command line in the order that Hydra's parser understands: flags, then overrides.

    Its own parser drops what follows a flag in the middle, as in `chunk=256,512 -m batch=4`.
    """
    for arg in args:
        # The parser would answer with several lines of usage.
        if re.match(r"-[^-].", arg) and arg not in get_args_parser()._option_string_actions:
            raise UserError(
                f"option {arg} is unknown; settings are written name=value, --help lists the "
                "options"
            )
    overrides = get_args_parser().parse_known_intermixed_args(list(args))[0].overrides
    return [*(arg for arg in args if arg not in overrides), *overrides]


def is_run(args: Sequence[str]) -> bool:
    """Whether `args` ask for runs, not for help or for showing the configuration."""
    parsed, _ = get_args_parser().parse_known_args(list(args))
    return not (
        parsed.help or parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion
    )


def read_command_line(args: Sequence[str]) -> CommandLine:
    """Compose and check all jobs of a command line. Raises UserError."""
    parsed, unknown = get_args_parser().parse_known_args(list(args))
    if unknown:
        raise UserError(
            f"option {unknown[0]} is unknown; settings are written name=value, --help lists the "
            "options"
        )
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return replace(_compose_jobs(parsed.overrides, parsed.multirun), arguments=tuple(args))
        except (
            HydraException,
            OmegaConfBaseException,
            ValueError,
        ) as error:  # ValueError: an option that is no name
            raise _translate(error, parsed.overrides) from None


def _compose_jobs(overrides: list[str], multirun: bool) -> CommandLine:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    known = set(compose("config"))
    mode = RunMode.MULTIRUN if multirun else None
    master = hydra.compose_config(
        "config", overrides, run_mode=mode or RunMode.RUN, validate_sweep_overrides=False
    )
    multirun = multirun or master.hydra.mode == RunMode.MULTIRUN
    if not multirun:
        check_single(overrides)
        cfg = _checked(overrides, _compose_job(overrides), known)
        return CommandLine([cfg], Path(str(master.hydra.run.dir)), is_sweep=False)
    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(
        [*params, *overrides]
    )
    parsed = [override for override in parsed if not override.is_hydra_override()]
    search = make_search(master)
    split = search.extremes(parsed) if search else BasicSweeper.split_arguments(parsed, None)[0]
    jobs = [_compose_job(job) for job in split]
    swept = [override.get_key_element() for override in parsed if override.is_sweep_override()]
    read = {
        name for name in READ_BY if name not in swept and any(_reads(cfg, name) for cfg in jobs)
    }
    return CommandLine(
        jobs=[_checked(job, cfg, known, read) for job, cfg in zip(split, jobs, strict=True)],
        results_dir=Path(str(master.hydra.sweep.dir)),
        is_sweep=True,
        swept=tuple(swept),
        overrides=tuple(overrides),
        settings=tuple(parsed),
        job_overrides=tuple(map(tuple, split)),
        search=search,
    )


def _compose_job(overrides: Sequence[str]) -> DictConfig:
    try:
        cfg = compose("config", list(overrides))
        OmegaConf.resolve(cfg.copy())  # a broken ${...} shows here
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(
            error, overrides
        ) from None  # with this job's options, not those of the whole sweep
    return cfg


def _checked(
    overrides: Sequence[str],
    cfg: DictConfig,
    known: Iterable[str],
    read_by_others: Collection[str] = (),
) -> DictConfig:
    """`cfg` itself, if `overrides` make sense for it; a sweep's other jobs may read what it does
    not.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    _check_top_level(cfg, known)
    _check_experiment(parsed)
    _check_parameters(cfg)
    _check_read(cfg, parsed, read_by_others)
    return cfg


def _check_experiment(overrides: Sequence[Override]) -> None:
    """Refuse an overlay that is not there: Hydra passes over it, because having none is fine."""
    for override in overrides:
        option = override.value()
        is_missing = not (CONF / "experiment" / f"{option}.yaml").is_file()
        if override.key_or_group == "experiment" and option is not None and is_missing:
            raise UserError(_unknown_option("experiment", str(option)))


def _check_top_level(cfg: DictConfig, known: Iterable[str]) -> None:
    for key in map(str, cfg):
        if key not in known:
            raise UserError(_unknown(key, [*map(str, known), "experiment"], "a setting"))
    if not str(cfg.output).strip():
        raise UserError("output is empty; name a folder, such as output=outputs")
    if not OmegaConf.is_list(cfg.baselines):
        raise UserError(
            f"baselines={cfg.baselines} is not a list; write baselines=[orca], or baselines=[] "
            "for none"
        )


def _check_parameters(cfg: DictConfig) -> None:
    """Refuse keys that the class behind a group does not take (added with `+`)."""
    for group in GROUPS:
        node = cfg[group]
        valid = list(inspect.signature(get_class(node["_target_"])).parameters)
        for key in node:
            if not str(key).startswith("_") and key not in valid:
                raise UserError(
                    _unknown(f"{group}.{key}", [f"{group}.{name}" for name in valid], "a parameter")
                )


def _reads(cfg: DictConfig, name: str) -> bool:
    """Whether one of the chosen options reads the short name."""
    return any(name in _names_read(cfg[group]) for group in READ_BY[name])


def _check_read(
    cfg: DictConfig, overrides: Sequence[Override], read_by_others: Collection[str]
) -> None:
    """Refuse a short name that is overridden but read by none of the chosen options, or not by the
    task.
    """
    task = get_class(cfg.task["_target_"])
    reads: Collection[str] | None = getattr(task, "reads", None)
    for override in overrides:
        name = override.key_or_group.partition(".")[0]
        if reads is not None and name not in (*reads, *READ_BY_ALL_TASKS):
            own = ", ".join(sorted([*_parameters(cfg, "task"), *reads]))
            raise UserError(
                f"{override.input_line} has no effect: task={task.__name__.lower()} does not read "
                f"{name}; drop it (it reads {own})"
            )
        groups = READ_BY.get(name)
        if groups is None or name in read_by_others or _reads(cfg, name):
            continue
        targets = " and ".join(
            f"{group}={get_class(cfg[group]['_target_']).__name__}" for group in groups
        )
        readable = [parameter for group in groups for parameter in _parameters(cfg, group)]
        raise UserError(
            f"{override.input_line} has no effect: {targets} does not read {name}; drop it "
            f"(it reads {', '.join(readable) or 'nothing'})"
        )


def _names_read(node: DictConfig) -> set[str]:
    return set(re.findall(r"\$\{(\w+)\}", OmegaConf.to_yaml(node, resolve=False)))


def _parameters(cfg: DictConfig, group: str) -> list[str]:
    """A group's parameters under the names that a user types: the short one where it is an
    interpolation.
    """
    raw = OmegaConf.to_container(cfg[group], resolve=False)
    assert isinstance(raw, dict)
    return [
        match.group(1) if (match := re.fullmatch(r"\$\{(\w+)\}", str(value))) else f"{group}.{key}"
        for key, value in ((str(key), value) for key, value in raw.items())
        if key != "_target_"
    ]


# -- Hydra's own messages, in one line -------------------------------------------------------------


def explain(error: Exception, args: Sequence[str]) -> UserError:
    """`error`, raised by Hydra's own commands for `args`, in one line."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return _translate(error, args)


def _translate(error: Exception, overrides: Sequence[str]) -> UserError:
    """One line for what Hydra or OmegaConf says of `overrides` in several."""
    message = str(error)
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override!r} can't be read; settings are written name=value, without spaces "
            "around ="
        )
    cause = str(error.__cause__ or "")
    if match := re.search(r"Sweep parameters? '(.+?)' requires --multirun", message):
        return UserError(f"{match.group(1)} is a sweep over several values; add -m to run them all")
    if match := re.search(r"Ambiguous value for argument '(.+?)'", message):
        return UserError(
            f"{match.group(1)} has several values; add -m to sweep over them, or quote the comma"
        )
    if match := re.search(r"Could not override '([\w.@/]+)'", message):
        return UserError(_unknown_key(match.group(1), overrides))
    if missing := explain_missing(message):
        return missing
    if match := re.search(rf"Could not find '({'|'.join(GROUPS)})/(.+?)'", message):
        group, option = match.groups()
        return UserError(_unknown_option(group, option))
    if match := re.search(
        r"Could not override '(\w+)'\. No match in the defaults list", message + cause
    ):
        return UserError(_unknown_key(match.group(1), overrides))
    first = next(
        (line.strip() for line in f"{message}\n{cause}".splitlines() if line.strip()),
        type(error).__name__,
    )
    return UserError(f"{' '.join(overrides)}: {first}; --help shows the settings")


def _unknown_option(group: str, option: str) -> str:
    options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return (
        f"{group}={option} is unknown{_suggest(option, options)}; use one of {', '.join(options)}"
    )


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    choices = [
        override
        for override in overrides
        if re.fullmatch(rf"({'|'.join(GROUPS)})=[\w.-]+", override)
    ]
    cfg = compose("config", choices)
    group, _, parameter = key.partition(".")
    if parameter and group in cfg and isinstance(cfg[group], DictConfig):
        if parameter in inspect.signature(get_class(cfg[group]["_target_"])).parameters:
            return (
                f"{key} is at its default, which the option's file does not list; write "
                f"+{key}=VALUE"
            )
        return _unknown(
            key,
            _parameters(cfg, group),
            f"a parameter of {get_class(cfg[group]['_target_']).__name__}",
        )
    return _unknown(key, [*map(str, cfg), "experiment"], "a setting")


def _unknown(key: str, valid: list[str], what: str) -> str:
    fix = f"use one of {', '.join(sorted(valid))}" if valid else "it has none; drop it"
    return f"{key} is not {what}{_suggest(key, valid)}; {fix}"


def _suggest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "trace", "hydra")


def run_job(cfg: DictConfig, swept: Sequence[str]) -> None:
    """Do what `cfg` asks for in the folder that Hydra has made; `swept` are the settings that its
    sweep varies.
    """
    settings = HydraConfig.get()
    run_dir = Path(settings.runtime.output_dir)
    is_sweep = settings.mode == RunMode.MULTIRUN
    root = Path(settings.sweep.dir) if is_sweep else run_dir
    name = _name(
        str(settings.runtime.choices["policy"]),
        settings.overrides.task,
        swept if is_sweep else None,
    )
    group = "/".join(root.absolute().parts[-2:])
    experiment = settings.runtime.choices.get("experiment")
    task = str(settings.runtime.choices["task"])
    context = RunContext(run_dir, root / "baselines", name, group, swept, experiment, task)
    get_method("sarathi_lab.tasks.base.run_task")(cfg, context)


def _name(policy: str, overrides: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what sets the run apart: what its sweep varies, or what a single run was told
    of its work.
    """
    told = [(override.partition("=")[0].lstrip("+"), override) for override in overrides]
    if swept is None:
        parts = [override for key, override in told if key.partition(".")[0] not in UNNAMED]
    else:
        parts = [override for key, override in told if key in swept and key != "policy"]
    return " ".join([policy, *parts])

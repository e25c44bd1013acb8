"""Refusals of settings that Hydra accepts but that would have no effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

from sarathi_lab.config.arguments import searchpath
from sarathi_lab.config.errors import UserError, require_number, require_one_of, require_text
from sarathi_lab.config.hydra_errors import GROUPS, parameter_names, unknown_name
from sarathi_lab.config.instantiate import class_of, parameters_of
from sarathi_lab.config.paths import CONF

# Names that some option of a group reads and others don't: overriding one that no option reads is
# refused.
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
READ_BY_ALL_TASKS = ("task", "experiment", "tracking", "output", "resume", "limit", "hydra")
MOST_NAMES = 1000  # of options of a group
OF_RUNS = ("repeat", "repetition", "plot")  # read for tasks whose runs a sweep compares


def check_names(settings: Sequence[str]) -> None:
    """Refuse settings and options that there are not, before Hydra composes anything."""
    known = [*GROUPS, *_top_level(), "experiment"]
    folders = [CONF, *(Path(source.rpartition("://")[2]) for source in searchpath(settings))]
    for override in OverridesParser.create().parse_overrides(list(settings)):
        name = override.key_or_group
        if override.is_hydra_override() or override.type != OverrideType.CHANGE:
            continue
        if name.partition(".")[0] not in known:
            raise unknown_name(name, known, "a setting")
        if name in (*GROUPS, "experiment"):
            paths = [path for folder in folders for path in folder.glob(f"{name}/*.yaml")]
            for value in _values(override):
                if value not in ("null", "None"):
                    require_one_of(name, value, sorted({path.stem for path in paths}))


def _values(override: Override) -> list[str]:
    """The values of a setting that is swept, or its one value; none if it is no text."""
    if override.is_discrete_sweep():
        values = islice(override.sweep_string_iterator(), MOST_NAMES)
        return [str(value).strip("'\"") for value in values]
    value = override.value()
    return [value] if isinstance(value, str) else []


def check_single(settings: Sequence[str]) -> None:
    """Refuse what only a sweep reads."""
    of_sweep = (
        r"\+*(hydra[/.](launcher|sweeper(?!\.dry_run)|sweep)\b|repeat=|plot\.|resume=(?!false))"
    )
    for setting in settings:
        if re.match(of_sweep, setting):
            raise UserError(f"{setting} has no effect on one run; add -m for a sweep, or drop it")


def check_sweep(settings: Sequence[str], varied: Sequence[str], num_processes: int | None) -> None:
    """Refuse settings of Hydra's that a sweep does not read, launchers without a process, and
    values of what is one for a whole sweep.
    """
    if num_processes == 0:
        raise UserError("hydra.launcher.n_jobs=0 runs nothing; use a number such as 2, or -1")
    for setting in settings:
        if setting.startswith("hydra.sweep.subdir="):
            raise UserError(f"{setting} has no effect: runs are numbered; drop hydra.sweep.subdir")
    for name in varied:
        if name == "repeat" or name.startswith("plot."):
            raise UserError(
                f"{name} has several values, but is of the whole sweep; write one, or a list such "
                "as plot.y=[ttft_p50,tbt_p99]"
            )


def check_job(
    composed: DictConfig,
    cfg: DictConfig,
    settings: Sequence[str],
    read_by_others: Collection[str],
) -> None:
    """Refuse `settings` that mean nothing to the job (`composed`: with Hydra's node) nor others."""
    parsed = OverridesParser.create().parse_overrides(list(settings))
    _check_top_level(cfg)
    fit_targets(cfg, settings)
    for override in parsed:
        _check_is_read(composed, cfg, override, read_by_others)


def _check_top_level(cfg: DictConfig) -> None:
    known = [*GROUPS, *_top_level()]
    for key in map(str, cfg):
        if key not in (*known, "hydra"):
            raise unknown_name(key, [*known, "experiment"], "a setting")
    for key in known:
        _check_whole(cfg, key)
    require_text("output", cfg.output, "name a folder, such as output=outputs")
    if cfg.limit is not None:
        require_number("limit", cfg.limit, above=0, fix="use seconds, or null for none")
    if not OmegaConf.is_list(cfg.baselines):
        raise UserError(
            f"baselines={cfg.baselines} is not a list; write baselines=[orca], or baselines=[] "
            "for none"
        )


def _check_whole(cfg: DictConfig, key: str) -> None:
    """Refuse a setting that was taken out, and a value in place of settings."""
    if key not in cfg:
        raise UserError(f"{key} is missing; put it back (~{key} removed it)")
    own: Any = _top_level().get(key)
    if key in GROUPS:
        if not OmegaConf.is_dict(cfg[key]) or "_target_" not in cfg[key]:
            raise UserError(f"{key}={cfg[key]} is none of its options; --help shows them")
    elif OmegaConf.is_dict(own):
        names = [f"{key}.{name}" for name in own if name != "_target_"]
        if not OmegaConf.is_dict(cfg[key]):
            raise UserError(f"{key}={cfg[key]} is no setting itself; use {', '.join(names)}")
        for name in [*own, *cfg[key]]:
            if name not in own:
                raise unknown_name(f"{key}.{name}", names, "a setting")
            if name not in cfg[key]:
                raise UserError(f"{key}.{name} is missing; put it back")


@cache  # read once, not once a job
def _top_level() -> dict[str, Any]:
    """The settings of conf/config.yaml, Hydra's left out."""
    settings: Any = OmegaConf.load(CONF / "config.yaml")
    return {str(key): settings[key] for key in settings if key not in ("defaults", "hydra")}


def fit_targets(cfg: DictConfig, settings: Sequence[str]) -> None:
    """Drop what the option's file lists for a class that `GROUP._target_=...` has exchanged, where
    the new one does not take it. Raises UserError for other keys that a class does not take.
    """
    named = {setting.lstrip("+~").partition("=")[0] for setting in settings}
    nodes = [key for key, own in _top_level().items() if OmegaConf.is_dict(own)]
    for group in (*GROUPS, *(key for key in nodes if "_target_" in cfg[key])):
        if (valid := parameters_of(class_of(cfg, group))) is None:
            continue
        keys = [str(key) for key in cfg[group] if not str(key).startswith("_")]
        for key in (key for key in keys if key not in valid):
            name = f"{group}.{key}"
            is_old = f"{group}._target_" in named and name not in named
            if not is_old:
                raise unknown_name(name, [f"{group}.{one}" for one in valid], "a parameter")
            with open_dict(cfg[group]):
                del cfg[group][key]


def reads(cfg: DictConfig, name: str) -> bool:
    """Whether one of the chosen options reads the short name."""
    texts = (OmegaConf.to_yaml(cfg[group], resolve=False) for group in READ_BY[name])
    return any(f"${{{name}}}" in text for text in texts)


def chosen(composed: DictConfig, group: str) -> str:
    """GROUP=OPTION as chosen, or GROUP=CLASS where `GROUP._target_=...` has exchanged the class."""
    typed = [one.lstrip("+") for one in composed.hydra.overrides.task]
    if any(one.startswith(f"{group}._target_=") for one in typed):
        return f"{group}={class_of(composed, group).__name__}"
    return f"{group}={composed.hydra.runtime.choices[group]}"


def _check_is_read(
    composed: DictConfig, cfg: DictConfig, override: Override, read_by_others: Collection[str]
) -> None:
    """Refuse what the task does not read, and a short name that no chosen option reads."""
    name, task = override.key_or_group.partition(".")[0], class_of(cfg, "task")
    own: Collection[str] | None = getattr(task, "reads", None)
    by_all = (*READ_BY_ALL_TASKS, *(OF_RUNS if getattr(task, "has_runs", False) else ()))
    if own is not None and name not in (*own, *by_all):
        targets = chosen(composed, "task")
        readable = sorted([*parameter_names(cfg, "task"), *own])
    elif name in READ_BY and name not in read_by_others and not reads(cfg, name):
        groups = READ_BY[name]
        targets = " and ".join(chosen(composed, group) for group in groups)
        readable = [parameter for group in groups for parameter in parameter_names(cfg, group)]
    else:
        return
    raise UserError(
        f"{override.input_line} has no effect: {targets} does not read {name}; drop it "
        f"({targets} reads {', '.join(readable) or 'nothing'})"
    )

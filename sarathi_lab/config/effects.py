"""Refuses settings that Hydra accepts but that would have no effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from sarathi_lab.config.errors import UserError, require_number
from sarathi_lab.config.explain import (
    GROUPS,
    options,
    parameter_names,
    unknown_name,
    unknown_option,
)
from sarathi_lab.config.instantiate import class_of, parameters_of
from sarathi_lab.config.paths import CONF

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
READ_BY_ALL_TASKS = ("task", "experiment", "tracking", "output", "resume", "limit", "hydra")
WITHOUT_EFFECT = ("hydra.sweep.subdir", "hydra.sweeper.max_batch_size")


def check_single(settings: Sequence[str]) -> None:
    """Refuse what only a sweep reads."""
    for setting in settings:
        if re.match(r"\+*hydra[/.](launcher|sweeper|sweep)\b", setting):
            raise UserError(f"{setting} has no effect on one run; add -m for a sweep, or drop it")


def check_sweep(settings: Sequence[str]) -> None:
    """Refuse settings of Hydra's that a sweep does not read."""
    for setting in settings:
        if (name := setting.partition("=")[0]) in WITHOUT_EFFECT:
            raise UserError(
                f"{setting} has no effect: runs are numbered, and launched together; drop {name}"
            )


def check_job(
    cfg: DictConfig, settings: Sequence[str], read_by_others: Collection[str], loader: ConfigLoader
) -> None:
    """Refuse `settings` that the job of `cfg` gives no meaning to; a sweep's other jobs may read
    what it does not.
    """
    parsed = OverridesParser.create().parse_overrides(list(settings))
    _check_top_level(cfg)
    _check_experiment(parsed, settings, loader)
    fit_targets(cfg, settings)
    _check_task_reads(cfg, parsed)
    _check_read(cfg, parsed, read_by_others)


def _check_top_level(cfg: DictConfig) -> None:
    known = {*GROUPS, *map(str, OmegaConf.load(CONF / "config.yaml")), "hydra"} - {"defaults"}
    for key in map(str, cfg):
        if key not in known:
            raise UserError(unknown_name(key, [*known - {"hydra"}, "experiment"], "a setting"))
    if not str(cfg.output).strip():
        raise UserError("output is empty; name a folder, such as output=outputs")
    if cfg.limit is not None:
        require_number("limit", cfg.limit, above=0, fix="use seconds, or null for none")
    if not OmegaConf.is_list(cfg.baselines):
        raise UserError(
            f"baselines={cfg.baselines} is not a list; write baselines=[orca], or baselines=[] "
            "for none"
        )


def _check_experiment(
    overrides: Sequence[Override], settings: Sequence[str], loader: ConfigLoader
) -> None:
    """Refuse an overlay that is not there: Hydra passes over it, because having none is fine."""
    for override in overrides:
        name = override.value()
        if override.key_or_group == "experiment" and name is not None:
            valid = options("experiment", settings, loader)
            if name not in valid:
                raise UserError(unknown_option("experiment", str(name), valid))


def fit_targets(cfg: DictConfig, settings: Sequence[str]) -> None:
    """Drop what the option's file lists for a class that `GROUP._target_=...` has exchanged, where
    the new one does not take it. Raises UserError for other keys that a class does not take.
    """
    named = {setting.lstrip("+~").partition("=")[0] for setting in settings}
    for group in GROUPS:
        if (valid := parameters_of(class_of(cfg, group))) is None:
            continue
        keys = [str(key) for key in cfg[group] if not str(key).startswith("_")]
        for key in (key for key in keys if key not in valid):
            name = f"{group}.{key}"
            is_old = f"{group}._target_" in named and name not in named
            if not is_old:
                names = [f"{group}.{one}" for one in valid]
                raise UserError(unknown_name(name, names, "a parameter"))
            with open_dict(cfg[group]):
                del cfg[group][key]


def reads(cfg: DictConfig, name: str) -> bool:
    """Whether one of the chosen options reads the short name."""
    texts = (OmegaConf.to_yaml(cfg[group], resolve=False) for group in READ_BY[name])
    return any(f"${{{name}}}" in text for text in texts)


def _check_task_reads(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    task = class_of(cfg, "task")
    own: Collection[str] | None = getattr(task, "reads", None)
    if own is None:
        return
    for override in overrides:
        name = override.key_or_group.partition(".")[0]
        if name not in (*own, *READ_BY_ALL_TASKS):
            listed = ", ".join(sorted([*parameter_names(cfg, "task"), *own]))
            raise UserError(
                f"{override.input_line} has no effect: task={task.__name__.lower()} does not read "
                f"{name}; drop it (it reads {listed})"
            )


def _check_read(
    cfg: DictConfig, overrides: Sequence[Override], read_by_others: Collection[str]
) -> None:
    """Refuse a short name that is overridden but read by none of the chosen options."""
    for override in overrides:
        name = override.key_or_group.partition(".")[0]
        if name not in READ_BY or name in read_by_others or reads(cfg, name):
            continue
        groups = READ_BY[name]
        targets = " and ".join(f"{group}={class_of(cfg, group).__name__}" for group in groups)
        readable = [parameter for group in groups for parameter in parameter_names(cfg, group)]
        raise UserError(
            f"{override.input_line} has no effect: {targets} does not read {name}; drop it "
            f"(it reads {', '.join(readable) or 'nothing'})"
        )

"""What settings that a user states mean for others, which follow: the lengths of requests by prompt
and output, and bounds of an objective.
"""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, read_write

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import Settings, fit_targets, name_of
from sarathi_lab.config.task_traits import traits_of

NO_OBJECTIVE = "none"  # the option of `slo` without bounds


def complete(cfg: DictConfig, settings: Settings) -> None:
    """Fit a composed `cfg` to the classes that it names and to the `settings` that were typed for
    it. Raises UserError for what its classes do not take.
    """
    fit_targets(cfg, settings)
    follow_stated(cfg, settings)


def follow_stated(cfg: DictConfig, settings: Settings) -> None:
    """Set in `cfg` what follows from `settings`, and tell them to a task that asks (`task.stated`):
    what is typed means something there even where it is the default.
    """
    stated = {}
    for setting in settings:  # of two of a name the last counts
        _, _, value = setting.partition("=")
        stated[name_of(setting)] = value or "null"
    with read_write(cfg):
        _follow_lengths(cfg, stated)
        _follow_objective(cfg, stated)
        if "stated" in cfg.task:
            cfg.task.stated = list(settings)
        if not traits_of(cfg).follows_tables:
            _check_tables(cfg, stated)


def _check_tables(cfg: DictConfig, stated: Mapping[str, str]) -> None:
    """Raise UserError for tables that the cost model does not read; hardware=auto reads its file
    beside them.
    """
    if "hardware.tables" not in stated or cfg.hardware.get("name") == "auto":
        return
    if cfg.executor.get("cost_model") == "analytic":
        raise UserError(
            f"hardware.tables={stated['hardware.tables']} has no effect with "
            "executor.cost_model=analytic; add executor.cost_model=profiled, or drop it"
        )


def _follow_lengths(cfg: DictConfig, stated: Mapping[str, str]) -> None:
    """Let seq_len and pd_ratio be those of prompts and outputs of stated lengths, so that all that
    reads one pair has the other. The workload refuses pairs that contradict each other.
    """
    prompt_len = cfg.workload.get("prompt_len")
    output_len = cfg.workload.get("output_len")
    if not (_is_length(prompt_len) and _is_length(output_len)):
        return  # there are none, or the workload refuses them
    if "seq_len" not in stated:
        cfg.seq_len = prompt_len + output_len
    if "pd_ratio" not in stated:
        ratio = prompt_len / output_len
        if ratio.is_integer():
            ratio = int(ratio)  # is shown and compared as typed: 4, not 4.0
        cfg.pd_ratio = ratio


def _is_length(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _follow_objective(cfg: DictConfig, stated: Mapping[str, str]) -> None:
    """Let a stated bound between tokens replace the option's of the other kind, and name the
    objective by what is stated: "tbt=0.05", "strict,tbt=0.05".
    """
    bounds: dict[str, str] = {}  # as they are typed, by their names
    for name, value in stated.items():
        if name.startswith("slo."):
            bounds[name.removeprefix("slo.")] = value
    if not bounds or "_target_" in bounds:
        return
    # An objective has one bound between tokens: in seconds, or in iterations.
    for bound, replaced in (("tbt", "tbt_factor"), ("tbt_factor", "tbt")):
        is_stated = bounds.get(bound, "null") != "null"
        if is_stated and replaced not in bounds:
            cfg.slo[replaced] = None
    if "name" in bounds:
        return
    names = []
    if cfg.slo.name != NO_OBJECTIVE:
        names.append(cfg.slo.name)
    for name, value in bounds.items():
        names.append(f"{name}={value}")
    cfg.slo.name = ",".join(names)

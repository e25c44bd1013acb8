"""The context of a run: its folder, its name and what its sweep varies."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from sarathi_lab.config.arguments import name_of
from sarathi_lab.config.sweep_record import SweepRecord, as_command

MOST_CHARACTERS = 128  # of a group's name in W&B
# What does not make a run another one.
UNNAMED = ("policy", "executor", "tracking", "baselines", "output", "limit", "hydra")


@dataclass(frozen=True)
class RunContext:
    """Where a run's results go and what they are called; `prepared` is from the task's `check`."""

    run_dir: Path
    baselines_dir: Path
    name: str
    group: str  # what is swept, where, and the folder: the same of all runs of a command
    swept: Sequence[str] = ()  # the settings that the sweep varies
    # Those of them that this run reads, with its values.
    varied: Mapping[str, object] = field(default_factory=dict)
    experiment: str | None = None  # the overlay of conf/experiment, if one was asked for
    task: str = "serve"  # the option of conf/task
    policy: str | None = None  # the option of conf/policy; None for a class of the user's
    prepared: Any = None
    command: str = ""  # as typed
    is_verbose: bool = False  # whether to print all of it


def current_run(prepared: Any = None) -> RunContext:
    """The context of the job that Hydra runs now."""
    hydra = HydraConfig.get()
    settings: list[str] = list(hydra.overrides.task)
    run_dir = Path(hydra.runtime.output_dir)
    is_sweep = hydra.mode == RunMode.MULTIRUN
    root = Path(hydra.sweep.dir) if is_sweep else run_dir
    record = SweepRecord.find(root) if is_sweep else None
    swept: tuple[str, ...] = ()
    if record is None:
        host = platform.node()
        command = as_command([*settings, *hydra.overrides.hydra])
    else:
        swept, host, command = record.swept, record.host, record.command
    choices = hydra.runtime.choices
    has_class = "policy._target_" in map(name_of, settings)
    return RunContext(
        run_dir=run_dir,
        baselines_dir=root / "baselines",
        name=run_name(str(choices["policy"]), settings, swept if is_sweep else None),
        group=group_of(root, choices, swept, host),
        swept=swept,
        varied=_varied(settings, swept),
        experiment=choices.get("experiment"),
        task=str(choices["task"]),
        policy=None if has_class else str(choices["policy"]),
        prepared=prepared,
        command=command,
        is_verbose=hydra.verbose is True,
    )


def group_of(root: Path, choices: Mapping[str, Any], swept: Sequence[str], host: str) -> str:
    """What is swept, where and when: the name that the runs of one command share. `choices` are of
    one of its runs, `root` is its folder.
    """
    what = " x ".join(name for name in swept if name != "repetition") or "single run"
    if choices.get("experiment"):
        what = f"{choices['experiment']}: {what}"
    if "executor" in swept or "hardware" in swept:
        where = "several devices"
    elif choices["executor"] == "simulated":
        where = f"simulated {choices['hardware']}"
    else:
        where = host
    return f"{what} on {where}, {'/'.join(root.absolute().parts[-2:])}"[:MOST_CHARACTERS]


def run_name(policy: str, settings: Sequence[str], swept: Sequence[str] | None) -> str:
    """The policy and what its sweep varies, or what of a single run's settings changes its work."""
    named = [(name_of(setting), setting) for setting in settings]
    classes = [setting for key, setting in named if key == "policy._target_"]
    policy = classes[-1].rpartition(".")[2] if classes else policy
    if swept is None:
        parts = [setting for key, setting in named if key.partition(".")[0] not in UNNAMED]
    else:
        policies = ("policy", "policy._target_")
        parts = [setting for key, setting in named if key in swept and key not in policies]
    return " ".join([policy, *parts])


def _varied(settings: Sequence[str], swept: Sequence[str]) -> dict[str, object]:
    """The values of the settings that the sweep varies; of those that are no scalars the text."""
    values: dict[str, object] = {}
    for override in OverridesParser.create().parse_overrides(list(settings)):
        if (key := override.get_key_element().lstrip("+")) in swept:
            value = override.value()
            is_scalar = isinstance(value, bool | int | float | str)
            values[key] = value if is_scalar else override.get_value_element_as_str()
    return values

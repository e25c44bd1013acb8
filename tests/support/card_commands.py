"""What becomes of a documented command on GPUs that are not there: it runs, or is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cards import CARDS, Card, card_present
from documented import KNOWN, last_of_sweeps
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.config.sweeper import ROUND, LabSweeper, compose
from sarathi_lab.executor.measured_backend import MeasuredBackend
from sarathi_lab.model.checkpoint import resolve_model

TABLE = EXPERIMENTS / "gpu" / "gpu_targets" / "commands.md"
VLLM_VERSION = "0.33.0"
# By another launcher on other machines, or without a device.
ELSEWHERE = ("hydra/launcher=", "executor=simulated", "task=figures", "task=validate")
ELSEWHERE += ("experiment=paper",)
REFUSED = "refused"


@dataclass(frozen=True)
class Outcome:
    """A command on one card: the model that it runs with, or the line in which it is refused."""

    card: Card
    model: str
    refusal: str = ""

    @property
    def cell(self) -> str:
        return REFUSED if self.refusal else self.model


def commands_on_cards() -> list[str]:
    """List the documented commands that compute on a GPU where there is one."""
    return [command for command in KNOWN if not any(name in command for name in ELSEWHERE)]


@cache
def composed(command: str) -> LabSweeper:
    """Compose a command, of a sweep the last values of all settings."""
    with card_present(CARDS[0], VLLM_VERSION):
        return compose(last_of_sweeps(command))


def outcomes(command: str, cards: Sequence[Card] = CARDS) -> list[Outcome]:
    """Check a command on each of `cards`; none if it computes on no GPU."""
    jobs = in_one_round(composed(command).jobs)
    if not any(_measures(job.cfg) for job in jobs):
        return []
    return [_outcome(jobs, card) for card in cards]


def in_one_round(jobs: Sequence[Any]) -> list[Any]:
    """Return the jobs of a sweep that differ in more than the round."""
    by_settings = dict[tuple[str, ...], Any]()
    for job in jobs:
        settings = tuple(one for one in job.settings if not one.startswith(f"{ROUND}="))
        by_settings[settings] = job
    return list(by_settings.values())


def _measures(cfg: Any) -> bool:
    is_simulated = "simulated" in str(cfg.executor.get("_target_"))
    return not is_simulated and cfg.device != "cpu"


def _outcome(jobs: Sequence[Any], card: Card) -> Outcome:
    """Check the jobs of a command on a card. With skip_invalid some may be refused."""
    models, refusals = [], []
    with card_present(card, VLLM_VERSION):
        for job in jobs:
            try:
                build(job.cfg.task).check(job.cfg)
                models.append(model_name(job.cfg))
            except UserError as error:
                refusals.append(str(error))
    leaves_out = bool(OmegaConf.select(jobs[0].cfg, "skip_invalid"))
    if refusals and not (leaves_out and models):
        return Outcome(card, "", refusals[0])
    return Outcome(card, ", ".join(dict.fromkeys(models)))


def model_name(cfg: Any) -> str:
    """Return the model that a job runs with."""
    backend = build(cfg.executor)
    assert isinstance(backend, MeasuredBackend)
    return resolve_model(cfg, backend)[0].name


def recorded() -> dict[str, dict[Card, str]]:
    """Read the cells of the recorded table, by command and card."""
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\|(.*)\|$", TABLE.read_text(), flags=re.MULTILINE)
    cells = {command: [cell.strip() for cell in row.split("|")] for command, row in rows}
    return {command: dict(zip(CARDS, row, strict=True)) for command, row in cells.items()}

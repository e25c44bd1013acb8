"""Write the table of GPUs and documented commands, experiments/gpu/gpu_targets/commands.md:

PYTHONPATH=tests/support python tests/write_card_commands.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from card_commands import TABLE, VLLM_VERSION, Outcome, commands_on_cards, composed, outcomes
from cards import CARDS
from composing import quicken

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.experiment.registry import CATALOG

HEAD = """# What the documented commands do on a GPU

**Checked, not run**: each command is composed and checked as on that card, by its memory and chip
and a vLLM {version} that answer as they do; nothing was computed on a GPU. A name is the model that
the command runs with there; `model=NAME` takes another. Of a sweep the last values are checked.
Commands with `executor=simulated` need no GPU and are the same everywhere.

`PYTHONPATH=tests/support python tests/write_card_commands.py` writes it anew, and
`tests/test_readme.py` checks what it says.

"""
SHOWN = {
    "serve": "throughput and latency of {policy}, beside baselines",
    "calibrate": "iteration times of this device, for `executor.cost_model=profiled`",
}
SHORT = ("NVIDIA ", "GeForce ", "-SXM4", " HBM3")


def main() -> None:
    os.chdir(REPOSITORY)
    quicken()
    rows, reasons = list[str](), dict[str, str]()
    for command in commands_on_cards():
        found = outcomes(command)
        if found:
            cells = " | ".join(outcome.cell for outcome in found)
            rows.append(f"| `{command}` | {shows(command)} | {cells} |")
            reasons.update(reasons_of(command, found))
    names = [name_of_card(card.name) for card in CARDS]
    head = f"| command | shows | {' | '.join(names)} |\n|{' --- |' * (len(names) + 2)}\n"
    body = "\n".join(rows)
    listed = "\n".join(f"- {reason}" for reason in reasons.values())
    text = HEAD.format(version=VLLM_VERSION)
    TABLE.write_text(f"{text}{head}{body}\n\n## Refused, by these lines\n\n{listed}\n")


def shows(command: str) -> str:
    """Return what a reader learns by a command."""
    cfg = composed(command).jobs[-1].cfg
    experiment = cfg.task.get("experiment")
    if experiment in CATALOG:
        return str(CATALOG[experiment].question or CATALOG[experiment].name)
    kind = command_task(command)
    policy = str(cfg.policy._target_).rpartition(".")[2]
    return SHOWN.get(kind, kind).format(policy=policy)


def command_task(command: str) -> str:
    match = re.search(r"\btask=(\w+)", command)
    return match[1] if match else "serve"


def reasons_of(command: str, found: Iterable[Outcome]) -> dict[str, str]:
    """Return the first line of each kind in which a command is refused, with the cards of it."""
    kinds = dict[str, list[Outcome]]()
    for outcome in found:
        if outcome.refusal:
            kind = re.sub(r"[\d.]+", "", outcome.refusal.replace(outcome.card.name, ""))
            kinds.setdefault(kind, []).append(outcome)
    lines = {}
    for kind, refused in kinds.items():
        cards = ", ".join(name_of_card(outcome.card.name) for outcome in refused)
        lines[command + kind] = f"`{command}` on {cards}: {refused[0].refusal}"
    return lines


def name_of_card(name: str) -> str:
    for part in SHORT:
        name = name.replace(part, "")
    return name


if __name__ == "__main__":
    main()

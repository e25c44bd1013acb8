"""Record the paper's figures, and the boundary of piggybacking, by kernels that others measured.

    python experiments/lab/measured_kernels/record.py [--only NAME ...] [--record FOLDER]

Leaves GROUP/NAME/results/kernels-GPU-MODEL/NAME.csv for each experiment and system that has points.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.run import main as run

LAB = "experiments/lab"
FIGURES = ("fig03", "fig04", "fig07", "fig08", "fig10", "fig13", "table2", "piggyback_boundary")


class System(NamedTuple):
    """A GPU's tables of one model; whether these have calls over prompts and decodes, and products
    of one token more than fills a tile, a step that no line between rows shows.
    """

    hardware: str
    model: str
    tables: str
    num_devices: int = 1
    has_mixed_calls: bool = False
    has_tile_steps: bool = False


SYSTEMS = (
    System("rtx-4090", "llama3.1-8b", f"{LAB}/real_servers/rtx-4090-llama-3.1-8b", 1, True),
    System(
        "rtx-pro-6000", "qwen3-30b-a3b", f"{LAB}/real_servers/rtx-pro-6000-qwen3-30b-a3b", 1, True
    ),
    System("a100", "llama3.1-70b", f"{LAB}/measured_kernels/tables/a100-llama3.1-70b", 2),
    System("a100", "qwen3-8b", f"{LAB}/measured_kernels/tables/a100-qwen3-8b"),
    System("h100", "qwen3-8b", f"{LAB}/measured_kernels/tables/h100-qwen3-8b", 1, False, True),
    System("h200", "qwen3-8b", f"{LAB}/measured_kernels/tables/h200-qwen3-8b", 1, False, True),
    System("b200", "qwen3-8b", f"{LAB}/measured_kernels/tables/b200-qwen3-8b", 1, False, True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=FIGURES)
    parser.add_argument("--record", default=str(EXPERIMENTS))
    options = parser.parse_args()
    for name in options.only:
        for system in SYSTEMS:
            if run(settings_of(name, system, options.record)):
                print(f"{name}: no points on {system.hardware} with {system.model}")


def settings_of(name: str, system: System, record: str) -> Sequence[str]:
    """Return the settings of one experiment on one system."""
    settings = [
        f"experiment={name}",
        "executor=simulated",
        "executor.cost_model=measured_kernels",
        f"hardware={system.hardware}",
        f"model={system.model}",
        f"hardware.tables={system.tables}",
        f"executor.tensor_parallel={system.num_devices}",
        f"task.record={record}",
        "task.processes=1",
        "tracking=none",
    ]
    if not system.has_mixed_calls:
        settings.append("++hardware.hybrid_call=false")
        if name == "piggyback_boundary":
            settings.append("task.sizes.paper.ways=[two calls]")
    if name == "fig07" and not system.has_tile_steps:
        settings.append("task.sizes.paper.tiles=[]")
    return settings


if __name__ == "__main__":
    main()

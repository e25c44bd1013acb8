"""Reproduce Fig 12 of the paper, with and without the costs of its code base; writes tables and the picture.

python experiments/pipeline_bubbles/run.py
python experiments/pipeline_bubbles/run.py --seed 1 --output outputs/fig12
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd
from hydra.utils import instantiate
from omegaconf import OmegaConf

from sarathi_lab.paper.pipelines import NUM_REQUESTS, errors, fig12
from sarathi_lab.paper.plots_pipelines import fig12 as draw
from sarathi_lab.paths import CONF, EXPERIMENTS

HARDWARE = {"datasheet": "a100", "with the code base's costs": "a100_fig12"}
POINTS = 50  # kept of each line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--output", type=Path, default=EXPERIMENTS / "pipeline_bubbles" / "results")
    arguments = parser.parse_args()
    spec = instantiate(OmegaConf.load(CONF / "model" / "gpt3-175b.yaml"))
    lines, summaries, bubbles = {}, {}, []
    for version, name in HARDWARE.items():
        start = time.perf_counter()
        hardware = instantiate(OmegaConf.load(CONF / "hardware" / f"{name}.yaml"))
        result = fig12(spec, hardware, arguments.num_requests, arguments.seed)
        compared = errors(result.rows) if arguments.num_requests == NUM_REQUESTS else {}
        lines[version] = result.rows
        summaries[name] = {**result.summary, **{f"error_{line}": error for line, error in compared.items()}}
        bubbles.append(result.bubbles.assign(hardware=name))
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    write(arguments.output, summaries, pd.concat(bubbles))
    thinned = pd.concat([_thinned(rows).assign(hardware=HARDWARE[version]) for version, rows in lines.items()])
    thinned.round(4).to_csv(arguments.output / "fig12.csv", index=False)
    draw(lines).savefig(arguments.output / "fig12.png", dpi=150)


def write(output: Path, summaries: dict[str, dict[str, float]], bubbles: pd.DataFrame) -> None:
    """The summaries beside each other, and seconds of bubbles by cause and stage."""
    output.mkdir(parents=True, exist_ok=True)
    summary = pd.DataFrame(summaries)
    table = bubbles.pivot_table(index=["hardware", "series", "cause"], columns="stage", values="seconds", fill_value=0)
    table["all"] = table.sum(axis=1)
    summary.round(4).to_csv(output / "summary.csv", index_label="name")
    table.round(1).to_csv(output / "bubbles.csv")
    print(summary.round(3).to_string(), table.round(0).to_string(), sep="\n\n")


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    lines = [line.iloc[:: max(1, len(line) // POINTS)] for _, line in rows.groupby(["panel", "series"])]
    return pd.concat(lines)


if __name__ == "__main__":
    main()

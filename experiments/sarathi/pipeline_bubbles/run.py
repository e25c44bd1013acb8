"""Where the bubbles of Fig 12 are, by cause and stage, with and without the costs of the paper's
code base.

python experiments/sarathi/pipeline_bubbles/run.py
python experiments/sarathi/pipeline_bubbles/run.py --seed 1 --output outputs/fig12
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.experiment.pipeline import NUM_REQUESTS, run_systems

HARDWARE = ("a100_2023", "a100_fig12")  # as measured elsewhere, and with the costs of the code base


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS)
    parser.add_argument(
        "--output", type=Path, default=EXPERIMENTS / "sarathi" / "pipeline_bubbles" / "results"
    )
    arguments = parser.parse_args()
    spec = load_option("model", "gpt3-175b")
    summaries, bubbles = {}, []
    for name in HARDWARE:
        start = time.perf_counter()
        hardware = load_option("hardware", name)
        result = run_systems(spec, hardware, arguments.num_requests, arguments.seed)
        summaries[name] = result.summary
        bubbles.append(result.bubbles.assign(hardware=name))
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    write(arguments.output, summaries, pd.concat(bubbles))


def write(output: Path, summaries: dict[str, dict[str, float]], bubbles: pd.DataFrame) -> None:
    """The summaries beside each other, and seconds of bubbles by cause and stage."""
    output.mkdir(parents=True, exist_ok=True)
    summary = pd.DataFrame(summaries)
    table = bubbles.pivot_table(
        index=["hardware", "series", "cause"], columns="stage", values="seconds", fill_value=0
    )
    table["all"] = table.sum(axis=1)
    summary.round(4).to_csv(output / "summary.csv", index_label="name")
    table.round(1).to_csv(output / "bubbles.csv")
    print(summary.round(3).to_string(), table.round(0).to_string(), sep="\n\n")


if __name__ == "__main__":
    main()

"""Where the bubbles of Fig 12 are, by cause and stage, with and without the costs of the paper's
code base.

python experiments/sarathi/pipeline_bubbles/run.py
python experiments/sarathi/pipeline_bubbles/run.py --seed 1 --output outputs/fig12
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.experiment.pipeline import (
    NUM_REQUESTS,
    PIPELINES,
    SYSTEMS,
    completion_time,
    serve,
)

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
        sizes = (arguments.num_requests, arguments.seed)
        ledgers = {system: serve(system, spec, hardware, *sizes) for system in SYSTEMS}
        summaries[name] = summary_of(ledgers)
        bubbles.append(bubbles_of(ledgers).assign(hardware=name))
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    write(arguments.output, summaries, pd.concat(bubbles))


def summary_of(ledgers: Mapping[str, Sequence[Ledger]]) -> dict[str, float]:
    """Seconds of the systems' median bubbles and completion, and their ratios."""
    requests = {
        name: pd.concat([ledger.requests() for ledger in parts]) for name, parts in ledgers.items()
    }
    medians = {name: float(requests[name].bubble_time.median()) for name in PIPELINES}
    times = {name: completion_time(table.finish_time) for name, table in requests.items()}
    return {
        **{f"bubble_median_{name}": seconds for name, seconds in medians.items()},
        "bubble_ratio": medians["tp_pp_orca"] / medians["sarathi"],
        **{f"completion_{name}": seconds for name, seconds in times.items()},
        "tp_pp_orca_over_sarathi": times["tp_pp_orca"] / times["sarathi"],
        "tp_8rep_over_sarathi": times["tp_8rep"] / times["sarathi"],
        "tp_pp_orca_over_tp_8rep": times["tp_pp_orca"] / times["tp_8rep"],
    }


def bubbles_of(ledgers: Mapping[str, Sequence[Ledger]]) -> pd.DataFrame:
    """Seconds by system (series), cause and stage."""
    gaps = pd.concat([ledgers[name][0].bubbles().assign(series=name) for name in PIPELINES])
    gaps = gaps.assign(seconds=gaps.end - gaps.start)
    return gaps.groupby(["series", "cause", "stage"]).seconds.sum().reset_index()


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

"""Predict Llama-2-70B's prompts and tokens on A100s and H100s, as Splitwise measured them.

    python experiments/lab/predictions/splitwise_70b.py FILE [--result]

FILE is `data/perf_model.csv` of github.com/Mutinifni/splitwise-sim at commit 3780880 (MIT,
LICENSE-splitwise-sim). Without --result only its columns of settings are read, and
splitwise_70b.yaml is written; with it, medians of its times are entered in
splitwise_70b.result.yaml. Times are taken for milliseconds: of a whole batch of prompts, and
between two tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import score

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.model.spec import ModelSpec

NAME = "splitwise_70b"
CARDS = {"a100-80gb": "a100", "h100-80gb": "h100"}
SETTINGS = ["hardware", "tensor_parallel", "prompt_size", "batch_size"]
TOKENS = 128  # of an answer, the shortest that was measured
TIMES = {"prompt_time": "prompts", "token_time": "a token"}
VOCABULARY = 32_000  # of Llama-2; its layers have the shapes of Llama-3.1-70B's
HOST = "vllm_0_12"  # prepares an iteration after the one before, as vLLM of 2023 did


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args()
    if options.result:
        measured = dict(results(options.file))
        score.write_result(NAME, measured)
        return
    entry = {
        "source": "Mutinifni/splitwise-sim (MIT), its table of times and power",
        "asked": "milliseconds of a batch of prompts, and between two tokens",
        "settings": {
            "model": "Llama-2-70B, 16 bits",
            "cards": CARDS,
            "host": HOST,
            "level": "executor.cost_model=analytic; decodes at the middle of an answer of 128",
        },
        "predicted": dict(predictions(options.file)),
    }
    score.write_entry(NAME, entry)


def name_of(card: str, degree: int, prompt: int, batch: int) -> str:
    return f"{degree} x {card}, {batch} of {prompt}"


def settings_of(file: Path) -> pd.DataFrame:
    """Read which settings were measured, and none of the times."""
    table = pd.read_csv(file, usecols=["model", "token_size", *SETTINGS])
    is_asked = (table.model == "llama2-70b") & table.hardware.isin(CARDS)
    return table[is_asked & (table.token_size == TOKENS)][SETTINGS].drop_duplicates()


def predictions(file: Path) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of each measured setting."""
    spec = replace(load_option("model", "llama3.1-70b"), name="llama2-70b", vocab_size=VOCABULARY)
    host = load_option("host", HOST)
    for (card, degree), rows in settings_of(file).groupby(["hardware", "tensor_parallel"]):
        cost = cost_of(spec, str(card), int(degree))
        for row in rows.itertuples():
            prompt, number = int(row.prompt_size), int(row.batch_size)
            context = prompt + TOKENS // 2
            prompts = make_batch(prefill_tokens=prompt, num_prefills=number, emits=True)
            decodes = make_batch(num_decodes=number, context=context)
            name = name_of(str(card), int(degree), prompt, number)
            for what, batch in (("prompts", prompts), ("a token", decodes)):
                seconds = cost.iteration_time(batch) + host.seconds(batch)
                yield f"{name}: {what}", round(1e3 * seconds, 3)


def cost_of(spec: ModelSpec, card: str, degree: int) -> CostModel:
    hardware = replace(load_option("hardware", CARDS[card]), iteration_overhead=0.0)
    return make_cost_model("analytic", spec, hardware, 2, Parallel(degree))


def results(file: Path) -> Iterator[tuple[str, float]]:
    """Yield the median of each measured setting's repeats."""
    table = pd.read_csv(file)
    is_asked = (table.model == "llama2-70b") & table.hardware.isin(CARDS)
    rows = table[is_asked & (table.token_size == TOKENS)]
    medians = rows.groupby(SETTINGS)[list(TIMES)].median()
    for labels, times in medians.iterrows():
        card, degree, prompt, number = labels
        for column, what in TIMES.items():
            name = name_of(str(card), int(degree), int(prompt), int(number))
            yield f"{name}: {what}", round(float(times[column]), 3)


if __name__ == "__main__":
    main()

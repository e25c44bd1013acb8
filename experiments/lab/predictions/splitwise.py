"""Predict prompts and tokens of two models on A100s and H100s, as Splitwise measured them.

    python experiments/lab/predictions/splitwise.py NAME FILE [--result]

NAME is one of `ENTRIES`. FILE is `data/perf_model.csv` of github.com/Mutinifni/splitwise-sim at
commit 3780880 (MIT, LICENSE-splitwise-sim). Without --result only its columns of settings are read,
and NAME.yaml is written; with it, medians of its times are entered in NAME.result.yaml. Times are
taken for milliseconds: of a whole batch of prompts, and between two tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import score

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.model.spec import ModelSpec

CARDS = {"a100-80gb": "a100", "h100-80gb": "h100"}
SETTINGS = ["hardware", "tensor_parallel", "prompt_size", "batch_size"]
TOKENS = 128  # of an answer, the shortest that was measured
TIMES = {"prompt_time": "prompts", "token_time": "a token"}
HOST = "vllm_0_12"  # prepares an iteration after the one before, as vLLM of 2023 did
# Llama-2-70B's token took 30 ms on eight cards of either kind, so the host bounded its 80 layers.
LAYER_LAUNCH = 30.0e-3 / 80  # seconds


@dataclass(frozen=True)
class Source:
    """The rows of an entry: of this `model` in the table.

    Attributes:
        described: The model in words.
        layer_launch: Seconds in which the host launches a layer while the device computes the ones
            before; 0: launches take no time.
    """

    model: str
    described: str
    layer_launch: float = 0.0

    @property
    def spec(self) -> ModelSpec:
        if self.model == "bloom-176b":
            return bloom()
        # Its layers have the shapes of Llama-3.1-70B's.
        return replace(load_option("model", "llama3.1-70b"), name=self.model, vocab_size=32_000)

    @property
    def level(self) -> str:
        """What is computed of a setting, in words."""
        formula = "executor.cost_model=analytic; decodes at the middle of an answer of 128"
        if not self.layer_launch:
            return formula
        each = f"{1e3 * self.layer_launch:g} ms for each layer"
        return f"{formula}; an iteration takes no less than {each}"


BLOOM = "BLOOM-176B, 16 bits"
ENTRIES = {
    "splitwise_70b": Source("llama2-70b", "Llama-2-70B, 16 bits"),
    "splitwise_bloom": Source("bloom-176b", BLOOM),
    "splitwise_bloom_launched": Source("bloom-176b", BLOOM, LAYER_LAUNCH),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ENTRIES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args()
    source = ENTRIES[options.name]
    if options.result:
        measured = dict(results(source, options.file))
        score.write_result(options.name, measured)
        return
    entry = {
        "source": "Mutinifni/splitwise-sim (MIT), its table of times and power",
        "asked": "milliseconds of a batch of prompts, and between two tokens",
        "settings": {
            "model": source.described,
            "cards": CARDS,
            "host": HOST,
            "level": source.level,
        },
        "predicted": dict(predictions(source, options.file)),
    }
    score.write_entry(options.name, entry)


def name_of(card: str, degree: int, prompt: int, batch: int) -> str:
    return f"{degree} x {card}, {batch} of {prompt}"


def asked(source: Source, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a source's model with answers of `TOKENS`."""
    is_asked = (table.model == source.model) & table.hardware.isin(CARDS)
    return table[is_asked & (table.token_size == TOKENS)]


def settings_of(source: Source, file: Path) -> pd.DataFrame:
    """Read which settings were measured, and none of the times."""
    table = pd.read_csv(file, usecols=["model", "token_size", *SETTINGS])
    return asked(source, table)[SETTINGS].drop_duplicates()


def predictions(source: Source, file: Path) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of each measured setting."""
    spec = source.spec
    host = load_option("host", HOST)
    launched = source.layer_launch * spec.num_layers
    for (card, degree), rows in settings_of(source, file).groupby(["hardware", "tensor_parallel"]):
        cost = cost_of(spec, str(card), int(degree))
        for row in rows.itertuples():
            prompt = int(row.prompt_size)
            number = int(row.batch_size)
            context = prompt + TOKENS // 2
            prompts = make_batch(prefill_tokens=prompt, num_prefills=number, emits=True)
            decodes = make_batch(num_decodes=number, context=context)
            name = name_of(str(card), int(degree), prompt, number)
            for what, batch in (("prompts", prompts), ("a token", decodes)):
                device = max(launched, cost.iteration_time(batch))
                seconds = device + host.seconds(batch)
                yield f"{name}: {what}", round(1e3 * seconds, 3)


def cost_of(spec: ModelSpec, card: str, degree: int) -> CostModel:
    hardware = replace(load_option("hardware", CARDS[card]), iteration_overhead=0.0)
    return make_cost_model("analytic", spec, hardware, 2, Parallel(degree))


def results(source: Source, file: Path) -> Iterator[tuple[str, float]]:
    """Yield the median of each measured setting's repeats."""
    rows = asked(source, pd.read_csv(file))
    medians = rows.groupby(SETTINGS)[list(TIMES)].median()
    for labels, times in medians.iterrows():
        card, degree, prompt, number = labels
        for column, what in TIMES.items():
            name = name_of(str(card), int(degree), int(prompt), int(number))
            yield f"{name}: {what}", round(float(times[column]), 3)


def bloom() -> ModelSpec:
    """Return BLOOM-176B: GPT-3's kind of layer with the sizes of its config.json
    (bigscience/bloom).
    """
    return replace(
        load_option("model", "gpt3-175b"),
        name="bloom-176b",
        num_layers=70,
        hidden_size=14336,
        num_heads=112,
        num_kv_heads=112,
        ffn_size=4 * 14336,
        vocab_size=250_880,
        tie_embeddings=True,
        max_position=8192,
    )


if __name__ == "__main__":
    main()

"""Predict what vLLM pull request 58013 gains, before its benchmark is read.

    python experiments/lab/predictions/vllm_58013.py

Writes vllm_58013.yaml. The pull request makes two attention calls of one on GPUs with
flash-attention 2 (SM8x); of it, only the description of the change was read. Its settings are not
known, so the entry has a grid of them: each value is that without the change over that with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import score

import sarathi_lab as lab
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model

NAME = "vllm_58013"
SERVER = "experiments/lab/real_servers/rtx-4090-llama-3.1-8b/tp1"
CARDS = {"a100": None, "rtx-4090": SERVER}  # and tables in place of the hardware file's
MODEL = "llama3.1-8b"
CHUNKS = (512, 2048, 8192)
DECODES = (8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
# Prompt and output tokens, requests at a time: as benchmarks of a server state them.
SERVED = ((1024, 128), (1024, 1024), (4096, 256), (8192, 256))
AT_A_TIME = (32, 128)
BUDGET = 2048
NUM_REQUESTS = 256
BLOCKS = {"a100": 26_000, "rtx-4090": 2588}  # of 16 tokens beside the model's weights


def main() -> None:
    predicted = dict([*attention_ratios(), *served_ratios()])
    entry = {
        "source": "https://github.com/vllm-project/vllm/pull/58013",
        "asked": "one attention call over two: time of attention, output tokens/s, time a token",
        "settings": {
            "model": MODEL,
            "cards": list(CARDS),
            "attention": "NAME decodes of N beside C: attention's time in one call over two",
            "served": f"budget {BUDGET}, {NUM_REQUESTS} requests at once: time a token in one call "
            "over two, and output tokens/s in two calls over one",
            "level": "executor.cost_model=profiled; the A100's one call is scaled by formula",
        },
        "predicted": predicted,
    }
    score.write_entry(NAME, entry)


def cost_of(card: str, *, in_one_call: bool) -> CostModel:
    hardware = replace(load_option("hardware", card), hybrid_call=in_one_call)
    if (tables := CARDS[card]) is not None:
        hardware = replace(hardware, tables=tables)
    return make_cost_model("profiled", load_option("model", MODEL), hardware, 2)


def attention_ratios() -> Iterator[tuple[str, float]]:
    """Yield the time of a layer's attention in one call over that in two."""
    for card in CARDS:
        one, two = (cost_of(card, in_one_call=in_one_call) for in_one_call in (True, False))
        for chunk in CHUNKS:
            for number in DECODES:
                for context in CONTEXTS:
                    batch = make_batch(prefill_tokens=chunk, num_decodes=number, context=context)
                    together = sum(one.operations.attention_times(batch))
                    apart = sum(two.operations.attention_times(batch))
                    setting = f"{card}, attention: {number} decodes of {context} beside {chunk}"
                    yield setting, round(float(together / apart), 3)


def served_ratios() -> Iterator[tuple[str, float]]:
    """Yield what a server's token takes, and its throughput, that one call loses."""
    for card, tables in CARDS.items():
        for prompt_len, output_len in SERVED:
            for number in AT_A_TIME:
                settings = {
                    "executor": "simulated",
                    "executor.cost_model": "profiled",
                    "hardware": card,
                    "model": MODEL,
                    "host": "vllm_0_19",
                    "policy": "vllm_v1",
                    "chunk": BUDGET,
                    "batch": number,
                    "cache.num_blocks": BLOCKS[card],
                    "workload": "paper_grid",
                    "workload.prompt_len": prompt_len,
                    "workload.output_len": output_len,
                    "workload.num_requests": NUM_REQUESTS,
                    "baselines": [],
                }
                if tables is not None:
                    settings["hardware.tables"] = tables
                one, two = (
                    lab.serve(**settings, **{"++hardware.hybrid_call": in_one_call}).runs.iloc[0]
                    for in_one_call in (True, False)
                )
                where = f"{card}, {prompt_len}+{output_len}, {number} at a time"
                yield f"{where}: time a token", round(float(one.tpot_mean / two.tpot_mean), 3)
                yield f"{where}: tokens/s", round(float(two.throughput / one.throughput), 3)


if __name__ == "__main__":
    main()

"""Predict the time between tokens of gpt-oss-120b, an MXFP4 mixture, on vLLM with H100s and B200s.

    python experiments/lab/predictions/gpt_oss_120b.py FILE [--result]

FILE is a table of end-to-end points of ai-dynamo/aiconfigurator (Apache-2.0), with the columns of
`SETTINGS` and `silicon_tpot_ms`. Without --result only its columns of settings are read, and
gpt_oss_120b.yaml is written; with it, medians of its times are entered in
gpt_oss_120b.result.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import score

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Host, Parallel

NAME = "gpt_oss_120b"
MODEL = "gpt-oss-120b"
CARDS = {"h100_sxm": "h100", "b200_sxm": "b200"}
SETTINGS = ["system", "tp_size", "isl", "osl", "batch_size"]
ASKED = ["model_path", "backend", "mode", "moe_ep_size", "attention_dp_size"]
TIME = "silicon_tpot_ms"
HOST = "vllm_0_19"
MEAN_LENGTH = 0.9  # of the nominal one: the benchmark draws evenly from 0.8 up to it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args()
    if options.result:
        table = points_of(options.file, [TIME])
        medians = table.groupby(SETTINGS)[TIME].median()
        measured = {name_of(setting): round(time, 3) for setting, time in medians.items()}
        score.write_result(NAME, measured)
        return
    entry = {
        "source": "ai-dynamo/aiconfigurator (Apache-2.0), points of gpt-oss-120b on vLLM",
        "asked": "milliseconds between two tokens of a request, with so many users",
        "settings": {
            "model": f"{MODEL}, experts in MXFP4",
            "cards": CARDS,
            "host": HOST,
            "level": "executor.cost_model=analytic; the steady state: each user's prompt beside "
            "the decodes of the others once an answer, lengths of 0.9 of the nominal ones",
        },
        "predicted": dict(predictions(options.file)),
    }
    score.write_entry(NAME, entry)


def points_of(file: Path, times: list[str]) -> pd.DataFrame:
    """Read the settings of vLLM's points without replicas or split experts, and their `times`."""
    table = pd.read_csv(file, usecols=[*ASKED, *SETTINGS, *times])
    is_model = table.model_path.str.endswith(MODEL) & table.system.isin(CARDS)
    is_served = (table.backend == "vllm") & (table["mode"] == "agg")
    is_whole = (table.moe_ep_size == 1) & (table.attention_dp_size == 1)
    return table[is_model & is_served & is_whole]


def name_of(setting: tuple[str, float, int, int, float]) -> str:
    card, degree, prompt, answer, users = setting
    return f"{int(degree)} x {CARDS[card]}, {prompt} + {answer} tokens, {int(users)} users"


def predictions(file: Path) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of each measured setting."""
    spec = load_option("model", MODEL)
    host = load_option("host", HOST)
    settings = points_of(file, [])[SETTINGS].drop_duplicates()
    for (card, degree), rows in settings.groupby(["system", "tp_size"]):
        hardware = load_option("hardware", CARDS[str(card)])
        cost = make_cost_model("analytic", spec, hardware, 2, Parallel(int(degree)))
        for setting in rows.itertuples(index=False, name=None):
            yield name_of(setting), round(1e3 * token_time(cost, host, setting), 3)


def token_time(cost: CostModel, host: Host, setting: tuple[str, float, int, int, float]) -> float:
    """Compute the mean seconds between tokens: a batch of decodes, and each other user's prompt
    beside them once an answer.
    """
    _, _, nominal_prompt, nominal_answer, users = setting
    prompt = round(MEAN_LENGTH * nominal_prompt)
    answer = round(MEAN_LENGTH * nominal_answer)
    decodes = {"num_decodes": int(users), "context": prompt + answer // 2}
    alone = make_batch(**decodes)
    beside = make_batch(prefill_tokens=prompt, **decodes)
    seconds = [
        cost.iteration_time(batch) + host.exposed(batch, cost.iteration_time(batch))
        for batch in (alone, beside)
    ]
    of_decodes, with_prompt = seconds
    return of_decodes + (users - 1) / answer * (with_prompt - of_decodes)


if __name__ == "__main__":
    main()

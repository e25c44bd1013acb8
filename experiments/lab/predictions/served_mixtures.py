"""Predict the time between tokens of mixtures of experts, as servers with H100s and B200s have it.

    python experiments/lab/predictions/served_mixtures.py NAME FILE [--result]

NAME is one of `ENTRIES`. FILE is a table of end-to-end points of ai-dynamo/aiconfigurator
(Apache-2.0), with the columns of `SETTINGS` and `silicon_tpot_ms`. Without --result only its
columns of settings are read, and NAME.yaml is written; with it, medians of its times are entered in
NAME.result.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import score

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.hardware import Host, Parallel
from sarathi_lab.model.layers import LinearAttention
from sarathi_lab.model.quantisation import FP8, STORED
from sarathi_lab.model.spec import ModelSpec

SYSTEMS = {"h100_sxm": "h100", "b200_sxm": "b200"}
SETTINGS = ["system", "tp_size", "isl", "osl", "batch_size"]
ASKED = ["model_path", "backend", "mode", "precision", "moe_ep_size", "attention_dp_size"]
TIME = "silicon_tpot_ms"
MEAN_LENGTH = 0.9  # of the nominal one: the benchmark draws evenly from 0.8 up to it
LEVEL = (
    "executor.cost_model=analytic; the steady state: each user's prompt beside the decodes of the "
    "others once an answer, lengths of 0.9 of the nominal ones"
)
ENGINES = {"vllm_0_19": "vllm", "sglang_0_5": "sglang", "trtllm_1_0": "trtllm"}


@dataclass(frozen=True)
class Source:
    """The points of an entry: of these checkpoints, in this precision, on this server.

    `described` is the model in words, with its weights. With `host_on_several` that is the host
    of more than one device.
    """

    model: str
    checkpoints: str
    precision: str
    host: str
    described: str
    systems: Mapping[str, str] = field(default_factory=lambda: SYSTEMS)
    host_on_several: str | None = None

    def host_of(self, degree: int) -> Host:
        """Load the host of a server on `degree` devices."""
        name = self.host
        if degree > 1 and self.host_on_several is not None:
            name = self.host_on_several
        host: Host = load_option("host", name)
        return host

    @property
    def spec(self) -> ModelSpec:
        """The model with the weights of the points."""
        if self.model == "qwen3.5-397b-a17b":
            return replace(qwen3_5(), quantisation=FP8)
        spec: ModelSpec = load_option("model", self.model)
        if self.precision == "int4":
            return replace(spec, quantisation=replace(STORED["int4"], of="experts"))
        return spec if spec.quantisation else replace(spec, quantisation=FP8)


DEEPSEEK = "DeepSeek-V3 and R1, weights and activations in 8 bits"
ENTRIES = {
    "gpt_oss_120b": Source(
        "gpt-oss-120b", "gpt-oss-120b", "fp4|fp8", "vllm_0_19", "gpt-oss-120b, experts in MXFP4"
    ),
    "minimax_m2_5": Source(
        "minimax-m2",
        "MiniMax-M2.5",
        "fp8",
        "vllm_0_19",
        "MiniMax-M2.5 with the shapes of M2, weights and activations in 8 bits",
    ),
    "kimi_k2_5": Source(
        "kimi-k2",
        "Kimi-K2.5",
        "int4",
        "vllm_0_19",
        "Kimi-K2.5 with the shapes of K2, experts in 4 bits, all else in 16",
    ),
    "qwen3_5_397b": Source(
        "qwen3.5-397b-a17b",
        "Qwen3.5-397B-A17B",
        "fp8",
        "sglang_0_5",
        "Qwen3.5-397B-A17B, weights and activations in 8 bits",
    ),
    "deepseek_sglang": Source(
        "deepseek-v3", "DeepSeek-V3|DeepSeek-R1", "fp8", "sglang_0_5", DEEPSEEK
    ),
    "deepseek_trtllm": Source(
        "deepseek-v3", "DeepSeek-V3|DeepSeek-R1", "fp8", "trtllm_1_0", DEEPSEEK
    ),
}

# The same mixtures on another card, by the hosts that replays take now.
for _name in ("gpt_oss_120b", "minimax_m2_5", "kimi_k2_5"):
    ENTRIES[f"{_name}_h200"] = replace(
        ENTRIES[_name], systems={"h200_sxm": "h200"}, host_on_several="vllm_async"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ENTRIES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args()
    source = ENTRIES[options.name]
    if options.result:
        table = points_of(source, options.file, [TIME])
        medians = table.groupby(SETTINGS)[TIME].median()
        measured = {name_of(source, setting): round(time, 3) for setting, time in medians.items()}
        score.write_result(options.name, measured)
        return
    engine = ENGINES[source.host]
    entry = {
        "source": f"ai-dynamo/aiconfigurator (Apache-2.0), points of "
        f"{source.checkpoints.replace('|', ' and ')} in {source.precision} on {engine}",
        "asked": "milliseconds between two tokens of a request, with so many users",
        "settings": {
            "model": source.described,
            "cards": dict(source.systems),
            "host": " and ".join(filter(None, (source.host, source.host_on_several))),
            "level": LEVEL,
        },
        "predicted": dict(predictions(source, options.file)),
    }
    score.write_entry(options.name, entry)


def points_of(source: Source, file: Path, times: list[str]) -> pd.DataFrame:
    """Read the settings of points without replicas or split experts, and their `times`."""
    table = pd.read_csv(file, usecols=[*ASKED, *SETTINGS, *times])
    is_model = table.model_path.str.contains(f"(?:{source.checkpoints})$")
    is_stored = table.precision.str.fullmatch(source.precision, na=False)
    is_served = (table.backend == ENGINES[source.host]) & (table["mode"] == "agg")
    is_whole = (table.moe_ep_size == 1) & (table.attention_dp_size == 1)
    return table[is_model & is_stored & is_served & is_whole & table.system.isin(source.systems)]


def name_of(source: Source, setting: tuple[str, float, int, int, float]) -> str:
    card, degree, prompt, answer, users = setting
    return f"{int(degree)} x {source.systems[card]}, {prompt} + {answer} tokens, {int(users)} users"


def predictions(source: Source, file: Path) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of each measured setting."""
    settings = points_of(source, file, [])[SETTINGS].drop_duplicates()
    for (card, degree), rows in settings.groupby(["system", "tp_size"]):
        host = source.host_of(int(degree))
        hardware = load_option("hardware", source.systems[str(card)])
        hardware = hardware.with_kernel(host.attention_kernel)
        cost = make_cost_model("analytic", source.spec, hardware, 2, Parallel(int(degree)))
        for setting in rows.itertuples(index=False, name=None):
            yield name_of(source, setting), round(1e3 * token_time(cost, host, setting), 3)


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


def qwen3_5() -> ModelSpec:
    """Return Qwen3.5-397B-A17B: Qwen3-Next's layers with the sizes of its model card."""
    smaller: ModelSpec = load_option("model", "qwen3-next-80b-a3b")
    linear = LinearAttention(
        num_layers=45, num_heads=64, num_key_heads=16, key_size=128, value_size=128
    )
    return replace(
        smaller,
        name="qwen3.5-397b-a17b",
        num_layers=60,
        hidden_size=4096,
        num_heads=32,
        ffn_size=1024,
        shared_expert_size=1024,
        vocab_size=248320,
        layers=replace(smaller.layers, attention=15, linear=linear),
    )


if __name__ == "__main__":
    main()

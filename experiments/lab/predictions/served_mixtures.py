"""Predict the time between tokens of mixtures of experts, as servers with H100s to B300s have it.

    python experiments/lab/predictions/served_mixtures.py NAME FILE [--result]

NAME is one of `ENTRIES`. FILE is a table of end-to-end points of ai-dynamo/aiconfigurator
(Apache-2.0), with the columns of `SETTINGS` and `silicon_tpot_ms`. Without --result only its
columns of settings are read, and NAME.yaml is written; with it, medians of its times are entered in
NAME.result.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
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
MEAN_LENGTH = 0.9  # of the nominal one: InferenceMAX draws evenly from 0.8 up to it
NOMINAL = 1.0  # aiconfigurator's own benchmark has equal lengths
ENGINES = {"vllm_0_19": "vllm", "sglang_0_5": "sglang", "trtllm_1_0": "trtllm"}


@dataclass(frozen=True)
class Source:
    """The points of an entry: of these checkpoints, in this precision, on this server.

    Attributes:
        described: The model in words, with its weights.
        host_on_several: The host of more than one device; None: `host`.
        length: The mean length of prompts and answers, as a share of the nominal one.
        has_experts_apart: Whether each device has whole experts, as many as all others. It reads
            and computes as much as with a slice of all, which is predicted, if they are chosen
            equally often.
        read: Settings whose times were read before, by their names; they are not asked.
    """

    model: str
    checkpoints: str
    precision: str
    host: str
    described: str
    systems: Mapping[str, str] = field(default_factory=lambda: SYSTEMS)
    host_on_several: str | None = None
    length: float = MEAN_LENGTH
    has_experts_apart: bool = False
    read: Sequence[str] = ()

    @property
    def level(self) -> str:
        """What is computed of a setting, in words."""
        return (
            "executor.cost_model=analytic; the steady state: each user's prompt beside the decodes "
            f"of the others once an answer, lengths of {self.length:g} of the nominal ones"
        )

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
# On a card that is known by its datasheet alone. Two of its points were read by mistake.
ENTRIES["minimax_m2_5_b300"] = replace(
    ENTRIES["minimax_m2_5"],
    systems={"b300_sxm": "b300"},
    host_on_several="vllm_async",
    read=("4 x b300, 8192 + 1024 tokens, 128 users", "4 x b300, 1024 + 1024 tokens, 128 users"),
)
for _name in ("qwen3_5_397b", "deepseek_sglang"):
    ENTRIES[f"{_name}_b300"] = replace(ENTRIES[_name], systems={"b300_sxm": "b300"})
for _name in ("deepseek_sglang", "deepseek_trtllm"):
    ENTRIES[f"{_name}_h200"] = replace(ENTRIES[_name], systems={"h200_sxm": "h200"})
ENTRIES["gpt_oss_120b_trtllm"] = replace(
    ENTRIES["gpt_oss_120b"], systems={"h200_sxm": "h200", "b200_sxm": "b200"}, host="trtllm_1_0"
)
ENTRIES["qwen3_235b_trtllm"] = Source(
    "qwen3-235b-a22b",
    "Qwen3-235B-A22B-FP8",
    "fp8",
    "trtllm_1_0",
    "Qwen3-235B-A22B, weights and activations in 8 bits, each device with its own experts",
    systems={"h100_sxm": "h100"},
    length=NOMINAL,
    has_experts_apart=True,
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
            "level": source.level,
        },
        "predicted": dict(predictions(source, options.file)),
    }
    score.write_entry(options.name, entry)


def points_of(source: Source, file: Path, times: list[str]) -> pd.DataFrame:
    """Read the settings of points without replicas, and their `times`.

    Experts are in slices on all devices, or apart on each if the source says so.
    """
    table = pd.read_csv(file, usecols=[*ASKED, *SETTINGS, *times])
    is_model = table.model_path.str.contains(f"(?:{source.checkpoints})$")
    is_stored = table.precision.str.fullmatch(source.precision, na=False)
    is_served = (table.backend == ENGINES[source.host]) & (table["mode"] == "agg")
    places_of_experts = 1
    if source.has_experts_apart:
        places_of_experts = table.tp_size
    # aiconfigurator's own rows do not state replicas of attention.
    is_one_copy = table.attention_dp_size.fillna(1) == 1
    is_whole = (table.moe_ep_size == places_of_experts) & is_one_copy
    points = table[is_model & is_stored & is_served & is_whole & table.system.isin(source.systems)]
    names = [name_of(source, setting) for setting in points[SETTINGS].itertuples(index=False)]
    was_read = pd.Series(names, points.index, dtype=object).isin(source.read)
    return points[~was_read]


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
            yield (
                name_of(source, setting),
                round(1e3 * token_time(cost, host, setting, source.length), 3),
            )


def token_time(
    cost: CostModel,
    host: Host,
    setting: tuple[str, float, int, int, float],
    length: float = MEAN_LENGTH,
) -> float:
    """Compute the mean seconds between tokens: a batch of decodes, and each other user's prompt
    beside them once an answer.
    """
    _, _, nominal_prompt, nominal_answer, users = setting
    prompt = round(length * nominal_prompt)
    answer = round(length * nominal_answer)
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

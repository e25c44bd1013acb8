"""Compare the seconds and tokens of sarathi_lab with those of other engines on equal requests."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from omegaconf import OmegaConf

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.device import device_description
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.workload.base import random_prompt

OURS = "sarathi_lab"
# Class of engines.py and its options; OpenVINO and transformers run in two ways.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("Sarathi", {}),
    "openvino_genai split": ("OpenVinoGenAi", {"split": True}),
    "openvino_genai whole": ("OpenVinoGenAi", {"split": False}),
    "vllm": ("Vllm", {}),
    "llama_cpp": ("LlamaCpp", {}),
    "transformers_generate": ("Transformers", {"continuous": False}),
    "transformers_cb": ("Transformers", {"continuous": True}),
}
# Requests, all there at the start, with their prompt and output tokens.
WORKLOADS = {"A": (16, 512, 64), "B": (8, 1024, 16), "gpu": (32, 960, 64), "dry": (2, 24, 4)}
COLUMNS = ("peer", "variant", "model", "dtype", "workload", "device")
SETTLE = 1.5  # seconds in which threads of another engine go on spinning
Answers = list[dict[str, Any]]  # of an engine: to "load", to warm up, then the repetitions

Found = dict[tuple[str, str], Answers]  # by engine and workload


@dataclass
class Options:
    """Settings of the command line, as `models=[30m,120m]`."""

    engines: list[str] = field(default_factory=lambda: [name.split()[0] for name in ENGINES])
    models: list[str] = field(default_factory=lambda: ["30m"])  # of conf/model, plain Llamas
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    workloads: list[str] = field(default_factory=lambda: ["A", "B"])
    python: dict[str, str] = field(default_factory=dict)  # interpreter of an engine's environment
    device: str = "cpu"
    isa: str = "auto"  # of the lab
    threads: int = torch.get_num_threads()
    batch: int = 8
    chunk: int = 256
    repetitions: int = 3
    folder: str = "outputs/peers"  # of the checkpoints, their exports, and peers.csv


class Worker:
    """Process of one engine, asked in JSON lines (`engines.py`); the first failure ends it."""

    def __init__(self, name: str, options: Options) -> None:
        python = options.python.get(name.split()[0], sys.executable)
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("engines.py"), ENGINES[name][0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # to be ended with what it has started
        )
        self._failure: dict[str, Any] = {}

    def ask(self, **message: Any) -> dict[str, Any]:
        """Return the answer to `message`, or {"error": reason}."""
        if self._failure:
            return self._failure
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            answer = {"error": f"no answer to {message['op']} ({type(error).__name__})"}
        if "error" in answer:
            self._failure = answer
            self.kill()
        return answer

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def make_checkpoint(spec: ModelSpec, options: Options) -> Path:
    """Write a Llama of the shape of `spec` for transformers, unless it is there."""
    directory = Path(options.folder).absolute() / spec.name
    if directory.is_dir():
        return directory
    config = transformers.LlamaConfig(
        num_hidden_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        intermediate_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = transformers.LlamaForCausalLM(config)
    model.to(torch.float32 if options.device == "cpu" else torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def measure(engines: list[str], spec: ModelSpec, dtype: str, options: Options) -> Found:
    """Load the engines and let them take turns: a machine whose speed changes is slow for all."""
    settings = {
        **asdict(options),
        "model_dir": str(make_checkpoint(spec, options)),
        "dtype": dtype,
        "longest": max(sum(WORKLOADS[workload][1:]) for workload in options.workloads),
    }
    answers: Found = {}
    workers = {name: Worker(name, options) for name in engines}
    for name, worker in workers.items():
        loaded = worker.ask(op="load", **settings, **ENGINES[name][1])
        answers |= {(name, workload): [loaded] for workload in options.workloads}
        print(f"{name}, {spec.name} in {dtype}: {loaded}", flush=True)
    for workload, _ in itertools.product(options.workloads, range(options.repetitions + 1)):
        number, prompt_len, output_len = WORKLOADS[workload]
        sizes = (prompt_len, spec.vocab_size, 0)
        prompts = [random_prompt(i, *sizes).tolist() for i in range(number)]
        for name, worker in workers.items():
            time.sleep(SETTLE if len(engines) > 1 else 0)
            answer = worker.ask(op="run", prompts=prompts, output_len=output_len)
            answers[name, workload].append(answer)
    for worker in workers.values():
        worker.kill()
    return answers


def summarize(workload: str, answers: Answers, ours: Answers) -> dict[str, Any]:
    """Return medians, throughput, the ratio to our seconds, and the share of equal tokens."""
    number, prompt_len, output_len = WORKLOADS[workload]
    result = {"version": answers[0].get("version"), "error": ""}
    if errors := [one["error"] for one in answers if "error" in one]:
        return {**result, "error": errors[0]}
    if [len(ids) for ids in answers[1]["tokens"]] != [output_len] * number:
        return {**result, "error": f"did not return {output_len} tokens of all {number} requests"}
    seconds = [one["seconds"] for one in answers[2:]]
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8))
    result |= {"seconds": middle, "q20": low, "q80": high, "repetitions": len(seconds)}
    result["throughput"] = number * (prompt_len + output_len) / middle
    if "error" not in ours[-1]:
        result["ratio"] = middle / np.median([one["seconds"] for one in ours[2:]])
        result["agreement"] = np.mean(np.equal(answers[1]["tokens"], ours[1]["tokens"]))
    return result


def main(arguments: Sequence[str]) -> None:
    given = OmegaConf.from_dotlist(list(arguments))
    options: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), given))
    names = [name for name in ENGINES if name.split()[0] in (OURS, *options.engines)]
    # On a GPU, whose memory they would share, engines are loaded one after the other.
    groups = [names] if options.device == "cpu" else [[name] for name in names]
    device = device_description(torch.device(options.device), options.threads)
    rows = []
    for model, dtype in itertools.product(options.models, options.dtypes):
        answers: Found = {}
        for group in groups:
            answers |= measure(group, load_option("model", model), dtype, options)
        for (name, workload), result in answers.items():
            peer, _, variant = name.partition(" ")
            row = dict(zip(COLUMNS, (peer, variant, model, dtype, workload, device), strict=True))
            rows.append(row | summarize(workload, result, answers[OURS, workload]))
        table = pd.DataFrame(rows)
        table.to_csv(Path(options.folder) / "peers.csv", index=False)
        print(table.drop(columns=["version", "device"]).to_string(index=False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

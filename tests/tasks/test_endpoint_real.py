"""A real server, `transformers serve`, under the lab's workloads, and its runs beside the lab's
own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from checkpoints import make_checkpoint
from composed import run

import sarathi_lab as lab
from sarathi_lab.results.load import load_requests, load_runs
from sarathi_lab.results.plots import sweeps
from sarathi_lab.run import main
from sarathi_lab.tasks.endpoint.protocol import WORDS

NEEDED = ("fastapi", "uvicorn", "openai", "accelerate")
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, NEEDED)),
    reason="transformers serve is not installed: pip install 'transformers[serving]'",
)
STARTING = 180.0  # seconds at most
VOCAB = [*WORDS, *(f"rare{i}" for i in range(97 - len(WORDS)))]
WORKLOAD = ["workload.num_requests=4", "seq_len=24", "pd_ratio=5", "batch=2"]  # 20 + 4 tokens


def save_tokenizer(folder: Path) -> None:
    """A word a token, so that prompts of words have as many tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token=VOCAB[-1])
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`transformers serve` with a tiny random model: (its address, the model's folder, the
    model).
    """
    folder = tmp_path_factory.mktemp("served")
    model = make_checkpoint("llama", folder)
    save_tokenizer(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "pad_token_id": 0})
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (cache := folder / "cache" / "hub").mkdir(parents=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache.parent),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(folder),
        "--device",
        "cpu",
        "--port",
        str(port),
    ]
    command += ["--continuous-batching", "--cb-block-size", "32", "--cb-num-blocks", "16"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1"],
            stdout=log,
            stderr=log,
            env=environment,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        yield f"http://127.0.0.1:{port}/v1", folder, model
    finally:
        process.terminate()
        process.wait(20)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + STARTING
    while time.monotonic() < end and process.poll() is None:
        try:
            opener.open(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def output(server, tmp_path_factory):
    """The output folder of a run on the server and, tracked as it is, of a simulated one of the
    lab's.
    """
    url, folder, _ = server
    output = tmp_path_factory.mktemp("output")
    own = [
        "task=endpoint",
        f"task.base_url={url}",
        f"task.model={folder}",
        "task.server=transformers",
    ]
    assert main([*own, *WORKLOAD, f"output={output}"]) == 0
    lab = ["executor=simulated", "model=tiny", "chunk=16", "baselines=[]", "tracking=none"]
    assert main([*lab, *WORKLOAD, f"output={output}"]) == 0
    return output


def test_the_real_server_serves_the_workload(server, output):
    _, folder, _ = server
    (labels,) = load_runs(output).query("executor == 'endpoint'").to_dict("records")
    assert (labels["policy"], labels["model"], labels["num_failed"]) == (
        "transformers",
        folder.name,
        0,
    )
    assert labels["asked"] == "completions API, prompts as text, lengths by max_tokens alone"
    requests = load_requests(labels["path"])
    assert requests.prompt_len.tolist() == [20] * 4, "as the server counts"
    assert requests.output_len.tolist() == [4] * 4
    assert labels["cautions"] == "[]"
    assert (requests.finish_time > requests.first_token_time).all()
    assert labels["ttft_p50"] > 0
    assert labels["tbt_p50"] > 0


def test_the_texts_are_those_that_the_model_says(server, tmp_path):
    """Against greedy generation in this process, from the same prompts."""
    url, folder, model = server
    prompts = [" ".join(WORDS[i : i + 5]) for i in (0, 11, 30)]
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": prompt, "output_len": 6}) for prompt in prompts)
    )
    args = ["task=endpoint", f"task.base_url={url}", f"task.model={folder}"]
    result = run(tmp_path, *args, "workload=prompts", f"workload.path={path}")
    found = [text.split() for text in result.tables["requests.parquet"].output_text]
    for prompt, said in zip(prompts, found, strict=True):
        ids = torch.tensor([[VOCAB.index(word) for word in prompt.split()]])
        how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert said == [VOCAB[i] for i in out[0, 5:].tolist()]
    assert len({tuple(said) for said in found}) > 1, (
        "texts that are all the same would agree by accident"
    )


def test_the_runs_stand_side_by_side(output):
    found = lab.load(*sorted(path for path in output.iterdir() if path.name.startswith("20")))
    runs = found.runs
    assert set(runs.executor) == {"endpoint", "simulated"}
    assert set(runs.policy) == {"transformers", "sarathi"}
    assert (runs[["executor", "device", "model"]].nunique() == 2).all()
    same = ["batch", "workload.num_requests", "seed"]
    assert (runs[same].nunique(dropna=False) == 1).all(), "the same work"
    assert runs[["throughput", "ttft_p50", "tbt_p99"]].notna().all(axis=None)
    assert runs.set_index("executor").num_failed["endpoint"] == 0
    for ax in found.plot_iterations().axes:
        if ax.get_ylabel() in ("prompt tokens", "decodes", "requests waiting"):
            assert len(ax.get_lines()) == 2
    table = load_runs(output)
    assert len(table) == 2
    figure = sweeps.draw_sweep(table, x="policy")
    assert "transformers" in [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    plt.close("all")


def test_the_run_reads_the_same_from_wandb(output):
    offline, local = lab.load(output / "wandb"), lab.load(output)
    own = (
        local.runs[local.runs.executor == "endpoint"].select_dtypes("number").dropna(axis="columns")
    )
    assert len(own.columns) > 20
    for name in own:
        assert offline.runs[name].to_numpy() == pytest.approx(own[name].to_numpy()), name
    assert list(offline.runs.policy) == ["transformers"]
    waiting = local.iterations[local.iterations.executor == "endpoint"].num_waiting
    assert offline.iterations.num_waiting.tolist() == waiting.tolist()

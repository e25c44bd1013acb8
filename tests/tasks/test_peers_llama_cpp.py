"""llama.cpp as a peer: its weights' layout, how its server is started and asked, and, where
installed, its tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.tasks.peers import measure as measure_module
from sarathi_lab.tasks.peers.engines import (
    OURS,
    PEERS,
    WORKERS,
    Engine,
    Worker,
    WorkerError,
    ensure_checkpoint,
    environment_of,
)
from sarathi_lab.tasks.peers.measure import Comparison, Scenario, Subject

PYTHON = sys.executable
LLAMA_CPP = PEERS["llama_cpp"][0]
# The interpreter of an environment that has the packages, if it is not this one.
ITS_PYTHON = os.environ.get("LLAMA_CPP_PYTHON", PYTHON)

# A server whose token i is the prompt's sum plus i; it answers in reverse order and writes down
# what it was told.
SERVER = """#!{python}
import http.server, json, sys, time

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "broken" in flags["--model"]:
    sys.exit(7)
open({log!r}, "a").write(json.dumps(flags) + "\\n")
born = time.monotonic()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health" and time.monotonic() - born < 0.3:
            self.reply(503, {{"error": {{"message": "Loading model"}}}})
        else:
            self.reply(200, {{"build_info": "b1-fake"}})

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        open({log!r}, "a").write(json.dumps(wanted) + "\\n")
        if max(map(max, wanted["prompt"])) > 99:
            return self.reply(400, {{"error": {{"message": "Prompt contains invalid tokens"}}}})
        tokens = [[sum(ids) + i for i in range(wanted["n_predict"])] for ids in wanted["prompt"]]
        numbered = [{{"index": i, "tokens": found}} for i, found in enumerate(tokens)]
        self.reply(200, numbered[::-1])

    def reply(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

http.server.HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def gguf_module():
    """The worker's module, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("llama_cpp_worker", LLAMA_CPP.script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WORKERS)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A worker that finds the fake server on its PATH, the settings of its load, and the file the
    server writes.
    """
    log = tmp_path / "told.jsonl"
    binary = tmp_path / "bin" / "llama-server"
    binary.parent.mkdir()
    binary.write_text(SERVER.format(python=PYTHON, log=str(log)))
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
    model = tmp_path / "model"
    (model / "llama_cpp").mkdir(parents=True)
    (model / "llama_cpp" / "float32.gguf").touch()
    settings = {"op": "load", "model_dir": str(model), "dtype": "float32", "threads": 2}
    worker = Worker(
        [PYTHON, str(LLAMA_CPP.script)], environment_of(PYTHON, "cpu", 2), tmp_path / "log"
    )
    yield worker, {**settings, "batch": 3, "chunk": 64, "longest": 511, "kv_gib": 1}, log
    worker.close()


def rotated(x: np.ndarray, position: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """`x` [heads, head size] with the pairs of rows (first[i], second[i]) turned by the i-th rotary
    angle.
    """
    angles = position * 10000.0 ** (-np.arange(len(first)) / len(first))
    turned = x.copy()
    turned[:, first] = x[:, first] * np.cos(angles) - x[:, second] * np.sin(angles)
    turned[:, second] = x[:, first] * np.sin(angles) + x[:, second] * np.cos(angles)
    return turned


def test_interleaved_projections_give_the_same_scores(gguf_module):
    heads, size, hidden = 3, 8, 5
    rng = np.random.default_rng(0)
    query, key, x = (
        rng.standard_normal(shape)
        for shape in ((heads * size, hidden), (heads * size, hidden), hidden)
    )
    rows = np.arange(size)
    scores = {}
    for name, layout, first, second in (
        ("transformers", lambda weight: weight, rows[: size // 2], rows[size // 2 :]),
        ("llama.cpp", lambda weight: gguf_module.interleaved(weight, heads), rows[::2], rows[1::2]),
    ):
        q, k = ((layout(weight) @ x).reshape(heads, size) for weight in (query, key))
        scores[name] = (rotated(q, 9, first, second) * rotated(k, 4, first, second)).sum(axis=1)
    np.testing.assert_allclose(scores["llama.cpp"], scores["transformers"], rtol=1e-12)
    assert not np.allclose(gguf_module.interleaved(query, heads), query)


def test_every_weight_has_a_name_and_only_known_ones(gguf_module, tmp_path):
    from safetensors.numpy import load_file

    spec = load_option("model", "tiny")
    directory = ensure_checkpoint(spec, tmp_path, seed=0)
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    found = dict(gguf_module.renamed(weights, config))
    assert len(found) == len(weights) == 3 + 9 * spec.num_layers
    assert {name.split(".")[0] for name in found} == {"token_embd", "output_norm", "output", "blk"}
    np.testing.assert_array_equal(
        found["blk.1.attn_v.weight"], weights["model.layers.1.self_attn.v_proj.weight"]
    )
    key = weights["model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(
        found["blk.1.attn_k.weight"], gguf_module.interleaved(key, spec.num_kv_heads)
    )
    with pytest.raises(ValueError, match=r"no weight model\.layers\.0\.self_attn\.q_proj\.bias"):
        dict(gguf_module.renamed({"model.layers.0.self_attn.q_proj.bias": key}, config))


def test_a_llama_server_is_started_and_asked_as_the_others_are(served):
    worker, settings, log = served
    assert worker.ask(settings, 30)["version"] == "llama-server b1-fake"
    answer = worker.ask({"op": "run", "prompts": [[1, 2], [3, 4], [5, 6]], "output_len": 2}, 30)
    assert answer["tokens"] == [[3, 4], [7, 8], [11, 12]]
    flags, wanted = map(json.loads, log.read_text().splitlines())
    assert flags["--parallel"] == "3"
    assert flags["--batch-size"] == flags["--ubatch-size"] == "64"
    assert flags["--threads"] == flags["--threads-batch"] == "2"
    assert flags["--cache-type-k"] == flags["--cache-type-v"] == "f32"
    assert flags["--flash-attn"] == "off"
    assert flags["--ctx-size"] == str(3 * 768), (
        "511 tokens and the server's margin are more than two pages"
    )
    assert wanted["ignore_eos"]
    assert not wanted["cache_prompt"]
    assert wanted["temperature"] == 0


def test_what_the_server_refuses_is_the_workers_error(served):
    worker, settings, _ = served
    worker.ask(settings, 30)
    with pytest.raises(
        WorkerError, match="/completion was answered with 400: Prompt contains invalid tokens"
    ):
        worker.ask({"op": "run", "prompts": [[100]], "output_len": 2}, 30)


def test_a_server_that_ends_while_it_starts_is_an_error(served, tmp_path):
    worker, settings, _ = served
    model = tmp_path / "model"
    with pytest.raises(WorkerError, match=r"llama-server ended while it started \(exit code 7\)"):
        worker.ask({**settings, "model_dir": str(model.rename(tmp_path / "broken"))}, 30)


def test_the_server_ends_when_its_worker_is_killed(served):
    worker, settings, log = served
    worker.ask(settings, 30)
    port = json.loads(log.read_text().splitlines()[0])["--port"]
    (server,) = (path for path in Path("/proc").glob("[0-9]*") if _is_server(path, port))
    parent = (server / "stat").read_text().rsplit(")", 1)[1].split()[1]
    os.kill(int(parent), signal.SIGKILL)
    for _ in range(50):
        if not _is_server(server, port):
            return
        time.sleep(0.1)
    pytest.fail(f"the server is still there as {server.name}")


def _is_server(process: Path, port: str) -> bool:
    try:
        words = (process / "cmdline").read_text().split("\0")
    except OSError:
        return False
    return "--port" in words and port in words


@pytest.mark.skipif(
    not replace(LLAMA_CPP, python=ITS_PYTHON).is_installed(),
    reason="xllamacpp, gguf or safetensors is not installed",
)
def test_llama_cpp_gives_our_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_module, "SETTLE", 0.0)
    spec = load_option("model", "tiny")
    subject = Subject("tiny", ensure_checkpoint(spec, tmp_path, 0), spec.vocab_size, 1, "float32")
    options = {
        "policy": {"_target_": "sarathi_lab.policy.Sarathi", "chunk": 32},
        "executor": {
            "_target_": "sarathi_lab.executor.torch.backend.TorchBackend",
            "device": "auto",
            "dtype": "auto",
        },
        "block_size": 16,
    }
    ours = Engine(OURS, "", WORKERS / "sarathi_worker.py", options=options)
    given = {"threads": 2, "batch": 2, "chunk": 32, "seed": 0, "repetitions": 1, "timeout": 120.0}
    said: list[str] = []
    engines = [ours, replace(LLAMA_CPP, python=ITS_PYTHON)]
    scenarios = [Scenario("small", num_requests=3, prompt_len=40, output_len=12)]
    comparison = Comparison(engines, subject, scenarios, tmp_path, said.append, **given)
    mine, theirs = comparison.measure()
    assert mine.error == theirs.error == "", said
    assert mine.tokens == theirs.tokens
    assert mine.tokens is not None
    assert len({tuple(ids) for ids in mine.tokens}) > 1

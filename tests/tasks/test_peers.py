"""The comparison with other engines: workers that work, die, hang, lie or are missing, and what is
made of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF, EXPERIMENTS
from sarathi_lab.run import main
from sarathi_lab.tasks.peers import measure as measure_module
from sarathi_lab.tasks.peers import task as task_module
from sarathi_lab.tasks.peers.engines import (
    ALL,
    OURS,
    PEERS,
    WORKERS,
    Engine,
    Worker,
    WorkerError,
    ensure_checkpoint,
    environment_of,
    our_engine,
)
from sarathi_lab.tasks.peers.measure import (
    NOT_INSTALLED,
    SCENARIOS,
    Comparison,
    Scenario,
    Subject,
    table_of,
)
from sarathi_lab.tasks.peers.task import Peers

SMALL = Scenario("small", num_requests=3, prompt_len=20, output_len=5)
SHORT = Scenario("short", num_requests=2, prompt_len=9, output_len=3)
PYTHON = sys.executable

# An engine whose token i is the prompt's sum plus i, unless its `manner` says otherwise.
FAKE = """
import os, sys, time
sys.path.insert(0, {workers!r})
from worker_protocol import serve

class Fake:
    def load(self, settings):
        print("noise on stdout")
        self.manner, self.seen = settings["manner"], 0
        assert settings["model_dir"].startswith("/")
        if self.manner == "refuses":
            raise ValueError("no such model\\nand a second line")
        return os.environ.get("FAKE_LIMIT", "fake 1")

    def generate(self, prompts, output_len):
        self.seen += 1
        os.write(1, b"more noise")
        if self.manner == "dies":
            os._exit(3)
        if self.manner == "dies later" and self.seen == 3:
            os.kill(os.getpid(), 9)
        if self.manner == "hangs":
            time.sleep(60)
        off = self.manner == "differs"
        length = output_len - (self.manner == "stops early")
        return [[sum(ids) + i + (off and i == 0) for i in range(length)] for ids in prompts]

serve(Fake())
"""


@pytest.fixture(autouse=True)
def no_settling(monkeypatch):
    """No test looks at times, so none has to wait for the last engine's threads."""
    monkeypatch.setattr(measure_module, "SETTLE", 0.0)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """A function from (name, manner) to an engine of the fake worker."""
    script = tmp_path_factory.mktemp("fake") / "fake_worker.py"
    script.write_text(FAKE.format(workers=str(WORKERS)))
    return lambda name, manner="works", **rest: Engine(
        name, "", script, options={"manner": manner}, **rest
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The subject of the tiny model, in float32."""
    spec = load_option("model", "tiny")
    directory = ensure_checkpoint(spec, tmp_path_factory.mktemp("checkpoints"), seed=0)
    return Subject("tiny", directory, spec.vocab_size, spec.kv_bytes_per_token(4), "float32")


def compare(
    engines, tmp_path, scenarios=(SMALL,), subject=None, repetitions=2, timeout=60.0, **rest
):
    """The table of the engines by name, the lines that were said, and the outcomes."""
    subject = subject or Subject("fake", Path("nowhere"), 100, 1, "float32")
    given = {"threads": 1, "batch": 2, "chunk": 16, "seed": 0}
    given |= {"repetitions": repetitions, "timeout": timeout, **rest}
    said: list[str] = []
    comparison = Comparison(engines, subject, scenarios, tmp_path, said.append, **given)
    outcomes = comparison.measure()
    return table_of(outcomes, subject).set_index(["peer", "workload"]), said, outcomes


def test_engines_are_timed_in_turns_and_their_tokens_held_against_ours(fake, tmp_path):
    engines = [fake(OURS), fake("same"), fake("other", "differs")]
    table, said, outcomes = compare(engines, tmp_path, scenarios=(SMALL, SHORT))
    assert (table.repetitions == 2).all()
    assert (table.error == "").all()
    assert table.version.eq("fake 1").all()
    assert len(said) == 3
    assert table.ratio[OURS, "small"] == 1
    assert table.agreement["same", "small"] == 1
    assert table.agreement["other", "small"] == pytest.approx(4 / 5)
    assert table.agreement["other", "short"] == pytest.approx(2 / 3)
    own = next(
        outcome for outcome in outcomes if outcome.scenario is SHORT and outcome.engine.peer == OURS
    )
    assert own.tokens == [[sum(ids) + i for i in range(3)] for ids in SHORT.prompts(100, 0)]
    expected = table.seconds["other", "small"] / table.seconds[OURS, "small"]
    assert table.ratio["other", "small"] == pytest.approx(expected)
    assert table.throughput["other", "small"] == pytest.approx(
        3 * (20 + 5) / table.seconds["other", "small"]
    )


def test_an_engine_that_fails_is_reported_and_the_others_go_on(fake, tmp_path):
    missing = fake("missing", packages=["no_such_package.at_all"], install="no-such")
    failing = [
        missing,
        *(fake(manner, manner) for manner in ("refuses", "dies", "dies later", "stops early")),
    ]
    table, said, _ = compare([fake(OURS), *failing, fake("last")], tmp_path)
    errors = table.error.droplevel("workload")
    assert errors["missing"] == NOT_INSTALLED
    assert errors["refuses"] == "ValueError: no such model"
    assert errors["dies"] == "ended while asked to run (exit code 3)"
    assert errors["dies later"] == "ended while asked to run (killed by signal 9)"
    assert errors["stops early"] == "answered 3 requests with [4] tokens, 3 with 5 were asked for"
    assert errors[OURS] == errors["last"] == ""
    assert table.repetitions["last", "small"] == 2
    assert table[table.error != ""][["seconds", "ratio", "agreement"]].isna().all(axis=None)
    assert any("pip install no-such" in line for line in said)
    assert "no such model" in (tmp_path / "refuses-fake-float32.log").read_text()


def test_an_engine_that_hangs_is_ended(fake, tmp_path):
    start = time.monotonic()
    table, _, _ = compare(
        [fake(OURS), fake("hangs", "hangs")], tmp_path, timeout=2.0, repetitions=1
    )
    assert table.error["hangs", "small"] == "no answer to run in 2 s"
    assert table.error[OURS, "small"] == ""
    assert time.monotonic() - start < 30


def test_an_engine_that_finished_one_load_keeps_it_when_it_dies_in_the_next(fake, tmp_path):
    table, _, _ = compare(
        [fake(OURS), fake("dies later", "dies later")], tmp_path, (SMALL, SHORT), repetitions=1
    )
    assert table.error["dies later", "small"] == ""
    assert table.repetitions["dies later", "small"] == 1
    assert "signal 9" in table.error["dies later", "short"]


def test_without_ours_there_are_times_but_no_ratios(fake, tmp_path):
    table, _, _ = compare([fake(OURS, "dies"), fake("other")], tmp_path, repetitions=1)
    assert table.seconds["other", "small"] > 0
    assert np.isnan(table.ratio["other", "small"])
    assert np.isnan(table.agreement["other", "small"])


def test_an_answer_that_is_no_json_is_an_error(tmp_path):
    script = tmp_path / "babbles.py"
    script.write_text("input()\nprint('hello')\ninput()\nprint('[1]')\ninput()\n")
    worker = Worker([PYTHON, str(script)], os.environ, tmp_path / "log")
    try:
        with pytest.raises(WorkerError, match="which is not JSON"):
            worker.ask({"op": "load"}, 20)
        with pytest.raises(WorkerError, match="no object"):
            worker.ask({"op": "load"}, 20)
    finally:
        worker.close()


def test_closing_a_worker_ends_what_it_started(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "input()\nprint(json.dumps({'child': child.pid}), flush=True)\ninput()\n"
    )
    worker = Worker([PYTHON, str(script)], os.environ, tmp_path / "log")
    child = worker.ask({"op": "load"}, 20)["child"]
    worker.close()
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


def test_another_interpreter_does_not_see_this_ones_packages(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    own, other = environment_of(PYTHON, "cpu", 3), environment_of("/other/python", "cpu", 3)
    assert own["PYTHONPATH"].endswith("/somewhere")
    assert str(CONF.parent) in own["PYTHONPATH"].split(os.pathsep)
    assert "PYTHONPATH" not in other
    for environment in (own, other):
        assert "TRITON_INTERPRET" not in environment
        assert environment["OMP_NUM_THREADS"] == "3"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment_of(PYTHON, "cuda:0", 3).get("CUDA_VISIBLE_DEVICES") != ""


def test_a_limit_is_set_for_those_that_have_one_and_the_others_are_left_out(fake, tmp_path):
    engines = [fake(OURS, avx2={}), fake("one", avx2={"FAKE_LIMIT": "limited"}), fake("other")]
    table, _, _ = compare(engines, tmp_path, is_avx2=True)
    assert table.version.xs("small", level=1).to_dict() == {
        OURS: "fake 1",
        "one": "limited",
        "other": "",
    }
    assert "not known to keep to AVX2" in table.error["other", "small"]


# -- real engines ----------------------------------------------------------------------------------


def test_the_lab_and_transformers_give_the_same_tokens(tiny, tmp_path):
    """Of one checkpoint; then every engine in the same process with random weights of its own."""
    nodes = {
        "policy": {"_target_": "sarathi_lab.policy.Sarathi", "chunk": 16},
        "executor": {"_target_": "sarathi_lab.executor.torch.backend.TorchBackend"},
        "block_size": 16,
    }
    shape = ensure_checkpoint(load_option("model", "tiny"), tmp_path, 0, has_weights=False)
    assert not list(shape.glob("*.safetensors"))
    sizes = {"threads": 1, "batch": 2, "chunk": 16, "longest": SMALL.total_len}
    settings = {"op": "load", "dtype": "float32", "device": "cpu", **sizes, **nodes}
    prompts = SMALL.prompts(tiny.vocab_size, 0)
    run = {"op": "run", "prompts": prompts, "output_len": SMALL.output_len}
    tokens, own = {}, {}
    for names in (("sarathi",), ("transformers_generate", "transformers_cb")):  # by their worker
        engines = {
            name: PEERS[name][0] if name in PEERS else our_engine("", nodes) for name in names
        }
        (script,) = {engine.script for engine in engines.values()}
        command = [PYTHON, str(script)]
        worker = Worker(command, environment_of(PYTHON, "cpu", 1), tmp_path / names[0])
        try:
            for name, engine in engines.items():
                loaded = {**settings, **engine.options}
                of_files = {"model_dir": str(tiny.directory), "has_weights": True}
                worker.ask({**loaded, **of_files}, 120)
                tokens[name] = worker.ask(run, 120)["tokens"]
                worker.ask({**loaded, "model_dir": str(shape), "has_weights": False}, 120)
                own[name] = worker.ask(run, 120)["tokens"]
        finally:
            worker.close()
    assert tokens["sarathi"] == tokens["transformers_generate"] == tokens["transformers_cb"]
    assert len(set(map(tuple, tokens["sarathi"]))) > 1, "equal outputs would agree by accident"
    for found in own.values():
        assert [len(ids) for ids in found] == [SMALL.output_len] * SMALL.num_requests
    assert own["transformers_generate"] != tokens["transformers_generate"]


def test_the_checkpoint_is_that_of_its_seed_and_kept(tiny, tmp_path):
    spec = load_option("model", "tiny")
    before = torch.random.get_rng_state()
    first, other = (ensure_checkpoint(spec, tmp_path, seed) for seed in (0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [
        (folder / "model.safetensors").read_bytes() for folder in (tiny.directory, first, other)
    ]
    assert weights[0] == weights[1] != weights[2]
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_checkpoint(spec, tmp_path, 0) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(UserError, match="has num_hidden_layers=7, the model 2; remove that folder"):
        ensure_checkpoint(spec, tmp_path, 0)


# -- the task --------------------------------------------------------------------------------------


def test_the_requests_and_shapes_are_those_of_the_recorded_comparison():
    assert [
        (s.num_requests, s.prompt_len, s.output_len) for s in (SCENARIOS[n] for n in ("A", "B"))
    ] == [
        (16, 512, 64),
        (8, 1024, 16),
    ]
    prompts = SCENARIOS["B"].prompts(4096, seed=0)
    assert [len(prompt) for prompt in prompts] == [1024] * 8
    assert prompts == SCENARIOS["B"].prompts(4096, seed=0) != SCENARIOS["B"].prompts(4096, seed=1)


def test_the_tasks_defaults_are_those_of_its_file():
    node = yaml.safe_load((CONF / "task" / "peers.yaml").read_text())
    del node["_target_"]
    given, own = Peers(**node), Peers()
    assert given.random_weights is own.random_weights is False
    for name in (
        "peers",
        "models",
        "dtypes",
        "workloads",
        "repetitions",
        "threads",
        "timeout",
        "checkpoints",
    ):
        assert list(np.atleast_1d(getattr(given, name))) == list(
            np.atleast_1d(getattr(own, name))
        ), name
    assert given.python == dict.fromkeys(PEERS)


@pytest.fixture
def engines(fake, monkeypatch):
    """A function that puts fake engines by name in the place of the real ones, ours included."""

    def replace(ours: Engine, **peers: Engine) -> None:
        monkeypatch.setattr(task_module, "our_engine", lambda variant, options: ours)
        for name in PEERS:
            monkeypatch.setitem(PEERS, name, (peers[name],) if name in peers else ())

    monkeypatch.setitem(SCENARIOS, "A", SMALL)
    return replace


TINY = ["task=peers", "task.models=[tiny]", "task.workloads=[A]", "tracking=none"]


def test_a_run_leaves_its_table_and_its_repetitions(fake, engines, tmp_path, capsys):
    engines(fake(OURS), vllm=fake("vllm", "differs"))
    args = [*TINY, "task.peers=[vllm]", "task.repetitions=2", "task.threads=1"]
    assert main([*args, f"output={tmp_path}"]) == 0
    (path,) = tmp_path.rglob("peers.parquet")
    table = pd.read_parquet(path)
    assert list(table.peer) == [OURS, "vllm"]
    assert set(table.threads) == {1}
    assert set(table.model) == {"tiny"}
    assert (path.parent / "peers.csv").is_file()
    repetitions = pd.read_csv(path.parent / "repetitions.csv")
    assert len(repetitions) == 4
    medians = repetitions.groupby("peer").seconds.median()
    assert medians["vllm"] == pytest.approx(table.seconds[1])
    summary = json.loads((path.parent / "summary.json").read_text())
    assert summary["agreement/vllm, tiny float32 small"] == pytest.approx(0.8)
    assert summary["ratio/vllm, tiny float32 small"] == pytest.approx(table.ratio[1])
    printed = capsys.readouterr().out
    assert "20.0% of its tokens are not ours" in printed
    assert "Writing model shards" not in printed


def test_the_run_stops_if_our_own_engine_does(fake, engines, tmp_path, capsys):
    engines(fake(OURS, "refuses"))
    assert main([*TINY, "task.peers=[]", f"output={tmp_path}"]) == 2
    assert "the lab's own engine failed: ValueError: no such model" in capsys.readouterr().err
    (path,) = tmp_path.rglob("peers.csv")
    assert "no such model" in path.read_text()


def test_an_engine_without_a_dtype_is_left_out(fake, tmp_path):
    subject = Subject("fake", Path("nowhere"), 100, 1, "int8")
    engines = [fake("has_none"), fake("has_it", dtypes=ALL)]
    table, _, _ = compare(engines, tmp_path, subject=subject)
    assert table.error["has_none"].unique() == ["installed; not run in int8 here"]
    assert table.error["has_it"].unique() == [""]


def test_the_campaigns_part_records_its_table(fake, engines, tmp_path):
    monkeypatched = {name: fake(name) for name in ("transformers_generate", "transformers_cb")}
    engines(fake(OURS), **monkeypatched, vllm=fake("vllm", devices=("cuda",)))
    part = ["task=gpu_peers", "task.setup=dry", f"task.record={tmp_path}/records", "device=cpu"]
    assert main([*part, "tracking=none", f"output={tmp_path}/o"]) == 0
    folder = tmp_path / "records" / "lab" / "peers" / "results" / "cpu"
    table = pd.read_csv(folder / "peers.csv").set_index("peer")
    assert table.ratio["transformers_cb"] > 0
    assert table.agreement.isna().all(), "every engine has weights of its own"
    assert table.error["vllm"] == "installed; not run on cpu here"
    assert json.loads((folder / "run.json").read_text())["parts"]["gpu_peers"]["error"] is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            "task.peers=[vlm]",
            "task.peers=vlm is unknown (did you mean vllm?); use one of openvino_genai",
        ),
        ("task.peers=vllm", "task.peers=vllm is not a list of names"),
        ("task.models=[]", "task.models=[] is not a list of names"),
        ("task.models=[30m,30m]", "names one twice"),
        ("task.models=[gpt3-175b]", "task.models: gpt3-175b has"),
        ("task.models=[qwen3-8b]", "task.models: qwen3-8b has"),
        ("task.dtypes=[float16]", "task.dtypes=float16 is unknown"),
        ("task.workloads=[C]", "task.workloads=C is unknown; use one of A, B"),
        ("task.repetitions=0", "task.repetitions=0 is below 1"),
        ("task.threads=0", "task.threads=0 is below 1"),
        ("task.threads=100000", "task.threads=100000 is more than the"),
        ("task.timeout=0", "task.timeout=0 must be"),
        ("task.python.vllm=/no/python", "task.python.vllm=/no/python can't be run"),
        ("executor=simulated", "executor=simulated serves no requests"),
        ("device=cuda", "finds no GPU"),
        ("executor.dtype=bfloat16", "use task.dtypes=[bfloat16]"),
        ("dtype=bfloat16", "has no effect"),
        ("cache.num_blocks=10", "cache.num_blocks=10 has no effect"),
        ("chunk=4", "chunk=4 is below 8"),
    ],
)
def test_a_setting_that_names_nothing_is_refused_in_one_line(setting, reason, refused):
    assert reason in refused("task=peers", setting, "tracking=none")


# -- what is recorded ------------------------------------------------------------------------------

SHOWN = {
    "openvino_genai split": "OpenVINO GenAI, prompts split",
    "openvino_genai whole": "OpenVINO GenAI, prompts whole",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp",
    "transformers_generate": "transformers `generate`",
}


def test_the_readme_shows_the_recorded_ratios():
    table = pd.read_csv(
        EXPERIMENTS / "lab" / "peers" / "results" / "cpu" / "peers.csv", keep_default_na=False
    )
    table["engine"] = (table.peer + " " + table.variant).str.strip()
    columns = [
        f"{dtype} {load}"
        for dtype in ("float32", "bfloat16", "int8")
        for load in ("30m A", "30m B", "120m A")
    ]
    table["column"] = table.dtype + " " + table.model + " " + table.workload
    ratios = table.pivot(index="engine", columns="column", values="ratio").astype(float)
    seconds = table[table.peer == OURS].set_index("column").seconds.astype(float)
    readme = (EXPERIMENTS / "lab" / "peers" / "README.md").read_text()
    for engine, name in SHOWN.items():
        shown = [f"{ratio:.2f} " if ratio > 0 else "- " for ratio in ratios.loc[engine, columns]]
        assert "| ".join([f"| {name} ", *shown]) + "|" in readme
    own = [f"*{seconds[column]:.2f}* " for column in columns]
    assert "| ".join(["| *sarathi_lab, seconds* ", *own]) + "|" in readme
    exact = table[(table.dtype == "float32") & (table.error == "")]
    assert (exact.agreement.astype(float) == 1).all()

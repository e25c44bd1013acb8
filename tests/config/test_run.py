"""The command end to end: what a run leaves, what a sweep shares and shows, and what an
interruption keeps.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pandas as pd
import pytest
import yaml
from plans import plan_of

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.config.run_context import RunContext, run_name
from sarathi_lab.engine.ledger import ITERATION_COLUMNS, REQUEST_COLUMNS
from sarathi_lab.results.load import load_summary
from sarathi_lab.run import main
from sarathi_lab.tasks.serve import print_plan
from sarathi_lab.workload.synthetic import PaperGrid

SIMULATED = ["executor=simulated", "tracking=none", "workload.num_requests=6", "batch=4"]
TINY = [
    "model=tiny",
    "tracking=none",
    "workload.num_requests=4",
    "batch=3",
    "seq_len=64",
    "pd_ratio=7",
    "device=cpu",
]

# Columns of several engines, of drafts and of CUDA graphs.
NOT_OF_ALL = ("instance", "num_draft_tokens", "num_accepted_tokens", "graph_use")


def run_folders(output: Path) -> list[Path]:
    return sorted(path.parent for path in output.rglob("run.json"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A simulated sweep over three chunk sizes: (folder, printed text)."""
    output = tmp_path_factory.mktemp("sweep")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        made, generate = [], PaperGrid.generate
        patch.setattr(PaperGrid, "generate", lambda *args: made.append(0) or generate(*args))
        assert main(["chunk=128,256,1024", "-m", *SIMULATED, f"output={output}"]) == 0
    assert len(made) == 3  # every job is planned once; a baseline shares its run's requests
    assert err.getvalue() == ""
    (folder,) = {path.parent for path in output.rglob("0/run.json")}
    return folder.parent, out.getvalue()


def test_every_run_leaves_its_tables_and_resolved_config_whose_names_are_explained(sweep):
    folder, _ = sweep
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
    of_all = {name for name in ITERATION_COLUMNS if name not in NOT_OF_ALL}
    for run in run_folders(folder):
        iterations = pd.read_parquet(run / "iterations.parquet")
        requests = pd.read_parquet(run / "requests.parquet")
        summary = load_summary(run)
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert of_all | {"flops", "weight_bytes", "kv_bytes", "roofline"} <= set(iterations)
        assert list(requests) == list(REQUEST_COLUMNS)
        assert len(requests) == summary["num_requests"] == 6
        assert all(isinstance(value, float) for value in summary.values())
        assert "${" not in json.dumps(config)
        assert summary["duration"] == iterations.end.max()
        quantities = {name.partition("_vs_")[0] for name in summary}
        names = {re.sub(r"_(p\d+|mean)$", "", name) for name in quantities}
        names |= {*iterations, *requests}
        assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_baselines_run_once_and_every_run_has_its_ratios(sweep):
    folder, _ = sweep
    baselines = sorted(path.name.rsplit("-", 1)[0] for path in (folder / "baselines").iterdir())
    assert baselines == ["orca", "request_level"]
    for job in ("0", "1", "2"):
        summary = load_summary(folder / job)
        labels = json.loads((folder / job / "run.json").read_text())
        for name, path in labels["baselines"].items():
            baseline = load_summary(folder / job / path)
            for quantity in ("throughput", "kv_read_bytes", "ttft_p50", "tbt_p99"):
                ratio = summary[quantity] / baseline[quantity]
                assert summary[f"{quantity}_vs_{name}"] == pytest.approx(ratio)
    # A chunk that holds the longest prompt makes SARATHI and "Orca best" the same schedule.
    assert summary["duration_vs_orca"] == pytest.approx(1.0)
    assert summary["kv_reread_factor"] == 1.0


def test_the_sweep_prints_one_table_and_the_path_of_its_picture(sweep):
    folder, text = sweep
    picture = folder / "sweep.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in text
    rows = pd.read_csv(folder / "sweep.csv")
    assert sorted(rows.path) == sorted(
        str(path.relative_to(folder)) for path in run_folders(folder)
    )
    table = text[text.index("All 5 runs of this sweep") :]
    for name in ("request_level *", "orca *", " 128 ", " 256 ", " 1024 ", "x orca", "beside orca:"):
        assert name in table
    summary = load_summary(folder / "0")
    assert f"{summary['throughput']:,.0f}" in table
    assert text.count("peaks of hardware a6000") == 1  # once a sweep
    assert "predicted roofline" not in text  # it takes as long as the run


def test_a_run_alone_is_named_by_all_that_changes_its_work() -> None:
    devices = ["executor.tensor_parallel=2", "executor.pipeline_parallel=4", "cluster.num=2"]
    of_policy = "policy.min_decodes=2"
    elsewhere = ["executor=simulated", "tracking=none", "output=runs", "repeat=2", "baselines=[]"]
    name = run_name("vllm_v1", ["policy=vllm_v1", of_policy, *devices, *elsewhere], None)
    assert name == " ".join(["vllm_v1", of_policy, *devices])


def test_a_sweep_of_seeds_states_the_workload_and_the_automatic_cache_once(tmp_path, capsys):
    """Each seed draws another longest request, which is what such a cache is made for."""
    context = RunContext(tmp_path, tmp_path, "", group="seeds", swept=["seed", "batch"])
    changes = [{"seed": 0}, {"seed": 1}, {"seed": 0, "batch": 3}]
    drawn = ["executor=simulated", "workload=zipf", "workload.num_requests=6"]
    plans = [plan_of("sarathi", *drawn, changes=setting) for setting in changes]
    assert plans[0].engine.num_blocks != plans[1].engine.num_blocks
    for plan in plans:
        print_plan(plan, context)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if "cache" in line] == ["  batch 8", "  batch 3"]
    assert sum("workload zipf" in line for line in lines) == 1


def test_a_sweep_states_for_which_run_it_first_assumed_something(tmp_path, capsys):
    served = ["executor=simulated", "hardware=a100", "model=llama3-8b", "workload.rate=2"]
    served.append("workload.num_requests=4")
    for varied in (
        {"chunk": 128, "seed": 0},
        {"chunk": 128, "seed": 1},
        {"chunk": 512, "seed": 0},
    ):
        plan = plan_of("vllm_v1", *served, changes=varied)
        print_plan(plan, RunContext(tmp_path, tmp_path, "", "budgets", list(varied), varied))
    lines = [line for line in capsys.readouterr().out.splitlines() if "assumed" in line]
    of_small, of_large = lines
    assert of_small.startswith("  assumed unless stated, first for chunk=128: ")
    assert of_large.startswith("  assumed unless stated, first for chunk=512: ")


@pytest.mark.parametrize(
    ("policies", "host", "is_said"),
    [
        ("vllm_v1,sglang", "none", True),
        ("vllm_v1,sglang", "sglang_0_5", False),
        ("sarathi,orca", "none", False),
    ],
)
def test_compared_servers_are_said_to_differ_by_their_schedules(
    policies, host, is_said, tmp_path, capsys
):
    served = [*SIMULATED, f"host={host}", "workload.num_requests=2", "baselines=[]"]
    assert main([f"policy={policies}", *served, f"output={tmp_path}", "-m"]) == 0
    said = capsys.readouterr().out.count(
        "differ by their schedules and their servers' defaults alone"
    )
    assert said == is_said


def test_requests_beyond_the_models_context_are_named_and_weights_too(tmp_path, capsys):
    long = ["workload.prompt_len=5000", "workload.output_len=2", "workload.num_requests=1"]
    served = [*SIMULATED, "baselines=[]", "hardware=h100", "model=13b", "executor.weights=fp8"]
    assert main([*served, "batch=1", *long, f"output={tmp_path}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the longest request has 5002 tokens: 13b was made for 4096" in printed
    assert "weights in fp8)" in printed


def test_a_mixture_has_the_ridge_of_an_expert(tmp_path, capsys):
    model = ["hardware=h100", "model=qwen3-30b-a3b", "baselines=[]", f"output={tmp_path}"]
    assert main([*SIMULATED, *model]) == 0
    found = re.search(r"of an expert (\S+) \((\S+) of a batch\)", capsys.readouterr().out)
    of_expert, of_batch = (float(number.replace(",", "")) for number in found.groups())
    assert of_batch == pytest.approx(of_expert * 128 / 8, rel=0.01)


def test_a_policy_is_called_by_its_option_with_what_differs_from_its_class(tmp_path, capsys):
    assert main(["policy=lars", "chunk=128", *SIMULATED, f"output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"policy lars \(seconds_per_token=\d\S+, .*chunk=128, order=slack, ", text)
    assert "policy orca\n" in text
    assert re.search(r"^ +lars +/ request_level +/ orca", text, flags=re.MULTILINE)
    assert not re.search(r"ranked|short_len", text.partition("results ")[0], re.IGNORECASE)


def test_whole_prompts_meet_their_predicted_roofline_exactly_where_the_roofline_is_the_clock(sweep):
    """Prediction and measurement run the same schedule: on a closed batch the rooflines agree."""
    folder, _ = sweep
    summary = load_summary(folder / "0")
    plan = plan_of("sarathi", "executor=simulated", *SIMULATED[2:], "chunk=128")
    assert plan.roofline(plan.backend.peaks()) == pytest.approx(summary["roofline"])
    assert summary["time_over_roofline"] > 1


def test_a_single_run_on_the_torch_executor(tmp_path, capsys):
    assert main([*TINY, "chunk=16", f"output={tmp_path}", "-v"]) == 0
    text = capsys.readouterr().out
    (run,) = [path for path in run_folders(tmp_path) if "baselines" not in path.parts]
    requests = pd.read_parquet(run / "requests.parquet")
    assert [len(tokens) for tokens in requests.output_token_ids] == requests.output_len.tolist()
    summary = load_summary(run)
    assert {"throughput_vs_orca", "throughput_vs_request_level", "mfu"} <= set(summary)
    iterations = pd.read_parquet(run / "iterations.parquet")
    hybrid = iterations.query("num_prefill_tokens > 0 and num_decode_tokens > 0")
    ratio = hybrid.busy.sum() / hybrid.roofline.sum()
    assert summary["time_over_roofline_hybrid"] == pytest.approx(ratio)
    words = ("tiny", "float32", "cpu", "policy sarathi (chunk=16)", "predicted roofline")
    kinds = ("throughput [tokens/s]", "time / roofline, hybrid", "peak of memory [GB/s]")
    assert [word for word in (*words, *kinds) if word not in text] == []

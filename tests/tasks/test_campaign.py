"""The campaign on a GPU: its sweep, tried on a CPU, and what its targets are judged by."""

from __future__ import annotations

import re

import pandas as pd
import pytest
import torch
import yaml
from scripts import load_script

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF, EXPERIMENTS, REPOSITORY
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.run import main

CPU = torch.device("cpu")
KERNELS = "kernels.csv"


@pytest.fixture(scope="module")
def targets():
    path = EXPERIMENTS / "gpu" / "gpu_targets" / "targets.py"
    return load_script(path)


def test_the_dry_run_measures_and_its_targets_are_judged(targets, tmp_path, capsys):
    campaign = ["experiment=campaign", "executor=torch", "device=cpu", "model=tiny"]
    campaign += ["task.setup=dry", "task.seconds=0.1", "task.experiment=table4"]
    assert main([*campaign, f"task.record={tmp_path}/record", f"output={tmp_path}"]) == 0
    (path,) = tmp_path.glob("record/sarathi/table4/results/cpu/table4.csv")
    assert (pd.read_csv(path).figure == "table4").all()
    judged = [f"--root={tmp_path}/record", f"--kernels={tmp_path}/none", "--device=cpu"]
    targets.main([*judged, "--engine=torch"])
    (path,) = tmp_path.glob("record/gpu/gpu_targets/results/cpu/targets.csv")
    table = pd.read_csv(path)
    assert len(table) >= 15
    assert (table.value.notna() == (table.met != "not measured")).all()
    assert (table.reason.notna() == (table.met == "not measured")).all()
    assert "not measured" in capsys.readouterr().out


def test_the_campaign_is_of_vllm_s_workers_on_a_gpu_with_both_models():
    settings = yaml.safe_load((CONF / "experiment" / "campaign.yaml").read_text())
    assert {"override /executor": "vllm"} in settings["defaults"]
    assert (settings["device"], settings["skip_invalid"]) == ("cuda", True)
    params = settings["hydra"]["sweeper"]["params"]
    assert params["model"] == "13b,33b"
    for name in params["task.experiment"].split(","):
        assert (CONF / "experiment" / f"{name}.yaml").is_file()


def test_the_rented_machine_runs_a_make_target_and_is_returned():
    plan = yaml.safe_load((EXPERIMENTS / "gpu" / "skypilot.yaml").read_text())
    assert re.findall(r"make ([\w-]+)", plan["run"]) == ["gpu-hour"]
    assert re.search(r"^gpu-hour:", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(plan["envs"]) == set(re.findall(r"\$(\w+)", plan["run"]))
    assert plan["resources"]["autostop"]["down"]


@pytest.fixture
def judged(targets, tmp_path):
    """Judges the target whose name begins so, by tables at peaks of 500 TFLOP/s and 4 TB/s."""

    def judge(beginning, contents):
        for path, rows in contents.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_csv(tmp_path / path, index=False)
        tables = targets.Tables(tmp_path, "cpu", tmp_path / KERNELS, CPU)
        vars(tables)["peaks"] = Peaks(500e12, 4e12, "given")
        (target,) = [one for one in targets.targets() if one.name.startswith(beginning)]
        return target.row(tables)

    return judge


def test_iterations_are_judged_by_their_operations_and_by_all_at_once(judged):
    """Bytes bound a batch of decodes, however it is summed; beside a chunk the sum is longer."""

    def row(prefill_tokens, decodes, value):
        kv_tokens = prefill_tokens + 1024 * decodes
        shape = {"prefill_tokens": prefill_tokens, "decodes": decodes, "kv_tokens": kv_tokens}
        return {"operation": "iteration", **shape, "unit": "ms", "value": value}

    compositions = [row(0, 8, 11.0), row(239, 17, 16.0), row(1024, 0, 80.0)]
    rows = {"gpu/gpu_targets/results/cpu/gpu_targets-compositions.csv": compositions}
    spec = load_option("model", "13b")
    bytes_read = spec.num_linear_params + 32_000 * 5120 + 8 * 1025 * 2 * 40 * 5120
    decode = judged("decode-only, batch 8", rows)
    assert decode["overlapped"] == pytest.approx(11.0 / (2 * bytes_read / 4e12 * 1e3))
    assert 0.98 * decode["overlapped"] < decode["value"] < decode["overlapped"]
    hybrid = judged("hybrid of 256", rows)
    assert 1.15 * hybrid["value"] < hybrid["overlapped"] < 1.5 * hybrid["value"]
    prefill = judged("prefill of 1024", rows)
    assert prefill["met"] == "no"
    assert prefill["missed_by"] == pytest.approx(prefill["value"] / 1.15 - 1)
    missing = judged("decode-only, batch 1 ", rows)
    assert ("value" not in missing, missing["met"]) == (True, "not measured")
    assert "were not timed" in str(missing["reason"])

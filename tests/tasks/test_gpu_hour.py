"""`make gpu-hour`: what it refuses, its steps, and what it leaves, with a stub of Python."""

from __future__ import annotations

import csv
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scripts import load_script

from sarathi_lab.config.paths import CONF, EXPERIMENTS, REPOSITORY
from sarathi_lab.config.sweeper import compose
from sarathi_lab.executor.device import GPU_MODELS

H100 = "NVIDIA H100 80GB HBM3, 580.95.05, 9.0, 81559, 4"
SMI = """#!/bin/sh
echo "{row}"
"""
# Writes down how it was called. The figures fail once, and the calibration hangs.
PYTHON = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
    *resume=*) exit 0 ;;
    *experiment=campaign*) exit 2 ;;
    *task=calibrate*) sleep 60 ;;
    *" claims "*) echo "1 holds" ;;
esac
"""


@pytest.fixture(scope="module")
def script():
    path = EXPERIMENTS / "gpu" / "gpu_hour" / "gpu_hour.py"
    return load_script(path)


@pytest.fixture
def gpu(tmp_path, monkeypatch, script):
    """Has nvidia-smi answer with a row, on a machine that has all that is needed."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(script, "check_host", lambda *_, **__: None)

    def answer(row: str) -> None:
        executable(tmp_path / "nvidia-smi", SMI.format(row=row))

    answer(H100)
    return answer


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (H100.replace("580.95.05", "570.124.06"), "CUDA 13, which vllm==0.33.0 is built for"),
        ("Tesla T4, 580.95.05, 7.5, 15360, 4", "Tesla T4 has no bfloat16"),
        (H100.replace(", 4", ", 40000"), "other processes hold 42 GB"),
        ("NVIDIA RTX A2000, 580.95.05, 8.6, 6138, 4", "has 6 GB, of which 10 are needed"),
        ("No devices were found", "nvidia-smi names no GPU"),
    ],
)
def test_a_gpu_that_would_cost_the_hour_is_refused_in_a_line(row, reason, gpu, script, capsys):
    gpu(row)
    assert script.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


@pytest.mark.parametrize(
    ("patched", "reason"),
    [
        (("shutil.which", lambda name: None), "no C compiler"),
        (("sysconfig.get_path", lambda name: "/nowhere"), "no Python.h"),
        (("sys.version_info", (3, 10)), "make gpu-hour PYTHON=python3.11"),
        (("os.sysconf", lambda name: 1000), "of memory, 16 are needed"),
        (("find_spec", lambda name: None), "apt-get install python3-venv"),
    ],
)
def test_a_machine_that_would_cost_the_hour_is_refused(patched, reason, script, monkeypatch):
    module, _, name = patched[0].rpartition(".")
    monkeypatch.setattr(getattr(script, module) if module else script, name, patched[1])
    with pytest.raises(script.Refusal, match=reason):
        script.check_host(0.001, installs=True)


def test_a_full_disk_is_refused(script):
    with pytest.raises(script.Refusal, match="1000000000 are needed"):
        script.check_host(1e9, installs=False)


def test_a_step_that_is_none_is_refused(gpu, script, tmp_path, capsys):
    python = executable(tmp_path / "python", "")
    assert script.main(["--only=figure", f"--python={python}"]) == 2
    assert "--only figure is no step; use smoke, figures, operations" in capsys.readouterr().err


A100 = "NVIDIA A100-SXM4-40GB, 580.1, 8.0, 40960, 4"
RTX_4090 = "NVIDIA GeForce RTX 4090, 580.1, 8.9, 24564, 4"
RTX_3080 = "NVIDIA GeForce RTX 3080, 580.1, 8.6, 12288, 4"


@pytest.mark.parametrize(
    ("row", "models", "load"),
    [
        (H100, "13b,33b", {"model=llama3-8b", "workload.rate=2,4"}),
        (A100, "llama3-8b", {"model=llama3-8b", "workload.rate=2"}),
        (RTX_4090, "llama3-8b", {"model=llama3-8b", "workload.rate=0.5"}),
        (RTX_3080, "llama3.2-3b", {"model=llama3.2-3b", "workload.rate=0.5"}),
    ],
    ids=["h100", "a100", "rtx-4090", "rtx-3080"],
)
def test_each_card_has_models_and_a_load_that_suit_it(row, models, load, gpu, script, tmp_path):
    gpu(row)
    workspace = script.Workspace(tmp_path, Path("python"))
    steps = {
        step.name: step
        for step in script.measurements(workspace, script.sizes_of(script.find_gpu()))
    }
    assert f"model={models}" in steps["figures"].commands[0]
    assert load <= {*steps["load"].commands[0]} & {*steps["simulated"].commands[0]}
    assert sum(step.seconds for step in steps.values()) < 3600


def test_the_hour_has_every_experiment_of_the_campaign_once(script):
    sweep = yaml.safe_load((CONF / "experiment" / "campaign.yaml").read_text())["hydra"]["sweeper"]
    lists = [text.split()[0].partition("=")[2] for text in (script.WHOLE, script.BY_OPERATION)]
    assert sorted(",".join(lists).split(",")) == sorted(
        sweep["params"]["task.experiment"].split(",")
    )


def test_the_papers_figures_are_of_the_default_model_of_a_card(script):
    chosen = {1e9 * least: figures.split(",")[0] for least, (figures, _) in script.MODELS.items()}
    assert chosen == {model.card_bytes: model.name for model in GPU_MODELS}


@pytest.mark.parametrize("is_dry", [False, True], ids=["gpu", "dry"])
def test_every_command_composes(is_dry, gpu, script, tmp_path):
    workspace = script.Workspace(tmp_path, Path("python"))
    sizes = script.DRY if is_dry else script.sizes_of(script.find_gpu())
    for step in script.measurements(workspace, sizes):
        for command in step.commands:
            settings = command[4:]
            is_run = command[1:4] == ["-m", "sarathi_lab", "run"]
            is_campaign = "experiment=campaign" in settings
            fewer = ["task.experiment=fig08"] if is_campaign else []
            if is_run and not settings[0].startswith("resume="):
                assert compose([*settings, *fewer]).jobs


def test_the_hour_ends_with_verdicts_and_a_file_whatever_failed(
    gpu, script, tmp_path, monkeypatch, capsys
):
    """Its figures are taken up once more; a step that hangs is ended."""
    python = executable(tmp_path / "python", PYTHON.format(folder=tmp_path))
    monkeypatch.setattr(script, "SECONDS_TO_END", 0.2)
    calibration = script.calibration
    monkeypatch.setattr(
        script, "calibration", lambda *given: replace(calibration(*given), seconds=0.2)
    )
    folder = tmp_path / "hour"
    assert script.main([f"--python={python}", f"--out={folder}"]) == 1
    with (folder / "steps.csv").open() as file:
        ended = {row["step"]: row["ended"] for row in csv.DictReader(file)}
    assert ended.pop("calibrate") == "its time was over"
    assert (ended.pop("figures"), ended.pop("operations")) == ("done", "done")
    assert set(ended.values()) == {"done"}
    assert list(ended) == [
        "smoke",
        "load",
        "simulated",
        "compared",
        "kernels",
        "targets",
        "verdicts",
    ]
    assert f"run resume={folder}/figures" in (tmp_path / "calls").read_text()
    with tarfile.open(f"{folder}.tar.gz") as archive:
        assert {"hour/steps.csv", "hour/figures.log", "hour/verdicts.log"} <= {*archive.getnames()}
    shown = capsys.readouterr().out
    assert "1 holds" in shown
    assert shown.endswith(f"one file to send: {folder}.tar.gz\n")


def test_nothing_runs_after_an_installation_that_failed(gpu, script, tmp_path, monkeypatch):
    broken = script.Step("install", 10, [["false"]])
    monkeypatch.setattr(script, "installation", lambda workspace: broken)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main([f"--out={tmp_path}/hour"]) == 1
    assert len((tmp_path / "hour" / "steps.csv").read_text().splitlines()) == 2
    assert (tmp_path / "hour.tar.gz").is_file()


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        (["sh", "-c", "echo begun; echo error: no room; echo; exit 2"], "failed with 2: error: no"),
        (["/nowhere/python"], "failed: /nowhere/python can't be run (No such file or directory)"),
    ],
)
def test_a_step_that_fails_states_its_last_line(command, ended, script, tmp_path):
    workspace = script.Workspace(tmp_path, Path("python"))
    step = script.Step("figures", 10, [command])
    assert script.run_step(step, workspace, 10).startswith(ended)


def test_steps_share_the_time_that_is_there(script, tmp_path):
    workspace = script.Workspace(tmp_path, Path("python"))
    steps = [script.Step(name, 10, [["true"]]) for name in ("first", "second")]
    assert script.run_all(steps, workspace, script.PACKING_SECONDS) == 2
    assert "no time was there" in (tmp_path / "steps.csv").read_text()
    last = script.Step("verdicts", 10, [["true"]], is_reserved=True)
    assert script.run_all([*steps, last], workspace, script.PACKING_SECONDS + 10) == 2
    assert "verdicts,0,done" in (tmp_path / "steps.csv").read_text()


def test_the_issue_asks_for_the_one_file():
    form = yaml.safe_load((REPOSITORY / ".github/ISSUE_TEMPLATE/gpu-hour.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert "outputs/gpu-hour-DATE.tar.gz" in fields["archive"]["attributes"]["description"]
    assert fields["archive"]["validations"]["required"]

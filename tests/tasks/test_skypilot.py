"""What experiments/gpu/skypilot.yaml runs on a rented machine is there."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY

PLAN = EXPERIMENTS / "gpu" / "skypilot.yaml"


def test_its_commands_and_its_archive_are_those_of_the_lab():
    plan = yaml.safe_load(PLAN.read_text())
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"make (\w+)", plan["setup"] + plan["run"])
    assert targets == ["setup", "campaign"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert set(plan["envs"]) == set(re.findall(r"\$(\w+)", plan["run"]))
    campaign = yaml.safe_load((REPOSITORY / "conf" / "experiment" / "campaign.yaml").read_text())
    archive = campaign["hydra"]["callbacks"]["archive"]["path"]
    assert archive.replace("${output}", "outputs") in PLAN.read_text()
    assert plan["resources"]["autostop"]["down"], "nobody pays for a machine that is forgotten"


def test_its_shell_is_one():
    if (shell := shutil.which("bash")) is None:
        pytest.skip("no bash")
    plan = yaml.safe_load(PLAN.read_text())
    for part in ("setup", "run"):
        subprocess.run([shell, "-n", "-c", plan[part]], check=True)

"""The campaign where things are missing: packages, internet, or what its bundle is packed with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sarathi_lab import __main__ as command
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.results.tracking import WandbTracker
from sarathi_lab.tasks.gpu import bundle

PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c import platform"*) echo 3.12.3 2.11.0+cu130 3.6.0 ;;
    "-c "*) {real} -c "$2" ;;
    "-m pip") shift 2; echo "$@" > {log}; mkdir -p "$5" ;;
    "-m sarathi_kernels.compilation")
        mkdir "$TRITON_CACHE_DIR"; touch "$TRITON_CACHE_DIR/key$3"; exit 1 ;;
    *) echo "$@"; echo "$PYTHONPATH"; ls "$TRITON_CACHE_DIR"; pwd ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small repository in place of this one, all that a commit of it has."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).write_text((REPOSITORY / name).read_text())
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(bundle, "REPOSITORY", folder)
    return folder


def test_a_bundle_runs_the_campaign_with_what_lies_in_it(tmp_path, checkout):
    python, log = tmp_path / "python", tmp_path / "pip.txt"
    python.write_text(PYTHON.format(real=sys.executable, log=log))
    python.chmod(0o755)
    out = tmp_path / "made" / "bundle.tar.gz"
    assert bundle.main([f"--python={python}", "--capability=89", f"--out={out}"]) == 0
    assert {"hydra-core>=1.3.2,<1.4", "pytest", f"{checkout}/constraints.txt"} <= set(
        log.read_text().split()
    )
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path, filter="data")
    script = tmp_path / "campaign" / "campaign.sh"
    text = script.read_text()
    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if minor != "3.12":  # which the fake says that it is
        done = started(script, python)
        assert done.returncode == 2
        assert "is not Python 3.12" in done.stderr
    script.write_text(text.replace('"3.12"', f'"{minor}"'))
    lines = started(script, python).stdout.splitlines()
    home = tmp_path / "campaign"
    assert lines == [
        "-m sarathi_lab run experiment=campaign task=peaks",
        f"{home}/checkout:{home}/checkout/kernels:{home}/site",
        "key--capability=89",
        f"{home}/checkout",
    ]


def started(script: Path, python: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(script), "task=peaks"]
    environment = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_nothing_of_the_machine_itself_is_carried():
    names = {re.split(r"[<>=\[; ]", one)[0] for one in bundle.requirements()}
    assert {"hydra-core", "omegaconf", "pandas", "transformers", "hypothesis"} <= names
    assert not {"torch", "triton", "wandb"} & names


def test_a_bundle_needs_the_machines_torch(tmp_path, capsys):
    assert bundle.main(["--python=false", f"--out={tmp_path}/b"]) == 2
    error = capsys.readouterr().err
    assert "--python=false has no torch and Triton" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_a_package_that_is_missing_is_named_in_a_line(monkeypatch, capsys):
    monkeypatch.setitem(command.COMMANDS, "run", ("hydra_that_is_missing.core", ""))
    assert command.main(["run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the package hydra_that_is_missing is not installed; ")
    assert error.count("\n") == 1
    monkeypatch.setitem(command.COMMANDS, "run", ("sarathi_lab.missing", ""))
    with pytest.raises(ModuleNotFoundError):  # a fault of ours
        command.main(["run"])


def test_only_the_dashboard_needs_wandb_to_be_imported():
    files = (REPOSITORY / "sarathi_lab").rglob("*.py")
    importing = re.compile(r"^(?:import|from) wandb", re.MULTILINE)
    assert [path.name for path in files if importing.search(path.read_text())] == ["dashboard.py"]


def test_online_runs_without_wandb_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb, or use"):
        WandbTracker("online", "p", str(tmp_path)).check()

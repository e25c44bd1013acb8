"""A wheel has all that the commands read, and writes nothing into itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from sarathi_lab.config.paths import REPOSITORY

PARTS = ("sarathi_lab", "kernels", "conf", "experiments")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
SCRIPT = """
import sys
from pathlib import Path
import sarathi_lab, sarathi_kernels
for package in (sarathi_lab, sarathi_kernels):
    assert Path(package.__file__).is_relative_to(sys.argv[1]), package.__file__
from sarathi_lab.__main__ import main
small = ["executor=simulated", "tracking=none", "workload.num_requests=2", "batch=2"]
codes = [main(["run", "chunk=128", "-m", "baselines=[]", *small])]
assert "torch" not in sys.modules, "a simulation imports torch"
codes += [
    main(["claims", "--only", "fig08"]),
    main(["figures", "--only", "fig08"]),
]
assert codes == [0, 0, 0], codes
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder with what the wheel of a copy of this checkout holds."""
    folder = tmp_path_factory.mktemp("wheel")
    unneeded = shutil.ignore_patterns("__pycache__", "*.png", "*.md", "*.egg-info", "build")
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, folder / "source" / part, ignore=unneeded)
    for name in FILES:
        shutil.copy(REPOSITORY / name, folder / "source" / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    build += ["--no-deps", "--no-build-isolation", folder / "source", "-w", folder]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def files(folder: Path, *suffixes: str) -> set[str]:
    """The files below a folder with these suffixes."""
    found = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return {str(path.relative_to(folder)) for path in found}


def test_it_has_every_module_setting_and_record(installed):
    for own, beside, suffixes in (
        ("sarathi_lab", "sarathi_lab", (".py",)),
        ("sarathi_kernels", "kernels/sarathi_kernels", (".py", ".cpp", ".h")),
        ("sarathi_lab/conf", "conf", (".yaml",)),
        ("sarathi_lab/experiments", "experiments", (".csv", ".gz", ".yaml")),
    ):
        assert files(REPOSITORY / beside, *suffixes) - files(installed / own, *suffixes) == set()
    (commands,) = installed.glob("*.dist-info/entry_points.txt")
    assert "sarathi-lab = sarathi_lab.__main__:main" in commands.read_text()


def test_a_sweep_claims_and_figures_run_in_an_empty_folder(installed, tmp_path):
    before = files(installed, ".py", ".yaml", ".csv", ".png", ".json")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(installed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"figures {tmp_path}/outputs/figures" in done.stdout
    assert "holds" in done.stdout
    assert len(list(tmp_path.rglob("run.json"))) == 1
    assert (tmp_path / "outputs" / "figures").is_dir()
    assert files(installed, ".py", ".yaml", ".csv", ".png", ".json") == before

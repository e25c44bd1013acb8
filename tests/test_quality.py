"""The linter, the type checker, and the rules of the layout that no tool knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "sarathi_lab").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])

# Module (or package) -> what it must not import: time, torch and policy each stay in their place.
FORBIDDEN = {
    "kernels": ["sarathi_lab"],
    "sarathi_lab/request.py": ["sarathi_lab", "torch"],
    "sarathi_lab/block_manager.py": ["sarathi_lab.engine.scheduler", "torch"],
    "sarathi_lab/scheduler.py": ["sarathi_lab.engine.loop", "torch"],
    "sarathi_lab/engine.py": ["torch", "sarathi_lab.torch_executor", "sarathi_lab.simulator"],
    "sarathi_lab/simulator": [
        "torch",
        "sarathi_lab.torch_executor",
        "sarathi_lab.engine.scheduler",
    ],
    "sarathi_lab/workload": ["torch", "sarathi_lab.engine.scheduler"],
    "sarathi_lab/plots.py": ["torch", "wandb"],
    "sarathi_lab/metrics.py": ["torch", "wandb", "matplotlib"],
}


@pytest.mark.parametrize(
    "arguments",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=" ".join,
)
def test_clean(arguments):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_point_one_way(place):
    files = [path for path in SOURCES if str(path.relative_to(ROOT)).startswith(place)]
    assert files
    for path in files:
        for name in imports(path):
            for forbidden in FORBIDDEN[place]:
                assert f"{name}.".startswith(f"{forbidden}.") is False, f"{path} imports {name}"


def test_only_tracking_talks_to_wandb():
    places = {"tracking.py", "wandb_run.py", "wandb_service.py", "wandb_reader.py"}
    assert {path.name for path in SOURCES if "wandb" in imports(path)} <= places


def test_kernels_folder_is_not_a_package():
    """`kernels/__init__.py` would shadow a package that transformers probes for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_files_stay_readable():
    assert {
        path.name: n for path in SOURCES if (n := len(path.read_text().splitlines())) > 350
    } == {}

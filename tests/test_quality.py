"""The linter, the type checker, and the rules of the layout that no tool knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "sarathi_lab").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])

LINT_IMPORTS = "from importlinter.cli import lint_imports_command as lint; lint()"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        ["-m", "mypy"],
        ["-c", LINT_IMPORTS],
    ],
    ids=["lint", "format", "types", "imports"],
)
def test_clean(arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
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

"""The linter, the type checker, and rules of the layout that no tool checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("experiments", "notebooks", "tools")  # folders with scripts outside the package

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


LAB = ROOT / "sarathi_lab"


def test_kernels_folder_is_not_a_package():
    """`kernels/__init__.py` would shadow a package that transformers probes for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_nothing_is_loose_beside_the_commands():
    assert {path.name for path in LAB.glob("*.py")} == {"__init__.py", "__main__.py", "run.py"}
    assert {path.name for path in (ROOT / "kernels" / "sarathi_kernels").glob("*.py")} == {
        "__init__.py",
        "compilation.py",
    }


def test_a_figure_is_named_in_few_places():
    naming = [path.stem for path in LAB.rglob("*.py") if "fig08" in path.read_text()]
    assert len(naming) <= 3, naming


def test_scripts_import_what_is_there():
    """Those of experiments/, tools/ and notebooks/ that no test runs."""
    for path in [path for folder in SCRIPTS for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sarathi_"):
                exec(compile(ast.unparse(node), str(path), "exec"), {})

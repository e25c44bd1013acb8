"""The commands that there are, how a shell completes them, and that asking is quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sarathi_lab
from sarathi_lab.__main__ import COMMANDS, main

SLOW = ("torch", "pandas", "seaborn", "matplotlib", "wandb", "scipy", "transformers", "optuna")


def test_without_arguments_it_says_what_there_is(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {command}" in out for command in COMMANDS)
    assert main(["runn"]) == 2
    assert "error: runn is not a command; use one of run, claims" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--help"], 0, "paper_grid"),
        (["polcy=orca"], 2, "did you mean policy?"),
        (["policy=orcaa"], 2, "did you mean orca?"),
        (["policy.min_decode=2"], 2, "did you mean policy.min_decodes?"),
        (["--cfg", "job", "chunk=128"], 0, "chunk: 128"),
    ],
)
def test_help_and_typos_import_nothing_slow(args, code, words):
    """Which modules are there says what the answer takes; seconds would say how busy it is here."""
    script = (
        "import sys\n"
        "from sarathi_lab.run import main\n"
        "try:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print('slow:', [name for name in {SLOW} if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "slow: []"


def test_the_public_names_are_imported_when_they_are_used():
    script = (
        "import sys, sarathi_lab\n"
        "loaded = [name for name in sys.modules if name.startswith('sarathi_lab.')]\n"
        "sarathi_lab.load_option('model', '13b').weight_bytes(2)\n"
        f"print(loaded, [name for name in {SLOW} if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


def test_the_public_names_are_those_of_their_modules():
    assert {name: getattr(sarathi_lab, name).__module__ for name in sarathi_lab.__all__} == {
        "ModelSpec": "sarathi_lab.model.spec",
        "Policy": "sarathi_lab.policy.base",
        "Request": "sarathi_lab.engine.request",
        "Results": "sarathi_lab.api.results",
        "check_policy": "sarathi_lab.api.check",
        "load": "sarathi_lab.api.results",
        "load_option": "sarathi_lab.config.instantiate",
        "load_runs": "sarathi_lab.results.load",
        "serve": "sarathi_lab.api.session",
        "sweep": "sarathi_lab.api.session",
    }
    assert set(sarathi_lab.__all__) < set(dir(sarathi_lab))
    with pytest.raises(AttributeError, match="module 'sarathi_lab' has no attribute 'load_run'"):
        sarathi_lab.load_run  # noqa: B018


def test_bash_completes_commands_and_settings(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    completion = capsys.readouterr().out
    command = tmp_path / "sarathi-lab"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sarathi_lab "$@"\n')
    command.chmod(0o755)
    lines = ["sarathi-lab cl", "sarathi-lab run policy=sarathi_serve_", "sarathi-lab run chu"]
    script = completion + "".join(
        f"COMP_LINE='{line}'; COMP_WORDS=($COMP_LINE); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_sarathi_lab 2>/dev/null; echo ${COMPREPLY[@]}\n"
        for line in lines
    )
    path = f"{tmp_path}:{Path('/usr/bin')}:{Path('/bin')}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": path, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.splitlines() == ["claims", "policy=sarathi_serve_dynamic", "chunk="]
    assert done.stderr == ""
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh is not supported; use sarathi-lab completion bash" in capsys.readouterr().err

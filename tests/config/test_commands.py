"""The commands that there are, how a shell completes them, and that asking is quick."""

from __future__ import annotations

import contextlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sarathi_lab
from sarathi_lab.__main__ import COMMANDS, main
from sarathi_lab.config.help import help_text
from sarathi_lab.config.paths import CONF
from sarathi_lab.run import main as run

ROOT = Path(sarathi_lab.__file__).parents[1]
SLOW = (*("torch", "joblib", "pandas", "seaborn", "matplotlib", "wandb", "scipy", "transformers"),)
QUICK = [
    (["--help"], "policy ("),
    (["polcy=orca"], "did you mean policy?"),
    (["policy=orcaa"], "did you mean orca?"),
    (["model=qwen3-235b"], "did you mean qwen3-235b-a22b?"),
    (["model=qwen2.5-7"], "did you mean qwen2.5-7b?"),
    (["policy=vllm"], "did you mean vllm_v1?"),
    (["--dryrun"], "did you mean --dry-run?"),
    (["baselines=[orca,orcaa]"], "did you mean orca?"),
    (["baselines=[orcaa]", "chunk=64,128", "-m"], "did you mean orca?"),
    (["policy.min_decode=2"], "did you mean policy.min_decodes?"),
    (["--cfg", "job", "chunk=128"], "chunk: 128"),
]


def test_without_arguments_it_says_what_there_is(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {command}" in out for command in COMMANDS)
    assert main(["runn"]) == 2
    said = capsys.readouterr().err
    assert "error: runn is not a command (did you mean run?); use one of run, claims" in said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("batch=0", "batch=0 is below 1"),  # the number of requests follows from it
    ],
)
def test_a_mistake_is_named_by_the_setting_that_was_typed(setting, words, capsys):
    assert run([setting, "executor=simulated", "tracking=none"]) == 2
    assert words in capsys.readouterr().err


def test_help_typos_and_public_names_import_nothing_slow():
    """Which modules are there says what the answer takes; seconds would say how busy it is here."""
    script = (
        "import sys, sarathi_lab\n"
        "print([name for name in sys.modules if name.startswith('sarathi_lab.')])\n"
        "sarathi_lab.load_option('model', '13b').weight_bytes(2)\n"
        "from sarathi_lab.run import main\n"
        f"for args in {[args for args, _ in QUICK]}:\n"
        "    try:\n        code = main(args)\n"
        "    except SystemExit as end:\n        code = end.code\n"
        "    print('code:', code)\n"
        f"print([name for name in {SLOW} if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "[]"
    codes = [line for line in lines if line.startswith("code: ")]
    num_refused = sum("did you mean" in words for _, words in QUICK)
    assert codes == ["code: 0", *["code: 2"] * num_refused, "code: 0"]
    assert [words for _, words in QUICK if words not in done.stdout + done.stderr] == []


def test_version_and_help_name_the_lab_and_what_was_typed_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    def shown(start: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [start])
        with contextlib.suppress(SystemExit):  # of argparse
            (run if start.endswith("run.py") else main)(args)
        return capsys.readouterr().out

    starts = {"bin/sarathi-lab": "sarathi-lab", "lab/__main__.py": "python -m sarathi_lab"}
    texts = []
    for start, name in starts.items():
        for version in (["--version"], ["run", "--version"]):
            assert shown(start, *version) == f"sarathi-lab {sarathi_lab.__version__}\n"
        for command in COMMANDS:
            texts.append(shown(start, command, "--help"))
            assert texts[-1].startswith(f"usage: {name} {command} ")
    texts.append(shown("sarathi_lab/run.py", "experiment=policies", "--help"))
    assert texts[-1].startswith("usage: python -m sarathi_lab.run [")
    texts.append(shown("sarathi-lab"))
    assert [line for text in texts for line in text.splitlines() if len(line) > 80] == []


def test_another_ctrl_c_while_processes_are_ended_prints_no_traceback():
    script = (
        "import atexit, os, signal\n"
        "from sarathi_lab.config.errors import exit_code\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "def run():\n    raise KeyboardInterrupt\n"
        "exit_code(run, 'runs are kept')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == "interrupted: runs are kept\n"


def test_the_public_names_are_objects_of_the_package():
    modules = {getattr(sarathi_lab, name).__module__ for name in sarathi_lab.__all__}
    assert {module.partition(".")[0] for module in modules} == {"sarathi_lab"}
    assert set(sarathi_lab.__all__) < set(dir(sarathi_lab))
    with pytest.raises(AttributeError, match="module 'sarathi_lab' has no attribute 'load_run'"):
        sarathi_lab.load_run  # noqa: B018


def test_bash_completes_commands_and_settings(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    completion = capsys.readouterr().out
    command = tmp_path / "sarathi-lab"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sarathi_lab "$@"\n')
    command.chmod(0o755)
    lines = ["sarathi-lab cl", "sarathi-lab run chunk=1 policy=orca,vllm_v0_"]
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
    assert done.stdout.splitlines() == ["claims", "policy=orca,vllm_v0_chunked"]
    assert done.stderr == ""
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh is not supported; use sarathi-lab completion bash" in capsys.readouterr().err


def test_the_files_of_settings_describe_each_of_them_for_help():
    groups = ("policy", "workload", "executor", "tracking", "requests")
    for path in [CONF / "config.yaml", *(path for one in groups for path in CONF.glob(f"{one}/*"))]:
        text = path.read_text().partition("\nhydra:")[0]
        assert text.startswith("# "), path
        taken_over = "defaults:" in text  # with the comments of other files
        for line in re.findall(r"^ *[\w.-]+: .*$", text, flags=re.MULTILINE):
            is_own = not re.search(r"\$\{|\b_target_:", line)
            assert " # " in line or taken_over or not is_own, (path, line)


def test_help_shows_what_the_chosen_options_say_of_their_settings():
    lines = help_text(["policy=orca", "workload=trace", "cache.block_size=8"]).splitlines()
    assert "policy: # orca" in lines
    assert "cache.block_size: 16 # tokens" in lines
    arrivals, shared = [line for line in lines if line.startswith("  arrivals:")]
    assert arrivals.startswith("  arrivals: null # the file's times")
    assert lines.index(shared) > lines.index("  # if not set above:") > lines.index(arrivals)
    assert any(line.startswith("  cv: null # of gamma") for line in lines)


def test_help_is_one_screen_that_points_on():
    lines = help_text([]).splitlines()
    assert len(lines) <= 40
    assert any("--help policy" in line for line in lines)


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("chunk", "chunk: null # tokens of one iteration"),
        ("policy", "  orca "),
        ("workload.rate", "lognormal"),
        ("cache.block_size", "cache.block_size: 16"),
        ("plot", "  hue: null # setting shown by colour"),
    ],
)
def test_help_explains_a_group_or_a_setting(topic, shown, capsys):
    assert run(["--help", topic]) == 0
    assert shown in capsys.readouterr().out


def test_help_on_what_there_is_not_suggests_what_there_is(capsys):
    assert run(["--help", "chnk"]) == 2
    error = "error: chnk is not a group or a setting (did you mean chunk?)"
    assert error in capsys.readouterr().err
    assert run(["--help", "fig09"]) == 2
    assert "write experiment=fig09 --help" in capsys.readouterr().err


DRY = ["executor=simulated", "workload.num_requests=3", "batch=2", "--dry-run"]


def test_a_dry_run_lists_the_jobs_and_leaves_nothing(tmp_path, capsys):
    args = [*DRY, f"output={tmp_path / 'o'}", "chunk=128,256", "-m"]
    assert run(args) == 0
    assert not (tmp_path / "o").exists()
    first, second, total, baselines, seconds = capsys.readouterr().out.splitlines()[-5:]
    assert first.split() == ["0", "sarathi", "chunk=128"]
    assert second.split() == ["1", "sarathi", "chunk=256"]
    assert total == "2 runs, checked and not started"
    assert baselines.startswith("baselines of each: request_level, orca; ")
    assert seconds == "about 1 s on one core, and baselines"
    assert run([*DRY, "chunk=1"]) == 2  # as the run itself would say


@pytest.mark.filterwarnings("ignore:'sarathi_lab.run' found in sys.modules")
def test_a_package_that_is_missing_is_named_in_a_line(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "run", ("hydra_that_is_missing.core", ""))
    assert main(["run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the package hydra_that_is_missing is not installed; ")
    assert error.count("\n") == 1
    monkeypatch.setitem(COMMANDS, "run", ("sarathi_lab.missing", ""))
    with pytest.raises(ModuleNotFoundError):
        main(["run"])
    monkeypatch.setitem(sys.modules, "hydra", None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("sarathi_lab.run", run_name="__main__")
    assert capsys.readouterr().err == "error: the package hydra is not installed; run make setup\n"


def test_a_checkout_that_is_not_installed_finds_its_kernels():
    code = "import sarathi_lab, sarathi_kernels; print(sarathi_kernels.__file__)"
    command = [sys.executable, "-S", "-c", code]  # without what is installed
    found = subprocess.check_output(command, cwd=ROOT, text=True, env={"PATH": ""})
    assert found.startswith(f"{ROOT}/kernels/")

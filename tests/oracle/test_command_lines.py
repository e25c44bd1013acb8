"""Command lines, good and bad: exit code, the value named, the files left. Not the wording."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from sarathi_lab.run import main

CORPUS = yaml.load((Path(__file__).parent / "command_lines.yaml").read_text(), yaml.CSafeLoader)
SMALL = "executor=simulated workload.num_requests=2 "
TINY = (
    "executor=simulated model=tiny batch=3 seq_len=64 pd_ratio=7 workload.num_requests=4 "
    "baselines=[] "
)
REFUSED = [*((SMALL + line, word) for line, word in CORPUS["refused_simulated"])]
REFUSED += [(line, word) for line, word in CORPUS["refused"]]


@pytest.mark.parametrize(("line", "word"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_bad_command_line_is_refused_in_one_line_before_anything_is_written(
    line, word, tmp_path, capsys
):
    assert main([*shlex.split(line), "tracking=none", f"output={tmp_path}/out"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "files", "word"), CORPUS["accepted"], ids=[line for line, *_ in CORPUS["accepted"]]
)
def test_a_good_command_line_runs_and_leaves_its_files(line, files, word, tmp_path, capsys):
    args = shlex.split(("" if line.startswith(("task=", "experiment=")) else TINY) + line)
    place = f"hydra.{'sweep' if '-m' in args else 'run'}.dir={tmp_path}/run"
    places = [f"output={tmp_path}/out"] if files is None else [f"output={tmp_path}/out", place]
    assert main([*args, "tracking=none", *places]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert word in out
    assert [name for name in files or () if not (tmp_path / "run" / name).is_file()] == []
    if files is None:
        assert not list(tmp_path.iterdir())

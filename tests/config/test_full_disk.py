"""Folders and disks that a sweep finds: full, another sweep's, or not its user's."""

from __future__ import annotations

import errno

import pytest

from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.results.load import load_iterations, load_runs, load_summary
from sarathi_lab.run import main
from sarathi_lab.tasks import base

SWEEP = [
    *("executor=simulated", "model=tiny", "tracking=none", "baselines=[]", "batch=2", "seq_len=34"),
    *("workload.num_requests=2", "chunk=16,32", "-m"),
]
FULL = OSError(errno.ENOSPC, "No space left on device", "table.parquet")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    assert main([*SWEEP, f"hydra.sweep.dir={folder}", f"output={folder.parent}"]) == 0
    return folder


def test_where_a_disk_is_full_each_run_says_so_in_a_line_and_the_rest_goes_on(
    tmp_path, monkeypatch, capsys
):
    """The first run has no room, not even for why; the second has."""
    work, is_full = base.run_task, [True]

    def writes(*args, **named):
        if is_full.pop() if is_full else False:
            monkeypatch.setattr("sarathi_lab.config.run_context.write_json", refuses)
            raise FULL
        monkeypatch.undo()
        work(*args, **named)

    def refuses(*args):
        raise FULL

    monkeypatch.setattr(base, "run_task", writes)
    assert main([*SWEEP, f"output={tmp_path}"]) == 1
    out, err = capsys.readouterr()
    line = "  stopped: table.parquet can't be written (No space left on device); make room for it"
    assert line in out.splitlines()
    assert err == "error: it did not end\n"
    assert "chunk=32 took" in out
    assert len(load_runs(tmp_path)) == 1


def test_a_command_without_room_ends_in_a_line(capsys):
    def command() -> int:
        raise FULL

    assert exit_code(command, "nothing") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_sweep_into_the_folder_of_another_is_refused(swept, capsys):
    before = sorted(swept.rglob("*"))
    assert main([*SWEEP, "seed=1", f"hydra.sweep.dir={swept}", f"output={swept.parent}"]) == 2
    assert f"hydra.sweep.dir={swept} has results of other runs" in capsys.readouterr().err
    assert sorted(swept.rglob("*")) == before


@pytest.mark.parametrize("text", ["[]", "5", "{", "null", "[" * 100_000])
def test_a_damaged_run_is_left_out_and_named(text, swept, tmp_path):
    for number in ("0", "1"):
        run = tmp_path / number
        run.mkdir()
        for name in ("run.json", "summary.json"):
            (run / name).write_text((swept / number / name).read_text())
    (tmp_path / "0" / "summary.json").write_text(text)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "run.json").write_text(text)
    runs = load_runs(tmp_path)
    assert runs.path.tolist() == [str(tmp_path / "1")]
    assert runs.attrs["skipped"] == (str(tmp_path / "0"), str(tmp_path / "2"))
    with pytest.raises(UserError, match=r"0/summary.json is not .*; leave it out or run it again"):
        load_summary(tmp_path / "0")


def test_a_truncated_table_is_named(swept, tmp_path):
    whole = (swept / "0" / "iterations.parquet").read_bytes()
    assert len(load_iterations(swept / "0"))
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "iterations.parquet").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"iterations\.parquet can't be read") as raised:
            load_iterations(tmp_path)
        assert "\n" not in str(raised.value)

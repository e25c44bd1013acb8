"""Folders and disks that a command finds: full, not its user's, or another sweep's."""

from __future__ import annotations

import errno

import pytest

from sarathi_lab.config.errors import exit_code
from sarathi_lab.run import main
from sarathi_lab.tasks import base

SWEEP = [
    *("executor=simulated", "model=tiny", "tracking=none", "baselines=[]", "batch=2", "seq_len=34"),
    *("workload.num_requests=2", "chunk=16,32", "-m"),
]
FULL = OSError(errno.ENOSPC, "No space left on device", "table.parquet")


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
    assert main([*SWEEP, f"output={tmp_path}/o", f"hydra.sweep.dir={tmp_path}/s"]) == 1
    out, err = capsys.readouterr()
    line = "  stopped: table.parquet can't be written (No space left on device); make room for it"
    assert line in out.splitlines()
    assert err == "error: it did not end\n"
    assert "chunk=32 took" in out

    before = sorted(tmp_path.rglob("*"))
    assert main([*SWEEP, "seed=1", f"hydra.sweep.dir={tmp_path}/s", f"output={tmp_path}/o"]) == 2
    assert f"hydra.sweep.dir={tmp_path}/s has results of other runs" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_command_without_room_ends_in_a_line(capsys):
    def command() -> int:
        raise FULL

    assert exit_code(command, "nothing") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "setting",
    ["output=/dev/null/x", "hydra.run.dir={}/run", "hydra.sweep.dir={}/sweep", "tracking.dir={}/w"],
)
def test_folders_that_cannot_be_written(setting, capsys, tmp_path):
    (tmp_path / "taken").touch()
    args = SWEEP if "sweep" in setting else [*SWEEP[:-2], "chunk=16"]
    tracking = "tracking=wandb" if "tracking" in setting else "tracking=none"
    place = setting.format(tmp_path / "taken")
    assert main([*args, tracking, f"output={tmp_path / 'outputs'}", place]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {setting.partition('=')[0]}=")
    assert "can't be written" in line


@pytest.mark.parametrize("output", ["", "null", "5"])
def test_what_names_no_output_folder_is_refused(output, capsys):
    assert main([*SWEEP, f"output={output}"]) == 2
    assert (
        "must be a non-empty string; name a folder, such as output=outputs"
        in capsys.readouterr().err
    )

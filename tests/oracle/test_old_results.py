"""Folders of results and W&B's names stay what they were: others read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from wandb_records import summary_of

import sarathi_lab
from sarathi_lab.__main__ import main as command
from sarathi_lab.run import main

DATA = Path(__file__).parents[1] / "data"
OLD_SWEEP = DATA / "old_sweep"  # chunk=8,16 -m with Orca as baseline, of commit b4e1d012
NAMES = DATA / "wandb_names.json"
TINY = ["model=tiny", "batch=3", "seq_len=64", "pd_ratio=7", "workload.num_requests=4"]
EXECUTORS = {
    "torch": ["device=cpu"],
    "simulated": ["executor=simulated", "tracking.iterations=true"],  # else runs are light
}


def test_an_old_sweep_loads_with_all_its_tables():
    results = sarathi_lab.load(OLD_SWEEP)
    runs = results.runs.set_index("policy")
    assert sorted(runs.index) == ["orca", "sarathi", "sarathi"]
    assert runs.is_baseline["orca"]
    swept = results.runs[~results.runs.is_baseline]
    assert sorted(swept.chunk) == [8, 16]
    for number, chunk in enumerate((8, 16)):
        stored = json.loads((OLD_SWEEP / str(number) / "summary.json").read_text())
        (row,) = swept[swept.chunk == chunk].to_dict("records")
        assert {name: row[name] for name in stored} == pytest.approx(stored, rel=1e-9)
    assert len(results.requests) == 3 * 4
    assert set(results.iterations.num_prefill_tokens) > {0}


def test_an_old_sweep_is_drawn_and_reported_again(tmp_path):
    folder = tmp_path / "sweep"
    shutil.copytree(OLD_SWEEP, folder)
    assert command(["plot", str(folder), "x=chunk", "y=tbt_p99"]) == 0
    assert command(["report", str(folder)]) == 0
    assert list(folder.glob("*.png"))
    assert list(folder.glob("*.html"))


def names_of(node: dict, above: str = "") -> set[str]:
    """Dotted names of all leaves, without the numbers of lists."""
    found = set()
    for key, value in node.items():
        is_inner = isinstance(value, dict) and value
        found |= names_of(value, f"{above}{key}.") if is_inner else {f"{above}{key}"}
    return found


def wandb_runs(executor: str, output: Path) -> dict[str, dict[str, list[str]]]:
    """The names in the configuration and summary of each run, baselines too, by its policy."""
    args = [*TINY, *EXECUTORS[executor], "chunk=16", "baselines=[orca]", f"output={output}"]
    assert main(args) == 0
    found = map(summary_of, output.rglob("run-*.wandb"))
    return {
        run["config"]["policy"]: {
            part: sorted(names_of(run[part])) for part in ("config", "summary")
        }
        for run in found
    }


@pytest.mark.parametrize("executor", EXECUTORS)
def test_wandb_has_the_recorded_names(executor, tmp_path):
    recorded = json.loads(NAMES.read_text())[executor]
    runs = wandb_runs(executor, tmp_path)
    assert runs.keys() == recorded.keys()
    for run, parts in runs.items():
        for part, names in parts.items():
            missing = set(recorded[run][part]) - set(names)
            assert not missing, f"{executor}, {run}, {part}"


if __name__ == "__main__":  # record them anew
    import tempfile

    found = {name: wandb_runs(name, Path(tempfile.mkdtemp())) for name in EXECUTORS}
    NAMES.write_text(json.dumps(found, indent=1) + "\n")

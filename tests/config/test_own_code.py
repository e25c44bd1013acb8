"""Policies, models and workloads that stand outside the checkout, in single runs and with -m."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sarathi_lab.run import main

SMALL = ["executor=simulated", "tracking=none", "batch=2", "seq_len=64"]
MODULE = """
from dataclasses import dataclass
from typing import ClassVar

from sarathi_lab.policy import Policy
from sarathi_lab.workload.synthetic import PaperGrid


@dataclass(frozen=True)
class MyPolicy(Policy):
    name: ClassVar[str] = "mine"
    most: int = 1

    def fill(self, batch, scheduler):
        scheduler.add_decodes(batch)
        scheduler.admit(batch, max_prefills=self.most)


@dataclass(frozen=True)
class MyGrid(PaperGrid):
    name: ClassVar[str] = "my grid"


class WithoutFill(Policy):
    name: ClassVar[str] = "without_fill"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with a module, and options for it in conf/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    (tmp_path / "my_module.py").write_text(MODULE)
    for group, name, text in (
        ("policy", "mine", "_target_: my_module.MyPolicy\nmost: 2\n"),
        ("policy", "mine_of_orca", "defaults: [orca, _self_]\nmax_prefills: 2\n"),
        (
            "workload",
            "my_grid",
            "defaults: [paper_grid, _self_]\n_target_: my_module.MyGrid\nnum_requests: 3\n",
        ),
        ("model", "mini", "defaults: [tiny, _self_]\nname: mini\n"),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)
    return tmp_path


def labels(folder: Path) -> list[dict]:
    """What the runs below a folder are called, baselines left out."""
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob("run.json"))]
    return [run for run in found if not run["is_baseline"]]


def test_options_of_ones_own_folder(here):
    own = ["policy=mine", "workload=my_grid", "model=mini", "baselines=[mine_of_orca]"]
    assert main(["--config-dir", "conf", *SMALL, *own, "output=one"]) == 0
    (run,) = labels(here / "one")
    assert (run["policy"], run["workload"], run["model"]) == ("mine", "my grid", "mini")
    assert list(run["baselines"]) == ["mine_of_orca"]

    several = ["policy=mine,orca", "workload=my_grid", "model=mini", "baselines=[]"]
    way = f"hydra.searchpath=[file://{here}/conf]"
    assert main([*SMALL, *several, way, "-m", "output=many"]) == 0
    assert [run["policy"] for run in labels(here / "many")] == ["mine", "orca"]


def test_a_class_of_ones_own_takes_the_place_of_an_options(here, capsys):
    """Fields of sarathi.yaml that the new policy does not take are not in its way."""
    target = "policy._target_=my_module.MyPolicy"
    small = [*SMALL, "workload.num_requests=2", "baselines=[orca]"]
    assert main([target, *small, "output=one"]) == 0
    (run,) = labels(here / "one")
    assert run["policy"] == "mine"
    assert run["name"].startswith("MyPolicy ")
    capsys.readouterr()
    assert main([target, "+policy.most=1,2", *small, "-m", "output=many"]) == 0
    assert "does not read" not in capsys.readouterr().out
    assert [run["name"] for run in labels(here / "many")] == [
        "MyPolicy +policy.most=1",
        "MyPolicy +policy.most=2",
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["policy._target_=my_module.YourPolicy"], "my_module.YourPolicy can't be imported"),
        (["policy._target_=nowhere.MyPolicy"], "No module named 'nowhere'"),
        (["policy._target_=my_module.WithoutFill"], "my_module.WithoutFill lacks fill; define it"),
        (["policy=code/my_module.py"], "for a class of yours write policy._target_=my_module"),
        (
            ["task=validate", "task.server=vllm", "serve", "Qwen/Qwen3-8B"],
            "'serve' can't be read; settings are written name=value",
        ),
        (["workload=data/trace.csv"], "write workload=trace workload.path=FILE"),
        (["model=config.json"], "write model=auto model.path=FOLDER"),
        (["policy._target_=my_module.MyPolicy", "chunk=128"], "MyPolicy does not read chunk"),
        (
            ["policy._target_=my_module.MyPolicy", "+policy.least=1"],
            "policy.least is not a parameter",
        ),
        (["policy._target_=my_module.MyPolicy", "policy.most=2"], "write +policy.most=VALUE"),
        (["--config-dir", "gone"], "--config-dir gone is not a folder"),
        (
            ["--config-dir", "conf", "hydra.searchpath=[file:///mine]"],
            "conf has no effect beside hydra.searchpath",
        ),
        (["--config-dir", "conf", "policy=mina"], "did you mean mine?"),
    ],
)
def test_mistakes_with_ones_own_are_one_line(args, words, here, capsys):
    assert main([*SMALL, *args, "output=o"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not (here / "o").exists()

"""The leaderboard: distinguished groups of policies, at default budgets and at the best of a grid,
a user's among recorded ones, and the pages that show them.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scripts import load_script

from sarathi_lab.__main__ import main
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.extensions.leaderboard import command
from sarathi_lab.extensions.leaderboard.board import beside, compared
from sarathi_lab.extensions.leaderboard.comparison import standings
from sarathi_lab.extensions.leaderboard.runs import CONTEST, SAME_WORK, best_budgets, fingerprint
from sarathi_lab.extensions.leaderboard.verdicts import verdict

ONE_CONTEST = ["leaderboard", "experiment/leaderboard/workload=azure_code"]
ONE_CONTEST += ["experiment/leaderboard/server=a100", "task.processes=1"]
SMALL = [*ONE_CONTEST, "executor.cost_model=analytic", "workload.max_requests=6", "task.seeds=6"]
SMALL += ["task.budgets=[512]", "task.selection_seeds=[6]"]


def goodputs(num_seeds: int = 8, **factors: float) -> pd.DataFrame:
    """Goodputs by seed of policies that differ by a factor and some noise, much less than seeds."""
    rng = np.random.default_rng(0)
    of_seeds = rng.uniform(1, 10, num_seeds)
    noise = {name: rng.uniform(0.98, 1.02, num_seeds) for name in factors}
    return pd.DataFrame({name: of_seeds * factors[name] * noise[name] for name in factors})


def test_groups_are_those_distinguished_where_seeds_differ_by_more_than_policies():
    table = standings(goodputs(best=1.0, near=1.0, worse=0.8, as_bad=0.8, worst=0.3))
    assert table.group.to_dict() == {"best": 1, "near": 1, "worse": 2, "as_bad": 2, "worst": 3}
    assert table.num_better["worst"] == 4
    assert table.num_worse["worst"] == 0
    assert table.num_alike["best"] == 1
    assert table.num_worse["best"] == 3
    assert 0.01 < table.resolution["near"] < 0.1  # a loss of 10 % would be distinguished


def test_among_many_equal_policies_none_is_distinguished_by_chance():
    """Of 45, one beats another on all six seeds nearly surely."""
    num_distinguished = 0
    for case in range(10):
        rng = np.random.default_rng(case)
        table = standings(pd.DataFrame(rng.lognormal(1, 0.2, size=(6, 45))))
        num_distinguished += (table.group > 1).any()
    assert num_distinguished <= 2


def test_a_value_far_below_the_best_is_no_first_rank_where_seeds_do_not_decide():
    runs = goodputs(best=1.0, near=0.99)
    runs["noisy"] = runs.best * np.array([1.3, 0.1, 1.1, 0.2, 1.2, 0.1, 1.0, 0.2])
    noisy = standings(runs).loc["noisy"]
    assert noisy.group == 1
    assert noisy.is_open
    assert verdict(noisy).startswith("not decided (group 1+): ")

    runs["one_seed"] = np.nan
    runs.loc[0, "one_seed"] = 0.5 * runs.best[0]
    row = standings(runs).loc["one_seed"]
    assert verdict(row).endswith(" with 1 seed")
    assert row.best_goodput == runs.best[0]  # on the same requests
    assert standings(runs).loc["best", "group"] == 1


def rows(policy: str, role: str, budget: float, values: list[float], first_seed: int = 0):
    about = {**dict.fromkeys(CONTEST, "x"), "policy": policy, "role": role, "budget": budget}
    return [
        {**about, "seed": first_seed + i, "goodput_x": value, "requests": f"r{first_seed + i}"}
        for i, value in enumerate(values)
    ]


def test_the_best_budget_is_chosen_on_other_seeds_than_it_is_compared_on():
    chosen = [*rows("p", "selection", 512, [1.0], 20), *rows("p", "selection", 2048, [2.0], 20)]
    default = rows("p", "default", 512, [5.0, 5.0])
    best = rows("p", "best", 2048, [3.0, 4.0])
    whole = rows("whole", "default", np.nan, [1.0, 1.0])
    runs = pd.DataFrame([*default, *chosen, *best, *whole])
    assert best_budgets(runs, "goodput_x").to_list() == [2048]
    shown = compared(runs, "x", "best")
    assert shown[shown.policy == "p"].goodput_x.to_list() == [3.0, 4.0]  # although 5 is more
    assert set(shown.policy) == {"p", "whole"}  # without a budget it has one value
    assert set(compared(runs, "x", "default").goodput_x) == {5.0, 1.0}

    equal = [*rows("q", "default", 2048, [1.0]), *rows("q", "selection", 512, [1.0], 20)]
    equal += rows("q", "selection", 2048, [1.0], 20)
    assert best_budgets(pd.DataFrame(equal), "goodput_x").to_list() == [2048]  # the default


def test_a_record_has_the_choice_of_its_sweep():
    default = rows("p", "default", 2048, [1.0])
    smaller = rows("p", "selection", 512, [1.000001], 20)
    larger = rows("p", "selection", 4096, [1.000002], 20)  # equal in the digits of a record
    runs = pd.DataFrame([*default, *smaller, *larger])
    assert best_budgets(runs, "goodput_x").to_list() == [512]


def test_one_new_run_keeps_all_recorded_seeds_of_its_contest():
    recorded = pd.DataFrame([*rows("a", "default", 1, [1.0, 2.0]), *rows("b", "default", 1, [1.0])])
    both = beside(pd.DataFrame(rows("b", "default", 1, [3.0])), recorded)
    assert both[both.is_new].policy.to_list() == ["b"]
    assert both[~both.is_new].policy.to_list() == ["a", "a"]
    other = pd.DataFrame(rows("c", "default", 1, [3.0], 7))
    assert not beside(other, recorded).is_new.any()  # nothing to be new beside
    elsewhere = pd.DataFrame(rows("b", "default", 1, [3.0])).assign(workload="y")
    new = pd.concat([pd.DataFrame(rows("b", "default", 1, [3.0])), elsewhere])
    both = beside(new, recorded)
    assert both[both.is_new].workload.to_list() == ["x"]


def test_runs_stay_comparable_when_a_setting_is_added_unset():
    config = {name: {"size": 1} for name in SAME_WORK}
    assert fingerprint({**config, "cache": {"size": 1, "new": None}}) == fingerprint(config)
    assert fingerprint({**config, "cache": {"size": 2}}) != fingerprint(config)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    settings = ["policy=orca,sglang", "task.beside=null", f"hydra.sweep.dir={folder}"]
    assert main([*SMALL, *settings]) == 0
    return folder


def test_policies_run_at_their_systems_budget_and_at_the_best_of_the_grid(recorded):
    runs = pd.read_csv(recorded / "runs.csv.gz")
    sglang = runs[runs.policy == "sglang"]
    assert set(sglang[sglang.role == "default"].budget) == {8192}  # SGLang's on 80 GB
    assert set(sglang[sglang.role == "selection"].budget) == {512, 8192}
    assert set(sglang[sglang.role == "selection"].seed) == {6}
    orca = runs[runs.policy == "orca"]
    assert orca.budget.isna().all()
    assert set(orca.role) == {"default"}
    board = pd.read_csv(recorded / "groups.csv")
    assert set(board["at"]) == {"default", "best"}
    assert {"goodput_strict"} < set(board["quantity"])


def test_a_board_is_shown_in_every_form_and_drawn_again_from_its_runs(recorded):
    names = ("azure_code.md", "azure_code.png", "summary.md", "groups.csv", "leaderboard.html")
    assert all((recorded / name).stat().st_size > 0 for name in names)
    assert "of 59 (A100; share 0.54 to 1; a rule 51)" in (recorded / "leaderboard.html").read_text()
    before = (recorded / "azure_code.md").read_text()
    (recorded / "azure_code.md").unlink()
    assert main(["leaderboard", str(recorded)]) == 0
    assert (recorded / "azure_code.md").read_text() == before


def test_a_class_takes_the_place_of_all_options_among_recorded_runs(recorded, tmp_path, capsys):
    settings = ["policy._target_=own_policies.DecodesThenOneChunk", "+policy.tokens=${chunk}"]
    settings += [f"task.beside={recorded / 'runs.csv.gz'}", f"hydra.sweep.dir={tmp_path}"]
    assert main([*SMALL, *settings]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "beside the recorded policies" in shown
    assert "2,048 (default) group 1: " in shown
    policies = {"DecodesThenOneChunk", "orca", "sglang"}
    assert set(pd.read_csv(tmp_path / "runs.csv.gz").policy) == policies
    assert "DecodesThenOneChunk (yours)" in (tmp_path / "azure_code.md").read_text()


def test_one_seed_of_a_known_policy_with_another_budget_decides_nothing(recorded, tmp_path, capsys):
    settings = ["policy=sglang", "chunk=1024", "task.seeds=1"]
    settings += [f"task.beside={recorded / 'runs.csv.gz'}", f"hydra.sweep.dir={tmp_path}"]
    assert main([*SMALL, *settings]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sglang chunk=1024" in shown
    assert "with 1 seed" in shown
    assert "1 of 6 seeds that decide" in shown


def test_recorded_runs_are_of_the_requests_of_today(tmp_path, capsys):
    settings = ["policy=sarathi_serve", "task.seeds=1", "task.budgets=[]"]
    assert main([*ONE_CONTEST, *settings, f"hydra.sweep.dir={tmp_path}"]) == 0
    assert "no run of the same requests" not in capsys.readouterr().out


def test_runs_of_other_requests_are_not_beside_recorded_ones(tmp_path, capsys):
    assert main([*SMALL, "policy=orca", f"hydra.sweep.dir={tmp_path}"]) == 0
    assert "runs.csv.gz has no run of the same requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task.objectives=[]", "compares by nothing"),
        ("task.objectives=[stric]", "stric is unknown"),
        ("task.objectives=strict", "such as [strict]"),
        ("task.selection_seeds=[5]", "seed 5 is one that policies are compared on"),
        ("task.selection_seeds=[]", "no requests to choose a budget by"),
        ("task.budgets=[512,512]", "repeats one"),
        ("task.beside=none.csv", "none.csv can't be read"),
        ("baselines=[orca]", "does not read baselines"),
    ],
)
def test_what_can_not_be_compared_is_refused_before_anything_runs(setting, words, tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert main([*SMALL, "policy=orca", setting, f"hydra.sweep.dir={folder}"]) == 2
    assert words in capsys.readouterr().err
    assert not folder.exists()


def test_a_mistake_in_all_jobs_is_refused_by_the_first(tmp_path, capsys, monkeypatch):
    composed = []
    from sarathi_lab.config.sweeper import LabSweeper

    compose_job = LabSweeper.compose_job
    monkeypatch.setattr(
        LabSweeper, "compose_job", lambda self, job: composed.append(1) or compose_job(self, job)
    )
    settings = ["task.objectives=[stric]", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(["leaderboard", *settings]) == 2
    assert "stric is unknown" in capsys.readouterr().err
    assert len(composed) == 1  # of all


@pytest.mark.parametrize(
    ("args", "is_alone"),
    [
        (["resume=outputs/board"], True),
        (["resume=outputs/board", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], True),
        (["resume=outputs/board", "task.seeds=16"], False),
        (["resume=true"], False),
        (["hydra/launcher=joblib"], False),
    ],
)
def test_a_folder_alone_is_continued_by_the_command_in_it(args, is_alone):
    commands = []

    def run(settings):
        commands.append(settings)
        return 0

    assert command.main(args, run) == 0
    assert commands == [args if is_alone else ["experiment=leaderboard", *args]]


@pytest.mark.oracle
def test_the_page_of_schedules_has_what_its_commands_show():
    folder = EXPERIMENTS / "lab" / "leaderboard"
    script = load_script(folder / "schedules.py")
    for section in (folder / "schedules.md").read_text().split("\n## ")[1:]:
        (command,) = re.findall(r"schedules\.py (.*)`", section)
        options = script.parsed(command.split())
        rows = []
        for line in re.findall(r"^\| (\d.*) \|$", section, flags=re.MULTILINE):
            rows.append([int(cell.replace(",", "")) for cell in line.split(" | ")])
        for policy, recorded in zip(
            options.policies, (np.array(rows).T[:4], np.array(rows).T[4:]), strict=True
        ):
            shown = script.shown_of(script.tables_of(policy, options)[0])
            computed = shown[shown.start >= 1e3 * options.at].head(len(rows))
            columns = computed[["ms", "prompt tokens", "decodes", "waiting"]]
            np.testing.assert_array_equal(columns.round().to_numpy(int), recorded.T)

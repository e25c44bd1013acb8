"""Simulations shared among processes: the same numbers, and one line where one is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pandas as pd
import pytest
from composed import config_of, refusal_of

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import build, load_option, read_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.experiment.grid import Grid
from sarathi_lab.experiment.points import Part, Point
from sarathi_lab.experiment.registry import CATALOG, SimulatedJob, paper_jobs
from sarathi_lab.experiment.simulate import by_folder, simulate
from sarathi_lab.run import main

SIMULATED = ("executor=simulated", "hardware=h100", "model=llama3-8b", "tracking=none")


def test_points_are_the_same_by_any_number_of_processes():
    cfg, own = config_of("task=measure", *SIMULATED), CATALOG["sarathi_serve_stalls"]
    spec, backend = load_option("model", "llama3-8b"), build(cfg.executor)
    job = SimulatedJob(own, spec, backend, own.sizes("dry"))
    (one,), (two,) = (simulate([job], number) for number in (1, 2))
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert len(one)


def die(parent, seed):
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return []


class Dying(Grid):
    def parts(self, spec, sizes):
        return [Part(die, seed=0)] * 4

    def bench(self, job):
        return job.seed

    def __reduce__(self):
        return Dying, (self.name, die, "", 0.0)


def test_a_killed_process_is_one_line():
    job = replace(paper_jobs(CATALOG["table2"])[0], experiment=Dying("dying", die, "", 0.0))
    with pytest.raises(RunError, match="was killed; the system may have been out of memory"):
        simulate([replace(job, seed=os.getpid())], 2)


OF_A_SERVER = (("hardware", "a-server"), ("level", "timed"), ("device_name", "one that was timed"))


def timed_and_modelled(bench):
    yield Point("timed", "", 1.0, labels=OF_A_SERVER)
    yield Point("modelled", "", 1.0, labels=(("dataset", bench),))


class Labelled(Grid):
    def parts(self, spec, sizes):
        return [Part(timed_and_modelled)]

    def bench(self, job):
        return job.backend.cost_model

    def table(self, points_of_parts):
        ((timed, modelled),) = points_of_parts
        rows = [{"panel": point.panel, **dict(point.labels)} for point in (timed, modelled)]
        return pd.DataFrame(rows)

    def __reduce__(self):
        return Labelled, (self.name, timed_and_modelled, "", 0.0)


def test_a_point_of_another_device_is_recorded_as_that_and_once():
    labelled = Labelled("labelled", timed_and_modelled, "", 0.0)
    job = replace(paper_jobs(CATALOG["table2"])[0], experiment=labelled)
    jobs = []
    for level in ("analytic", "profiled"):
        jobs.append(replace(job, backend=replace(job.backend, cost_model=level)))
    folders = by_folder(simulate(jobs, 1))
    assert {folder: list(rows.panel) for folder, rows in folders.items()} == {
        "simulated-a6000": ["modelled"],
        "simulated-a6000-profiled": ["modelled"],
        "simulated-a-server-timed": ["timed"],
    }
    (timed,) = folders["simulated-a-server-timed"].to_dict("records")
    assert (timed["device_name"], timed["model"]) == ("one that was timed", "13b")


# -- what is stated --------------------------------------------------------------------------------

OF_EXECUTOR = {  # a value other than the default of each setting of executor=simulated
    "dtype": "bfloat16",
    "weights": "fp8",
    "draw": 1,
    "slower_shape": "decodes",
    "slowdown": 2,
    "cost_model": "profiled",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
}
STATED = [f"executor.{name}={value}" for name, value in OF_EXECUTOR.items()]
STATED += ["hardware.kernel_launch=0.001", "hardware.uncertainty.matmul=0.4", "hardware.name=mine"]
STATED += ["hardware=a6000", "seed=3", "task.draws=8", "task.sizes.small.chunk=8"]


def test_every_setting_of_the_executor_is_tried():
    settings = read_option("executor", CONF / "executor" / "simulated.yaml")
    assert set(settings) - {"_target_", "hardware", "host"} == set(OF_EXECUTOR)


def simulated(*settings: str) -> list[object]:
    """What decides the points of the checked jobs."""
    cfg = config_of("executor=simulated", *settings)
    task = build(cfg.task)
    return [
        (job.spec, job.backend, job.backend.hardware.uncertainty, job.seed, job.is_varied)
        for job in task.check(cfg).simulated
    ]


def refused(*settings: str) -> str | None:
    """The line by which settings are refused; None where they are not."""
    try:
        simulated(*settings)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("experiment", ["fig08", "token_budget", "sarathi_serve_stalls"])
@pytest.mark.parametrize("setting", STATED)
def test_what_is_stated_changes_the_simulation_or_is_refused(experiment, setting):
    chosen = f"experiment={experiment}"
    line = refused(chosen, setting)
    if line is not None:
        assert line.startswith(setting)
        assert "no effect" in line or "one batch at a time" in line
    elif setting == "hardware=a6000" and experiment != "sarathi_serve_stalls":
        assert simulated(chosen, setting) == simulated(chosen)  # it is the paper's
    else:
        assert simulated(chosen, setting) != simulated(chosen)


def test_figures_of_a_card_are_of_one_that_is_named():
    stated = ["experiment=fig08", "hardware.kernel_launch=0.001"]
    (*_, (_, backend, *_)) = simulated(*stated, "hardware=h100")
    assert (backend.hardware.name, backend.hardware.kernel_launch) == ("h100", 0.001)
    assert "choose a GPU, too, such as hardware=a6000" in refusal_of("executor=simulated", *stated)


@pytest.mark.parametrize(
    ("content", "said"),
    [("hardware: {kernel_launch: 0.001}", "a figure of hardware=a6000"), ("seed: 3", "seed=3 has")],
)
def test_what_an_experiments_own_file_states_is_read_or_refused(content, said, tmp_path, capsys):
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(f"# @package _global_\ndefaults: [fig08, _self_]\n{content}\n")
    assert main([f"--config-dir={tmp_path}", "executor=simulated", "experiment=mine"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["fig08", "executor.draw=1"], "shows the errors of the cost model itself; drop it"),
        (["token_budget", "seed=3"], "seed=3 has no effect: the requests of token_budget"),
        (["fig07", "task.sizes.paper.tokens=[64]"], "recomputed at the paper's points"),
        (
            ["fig08", "task.function=sarathi_lab.experiment.decodes.fig10"],
            "name yours otherwise, such as task.experiment=my_fig08",
        ),
    ],
    ids=str,
)
def test_what_no_simulation_reads_is_one_line(settings, said):
    experiment, setting = settings
    assert said in refusal_of("executor=simulated", f"experiment={experiment}", setting)

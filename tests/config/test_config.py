"""Every option of every group composes and instantiates; every published experiment runs in a fast
mode.
"""

from __future__ import annotations

from functools import cache
from itertools import zip_longest

import pytest
from hydra import compose as compose_with_hydra
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import GROUPS, build
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.sweeper import compose
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.tasks.plan import make_plan

# Found by task=validate, or of a card that its user describes; where vLLM is missing refused, see
# test_vllm_backend.
OF_A_RUN = {
    *(("hardware", "auto"), ("hardware", "datasheet"), ("host", "auto"), ("executor", "vllm")),
}
OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name in GROUPS and (path.parent.name, path.stem) not in OF_A_RUN
]
LONG_PROMPTS = {
    ("workload", name)
    for name in ("agentic", "arxiv_summarization", "openchat_sharegpt4", "sessions")
}
NEEDS_FILE = {("workload", "prompts"), ("workload", "trace"), ("task", "validate")}
# for one device: refused, see test_bad_input
TOO_LARGE = {("model", "gpt3-175b"), ("model", "llama3.1-70b")}


# Groups that say nothing of each other: an option of each is composed and planned together.
TOGETHER = ("policy", "task", "slo", "hardware", "tracking")
ALONE = [one for one in OPTIONS if one[0] not in TOGETHER or one in NEEDS_FILE]
COLUMNS = [[one for one in OPTIONS if one[0] == group and one not in ALONE] for group in TOGETHER]
CHOICES = [
    *([one] for one in ALONE),
    *([one for one in row if one is not None] for row in zip_longest(*COLUMNS)),
]


@pytest.mark.parametrize("group", ["hardware", "host"])
def test_what_a_run_tells_is_refused_without_one(group):
    cfg = composed_once("executor=simulated", f"{group}=auto")
    with pytest.raises(UserError, match="task=validate reads from a run; name one, such as"):
        build(cfg.executor)


def test_every_option_is_chosen():
    assert sorted(one for chosen in CHOICES for one in chosen) == sorted(OPTIONS)


@cache
def composed_once(*settings: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose_with_hydra("config", list(settings))


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: " ".join(map("=".join, chosen)))
def test_every_option_instantiates_and_makes_a_plan_in_simulation(chosen):
    groups = dict(chosen)
    computes = groups.get("speculation") == "prompt_lookup"  # which reads tokens
    executor = [] if "executor" in groups or computes else ["executor=simulated"]
    if "model" in groups:
        room = ["hardware=h200", "hardware.memory_bytes=2.0e12", "cache.num_blocks=2000"]
    elif LONG_PROMPTS & {*chosen}:
        room = ["hardware=a100", "model=mistral-7b"]
    elif "hardware" in groups:
        room = ["model=7b"]  # which the smallest GPU holds
    elif groups.get("host") == "trtllm_1_0":
        room = ["hardware=h100"]  # which has its attention kernel
    else:
        room = ["model=tiny"] if groups.get("executor") == "torch" or computes else []
    if groups.get("cluster") == "lockstep":
        room += ["model=30m-moe"]
    paths = {group: CONF / group / f"{option}.yaml" for group, option in chosen}
    texts = {group: path.read_text() for group, path in paths.items()}
    composed = [group for group in groups if group == "cluster" or "defaults:" in texts[group]]
    options = [f"{group}={groups[group]}" for group in composed]
    cfg = composed_once(*options, *executor, *room).copy()
    for group, path in paths.items():
        assert texts[group].startswith(("_target_", "#"))
        if group not in composed:
            cfg[group] = OmegaConf.load(path)
        assert build(cfg[group]) is not None
    if not (NEEDS_FILE | TOO_LARGE) & {*chosen}:
        assert make_plan(cfg).load.requests


CAMPAIGN = ("campaign",)  # needs a GPU: see test_campaign
EXPERIMENTS = sorted({path.stem for path in (CONF / "experiment").glob("*.yaml")} - {*CAMPAIGN})
# What only the user can choose; and two policies for all, as each is planned above.
TRACE = ["workload.path=tests/data/trace.csv", "model=7b", "batch=8"]
ONE_RANKING = ["experiment/leaderboard/workload=azure_code", "experiment/leaderboard/server=a100"]
NEEDED = {
    "policies": [*TRACE, "policy=sarathi,orca"],
    "leaderboard": [*ONE_RANKING, "policy=sarathi,orca", "seed=0"],
    "real_bubbles": ["executor=simulated", "executor.pipeline_parallel=2"],
    "expert_reload": ["executor=simulated"],  # measured by vLLM, which is not installed here
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_all_its_jobs(experiment):
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    has_own_task, is_sweep = "override /task" in text, "mode: MULTIRUN" in text
    figure = CATALOG.get(experiment)
    is_simulated = not has_own_task or (figure is not None and figure.is_simulated)
    device = ["executor=simulated"] if is_simulated else []
    command_line = compose([f"experiment={experiment}", *device, *NEEDED.get(experiment, [])])
    assert command_line.is_sweep == is_sweep
    assert (len(command_line.jobs) > 1) == is_sweep
    command_line.check()


def test_every_policy_is_compared_in_one_experiment():
    """The test above composes two of those that one experiment sweeps."""
    overlays = {path.stem: path.read_text() for path in (CONF / "experiment").glob("*.yaml")}
    swept = str(OmegaConf.create(overlays["policies"]).hydra.sweeper.params.policy).split(",")
    assert len(set(swept)) == len(swept)
    after = (
        "long_prompts",
        "dynamic_chunks",
        "adaptive_budgets",
        "proposed_gains",
    )
    later = [overlays[name] for name in after]
    others = {path.stem for path in (CONF / "policy").glob("*.yaml")} - {*swept}
    others.remove("riding_limit")  # experiments/lab/riding_limit/compare.py compares it
    assert all(sum(name in text for text in later) == 1 for name in others)


def test_runs_of_the_same_second_have_folders_of_their_own():
    folders = {compose(["executor=simulated"]).record.folder for _ in range(3)}
    assert len(folders) == 3


def test_the_default_command_plans_three_runs_on_this_machine():
    command_line = compose(["chunk=256,512,1024", "-m"])
    assert [job.cfg.chunk for job in command_line.jobs] == 3 * [256, 512, 1024]
    plan = make_plan(command_line.jobs[0].cfg)
    assert plan.backend.name == "torch"
    assert plan.policy.name == "sarathi"
    assert len(plan.load.requests) == 4 * plan.engine.batch_size  # mostly in a steady state
    for setting in ("executor.pipeline_parallel=2", "cluster=replicas"):
        (job,) = compose(["executor=simulated", setting]).jobs
        assert job.cfg.workload.num_requests == 2 * 8 * plan.engine.batch_size


def test_in_a_sweep_what_a_job_does_not_read_collapses():
    """Nothing else of the job changes, so that its results are those of a sweep without it."""
    line = compose(["policy=orca,sarathi", "chunk=128,512", "executor=simulated", "-m"])
    kept = [" ".join(one for one in job.settings if "executor" not in one) for job in line.jobs]
    assert kept == ["policy=orca", "policy=sarathi chunk=128", "policy=sarathi chunk=512"]
    assert line.notes == ["Orca does not read chunk: run once for all its values"]
    line = compose(["policy=sarathi,orca", "chunk=128", "executor=simulated", "-m"])
    assert ["chunk=128" in job.settings for job in line.jobs] == [True, False]
    with pytest.raises(UserError, match="chunk=128 has no effect"):
        compose(["policy=orca,request_level", "chunk=128,512", "-m"])


def test_a_glob_sweeps_over_the_options_that_match():
    line = compose(["policy=glob(sarathi_serve*)", "executor=simulated", "-m"])
    policies = [job.choices["policy"] for job in line.jobs]
    assert policies == ["sarathi_serve", "sarathi_serve_dynamic"]


def test_a_setting_of_the_swept_options_need_not_be_one_of_the_default():
    swept = ["workload=uniform,zipf", "workload.min_len=10", "workload.max_len=99"]
    jobs = compose(["executor=simulated", *swept, "-m"]).jobs
    assert [job.cfg.workload.min_len for job in jobs] == [10, 10]


def test_a_field_of_one_of_the_swept_policies_is_left_out_of_the_others():
    args = ["policy=orca,sarathi", "policy.min_decodes=1,2", "executor=simulated", "-m"]
    line = compose(args)
    kept = [" ".join(one for one in job.settings if "executor" not in one) for job in line.jobs]
    own = [f"policy=sarathi policy.min_decodes={number}" for number in (1, 2)]
    assert kept == ["policy=orca", *own]
    assert line.notes == [
        "Orca does not read policy.min_decodes: run once for all its values",
    ]
    with pytest.raises(UserError, match=r"policy\.min_decods is not a parameter"):
        compose(["policy=orca,sarathi", "policy.min_decods=1,2", "-m"])


def test_a_key_of_an_option_that_a_run_tells_needs_one_that_is_named():
    replay = ["task=validate", "task.run=missing", "host.request=0.01"]
    with pytest.raises(UserError, match=r"host\.request is not a parameter of .*; use one of"):
        compose(replay)
    compose([*replay, "host=vllm_http"])


def test_measured_sweeps_are_repeated_round_after_round():
    """So that a slow minute of the machine is one of all settings; a simulation repeats itself."""
    line = compose(["chunk=256,512", "repeat=2", "-m"])
    rounds = [(job.cfg.repetition, job.cfg.chunk) for job in line.jobs]
    assert rounds == [(0, 256), (0, 512), (1, 256), (1, 512)]
    assert line.record.swept == ["chunk", "repetition"]
    mixed = compose(["executor=simulated,torch", "repeat=2", "-m"])
    assert [job.cfg.repetition for job in mixed.jobs] == [0, 0, 1]
    assert mixed.notes == ["simulated runs repeat themselves: run in one round"]
    number = {
        args: len(compose([*args, "-m"]).jobs)
        for args in [
            ("chunk=128,256",),
            ("chunk=128,256", "executor=simulated"),
            ("seed=0,1",),
            ("repetition=0,1",),
            ("task=capacity", "chunk=128,256", "workload.arrivals=poisson"),
        ]
    }
    assert list(number.values()) == [6, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("model=meta-llama/Llama-3.3-70B-Instruct", " (did you mean llama3.3-70b?); for"),
        ("model=/models/Qwen3-8B/", " (did you mean qwen3-8b?); for"),
        ("model=Qwen3-8B", " (did you mean qwen3-8b?); for a config.json"),
        ("model=Qwen/Qwen3-8B-Turbo", " (qwen3-8b, but for turbo); for a config.json"),
        ("model=TinyLlama/TinyLlama-1.1B", "; for a config.json"),
        ("hardware=RTX-A6000", " (did you mean a6000?); for another card"),
        ("hardware=a100-sxm4-40gb", " (a100, but for 40gb); for another card write hardware=data"),
    ],
)
def test_a_published_name_leads_to_the_built_in_option(setting, hint):
    with pytest.raises(UserError) as error:
        compose([setting])
    assert f"{setting} is unknown{hint}" in str(error.value)

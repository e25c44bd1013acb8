"""What a run has that states no arrivals, budget, sequences and cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from composed import config_of
from plans import plan_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.run import main
from sarathi_lab.tasks import run_cache
from sarathi_lab.tasks.plan import Plan, make_plans
from sarathi_lab.tasks.serve import fingerprint

SERVED = ("executor=simulated", "hardware=a100", "model=llama3-8b", "workload.num_requests=4")
POISSON = (*SERVED, "workload.rate=2")


def sizes_of(plan: Plan) -> tuple[object, int]:
    return plan.policy.budget, plan.engine.batch_size


@pytest.mark.parametrize(
    ("policy", "hardware", "sizes"),
    [
        ("vllm_v1", "a100", (2048, 256)),
        ("vllm_v1", "h100", (8192, 1024)),
        ("p_pas", "a100", (2048, 256)),  # a proposal to vLLM
        ("sglang", "a100", (8192, 4096)),
        ("trtllm", "h100", (8192, 2048)),
        ("lmdeploy", "a100", (8192, 384)),
        ("llama_cpp", "a100", (512, 4)),
        ("prefill_first", "h100", (None, 256)),
        ("orca", "a100", (None, 256)),  # of papers, as vLLM's
        ("sarathi", "h100", (8192, 1024)),
        # Its smallest iteration has 64 tokens, one for each of a full batch of decodes.
        ("sarathi_serve_dynamic", "a100", (2048, 64)),
    ],
)
def test_under_arrivals_a_policy_has_its_servers_sizes(
    policy: str, hardware: str, sizes: tuple[object, int]
) -> None:
    plan = plan_of(policy, *POISSON, f"hardware={hardware}")
    assert sizes_of(plan) == sizes
    assert plan.engine.fills_memory
    recorded = plan.config
    assert (recorded["batch"], recorded["cache"]["num_blocks"]) == (sizes[1], "auto")
    assert recorded["workload"]["arrivals"] == "poisson"


@pytest.mark.parametrize(
    ("stated", "sizes"),
    [
        (("chunk=512", "batch=64", "cache.num_blocks=5000"), (512, 64)),
        (("chunk=128",), (128, 128)),  # no more sequences than the budget has tokens
        (("batch=4096",), (4096, 4096)),  # and no smaller budget than a stated batch needs
        (("cache.num_blocks=batch", "batch=8"), (2048, 8)),
    ],
)
def test_what_is_stated_overrides_a_servers_sizes(
    stated: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    plan = plan_of("vllm_v1", *POISSON, *stated)
    assert sizes_of(plan) == sizes
    assert plan.engine.fills_memory == (not any("num_blocks" in one for one in stated))
    assert (plan.assumed or "").count("=auto") == plan.engine.fills_memory


def test_a_plan_says_what_was_assumed() -> None:
    of_vllm = "as vLLM 0.32's defaults on a100"
    words = plan_of("vllm_v1", *POISSON).assumed
    assert words is not None
    assert words.startswith("workload.arrivals=poisson, as workload.rate is set; ")
    assert words.endswith(
        f"chunk=2048 batch=256 cache.num_blocks=auto (fills the memory), {of_vllm}"
    )
    words = plan_of("orca", *POISSON, "workload.arrivals=poisson", "batch=9").assumed
    assert (
        words
        == f"cache.num_blocks=auto (fills the memory), {of_vllm} (of all policies without a server)"
    )
    stated = ("workload.arrivals=poisson", "batch=9", "chunk=64", "cache.num_blocks=batch")
    assert plan_of("vllm_v1", *POISSON, *stated).assumed is None


@pytest.mark.parametrize(
    "load", [(), ("workload=openchat_sharegpt4",), ("workload.arrivals=closed",)]
)
def test_the_closed_grid_keeps_the_papers_sizes(load: tuple[str, ...]) -> None:
    plan = plan_of("vllm_v1", *SERVED, *load)
    assert (*sizes_of(plan), plan.engine.fills_memory) == (256, 8, False)
    assert plan.assumed is None
    assert plan.config["chunk"] == 256
    assert plan.config["cache"]["num_blocks"] is None


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (("workload.users=3",), "users"),
        (("workload.rate=2", "workload.cv=3"), "gamma"),
        (("workload=agentic",), "closed"),  # sessions, whose turns wait for answers
        (("workload=trace", "workload.path=tests/data/trace.csv"), None),
    ],
)
def test_users_sessions_and_traces_arrive_over_time(
    load: tuple[str, ...], kind: str | None
) -> None:
    sizes = SERVED[:3] if "workload=trace" in load else SERVED
    plan = plan_of("vllm_v1", *sizes, *load)
    assert plan.config["workload"]["arrivals"] == kind
    assert sizes_of(plan) == (2048, 256)


def test_a_measured_device_takes_no_more_than_is_stated() -> None:
    plan = plan_of("vllm_v1", "model=tiny", "workload.rate=2", "device=cpu", "seq_len=64")
    assert (*sizes_of(plan), plan.engine.fills_memory) == (256, 8, False)
    assert "chunk=256 batch=8, the paper's, as a measured device" in str(plan.assumed)


def test_a_baseline_has_the_defaults_of_its_policy() -> None:
    """So it is the same beside the runs of all servers; what is stated holds for all."""
    cfg = config_of("policy=sglang", *POISSON, "baselines=[orca,sarathi_serve]")
    run, baselines = make_plans(cfg)
    assert run.engine.batch_size == 4096
    for name, plan in baselines.items():
        assert fingerprint(plan) == fingerprint(plan_of(name, *POISSON))
        assert "vLLM" in str(plan.assumed)
    assert baselines["sarathi_serve"].policy.budget == 2048
    stated = config_of("policy=sglang", *POISSON, "batch=64", "chunk=512", "baselines=[orca]")
    run, baselines = make_plans(stated)
    assert baselines["orca"].engine.batch_size == run.engine.batch_size == 64
    unfit = ["chunk=64", "baselines=[orca,vllm_v1]", "batch=128"]
    alone = r"^baseline vllm_v1: .*, or leave it out by baselines=\[orca\]$"
    with pytest.raises(UserError, match=alone):
        make_plans(config_of("policy=sglang", *POISSON, *unfit))
    # The cache that fills the memory is what vLLM leaves, beside the runs of any server.
    of_vllm = config_of("policy=vllm_v1", *POISSON, "batch=64", "chunk=512", "baselines=[orca]")
    others = make_plans(of_vllm)[1]
    assert baselines["orca"].engine.num_blocks == others["orca"].engine.num_blocks
    assert fingerprint(baselines["orca"]) == fingerprint(others["orca"])


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (("workload.rate=2",), 128),
        (("workload.rate=2", "cluster=replicas"), 256),
        (("workload.rate=2", "batch=4"), 128),
        (("workload.rate=20",), 1200),
        (("workload.rate=20", "workload=openchat_sharegpt4"), 1200),
        (("workload.users=64", "batch=8"), 256),
        ((), 64),
    ],
)
def test_there_are_enough_requests(settings: tuple[str, ...], number: int) -> None:
    assert config_of("executor=simulated", *settings).workload.num_requests == number


def test_settings_of_two_kinds_of_arrivals_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"workload\.rate=2 and workload\.users=3 are for different"
    ):
        plan_of("orca", *POISSON, "workload.users=3")


@pytest.mark.parametrize(("most_blocks", "is_cut"), [(100, True), (10_000_000, False)])
def test_a_cache_that_is_cut_to_the_most_blocks_says_so(
    most_blocks: int,
    is_cut: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_cache, "MOST_BLOCKS", most_blocks)
    small = (*SERVED[:2], "model=tiny", "workload.num_requests=2", "seq_len=64", "batch=2")
    cache = ("cache.num_blocks=auto", "cache.block_size=4096")
    assert main([*small, *cache, "baselines=[]", "tracking=none", f"output={tmp_path}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("cache.num_blocks=auto is cut to 100 blocks of 4096 tokens" in out) == is_cut
    assert ("is cut to" in out) == is_cut

"""Several processes that compute one model: tokens equal to one device's under every policy, what
each rank reads, when stages were idle, and what becomes of a rank that dies.

In float32 sums over ranks are taken in another order: tokens are equal while the two largest logits
differ by more than rounding, as those of random weights do.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from commands import running
from every_policy import MAX_LEN, POLICIES
from toy_executors import requests_with_tokens

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.ranks import group as groups
from sarathi_lab.executor.torch.ranks.signs import Sign, Watch
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.parts import Ranks
from sarathi_lab.model.sharded import load_part
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Orca, Sarathi, SarathiServe
from sarathi_lab.run import main

CPU = torch.device("cpu")
SPEC = replace(load_option("model", "tiny"), name="tiny of 4 layers", num_layers=4)
CACHE = {"block_size": 4, "batch_size": 4, "max_model_len": MAX_LEN}
LENGTHS = [(9, 3), (14, 2), (4, 4), (6, 1)]
LAYOUTS = [(2, 2), (1, 4), (1, 2), (2, 1)]  # ranks that answered nobody now speak for stages


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    """Started once, as that takes seconds; layouts of fewer leave some of them idle."""
    groups.group_of(4)
    yield
    groups.close()


def built(tensor=1, pipeline=1, spec=SPEC, checkpoint=None, timeout=300, **sizes):
    backend = TorchBackend(
        device="cpu",
        kernels="torch",
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        rank_timeout=timeout,
    )
    num_blocks = sizes.pop("num_blocks", 44 * pipeline)
    sizes = Sizes(num_blocks=num_blocks, **CACHE, **sizes)
    return backend.build(spec, checkpoint, sizes)


def served(executor, policy, lengths=LENGTHS, *, vocab_size=256, arrivals=None, **kwargs) -> Ledger:
    return serve(
        requests_with_tokens(lengths, vocab_size=vocab_size, arrivals=arrivals),
        EngineConfig(
            policy,
            num_blocks=executor.num_blocks,
            num_micro_batches=getattr(executor, "num_stages", 1),
            **CACHE,
            **kwargs,
        ),
        executor,
    )


def tokens(*args, **kwargs) -> list[list[int]]:
    return served(*args, **kwargs).requests().output_token_ids.tolist()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(built(), Orca())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_greedy_tokens_equal_one_devices_under_every_policy(layout, expected):
    """Under every policy in two ways: the parts and stages together, and one of the other layouts,
    which take turns, as what a rank computes follows from the batch and not from who made it.
    """
    executor = built(*layout)
    # prompts pass several ranks' layers at once
    names = [name for name, policy in POLICIES.items() if not policy.in_layers]
    own = LAYOUTS.index(layout)
    chosen = names[own - 1 :: len(LAYOUTS) - 1] if own else names
    found = {name: tokens(executor, POLICIES[name]) for name in chosen}
    assert {name for name, said in found.items() if said != expected} == set()


def test_prompts_that_pass_groups_of_layers_are_refused():
    with pytest.raises(UserError, match="moves prompts through groups of layers"):
        tokens(built(2, 1), POLICIES["layered_prefill"])


def test_swapped_blocks_are_moved_on_every_rank():
    policy, lengths = SarathiServe(chunk=8, watermark=0.0), [(9, 12)] * 5
    executor = built(2, 2, num_blocks=12, num_host_blocks=30)
    settings = {"preemption": "swap", "num_host_blocks": 30}
    ledger = served(executor, policy, lengths, **settings)
    assert ledger.iterations().num_swapped_blocks.sum() > 0
    expected = tokens(built(), policy, lengths)
    assert ledger.requests().output_token_ids.tolist() == expected


def test_cpp_computes_the_parts_too(expected):
    executor = TorchBackend(device="cpu", tensor_parallel=2, pipeline_parallel=2).build(
        SPEC, None, Sizes(num_blocks=72, **CACHE)
    )
    assert tokens(executor, Sarathi(chunk=8)) == expected


@pytest.mark.parametrize("layout", [(2, 2), (1, 2), (2, 1)])
def test_ranks_share_mixtures_of_experts(layout):
    mixture = load_option("model", "tiny-moe")
    for spec in (mixture, replace(mixture, shared_expert_size=24)):
        expected = tokens(built(spec=spec), Orca())
        assert tokens(built(*layout, spec), Sarathi(chunk=8)) == expected


@pytest.mark.parametrize(
    ("family", "is_fused"),
    [
        ("llama biases", False),
        ("llama linear rope, tied", False),
        ("gpt_neox", False),
        ("qwen3", False),
        ("mistral window", False),
        ("mixtral", False),
        ("mixtral", True),
        ("qwen2_moe", False),
    ],
)
def test_a_checkpoint_is_read_by_parts(family, is_fused, tmp_path):
    """Every part holds the slices of what one device loads, and together they say the same; with
    four ranks and two KV heads each head is there twice.
    """
    make_checkpoint(family, tmp_path, is_fused=is_fused)
    spec, checkpoint = AutoModel(str(tmp_path)).resolve("unused")
    whole = load_model(spec, checkpoint, CPU, torch.float32, seed=0)
    for ranks in (Ranks(2, 2), Ranks(4, 1), Ranks(1, 2)):
        for rank in range(ranks.num_devices):
            part = ranks.part(rank)
            model = load_part(spec, checkpoint, part, None, CPU, torch.float32, seed=0)
            assert_slices(model, whole, spec)
    lengths = [(length, 3) for length, _ in LENGTHS]
    expected = tokens(built(spec=spec, checkpoint=checkpoint), Orca(), lengths, vocab_size=97)
    executor = built(2, 2, spec, checkpoint)
    assert tokens(executor, Sarathi(chunk=8), lengths, vocab_size=97) == expected


def assert_slices(model, whole, spec) -> None:
    part, seen = model.part, set()
    for name, full in whole.named_parameters():
        for own in part.names(name, spec):
            seen.add(own)
            cuts = part.cuts(name, spec)
            if cuts is not None:
                full = torch.cat([full.narrow(cuts[0], a, b - a) for a, b in cuts[1]], cuts[0])
            adds = part.tensor == 0 or not name.endswith(("out_proj.bias", "ffn_down.bias"))
            assert torch.equal(model.get_parameter(own), full if adds else torch.zeros_like(full))
    assert seen == {name for name, _ in model.named_parameters()}


def test_parts_of_random_weights_are_slices_of_one_devices():
    whole = load_model(SPEC, None, CPU, torch.float32, seed=3)
    ranks = Ranks(4, 2)
    for rank in range(ranks.num_devices):
        model = load_part(SPEC, None, ranks.part(rank), None, CPU, torch.float32, seed=3)
        assert_slices(model, whole, SPEC)


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_a_stage_has_its_products_in_8_bits(weights):
    spec = replace(SPEC, weight_dtype=weights)
    whole = load_model(spec, None, CPU, torch.float32, seed=3)
    last = load_part(spec, None, Ranks(1, 2).part(1), None, CPU, torch.float32, seed=3)
    own, its = last.layers[-1].ffn_down, whole.layers[-1].ffn_down
    assert type(own) is type(its)
    assert torch.equal(own.weight.view(torch.uint8), its.weight.view(torch.uint8))
    assert type(last.lm_head) is type(whole.lm_head)


def test_stages_are_busy_or_idle_and_bubbles_say_which():
    """What is measured keeps the simulated pipeline's rules: no stage begins a micro-batch before
    the one before it, or before it is done with the last.
    """
    executor = built(1, 4)
    ledger = served(executor, Orca(), [(9, 5)] * 12)
    stages, bubbles = ledger.stages(), ledger.bubbles()
    assert set(bubbles.cause) <= {"PB1", "PB2", "PB3", "starved"}
    assert {"PB2", "PB3"} <= set(bubbles.cause)
    for stage, spans in stages.groupby("stage"):
        assert (spans.start.to_numpy()[1:] >= spans.end.to_numpy()[:-1]).all()
        gaps = bubbles[bubbles.stage == stage]
        busy, idle = (spans.end - spans.start).sum(), (gaps.end - gaps.start).sum()
        assert busy + idle == pytest.approx(spans.end.max() - spans.start.min())
    for _, chain in stages.groupby("iteration"):
        assert (chain.start.to_numpy()[1:] >= chain.end.to_numpy()[:-1]).all()
    assert np.abs(executor.clock_offsets).max() == 0.0  # one machine


def test_a_gap_without_requests_is_nobodys_bubble():
    ledger = served(built(1, 2), Orca(), [(9, 2), (9, 2)], arrivals=[0.0, 0.5])
    bubbles = ledger.bubbles()
    waited = bubbles[bubbles.end - bubbles.start > 0.2]
    assert set(waited.cause) == {"starved"}
    assert len(waited) == 2  # one a stage
    assert ledger.requests().first_scheduled_time.iloc[1] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel": 3}, "executor.pipeline_parallel=3 does not divide the 4 layers"),
        ({"tensor_parallel": 3}, "executor.tensor_parallel=3 does not divide the 4 heads"),
        ({"tensor_parallel": 0}, "executor.tensor_parallel=0 is below 1"),
        ({"tensor_parallel": 2, "profile": "operations"}, "looks into one device, not 2 x 1"),
        ({"tensor_parallel": 2, "weights": "fp8"}, "use executor.pipeline_parallel"),
        ({"tensor_parallel": 2, "rank_timeout": 0}, "executor.rank_timeout=0 is below 1"),
        ({"rank_timeout": 9}, "executor.rank_timeout=9 is for several ranks, not one device"),
    ],
)
def test_what_does_not_come_apart_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        TorchBackend(device="cpu", kernels="torch", **settings).check(SPEC, 100)


def test_a_task_that_looks_into_a_device_wants_one(tmp_path, capsys):
    args = ["task=calibrate", "device=cpu", "executor.tensor_parallel=2", f"output={tmp_path}"]
    assert main(["model=tiny", "tracking=none", *args]) == 2
    assert "looks into one device, not 2" in capsys.readouterr().err


def test_a_rank_that_dies_is_named_and_the_next_run_goes_on(tmp_path, capsys, expected):
    executor = built(2, 2)
    victim = executor.group.processes[3]
    os.kill(victim.pid, signal.SIGKILL)
    begun = time.monotonic()
    words = r"rank 3 \(stage 1 of 2, part 1 of 2 of its layers\) was killed by signal 9; the other"
    with pytest.raises(RunError, match=words):
        tokens(executor, Orca())
    assert time.monotonic() - begun < 10
    settings = ["model=tiny", "batch=3", "seq_len=32", "pd_ratio=7", "device=cpu", "baselines=[]"]
    settings += ["workload.num_requests=6", "tracking=none", f"output={tmp_path}", "repeat=1"]
    assert main([*settings, "chunk=8,16", "executor.pipeline_parallel=2", "-m"]) == 0
    assert len(list(tmp_path.rglob("bubbles.parquet"))) == 2
    assert "2 threads" not in capsys.readouterr().out  # a stage has a share of the cores


def test_a_rank_that_hangs_is_named():
    executor = built(1, 2, timeout=77)
    group = executor.group
    assert group.signs.timeout == 77
    group.signs.timeout = 2
    os.kill(group.processes[1].pid, signal.SIGSTOP)
    words = r"rank 1 \(stage 1 of 2\) has given no sign of life for 2 s; .* executor.rank_timeout=2"
    with pytest.raises(RunError, match=words):
        tokens(executor, Orca())


def test_who_hangs_is_told_from_who_is_slow_or_waits():
    """Rank 0 waits in all of it, 1 waits for 2."""
    watch, clock = Watch(), count()

    def looks(number: int, *, of_2: dict[str, object], counts_cpu: bool = True) -> list[bool]:
        found = []
        for _ in range(number):
            beat = next(clock)
            waiting, own = Sign(beat, 7, 1.0, True), {"beat": beat, "cpu_time": 1.0, **of_2}
            two = Sign(
                exchanges=6, waits=False, **{k: v() if callable(v) else v for k, v in own.items()}
            )
            signs = {0: waiting, 1: waiting, 2: two}
            found.append(watch.is_stuck(signs, 3, counts_cpu=counts_cpu))
        return found

    slow = {"cpu_time": partial(next, count(2))}
    assert not any(looks(9, of_2=slow))
    assert looks(3, of_2=slow, counts_cpu=False) == [False, False, True]  # a host that polls
    watch.forget()
    assert looks(4, of_2={}) == [False, False, False, True]
    assert watch.culprit() == (2, "has made no progress")
    watch.forget()
    assert looks(4, of_2={"beat": 0})[-1]
    assert watch.culprit() == (2, "has given no sign of life")


def test_torchrun_starts_the_ranks(tmp_path):
    settings = ["model=tiny", "batch=3", "seq_len=32", "pd_ratio=7", "device=cpu", "baselines=[]"]
    settings += ["workload.num_requests=6", "tracking=none", f"output={tmp_path}", "chunk=8"]
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "quickened_run")
    with running(*settings, "executor.tensor_parallel=2", module=torchrun) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(list(tmp_path.rglob("run.json"))) == 1

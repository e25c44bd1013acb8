"""Several processes that compute one model: tokens equal to one device's under every policy, what
each rank reads, when stages were idle, and the end of a lost rank.

In float32 sums over ranks are taken in another order: tokens are equal while the two largest logits
differ by more than rounding, as those of random weights do. One group of four ranks serves most
tests, as processes take seconds to start.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace

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
from sarathi_lab.extensions.ranks import group as groups
from sarathi_lab.extensions.ranks.sharded import Ranks, load_part
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Orca, Sarathi, SarathiServe
from sarathi_lab.run import main

CPU = torch.device("cpu")
SPEC = replace(load_option("model", "tiny"), name="tiny of 4 layers", num_layers=4)
CACHE = {"block_size": 4, "batch_size": 4, "max_model_len": MAX_LEN}
LENGTHS = [(9, 3), (14, 2), (4, 4), (6, 1)]
TINY = ["model=tiny", "batch=3", "seq_len=32", "pd_ratio=7", "device=cpu", "baselines=[]"]
TINY += ["workload.num_requests=6", "tracking=none"]


@pytest.fixture(scope="module", autouse=True)
def ranks():
    yield
    groups.close()


def built(tensor=1, pipeline=1, spec=SPEC, checkpoint=None, timeout=300, kernels="torch", **sizes):
    backend = TorchBackend(
        device="cpu",
        kernels=kernels,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        rank_timeout=timeout,
    )
    num_blocks = sizes.pop("num_blocks", 44 * pipeline)
    return backend.build(spec, checkpoint, Sizes(num_blocks=num_blocks, **CACHE, **sizes))


def served(executor, policy, lengths=LENGTHS, *, vocab_size=256, arrivals=None, **kwargs) -> Ledger:
    stages = getattr(executor, "num_stages", 1)
    engine = EngineConfig(policy, num_blocks=executor.num_blocks, num_micro_batches=stages, **CACHE)
    requests = requests_with_tokens(lengths, vocab_size=vocab_size, arrivals=arrivals)
    return serve(requests, replace(engine, **kwargs), executor)


def tokens(*args, **kwargs) -> list[list[int]]:
    return served(*args, **kwargs).requests().output_token_ids.tolist()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(built(), Orca())


@pytest.mark.parametrize(
    ("layout", "policies"),
    [
        ((2, 2), ("orca", "sarathi")),
        ((1, 4), ("sarathi_serve",)),
        ((4, 1), ("prefill_first",)),
    ],
    ids=["2x2", "1x4", "4x1"],
)
def test_greedy_tokens_equal_one_devices(layout, policies, expected):
    """Whole prompts, chunks beside decodes and decodes alone: what a rank computes follows from the
    batch, not from the policy.
    """
    executor = built(*layout)
    found = {name: tokens(executor, POLICIES[name]) for name in policies}
    assert {name for name, some in found.items() if some != expected} == set()


def test_swapped_blocks_are_moved_on_every_rank():
    policy, lengths = SarathiServe(chunk=8, watermark=0.0), [(9, 12)] * 5
    executor = built(2, 2, num_blocks=12, num_host_blocks=30)
    ledger = served(executor, policy, lengths, preemption="swap", num_host_blocks=30)
    assert ledger.iterations().num_swapped_blocks.sum() > 0
    assert ledger.requests().output_token_ids.tolist() == tokens(built(), policy, lengths)


def test_cpp_computes_the_parts_too(expected):
    assert tokens(built(2, 2, kernels="auto"), Sarathi(chunk=8)) == expected


@pytest.mark.parametrize(
    ("family", "is_fused", "is_served"),
    [
        ("llama biases", False, False),
        ("llama linear rope, tied", False, False),
        ("gpt_neox", False, True),
        ("qwen3", False, False),
        ("mixtral", True, False),
        ("qwen2_moe", False, False),
    ],
)
def test_a_checkpoint_is_read_by_parts(family, is_fused, is_served, tmp_path):
    """Every part holds the slices of what one device loads, and together they compute the same;
    with four ranks and two KV heads each head is there twice.
    """
    make_checkpoint(family, tmp_path, is_fused=is_fused)
    spec, checkpoint = AutoModel(str(tmp_path)).resolve("unused")
    assert_slices([Ranks(2, 2), Ranks(4, 1), Ranks(1, 2)], spec, checkpoint)
    if is_served:
        lengths = [(length, 3) for length, _ in LENGTHS]
        one, four = built(spec=spec, checkpoint=checkpoint), built(2, 2, spec, checkpoint)
        expected = tokens(one, Orca(), lengths, vocab_size=97)
        assert tokens(four, Sarathi(chunk=8), lengths, vocab_size=97) == expected


def test_parts_of_random_weights_are_slices_of_one_devices():
    assert_slices([Ranks(4, 2)], SPEC, None)


def assert_slices(layouts, spec, checkpoint) -> None:
    whole = load_model(spec, checkpoint, CPU, torch.float32, seed=3)
    for part in [ranks.part(rank) for ranks in layouts for rank in range(ranks.num_devices)]:
        model, seen = load_part(spec, checkpoint, part, None, CPU, torch.float32, seed=3), set()
        for name, full in whole.named_parameters():
            for local in part.names(name, spec):
                seen.add(local)
                if (cuts := part.cuts(name, spec)) is not None:
                    full = torch.cat([full.narrow(cuts[0], a, b - a) for a, b in cuts[1]], cuts[0])
                adds = part.tensor == 0 or not name.endswith(("out_proj.bias", "ffn_down.bias"))
                expected = full if adds else torch.zeros_like(full)
                assert torch.equal(model.get_parameter(local), expected)
        assert seen == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_a_stage_has_its_products_in_8_bits(weights):
    spec = replace(SPEC, weight_dtype=weights)
    whole = load_model(spec, None, CPU, torch.float32, seed=3)
    last = load_part(spec, None, Ranks(1, 2).part(1), None, CPU, torch.float32, seed=3)
    down, expected = last.layers[-1].ffn_down, whole.layers[-1].ffn_down
    assert type(down) is type(expected)
    assert torch.equal(down.weight.view(torch.uint8), expected.weight.view(torch.uint8))
    assert type(last.lm_head) is type(whole.lm_head)


def test_stages_are_busy_or_idle_and_bubbles_have_causes():
    """Measured stages keep the simulated pipeline's rules: none begins a micro-batch before the
    stage before ends it, or before it ends the last one. A gap without requests is "starved".
    """
    ledger = served(built(1, 4), Orca(), [(9, 5)] * 12 + [(9, 2)], arrivals=[0.0] * 12 + [1.5])
    stages, bubbles = ledger.stages(), ledger.bubbles()
    assert {"PB2", "PB3"} <= set(bubbles.cause) <= {"PB1", "PB2", "PB3", "starved"}
    for stage, spans in stages.groupby("stage"):
        assert (spans.start.to_numpy()[1:] >= spans.end.to_numpy()[:-1]).all()
        gaps = bubbles[bubbles.stage == stage]
        busy, idle = (spans.end - spans.start).sum(), (gaps.end - gaps.start).sum()
        assert busy + idle == pytest.approx(spans.end.max() - spans.start.min())
    for _, chain in stages.groupby("iteration"):
        assert (chain.start.to_numpy()[1:] >= chain.end.to_numpy()[:-1]).all()
    waited = bubbles[bubbles.end - bubbles.start > 0.3]
    assert set(waited.cause) == {"starved"}
    assert len(waited) == 4  # one per stage
    assert ledger.requests().first_scheduled_time.iloc[-1] == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel": 3}, "executor.pipeline_parallel=3 does not divide the 4 layers"),
        ({"tensor_parallel": 3}, "executor.tensor_parallel=3 does not divide the 4 heads"),
        ({"tensor_parallel": 0}, "executor.tensor_parallel=0 is below 1"),
        ({"tensor_parallel": 2, "profile": "operations"}, "looks into one device, not 2 x 1"),
        ({"tensor_parallel": 2, "weights": "fp8"}, "use executor.pipeline_parallel"),
        ({"tensor_parallel": 2, "rank_timeout": 0}, "executor.rank_timeout=0 is below 1"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        TorchBackend(**{"device": "cpu", **settings}).check(SPEC, 100)


def test_a_killed_rank_is_named_and_the_next_run_starts_others(tmp_path, capsys):
    executor = built(2, 2)
    processes = executor.group.processes
    os.kill(processes[2].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"^rank 3 was killed by signal 9; the other ranks were"):
        tokens(executor, Orca())
    assert all(process.returncode is not None for process in processes)
    settings = [*TINY, f"output={tmp_path}", "chunk=8"]
    assert main([*settings, "executor.pipeline_parallel=2"]) == 0
    assert len(list(tmp_path.rglob("bubbles.parquet"))) == 1
    assert "2 threads" not in capsys.readouterr().out  # a stage has a share of the cores


def test_a_rank_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr(groups, "GRACE", 0.1)
    executor = built(1, 2, timeout=2)
    processes = executor.group.processes
    os.kill(processes[0].pid, signal.SIGSTOP)
    words = r"did not answer for 2 s; .* executor.rank_timeout=2 .*; the other ranks were ended"
    with pytest.raises(RunError, match=words):
        tokens(executor, Orca())
    assert all(process.returncode is not None for process in processes)


def test_ranks_that_torchrun_starts_run_the_command(tmp_path, monkeypatch):
    """Rank 0 here and rank 1 in a process, with the environment that torchrun gives them."""
    groups.close()
    monkeypatch.setattr(groups, "_current", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**common, "WORLD_SIZE": "2", "RANK": one, "LOCAL_RANK": one} for one in "01"]
    args = [*TINY, f"output={tmp_path}", "chunk=8", "executor.tensor_parallel=2"]
    with running(*args, **ranks[1]) as other, monkeypatch.context() as environment:
        for name, value in ranks[0].items():
            environment.setenv(name, value)
        assert main(args) == 0
        assert other.wait(60) == 0
    assert len(list(tmp_path.rglob("run.json"))) == 1

"""Tensor and pipeline parallelism: a device's share of the work by hand, and runs on many simulated
devices.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
from simulated import LINKED, SPEC, TOY, batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cost_model import CostModel, make_cost_model
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.simulated.kernel_times import AttentionTimes, all_reduce_time, matmul_time
from sarathi_lab.executor.simulated.kv_capacity import check_room
from sarathi_lab.results.load import load_summary
from sarathi_lab.run import main

SPLIT = dataclasses.replace(SPEC, num_layers=4, num_heads=2, num_kv_heads=2, head_size=2)
BATCH = batch_of(
    chunk=2, start=1, decodes=1, context=5
)  # 3 tokens of 2 elements of 2 bytes: 12 bytes


def cost(tensor: int = 1, pipeline: int = 1, **changes: float) -> CostModel:
    hardware = dataclasses.replace(LINKED, **changes)
    return make_cost_model("analytic", SPLIT, hardware, 2, Parallel(tensor, pipeline))


def test_two_devices_a_layer_halve_columns_rows_and_heads():
    one, two = cost().operation_times(BATCH), cost(tensor=2).operation_times(BATCH)
    half = {"qkv_proj": (2, 6), "out_proj": (2, 2), "ffn_up": (2, 2), "ffn_down": (2, 2)}
    whole = {"qkv_proj": (2, 12), "out_proj": (4, 2), "ffn_up": (2, 4), "ffn_down": (4, 2)}
    for name in half:
        assert two[name] == pytest.approx(4 * matmul_time(3, *half[name], LINKED, 2))
        assert one[name] == pytest.approx(4 * matmul_time(3, *whole[name], LINKED, 2))
    assert two["lm_head"] == matmul_time(1, 2, 5, LINKED, 2)
    device = AttentionTimes(LINKED, 1, 1, head_size=2, kv_head_bytes=4)
    assert two["prefill_attention"] == pytest.approx(4 * device.prefill([(1, 2)]))
    assert two["decode_attention"] == pytest.approx(4 * device.decode(1, 5))
    launch = LINKED.kernel_launch
    for name, calls in {"activation": 4, "kv_write": 4, "sampling": 1}.items():
        assert two[name] - calls * launch == pytest.approx((one[name] - calls * launch) / 2)
    assert two["norms"] == one["norms"]  # every device has all of the hidden states


def test_devices_that_share_a_layer_split_heads_columns_and_rows():
    """As Megatron-LM does; the router of a mixture whole, its shared expert as a dense block."""
    mixture = dataclasses.replace(load_option("model", "tiny-moe"), shared_expert_size=24)
    for spec in (load_option("model", "13b"), mixture):
        operations = AnalyticOperations(spec, LINKED, 2, Parallel(2))
        half = dataclasses.replace(
            spec,
            num_heads=spec.num_heads // 2,
            num_kv_heads=spec.num_kv_heads // 2,
            ffn_size=spec.ffn_size // 2,
            shared_expert_size=spec.shared_expert_size // 2,
        )
        for whole, own in zip(spec.layer_linears, half.layer_linears, strict=True):
            assert operations.shard_shape(whole) == (own.in_features, own.out_features)
    assert Experts(mixture, LINKED, 2, tensor=2).shape.expert_size == half.ffn_size


def test_small_all_reduces_are_sent_to_all_and_large_ones_summed_by_parts():
    gpu = dataclasses.replace(LINKED, two_shot_latency=1.0, link_step=0.125)
    rate = 5e5
    assert all_reduce_time(1000, 4, gpu) == pytest.approx(0.25 + 2 * 0.125 + 3 * 1000 / rate)
    assert all_reduce_time(10**7, 4, gpu) == pytest.approx(0.5 + 1.0 + 1.5 * 10**7 / rate)
    shared = dataclasses.replace(gpu, link_sharing=0.5)
    assert all_reduce_time(1000, 2, shared) == all_reduce_time(1000, 2, gpu)
    assert all_reduce_time(1000, 4, shared) == pytest.approx(0.5 + 3 * 1000 / (rate / 2))
    assert all_reduce_time(1000, 1, gpu) == 0.0


def test_all_reduce_and_send_by_hand():
    times = cost(tensor=2, pipeline=2).operation_times(BATCH)
    assert times["all_reduce"] == pytest.approx(4 * 2 * (0.25 + 12 / 5e5))
    # Each device sends 6 of the 12 bytes to the other node, and gets the other 6 from its neighbour
    # there.
    assert times["send"] == pytest.approx(0.25 + 6 / 5e4 + 0.25 + 6 / 5e5)
    assert cost(pipeline=4).operation_times(BATCH)["send"] == pytest.approx(3 * (0.25 + 12 / 5e4))
    assert not {"all_reduce", "send"} & set(cost().operation_times(BATCH))


def test_stages_and_sends_are_the_iteration():
    layouts = ((1, 1), (2, 1), (1, 2), (2, 4))
    batches = (BATCH, batch_of(chunk=5), batch_of(decodes=3, context=7))
    for (tensor, pipeline), batch in product(layouts, batches):
        spread = cost(tensor, pipeline)
        stages = spread.stage_times(batch)
        assert len(stages) == pipeline
        iteration = sum(stages) + (pipeline - 1) * spread.send_time(batch)
        assert spread.iteration_time(batch) == pytest.approx(iteration)
        assert sum(spread.operation_times(batch).values()) == pytest.approx(iteration)


def test_the_last_stage_has_the_output_head_and_the_overhead():
    first, second = cost(pipeline=2).stage_times(BATCH)
    times = cost(pipeline=2).operation_times(BATCH)
    final_norm = 1.0 + 3 * 4 * 2 * 2 / 1e9
    assert first == pytest.approx(2 * cost().layer_time(BATCH))
    assert second - first == pytest.approx(
        times["lm_head"] + times["sampling"] + final_norm + 0.125
    )


@pytest.mark.parametrize(
    ("field", "value", "added"),
    [
        ("link_bytes_per_second", 5e5, 4 * 2 * 12 / 5e5 + 6 / 5e5),
        ("network_bytes_per_second", 5e4, 6 / 5e4),
        ("link_efficiency", 0.25, 4 * 2 * 12 / 5e5 + 6 / 5e5 + 6 / 5e4),
        ("link_latency", 1.25, 4 * 2 + 2),
    ],
)
def test_every_figure_of_many_devices_has_an_effect(field, value, added):
    before, after = (
        spread.iteration_time(BATCH) for spread in (cost(2, 2), cost(2, 2, **{field: value}))
    )
    assert after - before == pytest.approx(added)


def test_the_host_shows_where_the_device_is_not_much_slower():
    device = cost().layer_time(BATCH)
    for host in (0.01 * device, device, 100 * device):
        slowed = cost(2, 2, layer_host_time=host)
        layer = (cost(2, 2).layer_time(BATCH) ** 3 + host**3) ** (1 / 3)
        assert slowed.layer_time(BATCH) == pytest.approx(layer)
        assert slowed.iteration_time(BATCH) == pytest.approx(
            sum(slowed.operation_times(BATCH).values())
        )
        assert slowed.stage_times(BATCH)[0] == pytest.approx(2 * layer)


def test_unknown_links_are_refused_only_where_they_are_needed():
    make_cost_model("analytic", SPLIT, TOY, 2)
    with pytest.raises(
        UserError,
        match=r"hardware toy has no link_bytes_per_second.* executor\.tensor_parallel above 1",
    ):
        make_cost_model("analytic", SPLIT, TOY, 2, Parallel(tensor=2))
    with pytest.raises(
        UserError, match=r"network_bytes_per_second.* executor\.pipeline_parallel above 1"
    ):
        make_cost_model("analytic", SPLIT, TOY, 2, Parallel(pipeline=2))


def test_memory_is_that_of_all_devices_and_the_message_names_settings_that_fit():
    spec, gpu = load_option("model", "gpt3-175b"), load_option("hardware", "a100")
    kv_tokens = 8 * 27 * 4096
    check_room(spec, gpu, 2, Parallel(8, 8), kv_tokens)
    mean = replace(gpu, memory_bytes=1.01 * spec.weight_bytes(2) / 64)
    with pytest.raises(UserError, match="each stage as the largest"):
        check_room(spec, mean, 2, Parallel(8, 8))
    with pytest.raises(
        UserError,
        match=r"needs 357\.8 GB for weights .* and .* 16 x a100 is 1362 GB; .*take 24 devices",
    ) as e:
        check_room(spec, gpu, 2, Parallel(2, 8), kv_tokens)
    named = re.search(r"tensor_parallel=(\d+) executor\.pipeline_parallel=(\d+)", str(e.value))
    assert named is not None
    fitting = Parallel(*map(int, named.groups()))
    # 350 GB and 522 for each stage's micro-batch in n x 85: a stage needs 8 devices for its cache.
    assert fitting == Parallel(8, 3)
    # a cache for each stage's micro-batch
    check_room(spec, gpu, 2, fitting, kv_tokens * fitting.pipeline // 8)


def test_no_layout_of_far_more_devices_than_a_model_fills_is_named():
    spec = replace(load_option("model", "llama3.1-8b"), num_layers=5)  # stages: one, or five
    small = replace(load_option("hardware", "a100"), memory_bytes=spec.weight_bytes(2) / 10)
    check_room(spec, small, 2, Parallel(8, 5))
    with pytest.raises(UserError, match=r"take executor\.weights=fp8 with .*=8, ") as refused:
        check_room(spec, small, 2)
    assert "pipeline_parallel=5" not in str(refused.value)


# -- through the runner ----------------------------------------------------------------------------

LARGE = ["executor=simulated", "tracking=none", "model=gpt3-175b", "hardware=a100"]
LARGE += ["workload=zipf", "batch=4", "workload.num_requests=100"]
SPREAD = ["executor.tensor_parallel=8", "executor.pipeline_parallel=8"]


@pytest.fixture(scope="module")
def pipeline_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    assert main([*LARGE, *SPREAD, f"output={folder}", "window.warmup=0", "baselines=[orca]"]) == 0
    (run,) = (path.parent for path in folder.rglob("run.json") if "baselines" not in path.parts)
    return run


def test_a_run_on_a_pipeline_leaves_its_bubbles(pipeline_run):
    summary = load_summary(pipeline_run)
    bubbles = pd.read_parquet(pipeline_run / "bubbles.parquet")
    iterations = pd.read_parquet(pipeline_run / "iterations.parquet")
    assert set(bubbles.stage) <= set(range(8))
    idle = (bubbles.end - bubbles.start).sum() / 8
    assert summary["busy_time"] == pytest.approx(iterations.busy.sum())
    assert summary["bubble_fraction"] == pytest.approx(idle / (idle + summary["busy_time"]))
    assert (
        summary["bubble_time_p50"]
        == pd.read_parquet(pipeline_run / "requests.parquet").bubble_time.median()
    )


def test_stages_are_compared_with_their_share_of_the_peaks(pipeline_run):
    summary = load_summary(pipeline_run)
    assert summary["peak_flops_per_second"] == 64 * 312e12
    assert summary["time_over_roofline"] > 1
    assert 0 < summary["mfu"] < 1
    assert 0 < summary["mbu"] < 1
    assert summary["busy_time"] < summary["duration"]  # iterations overlap, stages don't
    assert summary["decode_speedup"] > 1


def test_the_names_of_a_pipeline_are_defined_in_the_metrics_page(pipeline_run):
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
    names = {
        re.sub(r"_(p\d+|mean)(_vs_\w+)?$|_vs_\w+$", "", name) for name in load_summary(pipeline_run)
    }
    names |= set(pd.read_parquet(pipeline_run / "bubbles.parquet"))
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_degrees_above_the_kv_heads_copy_them():
    """With one KV head and two devices each has all of it: its projection, cache and reading."""
    one_head = dataclasses.replace(SPLIT, num_kv_heads=1)
    pair = Parallel(2)
    assert pair.kv_heads(one_head) == 1
    assert pair.cache_bytes_per_token(one_head, 2) == one_head.kv_bytes_per_token(2)
    operations = AnalyticOperations(one_head, LINKED, 2, pair)
    (qkv,) = (one for one in one_head.layer_linears if one.name == "qkv_proj")
    assert operations.shard_shape(qkv) == (2, 2 + 2 * 2)  # a head's queries; keys, values
    device = AttentionTimes(LINKED, 1, 1, head_size=2, kv_head_bytes=4)
    assert operations.attention_times(BATCH)[1] == device.decode(1, 5)
    alone = AnalyticOperations(one_head, LINKED, 2)
    written = operations.times("layer", 3)["kv_write"]
    assert written == pytest.approx(alone.times("layer", 3)["kv_write"])
    # Two devices have twice the memory and hold the cache twice.
    weights, token_bytes = pair.device_weight_bytes(one_head, 2), one_head.kv_bytes_per_token(2)
    gpu = dataclasses.replace(LINKED, memory_bytes=weights + 10 * token_bytes)
    check_room(one_head, gpu, 2, pair, 10)
    with pytest.raises(UserError, match="memory of 2 x toy"):
        check_room(one_head, gpu, 2, pair, 11)


def test_a_hybrid_has_room_for_states_beside_copied_heads():
    qwen = load_option("model", "qwen3-next-80b-a3b")  # two KV heads
    backend = SimulatedBackend(load_option("hardware", "h100"), tensor_parallel=4)
    backend.check(qwen, 100_000)
    assert backend.state_tokens(qwen) == qwen.state_tokens(2) // 2
    assert backend.predictor(qwen)(batch_of(decodes=8, context=1000)) > 0


@pytest.mark.parametrize(
    ("tensor", "valid"), [(6, "1, 2, 4, 8, 12, 24"), (3, "1, 2, 4, 8, 12, 16")]
)
def test_odd_degrees_are_refused(tensor, valid):
    heads = 24 if tensor == 6 else 48
    spec = dataclasses.replace(SPEC, num_heads=heads, num_kv_heads=4)
    with pytest.raises(UserError, match=rf"={tensor} neither divides the 4 KV heads .*of {valid}"):
        Parallel(tensor).check(spec)

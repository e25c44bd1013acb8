"""Ledger, formulas and metrics against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from helpers import ScriptedExecutor, requests_of, scheduler_for
from simulated import TWO_LAYERS

from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.model.roofline import Peaks, roofline_time
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import RequestLevel, Sarathi, SarathiServe
from sarathi_lab.results.decode_cost import (
    DecodeCost,
    fullest_hybrid,
    measure_decode_cost,
)
from sarathi_lab.results.metrics import (
    add_costs,
    compare,
    device_idle_fraction,
    replay_caution,
    summarise,
)

PEAKS = Peaks(flops_per_second=1000.0, bytes_per_second=100.0, source="by hand")


def run(policy, requests, executor=None, **kwargs):
    ledger = Ledger()
    run_engine(requests, scheduler_for(policy, **kwargs), executor or ScriptedExecutor(), ledger)
    return add_costs(ledger.iterations(), TWO_LAYERS, 2, PEAKS), ledger.requests()


def test_spec_formulas_by_hand():
    assert TWO_LAYERS.num_linear_params == 2 * 12 * 4**2
    assert TWO_LAYERS.kv_bytes_per_token(2) == 2 * 2 * 4 * 2
    assert TWO_LAYERS.num_params == 384 + 2 * 40
    # One chunk of 3 tokens from 0: pairs 1+2+3 = 6, reads 3 tokens of KV, emits one token.
    counts = {"num_prefill_tokens": 3, "num_decode_tokens": 0, "prefill_kv_tokens": 3}
    counts |= {"decode_kv_tokens": 0, "prefill_query_key_pairs": 6, "num_emits": 1}
    row = pd.Series(counts)
    assert TWO_LAYERS.flops(row) == 2 * 384 * 3 + 2 * 40 + 4 * 2 * 4 * 6
    assert TWO_LAYERS.weight_read_bytes(row, 2) == (384 + 40) * 2
    assert TWO_LAYERS.min_bytes(row, 2) == 848 + 3 * 32 + 3 * 32
    expected = max((2304 + 80 + 192) / 1000, 1040 / 100)
    assert roofline_time(TWO_LAYERS, row, 2, PEAKS) == pytest.approx(expected)


def test_paper_13b_has_the_papers_sizes():
    sizes = {"vocab_size": 32000, "head_size": 128, "gated_ffn": False}
    paper = ModelSpec("13b", 40, 5120, 40, 40, 4 * 5120, **sizes)
    assert paper.num_linear_params == 40 * 12 * 5120**2 == 12_582_912_000
    assert paper.kv_bytes_per_token(2) == 819_200


def test_whole_and_chunked_prefill_read_kv_as_the_triangle_says():
    whole, _ = run(SarathiServe(chunk=64), requests_of((16, 1)))
    chunked, _ = run(SarathiServe(chunk=4), requests_of((16, 1)))
    assert whole.prefill_kv_tokens.sum() == 16
    assert chunked.prefill_kv_tokens.tolist() == [4, 8, 12, 16]  # N(N+1)/2 = 10 chunk loads of 4
    assert whole.flops.sum() == chunked.flops.sum()


def test_summary_of_request_level_by_hand():
    # Iterations of 1 s: prefill of both, then decodes: request 0 has 3 tokens, request 1 has 2.
    iterations, requests = run(RequestLevel(), requests_of((8, 3), (4, 2)))
    summary = summarise(iterations, requests, PEAKS, None)
    expected = {
        "num_iterations": 3,
        "duration": 3.0,
        "throughput": (8 + 3 + 4 + 2) / 3,
        "output_throughput": 5 / 3,
        "decode_time_alone": 2 / 3,  # two decode-only seconds, three decodes
        "decode_throughput": 3 / 2,
        "kv_reread_factor": 1.0,
        "kv_read_bytes": (12 + (9 + 5) + 10) * 32,
        "ttft_p50": 1.0,
        "tbt_p50": 1.0,
        "tbt_p99": 1.0,
        "latency_p50": 2.5,  # 3 s and 2 s
        "time_over_roofline_prefill": 1 / iterations.roofline[0],
        "time_over_roofline_decode": 2 / iterations.roofline[1:].sum(),
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    absent = {"decode_time_marginal", "decode_speedup", "time_over_roofline_hybrid"}
    assert not absent & summary.keys()


def test_summary_counts_hybrid_decodes_at_their_marginal_time():
    # chunk 4, batch 2: prefill of request 0 whole, hybrid, … each 1 s.
    policy = Sarathi(chunk=4, min_decodes=0)
    iterations, requests = run(policy, requests_of((4, 3), (4, 1)), batch_size=2)
    assert iterations.num_prefill_tokens.tolist() == [4, 3, 1]
    assert iterations.num_decode_tokens.tolist() == [0, 1, 1]
    cost = DecodeCost(alone=0.8, marginal=0.2, num_decodes=1, num_chunk_tokens=3)
    summary = summarise(iterations, requests, PEAKS, cost)
    assert summary["decode_throughput"] == pytest.approx(2 / (2 * 0.2))
    assert summary["decode_speedup"] == pytest.approx(4.0)
    assert summary["time_over_roofline_prefill"] == pytest.approx(1 / iterations.roofline[0])
    assert summary["time_over_roofline_hybrid"] == pytest.approx(2 / iterations.roofline[1:].sum())
    assert "time_over_roofline_decode" not in summary
    noise = summarise(iterations, requests, PEAKS, replace(cost, marginal=-0.1))
    assert noise["decode_time_marginal"] == -0.1
    assert not {"decode_speedup", "decode_throughput"} & noise.keys()


@pytest.mark.parametrize("num_blocks", [6, 9, 100])
def test_a_probe_is_shortened_to_what_the_cache_holds(num_blocks):
    """Median contexts of a run under memory pressure may never have been in the cache together."""
    executor = ScriptedExecutor()
    sizes = {"prefill_tokens": 10, "start": 14, "emits": True, "num_decodes": 3, "context": 20}
    measure_decode_cost(executor, sizes, num_blocks=num_blocks, block_size=4, seconds=0.0)
    *decodes, chunk = executor.schedule[1]
    assert chunk[2] == 10
    assert len(decodes) == 3
    assert all(start >= 1 for _, start, _ in decodes)
    if num_blocks == 100:
        assert (chunk[1], decodes[0][1]) == (14, 19)


def test_compare_divides_what_both_have():
    own = {"throughput": 6.0, "ttft_p50": 1.0, "decode_time_marginal": 1.0}
    ratios = compare(own, {"throughput": 3.0, "ttft_p50": 4.0}, "orca")
    assert ratios == {"throughput_vs_orca": 2.0, "ttft_p50_vs_orca": 0.25}


def test_parts_of_runs_are_compared_without_their_durations_and_bytes_by_request():
    own = {"duration": 6.0, "kv_read_bytes": 8.0, "throughput": 3.0, "num_requests": 4.0}
    other = {"duration": 4.0, "kv_read_bytes": 4.0, "throughput": 3.0, "num_requests": 2.0}
    whole = {"duration_vs_orca": 1.5, "kv_read_bytes_vs_orca": 2.0, "throughput_vs_orca": 1.0}
    assert compare(own, other, "orca") == whole
    part_of_own = {**own, "window_start": 1.0}
    part_of_other = {**other, "window_start": 1.0}
    by_request = {"kv_read_bytes_vs_orca": 1.0, "throughput_vs_orca": 1.0}
    assert compare(part_of_own, part_of_other, "orca") == by_request
    # A run that is too short for a steady part counts whole.
    assert compare(part_of_own, other, "orca") == by_request
    assert compare(own, part_of_other, "orca") == by_request


def test_arrivals_count_from_their_own_time():
    _, requests = run(RequestLevel(), requests_of((4, 1), (4, 1), arrivals=[0, 10]))
    assert (requests.first_token_time - requests.arrival_time).tolist() == [1.0, 1.0]
    assert requests.first_scheduled_time.tolist() == [0.0, 10.0]


def test_fullest_hybrid_has_the_most_decodes_and_then_the_most_frequent_chunk():
    iterations, _ = run(Sarathi(chunk=6), requests_of(*[(12, 9)] * 4), batch_size=3)
    fullest = fullest_hybrid(iterations)
    assert fullest is not None
    assert fullest["num_decodes"] == 2  # the batch less the chunk's own sequence
    beside_two = iterations[(iterations.num_prefills == 1) & (iterations.num_decode_tokens == 2)]
    assert fullest["prefill_tokens"] == 4  # 6 less the decodes
    assert (beside_two.num_prefill_tokens == 4).sum() >= (beside_two.num_prefill_tokens != 4).sum()
    assert fullest_hybrid(run(RequestLevel(), requests_of((8, 3)))[0]) is None


def test_decode_cost_is_the_difference_of_paired_iterations():
    """With seconds = prefill tokens + 0.25 a decode if mixed, 2 a batch of decodes alone."""

    def seconds(batch):
        if batch.num_prefill_tokens == 0:
            return 2.0
        return batch.num_prefill_tokens + 0.25 * batch.num_decode_tokens

    sizes = {"prefill_tokens": 13, "start": 5, "num_decodes": 4, "context": 9}
    executor = ScriptedExecutor(seconds)
    cost = measure_decode_cost(executor, sizes, num_blocks=40, block_size=4, seconds=0.0)
    assert cost.alone == pytest.approx(0.5)
    assert cost.marginal == pytest.approx(0.25)
    assert executor.schedule[1] == [*((i, 8, 1) for i in range(4)), (4, 5, 13)]


def test_tile_efficiency_counts_padding_as_computed_only():
    """100 tokens and 30 of padding take two tiles of 128, a decode one."""
    ledger = Ledger()
    run_engine(requests_of((100, 2)), scheduler_for(RequestLevel()), ScriptedExecutor(), ledger)
    padded = ledger.iterations().assign(num_padding_tokens=[30, 0])
    iterations = add_costs(padded, TWO_LAYERS, 2, PEAKS)
    assert iterations.useful_tiles.tolist() == [100 / 128, 1 / 128]
    assert iterations.computed_tiles.tolist() == [2, 1]
    summary = summarise(iterations, ledger.requests(), PEAKS, None)
    assert summary["tile_efficiency"] == pytest.approx(101 / 128 / 3)


def test_what_a_device_loses_beside_the_work_by_hand():
    """Three iterations of 1 s; nothing is lost in the simulator, where no host was measured."""
    iterations, requests = run(RequestLevel(), requests_of((8, 3)))
    lost = {"device_idle_fraction", "host_time", "padding_fraction", "replayed_fraction"}
    assert not lost & summarise(iterations, requests, PEAKS, None).keys()
    measured = iterations.assign(
        start=[0.0, 1.5, 2.0], host_time=0.25, num_padding_tokens=[2, 0, 0], is_replayed=[0, 1, 1]
    )  # half a second of idleness, and then half a second in which two overlap
    summary = summarise(measured, requests, PEAKS, None)
    assert {name: summary[name] for name in lost} == pytest.approx(
        {
            "device_idle_fraction": 0.5 / 3.5,
            "host_time": 0.75,
            "padding_fraction": 2 / 12,
            "replayed_fraction": 2 / 3,
        }
    )


def test_a_device_that_waits_for_the_launches_of_an_iteration_is_idle():
    """Of 4 s each: launched all the while, half of it, all the while as a graph, and on a CPU."""
    table = pd.DataFrame({"start": [0.0, 4.0, 8.0, 12.0], "end": [4.0, 8.0, 12.0, 16.0]})
    table = table.assign(
        busy=4.0,
        num_running=1,
        num_waiting=0,
        is_replayed=[0, 0, 1, 0],
        launching_time=[3.7, 2.0, 4.0, 0.0],
    )
    assert device_idle_fraction(table) == 4 / 16, "all of it, as nothing is known of the work"
    assert device_idle_fraction(table.assign(roofline=1.5)) == 2.5 / 16
    assert device_idle_fraction(table.assign(roofline=5.0)) == 0
    assert device_idle_fraction(table.assign(launching_time=3.5)) == 0


def test_ratios_to_a_baseline_that_replayed_less_say_so():
    shares = [{"replayed_fraction": share} for share in (0.98, 0.95, 0.12)]
    assert not replay_caution(shares[0], shares[1], "orca")
    (line,) = replay_caution(shares[0], shares[2], "orca")
    assert "98% of the iterations, of orca's 12%" in line
    assert not replay_caution(shares[0], {}, "orca")

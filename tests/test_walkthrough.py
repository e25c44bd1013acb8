"""The walkthrough's numbers and pictures, on a clock of which everything is known."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import walkthrough_lab as lab
import walkthrough_pictures as plots

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch


def clock(batch: Batch) -> float:
    """Ten ticks for reading the weights, one for each prompt token beyond ten: decodes ride for
    free.
    """
    return max(10.0, float(batch.num_prefill_tokens)) * 1e-3


@pytest.fixture(scope="module")
def schedules():
    requests = lab.requests_of(num_requests=6, seq_len=80, pd_ratio=7)
    return {name: lab.serve(policy, requests, clock) for name, policy in lab.policies(16).items()}


def test_costs_per_token_are_seconds_over_tokens():
    table = lab.token_costs(clock, (1, 4), context=64).set_index(["kind", "batch"])
    assert table.per_token["prefill", 1] == pytest.approx(1e-3)
    assert table.per_token["decode", 1] == pytest.approx(10e-3)
    assert table.per_token["decode", 4] == pytest.approx(2.5e-3)


def test_a_decode_on_a_chunk_adds_what_the_clock_says():
    (row,) = lab.hybrid_costs(clock, (32,)).to_dict("records")
    assert (row["chunk_alone"], row["hybrid"]) == (29e-3, 29e-3)  # 32 less the three decodes
    assert (row["alone"], row["added"]) == (pytest.approx(10e-3 / 3), 0.0)


def test_every_policy_serves_every_token_once(schedules):
    requests = lab.requests_of(num_requests=6, seq_len=80, pd_ratio=7)
    for schedule in schedules.values():
        tokens = schedule.chunks().groupby("request_id").num_tokens.sum()
        # The last one is only emitted.
        assert tokens.tolist() == [request.total_len - 1 for request in requests]
        assert len(schedule.requests()) == len(requests)


def test_outcomes_tell_the_policies_apart(schedules):
    table = lab.outcomes(schedules)
    assert table.hybrid["request_level"] == table.hybrid["prefill_first"] == 0
    assert table.hybrid["sarathi"] > table.hybrid["orca"] > 0
    assert table.kv_reread_factor["orca"] == 1.0 < table.kv_reread_factor["sarathi"]
    assert table.tbt_max["sarathi"] == pytest.approx(15e-3)  # 16 tokens, of which one decodes
    assert table.tbt_max["orca"] == pytest.approx(70e-3)  # a whole prompt


def num_bars(ax) -> int:
    return sum(len(bars.get_paths()) for bars in ax.collections)


def test_a_timeline_has_a_bar_for_every_chunk(schedules):
    chunks = {name: schedule.chunks() for name, schedule in schedules.items()}
    figure = plots.timelines(chunks)
    for ax, (name, rows) in zip(figure.axes, chunks.items(), strict=True):
        assert ax.get_title(loc="left").startswith(name)
        assert num_bars(ax) == len(rows)
    plt.close("all")


def test_batches_stack_prompt_tokens_and_decodes(schedules):
    (ax,) = plots.batches(schedules["sarathi"].chunks()).axes
    iterations = schedules["sarathi"].iterations()
    assert sum(bar.get_height() for bar in ax.patches) == (
        iterations.num_prefill_tokens.sum() + iterations.num_decode_tokens.sum()
    )


def test_equal_batches_leave_fewer_bubbles_in_a_pipeline():
    requests = lab.requests_of(num_requests=16, seq_len=80, pd_ratio=7)
    policies = lab.policies(16)
    pipes = {name: lab.serve(policies[name], requests, clock, 4) for name in ("orca", "sarathi")}
    stages = {name: pipe.stages() for name, pipe in pipes.items()}
    assert all(sorted(table.stage.unique()) == [0, 1, 2, 3] for table in stages.values())
    figure = plots.pipeline(stages, {name: pipe.iterations() for name, pipe in pipes.items()})
    for ax, table in zip(figure.axes, stages.values(), strict=True):
        assert num_bars(ax) == len(table)
    bubbles = {name: pipe.requests().bubble_time.median() for name, pipe in pipes.items()}
    assert bubbles["sarathi"] < bubbles["orca"]


def test_the_choice_of_a_chunk_weighs_three_things():
    requests = lab.requests_of(num_requests=6, seq_len=80, pd_ratio=7)
    table = lab.by_chunk((8, 16, 32), requests, clock)
    assert table.chunk.tolist() == [8, 16, 32]
    assert table.kv_reread_factor.is_monotonic_decreasing
    axes = plots.chunk_choice(table).axes
    assert [len(ax.get_lines()[0].get_xdata()) for ax in axes] == [3, 3, 3]


def test_tiles_and_costs_are_drawn():
    sizes = range(8, 300, 8)
    figure = plots.tile_steps(dict.fromkeys("ab", lab.prefill_times(clock, sizes)), tile=128)
    # The curve, and edges at 128 and 256.
    assert [len(ax.get_lines()) for ax in figure.axes] == [3, 3]
    left, right = plots.cost_bars(lab.token_costs(clock), lab.hybrid_costs(clock, (16, 32))).axes
    assert (len(left.patches), len(right.patches)) == (6, 4)
    plt.close("all")


def test_a_chunk_below_the_batch_is_refused():
    with pytest.raises(UserError, match="chunk=3 is smaller than a batch of 4; use chunk>=4"):
        lab.policies(3)


def test_the_tiny_model_is_timed_once_a_composition():
    time = lab.tiny_on_this_cpu(repetitions=2)
    first = lab.prefill_times(time, (8, 64))
    assert (first.seconds > 0).all()
    assert lab.prefill_times(time, (8, 64)).seconds.tolist() == first.seconds.tolist()


def test_the_four_schedules_of_the_readme_have_sarathi_end_first():
    titles = [ax.get_title(loc="left").split(": ") for ax in plots.four_schedules().axes]
    assert [name for name, _ in titles] == ["request_level", "prefill_first", "orca", "sarathi"]
    durations = [float(time.removesuffix(" ms").replace(",", "")) for _, time in titles]
    assert min(durations) == durations[-1]

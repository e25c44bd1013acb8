"""`lab.Playground`: what `lab.serve` finds without its files, a sentence on it, its picture."""

from __future__ import annotations

import pytest

import sarathi_lab as lab
from sarathi_lab.config.errors import UserError

SIZES = {"workload": "uniform", "batch": 4, "seed": 1, "workload.num_requests": 8}
SIZES |= {"workload.min_len": 64, "workload.max_len": 512}


@pytest.fixture(scope="module")
def playground():
    return lab.Playground(**SIZES)


def test_it_finds_what_a_run_finds(playground, tmp_path):
    changes = {"policy": "sarathi_serve", "chunk": 128, "hardware": "h100", "model": "7b"}
    (row,) = playground.serve(**changes).outcomes.to_dict("records")[:1]
    run = lab.serve(executor="simulated", **SIZES, **changes, output=tmp_path).runs
    run = run[~run.is_baseline].iloc[0]
    for name in ("throughput", "ttft_p50", "tbt_p99"):
        assert row[name] == pytest.approx(run[name]), name
    assert row["gain"] == pytest.approx(run["throughput_vs_orca"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"pd_ratio": 15, "workload.min_len": 512, "workload.max_len": 2048},
            "1.03 times orca's, with",
        ),
        ({"chunk": 2048}, "1.00 times orca's, with"),
        ({"policy": "orca"}, "which others are held against"),
        ({"policy": "request_level"}, "0% of its decodes ride along with prompts"),
    ],
)
def test_a_sentence_says_how_much_it_serves_and_why(playground, changes, words):
    text = playground.serve(**changes).why()
    assert words in text
    assert text.endswith(".")
    assert "nan" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "sarathy"}, "policy=sarathy is unknown .did you mean sarathi"),
        ({"chunk": 2}, "chunk=2 is smaller than"),
        ({"model": "gpt3-175b"}, "gpt3-175b"),
    ],
)
def test_what_does_not_work_is_a_users_error(playground, changes, words):
    with pytest.raises(UserError, match=words):
        playground.serve(**changes)


def test_the_picture_shows_every_batch_and_wait_of_the_last_move(playground):
    from sarathi_lab.extensions.playground import Picture  # with widgets, which take a second

    picture = Picture()
    for changes in ({}, {"policy": "orca"}, {"chunk": 64}):
        tried = playground.serve(**changes)
        picture.show(tried.iterations, tried.requests)
        assert picture.png().startswith(b"\x89PNG")
    first, ttft, second, _ = picture.figure.axes
    for ax, (name, table) in zip((first, second), tried.iterations.items(), strict=True):
        assert ax.get_title(loc="left") == name
        for area, kind in zip(ax.patches, ("prefill", "decode"), strict=True):
            shown, tokens = area.get_data().values[::2], table[f"num_{kind}_tokens"]
            assert (shown[tokens > 0] == tokens[tokens > 0]).all()
    assert [len(line.get_xdata()) for line in ttft.get_lines()] == [8, 8]


def test_a_move_that_leaves_the_baselines_work_alone_does_not_simulate_it_again(playground):
    before, after = (playground.serve(chunk=chunk).ledgers for chunk in (128, 256))
    assert after["orca"] is before["orca"]
    assert playground.serve(chunk=128, seed=2).ledgers["orca"] is not before["orca"]

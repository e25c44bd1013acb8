"""Workloads: their lengths, times and tokens, and every line of a file of prompts accounted for."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from sarathi_lab.config.arrivals import implied_arrivals
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import CONF
from sarathi_lab.workload.files import Prompts
from sarathi_lab.workload.synthetic import (
    Agentic,
    Lognormal,
    PaperGrid,
    Uniform,
    Zipf,
    split_length,
)
from sarathi_lab.workload.traces import Trace

SAMPLES = Path(__file__).parents[1] / "data"
VARIED = {"num_requests": 1, "pd_ratio": 10, "seed": 5, "min_len": 10, "max_len": 19}
LENGTHS = {  # prompts' median and P90, outputs', and the longest request
    "openchat_sharegpt4": (1730, 5696, 415, 834, 8192),
    "arxiv_summarization": (7059, 12985, 208, 371, 16384),
    "lognormal": (173, 570, 41.5, 83.4, 819),
}
NAMES = ("prompt_p50", "prompt_p90", "output_p50", "output_p90", "max_len")
LOGNORMAL = {"seed": 0, **dict(zip(NAMES, LENGTHS["lognormal"], strict=True))}


def grid(**settings) -> PaperGrid:
    return PaperGrid(**{"num_requests": 4, "seq_len": 1024, "pd_ratio": 31, "seed": 0, **settings})


@pytest.mark.parametrize(
    ("settings", "kind", "name"),
    [
        ({}, "closed", None),
        ({"rate": 2.0}, "poisson", "rate"),
        ({"rate": 2.0, "cv": 3.0}, "gamma", "cv"),
        ({"users": 3}, "users", "users"),
        ({"users": 3, "think_time": 0.0}, "users", "users"),
    ],
    ids=str,
)
def test_a_workload_has_the_arrivals_that_its_settings_imply(settings, kind, name):
    assert implied_arrivals({**settings, "num_requests": 4}) == (kind, name)
    assert grid(**settings).arrival_kind == kind


@pytest.mark.parametrize(
    ("total", "ratio", "expected"),
    [
        (1024, 31, (992, 32)),
        (1024, 14, (956, 68)),
        (1024, 0.5, (341, 683)),
        (2, 1000, (1, 1)),
        (3, 0.001, (1, 2)),
        (9, 1e308, (8, 1)),
    ],
)
def test_split_length(total, ratio, expected):
    assert split_length(total, ratio) == expected


def test_another_ratio_of_whole_tokens_than_was_asked_for_is_noted():
    text = grid(pd_ratio=600).generate(None).describe()
    assert "tokens, P:D 511 in whole tokens, not 600" in text
    assert "P:D" not in grid(pd_ratio=200).generate(None).describe()


def test_the_paper_grid_repeats_one_length_and_its_tokens_depend_on_seed_and_request_only():
    few, many, other = (
        grid(num_requests=n, seed=s).generate(4096).requests for n, s in ((2, 0), (5, 0), (2, 1))
    )
    assert {(r.prompt_len, r.output_len, r.arrival_time) for r in many} == {(992, 32, 0.0)}
    assert np.array_equal(few[1].prompt_token_ids, many[1].prompt_token_ids)
    assert not np.array_equal(many[0].prompt_token_ids, many[1].prompt_token_ids)
    assert not np.array_equal(few[0].prompt_token_ids, other[0].prompt_token_ids)
    assert few[0].prompt_token_ids.max() < 4096


def test_uniform_covers_its_range_and_zipf_prefers_short_ones():
    settings = VARIED | {"num_requests": 3000}
    loads = (Uniform(**settings), Zipf(theta=1.0, **settings), Zipf(theta=0.01, **settings))
    uniform, zipf, flat = (
        [one.total_len for one in load.generate(None).requests] for load in loads
    )
    assert set(uniform) == set(zipf) == set(range(10, 20))
    assert np.mean(uniform) == pytest.approx(14.5, abs=0.3)
    # ranks 1..10 weighted by 1/k: mean rank 10 / H(10) = 3.414
    assert np.mean(zipf) == pytest.approx(9 + 3.414, abs=0.3)
    assert np.mean(flat) == pytest.approx(14.5, abs=0.3)


@pytest.mark.parametrize("kind", [Uniform, Zipf])
def test_more_requests_leave_the_first_ones_as_they_were(kind):
    settings = VARIED | {"arrivals": "poisson", "rate": 2.0}
    few, many = (kind(**settings | {"num_requests": n}).generate(100).requests for n in (3, 30))
    for short, long in zip(few, many, strict=False):
        assert (short.arrival_time, short.total_len) == (long.arrival_time, long.total_len)
        assert np.array_equal(short.prompt_token_ids, long.prompt_token_ids)


@pytest.mark.parametrize("name", LENGTHS)
def test_lognormal_lengths_have_the_stated_median_and_p90_below_the_longest(name):
    stated = dict(zip(NAMES, LENGTHS[name], strict=True))
    settings = OmegaConf.load(CONF / "workload" / f"{name}.yaml")
    assert {key: settings[key] for key in stated} == stated
    requests = Lognormal(num_requests=20_000, seed=1, **stated).generate(None).requests
    for kind in ("prompt", "output"):
        lengths = [getattr(request, f"{kind}_len") for request in requests]
        assert np.median(lengths) == pytest.approx(stated[f"{kind}_p50"], rel=0.04)
        assert np.quantile(lengths, 0.9) == pytest.approx(stated[f"{kind}_p90"], rel=0.04)
    assert max(request.total_len for request in requests) <= stated["max_len"]


@pytest.mark.parametrize(
    "load",
    [
        grid(),
        Uniform(**VARIED),
        Zipf(**VARIED),
        Lognormal(num_requests=1, **LOGNORMAL),
        Agentic(num_requests=1, **LOGNORMAL),
        Trace(path="unused", seed=0),
    ],
    ids=lambda load: load.name,
)
def test_every_field_refuses_wrong_types_and_sizes_by_its_name(load):
    for name in (one.name for one in fields(load) if "check" in one.metadata):
        for wrong in ("?", -1):
            with pytest.raises(UserError, match=rf"\b{name}=(\?|-1)"):
                replace(load, **{name: wrong})


@pytest.mark.parametrize(
    ("load", "changes", "words"),
    [
        (grid(), {"pd_ratio": float("nan")}, "pd_ratio=nan"),
        (grid(), {"pd_ratio": 2000}, "pd_ratio=2000 is not possible with seq_len=1024 tokens"),
        (Uniform(**VARIED), {"pd_ratio": 1 / 19}, "use 1/18 to 18, or raise workload.max_len"),
        (grid(), {"arrivals": "poisson"}, "needs workload.rate"),
        (grid(), {"arrivals": "closed", "rate": 2.0}, "rate=2.0 has no effect"),
        (Uniform(**VARIED), {"min_len": 20}, "min_len=20 exceeds workload.max_len=19"),
        (
            Lognormal(num_requests=9, **LOGNORMAL),
            {"prompt_p90": 100},
            "prompt_p90=100 is not above workload.prompt_p50=173",
        ),
        (
            Lognormal(num_requests=9, **LOGNORMAL),
            {"max_len": 600},
            "max_len=600 is not above prompt_p90 . output_p90 = 653.4 tokens",
        ),
        (
            Lognormal(num_requests=9, **LOGNORMAL),
            {"max_len": 656},
            "prompt_p90=570 is too near workload.max_len=656",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(load, changes, words):
    with pytest.raises(UserError, match=words):
        replace(load, **changes).generate(None)


def prompts_of(path: Path, text: str, vocab_size: int | None = 256, encode=None):
    path.write_text(text, encoding="utf-8")
    return Prompts(path=str(path)).generate(vocab_size, encode)


def test_prompts_of_text_and_of_tokens(tmp_path):
    rows = [
        {"prompt": "hé", "output_len": 3},
        {"prompt_token_ids": [5, 6, 7], "output_len": 1, "arrival_time": 1.5, "priority": -2},
    ]
    text = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    load = prompts_of(tmp_path / "p.jsonl", text)
    first, second = load.requests
    assert first.prompt_token_ids.tolist() == list("hé".encode())
    assert (first.output_len, first.arrival_time, first.priority) == (3, 0.0, 0)
    assert second.prompt_token_ids.tolist() == [5, 6, 7]
    assert (second.output_len, second.arrival_time, second.priority) == (1, 1.5, -2)
    assert load.describe().endswith("3 rows read = 2 used + 1 dropped, 1 blank")
    encoded = prompts_of(tmp_path / "p.jsonl", text, encode=lambda text: [len(text)])
    assert encoded.requests[0].prompt_token_ids.tolist() == [2]


@pytest.mark.parametrize(
    ("turns", "speaker", "text"), [("messages", "role", "content"), ("items", "from", "value")]
)
def test_conversations_have_several_names(tmp_path, turns, speaker, text):
    question = {speaker: "user", text: "why?"}
    row = {turns: [question, {speaker: "assistant", text: "as"}]}
    (request,) = prompts_of(tmp_path / "c.jsonl", json.dumps(row)).requests
    assert (request.prompt_token_ids.tolist(), request.output_len) == (list(b"why?"), 2)
    with pytest.raises(UserError, match="no request with an answer"):
        prompts_of(tmp_path / "c.jsonl", json.dumps({turns: [question]}))


def test_separators_inside_a_json_string_end_no_line(tmp_path):
    row = {"prompt": "a\u2028b\u0085c", "output_len": 1}
    load = prompts_of(tmp_path / "p.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    assert load.requests[0].prompt_token_ids.tolist() == list(row["prompt"].encode())
    assert load.rows_read == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "is not a JSON object"),
        (10**5 * "[", "is not JSON"),
        ('{"output_len": 1}', "needs either prompt or prompt_token_ids"),
        ('{"prompt": "", "output_len": 1}', "empty prompt"),
        ('{"prompt": 5, "output_len": 1}', "prompt is not text"),
        ('{"prompt": "a"}', "has no output_len; give"),
        ('{"prompt": "a", "output_len": 0}', "output_len=0"),
        ('{"prompt_token_ids": [256], "output_len": 1}', "token id=256 is above 255"),
        ('{"prompt_token_ids": [-1], "output_len": 1}', "token id=-1"),
        ('{"prompt": "a", "output_len": 1, "arrival_time": -1}', "arrival_time=-1"),
        ('{"prompt": "a", "output_len": 1, "priority": 1.5}', "priority=1.5 is not a whole number"),
    ],
)
def test_broken_prompt_lines_are_named(tmp_path, line, words):
    with pytest.raises(UserError, match=f"line 2.* {words}"):
        prompts_of(tmp_path / "p.jsonl", f'{{"prompt": "fine", "output_len": 1}}\n{line}\n')


def test_token_ids_that_no_model_has_are_refused_without_a_model(tmp_path):
    line = '{"prompt_token_ids": [2147483648], "output_len": 1}\n'
    with pytest.raises(UserError, match="line 1: token id=2147483648 is above"):
        prompts_of(tmp_path / "p.jsonl", line, None)


def test_the_sample_files_by_hand():
    prompts = Prompts(path=str(SAMPLES / "prompts.jsonl")).generate(256)
    rows = [(one.arrival_time, one.prompt_len, one.output_len) for one in prompts.requests]
    assert rows == [(0.0, 59, 12), (0.2, 44, 8), (0.5, 7, 16)]
    trace = Trace(path=str(SAMPLES / "trace.csv"), seed=0).generate(None)
    times = [0.0, 0.1234567, 0.9000001, 1.75, 2.0, 4.25, 4.2500001]
    assert [one.arrival_time for one in trace.requests] == times
    assert trace.describe().endswith("8 rows read = 7 used + 1 dropped, 1 without prompt or output")


def test_files_that_are_none(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\xd8")
    for load, words in (
        (Trace(seed=0), r"needs a file; add workload\.path=FILE, such as Azure"),
        (Prompts(path=str(tmp_path / "nothing")), "No such file"),
        (Trace(path=123, seed=0), r"workload\.path=123 can't be read"),  # YAML of workload.path=123
        (Prompts(path=str(tmp_path)), "can't be read"),
        (Prompts(path=str(tmp_path / "binary")), "not UTF-8"),
    ):
        with pytest.raises(UserError, match=words):
            load.generate(None)

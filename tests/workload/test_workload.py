"""Workloads: the lengths, times and tokens they promise, and every row of a file accounted for."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

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
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def grid(**settings) -> PaperGrid:
    return PaperGrid(**{"num_requests": 4, "seq_len": 1024, "pd_ratio": 31, "seed": 0, **settings})


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
    settings = {"num_requests": 3000, "pd_ratio": 10, "seed": 3, "min_len": 10, "max_len": 19}
    uniform = [request.total_len for request in Uniform(**settings).generate(None).requests]
    zipf = [request.total_len for request in Zipf(theta=1.0, **settings).generate(None).requests]
    flat = [request.total_len for request in Zipf(theta=0.01, **settings).generate(None).requests]
    assert set(uniform) == set(zipf) == set(range(10, 20))
    assert np.mean(uniform) == pytest.approx(14.5, abs=0.3)
    # ranks 1..10 weighted by 1/k: mean rank 10 / H(10) = 3.414
    assert np.mean(zipf) == pytest.approx(9 + 3.414, abs=0.3)
    assert np.mean(flat) == pytest.approx(14.5, abs=0.3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pd_ratio": float("nan")}, "pd_ratio=nan"),
        ({"arrivals": "poisson"}, "needs workload.rate"),
        ({"rate": 2.0}, "rate=2.0 has no effect"),
    ],
)
def test_impossible_grids_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        grid(**settings).generate(None)


def test_crossed_bounds_are_refused():
    with pytest.raises(UserError, match=r"min_len=20 exceeds workload\.max_len=10"):
        Uniform(num_requests=1, pd_ratio=1, seed=0, min_len=20, max_len=10)


def test_more_requests_leave_the_first_ones_as_they_were():
    settings = {
        "pd_ratio": 10,
        "seed": 5,
        "min_len": 16,
        "max_len": 64,
        "arrivals": "poisson",
        "rate": 2.0,
    }
    for kind in (Uniform, Zipf):
        few, many = (kind(num_requests=n, **settings).generate(100).requests for n in (3, 30))
        for short, long in zip(few, many, strict=False):
            assert (short.arrival_time, short.total_len) == (long.arrival_time, long.total_len)
            assert np.array_equal(short.prompt_token_ids, long.prompt_token_ids)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_prompts_of_text_and_of_tokens(tmp_path):
    rows = [
        {"prompt": "hé", "output_len": 3},
        {"prompt_token_ids": [5, 6, 7], "output_len": 1, "arrival_time": 1.5},
    ]
    path = write(tmp_path / "p.jsonl", "\n\n".join(json.dumps(row) for row in rows) + "\n")
    load = Prompts(path=path).generate(256)
    first, second = load.requests
    assert first.prompt_token_ids.tolist() == list("hé".encode())
    assert (first.output_len, first.arrival_time) == (3, 0.0)
    assert second.prompt_token_ids.tolist() == [5, 6, 7]
    assert (second.prompt_len, second.output_len, second.arrival_time) == (3, 1, 1.5)
    assert load.describe().endswith("3 rows read = 2 used + 1 dropped, 1 blank")
    encoded = Prompts(path=path).generate(256, encode=lambda text: [len(text)])
    assert encoded.requests[0].prompt_token_ids.tolist() == [2]


def test_separators_inside_a_json_string_end_no_line(tmp_path):
    row = {"prompt": "a\u2028b\u0085c", "output_len": 1}
    path = write(tmp_path / "p.jsonl", json.dumps(row, ensure_ascii=False) + "\n{\n")
    with pytest.raises(UserError, match="line 2 is not JSON"):
        Prompts(path=path).generate(None)
    write(tmp_path / "p.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    load = Prompts(path=path).generate(None)
    assert load.requests[0].prompt_token_ids.tolist() == list(row["prompt"].encode())
    assert load.rows_read == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "line 2 is not a JSON object"),
        ("{", "line 2 is not JSON"),
        ('{"output_len": 1}', "needs either prompt or prompt_token_ids"),
        ('{"prompt": "", "output_len": 1}', "empty prompt"),
        ('{"prompt": 5, "output_len": 1}', "prompt is not text"),
        ('{"prompt": "a"}', "has no output_len"),
        ('{"prompt": "a", "output_len": 0}', "output_len=0"),
        (
            '{"prompt_token_ids": [256], "output_len": 1}',
            "256 is outside the model's vocabulary of 256",
        ),
        ('{"prompt_token_ids": [-1], "output_len": 1}', "token id=-1"),
        ('{"prompt": "\\ud800", "output_len": 1}', "half of a surrogate pair"),
        (
            '{"prompt": "a", "output_len": 1, "arrival_time": 1' + 400 * "0" + "}",
            "must be a finite number",
        ),
        (10**5 * "[", "line 2 is not JSON"),
        ('{"prompt": "a", "output_len": 1, "arrival_time": -1}', "arrival_time=-1"),
    ],
)
def test_broken_prompt_lines_are_named(tmp_path, line, words):
    path = write(tmp_path / "p.jsonl", '{"prompt": "fine", "output_len": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=words) as caught:
        Prompts(path=path).generate(256)
    assert "line 2" in str(caught.value)


def test_token_ids_that_no_model_has_are_refused_without_a_model(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"prompt_token_ids": [2147483648], "output_len": 1}\n')
    with pytest.raises(UserError, match="line 1: token id 2147483648 is outside 32 bits"):
        Prompts(path=path).generate(None)


def test_the_sample_files_by_hand():
    prompts = Prompts(path=str(SAMPLES / "prompts.jsonl")).generate(256)
    assert [(r.arrival_time, r.prompt_len, r.output_len) for r in prompts.requests] == [
        (0.0, 59, 12),
        (0.2, 44, 8),
        (0.5, 7, 16),
    ]
    trace = Trace(path=str(SAMPLES / "trace.csv"), seed=0).generate(None)
    assert [r.arrival_time for r in trace.requests] == [
        0.0,
        0.1234567,
        0.9000001,
        1.75,
        2.0,
        4.25,
        4.2500001,
    ]
    assert trace.describe().endswith("8 rows read = 7 used + 1 dropped, 1 without prompt or output")


def test_trace_rows_reconcile_and_seven_digits_count(tmp_path):
    rows = [
        "2023-11-16 18:15:50.0000000,100,10",
        "2023-11-16 18:15:50.0000001,0,10",
        "2023-11-16 18:15:51.0000003,900,200",
        "2023-11-16 18:15:49.5000000,30,5",
        "2023-11-16 18:15:52.0000000,40,1",
        "2023-11-16 18:15:53.0000000,50,1",
    ]
    path = write(tmp_path / "t.csv", HEADER + "\n".join(rows) + "\n\n")
    load = Trace(path=path, seed=0, max_requests=3, max_len=1000, time_scale=2.0).generate(64)
    assert [(r.prompt_len, r.output_len) for r in load.requests] == [(30, 5), (100, 10), (40, 1)]
    assert [r.arrival_time for r in load.requests] == [0.0, 1.0, 5.0]
    assert load.describe().endswith(
        "6 rows read = 3 used + 3 dropped, 1 without prompt or output, 1 over max_len=1000, 1 "
        "after max_requests"
    )
    assert load.requests[0].prompt_token_ids.shape == (30,)
    exact = Trace(path=path, seed=0).generate(None)
    assert exact.requests[2].arrival_time == 1.5000003


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; name a file"),
        (HEADER + "2023-11-16 18:15:50,1,1\n2023-11-16 18:15:50,x,1\n", "line 3 is broken"),
        (HEADER + "2023-11-16 18:15:50,1\n", "line 2 is broken .GeneratedTokens=nan"),
        (HEADER + "now,1,1\n", "line 2 is broken .TIMESTAMP=now"),
        (HEADER + "3000-11-16 18:15:50,1,1\n", "line 2 is broken"),
        (HEADER + 10**6 * "x" + "\n", "line 2 is broken"),
        (HEADER + '2023-11-16 18:15:50,1,1\n"2023-11-16 18:15:51,1,1\n', "can't be read .*row 2"),
        (HEADER + ",1,1\n", "line 2 is broken"),
        (
            HEADER + "2023-11-16 18:15:50,0,1\n",
            r"all 1 rows were dropped \(1 without prompt or output\)",
        ),
    ],
)
def test_broken_traces_are_refused(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        Trace(path=write(tmp_path / "t.csv", text), seed=0).generate(None)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"needs a file; add workload\.path=FILE, such as Azure"):
        Trace(seed=0).generate(None)
    with pytest.raises(UserError, match="missing"):
        Prompts(path=str(tmp_path / "nothing")).generate(None)
    with pytest.raises(UserError, match=r"workload\.path=123 is missing"):
        Trace(path=123, seed=0).generate(None)  # what YAML makes of workload.path=123
    with pytest.raises(UserError, match="can't be read"):
        Prompts(path=str(tmp_path)).generate(None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UserError, match="not UTF-8"):
        Prompts(path=str(tmp_path / "binary")).generate(None)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output"), [("conv", 19366, 1020, 129), ("code", 8819, 1469, 13)]
)
def test_azure_traces_load_whole(name, rows, prompt, output):
    load = Trace(path=str(TRACES / f"AzureLLMInferenceTrace_{name}.csv"), seed=0).generate(None)
    assert load.rows_read == rows == len(load.requests) + sum(load.dropped.values())
    assert np.median([request.prompt_len for request in load.requests]) == pytest.approx(
        prompt, abs=1
    )
    assert np.median([request.output_len for request in load.requests]) == pytest.approx(
        output, abs=1
    )
    times = [request.arrival_time for request in load.requests]
    assert times == sorted(times)
    assert times[0] == 0.0


LENGTHS = {
    "openchat_sharegpt4": (1730, 5696, 415, 834, 8192),
    "arxiv_summarization": (7059, 12985, 208, 371, 16384),
    "lognormal": (173, 570, 41.5, 83.4, 819),
}


LOGNORMAL = dict(
    zip(
        ("prompt_p50", "prompt_p90", "output_p50", "output_p90", "max_len"),
        LENGTHS["lognormal"],
        strict=True,
    )
)
VARIED = {"num_requests": 1, "pd_ratio": 1, "seed": 0, "min_len": 2, "max_len": 9}


@pytest.mark.parametrize(
    "load",
    [
        grid(),
        Uniform(**VARIED),
        Zipf(**VARIED),
        Lognormal(num_requests=1, seed=0, **LOGNORMAL),
        Agentic(num_requests=1, seed=0, **LOGNORMAL),
        Trace(path="unused", seed=0),
    ],
    ids=lambda load: load.name,
)
def test_every_field_refuses_wrong_types_and_sizes_by_its_name(load):
    for name in (one.name for one in fields(load) if "check" in one.metadata):
        for wrong in ("?", -1):
            with pytest.raises(UserError, match=rf"\b{name}=(\?|-1)"):
                replace(load, **{name: wrong})


@pytest.mark.parametrize("name", LENGTHS)
def test_lognormal_lengths_have_the_stated_median_and_p90_below_the_longest(name):
    p50, p90, output_p50, output_p90, max_len = LENGTHS[name]
    own = {"prompt_p50": p50, "prompt_p90": p90, "output_p50": output_p50, "output_p90": output_p90}
    settings = OmegaConf.load(CONF / "workload" / f"{name}.yaml")
    assert {key: settings[key] for key in own} == own
    assert settings.max_len == max_len
    requests = (
        Lognormal(num_requests=20_000, max_len=max_len, seed=1, **own).generate(None).requests
    )
    for lengths, middle, upper in (
        ([request.prompt_len for request in requests], p50, p90),
        ([request.output_len for request in requests], output_p50, output_p90),
    ):
        assert np.median(lengths) == pytest.approx(middle, rel=0.04)
        assert np.quantile(lengths, 0.9) == pytest.approx(upper, rel=0.04)
    assert max(request.total_len for request in requests) <= max_len


def test_lognormal_lengths_depend_on_the_seed_and_not_on_the_rate():
    loads = [
        Lognormal(num_requests=9, seed=seed, arrivals="poisson", rate=rate, **LOGNORMAL)
        .generate(None)
        .requests
        for seed, rate in ((0, 1.0), (0, 4.0), (1, 1.0))
    ]
    shapes = [[(request.prompt_len, request.output_len) for request in load] for load in loads]
    assert shapes[0] == shapes[1] != shapes[2]
    assert loads[0][-1].arrival_time == pytest.approx(4 * loads[1][-1].arrival_time)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_p90": 100}, "prompt_p90=100 is not above workload.prompt_p50=173"),
        ({"max_len": 600}, "max_len=600 is not above prompt_p90 . output_p90 = 653.4 tokens"),
        ({"max_len": 656}, "prompt_p90=570 is too near workload.max_len=656"),
    ],
)
def test_lengths_that_no_lognormal_has_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        Lognormal(**{"num_requests": 9, "seed": 0, **LOGNORMAL, **changes}).generate(None)

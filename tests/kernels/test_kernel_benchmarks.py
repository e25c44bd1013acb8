"""The kernels' benchmarks: every quick one runs, failures leave rows, and the rates are what they
say.
"""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import AWKWARD, reference
from torch import Tensor

from sarathi_kernels.attention.decode import DecodeConfig, decode_config
from sarathi_kernels.attention.prefill import PrefillConfig, prefill_config
from sarathi_kernels.attention.reference import make_segment, paged_attention
from sarathi_kernels.benchmarks import attention_benchmarks, attention_peers, fused_benchmarks
from sarathi_kernels.benchmarks.__main__ import main
from sarathi_kernels.benchmarks.attention_cases import make_inputs
from sarathi_kernels.benchmarks.measure import COLUMNS, Benchmark, measure, run
from sarathi_kernels.benchmarks.tuning import tune
from sarathi_kernels.runtime import tuned
from sarathi_kernels.runtime.chip import CHIPS
from sarathi_kernels.runtime.testing import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def benchmark_of(
    work: object, *, operation: str = "sleep", flops: float = 3.0, num_bytes: float = 5.0
) -> Benchmark:
    return Benchmark(operation, "case", "mine", work, flops, num_bytes)  # type: ignore[arg-type]


def test_a_row_has_the_time_and_the_rates_of_the_work() -> None:
    calls = []

    def work() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.01)

    row = measure(benchmark_of(work), torch.device("cpu"), torch.float16)
    assert tuple(row) == COLUMNS
    assert row["repetitions"] == len(calls) - 1 == 3  # one call to warm up
    assert 0.01 <= row["q20"] <= row["median_seconds"] <= row["q80"] < 0.1
    assert row["flops_per_second"] == pytest.approx(3 / row["median_seconds"])
    assert row["bytes_per_second"] == pytest.approx(5 / row["median_seconds"])
    assert (row["dtype"], row["timing"], row["error"]) == ("float16", "host", "")


def test_what_fails_leaves_a_row_and_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel\nand a long story")

    def some(*_: object) -> object:
        yield benchmark_of(fail, operation="bad")
        yield benchmark_of(lambda: None, operation="good")
        raise MemoryError("too large")

    # No others: the campaign's dry run has them all.
    monkeypatch.setattr(attention_benchmarks, "benchmarks", lambda *_: iter(()))
    monkeypatch.setattr(fused_benchmarks, "benchmarks", some)
    seen: list[str] = []
    rows = run(DEVICE, torch.float16, True, on_row=lambda row: seen.append(row["operation"]))
    rows = [row for row in rows if row["operation"] in ("bad", "good", "fused_benchmarks")]
    assert [row["error"] for row in rows] == [
        "RuntimeError: no such kernel",
        "",
        "RuntimeError: making its inputs: MemoryError: too large",
    ]
    assert rows[0]["median_seconds"] is None
    assert seen[-3:] == ["bad", "good", "fused_benchmarks"]


def test_quick_benchmarks_run_and_are_compared_with_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["add_norm", "greedy"]  # the campaign's dry run has the others
    arguments = [word for name in names for word in ("--operation", name)]
    assert main(["--quick", "--csv", str(tmp_path / "rows.csv"), *arguments]) == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["operation"] for row in rows} == set(names)
    for name in names:
        implementations = {
            row["implementation"].split()[0] for row in rows if row["operation"] == name
        }
        assert implementations == {"triton", "torch"}
    for row in rows:
        assert math.isfinite(float(row["bytes_per_second"]))
        assert float(row["bytes_per_second"]) > 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2  # the device and the titles


def test_bad_requests_get_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_benchmarks, "benchmarks", lambda *_: [benchmark_of(lambda: None)])
    assert main(["--quick", "--operation", "sleeep"]) == 2
    assert "no benchmark of sleeep; there are" in capsys.readouterr().err
    assert main(["--quick", "--csv", "/nonexistent/rows.csv"]) == 2
    assert "/nonexistent/rows.csv" in capsys.readouterr().err
    for options in (["--head-size", "64"], ["--tune", "--csv", "rows.csv"]):
        with pytest.raises(SystemExit, match="2"):
            main(options)
        assert "--tune" in capsys.readouterr().err
    with pytest.raises(ValueError, match="too slowly for real sizes"):
        run(torch.device("cpu"), torch.float16, False)


def test_tiles_that_were_measured_are_what_launches_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip, dtype = CHIPS[90], torch.float16
    works = (("prefill", 64), ("decode", 1), ("decode", 4), ("decode", 8))
    for head_size in (256, 64):
        names = [tuned.name_of(kernel, chip, head_size, dtype, work) for kernel, work in works]
        lines: list[str] = []
        found = tune(DEVICE, dtype, lines.append, head_size, quick=True)
        if DEVICE.type == "cpu":
            assert [line.partition(":")[0] for line in lines] == names
            assert found.keys() <= set(names)
    prefill, *decodes = names
    by_rules = decode_config(CHIPS[80], 64, dtype, 1)
    monkeypatch.setattr(tuned, "FILE", tmp_path / "tiles.json")
    tuned.write({prefill: [64, 32, 4, 3, 1], decodes[0]: [16, 8, 2]})
    tuned.write({decodes[1]: [32, 4, 3]})  # entries that are there stay
    try:
        assert decode_config(chip, 64, dtype, 1) == DecodeConfig(16, 8, 2)
        assert decode_config(chip, 64, dtype, 4) == DecodeConfig(32, 4, 3)
        assert prefill_config(chip, 64, dtype, 64) == PrefillConfig(64, 32, 4, 3, ahead=True)
        assert not prefill_config(chip, 64, dtype, 64, has_window=True).ahead
        assert decode_config(CHIPS[80], 64, dtype, 1) == by_rules
    finally:
        monkeypatch.undo()
        tuned.forget()


def test_attention_is_compared_with_the_libraries_that_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that attends by the plain reference, and one that does not take the case."""
    case = AWKWARD["window over tiles"]
    inputs = make_inputs(case, device=DEVICE, dtype=torch.float32, num_sms=2)
    assert attention_peers.library_of("no_such_library", torch.device("cuda")) is None

    def attend(query: Tensor, keys: Tensor, values: Tensor, **given: Any) -> Tensor:
        assert given.pop("causal") is True
        segments = []
        starts = given.pop("cu_seqlens_q").tolist()
        kv_lens = given.pop("cache_seqlens").tolist()
        window = given.pop("window_size")[0] + 1
        for number, kv_len in enumerate(kv_lens):
            num_queries = starts[number + 1] - starts[number]
            assert num_queries <= given["max_seqlen_q"]
            blocks = given["page_table"][number, : -(-kv_len // case.block_size)].long()
            where = {"device": DEVICE, "dtype": query.dtype, "sliding_window": window}
            segments.append(make_segment(starts[number], num_queries, kv_len, blocks, **where))
        return paged_attention(query, keys, values, segments, given["softmax_scale"])

    library = SimpleNamespace(flash_attn_with_kvcache=attend)
    monkeypatch.setattr(attention_peers, "library_of", lambda name, device: library)
    attended = attention_peers.flash_attention(case, inputs)["flash"]()
    assert relative_error(attended, reference(case, inputs)) < 1e-5
    works = attention_peers.flashinfer_hybrid(case, inputs)
    assert list(works) == ["flashinfer", "flashinfer pod"]
    for work in works.values():
        row = measure(benchmark_of(work), torch.device("cpu"), torch.float32)
        assert "has no attribute" in row["error"]

"""The task `advise` from the command line: what it simulates, prints and writes, and the mistakes
that it refuses.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from composed import config_of, refusal_of, run
from helpers import predicted, requests_of
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.experiment.advise import choose
from sarathi_lab.extensions.advise import answer, remedies, sequences
from sarathi_lab.extensions.advise.options import (
    options_of,
    try_chunks,
    with_chunk_of,
    with_room,
)
from sarathi_lab.extensions.advise.slow_end import slowed
from sarathi_lab.extensions.advise.task import Advice, Advise
from sarathi_lab.policy import VllmV1
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.run import main

COST = make_cost_model("analytic", load_option("model", "13b"), load_option("hardware", "a6000"), 2)
SMALL = ["task=advise", "workload.num_requests=12", "batch=6", "tracking=none"]
ALONE = [*SMALL, "task.policies=[]"]
H100 = ["hardware=h100", "model=llama3-8b"]
# Requests that arrive over time on a fast device, a few of them.
LOADED = ["task=advise", "tracking=none", *H100, "batch=32", "cache.num_blocks=auto"]
LOADED += ["workload.arrivals=poisson", "workload.num_requests=24"]
TABLES = ("advice", "flags")


def advised(folder: Path, *args: str) -> dict[str, pd.DataFrame]:
    """The tables of one run with `args`, of few chunks."""
    return dict(run(folder, *ALONE, "task.chunks=[128,512]", *args).tables)


def advice_of(*args: str) -> Advice:
    cfg = config_of(*args)
    task: Advise = build(cfg.task)
    return task.advise(task.check(cfg))


def lines_of(result: Result) -> str:
    return "\n".join(one for one in result.shown if isinstance(one, str))


def commands_in(text: str) -> list[list[str]]:
    """The settings of each command that an answer names."""
    commands = [line.split("sarathi_lab.run ")[1] for line in text.splitlines() if "-m sar" in line]
    return [shlex.split(command) for command in commands]


def cells_of(result: Result) -> str:
    tables = [one for one in result.shown if isinstance(one, DisplayTable)]
    return "\n".join(" | ".join(line) for table in tables for line in table.cells())


def test_the_tables_are_the_advice_and_the_flags(tmp_path, capsys):
    assert main([*ALONE, f"output={tmp_path}"]) == 0
    tables = {name: pd.read_csv(next(tmp_path.rglob(f"{name}.csv"))) for name in TABLES}
    requests = requests_of(*[(992, 32)] * 12)
    chunks = tables["advice"][~tables["advice"].is_whole]
    for row in chunks.itertuples():
        expected = predicted(requests, 6, COST.iteration_time, VllmV1(row.chunk))
        assert row.throughput == pytest.approx(expected["throughput"])
    best = choose(tables["advice"]).chunk
    text = capsys.readouterr().out
    assert f"best: vllm_v1 with chunk {best}, for the most tokens/s" in text
    assert "of those marked * it has the shortest times between tokens" in text
    assert f"--max-num-batched-tokens {best} --max-num-seqs 6" in text
    assert "simulated runs of 12 requests (seed 0); no server was run" in text
    (config,) = tmp_path.rglob("[!.]*/config.yaml")
    assert OmegaConf.load(config).policy.max_num_batched_tokens == best


def test_where_chunks_do_not_pay_it_says_so_and_no_flag_cuts_a_prompt(tmp_path):
    load = [*H100, "batch=32", "workload.num_requests=96", "tracking=none"]
    result = run(tmp_path, "task=advise", "task.policies=[]", *load)
    text = lines_of(result)
    assert "do not chunk here: it leaves all prompts whole, the longest has 992" in text
    assert "--max-num-batched-tokens 1055 " in text  # 1024 + 31 decodes
    assert "--no-enable-chunked-prefill" in text
    assert not re.search(r"(?<!no)-enable-chunked-prefill", text)
    assert result.summary["chunking_pays"] == 0


def test_every_setting_that_it_reads_has_an_effect(tmp_path):
    plain = advised(tmp_path / "plain")
    others = (
        *("hardware=a100", "policy=sarathi_serve", "executor.cost_model=profiled", "slo.tbt=0.1"),
        *("max_model_len=2000", "cache.num_blocks=100", "host=vllm_0_19"),
        *("speculation=assumed", "executor.pipeline_parallel=2", "cache.prefix=true"),
        *("workload.prompt_len=500 workload.output_len=20", "cluster=replicas"),
    )
    for i, other in enumerate(others):
        tables = advised(tmp_path / str(i), *other.split())
        assert any(not tables[name].equals(plain[name]) for name in tables), other


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        # 40 layers launched eagerly in 5 ms each take longer than their products.
        ("0.005", "captured to 512 tokens, 64 now, the best chunk is 512"),
        ("0.0001", "captured beyond the 64 tokens of now gain nothing"),
        (None, ""),
    ],
)
def test_larger_graphs_are_advised_where_launches_are_known_and_outlast_the_device(
    launch, words, tmp_path
):
    graphs = "host.graphs.mode=full_and_piecewise", "host.graphs.largest=64"
    host = ["host=vllm_0_19", *([*graphs, f"host.graphs.layer_launch={launch}"] if launch else ())]
    result = run(tmp_path, *ALONE, "task.chunks=[128,512]", *host)
    assert ("CUDA graphs" in lines_of(result)) == bool(launch)
    assert words in lines_of(result)
    flags = "vLLM: --max-num-batched-tokens 512 --max-cudagraph-capture-size 512"
    assert (flags in lines_of(result)) == (launch == "0.005")


def test_a_mixture_is_advised_larger_chunks(tmp_path):
    long = ("hardware=h100", "seq_len=8192", "pd_ratio=32", "task.chunks=[512,4096]")
    best = [
        run(tmp_path / model, *ALONE, *long, f"model={model}").summary["chunk"]
        for model in ("llama3-8b", "qwen3-30b-a3b")
    ]
    assert best == [512, 4096]


# -- policies --------------------------------------------------------------------------------------


def test_policies_of_servers_are_compared_and_each_has_its_flags(tmp_path):
    result = run(tmp_path, *SMALL, "task.chunks=[256]", "executor.tensor_parallel=2")
    assert list(result.tables["advice"].policy) == [
        *("vllm_v1", "sglang", "sglang enable_mixed_chunk=true", "trtllm")
    ]
    rates = result.tables["advice"].set_index("policy").throughput
    compared = next(shown for shown in result.shown if isinstance(shown, DisplayTable))
    for row in compared.rows:
        label = str(row["policy"]).replace("(1)", "enable_mixed_chunk=true")
        rate = rates[label]
        assert str(row["chunk"]).endswith("*") == (rate >= 0.99 * rates.max())
    assert "(1) enable_mixed_chunk=true" in lines_of(result)
    flags = result.tables["flags"].set_index("server")["flags"]
    assert "--tensor-parallel-size 2" in flags["vLLM"]
    assert "--enable-mixed-chunk" in flags["SGLang with mixed chunks"]
    assert "--enable-mixed-chunk" not in flags["SGLang"]
    assert "--tp_size 2" in flags["TensorRT-LLM"]


def test_named_policies_take_parameters_and_a_rule_without_a_server_has_no_flags(tmp_path):
    policies = "task.policies=[{sglang: {page_size: 16}},sarathi]"
    result = run(tmp_path, *SMALL, "policy=sarathi", "task.chunks=[256]", policies)
    assert list(result.tables["advice"].policy) == ["sarathi", "sglang page_size=16"]
    assert list(result.tables["flags"].server) == ["SGLang"]
    assert "--page-size 16" in result.tables["flags"]["flags"][0]


def test_a_policy_that_can_not_run_is_left_out_with_its_reason(tmp_path):
    policies = "task.policies=[{sarathi_serve: {watermark: 2}}]"
    result = run(tmp_path, *SMALL, "task.chunks=[256]", policies)
    assert "sarathi_serve watermark=2 is left out: watermark=2 is not" in lines_of(result)


# -- objectives ------------------------------------------------------------------------------------


def test_a_server_of_another_maker_is_left_out_and_has_no_flags(tmp_path):
    chosen = ["task.policies=[trtllm]", "task.chunks=[512]", "hardware=mi300x"]
    result = run(tmp_path / "compared", *SMALL, *chosen)
    complaint = "TensorRT-LLM 1.0 runs on cards of nvidia, and mi300x is of amd"
    assert f"trtllm is left out: {complaint}" in lines_of(result)
    assert list(result.tables["flags"].server) == ["vLLM"]
    result = run(tmp_path / "own", *SMALL, *chosen, "policy=trtllm")
    assert f"trtllm has no flags: {complaint}" in lines_of(result)
    assert result.tables["flags"].empty


def test_an_unmeasured_card_states_whether_its_slow_end_meets_the_objective(tmp_path):
    args = [*ALONE, "task.chunks=[256]", *H100, "workload.rate=1", "workload.num_requests=6"]
    met = run(tmp_path / "met", *args, "hardware=h100-pcie", "slo.tbt=1")
    assert "(all kernels 36% longer) it is met there, too: TBT P99" in lines_of(met)
    tight = f"slo.tbt={1.1 * met.summary['tbt_p99']}"
    missed = run(tmp_path / "missed", *args, "hardware=h100-pcie", tight)
    assert missed.summary["slo_met"] == 1
    assert missed.summary["slo_met_at_slow_end"] == 0
    assert "it is NOT met there: TBT P99" in lines_of(missed)
    assert missed.tables["advice"].slo_met_at_slow_end.dropna().tolist() == [0]
    assert "met | missed" in cells_of(missed)


@pytest.mark.parametrize(("stated", "slow"), [([], 1.36), (["executor.slowdown=1.5"], 2.04)])
def test_the_slow_end_multiplies_a_stated_slowdown(stated, slow):
    cfg = config_of("task=advise", *stated)
    assert slowed(cfg, 0.36).executor.slowdown == pytest.approx(slow)


def test_a_bound_is_found_to_a_tenth_and_every_bound_is_shown(tmp_path):
    bounds = ["slo.ttft=0.5", "slo.tbt=0.012", "slo.quantile=0.9", "workload.rate=8"]
    result = run(tmp_path, *LOADED, *bounds, "task.policies=[]")
    table = result.tables["advice"]
    table = table[~table.is_whole.astype(bool)].sort_values("chunk")
    rows = list(zip(table.chunk, table.tbt_p90 <= 0.012, strict=True))
    crossed = [(low, high) for (low, met), (high, too) in pairwise(rows) if met != too]
    assert crossed
    assert all(high <= 1.1 * low for low, high in crossed)
    chosen = table[table.chunk == result.summary["chunk"]]
    assert chosen.slo_met.all()
    assert "TTFT\nP90 [ms]" in cells_of(result)
    assert "TBT\nP90 [ms]" in cells_of(result)
    assert " met" in cells_of(result)
    assert "best within it: vllm_v1" in lines_of(result)
    assert "it stays farthest below the bounds" in lines_of(result)


def test_each_table_is_of_runs_of_one_number_of_requests(tmp_path):
    """What is advised is confirmed by four times the requests."""
    bounds = ["slo.ttft=2", "slo.tbt=0.1", "workload.rate=8", "task.chunks=[256,512]"]
    result = run(tmp_path, *LOADED, *bounds, "task.policies=[]")
    tables = [shown for shown in result.shown if isinstance(shown, DisplayTable)]
    assert len(tables) == 2
    for table, number in zip(tables, (96, 24), strict=True):
        assert table.title.endswith(f"in runs of {number} requests")
        assert all(row["tokens/s"] for row in table.rows)
    in_longer_runs = {row["chunk"]: row["in 96\nrequests,\nof bounds"] for row in tables[1].rows}
    best = f"{result.summary['chunk']:.0f}"
    assert tables[0].rows[0]["objective"] == "met"
    assert in_longer_runs.pop(best) == f"met {result.summary['bound_use']:.0%}"
    assert list(in_longer_runs.values()) == ["-"]
    assert sorted(result.tables["advice"].num_requests) == [24, 24, 96]
    assert result.summary["num_requests"] == 96


def test_what_would_meet_an_objective_is_found_by_runs_that_its_commands_repeat(tmp_path):
    load = [*LOADED, "workload.rate=30", "slo.ttft=0.1", "slo.tbt=0.012", "task.policies=[]"]
    load += ["workload.num_requests=24", "task.chunks=[256]", "policy=vllm_v1"]
    text = lines_of(run(tmp_path, *load))
    assert "nothing meets it" in text
    assert "MISSES the objective" in text
    assert "--max-num-batched-tokens 256 " in text
    for_a_rate, for_replicas, *for_bounds = commands_in(text)
    # Of the rate that was typed, not that of the requests drawn.
    (rate,) = re.findall(r"with chunk=256 meets it up to ([\d.]+).*, of 30 here", text)
    assert f"{rate}/s in runs of 96" in lines_of(run(tmp_path / "rate", *for_a_rate))
    (number,) = re.findall(r"more replicas: (\d+) \(\d+ devices\)", text)
    summary = run(tmp_path / "replicas", "task=serve", *for_replicas).summary
    assert summary["ttft_p99"] <= 0.1
    assert summary["tbt_p99"] <= 0.012
    fewer = f"cluster.num={int(number) - 1}"
    summary = run(tmp_path / "fewer", "task=serve", *for_replicas, fewer).summary
    assert summary["ttft_p99"] > 0.1 or summary["tbt_p99"] > 0.012
    for command in for_bounds:  # a looser one, where any run keeps up
        assert "best within it" in lines_of(run(tmp_path / "bound", *command))


@pytest.mark.parametrize("rate", [12, 20])
def test_what_is_advised_or_has_flags_was_confirmed_by_longer_runs(rate, tmp_path):
    policies = "task.policies=[{sglang: {enable_mixed_chunk: true}},vllm_v1]"
    bounds = ["slo.ttft=1", "slo.tbt=0.02", f"workload.rate={rate}", "task.chunks=[256,512]"]
    load = [setting for setting in LOADED if not setting.startswith("workload.num_requests")]
    advice = advice_of(*load, *bounds, policies)
    assert advice.is_met
    longest = advice.table["num_requests"].max()
    assert advice.best["num_requests"] == longest == 4 * advice.table["num_requests"].min()
    for runs in advice.compared.values():
        row = choose(runs.judged)
        assert row["num_requests"] == longest


def test_a_bound_that_was_meant_in_milliseconds_is_pointed_out(tmp_path):
    result = run(tmp_path, *ALONE, "task.chunks=[128]", "slo.tbt=50")
    said = lines_of(result)
    assert "P99 TBT 50000 ms" in said
    assert "slo.tbt=50 is 50 seconds" in said
    assert "slo.tbt=0.05 is 50 ms" in said


def test_servers_take_the_longest_request_of_the_workload_not_of_the_seed(tmp_path):
    workload = ["workload=openchat_sharegpt4", "workload.max_len=8192"]
    args = ["task=advise", "tracking=none", *H100, *workload, "workload.num_requests=4"]
    flags = run(tmp_path, *args, "task.policies=[]", "task.chunks=[512]").tables["flags"]
    assert "--max-model-len 8192" in flags["flags"].item()


def test_assumed_requests_are_named_where_none_are_stated(tmp_path):
    args = ["task=advise", "tracking=none", "task.policies=[]", "task.chunks=[128]"]
    assumed = "assumed unless stated: workload"
    assert assumed in lines_of(run(tmp_path, *args))
    assert assumed in lines_of(run(tmp_path, *args, "workload.rate=1", "workload.num_requests=6"))
    assert assumed not in lines_of(
        run(tmp_path, *args, "workload.prompt_len=100", "workload.output_len=9")
    )


def test_equal_schedules_are_not_distinguished_and_the_first_policy_is_taken(tmp_path):
    """Mixed chunks of SGLang in pages of a token are vLLM's schedule."""
    policies = "task.policies=[{sglang: {enable_mixed_chunk: true}}]"
    bounds = ["slo.ttft=2", "slo.tbt=0.1", "workload.rate=8", "task.chunks=[256]"]
    text = lines_of(run(tmp_path, *LOADED, *bounds, policies))
    assert "best within it: vllm_v1 with chunk 256" in text
    assert "tied with it (within 7%, by which half of the simulator's" in text
    assert ": sglang enable_mixed_chunk=true" in text


def test_policies_after_one_within_the_objective_have_fewer_runs(tmp_path):
    """One of the same schedule is tried with one chunk, another one without what can't be best."""
    policies = "task.policies=[{sglang: {enable_mixed_chunk: true}},trtllm]"
    bounds = ["slo.ttft=2", "slo.tbt=0.02", "workload.rate=8"]
    advice = advice_of(*LOADED, *bounds, policies)
    assert advice.is_met
    assert advice.best["policy"] == "vllm_v1"
    _, twin, other = advice.compared.values()
    assert twin.table["chunk"].tolist() == [advice.best["chunk"]]
    thorough = try_chunks(other.option, None)
    assert len(other.table) < len(thorough.table)
    assert choose(other.table)["chunk"] == choose(thorough.table)["chunk"]


def test_a_policy_that_overtakes_is_searched_as_the_first(tmp_path):
    """The first one stalls its decodes, within a loose bound, but far from the next one."""
    bounds = ["slo.ttft=2", "slo.tbt=0.2", "workload.rate=4", "policy=sglang"]
    advice = advice_of(*LOADED, *bounds, "task.policies=[vllm_v1]")
    assert [runs.confirmed["slo_met"].any() for runs in advice.compared.values()] == [True, True]
    assert advice.best["policy"] == "vllm_v1"
    thorough = try_chunks(advice.of_best.option, None)
    assert advice.of_best.table["chunk"].tolist() == thorough.table["chunk"].tolist()
    # The others are tried with its chunk, so that none is better by which chunks were tried.
    overtaken = advice.compared["sglang"]
    assert advice.best["chunk"] in set(overtaken.table["chunk"])
    added = with_chunk_of(overtaken, {"chunk": 96, "is_whole": False})
    assert set(added.table["chunk"]) - set(overtaken.table["chunk"]) == {96}


def test_stalls_are_named_where_no_time_between_tokens_is_bounded(tmp_path):
    bounds = ["slo.ttft=2", "workload.rate=12", "task.chunks=[1024]", "policy=sglang"]
    text = lines_of(run(tmp_path, *LOADED, *bounds, "task.policies=[vllm_v1]"))
    assert "best within it: sglang" in text
    assert re.search(r"it lets requests wait up to [\d,.]+ ms between tokens", text)
    assert "vllm_v1 with chunk 1024" in text


def test_more_sequences_come_before_more_devices(tmp_path):
    """Two sequences keep requests waiting on a device that has room for many more."""
    load = ["workload.rate=8", "workload.prompt_len=100", "workload.output_len=100"]
    load += ["workload.num_requests=8", "workload.arrivals=poisson"]
    typed = ["task=advise", "tracking=none", *H100]
    typed += [*load, "slo.ttft=1", "slo.tbt=0.05", "task.chunks=[256]", "task.policies=[]"]
    result = run(tmp_path, *typed, "batch=2")
    text = lines_of(result)
    (batch,) = re.findall(r"batch=(\d+) \(--max-num-seqs\), as all 2 are in use", text)
    assert "more replicas" not in text
    assert f"--max-num-seqs {batch} " in text
    advice = advice_of(*typed, f"batch={batch}")
    assert advice.is_met
    assert f"(TTFT P99 {1e3 * advice.best['ttft_p99']:.3g} ms" in text


def test_a_number_of_sequences_that_there_cant_be_is_named_with_its_reason(monkeypatch):
    load = ["workload.rate=8", "workload.prompt_len=100", "workload.output_len=100"]
    load += ["workload.num_requests=8", "workload.arrivals=poisson", "batch=2", "slo.ttft=1"]
    advice = advice_of("task=advise", *H100, *load, "task.chunks=[256]", "task.policies=[]")
    assert not advice.is_met

    def refuse(*_: object) -> None:
        raise UserError("no memory for as many; use fewer")

    monkeypatch.setattr(sequences, "_with_sequences", refuse)
    monkeypatch.setattr(remedies, "_of_as_many_sequences", lambda *_: remedies.Remedies())
    remedied = remedies.remedies(advice.of_best, advice.best, RunContext(Path(), Path(), "", ""))
    (line,) = answer.remedy_lines(remedied.commands, remedied.notes)
    assert line.strip() == (
        "not tried: more sequences from batch=4 (no memory for as many; use fewer)"
    )


def test_where_nothing_meets_the_objective_the_nearest_misses_the_fewest_bounds():
    """The largest chunk is tried, too, which alone serves first tokens in time."""
    bounds = ["slo.ttft=0.15", "slo.tbt=0.001", "workload.rate=8", "task.policies=[]"]
    advice = advice_of(*LOADED, *bounds)
    longest = max(request.prompt_len for request in advice.of_best.plan.load.requests)
    assert not advice.is_met
    assert advice.table.chunk.max() >= longest
    steady = advice.table[advice.table.is_steady.astype(bool)]
    assert advice.best["bounds_missed"] == steady.bounds_missed.min()


def test_flags_for_a_rate_are_those_of_the_search(tmp_path, capsys):
    """A closed load has the paper's batch of 8, with which no rate was searched."""
    load = ["task=advise", "tracking=none", *H100, "slo.ttft=0.2", "slo.tbt=0.05"]
    load += ["workload.num_requests=24", "task.policies=[]", "task.chunks=[256]"]
    text = lines_of(run(tmp_path, *load))
    assert "a lower rate: " in text
    assert "--max-num-seqs 256 " in text
    assert "a looser bound" not in text  # of waits that are the queue's


def test_a_rate_is_searched_with_larger_chunks_where_none_is_within_its_bounds(tmp_path):
    """The chunk of the shortest stalls takes too long for a prompt that is alone."""
    load = ["workload.arrivals=poisson", "workload.prompt_len=2000", "workload.output_len=20"]
    load += ["workload.rate=3", "workload.num_requests=8"]
    bounds = ["slo.ttft=0.9", "slo.tbt=0.07", "slo.quantile=0.9"]
    args = ["task=advise", "tracking=none", "hardware=l4", "model=llama3.1-8b", *load, *bounds]
    result = run(tmp_path, *args, "task.policies=[]", "task.chunks=[128,512]")
    table = result.tables["advice"].set_index("chunk")
    assert (table.gap_bounds_missed > 0).all()
    assert table.request_gap_p99.idxmin() == 128
    assert "a lower rate: vllm_v1 with chunk=512 meets it up to" in lines_of(result)


def test_a_rate_is_searched_with_the_sequences_that_the_chunk_has_room_for(tmp_path):
    """A block of 32 tokens beside 255 decodes does not fit a budget of 256."""
    load = ["task=advise", "tracking=none", *H100, "slo.tbt=0.02", "slo.ttft=0.2"]
    load += ["workload.rate=90", "workload.num_requests=32", "policy=trtllm"]
    result = run(tmp_path, *load, "task.policies=[]", "task.chunks=[256]")
    text = lines_of(result)
    assert "--max_num_tokens 256 --max_batch_size 225" in text
    assert "refuses sequences of more than 1,024 tokens, which all these requests have" in text
    for_a_rate, for_replicas = commands_in(text)
    assert for_a_rate[0] == "task=capacity"
    assert "batch=225" in for_a_rate
    (rate,) = re.findall(r"meets it up to ([\d.]+) requests/s", text)
    assert f"{rate}/s in runs of 128" in lines_of(run(tmp_path / "rate", *for_a_rate))
    (first_token,) = re.findall(r"meet it in 128 requests \(TTFT P99 ([\d.]+) ms", text)
    summary = run(tmp_path / "replicas", "task=serve", *for_replicas).summary
    assert f"{1e3 * summary['ttft_p99']:.3g}" == first_token


def test_replicas_are_of_the_stated_kind_and_in_numbers_that_it_takes(tmp_path):
    """Three replicas can't share the 128 experts of a mixture."""
    load = ["workload.arrivals=poisson", "workload.rate=48", "workload.prompt_len=3000"]
    load += ["workload.output_len=10", "workload.num_requests=24", "slo.ttft=0.5"]
    args = ["task=advise", "tracking=none", "hardware=h100", "model=qwen3-30b-a3b", *load]
    shared = ["cluster=lockstep", "cluster.num=2"]
    result = run(tmp_path, *args, *shared, "task.chunks=[2048]", "task.policies=[]")
    text = lines_of(result)
    assert re.search(r"more replicas: [48] \(", text)
    assert "cluster=lockstep" in commands_in(text)[-1]
    assert "cluster=replicas" not in text


def test_replicas_that_there_cant_be_are_named_with_the_reason(tmp_path):
    load = ["workload.rate=60", "slo.ttft=0.2", "slo.tbt=0.03", "executor.pipeline_parallel=2"]
    result = run(tmp_path, *LOADED, *load, "task.policies=[]", "task.chunks=[256]")
    said = "not tried: more replicas (executor.pipeline_parallel=2: "
    assert said in lines_of(result)


def test_sglang_without_mixed_chunks_takes_any_chunk_beside_its_sequences():
    advice = advice_of(
        *LOADED,
        "policy=sglang",
        "workload.rate=4",
        "batch=512",
        "task.policies=[]",
        "task.chunks=[128]",
    )
    assert list(advice.table.chunk.unique()) == [128]


@pytest.mark.parametrize("policy", ["trtllm", "vllm_v1", "{sglang: {enable_mixed_chunk: true}}"])
def test_the_flags_set_the_chunk_that_was_shown(policy, tmp_path):
    """A server that takes its own number of sequences has no more than a block fits beside."""
    load = [setting for setting in LOADED if setting != "batch=32"]
    bounds = ["workload.rate=4", "slo.ttft=9", "slo.tbt=9", "task.chunks=[128]"]
    result = run(tmp_path, *load, *bounds, f"task.policies=[{policy}]")
    assert set(result.tables["flags"]["effective_budget"]) == {128}


def test_a_run_too_short_to_judge_is_no_overload(tmp_path):
    """Requests that take seconds fill an empty server for most of the run."""
    load = ["workload=openchat_sharegpt4", "workload.rate=4", "workload.num_requests=16"]
    args = ["task=advise", "tracking=none", *H100, *load, "slo.ttft=100", "slo.tbt=1"]
    result = run(tmp_path, *args, "task.policies=[]", "task.chunks=[512]")
    assert "too short" in cells_of(result)
    assert "are too few to tell whether it keeps up" in lines_of(result)
    assert "faster than any" not in lines_of(result)


def test_a_run_whose_waits_grow_is_not_within_an_objective(tmp_path):
    """TBT alone is bounded, which a growing queue does not touch."""
    load = [*LOADED, "workload.rate=80", "slo.tbt=1", "task.policies=[]", "task.chunks=[256]"]
    result = run(tmp_path, *load)
    assert result.summary["is_steady"] == result.summary["slo_met"] == 0
    assert "overloaded" in cells_of(result)
    assert "requests come faster than any of these serves them" in lines_of(result)
    assert "most is served" not in lines_of(result)
    assert "a lower rate: " in lines_of(result)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["workload.arrivals=users", "workload.users=4", "slo.tbt=1"], "best within it"),
        (["workload=trace", "workload.path=tests/data/trace.csv", "slo.ttft=9"], "best within it"),
        (["workload.rate=8"], "first tokens and overload are not judged without an objective"),
        (["slo=strict"], "all requests wait from the start"),
        (["slo.tbt=0.001"], "a looser bound: slo.tbt="),
        (["slo=strict", "slo.tbt_factor=0.5"], "a looser bound: slo.tbt_factor="),
        (["workload.arrivals=users", "workload.users=4", "slo.tbt=0.001"], "a looser bound"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_loads_have_a_readable_answer(args, said, tmp_path):
    small = [*ALONE, "task.chunks=[64,128]", *H100]
    small = [one for one in small if not (one.startswith("workload.") and "trace" in str(args))]
    assert said in lines_of(run(tmp_path, *small, *args))


# -- mistakes --------------------------------------------------------------------------------------


def test_the_simulated_numbers_of_the_chosen_chunk_are_the_summary(tmp_path):
    result = run(tmp_path, *ALONE, "task.chunks=[256,1024]")
    (row,) = result.tables["advice"].query(f"chunk == {result.summary['chunk']}").to_dict("records")
    assert row["is_as_good"]
    assert result.summary["throughput"] == row["throughput"]
    assert list(result.tables) == list(TABLES)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["policy=orca"], ["policy=orca has no chunk", "policy=vllm_v1"]),
        (["executor=torch", "model=tiny"], ["executor=torch has no cost model", "use executor="]),
        (
            ["policy.max_num_batched_tokens=300"],
            ["policy.max_num_batched_tokens=300 has no effect", "task.chunks"],
        ),
        (["task.chunks=[4,256]"], ["=4 is smaller than the 5 decodes", ">=6"]),
        (["cache.num_blocks=3"], ["can never fit the KV cache"]),
        (["model=33b"], ["model 33b needs 64.6 GB"]),
        (["task.policies=[vllm_v2]"], ["vllm_v2 is unknown (did you mean vllm_v1?)"]),
        (["task.policies=[orca]"], ["policy=orca has no chunk"]),
        (["task.policies=[{sglang: {page: 4}}]"], ["sglang.page is not a parameter"]),
        (["task.policies=vllm_v1"], ["task.policies=vllm_v1 is no list"]),
        (["cluster=disaggregated"], ["is for engines that are alike", "cluster=replicas"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_advised_is_one_line(args, words):
    said = refusal_of(*SMALL, *args)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("tensor_parallel=2", "is not a setting: write executor.tensor_parallel="),
        ("task=crossover", "crossover is an option of experiment: write experiment=crossover"),
    ],
)
def test_names_that_others_have_are_answered_by_the_setting(setting, fix, capsys):
    assert main([*SMALL, setting]) == 2
    assert fix in capsys.readouterr().err


def test_chunks_beyond_the_memory_do_not_leave_a_policy_out():
    """SGLang keeps room for iterations by the chunk: on 24 GB none of 8192 tokens."""
    card = ["task=advise", "policy=sglang", "hardware=rtx-4090", "model=qwen3-8b"]
    (option,) = options_of(config_of(*card, "workload.rate=1"), [])
    assert with_room(option, [2048, 4096, 8192]) == [2048, 4096]
    assert with_room(option, [8192]) == [8192]
    # Nor does another policy's best chunk, as large, end the comparison.
    runs = try_chunks(option, [512])
    large = {"chunk": 8192, "is_whole": False}
    assert with_chunk_of(runs, large) is runs
    rival = runs.with_row({**runs.best, **large, "throughput": 2 * runs.best["throughput"]})
    assert rival.best["chunk"] == 8192
    assert not try_chunks(option, None, rivals=[rival], is_thorough=False).table.empty


def test_a_short_run_within_its_bounds_that_looks_overloaded_is_tried_longer() -> None:
    """128 requests at 6/s fill and drain most of the time; 512 are served within the objective."""
    arrivals = ["workload=openchat_sharegpt4", "workload.rate=6", "slo.ttft=2", "slo.tbt=0.05"]
    one_run = ["task.chunks=[1024]", "task.policies=[]"]
    args = ["task=advise", "hardware=h100", "model=llama3.1-8b", *arrivals, *one_run]
    best = advice_of("executor=simulated", *args).best
    assert best.num_requests == 512
    assert best.slo_met
    assert best.chunk == 1024

"""What was simulated as each server's flags: every rule kept for any load, and every option as a
flag, or named.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from composed import config_of
from hypothesis import given
from hypothesis import strategies as st

from sarathi_lab.extensions.advise.server_flags import (
    ServerFlags,
    Simulated,
    read_servers,
    server_flags,
    server_of,
    simulated,
    simulated_options,
    unit_of,
)
from sarathi_lab.policy import (
    TGI,
    AscendV09,
    FastDeploy,
    Sarathi,
    SGLang,
    SplitFuse,
    TensorRTLLM,
    VllmV1,
)
from sarathi_lab.tasks.plan import make_plan

# Server -> its policy, and whether a budget suits (batch, model length, page); the rules in the
# sources' words.
SERVERS: dict[str, tuple[Any, Any]] = {
    "vLLM": (VllmV1(), lambda n, batch, length, page: batch <= n <= batch * length),
    "vllm-ascend": (
        AscendV09(enable_chunked_prefill=True),
        lambda n, batch, length, page: n >= 256 and n % 256 == 0 and n >= batch,
    ),
    "SGLang with mixed chunks": (
        SGLang(enable_mixed_chunk=True, page_size=16),
        lambda n, batch, length, page: n % page == 0 and (n - (batch - 1)) // page >= 1,
    ),
    "SGLang": (SGLang(page_size=16), lambda n, batch, length, page: n > 0 and n % page == 0),
    "TensorRT-LLM": (
        TensorRTLLM(),
        lambda n, batch, length, page: n % page == 0 and (n - (batch - 1)) // page >= 1,
    ),
    "TGI": (TGI(), lambda n, batch, length, page: batch - 1 < n <= batch * length),
    "FastDeploy": (FastDeploy(), lambda n, batch, length, page: batch <= n <= batch * length),
    "DeepSpeed-MII": (SplitFuse(), lambda n, batch, length, page: n >= batch),
}
UNITS = {"SGLang with mixed chunks": 16, "SGLang": 16, "TensorRT-LLM": 32}


def flags_of(name: str, budget: int, batch: int = 8, length: int = 1024, **facts: Any) -> Any:
    policy, _ = SERVERS[name]
    return server_flags(Simulated(policy.with_budget(budget), batch, length, **facts))


def test_every_server_has_a_policy_a_rule_and_a_source():
    assert [server.name for server in read_servers()] == list(SERVERS)
    for name, (policy, _) in SERVERS.items():
        server = server_of(policy)
        assert server is not None
        assert server.name == name
        assert "/" in server.source or "as SGLang" in server.source or "page" in str(server)
    assert server_of(Sarathi()) is None
    assert server_flags(Simulated(Sarathi(), 8, 1024)) is None
    assert unit_of(AscendV09(enable_chunked_prefill=True)) == 256


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(600, 9000))
def test_every_rule_is_kept_and_the_budget_moves_no_further_than_it_must(budget, batch, length):
    for name, (_, suits) in SERVERS.items():
        flags: ServerFlags = flags_of(name, budget, batch, length)
        effective, page = flags.effective_budget, UNITS.get(name, 1)
        assert suits(effective, batch, length, page), name
        assert str(effective) in flags.flags, name
        assert (f"from {budget} to {effective}: " in flags.note) == (effective != budget)
        assert not {"{", "}"} & set(flags.flags + flags.note)
        between = [*range(max(1, budget), effective), *range(effective + 1, budget + 1)]
        assert not any(suits(n, batch, length, page) for n in between), name


OPTIONS = {
    "executor.tensor_parallel": 8,
    "executor.pipeline_parallel": 2,
    "executor.weights": "fp8",
    "cache.dtype": "fp8",
    "cache.prefix": False,
    "cache.num_blocks": 100,
}


OF_HOST = {
    "host.overlaps": False,
    "host.graphs.mode": "full_and_piecewise",
    "host.graphs.sizes": "1 2 4",
}


def test_memory_host_and_engines_of_a_run_are_simulated_options():
    host = ("host=vllm_0_19", "host.overlaps=false", "host.graphs.mode=full_and_piecewise")
    sizes = ("host.graphs.sizes=[1,2,4]", "cache.memory_share=0.5", "cluster=replicas")
    card = ("hardware=a100", "model=llama3-8b", "workload.rate=1", "workload.num_requests=2")
    cfg = config_of("policy=vllm_v1", "executor=simulated", *card, *host, *sizes)
    options = simulated_options(make_plan(cfg))
    expected = {**OF_HOST, "cache.memory_share": 0.5, "engines": 2}
    assert {name: options[name] for name in expected} == expected


def test_a_server_of_a_trace_takes_its_longest_row():
    args = ("policy=vllm_v1", "executor=simulated", "hardware=a100", "model=llama3-8b")
    trace = ("workload=trace", "workload.path=tests/data/trace.csv")
    lengths = []
    for num_rows in (1, None):
        cfg = config_of(*args, *trace, f"workload.max_requests={num_rows or 'null'}")
        lengths.append(simulated(make_plan(cfg)).max_model_len)
    of_one, of_all = lengths
    assert of_one == of_all


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "vLLM",
            "--tensor-parallel-size 8 --pipeline-parallel-size 2 --quantization fp8 "
            "--kv-cache-dtype fp8 --no-enable-prefix-caching --num-gpu-blocks-override 101",
        ),
        (
            "SGLang",
            "--tensor-parallel-size 8 --pipeline-parallel-size 2 --quantization fp8 "
            "--kv-cache-dtype fp8_e4m3 --disable-radix-cache --max-total-tokens 1600",
        ),
        ("TensorRT-LLM", "--tp_size 8 --pp_size 2 --config options.yaml"),
        ("TGI", "--num-shard 8 --quantize fp8 --kv-cache-dtype fp8_e4m3fn"),
    ],
)
def test_what_was_simulated_is_in_the_servers_words(name, expected):
    flags = flags_of(name, 512, num_blocks=100, options=OPTIONS)
    assert flags.flags.endswith(expected)
    if name == "TensorRT-LLM":
        cache = {"dtype": "fp8", "enable_block_reuse": False, "max_tokens": 1600}
        assert yaml.safe_load("\n".join(flags.file)) == {"kv_cache_config": cache}
        assert "executor.weights=fp8 needs no flag, as the checkpoint states it" in flags.note


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("name", SERVERS)
def test_an_option_is_a_flag_a_line_of_the_file_or_named(name, weights):
    """None is dropped silently: without it the flags, the file or the note differ."""
    options = {**OPTIONS, **OF_HOST, "cache.memory_share": 0.5, "engines": 2}
    options["executor.weights"] = weights
    everything = flags_of(name, 512, num_blocks=100, options=options)
    for option in options:
        others = {key: value for key, value in options.items() if key != option}
        without = flags_of(name, 512, num_blocks=100, options=others)
        is_default = without == everything
        server = next(server for server in read_servers() if server.name == name)
        with_value = f"{option}={str(options[option]).lower()}"
        assert not is_default or server.options[with_value] == "", option


def test_sequences_that_the_budget_bounds_are_explained():
    """A block of 32 tokens fits beside 96 decodes in a budget of 128."""
    bounded = "beside more than its 97 sequences it cuts no prompt"
    assert bounded in flags_of("TensorRT-LLM", 128, batch=97).note
    assert "beside more than" not in flags_of("TensorRT-LLM", 128, batch=96).note


def test_parameters_of_the_policy_are_flags_or_named():
    interval = {"prefill_schedule_interval": 2, "scheduler_reserve_full_isl": False}
    policy = VllmV1(long_prefill_token_threshold=512, **interval)
    flags = server_flags(Simulated(policy, 8, 1024))
    assert flags is not None
    assert flags.flags.endswith("--long-prefill-token-threshold 512 --prefill-schedule-interval 2")
    assert "simulated, and no flag here: scheduler_reserve_full_isl=false" in flags.note


def test_prompts_are_left_whole_where_chunked_prefill_is_off():
    policy = VllmV1(max_num_batched_tokens=1055, enable_chunked_prefill=False)
    flags = server_flags(Simulated(policy, 32, 1024))
    assert flags is not None
    assert flags.flags.startswith("--max-num-batched-tokens 1055 --max-num-seqs 32")
    assert "--no-enable-chunked-prefill" in flags.flags
    assert flags.note == "chunked prefill is off, so it cuts no prompt"
    assert not re.search(r"(?<!no)-enable-chunked-prefill", flags.flags)

"""The budget as each server's flag: every rule kept for any load, and the effect of every
parameter.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.advice.server_flags import read_servers, server_flags

# Server -> whether a budget suits (batch, model length, page); the rules in the sources' own words.
RULES = {
    "vLLM": lambda n, batch, length, page: batch <= n <= batch * length,
    "vllm-ascend": lambda n, batch, length, page: n >= 256 and n % 256 == 0 and n >= batch,
    "SGLang": lambda n, batch, length, page: n % page == 0 and (n - (batch - 1)) // page >= 1,
    "SGLang, unmixed": lambda n, batch, length, page: n > 0 and n % page == 0,
    "TensorRT-LLM": lambda n, batch, length, page: n % page == 0 and (n - (batch - 1)) // page >= 1,
    "TGI": lambda n, batch, length, page: batch - 1 < n <= batch * length,
    "FastDeploy": lambda n, batch, length, page: (
        n % page == 0 and max(batch, page) <= n <= batch * length
    ),
    "DeepSpeed-MII": lambda n, batch, length, page: n >= batch,
}


def by_server(budget: int, **load: int) -> dict[str, Any]:
    rows = server_flags(budget, **{"batch_size": 8, "max_model_len": 1024, **load})
    return {row.server: row for row in rows.itertuples()}


def test_every_server_has_a_rule_and_a_source():
    assert [server["name"] for server in read_servers()] == list(RULES)
    assert all(
        "/" in server["source"] or "as SGLang" in server["source"]
        for server in read_servers()
        if server["name"][:4] != "vllm"
    )
    assert "5901028" in by_server(256)["vllm-ascend"].source


@given(
    st.integers(1, 5000),
    st.integers(1, 600),
    st.integers(1, 9000),
    st.sampled_from((1, 16, 32, 64, 128)),
)
def test_every_rule_is_kept(budget, batch, length, page):
    assume(length >= page)
    for name, row in by_server(
        budget, batch_size=batch, max_model_len=length, page_size=page
    ).items():
        effective = row.effective_budget
        assert RULES[name](effective, batch, length, page), name
        assert str(effective) in row.flags, name
        assert (f"from {budget} to {effective}: " in row.note) == (effective != budget)
        assert not {"{", "}"} & set(row.flags + row.note)


@given(st.integers(1, 5000), st.integers(1, 600))
def test_the_budget_moves_no_further_than_it_must(budget, batch):
    for name, row in by_server(budget, batch_size=batch).items():
        smaller = range(max(1, budget), row.effective_budget)
        assert not any(RULES[name](n, batch, 1024, 64) for n in smaller), name
        larger = range(row.effective_budget + 1, budget + 1)
        assert not any(RULES[name](n, batch, 1024, 64) for n in larger), name


def test_prompts_are_left_whole_only_where_chunked_prefill_is_off():
    load = {"batch_size": 32, "max_model_len": 1024}
    rows = server_flags(1055, **load, is_whole=True).set_index("server")
    expected = {
        "vLLM": "--no-enable-chunked-prefill --max-num-batched-tokens 1055",
        "SGLang": "--chunked-prefill-size -1 --max-prefill-tokens 1055",
        "TensorRT-LLM": "--max_num_tokens 1055 --max_batch_size 32",
    }
    assert list(rows.index) == list(expected)
    assert all(rows["flags"][name].startswith(flags) for name, flags in expected.items())
    assert (rows.effective_budget == 1055).all()
    assert set(rows.note) == {"chunked prefill is off, so it cuts no prompt"}
    assert not rows["flags"].str.contains("enable_chunked_prefill").any()


def test_a_page_longer_than_the_longest_sequence_is_refused():
    with pytest.raises(UserError, match="less than one page of 64"):
        by_server(256, max_model_len=40)

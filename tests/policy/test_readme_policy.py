"""The README's policy in one file, as a user would write it, on simulated requests."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.policy import Orca, Policy
from sarathi_lab.run import main

CHUNK = 64
SETTINGS = ["executor=simulated", "tracking=none", "batch=4", "seq_len=256", "pd_ratio=14"]


def test_the_policy_of_the_readme_serves_decodes_and_one_chunk(tmp_path, monkeypatch):
    text = (REPOSITORY / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my_policy.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)

    policy = "policy._target_=my_policy.DecodesThenOneChunk"
    chosen = [policy, f"chunk={CHUNK}", "baselines=[]", "workload.num_requests=8", "output=runs"]
    assert main([*SETTINGS, *chosen]) == 0

    (path,) = (tmp_path / "runs").rglob("iterations.parquet")
    iterations = pd.read_parquet(path)
    assert (iterations.num_prefill_tokens + iterations.num_decode_tokens).max() == CHUNK
    assert iterations.num_prefills.max() == 1
    assert ((iterations.num_prefills > 0) & (iterations.num_decode_tokens > 0)).any()
    requests = pd.read_parquet(path.with_name("requests.parquet"))
    assert len(requests) == 8
    assert (requests.output_token_ids.map(len) == requests.output_len).all()


@dataclass(frozen=True)
class WithoutBudgetField(Policy):
    """As one forgets to name the field; its chunk is another number in each run all the same."""

    name: ClassVar[str] = "without_budget_field"
    chunk: int = CHUNK

    def fill(self, batch, scheduler):
        scheduler.add_decodes(batch)
        scheduler.admit(batch)


@dataclass(frozen=True)
class OverBudget(WithoutBudgetField):
    name: ClassVar[str] = "over_budget"
    budget_field: ClassVar[str] = "chunk"


def test_runs_of_a_policy_without_a_budget_field_keep_their_chunk():
    assert WithoutBudgetField(chunk=32).chunk_of_runs == 32
    assert Orca().chunk_of_runs is None


def test_a_run_states_that_its_policy_breaks_its_own_budget(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    policy = f"policy._target_={__name__}.OverBudget"
    chosen = ["chunk=64", "baselines=[]", "workload.num_requests=6", "output=runs"]
    assert main([*SETTINGS, policy, *chosen]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "policy over_budget breaks its own budget:" in out
    assert "more tokens than chunk=64" in out

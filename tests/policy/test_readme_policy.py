"""The README's policy in one file, as a user would write it, on simulated requests."""

from __future__ import annotations

import re
import sys

import pandas as pd

from sarathi_lab.config.paths import REPOSITORY
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

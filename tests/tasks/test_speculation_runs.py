"""Speculation from settings: what a run with drafts leaves, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest
from plans import plan_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.load import load_summary
from sarathi_lab.run import main

SIMULATED = ("executor=simulated", "hardware=h100", "model=llama3-8b")
SMALL = ("batch=4", "pd_ratio=3", "seq_len=128", "workload.num_requests=8", "chunk=32")


def summary_of(folder, *settings):
    places = (f"output={folder}", f"hydra.run.dir={folder}/run", "tracking=none", "baselines=[]")
    assert main([*SMALL, *places, *settings]) == 0
    return load_summary(folder / "run")


def test_a_run_states_what_was_accepted(tmp_path, capsys):
    settings = ("speculation=assumed", "speculation.tokens=3", "speculation.acceptance=0.5")
    summary = summary_of(tmp_path, *SIMULATED, *settings)
    assert "drafts that were right" in capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "run" / "iterations.parquet")
    drafts, accepted = table.num_draft_tokens.sum(), table.num_accepted_tokens.sum()
    assert summary["acceptance_rate"] == accepted / drafts == pytest.approx(7 / 24, abs=0.06)
    decodes = table.num_decode_tokens.sum() - drafts
    assert summary["tokens_per_decode"] == 1 + accepted / decodes
    assert decodes + accepted == summary["num_decode_tokens"] == 8 * 31
    assert "decode_time_marginal" not in summary
    requests = pd.read_parquet(tmp_path / "run" / "requests.parquet")
    gaps = [after - before for times in requests.token_times for before, after in pairwise(times)]
    assert summary["tbt_mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert gaps.count(0) == accepted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([*SIMULATED, "speculation=prompt_lookup"], "use speculation=assumed"),
        (["model=tiny", "speculation=assumed"], "add executor=simulated"),
        ([*SIMULATED, "speculation=assumed", "host=vllm_0_19"], "add host=none"),
        ([*SIMULATED, "speculation=assumed", "chunk=auto"], "one engine without stages and drafts"),
        ([*SIMULATED, "speculation=assumed", "speculation.tokens=0"], "use a few drafts"),
        ([*SIMULATED, "speculation=assumed", "speculation.acceptance=1.1"], "is above 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(settings, words):
    with pytest.raises(UserError, match=words) as refused:
        plan_of("sarathi", *SMALL, *settings)
    assert "\n" not in str(refused.value)


def test_kernels_that_make_batches_ahead_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    settings = (
        "model=30m",
        "dtype=float32",
        "executor.kernels=triton",
        "speculation=prompt_lookup",
    )
    with pytest.raises(UserError, match=r"add executor\.overlap=false"):
        plan_of("sarathi", *SMALL, *settings)
    plan = plan_of("sarathi", *SMALL, *settings, "executor.overlap=false")
    assert plan.sizes.num_drafts == 4

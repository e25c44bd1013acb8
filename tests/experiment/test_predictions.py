"""The ledger of blind predictions: what was hashed stays as it was."""

from __future__ import annotations

import re
import runpy

import pandas as pd
import pytest
import yaml

from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY

LEDGER = EXPERIMENTS / "lab" / "predictions"
PAGE = (LEDGER / "README.md").read_text()


def test_entries_are_what_was_hashed_and_a_changed_one_is_noticed(tmp_path, capsys):
    ledger = runpy.run_path(str(LEDGER / "score.py"))
    assert ledger["main"]([]) == 0
    entry = yaml.safe_load((LEDGER / "vllm_58013.yaml").read_text())
    setting = next(iter(entry["predicted"]))
    entry["predicted"][setting] += 1
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump(entry))
    assert not ledger["score"](changed)
    entry["hash"] = ledger["hash_of"](entry)
    changed.write_text(yaml.safe_dump(entry))
    measured = {setting: entry["predicted"][setting] / 2, "another": 1.0}
    (tmp_path / "changed.result.yaml").write_text(yaml.safe_dump({"measured": measured}))
    capsys.readouterr()
    assert ledger["score"](changed)
    printed = capsys.readouterr().out
    assert "(+100.0%)" in printed
    assert "another: measured 1, not predicted" in printed


def test_a_new_entry_is_hashed_with_its_commit(tmp_path, monkeypatch):
    ledger = runpy.run_path(str(LEDGER / "score.py"))
    write_entry = ledger["write_entry"]
    answers = {"status": "", "rev-parse": "abc"}
    monkeypatch.setitem(write_entry.__globals__, "_git", lambda name, *others: answers[name])
    monkeypatch.setitem(write_entry.__globals__, "LEDGER", tmp_path)
    stated = {"source": "a", "asked": "b", "settings": {}, "predicted": {"c": 1.0}}
    write_entry("new", stated)
    entry = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert entry["hash"] == ledger["hash_of"](entry)
    assert entry["hash"] != ledger["hash_of"]({**entry, "commit": "def"})


def test_an_entry_is_written_only_by_the_commit_that_it_states(monkeypatch):
    ledger = runpy.run_path(str(LEDGER / "score.py"))
    write_entry = ledger["write_entry"]
    monkeypatch.setitem(write_entry.__globals__, "_git", lambda *arguments: "?? new_script.py")
    with pytest.raises(SystemExit, match=r"commit first:\n\?\? new_script\.py"):
        write_entry("not_written", {"predicted": {}})
    assert not (LEDGER / "not_written.yaml").exists()


@pytest.mark.parametrize(
    ("entry", "doubted"),
    [
        ("splitwise_70b", r"^2 x .*, 64 of 512: prompts$"),
        ("gpt_oss_120b", r", 512 users$"),
        ("minimax_m2_5", None),
        ("kimi_k2_5", None),
        ("qwen3_5_397b", None),
        ("deepseek_sglang", None),
        ("deepseek_trtllm", None),
        ("minimax_m2_5_b300", None),
        ("qwen3_5_397b_b300", None),
        ("deepseek_sglang_b300", None),
        ("deepseek_sglang_h200", None),
        ("deepseek_trtllm_h200", None),
        ("gpt_oss_120b_trtllm", None),
        ("qwen3_235b_trtllm", None),
        ("splitwise_bloom", None),
        ("splitwise_bloom_launched", None),
    ],
)
def test_the_page_has_the_errors_of_the_recorded_values(entry, doubted, capsys):
    ledger = runpy.run_path(str(LEDGER / "score.py"))
    predicted = yaml.safe_load((LEDGER / f"{entry}.yaml").read_text())["predicted"]
    measured = yaml.safe_load((LEDGER / f"{entry}.result.yaml").read_text())["measured"]
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| [{entry}]")]
    stated = re.search(r"mean error (\d+) %, median (\d+) %\*\* over (\d+) values", row)
    stated_of = [(measured, stated)]
    if doubted is not None:
        trusted = {name: time for name, time in measured.items() if not re.search(doubted, name)}
        assert len(trusted) < len(measured)
        doubting = re.search(r"; (\d+) % and (\d+) % over the (\d+) without", row)
        stated_of.append((trusted, doubting))
    for values, numbers in stated_of:
        mean, median, count = (int(number) for number in numbers.groups())
        ledger["print_errors"](predicted, values)
        printed = capsys.readouterr().out.splitlines()[-1]
        errors = [float(error) for error in re.findall(r"([\d.]+)%", printed)]
        assert errors == pytest.approx([mean, median], abs=0.5)
        assert f"  {count} predictions:" in printed


def test_the_page_has_the_errors_of_both_hosts_on_h200s():
    errors = pd.read_csv(LEDGER / "hosts.csv").query("card == 'h200'")
    several = errors.query("devices > 1")
    for _, rows in several.groupby("entry"):
        for _, by_host in rows.groupby("host"):
            stated = ", ".join(f"{100 * error:.1f}" for error in by_host.mean_error)
            assert f"| {stated} % |" in PAGE
    predicted = several.query("host == 'vllm_async'")
    assert f"Of these {predicted.points.sum()} values {predicted.too_fast.sum()} are" in PAGE
    alone = errors.query("devices == 1").set_index("host").mean_error
    assert f"is {100 * alone['vllm_0_19']:.1f} % off" in PAGE
    assert f"would be {100 * alone['vllm_async']:.1f} % off" in PAGE


def test_the_page_on_measuring_counts_the_recorded_rows_of_a_cpu():
    page = (REPOSITORY / "docs" / "explanation" / "measuring.md").read_text()
    tables = []
    for path in EXPERIMENTS.glob("*/*/results/cpu/*.csv*"):
        table = pd.read_csv(path)
        if "y" in table:
            tables.append(table.y)
    values = pd.concat(tables)
    assert f"Of the {len(values)} recorded rows of a CPU" in page
    assert f"{values.notna().sum()} have a number" in page

"""The ledger of blind predictions: what was hashed stays as it was."""

from __future__ import annotations

import runpy

import yaml

from sarathi_lab.config.paths import EXPERIMENTS

LEDGER = EXPERIMENTS / "lab" / "predictions"


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

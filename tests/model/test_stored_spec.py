"""A model of which only sizes are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint

from sarathi_lab.config.errors import UserError
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.stored_spec import StoredSpec

SPEC = StoredSpec(
    *("other", 4, 64, 2, 2, 96, 211, 32),
    stored_params=1000,
    cached_values=4 * 2 * 64,
)


def test_sizes_are_known_and_work_is_not():
    assert not SPEC.has_formulas
    assert SPEC.weight_bytes(2) == 2000
    assert replace(SPEC, stored_bytes=700).weight_bytes(2) == 700  # quantised
    assert SPEC.kv_bytes_per_token(2) == 1024
    assert replace(SPEC, kv_dtype="fp8").kv_bytes_per_token(2) == 512
    assert SPEC.of_part(2).weight_bytes(2) == 1000
    assert SPEC.of_part(2).kv_bytes_per_token(2) == 512
    work = type("Work", (), {"num_emits": 3})
    for value in (SPEC.flops(work), SPEC.min_bytes(work, 2), SPEC.weight_read_bytes(work, 2)):
        assert np.isnan(value)


def test_what_the_lab_does_not_read_is_left_to_another(tmp_path):
    make_checkpoint("llama", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"phi3"'))
    asked: list[Path] = []

    def read_other(folder: Path) -> StoredSpec:
        asked.append(folder)
        return SPEC

    model = AutoModel(str(tmp_path))
    assert model.resolve("tiny", read_other) == (SPEC, tmp_path)
    assert asked == [tmp_path]
    with pytest.raises(UserError, match="phi3"):
        model.resolve("tiny")

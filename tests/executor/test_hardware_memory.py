"""Memory of the hardware files: what a driver reports, not what a datasheet rounds."""

from __future__ import annotations

import json

import pytest

from sarathi_lab.config.instantiate import load_option, option_files
from sarathi_lab.config.paths import REPOSITORY

GPUS = [name for name in option_files("hardware") if name != "auto"]


@pytest.mark.parametrize("name", GPUS)
def test_no_file_has_a_round_size(name):
    """Devices report some of the memory that they are sold with, in no round GB or GiB."""
    memory = load_option("hardware", name).memory_bytes
    for unit in (1e9, 2**30):
        assert abs(memory / unit - round(memory / unit)) > 0.005


def test_a_recorded_run_had_the_memory_of_its_file():
    folder = REPOSITORY / "experiments/lab/real_servers/rtx-4090-llama-3.1-8b/run"
    recorded = json.loads((folder / "meta.json").read_text())["hardware"]
    assert load_option("hardware", "rtx-4090").memory_bytes == recorded["device_total_memory_bytes"]

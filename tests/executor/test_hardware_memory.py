"""Memory of the hardware files: what a driver reports, not what a datasheet rounds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sarathi_lab.config.instantiate import load_option, option_files
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.executor.simulated.backend import SimulatedBackend

GPUS = [name for name in option_files("hardware") if name not in ("auto", "datasheet")]


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


def test_a_user_s_round_size_is_cautioned():
    hardware, spec = load_option("hardware", "a100"), load_option("model", "llama3.1-8b")

    def has_caution(memory_bytes: float) -> bool:
        device = dataclasses.replace(hardware, memory_bytes=memory_bytes)
        cautions = SimulatedBackend(device).cautions(spec)
        return any("a round 80 GB" in caution for caution in cautions)

    assert has_caution(80e9)
    assert not has_caution(hardware.memory_bytes)

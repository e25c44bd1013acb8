"""Cost models are made once for equal devices, as long as their tables are the same files."""

from __future__ import annotations

import os
from dataclasses import replace
from shutil import copytree

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.executor.simulated.hardware import Host


def test_a_cost_model_is_made_once_until_its_tables_change(tmp_path):
    spec, hardware = load_option("model", "mistral-7b"), load_option("hardware", "a100")
    tables = tmp_path / "tables"
    copytree(REPOSITORY / hardware.tables, tables)
    hardware = replace(hardware, tables=str(tables))
    backend = SimulatedBackend(hardware, cost_model="profiled")
    first = backend.cost_of(spec)
    assert SimulatedBackend(hardware, cost_model="profiled").cost_of(spec) is first
    file = next(tables.rglob("attention.csv*"))
    future = 2**62
    os.utime(file, ns=(future, future))
    assert backend.cost_of(spec) is not first


def test_lists_of_a_configuration_make_a_cost_model_of_their_own():
    host = Host("x", graphs=CudaGraphs(mode="full", sizes=[8, 16]))
    backend = SimulatedBackend(load_option("hardware", "a100"), host=host)
    assert backend.cost_of(load_option("model", "7b")).spec.num_layers == 32

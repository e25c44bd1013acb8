"""Every setting of the lab with values that nobody expects: it runs, or one line says why not.

`SARATHI_LAB_FUZZ=all` tries them all, which takes some twenty minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from composed import config_of, run_of
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import (
    build,
    check_structure,
    check_values,
    fit_targets,
    resolved,
)

VALUES = (
    *(None, True, 0, 5, -1, 2**62, 10**30, 10**400, 1e-320, 1e300, float("inf"), float("nan")),
    *("", "x", "a\0b", "\ud800", [], [None], {}, {"x": 1}),
)
SMALL = (
    *("executor=simulated", "model=tiny", "tracking=none", "baselines=[]", "batch=2"),
    *("seq_len=34", "chunk=16", "workload.num_requests=3"),
)
GENERATED = ("workload.min_len=10", "workload.max_len=34")
FROM_FILE = tuple(setting for setting in SMALL if "num_requests" not in setting)
# Settings, and the group below which values are exchanged; "": everywhere.
BASES = (
    (SMALL, ""),
    *(((*SMALL, f"workload={name}", *GENERATED), "workload") for name in ("uniform", "zipf")),
    ((*SMALL, "workload=openchat_sharegpt4"), "workload"),
    ((*FROM_FILE, "workload=trace", "workload.path=tests/data/trace.csv"), "workload"),
    ((*FROM_FILE, "workload=prompts", "workload.path=tests/data/prompts.jsonl"), "workload"),
    ((*SMALL, "workload.arrivals=poisson", "workload.rate=2"), "workload"),
    ((*SMALL, "workload.arrivals=gamma", "workload.rate=2", "workload.cv=4"), "workload"),
    ((*SMALL, "workload.arrivals=users", "workload.users=2"), "workload"),
    ((*SMALL, "workload.arrivals=poisson", "workload.rate=2"), "window"),
    ((*SMALL, "slo=strict"), "slo"),
    ((*SMALL, "host=vllm_0_12"), "host"),
    ((*SMALL, "hardware=a100", "executor.cost_model=profiled"), "hardware"),
    (SMALL, "cache"),
    ((*SMALL, "speculation=assumed"), "speculation"),
    *(((*SMALL, f"policy={name}"), "policy") for name in ("orca", "sglang", "vllm_v1", "trtllm")),
)
ELSEWHERE = ("model", "hydra")  # tests/model has what a spec refuses


def paths_of(node: dict[str, object], above: str = "") -> Iterator[str]:
    for key in node:
        path = f"{above}{key}"
        if path not in ELSEWHERE:
            yield path
            if isinstance(node[key], dict):
                yield from paths_of(node[key], f"{path}.")


def cases() -> list[tuple[tuple[str, ...], str, object]]:
    found = [
        (settings, path, value)
        for settings, group in BASES
        for path in paths_of(OmegaConf.to_container(config_of(*settings)))
        if path.startswith(group)
        for value in VALUES
    ]
    return found if os.environ.get("SARATHI_LAB_FUZZ") else random.Random(7).sample(found, 80)


def test_it_runs_or_one_line_says_why_not(tmp_path, monkeypatch, capsys):
    for settings, path, value in cases():
        cfg = config_of(*settings)
        OmegaConf.set_struct(cfg, False)
        OmegaConf.update(cfg, path, value, merge=False)
        OmegaConf.set_struct(cfg, True)
        try:
            check_structure(cfg)
            check_values(cfg)
            fit_targets(cfg, [])
            resolved(cfg)
            build(cfg.tracking).check()
            run_of(tmp_path, cfg)
        except UserError as error:
            if len(str(error).splitlines()) != 1:
                pytest.fail(f"{path}={value!r} of {settings}: {error}")
        except Exception as error:
            pytest.fail(f"{path}={value!r} of {settings}: {type(error).__name__}: {error}")

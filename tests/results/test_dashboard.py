"""The dashboard as JSON without account or network, and errors of one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from sarathi_lab.__main__ import main
from sarathi_lab.results import dashboard
from sarathi_lab.results.dashboard import AXES, report
from sarathi_lab.results.metrics import COMPARED
from sarathi_lab.results.tracking import STEP_OF

SECTIONS = ["Policies side by side", "Chunk size", "P:D ratio", "KV re-read", "Latency", "Device"]


@pytest.fixture(scope="module")
def printed() -> dict:
    """The dry run of a process whose W&B server can't be reached."""
    where = ["--hostname=laptop", "--hostname=server", "--entity=me", "--project=mine"]
    done = subprocess.run(
        [sys.executable, "-m", "sarathi_lab", "dashboard", "--dry-run", *where],
        capture_output=True,
        text=True,
        env={**os.environ, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_runs_are_filtered_and_grouped_by_device_and_machine(printed):
    settings = printed["workspace"]["runset_settings"]
    assert [key["name"] for key in settings["groupby"]] == ["executor", "device", "hostname"]
    executors, hosts = settings["filters"].split(" and ")
    assert executors == "Config(\"executor\") in ['torch', 'simulated']"
    assert hosts == "Config(\"hostname\") in ['laptop', 'server']"
    panels = [panel for one in printed["workspace"]["sections"] for panel in one["panels"]]
    bars = {one["groupby"]["name"] for one in panels if "groupby" in one and "metrics" in one}
    assert bars == {"policy_where"}


def metrics(node) -> set[str]:
    """All names of summary quantities, settings and history columns in a piece of the JSON."""
    if isinstance(node, dict):
        return set().union(*map(metrics, node.values()))
    if isinstance(node, list):
        return set().union(*map(metrics, node))
    return {str(node)}


def test_the_dry_run_prints_a_section_per_question_for_the_right_project(printed):
    view, report = printed["workspace"], printed["report"]
    assert (view["entity"], view["project"]) == ("me", "mine")
    assert [section["name"] for section in view["sections"]] == SECTIONS
    assert all(section["panels"] for section in view["sections"])
    assert (report["entity"], report["project"]) == ("me", "mine")
    assert sum("panels" in block for block in report["blocks"]) == len(SECTIONS)


def test_panels_show_what_runs_log(printed):
    names = metrics(printed["workspace"]["sections"])
    assert {"chunk", "pd_ratio", "policy_where"} <= names
    assert {"kv_reread_factor", "throughput_vs_orca", "ms/tbt_p99"} <= names
    assert {"ms/decode_time_marginal", "ms/ttft_p99"} <= names
    assert {"iterations/mfu", "iterations/num_waiting", "iterations/kv_bytes"} <= names
    assert (STEP_OF["mfu"], STEP_OF["num_waiting"]) == ("tokens", "time")
    known = {*COMPARED, "mfu", "mbu", "time_over_roofline", "decode_speedup"}
    for section in printed["workspace"]["sections"]:
        for panel in section["panels"]:
            for quantity in summaries(panel):
                assert quantity.removeprefix("ms/").partition("_vs_")[0] in known, quantity


def summaries(panel: dict) -> list[str]:
    """The summary's quantities that a panel of bars or points shows."""
    if "groupby" in panel and "metrics" in panel:
        return [metric["name"] for metric in panel["metrics"]]
    axes = [panel.get(axis) for axis in ("x", "y")]
    names = [axis["name"] for axis in axes if isinstance(axis, dict)]
    return [name for name in names if name not in AXES]


def test_panels_of_a_report_do_not_overlap(printed):
    for block in printed["report"]["blocks"]:
        places = [panel["layout"] for panel in block.get("panels", ())]
        cells = [
            (place["x"] + i, place["y"] + j)
            for place in places
            for i in range(place["w"])
            for j in range(place["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert all(x < 24 for x, _ in cells)


def test_the_claims_stand_in_the_report():
    claims = pd.DataFrame({"claim": ["a | b"], "measured": [5.12345], "low": [float("nan")]})
    blocks = report("me", "mine", claims, {}).blocks
    expected = "| claim | measured | low |\n| --- | --- | --- |\n| a \\| b | 5.12 |  |"
    assert expected in [getattr(block, "text", None) for block in blocks]


def test_without_a_login_it_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["dashboard"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a dashboard is written to W&B, but")
    assert "--dry-run" in line


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    monkeypatch.delitem(sys.modules, "sarathi_lab.results.dashboard")
    assert main(["dashboard", "--dry-run"]) == 2
    assert "error: the package wandb_workspaces is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--entity=me"], "W&B refused the workspace (permission denied); check that me/"),
        ([], "W&B gives no default entity (no route); name a user or team with --entity"),
    ],
)
def test_what_the_server_refuses_is_one_line(args, error, monkeypatch, capsys):
    def refuse(self) -> None:
        raise PermissionError("permission denied")

    def fail(timeout: int) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("wandb.Api", fail)
    monkeypatch.setattr(dashboard, "require_login", lambda what, mend: None)
    monkeypatch.setattr("wandb_workspaces.workspaces.Workspace.save", refuse)
    assert dashboard.main(args, lambda: pd.DataFrame({"claim": ["a"]})) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {error}")

"""The dashboard without account or network, and errors of one line."""

from __future__ import annotations

import sys

import pytest
from pydantic import TypeAdapter

from sarathi_lab.__main__ import main
from sarathi_lab.results.metrics import COMPARED

SECTIONS = ["A sweep at a glance", "Policies side by side", "Chunk size", "P:D ratio"]
SECTIONS += ["KV re-read", "Latency", "Device"]
KNOWN = {*COMPARED, "mfu", "mbu", "time_over_roofline", "decode_speedup"}


@pytest.fixture
def dashboard():
    from sarathi_lab.extensions import dashboard  # W&B's panels take seconds to import

    return dashboard


def test_the_workspace_has_sections_of_what_runs_log(dashboard):
    workspace = dashboard.workspace("me", "mine", {"hostname": ["laptop", "server"]})
    view = TypeAdapter(type(workspace)).dump_python(workspace, mode="json", exclude_none=True)
    assert (view["entity"], view["project"]) == ("me", "mine")
    assert [section["name"] for section in view["sections"]] == SECTIONS
    settings = view["runset_settings"]
    assert [key["name"] for key in settings["groupby"]] == ["executor", "device", "hostname"]
    executors, hosts = settings["filters"].split(" and ")
    assert executors == "Config(\"executor\") in ['torch', 'vllm', 'simulated']"
    assert hosts == "Config(\"hostname\") in ['laptop', 'server']"
    panels = [panel for section in view["sections"] for panel in section["panels"]]
    assert {one["groupby"]["name"] for one in panels if "groupby" in one} == {"policy_where"}
    names = {axis["name"] for one in panels for axis in _axes(one)}
    assert {"chunk", "ms/tbt_p99", "throughput_vs_orca", "iterations/kv_bytes"} <= names
    bars = [[metric["name"] for metric in one["metrics"]] for one in panels if "groupby" in one]
    assert ["throughput", "throughput_request_level", "throughput_orca"] in bars
    assert ["throughput_vs_orca"] in bars
    for name in names - {*dashboard.AXES, *dashboard.SETTINGS}:
        quantity = name.removeprefix("ms/").partition("_vs_")[0]
        for baseline in dashboard.BASELINES:
            quantity = quantity.removesuffix(f"_{baseline}")
        assert quantity in KNOWN or name.startswith("iterations/"), name


def test_the_dry_run_lists_its_panels(capsys):
    assert main(["dashboard", "--dry-run", "--project=mine", "--hostname=laptop"]) == 0
    shown = capsys.readouterr().out
    assert "Config(\"hostname\") in ['laptop']" in shown
    assert shown.startswith("Chunked prefill, of the project mine\n")
    for section in SECTIONS:
        assert f"\n  {section}\n" in shown
    assert "\n    TBT P99 [ms] by TTFT P50 [ms]\n" in shown
    assert "\n    KV read [bytes] by iteration\n" in shown


def _axes(panel: dict) -> list[dict]:
    """Return the settings, quantities and columns of the history that a panel shows."""
    shown = [panel.get("x"), panel.get("y"), panel.get("metrics")]
    columns = [column["metric"] for column in panel.get("columns", [])]
    lists = [columns] + [one if isinstance(one, list) else [one] for one in shown if one]
    return [axis for axes in lists for axis in axes if isinstance(axis, dict)]


def test_without_a_login_or_the_package_it_is_one_line(dashboard, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["dashboard"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a dashboard is written to W&B, but")
    assert "--dry-run" in line
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    monkeypatch.delitem(sys.modules, "sarathi_lab.extensions.dashboard")
    assert main(["dashboard", "--dry-run"]) == 2
    assert "error: the package wandb_workspaces is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "reason"), [(["--entity=me"], "permission denied"), ([], "no route")]
)
def test_what_the_server_refuses_is_one_line(args, reason, dashboard, monkeypatch, capsys):
    def refuse(*args, **kwargs) -> None:
        raise PermissionError(f"{reason}\nto host")

    monkeypatch.setattr("wandb.Api", refuse)
    monkeypatch.setattr(dashboard, "require_login", lambda what, mend: None)
    monkeypatch.setattr("wandb_workspaces.workspaces.Workspace.save", refuse)
    assert dashboard.main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: W&B refused the workspace ({reason}); check that ")

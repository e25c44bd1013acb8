"""The command `dashboard`: a W&B workspace that compares the runs of a project."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
import yaml
from wandb_workspaces import expr
from wandb_workspaces.reports.v2.interface import PanelTypes

from sarathi_lab.config.console import typed
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.results.table import MILLISECONDS, factor, heading
from sarathi_lab.results.tracking import environment, require_login

Chosen = Mapping[str, Sequence[str]]  # values of the columns `WHERE`
Panels = Sequence[Mapping[str, Sequence[str]]]  # by kind, their axes
COLUMNS = 3
TIMEOUT = 60  # seconds
BASELINES = ("request_level", "orca")  # the default's; their quantities are columns of runs
# Columns that runs are grouped by, and may be filtered by, with examples. Not "host", which the
# package takes for W&B's column in a filter.
WHERE = {"executor": "torch", "device": "'simulated h100'", "hostname": "my-laptop"}
EXECUTORS = ("torch", "vllm", "simulated")  # of runs; tables of sweeps have none
# Of the parallel coordinates of a sweep.
SETTINGS = ("policy", "chunk", "pd_ratio", "batch", "seq_len")

_PANELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
AXES: Mapping[str, str] = _PANELS["axes"]


def workspace(entity: str, project: str, chosen: Chosen) -> ws.Workspace:
    """Return the workspace of runs with the `chosen` values, the main quantities pinned."""
    filters = [expr.Config("executor").isin(list(EXECUTORS))]
    for name, values in chosen.items():
        if values:
            filters.append(expr.Config(name).isin(list(values)))
    runs = ws.RunsetSettings(
        pinned_columns=_PANELS["pinned"],
        filters=filters,
        groupby=[expr.Config(name) for name in WHERE],
    )
    sections = []
    for name, panels in _PANELS["sections"].items():
        sections.append(_section(name, panels))
    return ws.Workspace(
        entity=entity,
        project=project,
        name="Chunked prefill",
        sections=sections,
        settings=ws.WorkspaceSettings(max_runs=50),
        runset_settings=runs,
    )


def _section(name: str, stated: Panels) -> ws.Section:
    """Return a section with the stated panels, each by its kind and its axes."""
    panels = []
    for panel in stated:
        for kind, axes in panel.items():
            make = KINDS[kind]
            panels.append(make(*axes))
    num_columns = min(COLUMNS, len(panels))
    layout = ws.SectionLayoutSettings(
        columns=num_columns,
        rows=math.ceil(len(panels) / num_columns),
    )
    return ws.Section(name=name, panels=panels, is_open=True, layout_settings=layout)


def _shown(name: str) -> str:
    """Return the summary's name of a quantity, of times that in milliseconds."""
    if factor(name) == MILLISECONDS:
        return f"ms/{name}"
    return name


def _title(name: str) -> str:
    """Return the heading of a quantity as W&B shows it: stored, or in milliseconds."""
    if factor(name) in (1, MILLISECONDS):
        return heading(name)
    return name  # a heading in another unit would not be that of the stored values


def _parallel(*quantities: str) -> PanelTypes:
    columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(name)) for name in SETTINGS]
    for name in quantities:
        quantity = wr.SummaryMetric(_shown(name))
        column = wr.ParallelCoordinatesPlotColumn(quantity, display_name=_title(name))
        columns.append(column)
    return wr.ParallelCoordinatesPlot(title="settings and results", columns=columns)


def _bars(name: str) -> PanelTypes:
    """Return a panel with bars of the runs, and of their baselines if it shows no ratio to one."""
    metrics = [wr.SummaryMetric(_shown(name))]
    if "_vs_" not in name:
        for baseline in BASELINES:
            metrics.append(wr.SummaryMetric(f"{_shown(name)}_{baseline}"))
    return wr.BarPlot(
        title=_title(name),
        metrics=metrics,
        groupby=wr.Config("policy_where"),  # no means over several devices or chunks
        groupby_aggfunc="mean",
        orientation="h",
    )


def _points(x: str, y: str) -> PanelTypes:
    """Return a panel with a point a run; `x` is a setting in AXES, or a quantity like `y`."""
    across: wr.Config | wr.SummaryMetric = wr.SummaryMetric(_shown(x))
    axis = _title(x)
    if x in AXES:
        across = wr.Config(x)
        axis = AXES[x]
    return wr.ScatterPlot(
        title=f"{_title(y)} by {axis}",
        x=across,
        y=wr.SummaryMetric(_shown(y)),
    )


def _lines(x: str, column: str, title: str) -> PanelTypes:
    return wr.LinePlot(
        title=f"{title} by {AXES[x]}",
        x=wr.Metric(x),
        y=[wr.Metric(f"iterations/{column}")],
        title_x=AXES[x],
        title_y=title,
        max_runs_to_show=20,
    )


KINDS: Mapping[str, Callable[..., PanelTypes]] = {
    "bars": _bars,
    "points": _points,
    "lines": _lines,
    "parallel": _parallel,
}


def panel_lines(view: ws.Workspace) -> list[str]:
    """Return the sections of a workspace with a line for each panel."""
    lines = [f"{view.name}, of the project {view.project}"]
    lines.append(f"  runs with {view.runset_settings.filters}")
    for section in view.sections:
        lines.append(f"  {section.name}")
        for panel in section.panels:
            title = panel.title.replace("\n", " ")
            lines.append(f"    {title}")
    return lines


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=typed("dashboard"),
        description="Write a workspace into a W&B project: chunk size, P:D, policies, KV re-read.",
    )
    entity = os.environ.get("WANDB_ENTITY")
    parser.add_argument("--entity", default=entity, help="user or team (default: yours)")
    text = "as in tracking.project (default: %(default)s)"
    parser.add_argument("--project", default="sarathi-lab", help=text)
    for name, example in WHERE.items():
        text = f"show only runs of this {name}, such as {example}; may be repeated"
        parser.add_argument(f"--{name}", action="append", default=[], help=text)
    text = "print its panels and write nothing; needs no account and no network"
    parser.add_argument("--dry-run", action="store_true", help=text)
    options = parser.parse_args(args)
    return exit_code(lambda: _write(options), "no workspace was written")


def _write(options: argparse.Namespace) -> int:
    stated = vars(options)
    chosen = {name: stated[name] for name in WHERE}
    if options.dry_run:
        view = workspace(options.entity or "", options.project, chosen)
        print("\n".join(panel_lines(view)))
        return 0
    with environment({"WANDB_SILENT": "true"}):
        require_login("a dashboard is written to W&B", "or use --dry-run")
        try:
            entity = options.entity or wandb.Api(timeout=TIMEOUT).default_entity
            view = workspace(str(entity), options.project, chosen)
            view.save()
        except Exception as error:  # of W&B's transport
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(
                f"W&B refused the workspace ({reason}); check that {options.entity or 'the entity'}"
                f"/{options.project} exists and that you may write to it, or use --dry-run"
            ) from None
    print(view.url)
    return 0

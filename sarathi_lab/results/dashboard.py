"""The command `dashboard`: a W&B workspace and a report that compare the runs of a project, with a
section for each question.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from pydantic import TypeAdapter
from wandb_workspaces import expr
from wandb_workspaces.reports.v2.interface import BlockTypes, PanelTypes

from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.results.table import MILLISECONDS, factor, heading
from sarathi_lab.results.tracking import environment, require_login

Chosen = Mapping[str, Sequence[str]]  # values of the columns `WHERE`
COLUMNS = 3
TIMEOUT = 60  # seconds
UNITS = 24  # of W&B's grid, in a row
HEIGHT = 8
RATIOS = ("throughput", "throughput_vs_request_level", "throughput_vs_orca")
# Columns that runs are grouped by, and may be filtered by, with examples. Not "host", which the
# package takes for W&B's column in a filter.
WHERE = {"executor": "torch", "device": "'simulated h100'", "hostname": "my-laptop"}
EXECUTORS = ("torch", "simulated")  # of runs; tables of sweeps have none
TIMES = ("decode_time_marginal", "ttft_p50", "tbt_p99")
PINNED = [
    *(f"config:{name}" for name in ("policy", "chunk", "pd_ratio", *WHERE)),
    *(f"summary:{name}" for name in (*RATIOS, *(f"ms/{time}" for time in TIMES))),
    *(f"summary:{name}" for name in ("kv_reread_factor", "mfu", "mbu")),
]
AXES = {
    "chunk": "chunk [tokens]",
    "pd_ratio": "P:D",
    "seq_len": "P + D [tokens]",
    "iteration": "iteration",
    "time": "time [s]",
    "tokens": "tokens computed",
}


class Question(NamedTuple):
    """Section of panels with a text on what to look for."""

    name: str
    text: str
    panels: Sequence[PanelTypes]


def questions() -> list[Question]:
    """Return the sections in their order."""
    by_policy = [*RATIOS, "decode_throughput", "decode_time_marginal", "time_over_roofline"]
    by_chunk = ["throughput", "throughput_vs_orca", "decode_speedup", "decode_time_marginal"]
    waits = ["ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99"]
    return [
        Question(
            "Policies side by side",
            "The same requests under each policy, a bar for each device and machine: the mean over "
            "the runs shown there. Ratios above 1 are gains.",
            [_bars(name) for name in by_policy],
        ),
        Question(
            "Chunk size",
            "Small chunks keep the gaps between tokens short and re-read more; large ones use "
            "the device better.",
            [_scatter("chunk", name) for name in (*by_chunk, "mfu", "tbt_p99")],
        ),
        Question(
            "P:D ratio",
            "The gain peaks where every chunk has its decodes to carry: P:D = C / (B - 1).",
            [_scatter("pd_ratio", name) for name in RATIOS],
        ),
        Question(
            "KV re-read",
            "N chunks of a prompt read its keys and values (N + 1) / 2 times; whole prompts "
            "read them once.",
            [
                _scatter("chunk", "kv_reread_factor"),
                _scatter("seq_len", "kv_reread_factor"),
                _scatter("chunk", "kv_read_bytes_vs_request_level"),
                _line("iteration", "kv_bytes", "KV read [bytes]"),
            ],
        ),
        Question(
            "Latency",
            "Time to the first token against time between tokens: a gain in one is often a loss "
            "in the other.",
            [
                *map(_bars, waits),
                _scatter("ttft_p50", "tbt_p99"),
                _line("time", "num_waiting", "requests waiting"),
            ],
        ),
        Question(
            "Device",
            "Share of the device's peaks that each run reached, overall and over time.",
            [
                *map(_bars, ("mfu", "mbu")),
                *(_line("tokens", name, name.upper()) for name in ("mfu", "mbu")),
            ],
        ),
    ]


def filters(chosen: Chosen) -> list[expr.FilterExpr]:
    """Return the filters of runs with `chosen` values; of all executors where none is chosen."""
    values = {"executor": EXECUTORS, **{name: some for name, some in chosen.items() if some}}
    return [expr.Config(name).isin(list(some)) for name, some in values.items()]


def workspace(entity: str, project: str, chosen: Chosen) -> ws.Workspace:
    """Return the questions as a workspace of `chosen` runs, with the main quantities pinned."""
    sections = []
    for name, _, panels in questions():
        layout = ws.SectionLayoutSettings(columns=COLUMNS, rows=-(-len(panels) // COLUMNS))
        sections.append(
            ws.Section(name=name, panels=list(panels), is_open=True, layout_settings=layout)
        )
    return ws.Workspace(
        entity=entity,
        project=project,
        name="Chunked prefill",
        sections=sections,
        settings=ws.WorkspaceSettings(max_runs=50),
        runset_settings=ws.RunsetSettings(
            pinned_columns=PINNED,
            filters=filters(chosen),
            groupby=[expr.Config(name) for name in WHERE],
        ),
    )


def report(entity: str, project: str, claims: pd.DataFrame, chosen: Chosen) -> wr.Report:
    """Return the questions as a report of the same runs, and the verdicts `claims` as a table."""
    blocks: list[BlockTypes] = [wr.TableOfContents()]
    for name, text, panels in questions():
        runset = wr.Runset(
            name="runs by device",
            filters=filters(chosen),
            groupby=[f"config.{column}" for column in WHERE],
        )
        blocks += [wr.H2(text=name), wr.P(text=text)]
        blocks.append(wr.PanelGrid(runsets=[runset], panels=_placed(panels)))
    text = "Claims of SARATHI and of its successors, and the recorded values by device."
    blocks += [wr.H2(text="Claims"), wr.P(text=text), wr.MarkdownBlock(text=markdown(claims))]
    return wr.Report(
        entity=entity,
        project=project,
        title="Chunked prefill: what holds",
        description="Written by python -m sarathi_lab dashboard",
        blocks=blocks,
        width="fluid",
    )


def markdown(table: pd.DataFrame) -> str:
    """Return a table in Markdown: three significant digits, an empty cell for what is missing."""
    cells = table.map(lambda value: f"{value:.3g}" if isinstance(value, float) else str(value))
    cells = cells.mask(table.isna(), "").replace({r"\|": r"\\|", "\n": " "}, regex=True)
    rows = [list(map(str, table)), ["---"] * table.shape[1], *cells.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(name: str) -> str:
    """Return the summary's name of a quantity, of times that in milliseconds."""
    return f"ms/{name}" if factor(name) == MILLISECONDS else name


def _title(name: str) -> str:
    """Return the heading of a quantity as W&B shows it: stored, or in milliseconds."""
    return heading(name) if factor(name) in (1, MILLISECONDS) else name


def _bars(name: str) -> PanelTypes:
    return wr.BarPlot(
        title=_title(name),
        metrics=[wr.SummaryMetric(_shown(name))],
        groupby=wr.Config("policy_where"),  # no means over several devices
        groupby_aggfunc="mean",
        orientation="h",
    )


def _scatter(x: str, y: str) -> PanelTypes:
    """Return a panel with a point a run; `x` is a setting in AXES, or a quantity like `y`."""
    across = wr.Config(x) if x in AXES else wr.SummaryMetric(_shown(x))
    title = f"{_title(y)} by {AXES.get(x) or _title(x)}"
    return wr.ScatterPlot(title=title, x=across, y=wr.SummaryMetric(_shown(y)))


def _line(x: str, column: str, title: str) -> PanelTypes:
    return wr.LinePlot(
        title=f"{title} by {AXES[x]}",
        x=wr.Metric(x),
        y=[wr.Metric(f"iterations/{column}")],
        title_x=AXES[x],
        title_y=title,
        max_runs_to_show=20,
    )


def _placed(panels: Sequence[Any]) -> list[PanelTypes]:
    """Place the panels side by side on the grid of a report; a single one takes the row."""
    width = UNITS // min(COLUMNS, len(panels))
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        panel.layout = wr.Layout(x=column * width, y=row * HEIGHT, w=width, h=HEIGHT)
    return list(panels)


def main(args: Sequence[str], verdicts: Callable[[], pd.DataFrame]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sarathi_lab dashboard",
        description="Write a workspace and a report into a W&B project: chunk size, P:D, "
        "policies, KV re-read, claims.",
    )
    entity = os.environ.get("WANDB_ENTITY")
    parser.add_argument("--entity", default=entity, help="user or team (default: yours)")
    text = "as in tracking.project (default: %(default)s)"
    parser.add_argument("--project", default="sarathi-lab", help=text)
    for name, example in WHERE.items():
        text = f"show only runs of this {name}, such as {example}; may be repeated"
        parser.add_argument(f"--{name}", action="append", default=[], help=text)
    text = "print both as JSON; needs no account and no network"
    parser.add_argument("--dry-run", action="store_true", help=text)
    options = parser.parse_args(args)
    return exit_code(lambda: _write(options, verdicts()), "what was written is kept")


def _write(options: argparse.Namespace, claims: pd.DataFrame) -> int:
    chosen = {name: getattr(options, name) for name in WHERE}
    if options.dry_run:
        entity = options.entity or ""
        views = {
            "workspace": workspace(entity, options.project, chosen),
            "report": report(entity, options.project, claims, chosen),
        }
        shown = {
            name: TypeAdapter(type(view)).dump_python(view, mode="json", exclude_none=True)
            for name, view in views.items()
        }
        print(json.dumps(shown, indent=2))
        return 0
    with environment({"WANDB_SILENT": "true"}):
        require_login("a dashboard is written to W&B", "or use --dry-run")
        entity = options.entity or _default_entity()
        _save(workspace(entity, options.project, chosen))
        _save(report(entity, options.project, claims, chosen))
    return 0


def _default_entity() -> str:
    reason = "none is set"
    try:
        if entity := wandb.Api(timeout=TIMEOUT).default_entity:
            return str(entity)
    except Exception as error:  # of W&B's transport
        reason = str(error).partition("\n")[0]
    raise UserError(f"W&B gives no default entity ({reason}); name a user or team with --entity")


def _save(view: ws.Workspace | wr.Report) -> None:
    try:
        view.save()
    except Exception as error:  # of W&B's transport
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"W&B refused the {type(view).__name__.lower()} ({reason}); check that "
            f"{view.entity}/{view.project} exists and that you may write to it, or use --dry-run"
        ) from None
    print(view.url)

"""What the dashboard shows: a section per question, the same in the workspace and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from pydantic import TypeAdapter
from wandb_workspaces import expr
from wandb_workspaces.reports.v2.interface import BlockTypes, PanelTypes

from sarathi_lab.config.errors import UserError
from sarathi_lab.results.table import MILLISECONDS, factor, heading

COLUMNS = 3
TIMEOUT = 60  # seconds
UNITS = 24  # of W&B's grid, in a row
HEIGHT = 8
CLAIMS = "claims"  # the name of the table that `sarathi_lab.tasks.dashboard` logs
RATIOS = ("throughput", "throughput_vs_request_level", "throughput_vs_orca")
# Where a run was made: what runs are grouped by, and may be filtered by. Not "host", which the
# package takes for W&B's own column in a filter.
WHERE = ("executor", "device", "hostname")
EXECUTORS = ("torch", "simulated")  # of runs; the sweeps' own tables have none
PINNED = [f"config:{name}" for name in ("policy", "chunk", "pd_ratio", *WHERE)]
PINNED += [f"summary:{name}" for name in RATIOS]
PINNED += [f"summary:ms/{name}" for name in ("decode_time_marginal", "ttft_p50", "tbt_p99")]
PINNED += [f"summary:{name}" for name in ("kv_reread_factor", "mfu", "mbu")]
AXES = {
    "chunk": "chunk [tokens]",
    "pd_ratio": "P:D",
    "seq_len": "P + D [tokens]",
    "iteration": "iteration",
    "time": "time [s]",
    "tokens": "tokens computed",
}


class Question(NamedTuple):
    """One section: its name, what the reader should look for, and its panels."""

    name: str
    text: str
    panels: Sequence[PanelTypes]


def questions() -> list[Question]:
    """The sections, in the order in which people ask."""
    by_policy = [*RATIOS, "decode_throughput", "decode_time_marginal", "time_over_roofline"]
    by_chunk = ["throughput", "throughput_vs_orca", "decode_speedup"]
    by_chunk += ["decode_time_marginal", "mfu", "tbt_p99"]
    rereads = [("chunk", "kv_reread_factor"), ("seq_len", "kv_reread_factor")]
    rereads += [("chunk", "kv_read_bytes_vs_request_level")]
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
            [_scatter("chunk", name) for name in by_chunk],
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
            [_scatter(*axes) for axes in rereads]
            + [_line("iteration", "kv_bytes", "KV read [bytes]")],
        ),
        Question(
            "Latency",
            "Time to the first token against time between tokens: a gain in one is often a loss "
            "in the other.",
            [_bars(name) for name in waits]
            + [_scatter("ttft_p50", "tbt_p99"), _line("time", "num_waiting", "requests waiting")],
        ),
        Question(
            "Device",
            "How near each run came to what the device can do, over all of it and as it went on.",
            [_bars("mfu"), _bars("mbu")]
            + [_line("tokens", name, name.upper()) for name in ("mfu", "mbu")],
        ),
        Question(
            "Claims",
            "What SARATHI and those who repeat it claim, and what was found on each device.",
            [wr.WeavePanelSummaryTable(table_name=CLAIMS)],
        ),
    ]


def filters(chosen: Mapping[str, Sequence[str]]) -> list[expr.FilterExpr]:
    """Runs of the `chosen` values of `WHERE`; of all executors where none is chosen."""
    values = {"executor": EXECUTORS, **{name: own for name, own in chosen.items() if own}}
    return [expr.Config(name).isin(list(own)) for name, own in values.items()]


def workspace(entity: str, project: str, chosen: Mapping[str, Sequence[str]]) -> ws.Workspace:
    """The questions as a workspace, the quantities that people compare pinned beside the runs,
    which are filtered by the `chosen` values of `WHERE` and grouped by it.
    """
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


def report(
    entity: str, project: str, claims: pd.DataFrame, chosen: Mapping[str, Sequence[str]]
) -> wr.Report:
    """The questions as a report of the same runs, with `claims` (`sarathi_lab.experiment.claims`)
    as a table.
    """
    blocks: list[BlockTypes] = [wr.TableOfContents()]
    for name, text, panels in questions():
        blocks += [wr.H2(text=name), wr.P(text=text)]
        if name == "Claims":
            blocks.append(wr.MarkdownBlock(text=markdown(claims)))
        # Of the report's own project; naming it would ask the server for its id.
        runset = wr.Runset(name="runs by device")
        if name != "Claims":  # whose run has no device
            runset.filters = filters(chosen)
            runset.groupby = [f"config.{column}" for column in WHERE]
        blocks.append(wr.PanelGrid(runsets=[runset], panels=_placed(panels)))
    return wr.Report(
        entity=entity,
        project=project,
        title="Chunked prefill: what holds",
        description="Which of SARATHI's claims hold, on which device: written by python -m "
        "sarathi_lab dashboard",
        blocks=blocks,
        width="fluid",
    )


def plain(what: ws.Workspace | wr.Report) -> Any:
    """All that it holds, as JSON has it."""
    return TypeAdapter(type(what)).dump_python(what, mode="json", exclude_none=True)


def find_project(entity: str | None, project: str) -> str:
    """The entity that owns `project`: the given one, else the user's own.

    Raises UserError if it has no such project, or if the server does not say so in a minute.
    """
    try:
        api = wandb.Api(timeout=TIMEOUT)
        owner = entity or api.default_entity
        known = {found.name for found in api.projects(owner)} if owner else set()
    except Exception as error:  # whatever W&B's transport raises
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"W&B can't be asked for project {project} ({reason}); try again, or use --dry-run"
        ) from None
    if not owner:
        raise UserError("this account has no default entity; name a user or team with --entity")
    if project not in known:
        raise UserError(
            f"{owner} has no project {project}; name another with --project or --entity, or "
            "make it by sending a run: "
            "python -m sarathi_lab.run tracking.mode=online, or wandb sync"
        )
    return owner


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown: three significant digits, an empty cell for what is missing."""
    rows = [list(map(str, table.columns)), ["---"] * table.shape[1]]
    rows += [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _shown(name: str) -> str:
    """The summary's name of a quantity in the unit that people read."""
    return f"ms/{name}" if factor(name) == MILLISECONDS else name


def _title(name: str) -> str:
    """The heading of a quantity as W&B shows it: stored, or in milliseconds."""
    return heading(name) if factor(name) in (1, MILLISECONDS) else name


def _bars(name: str) -> PanelTypes:
    return wr.BarPlot(
        title=_title(name),
        metrics=[wr.SummaryMetric(_shown(name))],
        groupby=wr.Config("policy_where"),  # a mean over devices would be of none
        groupby_aggfunc="mean",
        orientation="h",
    )


def _scatter(x: str, y: str) -> PanelTypes:
    """A point per run; `x` is one of AXES, which are settings, or a quantity like `y`."""
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
    """The panels on the grid of a report, side by side; one alone takes the row."""
    width = UNITS // min(COLUMNS, len(panels))
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        panel.layout = wr.Layout(x=column * width, y=row * HEIGHT, w=width, h=HEIGHT)
    return list(panels)

"""The paper's figures, measured: single batches on the executor, then real requests on the
engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.experiment.bench import SEQ_LENS, Bench, Point
from sarathi_lab.experiment.figures import COLUMNS, complete, paper
from sarathi_lab.experiment.loading import load
from sarathi_lab.experiment.measured_clock import MeasuredCostModel
from sarathi_lab.experiment.paper_points import KEYS
from sarathi_lab.experiment.served_figures import Gain, Server, dry_scale, gains, paper_scale
from sarathi_lab.experiment.timed_figures import (
    TARGET_CONTEXT,
    TARGET_DECODES,
    Unit,
    in_fair_turns,
    units,
)
from sarathi_lab.results.intervals import summary
from sarathi_lab.tasks.gpu.context import Context

# The paper's largest batch at each length, and 32 decodes at 1K, which the targets of 13B ask for.
KV_TOKENS = {"13b": TARGET_CONTEXT * max(TARGET_DECODES), "33b": 19 * 1024}
LONGEST = 2 * max(
    SEQ_LENS.values()
)  # tokens of a sequence: Fig 10's prompts may be rounded up to whole chunks
DRY_MODEL = "tiny"
TIMED_SHARE = 0.45  # of the time after loading, for single batches; the rest is for serving
CLOSING = 8.0  # seconds that are left at the end, for the run that is on and the pictures
SAY_EVERY = 5.0  # seconds
COUNTED = ("fig10",)  # summed up by counting, not served


def measure_13b(context: Context) -> None:
    """Write 13b-points.csv, 13b-compositions.csv, 13b-serving.csv and a picture a figure."""
    measure(context, "13b")


def measure_33b(context: Context) -> None:
    """The same for 33B."""
    measure(context, "33b")


def measure(context: Context, model: str) -> None:
    """Measure until the time is over; what was measured is written even if something fails on the
    way.
    """
    spec = (
        replace(load_option("model", DRY_MODEL), name=model)
        if context.is_dry
        else load_option("model", model)
    )
    kv_tokens = KV_TOKENS[model]
    backend, executor = load(
        context, spec, kv_tokens=kv_tokens, batch_size=max(TARGET_DECODES), longest=LONGEST
    )
    device = f"{'dry run on ' if context.is_dry else ''}{backend.device_name}, {model}"
    scale = dry_scale(model) if context.is_dry else paper_scale(model)
    cost, server, wanted = (
        MeasuredCostModel(executor, say=context.say),
        Server(executor, context),
        gains(model, scale),
    )
    points: dict[str, list[Point]] = {}
    try:
        _time(context, cost, units(spec, is_dry=context.is_dry), points)
        server.measure(wanted, until=context.seconds - CLOSING)
    finally:
        context.write("paper", f"{model}-compositions", cost.rows(model, backend.dtype_bytes))
        context.write("paper", f"{model}-serving", _serving_rows(server, model))
        table = _joined([timed_points(points, device), served_points(server, wanted, device)])
        context.write("paper", f"{model}-points", table)
    _draw(context, table, model)


def _time(
    context: Context,
    cost: MeasuredCostModel,
    figures: Sequence[Sequence[Unit]],
    points: dict[str, list[Point]],
) -> None:
    """Add the points of single batches to `points`, as many as the time allows; the first unit
    whatever the time.
    """
    bench = Bench(cost, None)  # type: ignore[arg-type]  # only pipelines ask for the hardware
    until, said = context.until(TIMED_SHARE), context.elapsed
    num_done, num_units = 0, sum(map(len, figures))
    for unit in in_fair_turns(figures, lambda: context.elapsed):
        if num_done and context.cuts_short(until):
            break
        points.setdefault(unit.figure, []).extend(unit.points(bench))
        num_done += 1
        if context.elapsed - said > SAY_EVERY:
            said = context.elapsed
            context.say(
                f"{num_done} of {num_units} groups of batches, {len(cost.measurements)} batches "
                "timed"
            )
    context.say(
        f"{num_done} of {num_units} groups of batches measured, {len(cost.measurements)} batches"
    )


def timed_points(points: dict[str, list[Point]], device: str) -> pd.DataFrame:
    """The points in the columns of `figure.parquet`; those that the noise swallowed or the cache
    can't hold are left out: a marginal time may come out negative, what does not fit is not a
    number.
    """
    tables = [pd.DataFrame(columns=COLUMNS)]
    for figure, of_figure in points.items():
        rows = [(p.panel, p.series, float(p.x), p.y.value, p.y.error) for p in of_figure]
        rows = [row for row in rows if math.isfinite(row[3]) and row[3] > 0]
        table = pd.DataFrame(rows, columns=[*KEYS, "y", "uncertainty"])
        if len(table):
            method = ", counted" if figure in COUNTED else ""
            tables.append(complete(table, figure, source="measured", device=device + method))
    return _joined(tables)


def served_points(server: Server, wanted: Sequence[Gain], device: str) -> pd.DataFrame:
    """The points of throughput that were served, in the same columns; with one run each nothing is
    said of errors.
    """
    rows = []
    for point in wanted:
        gain = server.gain(point)
        if gain is not None:
            rows.append((point.figure, point.panel, point.series, float(point.x), *gain))
    table = pd.DataFrame(rows, columns=["figure", *KEYS, "y", "uncertainty"])
    return table.assign(unit="ratio", source="measured", device=device)[COLUMNS]


def _joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    return pd.concat(filled, ignore_index=True) if filled else tables[0]


def _serving_rows(server: Server, model: str) -> list[dict[str, object]]:
    """One row per load and quantity: milliseconds a request, and the share of time that the device
    was idle.
    """
    rows: list[dict[str, object]] = []
    for load_, runs in server.runs.items():
        labels = {
            "model": model,
            "policy": load_.policy,
            "chunk": load_.chunk,
            "prompt_len": load_.prompt_len,
            "num_decodes": load_.num_decodes,
            "batch": load_.batch_size,
            "iterations": runs[0].num_iterations,
        }
        request = summary([1e3 * run.seconds_per_request for run in runs], "ms")
        rows.append({**labels, "quantity": "time per request", **request})
        rows.append(
            {
                **labels,
                "quantity": "idle share",
                **summary([run.idle_share for run in runs], "ratio"),
            }
        )
    return rows


def _draw(context: Context, table: pd.DataFrame, model: str) -> None:
    """A picture a figure, beside the paper's points; one in a dry run, as drawing takes long
    there.
    """
    from sarathi_lab.results.plots.figures import draw

    figures = list(dict.fromkeys(table.figure))
    for figure in figures[:1] if context.is_dry else figures:
        points = pd.concat([paper(figure), table[table.figure == figure]], ignore_index=True)
        draw(figure, points).savefig(context.path("paper", f"{model}-{figure}.png"), dpi=110)

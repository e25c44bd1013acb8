"""sarathi_lab.tasks.announce."""

from __future__ import annotations

from rich.table import Table

from sarathi_lab.config.console import console
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.experiment.advisor import Advice
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.results.report import ADVICE_COLUMNS, cell, print_device
from sarathi_lab.tasks.plan import Plan


def announce(plan: Plan, place: RunContext, peaks: Peaks, predicted_roofline: float) -> None:
    """Say what is run on what, and the least time it can take, before it is measured."""
    print_plan(plan, place)
    out = console()
    out.print(f"  predicted roofline {predicted_roofline:.2f} s (peaks {peaks.describe()})")
    if plan.advice is not None:
        print_advice(plan.advice)


def print_plan(plan: Plan, place: RunContext) -> None:
    """What is run on what."""
    print_device(place, plan.spec, plan.backend, str(plan.policy))
    cache = f"cache {plan.num_blocks} x {plan.block_size} tokens"
    console().print(f"  {plan.load.describe()}, batch {plan.batch_size}, {cache}")


def print_advice(advice: Advice) -> None:
    """The chunk that chunk=auto stands for, and the predictions that it was chosen by."""
    out = console()
    out.print(
        f"  chunk=auto is {advice.chunk}, by these predictions (* within 1 % of the most tokens/s)"
    )
    columns = [name for name in ADVICE_COLUMNS if name in advice.table]
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    table.add_column("chunk", justify="right")
    for name in columns:
        table.add_column(ADVICE_COLUMNS[name], justify="right")
    for row in advice.table.to_dict("records"):
        mark = "*" if row["is_as_good"] else " "
        table.add_row(f"{row['chunk']} {mark}", *(cell(name, row[name]) for name in columns))
    out.print(table)

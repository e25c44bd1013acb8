"""What a person sees of the tasks `advise` and `crossover`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from rich.table import Table

from sarathi_lab.crossover import OUTCOMES, at_best_chunk
from sarathi_lab.report import console
from sarathi_lab.server_flags import ServerFlag

LOSS_COLUMNS = {
    "total": "more than whole [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
}


def print_loss(loss: pd.DataFrame) -> None:
    """`advise_task.loss_table`: what cutting the longest prompt costs, by cause."""
    prompt_len, whole = int(loss.prompt_len.iloc[0]), float(loss.whole.iloc[0])
    out = console()
    out.print(f"  cutting alone: a prompt of {prompt_len} tokens takes {1e3 * whole:.1f} ms whole; in chunks")
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    for heading in ("chunk", *LOSS_COLUMNS.values(), "loss"):
        table.add_column(heading, justify="right")
    loss = loss.assign(total=loss[["attention", "matmul", "fixed"]].sum(axis=1))
    for row in loss.to_dict("records"):
        table.add_row(str(row["chunk"]), *(f"{1e3 * row[name]:.1f}" for name in LOSS_COLUMNS), f"{row['loss']:+.1%}")
    out.print(table)


def print_flags(rows: Sequence[ServerFlag]) -> None:
    """The settings of every server: the flags on a line of their own, unbroken, so that they can be copied."""
    out = console()
    out.print("  as settings of servers")
    for row in rows:
        out.print(f"  {row.server}, {row.effective_budget} tokens: {row.note}", soft_wrap=True)
        out.print(f"    {' '.join(row.flags)}", soft_wrap=True)


def print_outcomes(table: pd.DataFrame, kv_tokens: int) -> None:
    """`crossover`'s outcomes by baseline: how many cells gain, are neutral and lose, and the best and worst cell."""
    out = console()
    num_loads = len(table[["pd_ratio", "seq_len", "batch"]].drop_duplicates())
    for name, cells in table.groupby("baseline", sort=False):
        out.print(
            f"  over {name}: {len(cells)} cells of {num_loads} loads that fit a cache of {kv_tokens} tokens: "
            f"{_counts(cells)}; with the best chunk of each load {_counts(at_best_chunk(cells))}",
            soft_wrap=True,
        )
        cells = cells.sort_values("gain")
        for which, place in (("best", -1), ("worst", 0)):
            cell = cells.iloc[place]
            out.print(
                f"    {which} {cell.gain:+.1%} at P:D {cell.pd_ratio:g}, P + D {cell.seq_len}, batch {cell.batch}, "
                f"chunk {cell.chunk}"
            )


def _counts(cells: pd.DataFrame) -> str:
    counts = cells.outcome.value_counts()
    words = dict(zip(OUTCOMES, ("lose", "neutral", "gain"), strict=True))
    return ", ".join(f"{counts[outcome]} {words[outcome]}" for outcome in reversed(OUTCOMES))

"""What a person sees of a comparison: a table, and the engines whose tokens should have been ours
and are not.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.table import Table

from sarathi_lab.config import console

COLUMNS = (
    "engine",
    "model",
    "dtype",
    "load",
    "median\n[s]",
    "q20-q80\n[s]",
    "repeti-\ntions",
    "tokens/s",
    "x ours",
    "same\ntokens",
)


def print_table(table: pd.DataFrame) -> None:
    """A line per engine and load; seconds over ours are above 1 where ours is faster."""
    shown = Table(box=None, padding=(0, 1), pad_edge=True)
    for column in COLUMNS:
        shown.add_column(
            column, justify="left" if column in COLUMNS[:4] else "right", no_wrap=column == "engine"
        )
    for row in (
        table[table.error == ""]
        .sort_values(["model", "dtype", "workload"], kind="stable")
        .to_dict("records")
    ):
        shown.add_row(*_cells(row))
    out = console.console()
    out.print(
        "\nSeconds for all requests of a load (x ours: above 1, ours is faster)", style="bold"
    )
    out.print(shown)
    for row in (
        table[table.error != ""]
        .drop_duplicates(["peer", "variant", "model", "dtype", "error"])
        .to_dict("records")
    ):
        out.print(
            f"  {_engine(row)}, {row['model']} {row['dtype']}: {row['error']}", soft_wrap=True
        )
    wrong = table[(table.dtype == "float32") & (table.agreement < 1)]
    for row in wrong.to_dict("records"):
        where = f"{row['model']} {row['workload']} in float32"
        out.print(
            f"  {_engine(row)}, {where}: {1 - row['agreement']:.1%} of its tokens are not ours",
            soft_wrap=True,
        )


def _cells(row: dict[Any, Any]) -> list[str]:
    labels = [_engine(row), *(str(row[name]) for name in ("model", "dtype", "workload"))]
    return [
        *labels,
        f"{row['seconds']:.2f}",
        f"{row['q20']:.2f}-{row['q80']:.2f}",
        str(row["repetitions"]),
        f"{row['throughput']:.0f}",
        "-" if pd.isna(row["ratio"]) else f"{row['ratio']:.2f}x",
        _agreement(row["agreement"]),
    ]


def _agreement(share: float) -> str:
    if pd.isna(share):
        return "-"
    return "yes" if share == 1 else f"{share:.1%}"


def _engine(row: dict[Any, Any]) -> str:
    return f"{row['peer']} {row['variant']}".rstrip()

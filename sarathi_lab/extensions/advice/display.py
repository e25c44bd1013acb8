"""How the advice is shown: the answer first, then what it was chosen from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sarathi_lab.config.console import amount
from sarathi_lab.experiment.advisor import AS_GOOD, Row, choose, marked
from sarathi_lab.extensions.advice.compared import LONGER, Compared
from sarathi_lab.extensions.advice.remedies import WORDS, Remedy
from sarathi_lab.extensions.advice.server_flags import ServerFlags
from sarathi_lab.results.report import cell
from sarathi_lab.results.result import DisplayTable
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.results.table import heading
from sarathi_lab.tasks.plan import Plan

CONFIRMED = " +"  # in a row whose quantities are of a longer run than the others
LOSS_COLUMNS = {
    "total": "more than uncut [ms]",
    "attention": "attention, KV read again [ms]",
    "matmul": "smaller matrix products [ms]",
    "fixed": "fixed per iteration [ms]",
    "experts": "of the products, experts [ms]",
}


def answer(
    best: pd.Series, compared: Compared, table: pd.DataFrame, left_out: Sequence[str]
) -> list[str]:
    """Name the policy and the chunk, and whether they meet the objective."""
    slo = compared.slo
    name = f"{best['policy']} with {chunk_of(best)}"
    lines = []
    if slo is None:
        lines.append(f"  best: {name}, for the most tokens/s (* within 1 % of the most)")
    else:
        lines.append(f"  objective {slo.name}: {slo.describe()}")
        if best["slo_met"]:
            lines.append(f"  best within it: {name}")
            lines += _not_distinguished(best, table)
        elif best["is_steady"]:
            lines.append(f"  nothing meets it; nearest comes {name}")
        else:
            lines.append(
                "  nothing meets it: requests come faster than any of these serves them, and wait "
                f"the longer the longer it runs; shown is {name}"
            )
    longest = max(request.prompt_len for request in compared.plan.load.requests)
    if best["is_whole"] or best["chunk"] >= longest:
        lines.append(f"  do not chunk here: it leaves all prompts whole, the longest has {longest}")
    waits = () if slo is None else {"ttft", "scheduling_delay"} & slo.bounds.keys()
    load = compared.plan.load
    if waits and not (load.has_times or load.waits_for_answers):
        lines.append(
            "  all requests wait from the start, so that first tokens come after the whole queue; "
            "state workload.rate for requests that arrive over time"
        )
    return [*lines, *(f"  {words}" for words in left_out)]


def _not_distinguished(best: pd.Series, table: pd.DataFrame) -> list[str]:
    """Name the best of other policies that are as far within the objective as `best`, to a share of
    `AS_GOOD`, with as many tokens/s.
    """
    alike = []
    for place, rows in table.groupby("place"):
        other = choose(marked(rows))
        pairs = [(other[name], best[name]) for name in ("throughput", "worst_use")]
        is_alike = all(math.isclose(*pair, rel_tol=AS_GOOD) for pair in pairs)
        if place != best["place"] and other["slo_met"] and is_alike:
            alike.append(f"{other['policy']} with {chunk_of(other)}")
    return [f"  not distinguished from it (within 1 %): {', '.join(alike)}"] if alike else []


def chunk_of(row: Row) -> str:
    return "whole prompts" if row["is_whole"] else f"chunk {row['chunk']:.0f}"


def policies_table(table: pd.DataFrame, slo: Slo | None) -> DisplayTable:
    """Show each policy with its best chunk, the best policy first."""
    chosen = [choose(marked(rows)) for _, rows in table.groupby("place", sort=False)]
    best = choose(table)
    others = [row for row in chosen if row["place"] != best["place"]]
    rows = []
    for row in (best, *others):
        label = str(row["policy"]).replace(" ", "\n")
        cells = _cells(row, slo)
        if slo is not None:
            del cells["tokens/s"]  # what arrives, where it keeps up
        rows.append({"policy": label, **cells})
    return DisplayTable(rows, left=["policy"], unbroken=["policy"])


def chunks_table(compared: Compared, slo: Slo | None) -> DisplayTable:
    """Show all chunks that were tried for the advised policy."""
    table = compared.table.sort_values(["is_whole", "chunk"])
    columns = [name for name in table if str(name).startswith("throughput_vs_")]
    columns += ["kv_reread_factor", "tbt_p50"]
    rows = [_cells(row, slo, columns) for row in table.to_dict("records")]
    return DisplayTable(rows, title=f"  chunks of {compared.option.label}")


def _cells(row: Row, slo: Slo | None, columns: Sequence[Any] = ()) -> dict[str, str]:
    """Return a row's chunk, throughput, bounded quantities and other `columns` as text."""
    mark = " *" if row["is_as_good"] and slo is None else ""
    cells = {
        "chunk": f"{'whole' if row['is_whole'] else int(row['chunk'])}{mark}",
        "tokens/s": amount(row["throughput"]),
    }
    if slo is None:
        columns = [*columns, "tbt_p99"]
    else:
        for name, bound in slo.bounds.items():
            value = row[slo.quantity_of(name)]
            cells[bound_heading(slo, name)] = _against(value, bound)
        cells["longest\ngap P99"] = cell("tbt_p99", row["request_gap_p99"])
        mark = CONFIRMED if row["is_confirmed"] else ""
        cells["objective"] = f"{verdict(row)}{mark}"
    cells |= {heading(str(name)): cell(str(name), row[name]) for name in columns}
    return cells


def bound_heading(slo: Slo, name: str) -> str:
    """Return the heading of a bounded quantity with its bound, such as "TBT P99 [ms] <= 50"."""
    quantile = slo.quantity_of(name).rpartition("_p")[2]
    return f"{WORDS[name]} P{quantile} [ms]\n<= {1e3 * slo.bounds[name]:.4g}"


def _against(value: float, bound: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{amount(1e3 * value)} {'met' if value <= bound else 'missed'}"


def verdict(row: Row) -> str:
    """Return whether a run is within the objective, or its waits grow."""
    if not row["is_steady"]:
        return "overloaded"
    return "met" if row["slo_met"] else "missed"


def remedies(found: Sequence[Remedy]) -> list[str]:
    """Show what would meet the objective, each with the command that shows it."""
    if not found:
        return []
    lines = ["  what would meet it:"]
    for remedy in found:
        lines += [f"    {remedy.words}", f"      {remedy.command}"]
    return lines


def loss(table: pd.DataFrame | None, *, has_experts: bool) -> list[DisplayTable | str]:
    """Show what cutting the longest prompt costs by itself, by its cause."""
    if table is None:
        return []
    names = [name for name in LOSS_COLUMNS if has_experts or name != "experts"]
    total = table[["attention", "matmul", "fixed"]].sum(axis="columns")
    by_cause = 1e3 * table.assign(total=total)[names].rename(columns=LOSS_COLUMNS)
    by_cause = pd.concat([table.chunk, by_cause, table.loss], axis="columns")
    formats = dict.fromkeys([LOSS_COLUMNS[name] for name in names], ".1f") | {"loss": "+.1%"}
    prompt_len, seconds = table.prompt_len[0], table.whole[0]
    uncut = f"a prompt of {prompt_len} tokens takes {1e3 * seconds:.1f} ms uncut"
    return [
        f"  cutting alone: {uncut}; in chunks",
        DisplayTable(by_cause.to_dict("records"), formats=formats),
    ]


def flags(servers: Sequence[ServerFlags], *, is_met: bool, has_lower_rate: bool) -> list[str]:
    """Show how to start the servers as they were simulated."""
    if not servers:
        return ["  no flags: no server has this policy; task.policies names servers' policies"]
    title = "  servers as they were simulated, each with its best chunk"
    if not is_met and has_lower_rate:
        title = "  the server for that rate or those replicas; here it MISSES the objective"
    elif not is_met:
        title = "  the server that comes nearest, which MISSES the objective"
    lines = [title]
    for server in servers:  # flags on a separate line, so that they can be copied
        lines.append(f"  {server.server}, {server.effective_budget} tokens: {server.note}")
        lines.append(f"    {server.command} {server.flags}")
        lines += [f"      options.yaml: {line}" for line in server.file]
    return lines


def closing(table: pd.DataFrame, plan: Plan) -> str:
    """Return what the numbers are of."""
    number = len(plan.load.requests)
    longer = ""
    if table.is_confirmed.any():
        num_confirmed = int(table.is_confirmed.sum())
        rows = "the row" if num_confirmed == 1 else f"the {num_confirmed} rows"
        are = "is" if num_confirmed == 1 else "are"
        longer = f"; {rows} marked +, nearest to the objective, {are} of {LONGER * number:,}"
    runs = f"{len(table)} simulated runs" if len(table) > 1 else "a simulated run"
    return (
        f"  all numbers are of {runs} of {number:,} requests{longer} (seed {plan.config['seed']}); "
        "no server was run"
    )

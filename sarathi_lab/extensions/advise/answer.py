"""How the advice is shown: the answer first, then what it was chosen from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from sarathi_lab.config.console import amount, counted
from sarathi_lab.experiment.advise import AS_GOOD, Row, choose, is_overloaded, marked
from sarathi_lab.extensions.advise.options import LONGER, PolicyRuns
from sarathi_lab.extensions.advise.remedies import NAMES, Remedy, quantities_of
from sarathi_lab.extensions.advise.server_flags import ServerFlags
from sarathi_lab.extensions.advise.slow_end import SlowEnd
from sarathi_lab.extensions.advise.ties import deciding_bound, margin_of_tie
from sarathi_lab.extensions.under_load.search import WAITS
from sarathi_lab.results.load_trend import longer_than
from sarathi_lab.results.report import cell
from sarathi_lab.results.result import DisplayTable
from sarathi_lab.results.serving_metrics import Slo
from sarathi_lab.results.table import heading
from sarathi_lab.tasks.plan import Plan

AS_GOOD_MARK = " *"
LONG_STALLS = 2  # times the longest gap of another policy, from which it is pointed out
# Seconds from which a bound was probably meant in milliseconds.
MEANT_MILLISECONDS = {"ttft": 100.0, "tbt": 10.0, "tpot": 10.0}
MOVED = 1.1  # times the P99 of a short run from which the longer one's is pointed out


def best_lines(
    best: pd.Series, runs: PolicyRuns, table: pd.DataFrame, slow_end: SlowEnd | None
) -> list[str]:
    """Name the policy and the chunk, by which rule, and whether they meet the objective."""
    name = _policy_with_chunk(best)
    slo = runs.slo
    load = runs.plan.load
    if slo is None:
        lines = [
            f"best: {name}, for the most tokens/s (* within 1 % of the most)",
            *_tie_lines(best, table, slo),
            "of those marked * it has the shortest times between tokens (P99)",
        ]
        if load.has_times:
            lines.append(
                "first tokens and overload are not judged without an objective, such as "
                "slo.ttft=1 slo.tbt=0.05"
            )
    else:
        lines = [f"objective {slo.name}: {slo.describe()}"]
        lines += _bounds_in_doubt(slo)
        lines += _within_objective(name, best, runs, slo, table)
        lines += _slow_end_lines(best, slo, slow_end)
    is_served = slo is None or not is_overloaded(best)
    if is_served and leaves_whole(best, runs):
        longest = runs.longest_prompt
        lines.append(f"do not chunk here: it leaves all prompts whole, the longest has {longest}")
    bounds_waits = slo is not None and not WAITS.isdisjoint(slo.bounds)
    if load.all_wait and bounds_waits:
        lines.append(
            "all requests wait from the start, so that first tokens come after the whole queue; "
            "state workload.rate for requests that arrive over time"
        )
    return [f"  {line}" for line in lines]


def _bounds_in_doubt(slo: Slo) -> list[str]:
    """Name the bounds that were probably meant in milliseconds."""
    lines = []
    for name, bound in slo.bounds.items():
        doubtful = MEANT_MILLISECONDS.get(name, math.inf)
        if bound < doubtful:
            continue
        number = amount(bound)
        in_seconds = bound / 1e3
        lines.append(
            f"slo.{name}={bound:g} is {number} seconds, in which bounds are stated; "
            f"slo.{name}={in_seconds:g} is {number} ms"
        )
    return lines


def _within_objective(
    name: str, best: pd.Series, runs: PolicyRuns, slo: Slo, table: pd.DataFrame
) -> list[str]:
    """Describe how far the advised run, of a policy and chunk with this `name`, is within the
    objective, and by which rule of `choose` it was taken.
    """
    if best["slo_met"]:
        return [
            f"best within it: {name}",
            *_tie_lines(best, table, slo),
            "of those that meet it with the most tokens/s (within 1 %), "
            "it stays farthest below the bounds",
            f"its nearest bound is {_nearest_bound(best, slo)}",
            *_unbounded_gaps(best, slo, table),
        ]
    if best["is_steady"]:
        return [
            f"nothing meets it; nearest comes {name}",
            "of those that keep up with the requests, it misses the fewest bounds, and by least",
        ]
    if best["is_too_short"]:
        number = int(best["num_requests"])
        fewest = longer_than(number)
        if not runs.confirmed.empty:
            fewest = math.ceil(fewest / LONGER)  # of the short runs, which the setting states
        return [
            f"nothing meets it for certain: with {name} ever more requests are in service, and "
            f"{number:,} are too few to tell whether it keeps up; workload.num_requests={fewest} "
            "may tell"
        ]
    return [
        "nothing meets it: requests come faster than any of these serves them, and wait the longer "
        f"the longer it runs; {name} is shown: of those with the shortest stalls, counted in "
        "doublings of the bounds between tokens, it has the most tokens/s"
    ]


def leaves_whole(row: Row, runs: PolicyRuns) -> bool:
    """Return whether the run of a row cut no prompt."""
    return bool(row["is_whole"]) or row["chunk"] >= runs.longest_prompt


def chunk_of(row: Row) -> str:
    if row["is_whole"]:
        return "whole prompts"
    return f"chunk {row['chunk']:.0f}"


def _policy_with_chunk(row: Row) -> str:
    return f"{row['policy']} with {chunk_of(row)}"


def best_of_policies(table: pd.DataFrame, best: pd.Series) -> list[pd.Series]:
    """Return the row of each policy that would be advised of it alone, the advised `best` first."""
    rows = [best]
    as_good = table[table["is_as_good"]].index  # of all policies, not of a row's own
    policies = table["policy"]
    for label in policies.unique():
        if label == best["policy"]:
            continue
        of_policy = table[policies == label]
        chosen = choose(marked(of_policy))
        chosen["is_as_good"] = chosen.name in as_good
        rows.append(chosen)
    return rows


def rows_alike(best: pd.Series, table: pd.DataFrame, slo: Slo | None) -> list[pd.Series]:
    """Return the best of other policies that are tied with `best`: with as many tokens/s, to a
    share of `AS_GOOD`, and as far within the objective (without one: with times between tokens as
    short), to the `margin_of_tie`.
    """
    decided_by = "tbt_p99"
    if "slo_met" in table:
        decided_by = "worst_use"
    margins = {"throughput": AS_GOOD, decided_by: margin_of_tie(best, slo)}
    alike = []
    _, *rivals = best_of_policies(table, best)
    for row in rivals:
        is_tied = row.get("slo_met", True)
        for name, margin in margins.items():
            is_tied &= math.isclose(row[name], best[name], rel_tol=margin)
        if is_tied:
            alike.append(row)
    return alike


def _nearest_bound(best: pd.Series, slo: Slo) -> str:
    """Name what is nearest to its bound in the advised run, and how much of the bound it takes."""
    share = best["worst_use"]
    if share > best["bound_use"]:
        # A P99 of all gaps may hide one long stall, so each request's longest counts, too.
        return (
            f"TBT: a request's longest gap (P99) is {share:.0%} of the bound, which is on all gaps"
        )
    nearest = NAMES[deciding_bound(best, slo)]
    return f"{nearest}, which takes {share:.0%} of its bound"


def _unbounded_gaps(best: pd.Series, slo: Slo, table: pd.DataFrame) -> list[str]:
    """Say that another policy stalls far less, where no time between tokens is bounded."""
    if not {"tbt", "tpot"}.isdisjoint(slo.bounds):
        return []
    within = [row for row in best_of_policies(table, best) if row["slo_met"]]
    calmest = min(within, key=lambda row: row["request_gap_p99"])
    gap = best["request_gap_p99"]
    least_gap = calmest["request_gap_p99"]
    if LONG_STALLS * least_gap > gap:
        return []
    longest_wait = amount(1e3 * gap)
    least_wait = amount(1e3 * least_gap)
    return [
        f"it lets requests wait up to {longest_wait} ms between tokens (P99), "
        f"{_policy_with_chunk(calmest)} {least_wait} ms; "
        "slo.tbt=0.05 bounds these times"
    ]


def _tie_lines(best: pd.Series, table: pd.DataFrame, slo: Slo | None) -> list[str]:
    alike = [_policy_with_chunk(row) for row in rows_alike(best, table, slo)]
    if not alike:
        return []
    margin = margin_of_tie(best, slo)
    return [
        f"tied with it (within {margin:.0%}, by which half of the simulator's ratios of two runs' "
        f"means are off): {', '.join(alike)}"
    ]


def _slow_end_lines(best: pd.Series, slo: Slo, slow_end: SlowEnd | None) -> list[str]:
    """Say whether the advised run is within the objective at the slow end of an assumed error."""
    if slow_end is None:
        return []
    slow = slow_end.rows[best["policy"]]
    verdict = "NOT met there"
    if slow["slo_met"]:
        verdict = "met there, too"
    return [
        f"the objective is met by the predicted times; at the slow end of their assumed error (all "
        f"kernels {slow_end.error:.0%} longer) it is {verdict}: {quantities_of(slow, slo)}"
    ]


def policies_table(
    table: pd.DataFrame, best: pd.Series, slo: Slo | None, slow_end: SlowEnd | None = None
) -> list[DisplayTable | str]:
    """Show each policy with its best chunk, the advised policy `best` first.

    The parameters of a policy stand below the table, as their column would split it in two.
    """
    rows = []
    notes: list[str] = []
    for row in best_of_policies(table, best):
        name, _, parameters = str(row["policy"]).partition(" ")
        if parameters:
            mark = f"({len(notes) + 1})"
            notes.append(f"  {mark} {parameters}")
            name = f"{name} {mark}"
        cells = {"policy": name, **_cells(row, slo)}
        if slow_end is not None:
            is_met = slow_end.is_met(row)
            verdict = "-"
            if is_met is not None:
                verdict = _met(is_met)
            cells["at the\nslow end"] = verdict
        rows.append(cells)
    title = f"  each policy with its best chunk, in runs of {best['num_requests']:,} requests"
    return [DisplayTable(rows, title=title, left=["policy"], unbroken=["policy"]), *notes]


def chunks_table(runs: PolicyRuns) -> DisplayTable:
    """Show all chunks that were tried for the advised policy, and what longer runs say of them."""
    rows = []
    num_requests = len(runs.plan.load.requests)
    table = runs.table.sort_values(["is_whole", "chunk"])
    verdicts = _verdicts_of_longer(runs)
    for row in table.to_dict("records"):
        # Whether waits grow only a longer run tells: of a short one the bounds alone count.
        cells = _cells(row, runs.slo, judges_growth=not verdicts)
        if verdicts:
            key = row["chunk"], row["is_whole"]
            cells[f"in {LONGER * num_requests:,}\nrequests,\nof bounds"] = verdicts.get(key, "-")
        if runs.slo is None:  # else they are more columns than a terminal of 80 has
            for name in ("kv_reread_factor", "tbt_p50"):
                cells[heading(name)] = cell(name, row[name])
        rows.append(cells)
    title = f"  chunks of {runs.option.label}, in runs of {num_requests:,} requests"
    return DisplayTable(rows, title=title)


def _verdicts_of_longer(runs: PolicyRuns) -> dict[tuple[int, bool], str]:
    """Return what longer runs say, by chunk and `is_whole`; nothing of chunks that all miss bounds
    in their short runs, too.
    """
    if runs.confirmed.empty or runs.table["bounds_missed"].all():
        return {}
    verdicts = {}
    for row in runs.confirmed.to_dict("records"):
        verdict = _verdict(row)
        if row["slo_met"]:
            verdict += f" {row['bound_use']:.0%}"
        verdicts[row["chunk"], row["is_whole"]] = verdict
    return verdicts


def longer_run_lines(best: pd.Series, runs: PolicyRuns) -> list[str]:
    """Say why the two tables differ where the advised chunk waits longer in its longer run."""
    slo = runs.slo
    if slo is None or runs.confirmed.empty or is_overloaded(best):
        return []  # an overloaded server lets requests wait the longer the longer it runs
    short = runs.tried(best)
    for name in WAITS & slo.bounds.keys():
        quantity = slo.quantity_of(name)
        least_moved = MOVED * short[quantity]
        if best[quantity] > least_moved:
            return [
                f"  with {chunk_of(best)} requests wait longer in runs of "
                f"{best['num_requests']:,}, which meet rarer bursts; these decide"
            ]
    return []


def _cells(row: Row, slo: Slo | None, *, judges_growth: bool = True) -> dict[str, str]:
    """Return a row's chunk, throughput and bounded quantities as text, and whether it is within the
    objective: in its bounds, and where the run `judges_growth` without waits that grow.
    """
    chunk = f"{row['chunk']:.0f}"
    if row["is_whole"]:
        chunk = "whole"
    cells = {"chunk": chunk, "tokens/s": amount(row["throughput"])}
    if slo is None:
        if row["is_as_good"]:
            cells["chunk"] += AS_GOOD_MARK
        cells[heading("tbt_p99")] = cell("tbt_p99", row["tbt_p99"])
        return cells
    for name, bound in slo.bounds.items():
        value = row[slo.quantity_of(name)]
        cells[_bound_heading(slo, name)] = _against(value, bound)
    cells["longest\ngap P99\n[ms]"] = cell("tbt_p99", row["request_gap_p99"])
    if judges_growth:
        verdict = _verdict(row)
    else:
        verdict = _met(not row["bounds_missed"])
    cells["objective"] = verdict
    return cells


def _verdict(row: Row) -> str:
    if row["is_too_short"]:
        return "too short"
    if not row["is_steady"]:
        return "overloaded"
    return _met(row["slo_met"])


def _met(is_met: bool) -> str:
    if is_met:
        return "met"
    return "missed"


def _bound_heading(slo: Slo, name: str) -> str:
    """Return the heading of a bounded quantity with its bound: TBT, P99 [ms], <= 50 in lines."""
    percent = 100 * slo.quantile_of(name)
    bound = slo.bound_in_ms(name)
    return f"{NAMES[name]}\nP{percent:g} [ms]\n<= {bound}"


def _against(value: float, bound: float) -> str:
    if pd.isna(value):
        return "-"
    verdict = _met(value <= bound)
    milliseconds = amount(1e3 * value)
    return f"{milliseconds} {verdict}"


def remedy_lines(remedies: Sequence[Remedy], notes: Sequence[str]) -> list[str]:
    """Show what would meet the objective, each with the command that shows it, and `notes` on what
    does not, or was not tried.
    """
    lines = []
    if remedies:
        lines.append("  what would meet it, or come nearer:")
    for remedy in remedies:
        lines.append(f"    {remedy.text}")
        lines.append(f"      {remedy.command}")
    for note in notes:
        lines.append(f"  {note}")
    return lines


def flag_lines(servers: Sequence[ServerFlags], *, is_met: bool, has_server: bool) -> list[str]:
    """Show how to start the servers as they were simulated; `has_server`: those of a
    remedy.
    """
    if not servers and not is_met:
        return ["  no flags: no server here keeps up with the requests, or has its policy"]
    if not servers:
        return ["  no flags: no server here has this policy; task.policies names servers' policies"]
    title = "  servers as they were simulated, each with its best chunk"
    if not is_met:
        title = "  the server that comes nearest, which MISSES the objective"
    if has_server:
        title = (
            "  the server of the first remedy that meets it; as asked for it MISSES the objective"
        )
    lines = [title]
    for server in servers:  # flags on a separate line, so that they can be copied
        lines.append(f"  {server.server}, {server.effective_budget} tokens: {server.note}")
        lines.append(f"    {server.command} {server.flags}")
        lines += [f"      options.yaml: {line}" for line in server.file]
    return lines


def longest_line(plan: Plan) -> list[str]:
    """Say that the flags bound sequences to the length that all requests of a plan have."""
    lengths = {request.total_len for request in plan.load.requests}
    if len(lengths) > 1 or plan.config["max_model_len"] is not None:
        return []
    (length,) = lengths
    return [
        f"  so started a server refuses sequences of more than {length:,} tokens, which all these "
        f"requests have; max_model_len={2 * length} states another bound"
    ]


def closing(table: pd.DataFrame, runs: PolicyRuns, seed: int) -> str:
    """Return what the numbers of the `table` of all runs are of."""
    number = len(runs.plan.load.requests)
    is_longer = table["num_requests"] > number
    num_longer = int(is_longer.sum())
    num_short = len(table) - num_longer
    short_runs = counted(num_short, "simulated run")
    text = f"  all numbers are of {short_runs} of {number:,} requests"
    if num_longer:
        text += (
            f" and, to decide between chunks, {num_longer} of {LONGER * number:,} "
            f"(workload.num_requests={number} states the first number)"
        )
    return f"{text} (seed {seed}); no server was run"

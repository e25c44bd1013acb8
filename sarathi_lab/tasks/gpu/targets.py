"""What the engine should reach beside what this campaign measured, judged from its tables alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.experiment.timed_figures import (
    TARGET_BESIDE,
    TARGET_CHUNKS,
    TARGET_CONTEXT,
    TARGET_DECODES,
    TARGET_PREFILLS,
)
from sarathi_lab.tasks.gpu.context import Context
from sarathi_lab.tasks.peers.gpu import CONTINUOUS, GENERATE

LEAST_COPY = 1024  # MiB: copies that no cache helps
MODEL = "13b"
COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class NotMeasured(Exception):
    """Why a value is not there."""


@dataclass(frozen=True)
class Target:
    """A value that is wanted to be at most or at least a bound."""

    name: str
    relation: str
    bound: float
    unit: str
    measure: Callable[[], float]

    def row(self) -> dict[str, object]:
        """Wanted, measured, and by how much it is missed; or why it was not measured."""
        row: dict[str, object] = {
            "target": self.name,
            "wanted": f"{self.relation} {self.bound:g}",
            "unit": self.unit,
        }
        try:
            value = self.measure()
        except NotMeasured as reason:
            return row | {
                "value": None,
                "met": "not measured",
                "missed_by": None,
                "reason": str(reason),
            }
        is_met = COMPARE[self.relation](value, self.bound)
        missed = None if is_met else abs(value / self.bound - 1)
        return row | {
            "value": value,
            "met": "yes" if is_met else "no",
            "missed_by": missed,
            "reason": "",
        }


def judge(context: Context) -> None:
    """Write targets.csv, and say it line by line. Nothing is judged that was not measured."""
    rows = [target.row() for target in targets(Tables(context))]
    context.write("gpu_targets", "targets", rows)
    if context.is_dry:
        context.say("a dry run on a CPU: judged to see that it works, the values mean nothing")
    for row in rows:
        value = row["value"]
        found = f"{value:.3g} {row['unit']}" if isinstance(value, float) else row["reason"]
        context.say(f"{row['target']}: wanted {row['wanted']}, {found}: {row['met']}")


class Tables:
    """What the parts before wrote; raises NotMeasured for what they did not."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def read(self, question: str, name: str) -> pd.DataFrame:
        """A part's table."""
        table = self._context.read(question, name)
        if table is None:
            raise NotMeasured(f"there is no {question}/{name}.csv: its part did not run or failed")
        return table

    def peak(self, quantity: str) -> float:
        """FLOP/s of the best product, or bytes/s of the best large copy."""
        table = self.read("peaks", "peaks")
        rows = table[table.quantity == quantity]
        if quantity == "copy":
            mib = rows["case"].str.removesuffix(" MiB").astype(int)
            rows = rows[mib >= min(LEAST_COPY, mib.max())] if len(rows) else rows
        if rows.empty:
            raise NotMeasured(f"no {quantity} in peaks.csv")
        return float(rows.value.max()) * {"TFLOP/s": 1e12, "GB/s": 1e9}[str(rows.unit.iloc[0])]

    def iteration(self, prefill_tokens: int, decodes: int) -> pd.Series:
        """The row of the composition that the targets ask for, whole iteration."""
        table = self.read("paper", f"{MODEL}-compositions")
        kv_tokens = prefill_tokens + decodes * TARGET_CONTEXT
        rows = table[
            (table.operation == "iteration")
            & (table.prefill_tokens == prefill_tokens)
            & (table.decodes == decodes)
            & (table.kv_tokens == kv_tokens)
        ]
        if rows.empty:
            raise NotMeasured(
                f"{prefill_tokens} prompt tokens and {decodes} decodes were not timed"
            )
        return rows.iloc[0]

    def roofline(self, row: pd.Series) -> float:
        """Milliseconds that the composition needs at least, at the measured peaks."""
        flop_time, byte_time = row.flops / self.peak("matmul"), row.bytes / self.peak("copy")
        return 1e3 * max(float(flop_time), float(byte_time))

    def kernels(self, operation: str) -> pd.DataFrame:
        """Rows of the kernel benchmarks of one operation that have a time."""
        table = self.read("kernels", "kernels")
        rows = table[(table.operation == operation) & table.value.notna()]
        if rows.empty:
            raise NotMeasured(f"no times of {operation} in kernels.csv")
        return rows


def targets(tables: Tables) -> Iterator[Target]:
    """The rows of the wanted table."""
    for decodes in TARGET_DECODES:
        name = (
            f"decode-only, {MODEL}, batch {decodes} at context {TARGET_CONTEXT}: time / reading "
            "weights and KV once"
        )
        yield Target(name, "<=", 1.12, "ratio", lambda n=decodes: _over_bytes(tables, n))  # type: ignore[misc]
    for tokens in TARGET_PREFILLS:
        name = f"prefill of {tokens} tokens, {MODEL}: share of the peak's FLOP/s"
        yield Target(name, ">=", 0.85, "ratio", lambda n=tokens: _share_of_flops(tables, n))  # type: ignore[misc]
    for chunk in TARGET_CHUNKS:
        name = (
            f"hybrid of {chunk} tokens, {TARGET_BESIDE} of them decodes, {MODEL}: time / roofline"
        )
        yield Target(name, "<=", 1.15, "ratio", lambda n=chunk: _over_roofline(tables, n))  # type: ignore[misc]
    yield Target(
        "device idle between iterations, steady state", "<=", 0.02, "ratio", lambda: _idle(tables)
    )
    yield from _attention(tables)
    for system in (GENERATE, CONTINUOUS):
        name = f"throughput over {system}"
        yield Target(name, ">=", 2.0, "ratio", lambda s=system: _over_peer(tables, s))  # type: ignore[misc]


def _over_bytes(tables: Tables, decodes: int) -> float:
    row = tables.iteration(0, decodes)
    return float(row.value) / (1e3 * float(row.bytes) / tables.peak("copy"))


def _share_of_flops(tables: Tables, num_tokens: int) -> float:
    row = tables.iteration(num_tokens, 0)
    return float(row.flops) / (float(row.value) / 1e3) / tables.peak("matmul")


def _over_roofline(tables: Tables, chunk: int) -> float:
    row = tables.iteration(chunk - TARGET_BESIDE, TARGET_BESIDE)
    return float(row.value) / tables.roofline(row)


def _idle(tables: Tables) -> float:
    """The median over SARATHI's loads."""
    table = tables.read("paper", f"{MODEL}-serving")
    rows = table[(table.quantity == "idle share") & (table.policy == "sarathi")]
    if rows.empty:
        raise NotMeasured("no load was served under SARATHI")
    return float(rows.value.median())


# -- attention, by the names that the benchmarks give to operations, cases and implementations -----

PREFILL, DECODE, HYBRID = "prefill_attention", "decode_attention", "hybrid_attention"
OURS, SERIES, FUSED, FLASHINFER = "^paged$", "^series$", "^fused$", "^flashinfer"
SDPA = "^sdpa"  # any of its backends
DECODE_CASES = {"32 sequences of 2K": " 32 x 2048", "8 of 16K": " 8 x 16384"}
PAPERS_GRID = r"^mha .* \+ (?:17 x 1024|9 x 2048|5 x 3072)$"


def _attention(tables: Tables) -> Iterator[Target]:
    name = "prefill-chunk attention: speed over torch's best SDPA, least of all cases"
    yield Target(name, ">=", 0.95, "ratio", lambda: _least_speed(tables, PREFILL, OURS, SDPA))
    for words, case in DECODE_CASES.items():
        name = f"decode attention, {words}: share of copy bandwidth"
        yield Target(name, ">=", 0.88, "ratio", lambda c=case: _share_of_bandwidth(tables, c))  # type: ignore[misc]
    name = "hybrid attention: speed over the two kernels in series, least of the paper's grid"
    yield Target(
        name, ">=", 1.15, "ratio", lambda: _least_speed(tables, HYBRID, FUSED, SERIES, PAPERS_GRID)
    )
    name = "hybrid attention: speed over the two kernels in series, least of all cases"
    yield Target(name, ">=", 0.98, "ratio", lambda: _least_speed(tables, HYBRID, FUSED, SERIES))
    for operation, ours in ((PREFILL, OURS), (DECODE, OURS), (HYBRID, FUSED)):
        name = f"{operation.replace('_', ' ')}: speed over FlashInfer, least of all cases"

        def speed(operation: str = operation, ours: str = ours) -> float:
            return _least_speed(tables, operation, ours, FLASHINFER)

        yield Target(name, ">=", 1.0, "ratio", speed)


def _least_speed(tables: Tables, operation: str, ours: str, theirs: str, cases: str = "") -> float:
    """Their best time over ours, least of the cases that have both; names are regular
    expressions.
    """
    rows = tables.kernels(operation)
    rows = rows[rows["case"].str.contains(cases)]
    best = {
        who: rows[rows.implementation.str.contains(who)].groupby("case").value.min()
        for who in (ours, theirs)
    }
    speeds = (best[theirs] / best[ours]).dropna()
    if speeds.empty:
        missing = [who for who in (ours, theirs) if best[who].empty]
        raise NotMeasured(
            f"no case of {operation} has times of both"
            + (f": none of {missing[0]}" if missing else "")
        )
    return float(speeds.min())


def _share_of_bandwidth(tables: Tables, case: str) -> float:
    """The least of the head counts that were timed."""
    rows = tables.kernels(DECODE)
    rows = rows[rows["case"].str.endswith(case) & rows.implementation.str.contains(OURS)]
    if rows.empty:
        raise NotMeasured(f"{DECODE} has no case{case}")
    return float(rows.bytes_per_second.min()) / tables.peak("copy")


def _over_peer(tables: Tables, system: str) -> float:
    table = tables.read("peers", "peers")
    rows = table[table.system == system]
    ratios = rows[rows.quantity == "the lab's throughput / its"]
    if ratios.empty:
        reason = "; ".join(str(error) for error in rows.error.dropna()) or "it was not run"
        raise NotMeasured(f"{system}: {reason}")
    value = float(ratios.value.iloc[0])
    if not math.isfinite(value):
        raise NotMeasured(f"{system}: its time is not a number")
    return value

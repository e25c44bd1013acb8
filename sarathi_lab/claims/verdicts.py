"""Every claim against every device with results: the value that was measured, its interval and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from sarathi_lab import recorded
from sarathi_lab.claims.claim import Claim, load_claims
from sarathi_lab.errors import UserError
from sarathi_lab.paths import EXPERIMENTS

COLUMNS = ["id", "claim", "source", "device", "expected", "measured", "low", "high", "verdict", "unit", "note"]


def verdicts(root: Path = EXPERIMENTS, claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """A row per claim and device: `COLUMNS`.

    Measured devices have a row for each claim, simulated ones where they have results. `expected` is in words, such as
    "at least 1.33"; `note` is the reason why nothing was measured, else the claim's caveat.
    """
    claims = load_claims() if claims is None else claims
    tables = {name: recorded.load(name, root) for name in recorded.recorded(root)}
    measured = sorted({str(d) for table in tables.values() for d in table.device[~table.is_simulated].unique()})
    rows = [row for claim in claims for row in _rows(claim, tables.get(claim.experiment), measured)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(claim: Claim, table: pd.DataFrame | None, measured: Sequence[str]) -> Iterator[dict[str, object]]:
    own = [] if table is None else [str(device) for device in table.device.unique()]
    for device in [*measured, *(device for device in own if device not in measured)] or ["none"]:
        rows = None if table is None else table[table.device == device]
        value, low, high, reason = _value(claim, rows)
        if reason is not None and device not in measured and device != "none":
            continue  # a GPU of another model
        yield {
            "id": claim.id,
            "claim": claim.claim,
            "source": claim.source,
            "device": device,
            "expected": expected_in_words(claim),
            "measured": value,
            "low": low,
            "high": high,
            "verdict": claim.judge(value, low, high),
            "unit": claim.unit,
            "note": reason or claim.caveat,
        }


def expected_in_words(claim: Claim) -> str:
    """Such as "at least 1.33"."""
    return f"{claim.direction} {claim.expected:g}"


def _value(claim: Claim, rows: pd.DataFrame | None) -> tuple[float, float, float, str | None]:
    """The claim's value and interval, or not a number with the reason."""
    nothing = (math.nan, math.nan, math.nan)
    if rows is None or rows.empty:
        return *nothing, "no results of this device"
    chosen = _query(claim, rows)
    if chosen.empty:
        return *nothing, "not in what was measured"
    known = chosen[chosen.y.notna()]
    if known.empty:
        return *nothing, ", ".join(map(str, chosen.reason.dropna().unique()))
    return *_taken(claim, known), None


def _query(claim: Claim, rows: pd.DataFrame) -> pd.DataFrame:
    try:
        return rows.query(claim.where)
    except Exception as error:  # pandas passes on whatever the expression raises
        raise UserError(f"claims.yaml: {claim.id}.where can't be evaluated ({error}); correct the query") from None


def _taken(claim: Claim, known: pd.DataFrame) -> tuple[float, float, float]:
    """The value of the chosen rows, with the interval of the row that it is from."""
    if claim.take == "x of max":
        return _x_of_max(known)
    if claim.take == "last / first":
        return _last_over_first(known)
    ordered = known.sort_values("y")
    place = {"min": 0, "median": (len(ordered) - 1) // 2, "max": len(ordered) - 1}[claim.take]
    return _interval(ordered.iloc[place])


def _interval(row: pd.Series) -> tuple[float, float, float]:
    """The row's value and ends; a value without an interval is its own."""
    low, high = (float(row.y if pd.isna(end) else end) for end in (row.low, row.high))
    return float(row.y), low, high


def _last_over_first(known: pd.DataFrame) -> tuple[float, float, float]:
    """The ratio of the ends of a line; the interval is as wide as both of theirs allow."""
    ordered = known.sort_values("x")
    first, first_low, first_high = _interval(ordered.iloc[0])
    last, last_low, last_high = _interval(ordered.iloc[-1])
    return last / first, last_low / first_high, last_high / first_low


def _x_of_max(known: pd.DataFrame) -> tuple[float, float, float]:
    """Where y is largest, and the least and largest x whose interval still reaches the best one's.

    What was computed (of no pairs) has but one place: the errors of a cost model are those of all points alike.
    """
    best = known.sort_values("y").iloc[-1]
    if not known.num_pairs.max():
        return float(best.x), float(best.x), float(best.x)
    reach = known[known.high.fillna(known.y) >= (best.y if pd.isna(best.low) else best.low)]
    return float(best.x), float(reach.x.min()), float(reach.x.max())

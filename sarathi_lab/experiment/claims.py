"""A claim as `experiments/claims.yaml` states it, and how a measured value is judged by it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sarathi_lab.config.errors import UserError, require_number, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results import load

CLAIMS = EXPERIMENTS / "claims.yaml"
Direction = Literal["at least", "at most", "near"]
Take = Literal["max", "min", "median", "x of max", "last / first"]
Verdict = Literal["holds", "partly", "fails", "not measured"]


@dataclass(frozen=True)
class Claim:
    """One claim. Its value is read from the rows of `experiment` that `where` (a pandas query)
    chooses.

    `take` makes one value of them: the "max", "min" or "median" of y, the x at which y is largest,
    or the y at the largest x over that at the smallest. The claim holds if the value is `direction`
    the `expected` one within the relative `tolerance`; `neutral` is the value of no effect at all,
    beyond which a claim that misses its number holds partly. `caveat` says what the number depends
    on.
    """

    id: str
    claim: str
    source: str
    experiment: str
    where: str
    expected: float
    direction: Direction
    tolerance: float
    caveat: str
    take: Take = "max"
    unit: str = "ratio"
    neutral: float | None = None

    def __post_init__(self) -> None:
        for name, valid in (("direction", get_args(Direction)), ("take", get_args(Take))):
            require_one_of(f"claims.yaml: {self.id}.{name}", getattr(self, name), valid)
        fix = "write the share of it, such as 0.1"
        require_number(f"claims.yaml: {self.id}.tolerance", self.tolerance, minimum=0, fix=fix)

    def judge(self, value: float, low: float, high: float) -> Verdict:
        """The verdict on a measured value with its interval.

        A claim holds only if "no effect" is outside of the interval, and one of "near" not where
        the interval is so wide (twice the tolerance) that it decides nothing.
        """
        if math.isnan(value):
            return "not measured"
        is_beyond = self._is_beyond_neutral(low, high)
        if self._is_met(value):
            return "partly" if is_beyond is False or self._is_vague(low, high) else "holds"
        if self.direction == "near" and self._is_met(low, high):
            return "partly"
        return "partly" if is_beyond else "fails"

    def _is_met(self, low: float, high: float | None = None) -> bool:
        """Whether some value of [low, high] is what is expected."""
        high = low if high is None else high
        slack = self.tolerance * abs(self.expected)
        if self.direction == "at least":
            return high >= self.expected - slack
        if self.direction == "at most":
            return low <= self.expected + slack
        return low <= self.expected + slack and high >= self.expected - slack

    def _is_vague(self, low: float, high: float) -> bool:
        slack = 2 * self.tolerance * abs(self.expected)
        return self.direction == "near" and (
            low < self.expected - slack or high > self.expected + slack
        )

    def _is_beyond_neutral(self, low: float, high: float) -> bool | None:
        """Whether the whole interval is on the claimed side of no effect; None if no such value is
        stated.
        """
        if self.neutral is None:
            return None
        is_upward = self.direction == "at least" or (
            self.direction == "near" and self.expected > self.neutral
        )
        return low > self.neutral if is_upward else high < self.neutral


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file. Raises UserError for one that is not written as `Claim` has it."""
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(path))
        return [_claim(entry) for entry in entries]
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"{path} can't be read ({str(error).splitlines()[0]}); restore it from git"
        ) from None


def _claim(entry: dict[str, Any]) -> Claim:
    known = [field.name for field in fields(Claim)]
    for name in entry:
        require_one_of(f"claims.yaml: {entry.get('id')}", name, known)
    try:
        return Claim(**entry)
    except TypeError as error:
        raise UserError(
            f"claims.yaml: {entry.get('id')}: {str(error).partition(')')[2].strip()}; add it"
        ) from None


COLUMNS = [
    "id",
    "claim",
    "source",
    "device",
    "expected",
    "measured",
    "low",
    "high",
    "verdict",
    "unit",
    "note",
]


def verdicts(root: Path = EXPERIMENTS, claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """A row per claim and device: `COLUMNS`.

    Measured devices have a row for each claim, simulated ones where they have results. `expected`
    is in words, such as "at least 1.33"; `note` is the reason why nothing was measured, else the
    claim's caveat.
    """
    claims = load_claims() if claims is None else claims
    tables = {name: load.load(name, root) for name in load.recorded(root)}
    measured = sorted(
        {str(d) for table in tables.values() for d in table.device[~table.is_simulated].unique()}
    )
    rows = [row for claim in claims for row in _rows(claim, tables.get(claim.experiment), measured)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(
    claim: Claim, table: pd.DataFrame | None, measured: Sequence[str]
) -> Iterator[dict[str, object]]:
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
        raise UserError(
            f"claims.yaml: {claim.id}.where can't be evaluated ({error}); correct the query"
        ) from None


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

    What was computed (of no pairs) has but one place: the errors of a cost model are those of all
    points alike.
    """
    best = known.sort_values("y").iloc[-1]
    if not known.num_pairs.max():
        return float(best.x), float(best.x), float(best.x)
    reach = known[known.high.fillna(known.y) >= (best.y if pd.isna(best.low) else best.low)]
    return float(best.x), float(reach.x.min()), float(reach.x.max())

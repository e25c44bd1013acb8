"""The claims of `experiments/claims.yaml`, and recorded results judged by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sarathi_lab.config.errors import UserError, require_number, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS, readable
from sarathi_lab.results import load
from sarathi_lab.results.intervals import LEVEL, Ends, ends_of_median
from sarathi_lab.results.metrics import REPLAY_TOLERANCE

CLAIMS = EXPERIMENTS / "claims.yaml"
DIRECTIONS = ("at least", "at most", "near")
NOT_MEASURED = "not measured"
HOLDS = "holds"
HOLDS_WITHIN = "holds within N %"  # the kind of all verdicts that name a tolerance
VERDICTS = [HOLDS, HOLDS_WITHIN, "direction holds", "partly", "not as claimed", "fails"]
VERDICTS += ["undecided", NOT_MEASURED]
COPIED = ["id", "claim", "source", "unit", "experiment"]  # columns that are the claim's
COLUMNS = ["id", "claim", "source", "device", "expected", "measured", "low", "high", "confidence"]
COLUMNS += ["mark", "verdict", "unit", "note", "experiment"]
SAME_REQUESTS = ("model", "prompt_len", "num_decodes", "batch")  # where `load_serving` has them
FITTED = "†"  # the mark of a value that constants were fitted to
ENDS = ["y", "low", "high"]
# of a point, for its value; taking all columns of each takes longer than judging it
READ = ["x", *ENDS, "confidence", "samples", "is_simulated", "num_pairs", "reason"]
ABSENT = "not in what was measured"


class Value(NamedTuple):
    """Measured or simulated value, its interval, and the interval's confidence level (NaN where the
    interval is a cost model's stated error).
    """

    measured: float = math.nan
    low: float = math.nan
    high: float = math.nan
    confidence: float = math.nan


@dataclass(frozen=True)
class Claim:
    """One claim, read from the rows of `experiment` that `where` (a pandas query) chooses.

    `take` makes one value of them (`TAKES`). With `over`, another query, y is that of a row over
    that of the other's row with the same `match`; `needs` chooses rows that were to be measured,
    too. The claim is that the value is `direction` ("at least", "near", ...) the `expected` one
    within the relative `tolerance`; `neutral` is the value that means no effect. Constants of
    the hardware file `fitted` were fitted to what the claim is about. `settings` make the
    experiment smaller, `caveat` states what the number depends on.
    """

    id: str
    claim: str
    source: str
    experiment: str
    where: str
    expected: float
    direction: str
    tolerance: float
    caveat: str
    take: str = "max"
    unit: str = "ratio"
    neutral: float | None = None
    over: str | None = None
    match: Sequence[str] = ("x",)
    needs: str | None = None
    fitted: str | None = None
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_one_of(f"claims.yaml: {self.id}.direction", self.direction, DIRECTIONS)
        require_one_of(f"claims.yaml: {self.id}.take", self.take, TAKES)
        fix = "write the share of it, such as 0.1"
        require_number(f"claims.yaml: {self.id}.tolerance", self.tolerance, minimum=0, fix=fix)

    def judge(self, found: Value) -> str:
        """Return which of `VERDICTS` is true of the whole interval, with its tolerance for N.

        Two questions: is the value on the claimed side of no effect, and is it as claimed within
        the tolerance? *holds*: yes to both, without any tolerance; *holds within N %*: yes to both;
        *direction holds*: yes to the first; *partly*: yes and no; *not as claimed*: no to the
        second; *fails*: no to both. A claim without `neutral` only
        has the second. Else, or where the interval's level is below `LEVEL`: *undecided*.
        """
        if math.isnan(found.measured):
            return NOT_MEASURED
        if found.confidence < LEVEL:
            return "undecided"
        slack = self.tolerance * abs(self.expected)
        least = -math.inf if self.direction == "at most" else self.expected - slack
        most = math.inf if self.direction == "at least" else self.expected + slack
        start, end = least, most
        if self.neutral is not None:
            is_above = self.expected > self.neutral or self.direction == "at least"
            start, end = (self.neutral, math.inf) if is_above else (-math.inf, self.neutral)
        is_directed = start < found.low and found.high < end
        if found.high <= start or found.low >= end:
            return "fails"
        if found.high < least or found.low > most:
            return "partly" if is_directed else "not as claimed"
        if is_directed and least <= found.low and found.high <= most:
            is_short = self.direction != "at most" and found.low < self.expected
            is_beyond = self.direction != "at least" and found.high > self.expected
            if is_short or is_beyond:
                return HOLDS_WITHIN.replace("N", f"{100 * self.tolerance:g}")
            return HOLDS
        return "direction holds" if is_directed else "undecided"


def kind_of(verdict: str) -> str:
    """Return which of `VERDICTS` it is, whatever its tolerance."""
    return HOLDS_WITHIN if verdict.startswith(f"{HOLDS} within ") else verdict


@cache  # parsing it takes longer than judging by it
def load_claims(path: Path = CLAIMS) -> tuple[Claim, ...]:
    """Return the claims of a file. Raises UserError for one that lacks or has other fields."""
    with readable(path, "restore it from git", YAMLError, OmegaConfBaseException):
        entries: Any = OmegaConf.to_container(OmegaConf.load(path))
    known, claims = [field.name for field in fields(Claim)], []
    for entry in entries:
        where = f"claims.yaml: {entry.get('id')}"
        for name in entry:
            require_one_of(where, name, known)
        try:
            claims.append(Claim(**entry))
        except TypeError as error:
            missing = str(error).partition(")")[2].strip()
            raise UserError(f"{where}: {missing}; add it") from None
    return tuple(claims)


def verdicts(root: Path = EXPERIMENTS, claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """Return a row per claim and device: `COLUMNS`; of simulated devices where they have results.

    `expected` is in words, `note` the reason why nothing was measured or nothing can be decided,
    else the claim's caveat, and whether the policies differ in what was replayed; `mark` is
    `FITTED` where the value is no prediction. `attrs["names"]` are the machines that were measured.
    """
    tables = {
        name: {str(device): rows for device, rows in load.load(name, root).groupby("device")}
        for name in load.recorded(root)
    }
    names: dict[str, dict[str, None]] = {}  # of the machines, by device
    for device, rows in (part for table in tables.values() for part in table.items()):
        if not rows.is_simulated.all():
            machines = rows.get("device_name", pd.Series(dtype=str)).dropna().map(str)
            names[device] = names.get(device, {}) | dict.fromkeys(machines)
    remarks_on = cache(lambda name, device: replay_remark(load.load_serving(name, device, root)))
    judged = []
    for claim in load_claims() if claims is None else claims:
        table = tables.get(claim.experiment, {})
        for device in dict.fromkeys([*sorted(names), *table]) or ["none"]:
            value, reason = _value(claim, table.get(device))
            if reason is not None and device not in names and device != "none":
                continue  # a GPU of another model
            if value.confidence < LEVEL:
                reason = f"the interval is one of {value.confidence:.0%}, not of {LEVEL:.0%}"
            is_measured = not math.isnan(value.measured)
            remarks = remarks_on(claim.experiment, device) if is_measured else []
            is_fitted = device.startswith(f"{load.SIMULATED}{claim.fitted}")
            row = {name: getattr(claim, name) for name in COPIED} | value._asdict()
            row |= {"device": device, "expected": f"{claim.direction} {claim.expected:g}"}
            row |= {"mark": FITTED if is_fitted else "", "verdict": claim.judge(value)}
            judged.append({**row, "note": "; ".join([reason or claim.caveat, *remarks])})
    rows = pd.DataFrame(judged, columns=COLUMNS)
    rows.attrs["names"] = {device: "; ".join(machines) for device, machines in names.items()}
    return rows


def replay_remark(serving: pd.DataFrame) -> list[str]:
    """Describe policies that served the same requests with shares of CUDA graphs that differ by
    more than `REPLAY_TOLERANCE`, if they did; `serving` is `load.load_serving`'s table.
    """
    rows = serving[serving.quantity == load.REPLAYED]
    if rows.empty:
        return []
    shares = rows.groupby([name for name in SAME_REQUESTS if name in rows], dropna=False).value
    difference = float((shares.max() - shares.min()).max())
    if difference <= REPLAY_TOLERANCE:
        return []
    return [
        f"policies differ by {difference:.0%} of their iterations in what was replayed as CUDA "
        "graphs: the value is in part of launches"
    ]


def _value(claim: Claim, rows: pd.DataFrame | None) -> tuple[Value, str | None]:
    """Return the claim's value and interval in a device's rows, or none with the reason: a point it
    needs is missing.
    """
    if rows is None:
        return Value(), "no results of this device"
    queries = [where for where in (claim.where, claim.over) if where is not None]
    picked = [_query(claim, where, rows) for where in queries]
    is_line = claim.take == LINE
    needed = [_line_ends(_chosen(claim, picked, 1)) if is_line else _chosen(claim, picked, 1)]
    if claim.needs is not None:
        needed.append(_query(claim, claim.needs, rows))
    if any(part.empty for part in needed):
        return Value(), ABSENT
    if any(part.y.isna().any() for part in needed):
        reasons = pd.concat([part.reason[part.y.isna()] for part in needed]).dropna()
        return Value(), ", ".join(map(str, reasons.unique())) or ABSENT
    parts_of, combine = TAKES[claim.take]
    parts = parts_of(needed[0])
    # The maximum of n points is overestimated if any of n upper ends is too low, underestimated if
    # one lower end is too high: n + 1 of the 2 n ends can fail (Bonferroni).
    at_once = float(len(parts)) if is_line else (len(parts) + 1) / 2
    several = parts
    if at_once > 1:  # each has an interval so wide that all hold together
        several = _chosen(claim, picked, at_once).loc[parts.index]
    missed = at_once * (1 - several.confidence.astype(float)).mean(skipna=False)
    value, low, high = map(float, combine(several))
    return Value(value, low, high, max(1 - missed, 0.0)), None


def _chosen(claim: Claim, picked: Sequence[pd.DataFrame], at_once: float) -> pd.DataFrame:
    """Return the rows `picked` by the claim's queries, with intervals so wide that all of `at_once`
    rows together hold with the confidence `LEVEL`.
    """
    values, *others = (_bounded(rows, len(picked) * at_once) for rows in picked)
    if not others:
        return values
    over = others[0]
    both = values.merge(over, on=list(claim.match), suffixes=("", "_over"))
    return both.assign(
        y=both.y / both.y_over,
        low=both.low / both.high_over,
        high=both.high / both.low_over,
        confidence=both.confidence + both.confidence_over - 1,
        reason=both.reason.fillna(both.reason_over),
    )


def _bounded(rows: pd.DataFrame, at_once: float) -> pd.DataFrame:
    """Widen the intervals to what so many at once need, where samples are known."""
    level = 1 - (1 - LEVEL) / at_once
    ends = rows[[*Ends._fields]].to_numpy(dtype=float, copy=True)
    for i, (samples, is_simulated) in enumerate(zip(rows.samples, rows.is_simulated, strict=True)):
        known = [] if pd.isna(samples) else map(float, str(samples).split())
        if known := [sample for sample in known if not math.isnan(sample)]:
            ends[i] = ends_of_median(known, level=level, is_series=not is_simulated)
    low, high, confidence = ends.T
    low, high = (np.where(np.isnan(end), rows.y, end) for end in (low, high))
    return rows.assign(low=low, high=high, confidence=confidence)


def _query(claim: Claim, where: str, rows: pd.DataFrame) -> pd.DataFrame:
    try:
        named = {str(name): rows[name] for name in rows if str(name) in where}
        is_chosen: Any = pd.eval(where, resolvers=[named])  # rows.eval would prepare all columns
        return rows.loc[is_chosen, [*dict.fromkeys([*READ, *claim.match])]]
    except Exception as error:  # pandas passes on any error of the expression
        raise UserError(
            f"claims.yaml: {claim.id}.where can't be evaluated ({error}); correct the query"
        ) from None


def _line_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the least and largest x; none if these are one."""
    ordered = rows.sort_values("x")
    return ordered.iloc[[0, -1]] if ordered.x.nunique() > 1 else ordered[:0]


def _last_over_first(rows: pd.DataFrame) -> tuple[float, float, float]:
    first, last = rows.iloc[0], rows.iloc[-1]
    return last.y / first.y, last.low / first.high, last.high / first.low


def _range(rows: pd.DataFrame) -> tuple[float, float, float]:
    return rows.y.median(), rows.low.min(), rows.high.max()


def _maybe_largest(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.high >= rows.low.max()]


def _x_of_max(rows: pd.DataFrame) -> tuple[float, float, float]:
    return rows.sort_values("y").x.iloc[-1], rows.x.min(), rows.x.max()


# How a value is made of rows: those that it may be made of, and value, low and high of these.
LINE = "last / first"  # y at the largest x over that at the smallest
TAKES: Mapping[str, tuple[Any, Any]] = {
    "max": (_maybe_largest, lambda rows: rows[ENDS].max()),
    "min": (lambda rows: rows[rows.low <= rows.high.min()], lambda rows: rows[ENDS].min()),
    "x of max": (_maybe_largest, _x_of_max),  # where y is largest, or may be
    LINE: (lambda rows: rows, _last_over_first),
    "range": (lambda rows: rows, _range),  # over rows that differ in an unknown cost
}


def in_words(row: Mapping[Any, Any]) -> str:
    """Describe a row of `verdicts`, such as "1.31 (1.25 to 1.36, 97 %)", with the level of samples
    and the mark; empty if nothing was measured.
    """
    value, *ends, confidence = (float(row[name]) for name in Value._fields)
    if math.isnan(value):
        return ""
    level = "" if math.isnan(confidence) else f", {100 * confidence:.0f} %"
    around = f" ({ends[0]:.3g} to {ends[1]:.3g}{level})" if level or ends[0] < ends[1] else ""
    return f"{value:.3g}{around} {row['mark']}".rstrip()


def verdict(experiment: str, table: pd.DataFrame) -> str:
    """Summarise the claims of an experiment in Markdown, from the table of `verdicts`."""
    judged = table[table.experiment == experiment]
    lines = []
    for claim, rows in judged.groupby("claim", sort=False):
        known = rows[rows.verdict != NOT_MEASURED].to_dict("records")
        values = [f"{row['device']} **{in_words(row)}** ({row['verdict']})" for row in known]
        verdicts = "; ".join(values) or NOT_MEASURED
        lines.append(f"- {claim} ({rows.expected.iloc[0]}): {verdicts}.")
    if judged.empty:
        return "- Its claims are read from other experiments."
    if not (judged.verdict != NOT_MEASURED).any():
        lines.append("- No device has recorded results of it.")
    return "\n".join(lines)

"""The claims of `experiments/claims.yaml`, and recorded results judged by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sarathi_lab.config.errors import UserError, require_number, require_one_of
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.results import load

CLAIMS = EXPERIMENTS / "claims.yaml"
DIRECTIONS = ("at least", "at most", "near")
OWN = ["id", "claim", "source", "unit", "experiment"]  # columns that are the claim's
COLUMNS = ["id", "claim", "source", "device", "expected", "measured", "low", "high"]
COLUMNS += ["verdict", "unit", "note", "experiment"]
Value = tuple[float, float, float]  # with the ends of its interval
NOTHING = (math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Claim:
    """One claim, read from the rows of `experiment` that `where` (a pandas query) chooses.

    `take` makes one value of them (`TAKES`). With `over`, another query, y is that of a row over
    that of the other's row with the same `match`. The claim holds if the value is `direction` the
    `expected` one within the relative `tolerance`; `neutral` is the value of no effect at all,
    beyond which a claim that misses its number holds partly. `caveat` says what the number depends
    on.
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

    def __post_init__(self) -> None:
        require_one_of(f"claims.yaml: {self.id}.direction", self.direction, DIRECTIONS)
        require_one_of(f"claims.yaml: {self.id}.take", self.take, TAKES)
        fix = "write the share of it, such as 0.1"
        require_number(f"claims.yaml: {self.id}.tolerance", self.tolerance, minimum=0, fix=fix)

    def judge(self, value: float, low: float, high: float) -> str:
        """Whether a measured value with its interval holds, partly, fails, or is not there.

        A claim holds only if "no effect" is outside of the interval, and one of "near" not where
        the interval is so wide (twice the tolerance) that it decides nothing.
        """
        if math.isnan(value):
            return "not measured"
        slack, is_near = self.tolerance * abs(self.expected), self.direction == "near"
        least = -math.inf if self.direction == "at most" else self.expected - slack
        most = math.inf if self.direction == "at least" else self.expected + slack
        is_beyond = None  # whether the whole interval is on the claimed side of no effect
        if self.neutral is not None:
            is_upward = self.expected > self.neutral if is_near else self.direction == "at least"
            is_beyond = low > self.neutral if is_upward else high < self.neutral
        if least <= value <= most:
            wide = 2 * slack
            is_vague = is_near and (low < self.expected - wide or high > self.expected + wide)
            return "partly" if is_beyond is False or is_vague else "holds"
        reaches = is_near and low <= most and high >= least
        return "partly" if is_beyond or reaches else "fails"


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file. Raises UserError for one that is not written as `Claim` has it."""
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"{path} can't be read ({str(error).splitlines()[0]}); restore it from git"
        ) from None
    known, claims = [field.name for field in fields(Claim)], []
    for entry in entries:
        for name in entry:
            require_one_of(f"claims.yaml: {entry.get('id')}", name, known)
        try:
            claims.append(Claim(**entry))
        except TypeError as error:
            raise UserError(
                f"claims.yaml: {entry.get('id')}: {str(error).partition(')')[2].strip()}; add it"
            ) from None
    return claims


def verdicts(root: Path = EXPERIMENTS, claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """A row per claim and device: `COLUMNS`; of simulated devices where they have results.

    `expected` is in words, `note` the reason why nothing was measured, else the claim's caveat.
    """
    tables = {name: load.load(name, root) for name in load.recorded(root)}
    devices = {d for table in tables.values() for d in table.device[~table.is_simulated].unique()}
    measured, rows = sorted(map(str, devices)), []
    for claim in load_claims() if claims is None else claims:
        table = tables.get(claim.experiment)
        own = [] if table is None else map(str, table.device.unique())
        for device in dict.fromkeys([*measured, *own]) or ["none"]:
            value, reason = _value(claim, table, device)
            if reason is not None and device not in measured and device != "none":
                continue  # a GPU of another model
            found = dict(zip(("measured", "low", "high"), value, strict=True))
            words = {"device": device, "expected": f"{claim.direction} {claim.expected:g}"}
            judged = {"note": reason or claim.caveat, "verdict": claim.judge(*value)}
            own_words = {name: getattr(claim, name) for name in OWN}
            rows.append({**own_words, **words, **found, **judged})
    return pd.DataFrame(rows, columns=COLUMNS)


def _value(claim: Claim, table: pd.DataFrame | None, device: str) -> tuple[Value, str | None]:
    """The claim's value and interval, or not a number with the reason."""
    if table is None or (rows := table[table.device == device]).empty:
        return NOTHING, "no results of this device"
    chosen = _query(claim, claim.where, rows)
    if claim.over is not None:
        over = _query(claim, claim.over, rows)[[*claim.match, "y", "low", "high"]]
        both = chosen.merge(over, on=list(claim.match), suffixes=("", "_over"))
        chosen = both.assign(
            y=both.y / both.y_over, low=both.low / both.high_over, high=both.high / both.low_over
        )
    known = chosen[chosen.y.notna()]
    if known.empty and len(chosen):
        return NOTHING, ", ".join(map(str, chosen.reason.dropna().unique()))
    value = None if known.empty else TAKES[claim.take](known)
    return (NOTHING, "not in what was measured") if value is None else (value, None)


def _query(claim: Claim, where: str, rows: pd.DataFrame) -> pd.DataFrame:
    try:
        return rows.query(where)
    except Exception as error:  # pandas passes on whatever the expression raises
        raise UserError(
            f"claims.yaml: {claim.id}.where can't be evaluated ({error}); correct the query"
        ) from None


def _nth(share: float) -> Callable[[pd.DataFrame], Value]:
    """The value at a share of the ordered rows, with the interval of the row that it is from."""

    def take(known: pd.DataFrame) -> Value:
        ordered = known.sort_values("y")
        return _interval(ordered.iloc[int(share * (len(ordered) - 1))])

    return take


def _interval(row: pd.Series) -> Value:
    """The row's value and ends; a value without an interval is its own."""
    low, high = (float(row.y if pd.isna(end) else end) for end in (row.low, row.high))
    return float(row.y), low, high


def _last_over_first(known: pd.DataFrame) -> Value:
    """The ratio of the ends of a line; the interval is as wide as both of theirs allow."""
    ordered = known.sort_values("x")
    first, first_low, first_high = _interval(ordered.iloc[0])
    last, last_low, last_high = _interval(ordered.iloc[-1])
    return last / first, last_low / first_high, last_high / first_low


def _alone_over_added(known: pd.DataFrame) -> Value | None:
    """Of Table 2's totals what a decode takes alone, over what it adds to a prompt."""
    rows = known[known.series == "total"].drop_duplicates("panel").set_index("panel")
    panels = ["decode-only", "decode-maximal", "prefill-only"]
    (decodes, _, _), (alone, both, prompt) = rows.x.reindex(panels), rows.y.reindex(panels)
    added = both / (decodes - 1) - prompt / (decodes - 1)
    if not added > 0:  # not all there, or below the noise
        return None
    value = float(alone / decodes / added)
    return value, value, value


def _x_of_max(known: pd.DataFrame) -> Value:
    """Where y is largest, and the least and largest x whose interval still reaches the best one's.

    The errors of a cost model are those of all points alike: they leave one place.
    """
    best = known.sort_values("y").iloc[-1]
    if not known.num_pairs.max():
        return float(best.x), float(best.x), float(best.x)
    reach = known[known.high.fillna(known.y) >= (best.y if pd.isna(best.low) else best.low)]
    return float(best.x), float(reach.x.min()), float(reach.x.max())


TAKES: Mapping[str, Callable[[pd.DataFrame], Value | None]] = {
    "max": _nth(1.0),
    "min": _nth(0.0),
    "median": _nth(0.5),
    "x of max": _x_of_max,  # where y is largest
    "last / first": _last_over_first,  # y at the largest x over that at the smallest
    "decode alone / added": _alone_over_added,  # of Table 2
}


def in_words(row: Mapping[Any, Any]) -> str:
    """What a row of `verdicts` measured, such as "1.31 (1.25 to 1.36)"; empty if nothing was."""
    value, low, high = (float(row[name]) for name in ("measured", "low", "high"))
    if math.isnan(value):
        return ""
    return f"{value:.3g}" if low == high else f"{value:.3g} ({low:.3g} to {high:.3g})"


def verdict(experiment: str, table: pd.DataFrame) -> str:
    """What the claims of an experiment say in the table of `verdicts`, in Markdown."""
    own = table[table.experiment == experiment]
    lines = []
    for claim, rows in own.groupby("claim", sort=False):
        known = rows[rows.verdict != "not measured"].to_dict("records")
        values = [f"{row['device']} **{in_words(row)}** ({row['verdict']})" for row in known]
        said = "; ".join(values) or "not measured"
        lines.append(f"- {claim} ({rows.expected.iloc[0]}): {said}.")
    if own.empty or not (own.verdict != "not measured").any():
        lines.append("- No device has recorded results of it.")
    return "\n".join(lines)

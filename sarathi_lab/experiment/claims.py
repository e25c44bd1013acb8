"""The claims of `experiments/claims.yaml` and `experiments/after_sarathi/claims.yaml`, and recorded
results judged by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sarathi_lab.config.errors import UserError, require_number, require_one_of
from sarathi_lab.config.instantiate import option_files, read_option
from sarathi_lab.config.paths import EXPERIMENTS, readable
from sarathi_lab.executor.simulated.drawn_times import DEVIATION
from sarathi_lab.executor.simulated.hardware import none_as_nan
from sarathi_lab.results import load
from sarathi_lab.results.intervals import (
    DEVIATIONS,
    LEVEL,
    UNDECIDED,
    Choices,
    Ends,
    ends_of_draws,
    ends_of_median,
    farther,
    number_in,
    wider,
    within_range,
    without,
)
from sarathi_lab.results.table import Row

CLAIMS = (EXPERIMENTS / "claims.yaml", EXPERIMENTS / "after_sarathi" / "claims.yaml")
DIRECTIONS = ("at least", "at most", "near")
NOT_MEASURED = "not measured"
HOLDS = "holds"
HOLDS_WITHIN = "holds within N %"  # the kind of all verdicts that name a tolerance
DIRECTION_HOLDS = "direction holds"
PARTLY = "partly"
NOT_AS_CLAIMED = "not as claimed"
FAILS = "fails"
VERDICTS = [
    HOLDS,
    HOLDS_WITHIN,
    DIRECTION_HOLDS,
    PARTLY,
    NOT_AS_CLAIMED,
    FAILS,
    UNDECIDED,
    NOT_MEASURED,
]
COLUMNS = [
    "id",
    "claim",
    "source",
    "device",
    "expected",
    "measured",
    "low",
    "high",
    "confidence",
    "is_of_rounds",
    "mark",
    "verdict",
    "unit",
    "note",
    "experiment",
]
NO_DEVICE = "none"  # of a claim that was not measured anywhere
FITTED = "†"  # the mark of a value that is no prediction
# of a point, for its value; taking all columns of each takes longer than judging it
READ = [
    "x",
    "y",
    "low",
    "high",
    "confidence",
    "samples",
    "draws",
    "moved",
    "is_simulated",
    "num_pairs",
    "reason",
    "unit",
]
RATIO = "ratio"  # a unit without bounds
ABSENT = "not in what was measured"
FORMULA = "analytic"  # the level
# Share of the paper's points that the formula's intervals of `LEVEL` hold, of those that nothing
# was fitted to (tools/before_and_after.py). Measured tables' intervals hold 97 %.
HELD_BY_FORMULA = 0.89
HELD_BY_FORMULA_IN = {"fig12": 0.46}  # by experiment, where it is another
Floats = NDArray[np.float64]
Rows = pd.DataFrame  # recorded points of an experiment, with the columns `READ`
Verdicts = pd.DataFrame  # a row per claim and device, with `COLUMNS`
UNKNOWN_ERROR = "no error of it is known: the cost model states none, or all samples agree"


class Value(NamedTuple):
    """Measured or simulated value, its interval, and the interval's confidence level (NaN where the
    interval is a cost model's stated error). An unknown error leaves no interval: its ends are NaN.

    Attributes:
        is_of_rounds: Whether it is simulated, and the interval of rounds alone, most of which
            have seeds of their own: without the errors of the cost model.
    """

    measured: float = math.nan
    low: float = math.nan
    high: float = math.nan
    confidence: float = math.nan
    is_of_rounds: bool = False

    @property
    def has_unknown_error(self) -> bool:
        return math.isnan(self.low) or math.isnan(self.high)


class Bounds(NamedTuple):
    """An interval of values."""

    low: float
    high: float

    def encloses(self, value: Value) -> bool:
        begins_inside = self.low <= value.low
        ends_inside = value.high <= self.high
        return begins_inside and ends_inside

    def excludes(self, value: Value) -> bool:
        is_below = value.high < self.low
        is_above = self.high < value.low
        return is_below or is_above


@dataclass(frozen=True)
class Claim:
    """One claim, read from the rows of `experiment` that `where` (a pandas query) chooses.

    `take` makes one value of them (`TAKES`). With `over`, another query, y is that of a row over
    that of the other's row with the same `match`; `needs` chooses rows that were to be measured,
    too. The claim is that the value is `direction` ("at least", "near", ...) the `expected` one; a
    value that is so within the relative `tolerance` only is told from one that is so. `neutral` is
    the value that means no effect. On the devices `fitted` the value is no prediction: their
    constants or tables, or the claim itself, were made with what the claim is about. `settings`
    make the experiment smaller, `caveat` states what the number depends on.
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
    unit: str = RATIO
    neutral: float | None = None
    over: str | None = None
    match: Sequence[str] = ("x",)
    needs: str | None = None
    fitted: Sequence[str] = ()
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        setting = f"claims.yaml: {self.id}"
        require_one_of(f"{setting}.direction", self.direction, DIRECTIONS)
        require_one_of(f"{setting}.take", self.take, TAKES)
        advice = "write the share of it, such as 0.1"
        require_number(f"{setting}.tolerance", self.tolerance, minimum=0, fix=advice)

    def judge(self, value: Value) -> str:
        """Return which of `VERDICTS` is true of the whole interval, with the tolerance for N.

        Two questions: is the value on the claimed side of no effect, and is it as claimed, without
        any tolerance? *holds*: yes to both; *holds within N %*: yes to the first, and as claimed
        within the tolerance; *direction holds*: yes to the first; *partly*: yes and no; *not as
        claimed*: no to the second; *fails*: no to both. A claim without `neutral` has no first
        question: it *fails* where the tolerance is excluded, too. Else, or where the interval is
        unknown or its level is below `LEVEL`: *undecided*.
        """
        if math.isnan(value.measured):
            return NOT_MEASURED
        if value.has_unknown_error or value.confidence < LEVEL:
            return UNDECIDED
        side = self._side()
        claimed = self._claimed(tolerance=0)
        tolerated = self._claimed(self.tolerance)
        # An interval that ends at no effect shows none: it fails, too.
        is_below = value.high <= side.low
        is_above = value.low >= side.high
        if is_below or is_above:
            return FAILS
        is_directed = side.low < value.low and value.high < side.high
        if self.neutral is None:
            is_directed = True  # also of an interval that ends at infinity
        if is_directed and claimed.encloses(value):
            return HOLDS
        if is_directed and tolerated.encloses(value):
            percent = f"{100 * self.tolerance:g}"
            return HOLDS_WITHIN.replace("N", percent)
        if self.neutral is None:
            is_excluded = tolerated.excludes(value)
            return FAILS if is_excluded else UNDECIDED
        if claimed.excludes(value):
            return PARTLY if is_directed else NOT_AS_CLAIMED
        return DIRECTION_HOLDS if is_directed else UNDECIDED

    def _claimed(self, tolerance: float) -> Bounds:
        """Return what the value may be within a relative tolerance."""
        slack = tolerance * abs(self.expected)
        low = self.expected - slack
        high = self.expected + slack
        if self.direction == "at most":
            low = -math.inf
        if self.direction == "at least":
            high = math.inf
        return Bounds(low, high)

    def _side(self) -> Bounds:
        """Return the claimed side of no effect; all values without `neutral`."""
        low = -math.inf
        high = math.inf
        if self.neutral is None:
            return Bounds(low, high)
        # "At least" the neutral value itself means a gain, too.
        is_gain = self.expected > self.neutral or self.direction == "at least"
        if is_gain:
            low = self.neutral
        else:
            high = self.neutral
        return Bounds(low, high)


def kind_of(verdict: str) -> str:
    """Return which of `VERDICTS` it is, whatever its tolerance."""
    return HOLDS_WITHIN if verdict.startswith(f"{HOLDS} within ") else verdict


@cache  # parsing it takes longer than judging by it
def load_claims(*paths: Path) -> tuple[Claim, ...]:
    """Return the claims of files, the lab's unless some are named. Raises UserError for a claim
    that lacks fields or has others.
    """
    entries: list[Any] = []
    for path in paths or CLAIMS:
        with readable(path, "restore it from git", YAMLError, OmegaConfBaseException):
            config = OmegaConf.load(path)
            loaded: Any = OmegaConf.to_container(config)
        entries += loaded
    claims = []
    for entry in entries:
        try:
            claims.append(Claim(**entry))
        except TypeError as error:  # which names the field
            reason = str(error).removeprefix("Claim.__init__() ")
            name = entry.get("id")
            raise UserError(f"claims.yaml: {name}: {reason}; correct it") from None
    return tuple(claims)


def verdicts(
    root: Path = EXPERIMENTS,
    claims: Sequence[Claim] | None = None,
    advance: Callable[[float], None] = lambda steps: None,
) -> Rows:
    """Return a row per claim and device: `COLUMNS`; of simulated devices where they have results.

    `expected` is in words, `note` the reason why nothing was measured or nothing can be decided,
    else the claim's caveat; `mark` is `FITTED` where the value is no prediction. `advance` is
    called after each claim, with 1.
    """
    if claims is None:
        claims = load_claims()
    tables = _recorded_tables(root)
    machines = _measured_devices(tables)
    judged = []
    for claim in claims:
        rows_by_device = tables.get(claim.experiment, {})
        devices = dict.fromkeys([*machines, *rows_by_device])
        for device in devices or [NO_DEVICE]:
            rows = rows_by_device.get(device)
            row = _judged(claim, device, rows)
            # A gap of a machine is worth a row, one of a cost model is not.
            is_predicted = rows is not None and device not in machines
            if row["verdict"] != NOT_MEASURED or not is_predicted:
                judged.append(row)
        advance(1)
    return pd.DataFrame(judged, columns=COLUMNS)


# Recorded rows by experiment and device.
Tables = dict[str, dict[str, Rows]]


def _recorded_tables(root: Path) -> Tables:
    tables: Tables = {}
    for name in load.recorded(root):
        tables[name] = {}
        recorded = load.load(name, root)
        for device, rows in recorded.groupby("device"):
            tables[name][str(device)] = rows
    return tables


def _measured_devices(tables: Tables) -> list[str]:
    """Return the devices on which something was measured, sorted."""
    devices = set()
    for rows_by_device in tables.values():
        for device, rows in rows_by_device.items():
            if not rows.is_simulated.all():
                devices.add(device)
    return sorted(devices)


def _judged(
    claim: Claim,
    device: str,
    rows: Rows | None,
) -> dict[str, object]:
    """Return the row of a claim on a device, by what that has recorded, None for nothing."""
    value = Value()
    reason: str | None = "no results of this device"
    judged_value = value
    if rows is not None:
        value, reason = _value(claim, rows)
        judged_value = _as_judged(claim, value, rows)
    return {
        "id": claim.id,
        "claim": claim.claim,
        "source": claim.source,
        "device": device,
        "expected": f"{claim.direction} {claim.expected:g}",
        **value._asdict(),
        "mark": FITTED if device in claim.fitted else "",
        "verdict": claim.judge(judged_value),
        "unit": claim.unit,
        "note": reason or _note_on(claim, judged_value),
        "experiment": claim.experiment,
    }


def _as_judged(claim: Claim, value: Value, rows: Rows) -> Value:
    """Return a value with the interval that decides: of rounds with the cost model's error, by the
    formula as wide as would have held `LEVEL` of what was compared; else as it is.
    """
    low = value.low
    high = value.high
    if value.is_of_rounds:
        error = _cost_model_error(rows)
        # Stated is a mean, within which an error is less often than within `LEVEL`.
        factor = (1 + error) ** (DEVIATIONS * DEVIATION)
        low = min(low / factor, low * factor)
        high = max(high / factor, high * factor)
    if "level" in rows and FORMULA in set(rows.level):
        held = HELD_BY_FORMULA_IN.get(claim.experiment, HELD_BY_FORMULA)
        share_below = (1 + held) / 2
        deviations_held = NormalDist().inv_cdf(share_below)
        times = DEVIATIONS / deviations_held
        low = farther(value.measured, low, times)
        high = farther(value.measured, high, times)
    return value._replace(low=low, high=high)


def _cost_model_error(rows: Rows) -> float:
    """Return the relative error that is taken of the values that a device simulated in rounds: the
    largest that its cost model states, NaN if it states none, 0 where the times of batches are no
    cost model's, but were measured in each round.
    """
    if "hardware" not in rows:
        return 0.0
    names = rows.hardware.dropna().unique()
    errors = [_stated_error(str(name)) for name in names]
    return float(np.max(errors, initial=0.0))


@cache
def _stated_error(hardware: str) -> float:
    """Return the largest of the mean errors by kind of operation that a hardware file states, or
    assumes of a card by its datasheet; NaN if there is no such file, or an error is not known.
    """
    files = option_files("hardware")
    if hardware not in files:
        return math.nan
    settings = read_option("hardware", files[hardware])
    of_datasheet = {"kernels": settings.get("error")}
    stated = settings.get("uncertainty", of_datasheet)
    errors = none_as_nan(stated).values()
    return float(np.max(list(errors)))


def _note_on(claim: Claim, value: Value) -> str:
    """Return why nothing can be decided, else the claim's caveat."""
    if value.has_unknown_error:
        return UNKNOWN_ERROR
    if value.confidence < LEVEL:
        return f"the interval is one of {value.confidence:.0%}, not of {LEVEL:.0%}"
    return claim.caveat


def _value(claim: Claim, rows: Rows) -> tuple[Value, str | None]:
    """Return the claim's value and interval in a device's rows, or none with the reason: a point it
    needs is missing.
    """
    queried = [_query(claim, claim.where, rows)]
    if claim.over is not None:
        others = _query(claim, claim.over, rows)
        queried.append(others)
    # Each by itself at first: how many hold at once is known when it is known which may be taken.
    candidates = _chosen(claim, queried, at_once=1)
    if TAKES[claim.take].is_line:
        candidates = _line_ends(candidates)
    needed = [candidates]
    if claim.needs is not None:
        also_needed = _query(claim, claim.needs, rows)
        needed.append(also_needed)
    reason = _missing(needed)
    if reason is not None:
        return Value(), reason
    return _taken(claim, queried, candidates), None


def _missing(tables: Sequence[Rows]) -> str | None:
    """Return the reason why some rows that are needed have no value; None if all have one."""
    if any(rows.empty for rows in tables):
        return ABSENT
    needed = pd.concat(tables)
    is_missing = needed.y.isna()
    if not is_missing.any():
        return None
    reasons = needed.reason[is_missing].dropna()
    texts = reasons.map(str).unique()
    return ", ".join(texts) or ABSENT


def _taken(
    claim: Claim,
    queried: Sequence[Rows],
    candidates: Rows,
) -> Value:
    """Return the value that a claim takes of its candidates, with its interval."""
    take = TAKES[claim.take]
    if candidates.draws.map(_is_unknown).any():
        without_interval = take.value(candidates)
        return Value(without_interval.measured)
    if take.is_of_draws and _are_predicted(candidates):
        value = _in_every_draw(take, candidates)
    else:
        value = _of_samples(claim, queried, candidates)
        value = value._replace(is_of_rounds=_are_of_rounds(queried))
    if take.is_place:
        # The best x may as well lie at the next one that was tried.
        tried = Choices(tuple(candidates.x.unique()))
        low, high = tried.widened(value.low, value.high)
        return value._replace(low=low, high=high)
    ends = Ends(value.low, value.high, value.confidence)
    unit = candidates.unit.iloc[0]
    possible = within_range(ends, unit)
    return value._replace(low=possible.low, high=possible.high)


def _are_predicted(rows: Rows) -> bool:
    """Return whether all rows have draws of a cost model's constants, and none has samples."""
    return all(rows.draws) and not any(rows.samples)


def _are_of_rounds(queried: Sequence[Rows]) -> bool:
    """Return whether rows are simulated in rounds, and in no draw of the constants."""
    rows = pd.concat(queried)
    has_samples = rows.samples.map(bool)
    has_rounds = has_samples | (rows.num_pairs > 0)  # old tables have no samples
    has_draws = rows.draws.map(bool)
    of_rounds = rows.is_simulated & has_rounds & ~has_draws
    return bool(of_rounds.all())


def _of_samples(
    claim: Claim,
    queried: Sequence[Rows],
    candidates: Rows,
) -> Value:
    """Return the value of measured rows, whose intervals are so wide that all hold together."""
    take = TAKES[claim.take]
    eligible = take.eligible(candidates)
    number = len(eligible)
    at_once = float(number)
    if not take.is_line:
        # The maximum of n points is overestimated if any of n upper ends is too low, underestimated
        # if one lower end is too high: n + 1 of the 2 n ends can fail (Bonferroni).
        at_once = (number + 1) / 2
    widened = eligible
    if at_once > 1:
        all_widened = _chosen(claim, queried, at_once)
        widened = all_widened.loc[eligible.index]
    value = take.value(widened)
    failure_of_each = 1 - widened.confidence.astype(float)
    failure_of_any = at_once * failure_of_each.mean(skipna=False)
    confidence = max(1 - failure_of_any, 0.0)
    return value._replace(confidence=confidence)


def _in_every_draw(take: Take, rows: Rows) -> Value:
    """Return the value of predicted rows, and its interval by what it is in each draw, and where
    each of the shapes that it may hang on is slower, or faster, by the error of its own.
    """
    value = take.of(rows, rows.y)
    drawn = []
    for y_in_draw in zip(*rows.draws, strict=True):
        drawn.append(take.of(rows, y_in_draw))
    moved = []
    mirrored = []
    # A shape of rows that can't be the one taken moves nothing.
    eligible = take.eligible(rows)
    for shape in _shapes_of(eligible):
        slower = []
        faster = []
        for y, by_shape in zip(rows.y, rows.moved, strict=True):
            y_if_slower = by_shape.get(shape, y)  # a row without it stays as it was
            slower.append(y_if_slower)
            faster.append(farther(y, y_if_slower, times=-1))
        moved.append(take.of(rows, slower))
        # Where another row becomes the largest, an error to one side moves more than to the other.
        mirrored.append(take.of(rows, faster))
    if take.is_place:
        # An x of the sweep has no distribution: its interval spans all that are drawn.
        everywhere = [value, *drawn, *moved, *mirrored]
        return Value(value, min(everywhere), max(everywhere))
    ends = ends_of_draws(value, drawn, moved, mirrored)
    if math.isnan(ends.low):  # all errors cancel
        return Value(value, value, value)
    return Value(value, ends.low, ends.high)


def _shapes_of(rows: Rows) -> list[str]:
    """Return the shapes whose own errors move some of the rows, each once."""
    shapes: dict[str, None] = {}
    for by_shape in rows.moved:
        shapes |= dict.fromkeys(by_shape)
    return list(shapes)


def _chosen(
    claim: Claim,
    queried: Sequence[Rows],
    at_once: float,
) -> Rows:
    """Return the rows that the claim's query chose, or the ratios of the rows of its two queries.

    Their intervals are so wide that with the confidence `LEVEL` all `at_once` of them hold.
    """
    num_ends_at_once = len(queried) * at_once
    bounded = [_bounded(rows, num_ends_at_once) for rows in queried]
    rows = bounded[0]
    if claim.over is not None:
        rows = _divided(rows, bounded[1], claim.match)
    widened = []
    for row in rows.to_dict("records"):
        ends = wider(
            row["y"],
            of_seeds=_recorded_ends(row),
            of_draws=_ends_of_errors(row),
        )
        widened.append(dict(row) | ends._asdict())
    return pd.DataFrame(widened, rows.index, rows.columns)


def _divided(
    rows: Rows,
    others: Rows,
    match: Sequence[str],
) -> Rows:
    """Return the ratios of rows over the others with the same `match`, with intervals that hold
    wherever those of both values do.
    """
    both = rows.merge(others, on=list(match), suffixes=("", "_over"))
    pairs = both.to_dict("records")

    draws = pd.Series(map(_ratios, pairs), both.index, dtype=object)
    moved = pd.Series(map(_moved_ratios, pairs), both.index, dtype=object)
    # Bonferroni: either interval may miss its value.
    confidence = both.confidence + both.confidence_over - 1
    return both.assign(
        y=both.y / both.y_over,
        low=both.low / both.high_over,
        high=both.high / both.low_over,
        confidence=confidence,
        draws=draws,
        moved=moved,
        unit=RATIO,
        reason=both.reason.fillna(both.reason_over),
    )


def _ratios(pair: Row) -> list[float]:
    """Return the draws of a ratio: errors that both values share cancel in each. A value without
    draws is the same in all of them. Values with unlike numbers of draws have an unknown error.
    """
    draws = np.array(pair["draws"])
    draws_over = np.array(pair["draws_over"])
    if not len(draws):
        draws = np.full_like(draws_over, pair["y"])
    if not len(draws_over):
        draws_over = np.full_like(draws, pair["y_over"])
    if len(draws) != len(draws_over):
        return [math.nan]
    ratios: list[float] = (draws / draws_over).tolist()
    return ratios


def _moved_ratios(pair: Row) -> dict[str, float]:
    """Return the ratio that results where one shape is slower, by the shape's name.

    A shape of only one of the two values leaves the other value as it is.
    """
    value: float = pair["y"]
    value_over: float = pair["y_over"]
    own: dict[str, float] = pair["moved"]
    over: dict[str, float] = pair["moved_over"]
    ratios = {}
    for shape in own | over:
        moved = own.get(shape, value)
        moved_over = over.get(shape, value_over)
        ratios[shape] = moved / moved_over
    return ratios


def _bounded(rows: Rows, at_once: float) -> Rows:
    """Widen the intervals of samples to what so many at once need."""
    allowed_error = (1 - LEVEL) / at_once
    level = 1 - allowed_error
    bounded = []
    for row in rows.to_dict("records"):
        bounded.append(_bounded_row(row, level))
    return pd.DataFrame(bounded, rows.index, rows.columns)


def _bounded_row(row: Row, level: float) -> Row:
    """Return a row whose interval is that of its samples, but no narrower than what is recorded, in
    which is how finely a value can be known. The errors of a cost model are left for `_chosen`:
    until then a predicted value has no width.

    A value without samples and without an interval is exact. One whose samples all agree is not:
    they do not show how far off they are, so it gets an unknown draw.
    """
    value = row["y"]
    ends = _recorded_ends(row)
    draws = row["draws"]
    if row["samples"] and math.isnan(ends.low):
        draws = [math.nan]
    elif row["samples"]:
        # Seeds are independent; samples of a device follow one another and may drift.
        is_series = not row["is_simulated"]
        of_samples = ends_of_median(row["samples"], level=level, is_series=is_series)
        recorded = without(value, ends, _ends_of_errors(row))
        low = min(recorded.low, of_samples.low)
        high = max(recorded.high, of_samples.high)
        ends = Ends(low, high, of_samples.confidence)
    elif not _is_exact(row):
        ends = Ends(value, value, math.nan)
    if math.isnan(ends.low):  # an interval that is not known has no width yet
        ends = ends._replace(low=value, high=value)
    return {**row, **ends._asdict(), "draws": draws}


def _is_exact(row: Row) -> bool:
    """Return whether no error of a cost model moves a row's value."""
    predicted = {*row["draws"], *row["moved"].values()}
    return predicted <= {row["y"]}


def _recorded_ends(row: Row) -> Ends:
    return Ends(
        low=row["low"],
        high=row["high"],
        confidence=row["confidence"],
    )


def _ends_of_errors(row: Row) -> Ends:
    """Return the interval of a row's value by the errors of the cost model."""
    return ends_of_draws(
        row["y"],
        draws=row["draws"],
        moved=row["moved"].values(),
    )


def _numbers(text: str | float) -> list[float]:
    """Return the samples of a row, without those that are not a number; one alone is no text."""
    numbers = map(number_in, str(text).split())
    return [number for number in numbers if not math.isnan(number)]


def _draws_in(text: str | float) -> list[float]:
    """Return the draws of a row: none of an exact value, NaN where the error is unknown."""
    if pd.isna(text):
        return []
    return [float(draw) for draw in str(text).split()]


def _moved_in(text: str | float) -> dict[str, float]:
    """Return what a row's value is by the shape that is slower."""
    by_shape = {}
    if not pd.isna(text):
        for moved in str(text).split():
            shape, value = moved.split("=")
            by_shape[shape] = float(value)
    return by_shape


def _is_unknown(draws: Sequence[float]) -> bool:
    return any(map(math.isnan, draws))


def _query(claim: Claim, query: str, rows: Rows) -> Rows:
    try:
        columns_in_query = {}
        for name in map(str, rows):
            if name in query:
                columns_in_query[name] = rows[name]
        # `rows.eval` would prepare all columns.
        is_chosen: Any = pd.eval(query, resolvers=[columns_in_query])
        columns = dict.fromkeys([*READ, *claim.match])
        chosen = rows.loc[is_chosen, list(columns)]
    except Exception as error:  # pandas passes on any error of the expression
        raise UserError(
            f"claims.yaml: {claim.id}.where can't be evaluated ({error}); correct the query"
        ) from None
    # A column that is empty in the file has no type.
    types = dict.fromkeys(Ends._fields, float)
    typed = chosen.astype(types)
    return typed.assign(
        samples=list(map(_numbers, chosen.samples)),
        draws=list(map(_draws_in, chosen.draws)),
        moved=list(map(_moved_in, chosen.moved)),
    )


def _line_ends(rows: Rows) -> Rows:
    """Return the rows of the least and largest x, for a ratio; none if these are one."""
    ordered = rows.assign(unit=RATIO).sort_values("x")
    if ordered.x.nunique() < 2:
        return ordered[:0]
    return ordered.iloc[[0, -1]]


def _all(rows: Rows) -> Rows:
    return rows


def _maybe_largest(rows: Rows) -> Rows:
    return rows[rows.high >= rows.low.max()]


def _maybe_smallest(rows: Rows) -> Rows:
    return rows[rows.low <= rows.high.min()]


def _largest(x: Floats, y: Floats) -> float:
    return float(y.max())


def _smallest(x: Floats, y: Floats) -> float:
    return float(y.min())


def _ends_of_both(take: Take, rows: Rows) -> Bounds:
    """Return what is taken of all lower ends, and of all upper ones."""
    low = take.of(rows, rows.low)
    high = take.of(rows, rows.high)
    return Bounds(low, high)


def _x_of_max(x: Floats, y: Floats) -> float:
    ascending = y.argsort()
    largest = ascending[-1]
    return float(x[largest])


def _bounds_of_x(take: Take, rows: Rows) -> Bounds:
    return Bounds(rows.x.min(), rows.x.max())


def _last_over_first(x: Floats, y: Floats) -> float:
    return float(y[-1] / y[0])


def _bounds_of_last_over_first(take: Take, rows: Rows) -> Bounds:
    first = rows.iloc[0]
    last = rows.iloc[-1]
    least = last.low / first.high
    most = last.high / first.low
    return Bounds(least, most)


def _median(x: Floats, y: Floats) -> float:
    return float(np.median(y))


def _bounds_of_all(take: Take, rows: Rows) -> Bounds:
    return Bounds(rows.low.min(), rows.high.max())


class Take(NamedTuple):
    """How a value is made of rows: those that it may be made of, and the value of these.

    Attributes:
        measured: The value by the rows' x and y; plain numbers, as it is taken in each draw.
        bounds: The interval of the value by the rows' intervals.
    """

    eligible: Callable[[Rows], Rows]
    measured: Callable[[Floats, Floats], float]
    bounds: Callable[[Take, Rows], Bounds] = _ends_of_both
    is_line: bool = False  # of the rows of the least and the largest x alone
    is_place: bool = False  # the value is an x
    is_of_draws: bool = True  # taken in each draw of a cost model's constants

    def of(self, rows: Rows, y: Iterable[float]) -> float:
        """Return what is taken of rows with these y."""
        values = np.fromiter(y, dtype=float)
        return self.measured(rows.x.to_numpy(), values)

    def value(self, rows: Rows) -> Value:
        measured = self.of(rows, rows.y)
        low, high = self.bounds(self, rows)
        return Value(measured, low, high)


TAKES: Mapping[str, Take] = {
    "max": Take(_maybe_largest, _largest),
    "min": Take(_maybe_smallest, _smallest),
    # where y is largest, or may be
    "x of max": Take(_maybe_largest, _x_of_max, _bounds_of_x, is_place=True),
    # y at the largest x over y at the smallest
    "last / first": Take(_all, _last_over_first, _bounds_of_last_over_first, is_line=True),
    # over rows that differ in an unknown cost
    "range": Take(_all, _median, _bounds_of_all, is_of_draws=False),
}


def in_words(row: Row) -> str:
    """Describe a row of `verdicts`, such as "1.31 (1.25 to 1.36, 97 %)", with the level of samples
    and the mark; empty if nothing was measured. "97 % of rounds" is without a cost model's errors.
    """
    if math.isnan(row["measured"]):
        return ""
    text = f"{row['measured']:.3g}"
    has_level = row["confidence"] < 1  # an exact value has all, a stated error none
    if has_level or row["low"] < row["high"]:
        interval = f"{row['low']:.3g} to {row['high']:.3g}"
        if has_level:
            interval += f", {100 * row['confidence']:.0f} %"
        if row["is_of_rounds"]:
            interval += " of rounds"
        text += f" ({interval})"
    return f"{text} {row['mark']}".rstrip()


def verdict(experiment: str, table: Verdicts) -> str:
    """Summarise the claims of an experiment, or those on its figure that another experiment
    judges, in Markdown, from the table of `verdicts`.
    """
    judged = table[table.experiment == experiment]
    _, is_figure, number = experiment.partition("fig")
    if judged.empty and is_figure:
        # Fig 1 is not Fig 10. The later paper on SARATHI-Serve has figures of the same numbers.
        source = rf"^SARATHI,.*Fig {int(number)}(?!\d)"
        judged = table[table.source.str.contains(source)]
    if judged.empty:
        return "- No claim is read from it."
    lines = []
    for claim, rows in judged.groupby("claim", sort=False):
        values = []
        for row in rows.to_dict("records"):
            if row["verdict"] == NOT_MEASURED:
                continue
            device = row["device"]
            value = in_words(row)
            values.append(f"{device} **{value}** ({row['verdict']})")
        described = "; ".join(values) or NOT_MEASURED
        expected = rows.expected.iloc[0]
        lines.append(f"- {claim} ({expected}): {described}.")
    if (judged.verdict == NOT_MEASURED).all():
        lines.append("- No device has recorded results of it.")
    return "\n".join(lines)

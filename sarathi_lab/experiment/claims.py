"""The claims of `experiments/claims.yaml` and `experiments/after_sarathi/claims.yaml`, and recorded
results judged by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
from sarathi_lab.results.metrics import REPLAY_TOLERANCE
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
    *(HOLDS, HOLDS_WITHIN, DIRECTION_HOLDS, PARTLY, NOT_AS_CLAIMED, FAILS),
    *(UNDECIDED, NOT_MEASURED),
]
COLUMNS = [
    *("id", "claim", "source", "device", "expected", "measured", "low", "high", "confidence"),
    *("is_of_rounds", "mark", "verdict", "unit", "note", "experiment"),
]
NO_DEVICE = "none"  # of a claim that was not measured anywhere
SAME_REQUESTS = ("model", "prompt_len", "num_decodes", "batch")  # where `load_serving` has them
FITTED = "†"  # the mark of a value that is no prediction
# of a point, for its value; taking all columns of each takes longer than judging it
READ = [
    *("x", "y", "low", "high", "confidence", "samples", "draws", "moved", "is_simulated"),
    *("num_pairs", "reason", "unit"),
]
RATIO = "ratio"  # a unit without bounds
ABSENT = "not in what was measured"
FORMULA = "analytic"  # the level
# Share of the paper's points that the formula's intervals of `LEVEL` hold, of those that nothing
# was fitted to (tools/before_and_after.py). Measured tables' intervals hold 97 %.
HELD_BY_FORMULA = 0.89
HELD_BY_FORMULA_IN = {"fig12": 0.46}  # by experiment, where it is another
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
        return self.low <= value.low and value.high <= self.high

    def excludes(self, value: Value) -> bool:
        return value.high < self.low or self.high < value.low


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
        has_side = self.neutral is not None
        side = self._side()
        claimed = self._claimed(tolerance=0)
        tolerated = self._claimed(self.tolerance)
        is_directed = not has_side or (side.low < value.low and value.high < side.high)
        is_opposite = value.high <= side.low or side.high <= value.low
        if is_opposite:
            return FAILS
        if is_directed and claimed.encloses(value):
            return HOLDS
        if is_directed and tolerated.encloses(value):
            return HOLDS_WITHIN.replace("N", f"{100 * self.tolerance:g}")
        if not has_side:
            return FAILS if tolerated.excludes(value) else UNDECIDED
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
        if self.neutral is None:
            return Bounds(-math.inf, math.inf)
        if self.expected > self.neutral or self.direction == "at least":
            return Bounds(self.neutral, math.inf)
        return Bounds(-math.inf, self.neutral)


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
            loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
        entries += loaded
    names = [field.name for field in fields(Claim)]
    claims = []
    for entry in entries:
        setting = f"claims.yaml: {entry.get('id')}"
        for name in entry:
            require_one_of(setting, name, names)
        try:
            claims.append(Claim(**entry))
        except TypeError as error:
            missing = str(error).partition(")")[2].strip()
            raise UserError(f"{setting}: {missing}; add it") from None
    return tuple(claims)


def verdicts(
    root: Path = EXPERIMENTS,
    claims: Sequence[Claim] | None = None,
    advance: Callable[[float], None] = lambda steps: None,
) -> pd.DataFrame:
    """Return a row per claim and device: `COLUMNS`; of simulated devices where they have results.

    `expected` is in words, `note` the reason why nothing was measured or nothing can be decided,
    else the claim's caveat, and whether the policies differ in what was replayed; `mark` is
    `FITTED` where the value is no prediction. `attrs["names"]` are the machines that
    were measured. `advance` is called after each claim, with 1.
    """
    if claims is None:
        claims = load_claims()
    tables = _recorded_tables(root)
    machines = _machines(tables)

    @cache  # claims of one experiment ask for the same devices
    def remarks_on(experiment: str, device: str) -> list[str]:
        return replay_remark(load.load_serving(experiment, device, root))

    judged = []
    for claim in claims:
        rows_by_device = tables.get(claim.experiment, {})
        devices = dict.fromkeys([*sorted(machines), *rows_by_device])
        for device in devices or [NO_DEVICE]:
            rows = rows_by_device.get(device)
            value, reason = _value(claim, rows)
            judged_value = value
            if rows is not None:
                judged_value = _as_judged(claim, value, rows)
            is_of_other_model = device not in machines and device != NO_DEVICE
            if reason is not None and is_of_other_model:
                continue
            notes = [reason or _note_on(claim, judged_value)]
            if not math.isnan(value.measured):
                notes += remarks_on(claim.experiment, device)
            row = _described(claim, device, value)
            row["verdict"] = claim.judge(judged_value)
            row["note"] = "; ".join(notes)
            judged.append(row)
        advance(1)
    table = pd.DataFrame(judged, columns=COLUMNS)
    names_in_words = {}
    for device, names in machines.items():
        names_in_words[device] = "; ".join(names)
    table.attrs["names"] = names_in_words
    return table


# Recorded rows by experiment and device.
Tables = dict[str, dict[str, pd.DataFrame]]


def _recorded_tables(root: Path) -> Tables:
    tables: Tables = {}
    for name in load.recorded(root):
        by_device = load.load(name, root).groupby("device")
        tables[name] = {str(device): rows for device, rows in by_device}
    return tables


def _machines(tables: Tables) -> dict[str, list[str]]:
    """Return the names of the machines that were measured, by device."""
    machines: dict[str, list[str]] = {}
    for rows_by_device in tables.values():
        for device, rows in rows_by_device.items():
            if rows.is_simulated.all():
                continue
            names = machines.setdefault(device, [])
            if "device_name" not in rows:
                continue
            for name in rows.device_name.dropna().unique():
                if str(name) not in names:
                    names.append(str(name))
    return machines


def _as_judged(claim: Claim, value: Value, rows: pd.DataFrame) -> Value:
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
    if "level" in rows and FORMULA in rows.level.array:
        held = HELD_BY_FORMULA_IN.get(claim.experiment, HELD_BY_FORMULA)
        deviations_held = NormalDist().inv_cdf((1 + held) / 2)
        times = DEVIATIONS / deviations_held
        low = farther(value.measured, low, times)
        high = farther(value.measured, high, times)
    return value._replace(low=low, high=high)


def _cost_model_error(rows: pd.DataFrame) -> float:
    """Return the relative error that is taken of the values that a device simulated in rounds: the
    largest that its cost model states, NaN if it states none, 0 where the times of batches are no
    cost model's, but were measured in each round.
    """
    if "hardware" not in rows:
        return 0.0
    errors = [_stated_error(str(name)) for name in rows.hardware.dropna().unique()]
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
    errors = none_as_nan(settings.get("uncertainty", of_datasheet))
    return float(np.max(list(errors.values())))


def _note_on(claim: Claim, value: Value) -> str:
    """Return why nothing can be decided, else the claim's caveat."""
    if value.has_unknown_error:
        return UNKNOWN_ERROR
    if value.confidence < LEVEL:
        return f"the interval is one of {value.confidence:.0%}, not of {LEVEL:.0%}"
    return claim.caveat


def _described(claim: Claim, device: str, value: Value) -> dict[str, object]:
    """Return the row of a claim on a device, without its verdict and note."""
    return {
        "id": claim.id,
        "claim": claim.claim,
        "source": claim.source,
        "device": device,
        "expected": f"{claim.direction} {claim.expected:g}",
        **value._asdict(),
        "mark": FITTED if device in claim.fitted else "",
        "unit": claim.unit,
        "experiment": claim.experiment,
    }


def replay_remark(serving: pd.DataFrame) -> list[str]:
    """Describe policies that served the same requests with shares of CUDA graphs that differ by
    more than `REPLAY_TOLERANCE`, if they did; `serving` is `load.load_serving`'s table.
    """
    rows = serving[serving.quantity == load.REPLAYED]
    if rows.empty:
        return []
    labels = [name for name in SAME_REQUESTS if name in rows]
    shares = rows.groupby(labels, dropna=False).value
    differences = shares.max() - shares.min()
    difference = float(differences.max())
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
    queried = [_query(claim, claim.where, rows)]
    if claim.over is not None:
        queried.append(_query(claim, claim.over, rows))
    take = TAKES[claim.take]
    candidates = _chosen(claim, queried, at_once=1)
    if take.is_line:
        candidates = _line_ends(candidates)
    needed = [candidates]
    if claim.needs is not None:
        needed.append(_query(claim, claim.needs, rows))
    reason = _missing(needed)
    if reason is not None:
        return Value(), reason
    if candidates.draws.map(_is_unknown).any():
        without_interval = take.value(candidates)
        return Value(without_interval.measured), None
    if take.is_of_draws and _are_predicted(candidates):
        value = _in_every_draw(take, candidates)
    else:
        value = _of_samples(claim, queried, candidates)
        value = value._replace(is_of_rounds=_are_of_rounds(queried))
    units = candidates.unit.unique()
    if take.is_place:
        # The best x may as well lie at the next one that was tried.
        tried = Choices(tuple(candidates.x.unique()))
        low, high = tried.widened(value.low, value.high)
        value = value._replace(low=low, high=high)
    elif len(units) == 1:
        ends = within_range(Ends(value.low, value.high, value.confidence), units[0])
        value = value._replace(low=ends.low, high=ends.high)
    return value, None


def _are_predicted(rows: pd.DataFrame) -> bool:
    """Return whether all rows have draws of a cost model's constants, and none has samples."""
    have_draws = rows.draws.map(len) > 0
    return bool(have_draws.all() and rows.samples.isna().all())


def _are_of_rounds(queried: Sequence[pd.DataFrame]) -> bool:
    """Return whether rows are simulated in rounds, and in no draw of the constants."""
    for rows in queried:
        is_drawn = rows.draws.notna()
        has_rounds = rows.samples.notna() | (rows.num_pairs > 0)  # old tables have no samples
        of_rounds = rows.is_simulated & has_rounds & ~is_drawn
        if not of_rounds.all():
            return False
    return True


def _of_samples(claim: Claim, queried: Sequence[pd.DataFrame], candidates: pd.DataFrame) -> Value:
    """Return the value of measured rows, whose intervals are so wide that all hold together."""
    take = TAKES[claim.take]
    eligible = take.eligible(candidates)
    at_once = float(len(eligible))
    if not take.is_line:
        # The maximum of n points is overestimated if any of n upper ends is too low, underestimated
        # if one lower end is too high: n + 1 of the 2 n ends can fail (Bonferroni).
        at_once = (len(eligible) + 1) / 2
    widened = eligible
    if at_once > 1:
        all_widened = _chosen(claim, queried, at_once)
        widened = all_widened.loc[eligible.index]
    failure_of_each = 1 - widened.confidence.astype(float)
    failure_of_any = at_once * failure_of_each.mean(skipna=False)
    confidence = max(1 - failure_of_any, 0.0)
    return take.value(widened)._replace(confidence=confidence)


def _in_every_draw(take: Take, rows: pd.DataFrame) -> Value:
    """Return the value of predicted rows, and its interval by what it is in each draw, and where
    each of the shapes that it may hang on is slower, or faster, by the error of its own.
    """
    x = rows.x.to_numpy()
    y = rows.y.to_numpy(dtype=float)  # an error moves whole numbers, too
    value = take.measured(x, y)
    drawn = []
    for y_in_draw in np.array([*rows.draws]).T:
        drawn.append(take.measured(x, y_in_draw))
    moved = []
    mirrored = []
    for shape in _shapes_of(take.eligible(rows)):
        slower = []
        faster = []
        for y_of_row, by_shape in zip(y, rows.moved, strict=True):
            y_if_slower = by_shape.get(shape, y_of_row)  # a row without it stays as it was
            slower.append(y_if_slower)
            faster.append(farther(y_of_row, y_if_slower, times=-1))
        moved.append(take.measured(x, np.array(slower)))
        # Where another row becomes the largest, an error to one side moves more than to the other.
        mirrored.append(take.measured(x, np.array(faster)))
    if take.is_place:
        # An x of the sweep has no distribution: its interval spans all that are drawn.
        everywhere = [value, *drawn, *moved, *mirrored]
        return Value(value, min(everywhere), max(everywhere))
    ends = ends_of_draws(value, drawn, moved, mirrored)
    if math.isnan(ends.low):  # all errors cancel
        return Value(value, value, value)
    return Value(value, ends.low, ends.high)


def _shapes_of(rows: pd.DataFrame) -> list[str]:
    """Return the shapes whose own errors move some of the rows, each once."""
    shapes: dict[str, None] = {}
    for by_shape in rows.moved:
        shapes |= dict.fromkeys(by_shape)
    return list(shapes)


def _missing(tables: Sequence[pd.DataFrame]) -> str | None:
    """Return the reason why some rows that are needed have no value; None if all have one."""
    if any(rows.empty for rows in tables):
        return ABSENT
    reasons: list[str] = []
    is_complete = True
    for rows in tables:
        without = rows[rows.y.isna()]
        is_complete = is_complete and without.empty
        reasons += without.reason.dropna().map(str).tolist()
    if is_complete:
        return None
    return ", ".join(dict.fromkeys(reasons)) or ABSENT


def _chosen(claim: Claim, queried: Sequence[pd.DataFrame], at_once: float) -> pd.DataFrame:
    """Return the rows that the claim's query chose, or the ratios of the rows of its two queries.

    Their intervals are so wide that with the confidence `LEVEL` all `at_once` of them hold.
    """
    num_ends_at_once = len(queried) * at_once
    bounded = [_bounded(rows, num_ends_at_once) for rows in queried]
    if len(bounded) == 1:
        return _with_draws(bounded[0])
    of_rows, of_others = bounded
    return _with_draws(_divided(of_rows, of_others, claim.match))


def _divided(rows: pd.DataFrame, others: pd.DataFrame, match: Sequence[str]) -> pd.DataFrame:
    """Return the ratios of rows over the others with the same `match`, with intervals that hold
    wherever those of both values do.
    """
    both = rows.merge(others, on=list(match), suffixes=("", "_over"))
    return both.assign(
        y=both.y / both.y_over,
        low=both.low / both.high_over,
        high=both.high / both.low_over,
        confidence=both.confidence + both.confidence_over - 1,
        draws=both.apply(_ratios, axis="columns", result_type="reduce"),
        moved=both.apply(_moved_ratios, axis="columns", result_type="reduce"),
        unit=RATIO,
        reason=both.reason.fillna(both.reason_over),
    )


def _bounded(rows: pd.DataFrame, at_once: float) -> pd.DataFrame:
    """Widen the intervals of samples to what so many at once need, but not below what is recorded,
    in which is how finely a value can be known. Draws of a cost model, which become numbers here,
    are left for `_with_draws`: until then a predicted value has no width.
    """
    level = 1 - (1 - LEVEL) / at_once
    recorded = rows.astype(dict.fromkeys(Ends._fields, float))
    recorded["draws"] = rows.draws.map(_draws_in)
    recorded["moved"] = rows.moved.map(_moved_in)
    bounds = []
    draws = []
    for row in recorded.to_dict("records"):
        ends, draws_of_row = _ends_and_draws(row, level)
        bounds.append(ends)
        draws.append(draws_of_row)
    bounded = _with_ends(recorded, bounds)
    return bounded.assign(
        low=bounded.low.fillna(rows.y),  # an interval that is not known has no width yet
        high=bounded.high.fillna(rows.y),
        draws=pd.Series(draws, rows.index, dtype=object),
    )


def _ends_and_draws(row: Row, level: float) -> tuple[Ends, list[float]]:
    """Return a row's interval without the errors of a cost model, and its draws.

    A value without samples and without an interval is exact. One whose samples all agree is not:
    they do not show how far off they are, so it gets an unknown draw.
    """
    value = row["y"]
    recorded = _recorded_ends(row)
    samples = _numbers(row["samples"])
    if samples and math.isnan(recorded.low):
        return recorded, [math.nan]
    if samples:
        # Seeds are independent; samples of a device follow one another and may drift.
        is_series = not row["is_simulated"]
        of_samples = ends_of_median(samples, level=level, is_series=is_series)
        without_errors = without(value, recorded, _ends_of_errors(row))
        return _not_below(without_errors, of_samples), row["draws"]
    if _has_errors(row):
        return Ends(value, value, math.nan), row["draws"]
    return recorded, row["draws"]


def _with_ends(rows: pd.DataFrame, bounds: Sequence[Ends]) -> pd.DataFrame:
    """Return rows with an interval for each."""
    columns = list(Ends._fields)
    widened = rows.copy()
    widened[columns] = pd.DataFrame(bounds, rows.index, columns, dtype=float)
    return widened


def _recorded_ends(row: Row) -> Ends:
    return Ends(row["low"], row["high"], row["confidence"])


def _ends_of_errors(row: Row) -> Ends:
    """Return the interval of a row's value by the errors of the cost model."""
    return ends_of_draws(row["y"], row["draws"], row["moved"].values())


def _has_errors(row: Row) -> bool:
    """Return whether an error of the cost model changes a row's value."""
    predicted = {*row["draws"], *row["moved"].values()}
    others = predicted - {row["y"]}
    return bool(others)


def _not_below(recorded: Ends, of_samples: Ends) -> Ends:
    """Return the interval of samples, as wide as the recorded one at least."""
    low = min(recorded.low, of_samples.low)
    high = max(recorded.high, of_samples.high)
    return Ends(low, high, of_samples.confidence)


def _with_draws(rows: pd.DataFrame) -> pd.DataFrame:
    """Widen the intervals by those of the draws."""
    bounds = []
    for row in rows.to_dict("records"):
        ends = wider(row["y"], _recorded_ends(row), _ends_of_errors(row))
        bounds.append(ends)
    return _with_ends(rows, bounds)


def _ratios(row: pd.Series) -> list[float]:
    """Return the draws of a ratio: errors that both values share cancel in each. A value without
    draws is the same in all of them. Values with unlike numbers of draws have an unknown error.
    """
    num_draws = max(len(row.draws), len(row.draws_over))
    draws = row.draws or num_draws * [row.y]
    draws_over = row.draws_over or num_draws * [row.y_over]
    if len(draws) != len(draws_over):
        return [math.nan]
    ratios = []
    for drawn, over in zip(draws, draws_over, strict=True):
        ratios.append(drawn / over)
    return ratios


def _moved_ratios(row: pd.Series) -> dict[str, float]:
    """Return the ratio that results where one shape is slower, by the shape's name.

    A shape of only one of the two values leaves the other value as it is.
    """
    ratios = {}
    for shape in {**row.moved, **row.moved_over}:
        moved = row.moved.get(shape, row.y)
        moved_over = row.moved_over.get(shape, row.y_over)
        ratios[shape] = moved / moved_over
    return ratios


def _numbers(text: str | float) -> list[float]:
    """Return the samples of a row, without those that are not a number; one alone is no text."""
    samples = []
    for sample in str(text).split():
        number = number_in(sample)
        if not math.isnan(number):
            samples.append(number)
    return samples


def _draws_in(text: str | float | None) -> list[float]:
    """Return the draws of a row: none of an exact value, NaN where the error is unknown."""
    if pd.isna(text):
        return []
    return [float(draw) for draw in str(text).split()]


def _moved_in(text: str | float | None) -> dict[str, float]:
    """Return what a row's value is by the shape that is slower."""
    if pd.isna(text):
        return {}
    by_shape = {}
    for moved in str(text).split():
        shape, value = moved.split("=")
        by_shape[shape] = float(value)
    return by_shape


def _is_unknown(draws: Sequence[float]) -> bool:
    return any(map(math.isnan, draws))


def _query(claim: Claim, query: str, rows: pd.DataFrame) -> pd.DataFrame:
    try:
        columns_in_query = {}
        for name in map(str, rows):
            if name in query:
                columns_in_query[name] = rows[name]
        # `rows.eval` would prepare all columns.
        is_chosen: Any = pd.eval(query, resolvers=[columns_in_query])
        columns = dict.fromkeys([*READ, *claim.match])
        return rows.loc[is_chosen, list(columns)]
    except Exception as error:  # pandas passes on any error of the expression
        raise UserError(
            f"claims.yaml: {claim.id}.where can't be evaluated ({error}); correct the query"
        ) from None


def _line_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the least and largest x, for a ratio; none if these are one."""
    ordered = rows.assign(unit=RATIO).sort_values("x")
    if ordered.x.nunique() < 2:
        return ordered[:0]
    return ordered.iloc[[0, -1]]


def _all(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


def _maybe_largest(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.high >= rows.low.max()]


def _maybe_smallest(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.low <= rows.high.min()]


def _largest(x: NDArray, y: NDArray[np.float64]) -> float:
    return float(y.max())


def _bounds_of_largest(rows: pd.DataFrame) -> Bounds:
    return Bounds(rows.low.max(), rows.high.max())


def _smallest(x: NDArray, y: NDArray[np.float64]) -> float:
    return float(y.min())


def _bounds_of_smallest(rows: pd.DataFrame) -> Bounds:
    return Bounds(rows.low.min(), rows.high.min())


def _x_of_max(x: NDArray, y: NDArray[np.float64]) -> float:
    ascending = y.argsort()
    return float(x[ascending[-1]])


def _bounds_of_x(rows: pd.DataFrame) -> Bounds:
    return Bounds(rows.x.min(), rows.x.max())


def _last_over_first(x: NDArray, y: NDArray[np.float64]) -> float:
    return float(y[-1] / y[0])


def _bounds_of_last_over_first(rows: pd.DataFrame) -> Bounds:
    first = rows.iloc[0]
    last = rows.iloc[-1]
    return Bounds(last.low / first.high, last.high / first.low)


def _median(x: NDArray, y: NDArray[np.float64]) -> float:
    return float(np.median(y))


def _bounds_of_all(rows: pd.DataFrame) -> Bounds:
    return Bounds(rows.low.min(), rows.high.max())


class Take(NamedTuple):
    """How a value is made of rows: those that it may be made of, and the value of these.

    Attributes:
        measured: The value by the rows' x and y; plain numbers, as it is taken in each draw.
        bounds: The interval of the value by the rows' intervals.
    """

    eligible: Callable[[pd.DataFrame], pd.DataFrame]
    measured: Callable[[NDArray, NDArray[np.float64]], float]
    bounds: Callable[[pd.DataFrame], Bounds]
    is_line: bool = False  # of the rows of the least and the largest x alone
    is_place: bool = False  # the value is an x
    is_of_draws: bool = True  # taken in each draw of a cost model's constants

    def value(self, rows: pd.DataFrame) -> Value:
        x = rows.x.to_numpy()
        y = rows.y.to_numpy()
        measured = self.measured(x, y)
        bounds = self.bounds(rows)
        return Value(measured, bounds.low, bounds.high)


TAKES: Mapping[str, Take] = {
    "max": Take(_maybe_largest, _largest, _bounds_of_largest),
    "min": Take(_maybe_smallest, _smallest, _bounds_of_smallest),
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
    value = Value(*(row[name] for name in Value._fields))
    if math.isnan(value.measured):
        return ""
    text = f"{value.measured:.3g}"
    has_level = value.confidence < 1  # an exact value has all, a stated error none
    if has_level or value.low < value.high:
        interval = f"{value.low:.3g} to {value.high:.3g}"
        if has_level:
            interval += f", {100 * value.confidence:.0f} %"
        if value.is_of_rounds:
            interval += " of rounds"
        text += f" ({interval})"
    return f"{text} {row['mark']}".rstrip()


def figure_pattern(experiment: str) -> str | None:
    """Return the expression for the name of a figure of the paper in a claim's source, such as
    "Fig 9" for fig09; None for other experiments.
    """
    _, is_figure, number = experiment.partition("fig")
    if not is_figure or not number.isdigit():
        return None
    # Fig 1 is not Fig 10. The later paper on SARATHI-Serve has figures of the same numbers.
    return rf"^SARATHI,.*Fig {int(number)}(?!\d)"


def verdict(experiment: str, table: pd.DataFrame) -> str:
    """Summarise the claims of an experiment, or those on its figure that another experiment
    judges, in Markdown, from the table of `verdicts`.
    """
    judged = table[table.experiment == experiment]
    if judged.empty:
        pattern = figure_pattern(experiment)
        if pattern is not None:
            judged = table[table.source.str.contains(pattern)]
    if judged.empty:
        return "- No claim is read from it."
    lines = []
    for claim, rows in judged.groupby("claim", sort=False):
        values = []
        measured = rows[rows.verdict != NOT_MEASURED]
        for row in measured.to_dict("records"):
            value = in_words(row)
            values.append(f"{row['device']} **{value}** ({row['verdict']})")
        described = "; ".join(values) or NOT_MEASURED
        expected = rows.expected.iloc[0]
        lines.append(f"- {claim} ({expected}): {described}.")
    if (judged.verdict == NOT_MEASURED).all():
        lines.append("- No device has recorded results of it.")
    return "\n".join(lines)

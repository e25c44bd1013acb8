"""Intervals that a page quotes, and the rows of recorded tables that they may be.

VALUE (LOW to HIGH) and (VALUE, LOW to HIGH) are intervals; any other range stands without brackets.
"<" or ">" before a value marks a bound.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

NUMBER = r"-?[\d,]*\.?\d+"
PERCENT = r"(?: %)?"
END = r"[;,)]"
# The value is the last number before the bracket, in the same cell, or the first one in it.
BEFORE_BRACKET = (
    rf"(?P<sign>[<>] )?(?P<value>{NUMBER})(?P<between>[^\d|]{{0,60}})"
    rf"\((?P<low>{NUMBER}){PERCENT} to (?P<high>{NUMBER}){PERCENT}{END}"
)
IN_BRACKET = (
    rf"\((?P<value_inside>{NUMBER}), "
    rf"(?P<low_inside>{NUMBER}){PERCENT} to (?P<high_inside>{NUMBER}){PERCENT}{END}"
)
INTERVAL = re.compile(f"{BEFORE_BRACKET}|{IN_BRACKET}")
CELL_END = re.compile(r"(?<!\\)\|")  # "\|" is part of a cell
BOUND = re.compile(rf"([<>]) ({NUMBER})")

ENDS = ["value", "low", "high"]
# Columns of a value and of its ends, in any table.
COLUMNS = (["y", "low", "high"], ["value", "low", "high"], ["value", "q20", "q80"])
# What a page quotes nothing of, and takes long to read.
SAMPLES = {"samples", "draws", "moved"}
# What has no label by which rows of a page's table are alike.
VALUES = {*ENDS, "y", "q20", "q80", "reason", "confidence"}
# By unit, factors with which pages print a value; of a ratio they print more (`Records.forms`).
FACTORS = {"s": (1.0, 1e3, 1e6), "share": (1.0, 100.0), "ratio": (1.0, 100.0)}
NO_UNIT = ""  # as a ratio
MOST_LABELS = 3  # that tell the rows, or the columns, of a page's table apart
FILLED = 3 / 4  # of a table's cells; one with fewer intervals has rows of unlike things


@dataclass(frozen=True)
class Quoted:
    """An interval as a page prints it, with the number of its table, 0 in a sentence, and where it
    stands there. A cell of a table may have several.
    """

    value: str
    low: str
    high: str
    sign: str = ""
    table: int = 0
    row: int = 0
    column: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.sign}{self.value} ({self.low} to {self.high})"


def quoted_in(text: str) -> Iterator[Quoted]:
    """Yield the intervals of a page, in their order."""
    blocks = groupby(text.splitlines(), key=lambda line: line.startswith("|"))
    for number, (is_table, lines) in enumerate(blocks, start=1):
        if is_table:
            yield from _of_table(number, lines)
        else:
            yield from _intervals("\n".join(lines))


def _of_table(table: int, lines: Iterable[str]) -> Iterator[Quoted]:
    for row, line in enumerate(lines):
        for cell_number, cell in enumerate(CELL_END.split(line)):
            for order, interval in enumerate(_intervals(cell)):
                yield replace(interval, table=table, row=row, column=(cell_number, order))


def _intervals(text: str) -> Iterator[Quoted]:
    for match in INTERVAL.finditer(text):
        if match["value"] is None:
            yield Quoted(match["value_inside"], match["low_inside"], match["high_inside"])
        else:
            sign = (match["sign"] or "").strip()
            yield Quoted(match["value"], match["low"], match["high"], sign)


def read(path: Path) -> pd.DataFrame:
    """Return a recorded table without its samples and draws."""
    return pd.read_csv(path, usecols=lambda column: column not in SAMPLES)


def rows_with_ends(tables: Sequence[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield the rows of recorded tables, once for each of `COLUMNS` that a table has: `ENDS`, the
    sign of a bound, the unit, and labels.
    """
    for columns in COLUMNS:
        having = [table for table in tables if set(columns) <= set(table)]
        if not having:
            continue
        rows = pd.concat(having, ignore_index=True)
        for end, column in zip(ENDS, columns, strict=True):
            rows[end] = pd.to_numeric(rows[column], errors="coerce")
        rows["sign"] = ""
        if "unit" not in rows:
            rows["unit"] = NO_UNIT
        if "reason" in rows:
            bounds = rows.reason.astype(str).str.extract(BOUND)
            rows["sign"] = bounds[0].fillna("")
            rows["value"] = rows.value.fillna(bounds[1].astype(float))
        if "quantity" in rows:
            # "P99 between tokens / default budgets": each row of a page may have its own baseline.
            rows["numerator"] = rows.quantity.str.partition(" / ")[0]
        yield rows


@dataclass(frozen=True)
class Records:
    """Recorded rows with the columns of `rows_with_ends`."""

    rows: pd.DataFrame

    def of(self, quoted: Quoted) -> frozenset[int]:
        """Return the rows that are, rounded to the quoted digits, a value with its two ends."""
        texts = [text.replace(",", "") for text in (quoted.value, quoted.low, quoted.high)]
        numbers = np.array([float(text) for text in texts])
        decimals = [len(text.partition(".")[2]) for text in texts]
        # Half of the last digit, and what a sum in binary adds.
        tolerance = 0.51 * 10.0 ** -np.array(decimals)
        forms, rows_of_forms = self._forms
        is_equal = (np.abs(forms - numbers) <= tolerance).all(axis=1)
        equal = set(rows_of_forms[is_equal].tolist())
        return frozenset(row for row in equal if self.rows.sign[row] == quoted.sign)

    def tell_apart(self, lines: Sequence[Sequence[frozenset[int]]]) -> bool:
        """Return whether there are labels that all values of a line share, and no two lines. Of a
        value the rows are stated that it may be.
        """
        labels = self.rows.columns.difference([*VALUES, "sign"])
        varied = [label for label in labels if self.rows[label].nunique(dropna=False) > 1]
        for number in range(1, MOST_LABELS + 1):
            for chosen in combinations(varied, number):
                if self._are_told_apart_by(chosen, lines):
                    return True
        return False

    def _are_told_apart_by(
        self, labels: tuple[str, ...], lines: Sequence[Sequence[frozenset[int]]]
    ) -> bool:
        shared = []
        for values in lines:
            labels_of_values = []
            for rows in values:
                labels_of_values.append({self._labels_of(row, labels) for row in rows})
            shared_by_line = set.intersection(*labels_of_values)
            if not shared_by_line:
                return False
            shared.append(shared_by_line)
        return _has_one_each(shared)

    def _labels_of(self, row: int, labels: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._texts_of(row)[label] for label in labels)

    def _texts_of(self, row: int) -> dict[str, str]:
        if row not in self._texts:
            self._texts[row] = self.rows.loc[row].astype(str).to_dict()
        return self._texts[row]

    @cached_property
    def _texts(self) -> dict[int, dict[str, str]]:
        return {}

    @cached_property
    def _forms(self) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
        """What pages make of the values, other units, reciprocals and percent, with their rows."""
        forms = []
        rows_of_forms = []
        for unit, rows in self.rows.groupby(self.rows.unit.fillna(NO_UNIT)):
            ends = rows[ENDS].to_numpy(dtype=float)
            forms_of_unit = [ends * factor for factor in FACTORS.get(str(unit), (1.0,))]
            if unit in ("ratio", NO_UNIT):
                value, low, high = ends.T
                with np.errstate(divide="ignore"):
                    forms_of_unit.append(np.column_stack([1 / value, 1 / high, 1 / low]))
                forms_of_unit.append(100 * (1 - np.column_stack([value, high, low])))
                forms_of_unit.append(100 * (ends - 1))
            for form in forms_of_unit:
                forms.append(form)
                rows_of_forms.append(rows.index.to_numpy())
        return np.concatenate(forms), np.concatenate(rows_of_forms)


def _has_one_each(sets: Sequence[Collection[tuple[str, ...]]]) -> bool:
    """Return whether each set has an element for itself, by augmenting paths (Kuhn)."""
    owners: dict[tuple[str, ...], int] = {}

    def finds_one(number: int, tried: set[tuple[str, ...]]) -> bool:
        for element in sets[number]:
            if element in tried:
                continue
            tried.add(element)
            owner = owners.get(element)
            if owner is None or finds_one(owner, tried):
                owners[element] = number
                return True
        return False

    return all(finds_one(number, set()) for number in range(len(sets)))


def mixed_tables(quoted: Iterable[Quoted], records: Records) -> list[str]:
    """Return the tables of a page whose rows, or columns, no labels tell apart.

    A row of a table has something in common, such as a policy, and a column something else, such
    as a data set. A number that is recorded of another policy stands out.
    """
    tables: defaultdict[int, list[Quoted]] = defaultdict(list)
    for interval in quoted:
        if interval.table:
            tables[interval.table].append(interval)
    mixed = []
    for intervals in tables.values():
        by_row: defaultdict[int, list[frozenset[int]]] = defaultdict(list)
        by_column: defaultdict[tuple[int, int], list[frozenset[int]]] = defaultdict(list)
        for interval in intervals:
            rows = records.of(interval)
            by_row[interval.row].append(rows)
            by_column[interval.column].append(rows)
        is_line = len(by_row) == 1 or len(by_column) == 1
        if is_line or len(intervals) < FILLED * len(by_row) * len(by_column):
            continue
        for lines in (by_row, by_column):
            if not records.tell_apart(list(lines.values())):
                mixed.append(", ".join(map(str, intervals)))
    return mixed

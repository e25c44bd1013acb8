"""The `profiled` cost model: operation times measured for one model on one device, interpolated.

A profile is a CSV table with the columns of `COLUMNS`; a row says that `operation`, over all layers
and tokens of one iteration, took `seconds` for `num_tokens` new tokens that attention let read
`kv_tokens` cached ones (0 where it plays no part). `task=calibrate` writes one;
`experiments/lab/cost_model/profile_from_figures.py` makes the A6000's from figures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from operator import mul
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch

COLUMNS = ("operation", "num_tokens", "kv_tokens", "seconds")
TOKEN_OPERATIONS = ("qkv_proj", "out_proj", "ffn", "elementwise")
# Depend on the tokens of the iteration, but the logits (with sampling) on those that emit: their
# `num_tokens` are rows.
ROW_OPERATIONS = (*TOKEN_OPERATIONS, "logits", "others")
ATTENTION = ("prefill_attention", "decode_attention")
MIN_ROWS = 3  # of an operation: fewer leave nothing to check an interpolation with
HELD_OUT_BLOCKS = (
    10  # neighbours that are left out together; of Fig 7's rows about those of one tile
)
FIX = "measure it again with task=calibrate"


class Profile:
    """A checked table of operation times, and the functions that pass through it.

    Operations of `ROW_OPERATIONS` are interpolated linearly in tokens; past the end of the table
    they cost per token what the cheapest row of the table's upper half does, so a large batch pays
    for no half-empty tile. Attention is a sum of non-negative costs (fixed, per token, per causal
    query-key pair, per cached token) fitted to relative errors, times what that sum leaves of the
    measured times, interpolated.
    """

    def __init__(self, table: pd.DataFrame, source: str) -> None:
        self.table = _checked(table, source)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """The profile in the CSV file `path`. Raises UserError for a file that is not one, or has
        holes.
        """
        try:
            return cls(pd.read_csv(path), str(path))
        except (OSError, ValueError) as error:
            raise UserError(f"profile {path} can't be read ({error}); {FIX}") from None

    def rows(self, operation: str) -> pd.DataFrame:
        """The table's rows of one operation, by tokens."""
        return self.table[self.table.operation == operation].sort_values(
            ["num_tokens", "kv_tokens"]
        )

    @cached_property
    def row_times(self) -> dict[str, Callable[[int], float]]:
        """For each operation of `ROW_OPERATIONS` its seconds as a function of the iteration's
        tokens.
        """
        return {name: _interpolated(self.rows(name)) for name in ROW_OPERATIONS}

    @cached_property
    def prefill_attention(self) -> _Attention:
        """Seconds by prefills, prefill tokens, query-key pairs and cached tokens read, in one
        iteration.
        """
        return _prefill_attention(self.rows("prefill_attention"))

    @cached_property
    def decode_attention(self) -> _Attention:
        """Seconds by decodes and cached tokens read, in one iteration."""
        return _decode_attention(self.rows("decode_attention"))

    @cached_property
    def held_out_errors(self) -> dict[str, float]:
        """For each operation the mean relative error of rows that are left out and predicted by the
        others.

        A table is as a rule dense where times step, so that a row's neighbours tell it; rows are
        left out in blocks.
        """
        return {
            name: _held_out_error(self.rows(name), name) for name in (*ROW_OPERATIONS, *ATTENTION)
        }


class ProfiledCostModel:
    """Seconds of an iteration by a `Profile`; the interface of `cost_model.CostModel`.

    `seconds_per_swapped_token` is what a token of swapped cache takes on its way; None where
    nothing can be swapped.
    """

    def __init__(self, profile: Profile, seconds_per_swapped_token: float | None = None) -> None:
        self.profile = profile
        self._seconds_per_swapped_token = seconds_per_swapped_token
        self._row_times = profile.row_times

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Relative error by kind of operation, found on rows that were held out."""
        errors = self.profile.held_out_errors
        return {
            "matmul": max(errors[name] for name in ("qkv_proj", "out_proj", "ffn")),
            "attention": max(errors[name] for name in ATTENTION),
        }

    def iteration_time(self, batch: Batch) -> float:
        """Seconds of one iteration."""
        return sum(self.operation_times(batch).values())

    def operation_times(self, batch: Batch) -> dict[str, float]:
        """Seconds by operation, summed over layers; prefills and decodes attend in calls of their
        own.
        """
        num_tokens = batch.num_tokens
        times = {name: row_time(num_tokens) for name, row_time in self._row_times.items()}
        times["logits"] = batch.num_emits and self._row_times["logits"](batch.num_emits)
        times["prefill_attention"] = batch.num_prefills and self.profile.prefill_attention.time(
            batch.num_prefill_tokens,
            1.0,
            batch.num_prefill_tokens,
            batch.prefill_query_key_pairs,
            batch.prefill_kv_tokens,
        )
        decodes = batch.num_decode_tokens
        times["decode_attention"] = decodes and self.profile.decode_attention.time(
            decodes, batch.decode_kv_tokens, batch.decode_kv_tokens / decodes, decodes, 1.0
        )
        if batch.num_swapped_tokens:
            assert self._seconds_per_swapped_token is not None, (
                "the host's link was asked for before the run"
            )
            times["swap"] = batch.num_swapped_tokens * self._seconds_per_swapped_token
        return times


class _Attention:
    """A sum of costs over `features` [rows, n], times a correction that is interpolated along
    `axis` [rows].
    """

    def __init__(
        self, features: NDArray[np.float64], axis: NDArray[np.float64], seconds: NDArray[np.float64]
    ) -> None:
        self._costs = _fitted(features, seconds)
        left = pd.Series(seconds / (features @ self._costs)).groupby(axis).mean()
        self._axis, self._left = left.index.tolist(), left.tolist()

    def time(self, place: float, *features: float) -> float:
        """Seconds; `place` is where on the axis of the correction."""
        return self._correction(place) * sum(map(mul, self._costs, features))

    def _correction(self, place: float) -> float:
        """Linear between the places of the table, constant beyond them. Plain floats: numpy is
        slower for one value.
        """
        i = bisect_left(self._axis, place)
        if i == 0 or i == len(self._axis):
            return self._left[min(i, len(self._left) - 1)]
        weight = (place - self._axis[i - 1]) / (self._axis[i] - self._axis[i - 1])
        return self._left[i - 1] + weight * (self._left[i] - self._left[i - 1])


def _checked(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """`table` if it can be interpolated, else a UserError that names the hole."""
    if missing := [name for name in COLUMNS if name not in table]:
        raise UserError(
            f"profile {source} has no column {missing[0]} of {', '.join(COLUMNS)}; {FIX}"
        )
    operations = (*ROW_OPERATIONS, *ATTENTION)
    if not (unknown := table[~table.operation.isin(operations)]).empty:
        raise UserError(
            f"profile {source}: operation {unknown.operation.iloc[0]} in line "
            f"{unknown.index[0] + 2} is none of "
            f"{', '.join(operations)}; {FIX}"
        )
    for name in operations:
        _check_rows(table[table.operation == name], name, source)
    numbers = table.assign(**{column: pd.to_numeric(table[column]) for column in COLUMNS[1:]})
    _check_same_sizes(numbers, source)
    return numbers


def _check_same_sizes(table: pd.DataFrame, source: str) -> None:
    """What every token passes is measured together: a size that one of these operations lacks is a
    hole.
    """
    sizes = {name: set(table.num_tokens[table.operation == name]) for name in TOKEN_OPERATIONS}
    for name, own in sizes.items():
        if missing := sorted(set().union(*sizes.values()) - own):
            raise UserError(
                f"profile {source} has no row of {name} for {missing[0]:g} tokens, which "
                f"another operation has; {FIX}"
            )


def _check_rows(rows: pd.DataFrame, name: str, source: str) -> None:
    if len(rows) < MIN_ROWS:
        raise UserError(
            f"profile {source} has {len(rows)} rows of {name}, {MIN_ROWS} are needed; {FIX}"
        )
    least = {"num_tokens": 1, "kv_tokens": 0, "seconds": 1e-12}
    numbers = rows[list(least)].apply(pd.to_numeric, errors="coerce")
    for column, minimum in least.items():
        if not (bad := rows[~(numbers[column] >= minimum) | np.isinf(numbers[column])]).empty:
            raise UserError(
                f"profile {source}: {column}={bad[column].iloc[0]} of {name} in line "
                f"{bad.index[0] + 2} is missing or "
                f"not positive; {FIX}"
            )
    if name in ATTENTION and not (bad := rows[numbers.kv_tokens < numbers.num_tokens]).empty:
        raise UserError(
            f"profile {source}: kv_tokens={bad.kv_tokens.iloc[0]} of {name} in line "
            f"{bad.index[0] + 2} are fewer than "
            f"the tokens that see them; {FIX}"
        )
    sizes = ["num_tokens", "kv_tokens"] if name in ATTENTION else ["num_tokens"]
    if numbers.duplicated(sizes).any():
        raise UserError(f"profile {source} has two rows of {name} for the same tokens; {FIX}")


def _interpolated(rows: pd.DataFrame) -> Callable[[int], float]:
    tokens, seconds = rows.num_tokens.to_numpy(float), rows.seconds.to_numpy(float)
    upper = tokens >= tokens[-1] / 2
    per_token = float((seconds[upper] / tokens[upper]).min())
    last = tokens[-1]

    @cache
    def time(num_tokens: int) -> float:
        if num_tokens <= last:
            return float(np.interp(num_tokens, tokens, seconds))
        return max(float(seconds[-1]), per_token * num_tokens)  # the last tile may have just begun

    return time


def _prefill_attention(rows: pd.DataFrame) -> _Attention:
    features = _prefill_features(rows)
    return _Attention(features, features[:, 1], rows.seconds.to_numpy(float))


def _decode_attention(rows: pd.DataFrame) -> _Attention:
    return _Attention(
        _decode_features(rows), rows.num_tokens.to_numpy(float), rows.seconds.to_numpy(float)
    )


def _prefill_features(rows: pd.DataFrame) -> NDArray[np.float64]:
    tokens, kv = rows.num_tokens.to_numpy(float), rows.kv_tokens.to_numpy(float)
    pairs = tokens * (kv - tokens) + tokens * (tokens + 1) / 2
    return np.stack([np.ones_like(tokens), tokens, pairs, kv], axis=1)


def _decode_features(rows: pd.DataFrame) -> NDArray[np.float64]:
    """Where all decodes of a table see the same context, what does not grow with their number is
    taken for the latency of walking along it: launching overlaps with the operations before.
    """
    tokens, kv = rows.num_tokens.to_numpy(float), rows.kv_tokens.to_numpy(float)
    return np.stack([kv, kv / tokens, tokens, np.ones_like(tokens)], axis=1)


def _fitted(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Non-negative cost of each feature, by least squares of relative errors.

    A feature that repeats earlier ones in this table (no row has a context, all decodes have the
    same) costs nothing.
    """
    scaled = features / seconds[:, None]
    scale = np.linalg.norm(scaled, axis=0)
    chosen: list[int] = []
    for i in range(features.shape[1]):
        if np.linalg.matrix_rank((scaled / scale)[:, [*chosen, i]], tol=1e-6) > len(chosen):
            chosen.append(i)
    costs = np.zeros(features.shape[1])
    while chosen:
        found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            costs[chosen] = found
            break
        chosen.pop(int(np.argmin(found * scale[chosen])))
    return [float(cost) for cost in costs]


def _held_out_error(rows: pd.DataFrame, operation: str) -> float:
    """The first and the last row are not left out: a table is not made to be extended."""
    inner = np.arange(1, len(rows) - 1)
    errors = []
    for block in np.array_split(inner, min(HELD_OUT_BLOCKS, len(inner))):
        others = rows.drop(rows.index[block])
        for i in block:
            row = rows.iloc[[i]]
            errors.append(abs(_predicted(row, others, operation) / float(row.seconds.iloc[0]) - 1))
    return float(np.mean(errors))


def _predicted(row: pd.DataFrame, rows: pd.DataFrame, operation: str) -> float:
    if operation in ROW_OPERATIONS:
        return float(np.interp(row.num_tokens, rows.num_tokens, rows.seconds)[0])
    is_prefill = operation == "prefill_attention"
    features = (_prefill_features if is_prefill else _decode_features)(row)[0].tolist()
    attention = (_prefill_attention if is_prefill else _decode_attention)(rows)
    return attention.time(float(row.num_tokens.iloc[0]), *features)

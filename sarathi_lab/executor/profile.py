"""The table of a profile: measured times of operations, for one model on one device.

A CSV with the columns of `COLUMNS`; a row says that `operation`, over all layers and tokens of one
iteration, took `seconds` for `num_tokens` new tokens that attention let read `kv_tokens` cached
ones (0 where it plays no part). `task=calibrate` writes one, the `profiled` cost model reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError

COLUMNS = ("operation", "num_tokens", "kv_tokens", "seconds")
TOKEN_OPERATIONS = ("qkv_proj", "out_proj", "ffn", "elementwise")
# Depend on the tokens of the iteration, but the logits (with sampling) on those that emit: their
# `num_tokens` are rows.
ROW_OPERATIONS = (*TOKEN_OPERATIONS, "logits", "others")
ATTENTION = ("prefill_attention", "decode_attention")
OPERATIONS = (*ROW_OPERATIONS, *ATTENTION)
MIN_ROWS = 3  # of an operation: fewer leave nothing to check an interpolation with
LEAST = {"num_tokens": 1, "kv_tokens": 0, "seconds": 1e-12}
FIX = "measure it again with task=calibrate"


def checked(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """`table` with numbers as such, if it can be interpolated, else a UserError naming the hole."""
    for problem in _problems(table):
        raise UserError(f"profile {source}{problem}; {FIX}")
    return table.assign(**{column: pd.to_numeric(table[column]) for column in LEAST})


def _problems(table: pd.DataFrame) -> Iterator[str]:
    if missing := [name for name in COLUMNS if name not in table]:
        yield f" has no column {missing[0]} of {', '.join(COLUMNS)}"
    if not (unknown := table[~table.operation.isin(OPERATIONS)]).empty:
        where = f"operation {unknown.operation.iloc[0]} in line {unknown.index[0] + 2}"
        yield f": {where} is none of {', '.join(OPERATIONS)}"
    for name in OPERATIONS:
        yield from _problems_of(name, table[table.operation == name])
    # What every token passes is measured together: a size that one of them lacks is a hole.
    tokens = pd.to_numeric(table.num_tokens)
    sizes = {name: set(tokens[table.operation == name]) for name in TOKEN_OPERATIONS}
    for name, own in sizes.items():
        if holes := sorted(set().union(*sizes.values()) - own):
            yield f" has no row of {name} for {holes[0]:g} tokens, which another operation has"


def _problems_of(name: str, rows: pd.DataFrame) -> Iterator[str]:
    if len(rows) < MIN_ROWS:
        yield f" has {len(rows)} rows of {name}, {MIN_ROWS} are needed"
    numbers = rows[list(LEAST)].apply(pd.to_numeric, errors="coerce")
    for column, minimum in LEAST.items():
        if not (bad := rows[~(numbers[column] >= minimum) | np.isinf(numbers[column])]).empty:
            what = f"{column}={bad[column].iloc[0]} of {name} in line {bad.index[0] + 2}"
            yield f": {what} is missing or not positive"
    if name in ATTENTION and not (bad := rows[numbers.kv_tokens < numbers.num_tokens]).empty:
        what = f"kv_tokens={bad.kv_tokens.iloc[0]} of {name} in line {bad.index[0] + 2}"
        yield f": {what} are fewer than the tokens that see them"
    sizes = ["num_tokens", "kv_tokens"] if name in ATTENTION else ["num_tokens"]
    if numbers.duplicated(sizes).any():
        yield f" has two rows of {name} for the same tokens"

"""The `profiled` operations: times measured for one model on one device, interpolated."""

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
from sarathi_lab.executor.profile import (
    ATTENTION,
    FIX,
    OPERATIONS,
    ROW_OPERATIONS,
    TOKEN_OPERATIONS,
    checked,
)
from sarathi_lab.model.spec import ModelSpec

HELD_OUT_BLOCKS = 10  # of neighbours left out together; of Fig 7's rows about those of one tile
Floats = NDArray[np.float64]


class Profile:
    """A checked table of operation times, and the functions that pass through it.

    Operations of `ROW_OPERATIONS` are interpolated linearly in tokens; past the end of the table
    they cost per token what the cheapest row of the table's upper half does, so a large batch pays
    for no half-empty tile. Attention is a sum of non-negative costs (fixed, per token, per causal
    query-key pair, per cached token) fitted to relative errors, times what that sum leaves of the
    measured times, interpolated.
    """

    def __init__(self, table: pd.DataFrame, source: str) -> None:
        self.table = checked(table, source)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """The profile in the CSV `path`. Raises UserError for what is none, or has holes."""
        try:
            return cls(pd.read_csv(path), str(path))
        except (OSError, ValueError) as error:
            raise UserError(f"profile {path} can't be read ({error}); {FIX}") from None

    def rows(self, operation: str) -> pd.DataFrame:
        """The table's rows of one operation, by tokens."""
        rows = self.table[self.table.operation == operation]
        return rows.sort_values(["num_tokens", "kv_tokens"])

    @cached_property
    def held_out_errors(self) -> dict[str, float]:
        """Each operation's mean relative error on rows left out and predicted by the others. In
        blocks: a table is as a rule dense where times step, so that a row's neighbours tell it.
        """
        return {name: _held_out_error(self.rows(name), name) for name in OPERATIONS}


class ProfiledOperations:
    """`Operations` of `spec` by a `Profile` of it, whose rows are over all layers and complete:
    what an iteration costs beside them is the operation "others".
    """

    iteration_overhead = 0.0

    def __init__(self, profile: Profile, spec: ModelSpec) -> None:
        self.profile = profile
        self._num_layers = spec.num_layers
        # Seconds by the iteration's tokens, and by `_features`.
        self._row_times = {name: _interpolated(profile.rows(name)) for name in ROW_OPERATIONS}
        self.prefill_attention, self.decode_attention = (
            _Attention(profile.rows(name), name) for name in ATTENTION
        )

    @property
    def uncertainty(self) -> Mapping[str, float]:
        """Mean relative error by kind of operation on rows that were held out."""
        errors = self.profile.held_out_errors
        return {
            "matmul": max(errors[name] for name in ("qkv_proj", "out_proj", "ffn")),
            "attention": max(errors[name] for name in ATTENTION),
        }

    def token_times(self, num_tokens: int) -> Mapping[str, float]:
        return {
            name: self._row_times[name](num_tokens) / self._num_layers for name in TOKEN_OPERATIONS
        }

    def once_times(self, num_tokens: int) -> Mapping[str, float]:
        return {"others": self._row_times["others"](num_tokens)}

    def emit_times(self, num_emits: int) -> Mapping[str, float]:
        return {"logits": self._row_times["logits"](num_emits) if num_emits else 0.0}

    def attention_times(self, batch: Batch) -> tuple[float, float]:
        """Prefills and decodes attend in separate calls."""
        prefill = batch.num_prefills and self.prefill_attention.time(
            batch.num_prefill_tokens,
            1.0,
            batch.num_prefill_tokens,
            batch.prefill_query_key_pairs,
            batch.prefill_kv_tokens,
        )
        decodes, seen = batch.num_decode_tokens, batch.decode_kv_tokens
        decode = decodes and self.decode_attention.time(decodes, seen, seen / decodes, decodes, 1.0)
        return prefill / self._num_layers, decode / self._num_layers


class _Attention:
    """A sum of costs over features [rows, n], times a correction interpolated along tokens."""

    def __init__(self, rows: pd.DataFrame, operation: str) -> None:
        features, seconds = _features(rows, operation), rows.seconds.to_numpy(float)
        self._costs = _fitted(features, seconds)
        left = pd.Series(seconds / (features @ self._costs))
        left = left.groupby(rows.num_tokens.to_numpy(float)).mean()
        self._tokens, self._left = left.index.tolist(), left.tolist()

    def time(self, num_tokens: float, *features: float) -> float:
        return self._correction(num_tokens) * sum(map(mul, self._costs, features))

    def _correction(self, num_tokens: float) -> float:
        """Linear between the table's tokens, constant beyond. Plain floats: numpy is slower."""
        i = bisect_left(self._tokens, num_tokens)
        if i == 0 or i == len(self._tokens):
            return self._left[min(i, len(self._left) - 1)]
        weight = (num_tokens - self._tokens[i - 1]) / (self._tokens[i] - self._tokens[i - 1])
        return self._left[i - 1] + weight * (self._left[i] - self._left[i - 1])


def _features(rows: pd.DataFrame, operation: str) -> Floats:
    """Of prefills: their number, tokens, query-key pairs and cached tokens read. Of decodes: cached
    tokens read, their mean, decodes, and one.

    Where all decodes of a table see the same context, what does not grow with their number is taken
    for the latency of walking along it: launching overlaps with the operations before.
    """
    tokens, kv = rows.num_tokens.to_numpy(float), rows.kv_tokens.to_numpy(float)
    if operation == "decode_attention":
        return np.stack([kv, kv / tokens, tokens, np.ones_like(tokens)], axis=1)
    pairs = tokens * (kv - tokens) + tokens * (tokens + 1) / 2
    return np.stack([np.ones_like(tokens), tokens, pairs, kv], axis=1)


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


def _fitted(features: Floats, seconds: Floats) -> list[float]:
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
    return costs.tolist()


def _held_out_error(rows: pd.DataFrame, operation: str) -> float:
    """The first and the last row are not left out: a table is not made to be extended."""
    inner = np.arange(1, len(rows) - 1)
    errors: list[float] = []
    for block in np.array_split(inner, min(HELD_OUT_BLOCKS, len(inner))):
        left_out = rows.iloc[block]
        predicted = _predicted(left_out, rows.drop(rows.index[block]), operation)
        errors += np.abs(predicted / left_out.seconds.to_numpy(float) - 1).tolist()
    return float(np.mean(errors))


def _predicted(left_out: pd.DataFrame, rows: pd.DataFrame, operation: str) -> Floats:
    """Seconds of each row of `left_out` by the others, `rows`."""
    if operation in ROW_OPERATIONS:
        return np.interp(left_out.num_tokens, rows.num_tokens, rows.seconds)
    features = _features(left_out, operation).T.tolist()
    times = map(_Attention(rows, operation).time, left_out.num_tokens.tolist(), *features)
    return np.array(list(times))

"""Seconds of whole iterations by a table of measured ones (`iterations.csv`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.interpolation import (
    Costs,
    GridInterpolation,
    RatioInterpolation,
    grid_of,
)
from sarathi_lab.executor.tables import MICROSECOND, TIME

NEAR = 64  # tokens added to contexts, so that short ones differ little from none in logarithms
# Axes of the decodes' share: logarithms of sizes of the prompts, then of the decodes.
AXES = ("tokens", "before", "decodes", "context")


class Side(NamedTuple):
    """Prompts or decodes of a batch: tokens, context of each, and what costs are counted by."""

    tokens: float
    context: float
    features: tuple[float, ...]


class IterationTable:
    """Seconds of a batch by measured iterations of prompts, of decodes, and of both together.

    One kind alone takes fitted, non-negative costs (fixed, per token, per causal query-key pair,
    per cached token, per sequence) times the measured ratio to these, interpolated by tokens and
    context. Both together take what the prompts would with the decodes' tokens in addition, as
    products run once over all tokens, and a share of the decodes' time alone, mostly of their
    attention, interpolated by all four sizes. Past an edge the costs grow as fitted; ratios and
    shares are those of the edge. Several prompts, or decodes, count as equal ones. Raises UserError
    without rows of either kind alone.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        only_prompts: list[tuple[Side, float]] = []
        only_decodes: list[tuple[Side, float]] = []
        mixed: list[tuple[Side, Side, float]] = []
        prompts: list[Side] = []
        decodes: list[Side] = []
        for row in rows.to_dict("records"):
            prefill = _prompts_of_row(row)
            decode = _decodes_of_row(row)
            seconds = row[TIME] * MICROSECOND
            if prefill is not None:
                prompts.append(prefill)
            if decode is not None:
                decodes.append(decode)
            if prefill is not None and decode is not None:
                mixed.append((prefill, decode, seconds))
            elif prefill is not None:
                only_prompts.append((prefill, seconds))
            elif decode is not None:
                only_decodes.append((decode, seconds))
        self._prefill = _Alone("prompts", only_prompts)
        self._decode = _Alone("decodes", only_decodes)
        self._shares: GridInterpolation | None = None
        if mixed:
            self._shares = self._grid_of_shares(mixed)
        # The largest that were measured: tokens of prompts, decodes, and contexts of either.
        self.most_tokens = max(side.tokens for side in prompts)
        self.most_decodes = max(side.tokens for side in decodes)
        self.longest = max(side.context for side in [*prompts, *decodes])

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of `batch`."""
        num_decodes = batch.num_decode_tokens
        decode = None
        decodes_alone = 0.0
        if num_decodes:
            decode = _decodes(num_decodes, batch.decode_kv_tokens)
            decodes_alone = self._decode.seconds(decode)
        tokens = batch.num_prefill_tokens
        if not tokens:
            return decodes_alone
        pairs = batch.prefill_query_key_pairs
        prefill = _prompts(tokens, pairs, batch.prefill_kv_tokens, batch.num_prefills)
        share = 0.0
        if decode is not None and self._shares is not None:
            share = max(0.0, self._shares.at([*_logs(prefill), *_logs(decode)]))
        products = self._prefill.seconds(_with_tokens(prefill, decode))
        return max(decodes_alone, products + share * decodes_alone)

    def _grid_of_shares(self, mixed: list[tuple[Side, Side, float]]) -> GridInterpolation:
        """Make the grid of what decodes add to prompts, in shares of their time alone."""
        rows = []
        for prefill, decode, seconds in mixed:
            added = seconds - self._prefill.seconds(_with_tokens(prefill, decode))
            share = added / self._decode.seconds(decode)
            rows.append([*_logs(prefill), *_logs(decode), share])
        return grid_of(pd.DataFrame(rows, columns=[*AXES, "share"]), AXES, "share")


class _Alone:
    """Iterations of prompts alone, or of decodes alone."""

    def __init__(self, kind: str, measured: list[tuple[Side, float]]) -> None:
        if not measured:
            raise UserError(
                f"iterations.csv has no row of {kind} alone; measure it again with task=calibrate"
            )
        sides = [side for side, _ in measured]
        seconds = np.array([time for _, time in measured])
        features = np.array([side.features for side in sides])
        # Ratios are by two sizes here, so costs leave one mean ratio.
        self._costs = partial(Costs(features, np.ones(len(sides)), seconds).time, 1.0)
        fitted = [self._costs(*side.features) for side in sides]
        tokens = [side.tokens for side in sides]
        contexts = [side.context + NEAR for side in sides]
        self._ratios = RatioInterpolation(tokens, contexts, seconds / fitted)

    def seconds(self, side: Side) -> float:
        ratio = self._ratios.ratio(side.tokens, side.context + NEAR)
        return ratio * self._costs(*side.features)


def _prompts(tokens: float, pairs: float, kv_tokens: float, number: float) -> Side:
    # As many pairs as equal prompts have: each token sees the context, and half of its own prompt.
    context = max(0.0, pairs / tokens - (tokens + 1) / 2)
    return Side(tokens, context, (1.0, tokens, pairs, kv_tokens, number))


def _decodes(number: float, kv_tokens: float) -> Side:
    return Side(number, kv_tokens / number, (1.0, number, kv_tokens))


def _with_tokens(prefill: Side, decode: Side | None) -> Side:
    """Return the prompts with the tokens of decodes, without their attention."""
    if decode is None:
        return prefill
    fixed, tokens, *attention = prefill.features
    features = (fixed, tokens + decode.tokens, *attention)
    return Side(prefill.tokens + decode.tokens, prefill.context, features)


def _logs(side: Side) -> tuple[float, float]:
    return math.log(side.tokens), math.log(side.context + NEAR)


def _prompts_of_row(row: Mapping[Hashable, Any]) -> Side | None:
    chunk = row["prefill_chunk"]
    before = row["kv_prefill"]
    number = row.get("num_prefills", 1)
    if not chunk:
        return None
    pairs = number * (chunk * before + chunk * (chunk + 1) / 2)
    return _prompts(number * chunk, pairs, number * (before + chunk), number)


def _decodes_of_row(row: Mapping[Hashable, Any]) -> Side | None:
    decodes = row["n_decode"]
    if not decodes:
        return None
    return _decodes(decodes, decodes * row["kv_decode"])

"""Seconds of whole iterations by a table of measured ones (`iterations.csv`)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.interpolation import Costs, Grid, RatioGrid, full_grid
from sarathi_lab.executor.tables import MICROSECOND, TIME

NEAR = 64  # tokens added to contexts, so that short ones differ little from none in logarithms


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
        self._shares: Grid | None = None
        sides = [_sides_of_row(row) for row in rows.to_dict("records")]
        seconds = (rows[TIME] * MICROSECOND).tolist()
        measured = list(zip(sides, seconds, strict=True))
        self._prefill = _Alone("prompts", [(p, time) for (p, d), time in measured if p and not d])
        self._decode = _Alone("decodes", [(d, time) for (p, d), time in measured if d and not p])
        if both := [(p, d, time) for (p, d), time in measured if p and d]:
            self._shares = self._grid_of(both)
        # The largest that were measured: tokens of prompts, decodes, and contexts of either.
        of_kinds = [[side for side in kind if side] for kind in zip(*sides, strict=True)]
        self.most_tokens, self.most_decodes = (
            max(side.tokens for side in kind) for kind in of_kinds
        )
        self.longest = max(side.context for kind in of_kinds for side in kind)

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of `batch`."""
        tokens, decodes = batch.num_prefill_tokens, batch.num_decode_tokens
        prefill = decode = None
        if tokens:
            pairs = batch.prefill_query_key_pairs
            prefill = _prompts(tokens, pairs, batch.prefill_kv_tokens, batch.num_prefills)
        if decodes:
            decode = _decodes(decodes, batch.decode_kv_tokens)
        return self._together(prefill, decode)

    def _together(self, prefill: Side | None, decode: Side | None) -> float:
        alone = self._decode.seconds(decode) if decode else 0.0
        if prefill is None:
            return alone
        share = 0.0
        if decode and self._shares is not None:
            share = max(0.0, self._shares.at([*_place(prefill), *_place(decode)]))
        return max(alone, self._prefill.seconds(_with_tokens(prefill, decode)) + share * alone)

    def _grid_of(self, both: list[tuple[Side, Side, float]]) -> Grid:
        """Make the grid of what decodes take beside prompts, in shares of their time alone."""
        rows = []
        for prefill, decode, seconds in both:
            rest = seconds - self._prefill.seconds(_with_tokens(prefill, decode))
            share = rest / self._decode.seconds(decode)
            rows.append([*_place(prefill), *_place(decode), share])
        axes = ["tokens", "before", "decodes", "context"]
        table = pd.DataFrame(rows, columns=[*axes, "share"])
        whole = full_grid(table, axes).sort_values(axes)
        values = [np.unique(whole[name].to_numpy(float)) for name in axes]
        return Grid(values, whole["share"].to_numpy(float).reshape([len(one) for one in values]))


class _Alone:
    """Iterations of prompts alone, or of decodes alone."""

    def __init__(self, kind: str, measured: list[tuple[Side, float]]) -> None:
        if not measured:
            raise UserError(
                f"iterations.csv has no row of {kind} alone; measure it again with task=calibrate"
            )
        sides, seconds = zip(*measured, strict=True)
        features = np.array([side.features for side in sides])
        costs = Costs(features, np.ones(len(sides)), np.array(seconds))
        self._costs = partial(costs.time, 1.0)
        ratios = [time / self._costs(*side.features) for side, time in measured]
        contexts = [side.context + NEAR for side in sides]
        self._ratios = RatioGrid([side.tokens for side in sides], contexts, ratios)

    def seconds(self, side: Side) -> float:
        return self._ratios.ratio(side.tokens, side.context + NEAR) * self._costs(*side.features)


def _prompts(tokens: float, pairs: float, kv_tokens: float, number: float) -> Side:
    context = max(0.0, pairs / tokens - (tokens + 1) / 2)
    return Side(tokens, context, (1.0, tokens, pairs, kv_tokens, number))


def _decodes(number: float, kv_tokens: float) -> Side:
    return Side(number, kv_tokens / number, (1.0, number, kv_tokens))


def _with_tokens(prefill: Side, decode: Side | None) -> Side:
    """Return the prompts with the tokens of decodes, without their attention."""
    if decode is None:
        return prefill
    fixed, tokens, *others = prefill.features
    features = (fixed, tokens + decode.tokens, *others)
    return Side(prefill.tokens + decode.tokens, prefill.context, features)


def _place(side: Side) -> tuple[float, float]:
    return math.log(side.tokens), math.log(side.context + NEAR)


def _sides_of_row(row: Any) -> tuple[Side | None, Side | None]:
    chunk, before, number = row["prefill_chunk"], row["kv_prefill"], row.get("num_prefills", 1)
    prefill = decode = None
    if chunk:
        pairs = number * (chunk * before + chunk * (chunk + 1) / 2)
        prefill = _prompts(number * chunk, pairs, number * (before + chunk), number)
    if decodes := row["n_decode"]:
        decode = _decodes(decodes, decodes * row["kv_decode"])
    return prefill, decode

"""Do products of nearly equal sizes err alike?

    python tools/cost_model/neighbours.py

Prints, by how far the numbers of tokens of two 16-bit products with the same weights lie apart, by
how much of their variance the formula's errors differ: half the mean square difference (a
variogram). Near 0 they err alike, near 1 each by itself.
"""

from __future__ import annotations

import math
from itertools import combinations

import pandas as pd

from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.simulated.analytic import AnalyticOperations

TABLES = EXPERIMENTS / "lab" / "cost_model" / "tables"
GPUS = ("a100", "h100", "h200", "b200", "l40s", "rtx-4090", "rtx-pro-6000")
MODEL = "llama3-8b"  # any: products are given by their features
DTYPE_BYTES = 2
SMALLEST = 512  # features of a product: no model has narrower ones on a device
FEWEST_TOKENS = 128  # of products that are bound by arithmetic, a full tile
RATIOS = (1, 1.03, 1.07, 1.15, 1.3, 1.6, 2.1, 4)
NEAR = 1.15


def main() -> None:
    pairs = pd.concat([pairs_of(errors_of(gpu)).assign(gpu=gpu) for gpu in GPUS])
    by_ratio = pairs.groupby(pd.cut(pairs.ratio, RATIOS), observed=True).share
    print(by_ratio.agg(["mean", "size"]).round(2).to_string())
    near = pairs[pairs.ratio <= NEAR].groupby("gpu").share
    print(f"\nUp to a ratio of {NEAR}, by GPU:")
    print(near.agg(["mean", "size"]).round(2).to_string())


def errors_of(gpu: str) -> pd.DataFrame:
    """Return the logarithms of measured over predicted seconds of a GPU's products."""
    formula = AnalyticOperations(
        load_option("model", MODEL), load_option("hardware", gpu), DTYPE_BYTES
    )
    table = pd.read_csv(csv_file(TABLES / gpu / "products.csv"))
    is_wide = table[["in_features", "out_features"]].min(axis=1) >= SMALLEST
    table = table[is_wide & (table.dtype == "bfloat16")]
    errors = []
    for row in table.itertuples():
        predicted = formula.product_time(row.tokens, row.in_features, row.out_features)
        errors.append(math.log(1e-6 * row.time_us / predicted))
    return table.assign(error=errors)


def pairs_of(errors: pd.DataFrame) -> pd.DataFrame:
    """Return all pairs of products with the same weights, by the ratio of their tokens."""
    large = errors[errors.tokens >= FEWEST_TOKENS]
    variance = large.error.var(ddof=0)
    pairs = []
    for _, products in large.groupby(["in_features", "out_features"]):
        by_tokens = products.groupby("tokens").error.mean()
        for (tokens, error), (more, other) in combinations(by_tokens.items(), 2):
            pairs.append((more / tokens, (error - other) ** 2 / 2 / variance))
    return pd.DataFrame(pairs, columns=["ratio", "share"])


if __name__ == "__main__":
    main()

"""Policies that are distinguished by their goodput on the same requests, and groups of the others.

Two policies are compared seed by seed, by the relative difference (x - y) / (x + y) of their
goodputs, as seeds differ by far more than policies. One is better if it is so by more than
`MARGIN` and beyond chance: the mean difference over its root mean square exceeds that of 95 % of
all ways to exchange the results on some of the seeds. All pairs of policies share the largest of
these values in every exchange (Westfall and Young's maximum), so that among all pairs together any
error has a probability of 5 %.

Group 1 are the policies than which none is better, group 2 those of the rest than which none of the
rest is better, and so on. A policy that would be in a group, but is further below the best of it
than is distinguished in the median (from `NEAR` to `FAR`), is open: its seeds do not decide whether
it is in that group or below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.05  # probability of any error among all pairs of policies
MARGIN = 0.01  # share of the goodput up to which two policies are alike
# Shares below the best of its group up to which a policy is in it in any case, and from which it is
# not.
NEAR = 0.1
FAR = 0.3
FEWEST_SEEDS = 6  # with five, a policy that always wins does so by chance in 2 of 32 exchanges
MOST_EXACT_SEEDS = 10  # up to which all exchanges are tried
NUM_EXCHANGES = 2000  # that are drawn for more seeds


@dataclass(frozen=True)
class Comparisons:
    """All pairs of policies [P, P], the row's against the column's.

    Attributes:
        is_better: Whether the row's policy is better than the column's.
        smallest: The smallest relative difference of the pair that would have been distinguished;
            infinite where none would.
    """

    is_better: NDArray[np.bool_]
    smallest: Floats


def compare(goodputs: Floats) -> Comparisons:
    """Compare all policies with all others.

    Args:
        goodputs: Requests a second, [seeds, P].
    """
    num_seeds, num_policies = goodputs.shape
    by_pair = relative_differences(goodputs[:, :, None], goodputs[:, None, :])
    differences = by_pair.reshape(num_seeds, -1)  # [seeds, P * P]
    beyond = differences - MARGIN / 2
    # A pair's score is the sum of its column here: its mean over its root mean square. To exchange
    # a seed's results turns a sign, which leaves the root mean square as it is.
    mean_square = (beyond**2).mean(axis=0)
    scores = beyond / num_seeds / np.sqrt(mean_square)
    # What the best of all pairs scores where which policy is which is a matter of chance.
    maxima = []
    for signs in _exchanges(num_seeds):
        exchanged = signs @ scores
        maxima.append(exchanged.max())
    critical = float(np.quantile(maxima, 1 - LEVEL, method="higher"))
    is_better = scores.sum(axis=0) > critical
    smallest = _smallest_distinguished(differences, critical)
    pairs = (num_policies, num_policies)
    return Comparisons(
        is_better.reshape(pairs),
        smallest.reshape(pairs),
    )


def relative_differences(goodputs: Floats, others: Floats) -> Floats:
    """Return (x - y) / (x + y), from -1 to 1; 0 where both are 0."""
    sums = goodputs + others
    return np.divide(goodputs - others, sums, out=np.zeros_like(sums), where=sums > 0)


def shortfall(relative_differences: Floats) -> Floats:
    """Return 1 - y / x of relative differences (x - y) / (x + y)."""
    return 2 * relative_differences / (1 + relative_differences)


def _exchanges(num_seeds: int) -> Floats:
    """Return signs [exchanges, seeds]: -1 where two policies' results are exchanged."""
    both_signs = (1.0, -1.0)
    if num_seeds <= MOST_EXACT_SEEDS:
        every_exchange = product(both_signs, repeat=num_seeds)
        return np.array(list(every_exchange))
    random = np.random.default_rng(0)
    signs = random.choice(both_signs, size=(NUM_EXCHANGES, num_seeds))
    signs[0] = 1
    return signs


def _smallest_distinguished(differences: Floats, critical: float) -> Floats:
    """Return the mean difference at which the score of as noisy a pair equals `critical`."""
    spread = differences.std(axis=0)
    square = critical**2
    if square >= 1:
        return np.full_like(spread, np.inf)
    deviations = np.sqrt(square / (1 - square))
    return spread * deviations + MARGIN / 2


# What a comparison says of a policy: its group, and how it stands to the best and to others.
OF_GROUPS = [
    "group",
    "is_open",
    "best",
    "best_goodput",
    "below_best",
    "resolution",
    "num_better",
    "num_worse",
    "num_alike",
]
COLUMNS = ["goodput", "seeds", *OF_GROUPS]


def standings(runs: pd.DataFrame) -> pd.DataFrame:
    """Group the policies of one contest.

    Args:
        runs: Goodputs, a row a seed and a column a policy; NaN where a policy has no run.

    Returns:
        A row a policy, the best first: its mean `goodput`, by how many `seeds` it is compared, its
        `group` (NaN with too few seeds) and whether it `is_open`, in that group or below; the
        `best` policy with its goodput on the same seeds, how far it is `below_best` (a share), what
        of that would be distinguished (`resolution`), and how many policies are better, worse and
        not distinguished from it.
    """
    num_seeds = runs.notna().sum()
    has_enough = num_seeds >= FEWEST_SEEDS
    compared = runs.loc[:, has_enough].dropna()
    rows = []
    best = str(runs.mean().idxmax())
    undecided = runs.columns
    if len(compared) >= FEWEST_SEEDS:
        rows = _grouped(compared)
        best = str(rows[0]["best"])
        undecided = runs.columns[~has_enough]
    for policy in undecided:
        row = _undecided(runs, str(policy), best)
        rows.append(row)
    table = pd.DataFrame(rows, columns=["policy", *COLUMNS])
    return table.set_index("policy")


def _undecided(runs: pd.DataFrame, policy: str, best: str) -> dict[str, object]:
    """Return the row of a policy with too few seeds, beside the best on the same seeds."""
    values = runs[policy].dropna()
    of_best = runs.loc[values.index, best].dropna()
    best_goodput = of_best.mean()
    on_same = values[of_best.index].mean()
    below_best = np.nan
    if best_goodput:
        below_best = 1 - on_same / best_goodput
    return {
        "policy": policy,
        "goodput": values.mean(),
        "seeds": len(values),
        "group": np.nan,
        "is_open": True,
        "best": best,
        "best_goodput": best_goodput,
        "below_best": below_best,
        "resolution": np.nan,
        "num_better": 0,
        "num_worse": 0,
        "num_alike": runs.shape[1] - 1,
    }


def _grouped(goodputs: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of `standings` of policies that all have the same seeds."""
    values = goodputs.to_numpy(dtype=float)
    means = values.mean(axis=0)
    best = int(means.argmax())
    pairs = compare(values)
    group_of, is_open = _groups(values, pairs)
    table = pd.DataFrame(
        {
            "policy": goodputs.columns,
            "goodput": means,
            "seeds": len(values),
            "group": group_of,
            "is_open": is_open,
            "best": goodputs.columns[best],
            "best_goodput": means[best],
            "below_best": 1 - means / means[best] if means[best] else 0.0,
            "resolution": shortfall(np.minimum(pairs.smallest[:, best], 1)),
            "num_better": pairs.is_better.sum(axis=0),
            "num_worse": pairs.is_better.sum(axis=1),
        }
    )
    table["num_alike"] = len(table) - 1 - table.num_better - table.num_worse
    order = table.sort_values(
        ["group", "is_open", "goodput"],
        ascending=[True, True, False],
        kind="stable",
    )
    return [{str(name): value for name, value in row.items()} for row in order.to_dict("records")]


def _groups(goodputs: Floats, pairs: Comparisons) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the group of each policy [P], and whether it may also be in one below."""
    means = goodputs.mean(axis=0)
    group_of = np.full(len(means), np.nan)
    is_open = np.zeros(len(means), dtype=bool)
    rest = np.arange(len(means))
    number = 0
    while len(rest):
        number += 1
        best = rest[means[rest].argmax()]
        among_rest = np.ix_(rest, rest)
        is_beaten = pairs.is_better[among_rest].any(axis=0)
        is_beaten &= rest != best
        differences = relative_differences(goodputs[:, [best]], goodputs[:, rest])
        below_best = shortfall(differences.mean(axis=0))
        distinguished = shortfall(np.minimum(pairs.smallest[rest, best], 1))
        limit = np.clip(np.median(distinguished), NEAR, FAR)
        members = rest[~is_beaten]
        group_of[members] = number
        is_open[members] = below_best[~is_beaten] > limit
        rest = rest[is_beaten]
    return group_of, is_open

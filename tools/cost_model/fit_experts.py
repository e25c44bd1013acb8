"""Fit what a mixture's experts take beyond a roofline, and state the errors held out by shape.

    python tools/cost_model/fit_experts.py [FOLDER]

FOLDER is the `systems/data` of aiconfigurator-core, by default the installed package's. Fitted are
`expert_efficiency`, `expert_launch` and `expert_traffic` of each GPU, to balanced choices of every
second of the source's models, split over up to 8 devices. Held out are the others, with
Qwen3-30B-A3B and Mixtral 8x7B in any case: whole models, so that no shape is on both sides.
Choices by power laws are predicted as random ones. Prints the errors, and how much longer 8,192
tokens take in chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from check_tables import DISTRIBUTIONS, DTYPE_BYTES, mixture_of
from distil import is_kept, read_experts, source_of
from numpy.typing import NDArray
from scipy.optimize import minimize

from sarathi_lab import load_option
from sarathi_lab.executor.simulated.experts import Experts
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.tables import EXPERT_SHAPE, TIME

GPUS = ("h100", "h200", "b200", "l40s", "rtx-pro-6000")
MODEL = ("hidden_size", "inter_size", "num_experts", "top_k")
START = (0.6, 20e-6, 1.5)  # expert_efficiency, expert_launch [s], expert_traffic
PROMPT, CHUNKS = 8192, (512, 2048)  # tokens


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    source = source_of(folder)
    for gpu in GPUS:
        report(source, gpu)


def report(source: Path, gpu: str) -> None:
    """Fit a GPU's figures, and print them, their errors, and what chunks cost."""
    rows = _rows(source, gpu, "balanced")
    before = load_option("hardware", gpu)
    fitted = _fit(before, rows[rows.fitted])
    values = {
        "expert_efficiency": fitted.expert_efficiency,
        "expert_launch": fitted.expert_launch,
        "expert_traffic": fitted.expert_traffic,
    }
    figures = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    print(f"\n{gpu}: {figures}")
    # A roofline alone: whole speed, no launch, and no traffic beyond the weights.
    plain = replace(before, expert_efficiency=1.0, expert_launch=0.0, expert_traffic=0.0)
    for name, group in _halves(source, gpu, rows):
        plain_error = np.abs(_predicted(plain, group) / group[TIME] - 1)
        error = np.abs(_predicted(fitted, group) / group[TIME] - 1)
        print(
            f"  {name}: {len(group)} rows, before and after: {100 * plain_error.mean():.1f} %, "
            f"{100 * error.mean():.1f} %; median {100 * error.median():.1f} %"
        )
    is_on_one_device = rows.expert_size == rows.inter_size
    for model, group in rows[rows.kept & is_on_one_device].groupby(list(MODEL)):
        times = group.assign(predicted=_predicted(fitted, group)).set_index("tokens")
        ratios = ", ".join(_ratios(times))
        print(f"  {model}: {PROMPT} tokens in chunks over at once, {ratios}")


def _rows(source: Path, gpu: str, distribution: str) -> pd.DataFrame:
    """The source's rows, whether they are of the `kept` two models, and whether they are `fitted`
    to: every second of the other models, in the order of their sizes.
    """
    rows = read_experts(source, gpu, distribution)
    rows = rows.assign(kept=is_kept(rows))
    number = rows[~rows.kept].groupby(list(MODEL)).ngroup()
    # An odd number keeps the two models from being fitted to.
    number = number.reindex(rows.index, fill_value=1)
    return rows.assign(fitted=number % 2 == 0)


def _halves(source: Path, gpu: str, rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield "fitted", rows[rows.fitted]
    yield "held out", rows[~rows.fitted & ~rows.kept]
    yield "Qwen3-30B-A3B and Mixtral 8x7B", rows[rows.kept]
    for distribution in DISTRIBUTIONS[1:]:
        others = _rows(source, gpu, distribution)
        yield f"held out, {distribution}", others[~others.fitted]


def _fit(hardware: Hardware, rows: pd.DataFrame) -> Hardware:
    """With the figures that leave the least mean logarithm of predicted over measured."""

    def hardware_of(factors: NDArray[np.float64]) -> Hardware:
        """Return the hardware with `START` times the factors, whose signs the search ignores."""
        efficiency, launch, traffic = np.abs(factors) * START
        return replace(
            hardware,
            expert_efficiency=min(1.0, efficiency),
            expert_launch=launch,
            expert_traffic=traffic,
        )

    def error(factors: NDArray[np.float64]) -> float:
        ratios = _predicted(hardware_of(factors), rows) / rows[TIME]
        return float(np.abs(np.log(ratios)).mean())

    best = minimize(error, np.ones(len(START)), method="Nelder-Mead")
    return hardware_of(best.x)


def _predicted(hardware: Hardware, rows: pd.DataFrame) -> pd.Series:
    """Microseconds of the rows by formula."""
    times_by_shape = []
    for shape, group in rows.groupby([*EXPERT_SHAPE, "inter_size"]):
        spec = mixture_of(*map(int, shape))
        experts = Experts(spec, hardware, DTYPE_BYTES)
        times = []
        for row in group.itertuples():
            num_choices = row.tokens * spec.experts_per_token
            seconds = experts.time(num_choices, row.activated_experts)
            times.append(1e6 * seconds)
        times_by_shape.append(pd.Series(times, group.index))
    # In the order of the rows, as the groups are in that of their shapes.
    return pd.concat(times_by_shape).reindex(rows.index)


def _ratios(times: pd.DataFrame) -> Iterator[str]:
    for chunk in CHUNKS:
        if chunk in times.index and PROMPT in times.index:
            num_chunks = PROMPT / chunk
            ratio = num_chunks * times.loc[chunk] / times.loc[PROMPT]
            yield f"of {chunk}: {ratio.predicted:.2f} predicted, {ratio[TIME]:.2f} measured"


if __name__ == "__main__":
    main()

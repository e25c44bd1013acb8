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
FIGURES = ("expert_efficiency", "expert_launch", "expert_traffic")
START = (0.6, 20e-6, 1.5)
PROMPT, CHUNKS = 8192, (512, 2048)  # tokens


def main() -> None:
    source = source_of(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    for gpu in GPUS:
        rows, before = _rows(source, gpu, "balanced"), load_option("hardware", gpu)
        fitted = _fit(before, rows[rows.fitted])
        print(f"\n{gpu}: {', '.join(f'{name} {getattr(fitted, name):.3g}' for name in FIGURES)}")
        plain = replace(before, **dict(zip(FIGURES, (1.0, 0.0, 0.0), strict=True)))
        for name, own in _halves(source, gpu, rows):
            errors = [
                np.abs(_predicted(hardware, own) / own[TIME] - 1) for hardware in (plain, fitted)
            ]
            said = ", ".join(f"{100 * error.mean():.1f} %" for error in errors)
            median = f"median {100 * errors[1].median():.1f} %"
            print(f"  {name}: {len(own)} rows, before and after: {said}; {median}")
        for name, own in rows[rows.kept & (rows.expert_size == rows.inter_size)].groupby(
            list(MODEL)
        ):
            times = own.assign(predicted=_predicted(fitted, own)).set_index("tokens")
            print(f"  {name}: {PROMPT} tokens in chunks over at once, {', '.join(_ratios(times))}")


def _rows(source: Path, gpu: str, distribution: str) -> pd.DataFrame:
    """The source's rows, whether they are of the `kept` two models, and whether they are `fitted`
    to: every second of the other models, in the order of their sizes.
    """
    rows = read_experts(source, gpu, distribution)
    rows = rows.assign(kept=is_kept(rows))
    number = rows[~rows.kept].groupby(list(MODEL)).ngroup().reindex(rows.index, fill_value=1)
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

    def of(figures: NDArray[np.float64]) -> Hardware:
        share, launch, traffic = np.abs(figures) * START
        figures_of = {"expert_launch": launch, "expert_traffic": traffic}
        return replace(hardware, expert_efficiency=min(1.0, share), **figures_of)

    def error(figures: NDArray[np.float64]) -> float:
        return float(np.abs(np.log(_predicted(of(figures), rows) / rows[TIME])).mean())

    return of(minimize(error, np.ones(len(START)), method="Nelder-Mead").x)


def _predicted(hardware: Hardware, rows: pd.DataFrame) -> pd.Series:
    """Microseconds of the rows by formula."""
    parts = []
    for shape, own in rows.groupby([*EXPERT_SHAPE, "inter_size"]):
        spec = mixture_of(*map(int, shape))
        experts = Experts(spec, hardware, DTYPE_BYTES)
        calls = zip(own.tokens * spec.experts_per_token, own.activated_experts, strict=True)
        parts.append(pd.Series([1e6 * experts.time(*call) for call in calls], own.index))
    return pd.concat(parts).reindex(rows.index)


def _ratios(times: pd.DataFrame) -> Iterator[str]:
    for chunk in CHUNKS:
        if chunk in times.index and PROMPT in times.index:
            found = PROMPT / chunk * times.loc[chunk] / times.loc[PROMPT]
            yield f"of {chunk}: {found.predicted:.2f} predicted, {found[TIME]:.2f} measured"


if __name__ == "__main__":
    main()

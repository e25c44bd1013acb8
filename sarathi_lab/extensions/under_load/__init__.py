"""Requests that arrive over time: experiments, and the highest rate within an objective."""

from sarathi_lab.extensions.under_load.bench import (
    CHUNKING,
    LOAD,
    MISTRAL,
    YI,
    LoadExperiment,
    LoadSizes,
    NeededSizes,
    ServingBench,
    Values,
    compared,
    datasets,
    longest,
    only_simulated,
    point,
    ratios,
    under_load,
    waited,
)
from sarathi_lab.extensions.under_load.search import at_rate

__all__ = [
    "CHUNKING",
    "LOAD",
    "MISTRAL",
    "YI",
    "LoadExperiment",
    "LoadSizes",
    "NeededSizes",
    "ServingBench",
    "Values",
    "at_rate",
    "compared",
    "datasets",
    "longest",
    "only_simulated",
    "point",
    "ratios",
    "under_load",
    "waited",
]

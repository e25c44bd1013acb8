"""Runs an experiment of serving on the device at hand or simulated, and makes the table of its
points.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.experiment.capacity import Engine
from sarathi_lab.experiment.loading import load
from sarathi_lab.experiment.measure import MOST_ROUNDS, QuietContext, Samples, table_of
from sarathi_lab.experiment.serving import ROUNDS, MakePolicy, ServingBench
from sarathi_lab.experiment.serving_setups import BLOCK_SIZE, PAPERS, SETUPS
from sarathi_lab.experiment.simulate import SIMULATED
from sarathi_lab.policy import Policy
from sarathi_lab.results.device_record import slug_of
from sarathi_lab.results.intervals import FEWEST_PAIRS
from sarathi_lab.results.plots.serving import GAPS
from sarathi_lab.tasks.plan import resolve_model

ANY_SPREAD = (
    math.inf
)  # of what is simulated: its interval says how far the seeds are apart, and none is noise
SIMULATED_ROUNDS = 5
SEARCHES = 3  # rounds of a search, which takes long
FIRST_ONLY = (
    "sarathi_serve_ablation",
    "sarathi_serve_stalls",
    "sarathi_serve_budget",
)  # the paper's are of Yi-34B


def measured(
    cfg: DictConfig,
    backend: TorchBackend,
    experiment: str,
    setup_name: str,
    seconds: float,
    max_spread: float,
) -> dict[str, pd.DataFrame]:
    """The experiment's table on a device, by the device's folder: rounds for `seconds`, at least
    three.
    """
    spec, _ = resolve_model(cfg, backend)
    setup = SETUPS[setup_name](spec.name)
    context = QuietContext(experiment, str(cfg.device), False, seconds, Path(), Path())
    room = min(setup.kv_tokens, BLOCK_SIZE * backend.kv_blocks(spec, BLOCK_SIZE))
    sizes = {"kv_tokens": room, "batch_size": setup.batch, "longest": setup.longest}
    _, executor = load(context, spec, **sizes, backend=backend)
    engine = Engine(executor, setup.batch, setup.longest, executor.num_blocks, executor.block_size)
    with progress_of(f"measuring {experiment} with {spec.name}", seconds, "s") as advance:
        bench = ServingBench(setup, engine, policy_maker(cfg), spec.vocab_size, int(cfg.seed))
        samples = _rounds(experiment, bench, seconds, MOST_ROUNDS, advance)
    device = "cpu" if executor.model.device.type == "cpu" else slug_of(torch.cuda.get_device_name())
    table = _table(samples, max_spread, cfg.seed)
    return {
        device: table.assign(
            model=spec.name, dtype=backend.dtype_name, device_name=backend.device_name
        )
    }


def simulated(
    cfg: DictConfig, backends: list[tuple[str, SimulatedBackend]], experiment: str
) -> dict[str, pd.DataFrame]:
    """The experiment's tables of simulated devices by their folders; `backends` are models with
    theirs.

    An interval is the bootstrap of the median over the rounds, whose requests differ.
    """
    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for model, backend in backends:
        spec = load_option("model", model)
        setup = SETUPS["paper"](model)
        num_blocks = backend.kv_blocks(spec, BLOCK_SIZE)
        executor = backend.build(spec, None, Sizes(num_blocks, BLOCK_SIZE, setup.batch))
        engine = Engine(
            executor, setup.batch, setup.longest, num_blocks, BLOCK_SIZE, backend.num_stages
        )
        bench = ServingBench(setup, engine, policy_maker(cfg), None, int(cfg.seed))
        num_rounds = SEARCHES if experiment == "sarathi_serve_capacity" else SIMULATED_ROUNDS
        with progress_of(f"computing {experiment} with {model}", num_rounds, "rounds") as advance:
            samples = _rounds(experiment, bench, None, num_rounds, advance)
        table = _table(samples, ANY_SPREAD, cfg.seed)
        labels = {"model": model, "dtype": backend.dtype_name, "device_name": backend.device_name}
        tables[SIMULATED + backend.hardware.name].append(table.assign(**labels))
    return {device: pd.concat(own, ignore_index=True) for device, own in tables.items()}


def simulated_backends(
    cfg: DictConfig, backend: SimulatedBackend, experiment: str
) -> list[tuple[str, SimulatedBackend]]:
    """The chosen model on the chosen device; where neither was chosen those of the paper."""
    is_papers = str(cfg.hardware.name) == "a6000" and "AutoModel" in str(cfg.model["_target_"])
    if not is_papers:
        return [(resolve_model(cfg, backend)[0].name, backend)]
    own = [
        (model, SimulatedBackend(load_option("hardware", gpu), tensor_parallel=n))
        for model, gpu, n in PAPERS
    ]
    return own[-1:] if experiment in FIRST_ONLY else own


def least_room(setup_name: str, model: str) -> int:
    """Tokens of cache without which a setup can't be served: two of its longest requests."""
    return 2 * SETUPS[setup_name](model).longest


def policy_maker(cfg: DictConfig) -> MakePolicy:
    """Policies of `conf/policy/` by name, with a token budget where they read one; None where there
    is no such file.
    """

    def make(name: str, budget: int) -> Policy | None:
        path = CONF / "policy" / f"{name}.yaml"
        if not path.is_file():
            return None
        own: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
        own.policy, own.chunk = OmegaConf.load(path), budget
        return build(own.policy)

    return make


def _rounds(
    experiment: str,
    bench: ServingBench,
    seconds: float | None,
    most: int,
    advance: Callable[[float], None],
) -> Samples:
    """Samples of every point, one a round: `most` rounds, or for `seconds` but at least
    `FEWEST_PAIRS`.

    On a device a first round warms up and does not count. `advance` is called with rounds, or with
    seconds.
    """
    samples, round_of = defaultdict(list), ROUNDS[experiment]
    if seconds is not None:
        _warm_up(bench)
    began, longest, number = time.monotonic(), 0.0, 0
    while number < most:
        elapsed = time.monotonic() - began
        if seconds is not None and number >= FEWEST_PAIRS and elapsed + longest > seconds:
            break
        for panel, series, x, y in round_of(bench, number):
            samples[experiment, panel, series, x].append(y)
        number, took = number + 1, time.monotonic() - began - elapsed
        longest = max(longest, took)
        advance(1 if seconds is None else took)
    return dict(samples)


def _warm_up(bench: ServingBench) -> None:
    for dataset in bench.setup.datasets:
        bench.saturation_rate(dataset)


def _table(samples: Samples, max_spread: float, seed: int) -> pd.DataFrame:
    """The points in the columns of `recorded`. A curve over time is one round's own, as others have
    other times.

    The unit is in brackets behind the panel's name; without brackets it is a ratio.
    """
    table = table_of(samples, max_spread, seed)
    is_curve = table.panel.str.endswith(GAPS)
    firsts = [values[0] for values in samples.values()]
    table = table.assign(
        y=table.y.where(~is_curve, firsts), reason=table.reason.where(~is_curve, None)
    )
    return table.assign(unit=table.panel.str.extract(r"\[(.+)\]$", expand=False).fillna("ratio"))

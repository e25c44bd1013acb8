"""What experiments under load are made of: the engine that serves, and the points of a round.

In a round all policies serve the same requests, one after the other, on one engine. Every round
has a seed of its own, and its values are samples of the points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.topology import Topology
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.capacity import Engine, Grid, at_rate
from sarathi_lab.experiment.cases import Point
from sarathi_lab.experiment.clock import Estimate
from sarathi_lab.experiment.registry import PROFILED, Platform, figure
from sarathi_lab.experiment.trials import Trials
from sarathi_lab.policy import Policy
from sarathi_lab.results import metrics
from sarathi_lab.results.decode_cost import decode_iteration
from sarathi_lab.results.slo import Slo
from sarathi_lab.workload.lognormal import Lognormal

# Table 1; the paper's ablation, stalls and budgets are of Yi-34B.
YI, MISTRAL = Platform("yi-34b", "a100", 2), Platform("mistral-7b", "a100", 1)
LOAD = 0.7  # of the rate at which a device serves all that is there at once, where none is stated
CHUNKING = "sarathi_serve"
ANY = "any"  # model, in `rates`
# By name and token budget; None where there is no such policy.
MakePolicy = Callable[[str, int], Policy | None]
Values = Mapping[str, float]  # by quantity
Register = Callable[[Callable[..., Any]], Callable[..., Any]]


def under_load(question: str, seconds: float, *papers: Platform, **declared: Any) -> Register:
    """Register a figure of rounds, with what `ServingBench` reads of the sizes."""
    needs, takes = ("datasets", "num_requests", "batch", "budget"), ("batches", "rates")
    own = {"question": question, "seconds": seconds, "papers": papers or (YI,)}
    return figure(kind="rounds", max_spread=0.5, needs=needs, takes=takes, **own, **declared)


def only_simulated(question: str, *papers: Platform) -> Register:
    """Register a figure of rounds on what no device at hand is or tells."""
    own = {"question": question, "papers": papers, "simulated": PROFILED, "seconds": 0}
    return figure(kind="rounds", is_simulated=True, needs=("datasets", "batch"), **own)


@dataclass
class ServingBench:
    """One engine that serves `model` at `sizes`, without tokens if `vocab_size` is None; simulated,
    also the clusters of such engines.
    """

    sizes: Mapping[str, Any]
    model: str
    engine: Engine
    policy: MakePolicy
    vocab_size: int | None
    seed: int = 0
    clusters: Callable[[Topology], Engine] | None = None
    backend: SimulatedBackend | None = None  # of the executor, where it is simulated
    _saturation: dict[str, float] = field(default_factory=dict)
    _slos: dict[str, Slo] = field(default_factory=dict)
    # By data set and objective, where the last round's searches ended (steps of the grid).
    starts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def engine_of(self, policy: str) -> Engine:
        """The engine with the batch that the policy has at these sizes."""
        own = self.sizes.get("batches", {}).get(policy, self.sizes["batch"])
        return replace(self.engine, batch_size=own)

    def requests(self, dataset: str, number: int, seed: int) -> list[Request]:
        """`number` requests that arrive as a Poisson process of rate 1."""
        arriving = partial(replace, num_requests=number, arrivals="poisson", rate=1.0)
        own: Lognormal = arriving(datasets(self.sizes)[dataset], seed=self.seed + seed)
        return list(own.generate(self.vocab_size).requests)

    def rate(self, dataset: str) -> float:
        """The requests per second at which a data set is served."""
        rates = self.sizes.get("rates", {})
        stated = rates.get(self.model, rates.get(ANY, {})).get(dataset)
        return LOAD * self.saturation_rate(dataset) if stated is None else stated

    def saturation_rate(self, dataset: str) -> float:
        """Requests per second of the chunking policy, all there at once; served the first time."""
        if dataset not in self._saturation:
            requests = {0: self.requests(dataset, self.sizes["num_requests"], 0)}
            trials = Trials(self.engine, self.chunking(self.sizes["budget"]), requests, Grid(1.0))
            self._saturation[dataset] = trials.saturation_rate(self.sizes["num_requests"])
        return self._saturation[dataset]

    def chunking(self, budget: int) -> Policy:
        return self.named([CHUNKING], budget)[CHUNKING]

    def named(self, names: Sequence[str], budget: int) -> dict[str, Policy]:
        return {name: own for name in names if (own := self.policy(name, budget)) is not None}

    def slo(self, kind: str) -> Slo:
        """An objective of the sizes in this device's seconds: an option, maybe the model's own, or
        settings.
        """
        if kind not in self._slos:
            stated, seconds = self.sizes["slos"][kind], None
            if isinstance(stated, str):
                own = f"{self.model}-{stated}"
                is_own = (CONF / "slo" / f"{own}.yaml").is_file()
                slo = load_option("slo", own if is_own else stated)
            else:
                slo = Slo(name=kind, **stated)
            if slo.is_relative:
                batch = min(slo.decode_batch, self.sizes["batch"])
                context = min(slo.decode_context, longest(self.sizes))
                engine = self.engine
                room = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
                seconds = decode_iteration(engine.executor, batch, context, **room)
            self._slos[kind] = slo.resolved(seconds)
        return self._slos[kind]

    def serve(self, name: str, policy: Policy, dataset: str, seed: int) -> pd.DataFrame:
        """The requests of a round at the data set's rate under a policy: their table."""
        requests = self.requests(dataset, self.sizes["num_requests"], seed)
        arriving = at_rate(requests, self.rate(dataset))
        return self.engine_of(name).serve(arriving, policy).requests()

    def cluster(self, topology: Topology) -> Engine:
        """Several engines. Raises UserError on a real device."""
        if self.clusters is None:
            raise UserError("several engines are simulated only; add executor=simulated")
        return self.clusters(topology)

    def check_power(self, experiment: str, fix: str) -> None:
        """Raise UserError if nothing says what the device draws."""
        if self.backend is None or self.backend.power is None:
            raise UserError(f"experiment={experiment} needs a power model; {fix}")

    def energy(self, ledger: Ledger) -> tuple[pd.DataFrame, dict[str, float]]:
        """The iterations with their costs, watts and joules, and the metrics of energy with the
        counts of tokens.
        """
        backend, spec = self.backend, load_option("model", self.model)
        assert backend is not None, "checked before"
        assert backend.power is not None, "checked before"
        devices, costs = backend.parallel.num_devices, (backend.dtype_bytes, backend.peaks())
        table = metrics.add_costs(ledger.iterations(), spec, *costs)
        table = metrics.add_energy(table, backend.power, devices)
        counts = metrics.throughput(ledger.requests(), table.end.max())
        return table, counts | metrics.energy_metrics(table, counts, backend.power, devices)


def datasets(sizes: Mapping[str, Any]) -> dict[str, Lognormal]:
    """The data sets of some sizes: options of the group workload, or settings of a `Lognormal`."""
    return {
        name: _option(stated)
        if isinstance(stated, str)
        else Lognormal(num_requests=1, seed=0, **stated)
        for name, stated in sizes["datasets"].items()
    }


@cache  # composing one takes a tenth of a second, and every point of a round asks
def _option(name: str) -> Lognormal:
    return load_option("workload", name)


def longest(sizes: Mapping[str, Any]) -> int:
    return max(dataset.max_len for dataset in datasets(sizes).values())


def compared(
    dataset: str,
    found: Mapping[str, Values],
    others: Mapping[str, Values],
    units: Mapping[str, str] = MappingProxyType({}),
    x: float = 0.0,
    **labels: Any,
) -> Iterator[Point]:
    """The values `found` of every series in their `units` (seconds), and over those of `others`,
    by what these are called, that have the quantity; labels are those of `point`.
    """
    for series, values in found.items():
        for quantity, value in values.items():
            unit = units.get(quantity, "s")
            yield point(dataset, quantity, unit, series, value, x, **labels)
        for called, other in others.items():
            if other is not values:
                yield from ratios(dataset, called, series, values, other, x, **labels)


def ratios(
    dataset: str,
    called: str,
    series: str,
    values: Values,
    other: Values,
    x: float = 0.0,
    **labels: Any,
) -> Iterator[Point]:
    """The values of a series over those of another, of the quantities that both have."""
    for quantity in [one for one in values if one in other]:
        ratio = values[quantity] / other[quantity]
        yield point(dataset, f"{quantity} / {called}", "ratio", series, ratio, x, **labels)


def point(
    dataset: str,
    quantity: str,
    unit: str,
    series: str,
    y: float,
    x: float = 0.0,
    *,
    slo: str = "",
    kind: Any = "value",
) -> Point:
    """A point in the panel of its data set, objective and quantity."""
    place = f"{dataset}, {slo}" if slo else dataset
    panel = f"{place}: {quantity}" + ("" if unit == "ratio" else f" [{unit}]")
    labels = (("dataset", dataset), ("slo", slo), ("quantity", quantity))
    return Point(panel, series, float(x), Estimate(y), unit, kind, labels)

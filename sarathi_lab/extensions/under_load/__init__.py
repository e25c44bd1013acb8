"""What experiments under load are made of: the engine that serves, and the points of a round.

In a round all policies serve the same requests, one after the other, on one engine. Every round
has another seed, and its values are samples of the points.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.arrivals import Arrivals
from sarathi_lab.engine.config import SINGLE, EngineConfig, Topology
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.executor import Sizes as BuildSizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.cases import Point, Round, Samples, keep, table_of
from sarathi_lab.experiment.clock import Estimate
from sarathi_lab.experiment.registry import PROFILED, Figure, Job, Platform, Sizes, figure
from sarathi_lab.experiment.scenario import BLOCK_SIZE, Room
from sarathi_lab.extensions.capacity.search import at_rate
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Policy
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results import load
from sarathi_lab.results.decode_cost import decode_iteration
from sarathi_lab.results.intervals import FEWEST_PAIRS, summary
from sarathi_lab.results.plots.spec import PlotSpec
from sarathi_lab.results.serving_metrics import Slo, waits
from sarathi_lab.workload.synthetic import Lognormal

if TYPE_CHECKING:
    from sarathi_lab.executor.measured_backend import MeasuredBackend
    from sarathi_lab.experiment.measure import Measured, Session

# Table 1; the paper's ablation, stalls and budgets are of Yi-34B.
YI, MISTRAL = Platform("yi-34b", "a100", 2), Platform("mistral-7b", "a100", 1)
LOAD = 0.7  # of the rate at which a device serves all that is there at once, where none is stated
CHUNKING = "sarathi_serve"
ANY = "any"  # model, in `rates`
# By name and token budget; None where there is no such policy.
MakePolicy = Callable[[str, int], Policy | None]
Values = Mapping[str, float]  # by quantity
# Quantities of what requests waited (`serving_metrics.waits`), in seconds.
WAITED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "mean latency": lambda waited: np.mean(waited["latency"]),
    "mean TTFT": lambda waited: np.mean(waited["ttft"]),
    "P50 TTFT": lambda waited: np.median(waited["ttft"]),
    "P99 TTFT": lambda waited: np.quantile(waited["ttft"], 0.99),
    "mean TPOT": lambda waited: np.nanmean(waited["tpot"]),
    "P50 between tokens": lambda waited: np.median(waited["tbt"]),
    "P99 between tokens": lambda waited: np.quantile(waited["tbt"], 0.99),
}
Register = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class LoadFigure(Figure):
    """An experiment of requests that arrive over time, in rounds."""

    max_spread: float = 0.5

    needs: ClassVar[Sequence[str]] = ("datasets", "batch")
    takes: ClassVar[Sequence[str]] = ("num_requests", "budget", "batches", "rates")
    is_in_rounds = has_own_bench = True

    def cases(self, spec: ModelSpec, sizes: Sizes) -> list[Round]:
        return [Round(self.make, sizes, seed) for seed in range(FEWEST_PAIRS)]

    def room(self, spec: ModelSpec, sizes: Sizes) -> Room:
        batch, most = sizes["batch"], longest(sizes)
        num_blocks = math.ceil(1.05 * batch * math.ceil(most / BLOCK_SIZE))  # with a watermark
        return Room(num_blocks * BLOCK_SIZE, batch, most)

    def room_on(self, backend: MeasuredBackend, spec: ModelSpec, sizes: Sizes) -> Room:
        """Return the room of a batch, or what the device has for it."""
        room = self.room(spec, sizes)
        setup = setup_of(None, room.batch_size, room.longest)
        held_tokens = BLOCK_SIZE * backend.kv_blocks(spec, BLOCK_SIZE, setup)
        return room._replace(kv_tokens=min(room.kv_tokens, held_tokens))

    def least_room(self, spec: ModelSpec, sizes: Sizes) -> int:
        return 2 * longest(sizes)  # requests may wait

    def measure(self, session: Session) -> Measured:
        from sarathi_lab.experiment.measure import measure  # torch takes seconds

        spec, sizes, room, seed = session.spec, session.sizes, session.room, session.seed
        with session.loaded(self.name) as (executor, advance):
            cache = (executor.num_blocks, executor.block_size, room.longest)
            engine = EngineConfig(Orca(), room.batch_size, *cache)
            makes = (session.make_policy, spec.vocab_size)
            bench = ServingBench(sizes, spec.name, engine, executor, *makes, seed)
            for dataset in sizes["datasets"]:  # warms up
                bench.saturation_rate(dataset)
            rounds = [Round(self.make, sizes)]
            samples = measure(rounds, bench, seconds=session.seconds, advance=advance)
        labels, shares = {"model": spec.name, "quantity": load.REPLAYED}, bench.replayed
        rows = [{**labels, "policy": p, **summary(s, "ratio")} for p, s in shares.items()]
        serving = {"serving": pd.DataFrame(rows)} if any(map(any, shares.values())) else {}
        return {"": session.table(self.name, samples), **serving}

    def bench(self, job: Job) -> ServingBench:
        spec, backend, batch, most = job.spec, job.backend, job.sizes["batch"], longest(job.sizes)
        setup = setup_of(None, batch, most)
        cache_sizes = (backend.kv_blocks(spec, BLOCK_SIZE, setup), BLOCK_SIZE)
        predictor = cache(partial(backend.predictor, spec))
        states = backend.state_tokens(spec)
        places = (batch, *cache_sizes, most, backend.num_stages)
        engine = EngineConfig(Orca(), *places, state_tokens=states, window=spec.cached_window)

        @cache  # a cost model with tables takes a second to make
        def executor(cluster: Topology) -> Executor:
            build = cluster.backend(backend, spec).build
            build = partial(build, spec, None, BuildSizes(*cache_sizes, batch))
            return cluster.executor(build, cluster.link_between(backend, spec))

        @cache
        def on_device(name: str, budget: int) -> Policy | None:
            policy = job.make_policy(name, budget)
            return policy and policy.on_device(predictor, batch, most)

        rest = (executor(SINGLE), on_device, None, job.seed, executor, backend)
        return ServingBench(job.sizes, spec.name, engine, *rest)

    def table(self, parts: Sequence[Sequence[Point]]) -> pd.DataFrame:
        """An interval is that of the median over the rounds: it shows how far seeds differ."""
        samples: Samples = {}
        for points in parts:
            keep(samples, points)
        return table_of(self.name, samples, math.inf, is_series=False)


def under_load(question: str, seconds: float, *papers: Platform, **declared: Any) -> Register:
    """Register an experiment under load, with what `ServingBench` reads of the sizes."""
    declared |= {"question": question, "seconds": seconds, "papers": papers or (YI,)}
    return figure(LoadFigure, **declared)


def only_simulated(question: str, *papers: Platform, look: PlotSpec) -> Register:
    """Register one that needs more devices than there are."""
    return under_load(question, 0, *papers, look=look, simulated=PROFILED, is_simulated=True)


@dataclass
class ServingBench:
    """An engine that serves `model` at `sizes` on `executor`, without tokens if `vocab_size` is
    None; simulated, also clusters of such engines. The policy of `engine` is that of each run.
    """

    sizes: Mapping[str, Any]
    model: str
    engine: EngineConfig
    executor: Executor
    policy: MakePolicy
    vocab_size: int | None
    seed: int = 0
    executors: Callable[[Topology], Executor] | None = None  # of clusters
    backend: SimulatedBackend | None = None  # of the executor, where it is simulated
    _saturation: dict[str, float] = field(default_factory=dict)
    _slos: dict[str, Slo] = field(default_factory=dict)
    # By data set and objective, where the last round's searches ended (steps of the grid).
    starts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    # By policy, the share of replayed iterations in each run.
    replayed: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(
        self, requests: Sequence[Request] | Arrivals, policy: Policy, **settings: Any
    ) -> Ledger:
        """Serve `requests` under a policy; `settings` replace those of the engine. Raises UserError
        for a cluster on a real device.
        """
        engine, executor = replace(self.engine, policy=policy, **settings), self.executor
        if not engine.cluster.is_single:
            if self.executors is None:
                raise UserError("several engines are simulated only; add executor=simulated")
            executor = self.executors(engine.cluster)
        ledger = serve(requests, engine, executor)
        self.replayed[policy.name].append(ledger.replayed_share)
        return ledger

    def batch_of(self, policy: str) -> int:
        """Return the batch that the policy has at these sizes."""
        return int(self.sizes.get("batches", {}).get(policy, self.sizes["batch"]))

    def requests(self, dataset: str, number: int, seed: int) -> list[Request]:
        """`number` requests that arrive as a Poisson process of rate 1."""
        arriving = partial(replace, num_requests=number, arrivals="poisson", rate=1.0)
        workload: Lognormal = arriving(datasets(self.sizes)[dataset], seed=self.seed + seed)
        return list(workload.generate(self.vocab_size).requests)

    def rate(self, dataset: str) -> float:
        """The requests per second at which a data set is served."""
        rates = self.sizes.get("rates", {})
        stated = rates.get(self.model, rates.get(ANY, {})).get(dataset)
        return LOAD * self.saturation_rate(dataset) if stated is None else stated

    def saturation_rate(self, dataset: str) -> float:
        """Requests per second of the chunking policy, all there at once; served the first time."""
        if dataset not in self._saturation:
            requests = self.requests(dataset, self.sizes["num_requests"], 0)
            at_once = [replace(one, arrival_time=0.0) for one in requests]
            ledger = self.run(at_once, self.chunking(self.sizes["budget"]))
            self._saturation[dataset] = len(at_once) / float(ledger.iterations().end.max())
        return self._saturation[dataset]

    def chunking(self, budget: int) -> Policy:
        return self.named([CHUNKING], budget)[CHUNKING]

    def named(self, names: Sequence[str], budget: int) -> dict[str, Policy]:
        return {name: policy for name in names if (policy := self.policy(name, budget)) is not None}

    def slo(self, kind: str) -> Slo:
        """An objective of the sizes in this device's seconds: an option, maybe the model's, or
        settings.
        """
        if kind not in self._slos:
            stated, seconds = self.sizes["slos"][kind], None
            if isinstance(stated, str):
                of_model = f"{self.model}-{stated}"
                has_one = (CONF / "slo" / f"{of_model}.yaml").is_file()
                slo = load_option("slo", of_model if has_one else stated)
            else:
                slo = Slo(name=kind, **stated)
            if slo.is_relative:
                batch = min(slo.decode_batch, self.sizes["batch"])
                # A last token follows the longest context.
                context, engine = min(slo.decode_context, longest(self.sizes) - 1), self.engine
                cache = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
                seconds = decode_iteration(self.executor, batch, context, **cache)
            self._slos[kind] = slo.resolved(seconds)
        return self._slos[kind]

    def serve(self, name: str, policy: Policy, dataset: str, seed: int) -> pd.DataFrame:
        """The requests of a round at the data set's rate under a policy: their table."""
        requests = self.requests(dataset, self.sizes["num_requests"], seed)
        arriving = at_rate(requests, self.rate(dataset))
        return self.run(arriving, policy, batch_size=self.batch_of(name)).requests()


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


def waited(requests: pd.DataFrame, *names: str) -> dict[str, float]:
    """Return the quantities of `WAITED` that are named."""
    seconds = waits(requests)
    return {name: float(WAITED[name](seconds)) for name in names}


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

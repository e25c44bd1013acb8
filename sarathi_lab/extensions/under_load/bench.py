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
from typing import ClassVar, TypedDict, Unpack

import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import require_one_of
from sarathi_lab.config.instantiate import build, load_option, option_files
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.arrivals import Arrivals
from sarathi_lab.engine.config import SINGLE, EngineConfig, Topology
from sarathi_lab.engine.executor import Backend, Executor
from sarathi_lab.engine.executor import Sizes as BuildSizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.speculation import Speculation
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.experiment.points import Estimate, Kind, Part, Point, Samples, keep, table_of
from sarathi_lab.experiment.registry import (
    Experiment,
    Measured,
    MeasuredJob,
    Platform,
    SimulatedJob,
    Sizes,
)
from sarathi_lab.experiment.scenario import BLOCK_SIZE, Room
from sarathi_lab.extensions.under_load.search import Server, at_rate
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Orca, Policy
from sarathi_lab.policy.systems import setup_of
from sarathi_lab.results import load
from sarathi_lab.results.decode_cost import slo_in_seconds
from sarathi_lab.results.intervals import ANY_VALUE, FEWEST_PAIRS, Resolution, summary
from sarathi_lab.results.serving_metrics import Slo, latency
from sarathi_lab.workload.synthetic import Lognormal

# Table 1; the paper's ablation, stalls and budgets are of Yi-34B.
YI = Platform("yi-34b", "a100", 2)
MISTRAL = Platform("mistral-7b", "a100", 1)
LOAD = 0.7  # of the rate at which a device serves all that is there at once, where none is stated
CHUNKING = "sarathi_serve"
ANY = "any"  # model, in `rates`
WATERMARK = 1.05  # of blocks, for policies that leave some free
Values = Mapping[str, float]  # by quantity
# Quantities of what requests waited, in seconds, by the names of `latency`.
WAITED = {
    "mean latency": "latency_mean",
    "mean TTFT": "ttft_mean",
    "P50 TTFT": "ttft_p50",
    "P99 TTFT": "ttft_p99",
    "mean TPOT": "tpot_mean",
    "P50 between tokens": "tbt_p50",
    "P99 between tokens": "tbt_p99",
}


class NeededSizes(TypedDict):
    """Sizes of every experiment under load: data sets by name (options of the group workload, or
    settings of a `Lognormal`), and sequences of a batch.
    """

    datasets: Mapping[str, str | Mapping[str, object]]
    batch: int


class LoadSizes(NeededSizes, total=False):
    """Sizes that `ServingBench` reads, beside those of an experiment's function.

    `budget` is in tokens; `batches` are by policy, and `rates` (requests/s) by model and data set.
    """

    num_requests: int
    budget: int
    batches: Mapping[str, int]
    rates: Mapping[str, Mapping[str, float]]


class EngineSettings(TypedDict, total=False):
    """Fields of an engine that some of its runs change."""

    batch_size: int
    num_blocks: int
    num_micro_batches: int
    shares_prefixes: bool
    cluster: Topology
    speculation: Speculation


@dataclass(frozen=True)
class LoadExperiment(Experiment):
    """An experiment of requests that arrive over time, in rounds."""

    papers: Sequence[Platform] = (YI,)
    max_spread: float = 0.5

    needs: ClassVar[Sequence[str]] = tuple(NeededSizes.__annotations__)
    takes: ClassVar[Sequence[str]] = tuple(LoadSizes.__annotations__)
    is_in_rounds = True

    def parts(self, spec: ModelSpec, sizes: Sizes) -> list[Part]:
        return [Part(self.make, sizes=sizes, seed=seed) for seed in range(FEWEST_PAIRS)]

    def room(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> Room:
        """Return the room of a batch, or what the device has for it."""
        batch = sizes["batch"]
        longest_request = longest(sizes)
        blocks_each = math.ceil(longest_request / BLOCK_SIZE)
        num_blocks = math.ceil(WATERMARK * batch * blocks_each)
        setup = setup_of(None, batch, longest_request)
        held_blocks = backend.kv_blocks(spec, BLOCK_SIZE, setup)
        return Room(
            kv_tokens=min(num_blocks, held_blocks) * BLOCK_SIZE,
            batch_size=batch,
            longest=longest_request,
        )

    def least_tokens(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> int:
        return 2 * longest(sizes)  # requests may wait

    def measure(self, job: MeasuredJob) -> Measured:
        from sarathi_lab.experiment.measure import (  # torch takes seconds
            loaded,
            measure,
            measured_table,
        )

        spec = job.spec
        sizes = job.sizes
        room = job.room
        with loaded(job) as (executor, advance):
            engine = EngineConfig(
                Orca(), room.batch_size, executor.num_blocks, executor.block_size, room.longest
            )
            bench = ServingBench(
                sizes, spec.name, engine, executor, policy_of, spec.vocab_size, job.seed
            )
            for dataset in sizes["datasets"]:  # warms up
                bench.saturation_rate(dataset)
            rounds = [Part(self.make, sizes=sizes, seed=0)]
            samples = measure(rounds, bench, seconds=job.seconds, advance=advance)
        return {"": measured_table(job, samples), **_replayed_table(bench)}

    def bench(self, job: SimulatedJob) -> ServingBench:
        spec = job.spec
        backend = job.backend
        batch = job.sizes["batch"]
        longest_request = longest(job.sizes)
        setup = setup_of(None, batch, longest_request)
        num_blocks = backend.kv_blocks(spec, BLOCK_SIZE, setup)
        build_sizes = BuildSizes(num_blocks, BLOCK_SIZE, batch)
        engine = EngineConfig(
            Orca(),
            batch,
            num_blocks,
            BLOCK_SIZE,
            longest_request,
            backend.num_stages,
            state_tokens=backend.state_tokens(spec),
            window=backend.window_in_cache(spec, None),
        )
        predictor = cache(partial(backend.predictor, spec))

        @cache  # a cost model with tables takes a second to make
        def executor_of(cluster: Topology) -> Executor:
            build = partial(cluster.backend(backend, spec).build, spec, None, build_sizes)
            return cluster.executor(build, cluster.link_between(backend, spec))

        @cache
        def policy_on_device(name: str, budget: int) -> Policy:
            return policy_of(name, budget).on_device(predictor, batch, longest_request)

        return ServingBench(
            job.sizes,
            spec.name,
            engine,
            executor_of(SINGLE),
            policy_on_device,
            vocab_size=None,
            seed=job.seed,
            executors=executor_of,
            backend=backend,
        )

    def table(self, points_of_parts: Sequence[Sequence[Point]]) -> pd.DataFrame:
        """An interval is that of the median over the rounds, which shows how far seeds differ, and
        of the draws of the cost model's constants, if any are among the parts of each round.
        """
        num_parts = len(points_of_parts) // FEWEST_PAIRS
        by_draw = []
        # The parts of a round follow one another: without a draw, then one for each draw.
        for number in range(num_parts):
            samples: Samples = {}
            for points in points_of_parts[number::num_parts]:
                keep(samples, points)
            by_draw.append(samples)
        undrawn, *drawn = by_draw
        return table_of(self.name, undrawn, math.inf, is_series=False, drawn=drawn)


def _replayed_table(bench: ServingBench) -> dict[str, pd.DataFrame]:
    """Return the shares of replayed iterations by policy, if any were."""
    rows = []
    for policy, shares in bench.replayed.items():
        labels = {"model": bench.model, "quantity": load.REPLAYED, "policy": policy}
        rows.append({**labels, **summary(shares, "ratio")})
    # An engine without CUDA graphs replays none.
    if not any(map(any, bench.replayed.values())):
        return {}
    return {"serving": pd.DataFrame(rows)}


@dataclass
class ServingBench:
    """An engine that serves `model` at `sizes` on `executor`, without tokens if `vocab_size` is
    None; simulated, also clusters of such engines. The policy of `engine` is that of each run.
    """

    sizes: Sizes
    model: str
    engine: EngineConfig
    executor: Executor
    policy: Callable[[str, int], Policy]  # by name and token budget
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

    def server(self, policy: Policy, **settings: Unpack[EngineSettings]) -> Server:
        """Return the engine under a policy; `settings` replace those of the engine."""
        engine = replace(self.engine, policy=policy, **settings)
        if engine.cluster.is_single:
            return Server(engine, self.executor)
        assert self.executors is not None, "several engines are simulated only"
        return Server(engine, self.executors(engine.cluster))

    def run(
        self,
        requests: Sequence[Request] | Arrivals,
        policy: Policy,
        **settings: Unpack[EngineSettings],
    ) -> Ledger:
        """Serve `requests` under a policy, with the `settings` of `server`."""
        ledger = self.server(policy, **settings).serve(requests)
        self.replayed[policy.name].append(ledger.replayed_share)
        return ledger

    def batch_of(self, policy: str) -> int:
        """Return the batch that the policy has at these sizes."""
        stated = self.sizes.get("batches", {})
        return int(stated.get(policy, self.sizes["batch"]))

    def requests(self, dataset: str, number: int, seed: int) -> list[Request]:
        """Draw `number` requests that arrive as a Poisson process of rate 1."""
        # At rate 1, so that `at_rate` stretches the same gaps to every rate.
        workload = replace(
            datasets(self.sizes)[dataset],
            num_requests=number,
            arrivals="poisson",
            rate=1.0,
            seed=self.seed + seed,
        )
        return list(workload.generate(self.vocab_size).requests)

    def rate(self, dataset: str) -> float:
        """Return the requests per second at which a data set is served."""
        rates = self.sizes.get("rates", {})
        of_model = rates.get(self.model, rates.get(ANY, {}))
        if dataset in of_model:
            return float(of_model[dataset])
        return LOAD * self.saturation_rate(dataset)

    def saturation_rate(self, dataset: str) -> float:
        """Return the requests per second of the chunking policy, all there at once; they are served
        the first time.
        """
        if dataset not in self._saturation:
            # Of one seed, so that all rounds have the same rates.
            requests = self.requests(dataset, self.sizes["num_requests"], 0)
            server = self.server(self.chunking(self.sizes["budget"]))
            self._saturation[dataset] = server.saturation_rate(requests)
        return self._saturation[dataset]

    def chunking(self, budget: int) -> Policy:
        return self.policy(CHUNKING, budget)

    def named(self, names: Sequence[str], budget: int) -> dict[str, Policy]:
        return {name: self.policy(name, budget) for name in names}

    def slo(self, kind: str) -> Slo:
        """Return an objective of the sizes in this device's seconds: an option, maybe the model's,
        or settings.
        """
        if kind not in self._slos:
            slo = self._stated_slo(kind)
            self._slos[kind] = slo_in_seconds(slo, self.engine, self.executor)
        return self._slos[kind]

    def _stated_slo(self, kind: str) -> Slo:
        stated = self.sizes["slos"][kind]
        if not isinstance(stated, str):
            return Slo(name=kind, **stated)
        # Some objectives have an option for each model, whose iterations differ.
        of_model = f"{self.model}-{stated}"
        has_own = (CONF / "slo" / f"{of_model}.yaml").is_file()
        slo: Slo = load_option("slo", of_model if has_own else stated)
        return slo

    def serve(self, name: str, policy: Policy, dataset: str, seed: int) -> pd.DataFrame:
        """Serve a round's requests at the data set's rate under a policy; return their table."""
        requests = self.requests(dataset, self.sizes["num_requests"], seed)
        arriving = at_rate(requests, self.rate(dataset))
        ledger = self.run(arriving, policy, batch_size=self.batch_of(name))
        return ledger.requests()


def policy_of(name: str, budget: int) -> Policy:
    """Make a policy of conf/policy, with a token budget where it reads one. Raises UserError."""
    files = option_files("policy", ())
    require_one_of("a policy of task.sizes", name, files)
    cfg = OmegaConf.create({"policy": OmegaConf.load(files[name]), "chunk": budget})
    policy: Policy = build(cfg.policy)
    return policy


def datasets(sizes: Sizes) -> dict[str, Lognormal]:
    """The data sets of some sizes: options of the group workload, or settings of a `Lognormal`."""
    workloads = {}
    for name, stated in sizes["datasets"].items():
        if isinstance(stated, str):
            workloads[name] = _option(stated)
        else:
            workloads[name] = Lognormal(num_requests=1, seed=0, **stated)
    return workloads


@cache  # composing one takes a tenth of a second, and every point of a round asks
def _option(name: str) -> Lognormal:
    workload: Lognormal = load_option("workload", name)
    return workload


def longest(sizes: Sizes) -> int:
    workloads = datasets(sizes).values()
    return max(workload.max_len for workload in workloads)


def waited(requests: pd.DataFrame, *names: str) -> dict[str, float]:
    """Return the quantities of `WAITED` that are named."""
    latencies = latency(requests)
    return {name: latencies[WAITED[name]] for name in names}


def compared(
    dataset: str,
    by_series: Mapping[str, Values],
    others: Mapping[str, Values],
    units: Mapping[str, str] = MappingProxyType({}),
    x: float = 0.0,
    *,
    kind: Kind = "value",
) -> Iterator[Point]:
    """Yield the values of every series in their `units` (seconds), and over those of `others`, by
    what these are called, that have the quantity.
    """
    for series, values in by_series.items():
        for quantity, value in values.items():
            unit = units.get(quantity, "s")
            yield point(dataset, quantity, unit, series, value, x, kind=kind)
        for called, reference in others.items():
            if reference is not values:
                yield from ratios(dataset, called, series, values, reference, x, kind=kind)


def ratios(
    dataset: str,
    called: str,
    series: str,
    values: Values,
    reference: Values,
    x: float = 0.0,
    *,
    kind: Kind = "value",
) -> Iterator[Point]:
    """Yield the values of a series over those of another, of the quantities that both have."""
    for quantity, value in values.items():
        if quantity in reference:
            ratio = value / reference[quantity]
            yield point(dataset, f"{quantity} / {called}", "ratio", series, ratio, x, kind=kind)


def point(
    dataset: str,
    quantity: str,
    unit: str,
    series: str,
    y: float,
    x: float = 0.0,
    *,
    slo: str = "",
    kind: Kind = "value",
    resolution: Resolution = ANY_VALUE,
) -> Point:
    """Make a point in the panel of its data set, objective and quantity."""
    title = f"{dataset}, {slo}" if slo else dataset
    suffix = "" if unit == "ratio" else f" [{unit}]"
    labels = (("dataset", dataset), ("slo", slo), ("quantity", quantity))
    panel = f"{title}: {quantity}{suffix}"
    return Point(panel, series, float(x), Estimate(y), unit, kind, labels, resolution)

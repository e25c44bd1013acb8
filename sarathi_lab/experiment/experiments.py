"""The experiments: for each its timed batches and its served requests, at any `Setup` on any
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.experiment import iterations
from sarathi_lab.experiment.bench import Bench, Point, best_pd_ratio
from sarathi_lab.experiment.gpu_serving import Load
from sarathi_lab.experiment.reread import reread_units
from sarathi_lab.experiment.served_figures import Gain, gains
from sarathi_lab.experiment.sizes import Setup
from sarathi_lab.experiment.steady_state import lengths
from sarathi_lab.experiment.timed_figures import Unit, fig10_counted
from sarathi_lab.model.spec import ModelSpec

# Of P:D = C/(B-1), at which chunks and decodes run out together (section 4.3.3).
SHARES_OF_OPTIMUM = (0.25, 0.5, 1.0, 2.0, 4.0)


def _nothing_timed(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return []


def _nothing_served(setup: Setup, model: str) -> list[Gain]:
    return []


@dataclass(frozen=True)
class Experiment:
    """What one experiment asks of a device, and the seconds for which a CPU measures it."""

    name: str
    seconds: float
    timed: Callable[[Setup, ModelSpec], list[Unit]]
    served: Callable[[Setup, str], list[Gain]]
    is_papers: bool = True  # a figure or table of the paper
    extra: Callable[[Setup, ModelSpec], list[Unit]] = (
        _nothing_timed  # those of `timed` that the paper does not show
    )
    max_spread: float = 0.15  # half the interval over the median, above which a point has no number
    is_serving: bool = False  # requests that arrive over time, see `serving`


def _of_figure(name: str) -> Callable[[Setup, str], list[Gain]]:
    """The throughput points of one of the paper's figures."""
    return lambda setup, model: [gain for gain in gains(model, setup.served) if gain.figure == name]


def _fig03(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [Unit("fig03", _costs_of_a_token(setup, spec, batch)) for batch in setup.fig03_batches]


def _costs_of_a_token(
    setup: Setup, spec: ModelSpec, batch: int
) -> Callable[[Bench], Iterable[Point]]:
    """By operation, and decoded over prefilled, from the same two batches."""
    return lambda bench: chain(
        iterations.fig03(bench, spec, [batch], setup.seq_len),
        decode_over_prefill(bench, batch, setup.seq_len),
    )


def _decode_over_prefill(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [
        Unit("fig03", _bound(decode_over_prefill, batch, setup.seq_len))
        for batch in setup.fig03_batches
    ]


def decode_over_prefill(bench: Bench, batch: int, seq_len: int) -> Iterator[Point]:
    """The time of a token decoded over that of one prefilled (section 3.1)."""
    decodes = bench.seconds(bench.batch(make_batch(num_decodes=batch, context=seq_len))).times(
        1 / batch
    )
    prefills = bench.seconds(bench.batch(make_batch(prefill_tokens=seq_len, num_prefills=batch)))
    yield Point(
        "ratio", "decode / prefill", batch, decodes.over(prefills.times(1 / (seq_len * batch)))
    )


def _fig04(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [Unit("fig04", _bound(iterations.fig04, spec, [point])) for point in setup.fig04]


def _fig07(setup: Setup, spec: ModelSpec) -> list[Unit]:
    tokens = [Unit("fig07", _bound(iterations.fig07, spec, [n])) for n in setup.fig07_tokens]
    return tokens + _tile_steps(setup, spec)


def _tile_steps(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [Unit("fig07", _bound(tile_step, spec, n)) for n in setup.tiles]


def tile_step(bench: Bench, spec: ModelSpec, num_tokens: int) -> Iterator[Point]:
    """The time of a prefill of one token more than fills its tiles, over that of full tiles
    (section 4.4, Fig 7).
    """
    full, more = (
        bench.seconds(bench.batch(make_batch(prefill_tokens=n)))
        for n in (num_tokens, num_tokens + 1)
    )
    yield Point("step", "one token more", num_tokens, more.over(full))


def _fig08(setup: Setup, spec: ModelSpec) -> list[Unit]:
    sizes = [(name, batch) for name, batches in setup.fig08_batches.items() for batch in batches]
    own = (setup.served.seq_lens, setup.chunk)
    return [
        Unit("fig08", _bound(iterations.fig08, spec, {name: [batch]}, *own))
        for name, batch in sizes
    ]


def _fig10(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [
        Unit("fig10", _counted(setup, name, batch, chunk))
        for name, batches in setup.fig08_batches.items()
        for chunk in setup.fig10_chunks
        for batch in batches
    ]


def _counted(setup: Setup, name: str, batch: int, chunk: int) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: fig10_counted(bench, name, batch, chunk, setup.served.seq_lens)


def _fig13(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [
        Unit("fig13", _bound(iterations.fig13ab, spec, setup.fig13_chunks, {name: length}))
        for name, length in setup.fig13_lengths.items()
    ]


def _table2(setup: Setup, spec: ModelSpec) -> list[Unit]:
    return [Unit("table2", _bound(iterations.table2, spec, setup.seq_len, setup.decodes))]


def _table4(setup: Setup, spec: ModelSpec) -> list[Unit]:
    settings = [(setup.served.seq_lens[name], batch) for name, batch, _ in setup.served.table4]
    return [Unit("table4", _speedup(spec.name, n, batch, setup.chunk, n)) for n, batch in settings]


def _lengths(setup: Setup, spec: ModelSpec) -> list[Unit]:
    series = f"B={setup.batch} C={setup.chunk}"
    return [
        Unit("sequence_length", _speedup(series, n, setup.batch, setup.chunk, n))
        for n in setup.lengths
    ]


def _batches(setup: Setup, spec: ModelSpec) -> list[Unit]:
    series, length = f"{setup.first_length} C={setup.chunk}", setup.first_length
    return [
        Unit("batch_size", _speedup(series, length, batch, setup.chunk, batch))
        for batch in setup.batches
    ]


def _speedup(
    label: str, length: int, batch: int, chunk: int, x: float
) -> Callable[[Bench], Iterable[Point]]:
    """A decode speed-up; Table 4 has the model as its panel."""

    def points(bench: Bench) -> Iterator[Point]:
        yield Point(
            label, "decode_speedup", x, iterations.decode_speedup(bench, length, batch, chunk)
        )

    return points


def _bound(
    points: Callable[..., Iterable[Point]], *arguments: object
) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: points(bench, *arguments)


def sarathi_load(setup: Setup, length: int, batch: int, pd_ratio: float, chunk: int) -> Load:
    """Requests of about `length` tokens under SARATHI, their prompts whole chunks."""
    return Load("sarathi", *lengths(length, pd_ratio, chunk - (batch - 1)), batch, chunk)


def _optimum(setup: Setup, model: str) -> list[Gain]:
    """Throughput against P:D, counted in C/(B-1)."""
    length, batch = setup.first_length, next(iter(setup.served.batches.values()))
    return [
        Gain(
            "chunk_optimum",
            f"{length} B={batch}",
            f"C={chunk}",
            share,
            sarathi_load(setup, length, batch, pd, chunk),
        )
        for chunk in setup.served.chunks[:2]
        for share in SHARES_OF_OPTIMUM
        for pd in [share * best_pd_ratio(chunk, batch)]
    ]


def _length_gains(setup: Setup, model: str) -> list[Gain]:
    pd, series = best_pd_ratio(setup.chunk, setup.batch), f"B={setup.batch} C={setup.chunk}"
    loads = {n: sarathi_load(setup, n, setup.batch, pd, setup.chunk) for n in setup.lengths}
    return [
        Gain("sequence_length", series, "throughput_gain", n, load) for n, load in loads.items()
    ]


def _batch_gains(setup: Setup, model: str) -> list[Gain]:
    length, chunk = setup.first_length, setup.chunk
    loads = {
        b: sarathi_load(setup, length, b, best_pd_ratio(chunk, b), chunk) for b in setup.batches
    }
    return [
        Gain("batch_size", f"{length} C={chunk}", "throughput_gain", b, load)
        for b, load in loads.items()
    ]


def _budgets(setup: Setup, model: str) -> list[Gain]:
    """Time to the first token and between tokens by token budget, over those of the largest."""
    batch = next(iter(setup.served.batches.values()))
    prompt_len, num_decodes = lengths(setup.first_length, 4.0)
    *smaller, largest = (
        Load("sarathi_serve", prompt_len, num_decodes, batch, chunk) for chunk in setup.budgets
    )
    panel = f"{setup.first_length} B={batch}"
    return [
        Gain("token_budget", panel, quantity, float(load.chunk or 0), load, quantity, largest)
        for load in smaller
        for quantity in ("tbt_p99", "ttft_p50", "seconds_per_request")
    ]


def _serving(name: str, seconds: float) -> Experiment:
    """One of Sarathi-Serve's, under load: queues make its intervals wider than those of pairs of
    iterations.
    """
    return Experiment(
        name, seconds, _nothing_timed, _nothing_served, False, max_spread=0.5, is_serving=True
    )


_ALL = (
    Experiment("fig03", 15, _fig03, _nothing_served, extra=_decode_over_prefill),
    Experiment("fig04", 15, _fig04, _nothing_served),
    Experiment("fig07", 20, _fig07, _nothing_served, extra=_tile_steps),
    Experiment("fig08", 25, _fig08, _nothing_served),
    Experiment("fig09", 45, _nothing_timed, _of_figure("fig09")),
    Experiment("fig10", 20, _fig10, _nothing_served),
    Experiment("fig11", 45, _nothing_timed, _of_figure("fig11")),
    Experiment("fig12", 25, _nothing_timed, _nothing_served),  # see `stages`
    Experiment("fig13", 40, _fig13, _of_figure("fig13")),
    Experiment("table2", 10, _table2, _nothing_served),
    Experiment("table4", 15, _table4, _of_figure("table4")),
    Experiment("kv_reread", 30, reread_units, _nothing_served, is_papers=False),
    Experiment("chunk_optimum", 45, _nothing_timed, _optimum, is_papers=False),
    Experiment("sequence_length", 25, _lengths, _length_gains, is_papers=False),
    Experiment("batch_size", 25, _batches, _batch_gains, is_papers=False),
    Experiment("token_budget", 20, _nothing_timed, _budgets, is_papers=False),
    _serving("sarathi_serve_stalls", 40),
    _serving("sarathi_serve_ablation", 40),
    _serving("sarathi_serve_capacity", 120),
    _serving("sarathi_serve_budget", 60),
)
EXPERIMENTS: Mapping[str, Experiment] = {experiment.name: experiment for experiment in _ALL}

"""The paper's figures that are sums over single batches, cut into units that a time budget can
visit one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sarathi_lab.engine.compositions import chunks_of, make_batch
from sarathi_lab.experiment import iterations
from sarathi_lab.experiment.bench import FOUR, SEQ_LENS, Bench, Point, best_pd_ratio, weighted
from sarathi_lab.experiment.paper_points import paper_points
from sarathi_lab.experiment.steady_state import lengths
from sarathi_lab.experiment.throughput import TABLE_4
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import coarse_to_fine

FIG_10_CHUNKS = (256, 512)
DRY_UNITS = 2  # of each figure, in a dry run
# What the targets are judged by: decodes at 1K alone, prefills, and chunks with the paper's 17
# decodes beside them.
TARGET_DECODES, TARGET_PREFILLS, TARGET_CHUNKS = (1, 8, 32), (1024, 2048), (256, 512)
TARGET_CONTEXT, TARGET_BESIDE = 1024, 17


@dataclass(frozen=True)
class Unit:
    """Some points of a figure that are measured together."""

    figure: str
    points: Callable[[Bench], Iterable[Point]]


def units(spec: ModelSpec, *, is_dry: bool) -> list[list[Unit]]:
    """The units of every figure, its ends and middles first."""
    by_figure = [
        [Unit("targets", _time_targets)] if spec.name == "13b" else [],
        [Unit("table2", lambda bench: iterations.table2(bench, spec))],
        [
            Unit("fig08", _fig08(spec, name, b))
            for name, sizes in iterations.FIG_08_BATCHES.items()
            for b in sizes
        ],
        [Unit("table4", _table4(spec, *setting)) for setting in TABLE_4.get(spec.name, ())],
        [Unit("fig03", _fig03(spec, batch)) for batch in iterations.FIG_03_BATCHES],
        [
            Unit("fig13", _fig13(spec, chunk, name))
            for name in SEQ_LENS
            for chunk in iterations.FIG_13_CHUNKS
        ],
        [Unit("fig07", _fig07(spec, n)) for n in sorted(set(paper_points("fig07").x))],
        [Unit("fig04", _fig04(spec, *point)) for point in _fig04_points()],
        [
            Unit("fig10", _fig10(name, b, c))
            for c in FIG_10_CHUNKS
            for name, bs in _batches()
            for b in bs
        ],
    ]
    return [
        figure[:DRY_UNITS] if is_dry else coarse_to_fine(figure) for figure in by_figure if figure
    ]


def in_fair_turns(figures: Iterable[Sequence[Unit]], spent: Callable[[], float]) -> Iterator[Unit]:
    """All units, the next always of the figure that took least so far: cheap figures come to their
    end, and dear ones do not keep them waiting. `spent` is the time that passed.
    """
    waiting = [(0.0, number, deque(units)) for number, units in enumerate(figures)]
    heapify(waiting)
    while waiting:
        taken, number, left = heappop(waiting)
        start = spent()
        yield left.popleft()
        if left:
            heappush(waiting, (taken + spent() - start, number, left))


def fig10_counted(
    bench: Bench, name: str, batch: int, chunk: int, seq_lens: Mapping[str, int] = SEQ_LENS
) -> Iterator[Point]:
    """Fig 10 by counting, as the paper does: decodes at their mean context, and a prompt's chunks
    carry B - 1 of them.

    At P:D = C/(B-1) neither prompts nor decodes are left over.
    """
    seq_len, num_prefill = seq_lens[name], chunk - (batch - 1)
    prompt_len, num_decodes = lengths(seq_len, best_pd_ratio(chunk, batch), num_prefill)
    context = prompt_len + num_decodes // 2
    prompts = bench.batch(make_batch(prefill_tokens=prompt_len, num_prefills=batch))
    decodes = bench.batch(make_batch(num_decodes=batch, context=context))
    chunks = bench.batch(
        *chunks_of(prompt_len, num_prefill, num_decodes=batch - 1, context=context)
    )
    served = {
        "baseline": weighted((1.0, prompts), (num_decodes, decodes)),
        "sarathi": weighted((batch, chunks)),
    }
    for system, times in served.items():
        for operation, kinds in {**{kind: (kind,) for kind in FOUR}, "total": FOUR}.items():
            yield Point(
                f"{name} C={chunk}", f"{system} {operation}", batch, bench.seconds(times, kinds)
            )


def _time_targets(bench: Bench) -> Iterator[Point]:
    """No figure's points: only times, which the table of compositions keeps."""
    for num_decodes in TARGET_DECODES:
        bench.batch(make_batch(num_decodes=num_decodes, context=TARGET_CONTEXT))
    for num_tokens in TARGET_PREFILLS:
        bench.batch(make_batch(prefill_tokens=num_tokens))
    for chunk in TARGET_CHUNKS:
        num_prefill = chunk - TARGET_BESIDE
        bench.batch(
            make_batch(
                prefill_tokens=num_prefill, num_decodes=TARGET_BESIDE, context=TARGET_CONTEXT
            )
        )
    return iter(())


def _batches() -> Iterable[tuple[str, Sequence[int]]]:
    return [(name, list(sizes)) for name, sizes in iterations.FIG_10_BATCHES.items()]


def _fig04_points() -> list[tuple[str, str, int]]:
    """The single layer's; the panels of arithmetic intensity are a formula, which nothing
    measures.
    """
    points = paper_points("fig04")
    points = points[~points.panel.str.contains("intensity")]
    return [
        (str(p), str(s), int(x))
        for p, s, x in zip(points.panel, points.series, points.x, strict=True)
    ]


def _fig03(spec: ModelSpec, batch: int) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: iterations.fig03(bench, spec, [batch])


def _fig04(
    spec: ModelSpec, panel: str, series: str, batch: int
) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: iterations.fig04(bench, spec, [(panel, series, batch)])


def _fig07(spec: ModelSpec, num_tokens: int) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: iterations.fig07(bench, spec, [num_tokens])


def _fig08(spec: ModelSpec, name: str, batch: int) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: iterations.fig08(bench, spec, {name: [batch]})


def _fig10(name: str, batch: int, chunk: int) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: fig10_counted(bench, name, batch, chunk)


def _fig13(spec: ModelSpec, chunk: int, name: str) -> Callable[[Bench], Iterable[Point]]:
    return lambda bench: iterations.fig13ab(bench, spec, [chunk], {name: SEQ_LENS[name]})


def _table4(
    spec: ModelSpec, name: str, batch: int, pd_ratio: float
) -> Callable[[Bench], Iterable[Point]]:
    def points(bench: Bench) -> Iterator[Point]:
        speedup = iterations.decode_speedup(bench, SEQ_LENS[name], batch)
        yield Point(spec.name, "decode_speedup", SEQ_LENS[name], speedup)

    return points

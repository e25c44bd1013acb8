"""The paper's figures of end-to-end throughput, from real requests on the real engine, in the order
of their weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sarathi_lab.config.errors import RunError
from sarathi_lab.executor.torch.backend import WARM_UP_TOKENS
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.experiment.bench import LARGEST_BATCH, SEQ_LENS, best_pd_ratio
from sarathi_lab.experiment.gpu_serving import Load, Served, serve
from sarathi_lab.experiment.steady_state import lengths
from sarathi_lab.experiment.throughput import TABLE_4, Setting
from sarathi_lab.results.intervals import coarse_to_fine, spread
from sarathi_lab.tasks.gpu.context import Context

MOST_PASSES = 3
THROUGHPUT = "throughput"
WARM_UP_DECODES = 4


@dataclass(frozen=True)
class Scale:
    """Which lengths, batches, chunks and P:D are served; the first chunk is the paper's main
    one.
    """

    seq_lens: Mapping[str, int]
    batches: Mapping[str, int]
    chunks: Sequence[int]
    pd_ratios: Sequence[float]
    table4: Sequence[Setting]


def paper_scale(model: str) -> Scale:
    """The paper's own settings; of Fig 9's P:D a few beside each chunk's best, at length 1K."""
    return Scale(
        SEQ_LENS, LARGEST_BATCH, (256, 512, 128, 384, 64), (50.0, 100.0, 10.0, 5.0), TABLE_4[model]
    )


def dry_scale(model: str) -> Scale:
    """Small enough for a CPU in seconds."""
    return Scale({"1K": 48}, {"1K": 3}, (16,), (), [("1K", 2, 8.0)])


@dataclass(frozen=True)
class Gain:
    """A point: throughput under `load` over that of the request-level baseline on the same
    requests.

    Of another `quantity` of `Served` (seconds) it is the load's over that of `versus`.
    """

    figure: str
    panel: str
    series: str
    x: float
    load: Load
    quantity: str = THROUGHPUT
    versus: Load | None = None

    @property
    def baseline(self) -> Load:
        return self.versus or replace(self.load, policy="request_level", chunk=None)

    def of(self, baseline: Served, served: Served) -> float:
        """The point's value by one run of each."""
        if self.quantity == THROUGHPUT:
            return baseline.seconds_per_request / served.seconds_per_request
        return getattr(served, self.quantity) / getattr(baseline, self.quantity)


def gains(model: str, scale: Scale) -> list[Gain]:
    """The points of Figs 9, 11 and 13c and Table 4, the most telling first."""
    table4 = coarse_to_fine(list(_table4(model, scale)))
    by_length = [list(_fig11a(scale, name)) for name in coarse_to_fine(list(scale.seq_lens))]
    at_best = [
        gain
        for chunk in scale.chunks
        for name in scale.seq_lens
        for gain in _at_best(scale, name, chunk)
    ]
    by_pd = [gain for pd_ratio in scale.pd_ratios for gain in _by_pd(scale, pd_ratio)]
    first = [table4, *by_length] if model == "33b" else [by_length[0], table4, *by_length[1:]]
    return [gain for points in (*first, at_best, by_pd) for gain in points]


def _load(
    scale: Scale, policy: str, name: str, chunk: int, pd_ratio: float, batch: int | None = None
) -> Load:
    """Prompts are a whole number of chunks long, as in `Bench.sarathi`."""
    batch = batch or scale.batches[name]
    prompt_len, num_decodes = lengths(scale.seq_lens[name], pd_ratio, chunk - (batch - 1))
    return Load(policy, prompt_len, num_decodes, batch, chunk if policy == "sarathi" else None)


def _table4(model: str, scale: Scale) -> Iterator[Gain]:
    for name, batch, pd_ratio in scale.table4:
        load = _load(scale, "sarathi", name, scale.chunks[0], pd_ratio, batch)
        yield Gain("table4", model, "throughput_gain", scale.seq_lens[name], load)


def _fig11a(scale: Scale, name: str) -> Iterator[Gain]:
    pd_ratio = best_pd_ratio(scale.chunks[0], scale.batches[name])
    for policy in ("sarathi", "orca_best", "orca_worst"):
        load = _load(scale, policy, name, scale.chunks[0], pd_ratio)
        yield Gain("fig11", "a", policy, scale.seq_lens[name], load)


def _at_best(scale: Scale, name: str, chunk: int) -> Iterator[Gain]:
    """Each chunk at its own P:D: a point of Fig 13c and the peak of a line of Fig 9."""
    if chunk <= scale.batches[name]:
        return
    pd_ratio = best_pd_ratio(chunk, scale.batches[name])
    load = _load(scale, "sarathi", name, chunk, pd_ratio)
    yield Gain("fig13", "c_overall", name, chunk, load)
    yield Gain("fig09", name, f"C={chunk}", pd_ratio, load)


def _by_pd(scale: Scale, pd_ratio: float) -> Iterator[Gain]:
    """Other P:D at the shortest length, for Fig 9 and, with Orca, Fig 11b."""
    name = next(iter(scale.seq_lens))
    for chunk in scale.chunks[:2]:
        load = _load(scale, "sarathi", name, chunk, pd_ratio)
        yield Gain("fig09", name, f"C={chunk}", pd_ratio, load)
        yield Gain("fig11", "b", f"sarathi{chunk}", pd_ratio, load)
    yield Gain(
        "fig11",
        "b",
        "orca_best",
        pd_ratio,
        _load(scale, "orca_best", name, scale.chunks[0], pd_ratio),
    )


class Server:
    """Serves loads on one executor and remembers what each gave, run by run."""

    def __init__(self, executor: TorchExecutor, context: Context) -> None:
        self.executor = executor
        self.context = context
        self.runs: dict[Load, list[Served]] = {}
        self._too_large: set[Load] = set()
        self._prepared: tuple[int, int | None, int] | None = None

    def measure(self, points: Sequence[Gain], until: float) -> None:
        """Serve what `points` need, baseline and policy in turn, over and over until
        `context.elapsed` is `until`.

        The first point is measured whatever the time, after a shorter run of it that does not
        count.
        """
        self.warm_up(points[0])
        for repetition in range(1 if self.context.is_dry else MOST_PASSES):
            for number, gain in enumerate(points):
                if self.context.cuts_short(until) and (repetition or number):
                    return
                self.serve(gain, repetition + 1)

    def warm_up(self, point: Gain) -> None:
        """Serve a shorter run of `point` that does not count."""
        for load in (point.baseline, point.load):
            self._run(replace(load, num_decodes=WARM_UP_DECODES))

    def serve(self, point: Gain, times: int) -> None:
        """Serve baseline and policy of `point` one after the other, unless they were served so many
        times.
        """
        for load in (point.baseline, point.load):
            self._serve(load, times)

    def _serve(self, load: Load, times: int) -> None:
        if load in self._too_large or len(self.runs.get(load, ())) >= times:
            return
        served = self._run(load)
        if served is None:
            self._too_large.add(load)
            return
        self.runs.setdefault(load, []).append(served)
        tokens = (load.prompt_len + load.num_decodes) / served.seconds_per_request
        self.context.say(
            f"{load.policy} {load.chunk or ''} B={load.batch_size} P={load.prompt_len} "
            f"D={load.num_decodes}: "
            f"{tokens:.0f} tokens/s, {served.num_iterations} iterations in {served.duration:.1f} s"
        )

    def _run(self, load: Load) -> Served | None:
        """None for a load that cache or memory are too small for."""
        executor, vocab_size = self.executor, self.executor.model.spec.vocab_size
        sizes = {"num_blocks": executor.num_blocks, "block_size": executor.block_size}
        reason = "the cache is too small"
        try:
            self._prepare(load)
            if (served := serve(executor, load, **sizes, vocab_size=vocab_size)) is not None:
                return served
        except RunError as error:
            reason = str(error)
            while executor.num_in_flight:
                executor.collect()
        self.context.say(f"left out: {load}: {reason}")
        return None

    def _prepare(self, load: Load) -> None:
        """Warm up for the load's batch, chunk and lengths, as the engine does before a run: graphs
        are recorded.
        """
        wanted = (load.batch_size, load.chunk, load.longest)
        if wanted != self._prepared:
            self.executor.warm_up(
                batch_size=load.batch_size,
                chunk_tokens=load.chunk or WARM_UP_TOKENS,
                longest=load.longest,
                is_fixed=load.chunk is not None,
            )
            self._prepared = wanted

    def gain(self, point: Gain) -> tuple[float, float] | None:
        """Throughput over the baseline's, and the share by which it may be off; None if either was
        not served.
        """
        both = [self.seconds(load) for load in (point.baseline, point.load)]
        if not all(both):
            return None
        baseline, policy = both
        return float(np.median(baseline) / np.median(policy)), math.hypot(
            spread(baseline), spread(policy)
        )

    def seconds(self, load: Load) -> list[float]:
        """Seconds a request, run by run."""
        return [served.seconds_per_request for served in self.runs.get(load, ())]

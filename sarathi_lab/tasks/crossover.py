"""The task `crossover`: where chunked prefill gains, is neutral or loses, as a table and a map;
simulated, or measured with executor=torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import listed, one_of, refuse_unread, whole
from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int, require_number
from sarathi_lab.config.instantiate import build
from sarathi_lab.config.paths import make_folder, readable
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import kv_capacity
from sarathi_lab.experiment import advisor
from sarathi_lab.experiment.advisor import BASELINES, CELL, OUTCOMES, UNDECIDED
from sarathi_lab.experiment.scenario import Scenario, lengths, request_times
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.intervals import FEWEST_PAIRS
from sarathi_lab.results.provenance import provenance
from sarathi_lab.results.report import print_device
from sarathi_lab.results.result import Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.predicted import cost_of, policy_of_chunk

WORDS = {"gains": "gain", "neutral": "neutral", "loses": "lose", UNDECIDED: UNDECIDED}
Cells = Callable[[Callable[[Scenario], float]], pd.DataFrame]  # the map by seconds a request
ROUNDS = f"use {FEWEST_PAIRS}, the fewest that decide a cell, or more"


def _axis(example: int, minimum: int | None = 1) -> Any:
    """A field that holds a list such as that of the `example`; without `minimum`, of fractions."""
    fix = f"use a list such as [{example},{2 * example}]"
    number = partial(require_number, above=0, fix=fix)
    each = number if minimum is None else partial(require_int, minimum=minimum, fix=fix)
    twice = f"names a value twice; {fix}"
    return listed(each=each, complaint=f"names nothing to map; {fix}", twice=twice)


@dataclass(frozen=True)
class Crossover(Task):
    """Maps the policy's gain over P:D, P + D (tokens), batch and chunk (tokens).

    A device is measured in `rounds` of the whole map, beside those of the table `continues`, which
    an earlier run left. `versus` is another map's table, to say how far apart the two are.
    """

    reads = ("policy", "executor", "model", "hardware", "device", "dtype", "seed")
    pd_ratios: Sequence[float] = _axis(10, minimum=None)
    seq_lens: Sequence[int] = _axis(1024, minimum=2)
    batches: Sequence[int] = _axis(8)
    chunks: Sequence[int] = _axis(256)
    baseline: str = one_of(valid=BASELINES)
    rounds: int = whole(FEWEST_PAIRS, minimum=1, fix=ROUNDS)
    continues: str | None = None
    versus: str | None = None

    def check(self, cfg: DictConfig) -> None:
        backend, spec, kv_tokens = _subject(cfg)
        if isinstance(backend, SimulatedBackend):
            why = ": executor=simulated computes each cell once; drop it, or use executor=torch"
            refuse_unread(self, ["rounds", "continues"], why, "task.")
        policy_of, loads = policy_of_chunk(cfg), self._loads(kv_tokens)
        if not loads:
            raise UserError(
                f"task.batches={self.batches} of task.seq_lens={self.seq_lens} tokens exceed the "
                f"cache of {kv_tokens} tokens beside the weights; name smaller ones, or take "
                "another hardware"
            )
        cells = [(*load, chunk) for load in loads for chunk in self.chunks if chunk >= load[2]]
        if not cells:
            raise UserError(
                f"task.chunks={self.chunks} are all below the batches that fit, "
                f"{sorted({load[2] for load in loads})}; name a chunk of at least the batch"
            )
        for _, length, batch, chunk in cells:
            policy_of(chunk).validate(batch, length)
        if self.versus is not None:
            _read("versus", self.versus, "gain")
        if self.continues is not None:
            earlier, own = _read("continues", self.continues, "samples"), _labels(backend, spec)
            found = {tuple(cell) for cell in earlier[CELL[:4]].to_numpy()}
            if found != set(cells) or any((earlier[name] != own[name]).any() for name in own):
                raise UserError(
                    f"task.continues={self.continues} has other cells, or another model, dtype or "
                    "device; repeat its settings, or drop it"
                )

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        from sarathi_lab.results.plots.tasks import crossover_map  # matplotlib takes a second

        backend, spec, kv_tokens = _subject(cfg)
        is_simulated = isinstance(backend, SimulatedBackend)
        print_device(context, spec, backend, build(cfg.policy).name)
        num_loads = len(self._loads(kv_tokens)) * (1 if is_simulated else self.rounds)
        with progress_of("mapping", num_loads, "loads") as progress:
            cells = partial(
                advisor.crossover,
                self.pd_ratios,
                self.seq_lens,
                self.batches,
                self.chunks,
                policy=policy_of_chunk(cfg),
                kv_tokens=kv_tokens,
                on_load=progress,
            )
            if is_simulated:
                operation_times = cost_of(cfg)[2].operation_times
                table = cells(lambda one: sum(request_times(operation_times, one).values()))
            else:
                path = make_folder(context.run_dir, "the run's folder") / "crossover.csv"
                labels = _labels(backend, spec) | {"git_commit": provenance()["git_commit"]}
                for rounds in self._measured(cfg, backend, spec, kv_tokens, cells):
                    table = advisor.over_rounds(rounds).assign(**labels)
                    table.to_csv(path, index=False)  # what `continues` takes, if it is interrupted
        shown = _outcomes(table, kv_tokens)
        if self.versus is not None:
            other = _read("versus", self.versus, "gain")[[*CELL, "gain"]]
            table = table.merge(other.rename(columns={"gain": "versus"}), how="left", on=CELL)
            shown.append(_apart(table))
        counts = table.groupby(["baseline", "outcome"]).size()
        dtype = "" if is_simulated else f" in {backend.dtype_name}"
        title = f"{spec.name}{dtype} on {backend.device_name}"
        device = backend.hardware.name if is_simulated else backend.device_name
        return Result(
            tables={"crossover": table},
            figures={"crossover": crossover_map(table, title, baseline=self.baseline)},
            summary={
                f"{o}_vs_{b}": float(counts.get((b, o), 0))
                for b in BASELINES
                for o in (OUTCOMES if is_simulated else WORDS)
            },
            shown=shown,
            labels={"device": device},
            tags=["crossover", device],
        )

    def _loads(self, kv_tokens: int) -> list[tuple[float, int, int]]:
        return advisor.loads_that_fit(self.pd_ratios, self.seq_lens, self.batches, kv_tokens)

    def _measured(
        self, cfg: DictConfig, backend: Any, spec: ModelSpec, kv_tokens: int, cells: Cells
    ) -> Iterator[list[pd.DataFrame]]:
        """The rounds so far, after each: those before, and those that are measured now."""
        from sarathi_lab.executor.torch.steal_corrected_clock import exclude_stolen_time
        from sarathi_lab.experiment.measure import load_executor
        from sarathi_lab.experiment.measured_clock import DeviceClock
        from sarathi_lab.experiment.work import Room
        from sarathi_lab.tasks.subjects import BLOCK_SIZE

        rounds = []
        if self.continues is not None:
            rounds = advisor.rounds_of(_read("continues", self.continues, "samples"))
        policy = policy_of_chunk(cfg)(max(self.chunks))
        largest = [
            Scenario(policy, *lengths(seq_len, pd_ratio), batch)
            for pd_ratio, seq_len, batch in self._loads(kv_tokens)
        ]
        blocks = max(scenario.blocks(BLOCK_SIZE) for scenario in largest)
        longest = max(scenario.longest for scenario in largest)
        room = Room(BLOCK_SIZE * blocks, max(self.batches), longest + 1)
        clock = DeviceClock(load_executor(backend, spec, room))

        def request_seconds(scenario: Scenario) -> float:
            found = clock.served(scenario)
            return math.nan if found is None else found.seconds_per_request

        with exclude_stolen_time(clock.executor):
            for _ in range(self.rounds):
                clock.start_round()
                rounds.append(cells(request_seconds))
                yield rounds


def _subject(cfg: DictConfig) -> tuple[Any, ModelSpec, int]:
    """The device, the model with random weights, and the tokens of cache that fit beside them."""
    if isinstance(build(cfg.executor), SimulatedBackend):
        backend, spec, _ = cost_of(cfg)
        size = backend.dtype_bytes, backend.parallel
        return backend, spec, int(kv_capacity(spec, backend.hardware, *size))
    from sarathi_lab.tasks.subjects import BLOCK_SIZE, measured_subject  # torch takes seconds

    device, spec, checkpoint = measured_subject(cfg, "crossover")
    if checkpoint is not None:
        raise UserError(f"task=crossover takes random weights; drop model.path={cfg.model.path}")
    device.check(spec, BLOCK_SIZE)
    return device, spec, BLOCK_SIZE * device.kv_blocks(spec, BLOCK_SIZE)


def _labels(backend: Any, spec: ModelSpec) -> dict[str, str]:
    """Of a measured map: what must not differ between its rounds."""
    return {"model": spec.name, "dtype": backend.dtype_name, "device": backend.device_name}


def _read(name: str, path: str, column: str) -> pd.DataFrame:
    """An earlier map with a further `column`. Raises UserError where the file is none."""
    measured = " with executor=torch" if column == "samples" else ""
    fix = f"name a crossover.csv of this task{measured}"
    with readable(f"task.{name}={path}", fix, KeyError):
        table = pd.read_csv(Path(path))
        needed = table[[*CELL, column]]
    return needed.join(table[table.columns.difference(needed.columns)])


def _apart(table: pd.DataFrame) -> str:
    """How far the ratios of the other map lie from this one's, and how many outcomes are alike."""
    known = table.dropna(subset="versus")
    if known.empty:
        return "  task.versus: no cell is in both maps"
    off = (1 + known.versus) / (1 + known.gain) - 1
    at = int(off.abs().argmax())
    worst = known.iloc[at]
    return (
        f"  task.versus: ratios of {len(known)} cells in both maps lie {off.abs().median():.1%} "
        f"apart in the median ({off.median():+.1%} with sign), {off.iloc[at]:+.1%} at worst "
        f"over {worst.baseline} at {_place(worst)}"
    )


def _outcomes(table: pd.DataFrame, kv_tokens: int) -> list[str]:
    """By baseline how many cells gain, are neutral and lose, and the best and worst cell."""
    num_loads = len(table[["pd_ratio", "seq_len", "batch"]].drop_duplicates())
    lines = []
    for name, cells in table.groupby("baseline", sort=False):
        lines.append(
            f"  over {name}: {len(cells)} cells of {num_loads} loads that fit a cache of "
            f"{kv_tokens} tokens: {_in_words(cells)}; with the best chunk of each load "
            f"{_in_words(advisor.at_best_chunk(cells))}"
        )
        for which, index in (("best", cells.gain.argmax()), ("worst", cells.gain.argmin())):
            cell = cells.iloc[int(index)]
            lines.append(f"    {which} {cell.gain:+.1%} at {_place(cell)}")
    return lines


def _place(cell: Any) -> str:
    return f"P:D {cell.pd_ratio:g}, P + D {cell.seq_len}, batch {cell.batch}, chunk {cell.chunk}"


def _in_words(cells: pd.DataFrame) -> str:
    counts = cells.outcome.value_counts()
    said = [
        f"{counts.get(o, 0)} {word}" for o, word in WORDS.items() if o in OUTCOMES or o in counts
    ]
    return ", ".join(said)

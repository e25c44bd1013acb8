"""What a person sees of a run: the announcement, the progress bar, the tables and the picture of a sweep."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from sarathi_lab import plots
from sarathi_lab.advisor import Advice
from sarathi_lab.backend import Backend
from sarathi_lab.floor import Ceilings
from sarathi_lab.headings import HEADINGS
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.plan import Plan
from sarathi_lab.results import load_runs
from sarathi_lab.task import Place

SWEEP_COLUMNS = {
    "capacity": "capacity\n[req/s]",
    "throughput": "tokens/s",
    "throughput_vs_{}": "x\n{}",
    "decode_time_alone": "decode\nalone\n[ms]",
    "decode_time_marginal": "piggy-\nbacked\n[ms]",
    "decode_throughput_vs_{}": "decode\nx\n{}",
    "kv_reread_factor": "KV\nre-read",
    "ttft_p50": "TTFT\nP50\n[ms]",
    "tbt_p50": "TBT\nP50\n[ms]",
    "tbt_p99": "TBT\nP99\n[ms]",
    "time_over_floor": "time/\nfloor",
}
ADVICE_COLUMNS = {
    "throughput": "tokens/s",
    "throughput_vs_request_level": "x request_level",
    "throughput_vs_orca": "x orca",
    "kv_reread_factor": "KV re-read",
    "tbt_p50": "TBT P50 [ms]",
    "tbt_p99": "TBT P99 [ms]",
}
WIDTH_WITHOUT_TERMINAL = 132
_cautioned: set[tuple[str, str]] = set()  # by sweep


def console() -> Console:
    """Standard output, wide enough for the tables where it is a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False, markup=False)


def announce(plan: Plan, place: Place, ceilings: Ceilings, predicted_floor: float) -> None:
    """Say what is run on what, and the least time it can take, before it is measured."""
    print_plan(plan, place)
    out = console()
    out.print(f"  predicted floor {predicted_floor:.2f} s (ceilings {ceilings.describe()})")
    if plan.advice is not None:
        print_advice(plan.advice)


def print_device(place: Place, spec: ModelSpec, backend: Backend, policy: str) -> None:
    """The name of a run, and which model is on which device under which policy."""
    out = console()
    out.print(f"\n{place.name}", style="bold")
    out.print(
        f"  {spec.name} ({spec.num_params / 1e6:,.0f}M parameters, {backend.dtype_name}) on {backend.device_name}, "
        f"policy {policy}",
        soft_wrap=True,
    )
    print_cautions(backend.cautions(spec), place)


def print_cautions(cautions: Iterable[str], place: Place) -> None:
    """What to keep in mind of figures from a device: once a sweep, as it holds for the runs that follow, too."""
    for caution in cautions:
        if (place.group, caution) not in _cautioned:
            _cautioned.add((place.group, caution))
            console().print(f"  {caution}", soft_wrap=True)


def print_plan(plan: Plan, place: Place) -> None:
    """What is run on what."""
    print_device(place, plan.spec, plan.backend, str(plan.policy))
    cache = f"cache {plan.num_blocks} x {plan.block_size} tokens"
    console().print(f"  {plan.load.describe()}, batch {plan.batch_size}, {cache}")


def print_advice(advice: Advice) -> None:
    """The chunk that chunk=auto stands for, and the predictions that it was chosen by."""
    out = console()
    out.print(f"  chunk=auto is {advice.chunk}, by these predictions (* within 1 % of the most tokens/s)")
    columns = [name for name in ADVICE_COLUMNS if name in advice.table]
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    table.add_column("chunk", justify="right")
    for name in columns:
        table.add_column(ADVICE_COLUMNS[name], justify="right")
    for row in advice.table.to_dict("records"):
        mark = "*" if row["is_as_good"] else " "
        table.add_row(f"{row['chunk']} {mark}", *(_cell(name, row[name]) for name in columns))
    out.print(table)


def print_stopped(error: Exception) -> None:
    """Why a run did not come to its end; the next one of its sweep begins."""
    console().print(f"  stopped: {error}", soft_wrap=True)


@contextmanager
def progress_of(what: str, total: float, unit: str = "") -> Iterator[Callable[[float], None]]:
    """A progress bar over `total` steps; yields the function to call with the number of steps just done."""
    columns = (
        TextColumn(f"  {what}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        done, shown = 0.0, 0.0

        def advance(steps: float) -> None:
            nonlocal done, shown
            done += steps
            # Drawing costs milliseconds, a step may take less: redraw a few times a second only.
            if (now := time.monotonic()) - shown > 0.2:
                shown = now
                bar.update(task, completed=min(done, total), refresh=True)

        yield advance


def print_summary(plan: Plan, summary: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]) -> None:
    """One run's short table, with the ratio to each baseline beside each value."""
    table = Table(box=None, padding=(0, 2), pad_edge=True)
    table.add_column("")
    table.add_column(plan.policy.name, justify="right")
    for baseline in baselines:
        table.add_column(f"/ {baseline}", justify="right")
    for name, (heading, _, _) in HEADINGS.items():
        if name in summary:
            ratios = (_ratio(summary.get(f"{name}_vs_{baseline}")) for baseline in baselines)
            table.add_row(heading, _shown(name, summary[name]), *ratios)
    console().print(table)


def print_sweep(sweep_dir: Path, num_jobs: int) -> None:
    """One table over all finished runs of a sweep of `num_jobs` with the baselines beside them, and its picture."""
    runs = load_runs(sweep_dir)
    out = console()
    if runs.empty:
        out.print(f"no finished runs in {sweep_dir}")
        return
    baselines = runs[runs.is_baseline].sort_values(["policy", *plots.varying_labels(runs)], kind="stable")
    runs = pd.concat([baselines, runs[~runs.is_baseline]])
    num_missing = num_jobs - int((~runs.is_baseline).sum())
    which = f"The {len(runs)} finished runs, {num_missing} missing," if num_missing else f"All {len(runs)} runs"
    out.print(f"\n{which} of this sweep (ratios: run / baseline on the same requests)", style="bold")
    out.print(_sweep_table(runs))
    table = sweep_dir / "sweep.csv"
    places = [os.path.relpath(path, sweep_dir) for path in runs.path]
    runs.assign(path=places).drop(columns=["sweep", "versions", "baselines", "status"]).to_csv(table, index=False)
    picture = sweep_dir / "sweep.png"
    plots.sweep_overview(runs).savefig(picture, dpi=150)
    print_place("table", table)
    print_place("figure", picture)
    print_place("results", sweep_dir)


def print_place(what: str, where: Path | str) -> None:
    """A path or a command on a line of its own, unbroken, so that it can be copied."""
    console().print(f"{what:<8}{where}", soft_wrap=True)


def _sweep_table(runs: pd.DataFrame) -> Table:
    baselines = sorted(
        {name.removeprefix("throughput_vs_") for name in map(str, runs) if name.startswith("throughput_vs_")},
        reverse=True,
    )
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    table.add_column("run", no_wrap=True)
    columns: list[str] = []
    for pattern, heading in SWEEP_COLUMNS.items():
        for baseline in baselines if "{}" in pattern else ("",):
            if (name := pattern.format(baseline)) in runs:
                columns.append(name)
                table.add_column(heading.format(baseline.replace("_", "\n")), justify="right")
    for _, run in runs.iterrows():
        table.add_row(str(run["name"]), *(_cell(name, run[name]) for name in columns))
    return table


def _cell(name: str, value: float) -> str:
    if pd.isna(value):
        return "-"
    if "_vs_" in name:
        return _ratio(value)
    return _shown(name, value)


def _shown(name: str, value: float) -> str:
    _, factor, form = HEADINGS[name]
    if name == "decode_time_marginal" and value <= 0:
        return "noise"  # a difference of two times that are equal within the noise
    return format(value * factor, form)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"

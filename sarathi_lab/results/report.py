"""What a person sees of a run: the announcement, the progress bar, the tables and the picture of a
sweep.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from rich.table import Table

from sarathi_lab.config.console import console, print_place
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.columns import HEADINGS
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.plots import sweeps

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
    "time_over_roofline": "time/\nroofline",
}
ADVICE_COLUMNS = {
    "throughput": "tokens/s",
    "throughput_vs_request_level": "x request_level",
    "throughput_vs_orca": "x orca",
    "kv_reread_factor": "KV re-read",
    "tbt_p50": "TBT P50 [ms]",
    "tbt_p99": "TBT P99 [ms]",
}
_cautioned: set[tuple[str, str]] = set()  # by sweep


def print_device(place: RunContext, spec: ModelSpec, backend: Backend, policy: str) -> None:
    """The name of a run, and which model is on which device under which policy."""
    out = console()
    out.print(f"\n{place.name}", style="bold")
    out.print(
        f"  {spec.name} ({spec.num_params / 1e6:,.0f}M parameters, {backend.dtype_name}) on "
        f"{backend.device_name}, "
        f"policy {policy}",
        soft_wrap=True,
    )
    print_cautions(backend.cautions(spec), place)


def print_cautions(cautions: Iterable[str], place: RunContext) -> None:
    """What to keep in mind of figures from a device: once a sweep, as it holds for the runs that
    follow, too.
    """
    for caution in cautions:
        if (place.group, caution) not in _cautioned:
            _cautioned.add((place.group, caution))
            console().print(f"  {caution}", soft_wrap=True)


def print_caution(line: str) -> None:
    """What to keep in mind of the figures of one run."""
    console().print(f"  {line}", soft_wrap=True)


def print_summary(
    policy: str, summary: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]
) -> None:
    """One run's short table, with the ratio to each baseline beside each value."""
    table = Table(box=None, padding=(0, 2), pad_edge=True)
    table.add_column("")
    table.add_column(policy, justify="right")
    for baseline in baselines:
        table.add_column(f"/ {baseline}", justify="right")
    for name, (heading, _, _) in HEADINGS.items():
        if name in summary:
            ratios = (_ratio(summary.get(f"{name}_vs_{baseline}")) for baseline in baselines)
            table.add_row(heading, shown(name, summary[name]), *ratios)
    console().print(table)


def print_sweep(sweep_dir: Path, num_jobs: int) -> None:
    """One table over all finished runs of a sweep of `num_jobs` with the baselines beside them, and
    its picture.
    """
    runs = load_runs(sweep_dir)
    out = console()
    if runs.empty:
        out.print(f"no finished runs in {sweep_dir}")
        return
    baselines = runs[runs.is_baseline].sort_values(
        ["policy", *sweeps.varying_labels(runs)], kind="stable"
    )
    runs = pd.concat([baselines, runs[~runs.is_baseline]])
    num_missing = num_jobs - int((~runs.is_baseline).sum())
    which = (
        f"The {len(runs)} finished runs, {num_missing} missing,"
        if num_missing
        else f"All {len(runs)} runs"
    )
    out.print(
        f"\n{which} of this sweep (ratios: run / baseline on the same requests)", style="bold"
    )
    out.print(_sweep_table(runs))
    table = sweep_dir / "sweep.csv"
    places = [os.path.relpath(path, sweep_dir) for path in runs.path]
    runs.assign(path=places).drop(columns=["sweep", "versions", "baselines", "status"]).to_csv(
        table, index=False
    )
    picture = sweep_dir / "sweep.png"
    sweeps.sweep_overview(runs).savefig(picture, dpi=150)
    print_place("table", table)
    print_place("figure", picture)
    print_place("results", sweep_dir)


def _sweep_table(runs: pd.DataFrame) -> Table:
    baselines = sorted(
        {
            name.removeprefix("throughput_vs_")
            for name in map(str, runs)
            if name.startswith("throughput_vs_")
        },
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
        table.add_row(str(run["name"]), *(cell(name, run[name]) for name in columns))
    return table


def cell(name: str, value: float) -> str:
    if pd.isna(value):
        return "-"
    if "_vs_" in name:
        return _ratio(value)
    return shown(name, value)


def shown(name: str, value: float) -> str:
    _, factor, form = HEADINGS[name]
    if name == "decode_time_marginal" and value <= 0:
        return "noise"  # a difference of two times that are equal within the noise
    return format(value * factor, form)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"

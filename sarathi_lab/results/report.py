"""What a person sees of a run and of a sweep: device, cautions, tables, picture."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pandas as pd

from sarathi_lab.config.console import console, print_place
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.columns import HEADINGS, factor
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.result import Shown, show

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
UNSEEN = ("sweep", "status")  # of the runs' labels, in sweep.csv
_cautioned: set[tuple[str, str]] = set()  # by sweep


def print_device(place: RunContext, spec: ModelSpec, backend: Backend, policy: str) -> None:
    """The name of a run, and which model is on which device under which policy."""
    out = console()
    out.print(f"\n{place.name}", style="bold")
    model = f"{spec.name} ({spec.num_params / 1e6:,.0f}M parameters, {backend.dtype_name})"
    out.print(f"  {model} on {backend.device_name}, policy {policy}", soft_wrap=True)
    print_cautions(backend.cautions(spec), place)


def print_cautions(cautions: Iterable[str], place: RunContext) -> None:
    """What to keep in mind of a device's figures, printed once a sweep."""
    for caution in cautions:
        if (place.group, caution) not in _cautioned:
            _cautioned.add((place.group, caution))
            console().print(f"  {caution}", soft_wrap=True)


def summary_table(
    policy: str, summary: Mapping[str, float], baselines: Collection[str] = ()
) -> Shown:
    """One run's short table, with the ratio to each baseline beside each value."""
    rows = [
        {
            "": heading,
            policy: cell(name, summary[name]),
            **{f"/ {other}": _ratio(summary.get(f"{name}_vs_{other}")) for other in baselines},
        }
        for name, (heading, _, _) in HEADINGS.items()
        if name in summary
    ]
    return Shown(rows, left=[""])


def print_sweep(sweep_dir: Path, num_jobs: int) -> None:
    """Print and keep the table of a sweep of `num_jobs` with its baselines, and its picture."""
    from sarathi_lab.results.plots import sweeps  # matplotlib takes a second

    runs = load_runs(sweep_dir)
    if runs.empty:
        console().print(f"no finished runs in {sweep_dir}")
        return
    order = ["policy", *sweeps.varying_labels(runs)]
    baselines = runs[runs.is_baseline].sort_values(order, kind="stable")
    runs = pd.concat([baselines, runs[~runs.is_baseline]])
    which = f"All {len(runs)} runs"
    if num_missing := num_jobs - int((~runs.is_baseline).sum()):
        which = f"The {len(runs)} finished runs, {num_missing} missing,"
    title = f"{which} of this sweep (ratios: run / baseline on the same requests)"
    show([_sweep_table(runs, title)])
    table, picture = sweep_dir / "sweep.csv", sweep_dir / "sweep.png"
    places = [os.path.relpath(path, sweep_dir) for path in runs.path]
    dotted = [name for name in map(str, runs) if "." in name]  # settings, versions, baselines
    same = [one for one in dotted if runs[one].nunique() < 2 or one.startswith("baselines.")]
    runs.assign(path=places).drop(columns=[*UNSEEN, *same], errors="ignore").to_csv(
        table, index=False
    )
    sweeps.sweep_overview(runs).savefig(picture, dpi=150)
    for what, where in (("table", table), ("figure", picture), ("results", sweep_dir)):
        print_place(what, where)


def _sweep_table(runs: pd.DataFrame, title: str) -> Shown:
    prefix = "throughput_vs_"
    baselines = sorted((name for name in map(str, runs) if name.startswith(prefix)), reverse=True)
    baselines = [name.removeprefix(prefix) for name in baselines]
    headings = {
        pattern.format(baseline): heading.format(baseline.replace("_", "\n"))
        for pattern, heading in SWEEP_COLUMNS.items()
        for baseline in (baselines if "{}" in pattern else [""])
    }
    known = {name: heading for name, heading in headings.items() if name in runs}
    rows = [
        {"run": run["name"], **{heading: cell(name, run[name]) for name, heading in known.items()}}
        for run in runs.to_dict("records")
    ]
    return Shown(rows, left=["run"], unbroken=["run"], title=title)


def cell(name: str, value: float) -> str:
    """A quantity, or its ratio to a baseline, as people read it."""
    if pd.isna(value):
        return "-"
    if "_vs_" in name:
        return _ratio(value)
    if name == "decode_time_marginal" and value <= 0:
        return "noise"  # a difference of two times that are equal within the noise
    return format(value * factor(name), HEADINGS[name][2])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"

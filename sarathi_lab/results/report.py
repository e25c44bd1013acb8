"""Display of a run and of a sweep: device, cautions, tables, picture."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.console import amount, print_place, print_words
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.model.roofline import TILE
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import sweep_analysis
from sarathi_lab.results.conclusion import arrive_over_time, conclusion
from sarathi_lab.results.decode_cost import added_tiles
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.results.table import (
    HEADINGS,
    MILLISECONDS,
    display_unit,
    factor,
    heading,
    less_is_better,
)

GRAPH_USES = {"full": "in full", "piecewise": "in pieces", "none": "without"}
ITERATION_KINDS = {"prefill": "prompts", "decode": "decodes", "hybrid": "chunks with decodes"}
MARGINAL = "decode_time_marginal"
DECODES = ("decode_time_alone", MARGINAL)
WAIT_COLUMNS = {
    "ttft_p50": "TTFT\nP50",
    "ttft_p99": "TTFT\nP99",
    "tbt_p99": "TBT\nP99",
    "request_gap_p99": "worst\ngap\nP99",  # of a request
}
CLOSED_COLUMNS = {  # where all requests wait from the start
    "capacity": "capacity\n[req/s]",
    "decode_time_alone": "decode\nalone",
    MARGINAL: "decode\nadds",
    "kv_reread_factor": "KV\nread",
    "tbt_p99": WAIT_COLUMNS["tbt_p99"],  # not TTFT: it states how long the queue is
}
LOADED_COLUMNS = {
    "capacity": "capacity\n[req/s]",
    "slo_attainment": "within\nSLO",
    "goodput": "good\n[req/s]",
    **WAIT_COLUMNS,
}
OF_ALL = " (of all policies without a server)"  # a remark where a single run is described
UNSTEADY = "!"  # in the row of a run that is not steady
IN_PAIRS = "in pairs: the median of each round's or seed's ratio, not the ratio of two medians"
LINE = ("throughput", "ttft_p50", "tbt_p99")  # of a baseline
MAIN = (  # of a run; -v prints the others
    *("duration", "num_failed", "throughput", "decode_throughput", "decode_speedup"),
    *("kv_reread_factor", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "num_stalls"),
    *("request_gap_p99", "acceptance_rate", "tokens_per_decode"),
    *("slo_attainment", "goodput", "capacity", "bubble_fraction", "time_over_roofline"),
)
COUNTED_TIME = "counted time [s]"
MOST_NAMED = 3  # runs in a sentence
NOT_IN_CSV = ("sweep", "status", "swept")
_cautioned: set[tuple[str, str]] = set()  # by sweep


def print_device(place: RunContext, spec: ModelSpec, backend: Backend, policy: str) -> None:
    """Print the name of a run, its model, device and policy."""
    print_words(f"\n{place.name}", style="bold")
    model = f"{spec.name} ({spec.size}, {backend.dtype_name})"
    print_words(f"  {model} on {backend.device_name}, policy {policy}")
    print_cautions(backend.cautions(spec), place)


def print_cautions(cautions: Iterable[str], place: RunContext) -> None:
    """Print a device's cautions, or its peaks, once a sweep."""
    for caution in first_of_sweep(cautions, place):
        print_words(f"  {caution}")


def first_of_sweep(cautions: Iterable[str], place: RunContext) -> list[str]:
    """Return the cautions that no run of this sweep has shown, which count as shown from now on."""
    new = [caution for caution in cautions if (place.group, caution) not in _cautioned]
    _cautioned.update((place.group, caution) for caution in new)
    return new


def graph_use_lines(shares_by_kind: Mapping[str, Mapping[str, float]]) -> list[str]:
    """State how each kind of iteration was replayed as CUDA graphs (`metrics.graph_use_by_kind`),
    in one line; none without kinds.
    """
    kinds: list[str] = []
    for kind, shares in shares_by_kind.items():
        uses = [f"{share:.0%} {GRAPH_USES[use]}" for use, share in shares.items()]
        kinds.append(f"{ITERATION_KINDS[kind]} {', '.join(uses)}")
    return [f"  CUDA graphs: {'; '.join(kinds)}"] if kinds else []


def summary_line(summary: Mapping[str, float]) -> str:
    """Summarise a baseline in a line."""
    quantities = []
    for name in LINE:
        if name in summary:  # outputs of one token have no TBT
            label, _, unit = heading(name).partition(" [")
            value = cell(name, summary[name])
            quantities.append(f"{label} {value} {unit.rstrip(']')}".rstrip())
    return f"  {', '.join(quantities)}"


def summary_table(
    policy: str,
    summary: Mapping[str, float],
    baselines: Collection[str] = (),
    *,
    is_whole: bool = False,
    own: Collection[str] = (),
) -> list[DisplayTable | str]:
    """Return one run's main quantities, or all (`is_whole`), and their ratios to the baselines.

    `own` are the names of a user's metrics.
    """
    names = [name for name in (*HEADINGS, *own) if name in summary]
    shown = [name for name in names if is_whole or name in MAIN or name in own]
    rows = []
    for name in shown:
        row = {"": _run_heading(name, summary), policy: cell(name, summary[name])}
        for baseline in baselines:
            ratio = f"{name}_vs_{baseline}"
            row[f"/ {baseline}"] = cell(ratio, summary.get(ratio))
        rows.append(row)
    table = DisplayTable(rows, left=[""])
    num_hidden = len(names) - len(shown)
    if not num_hidden:
        return [table]
    return [table, f"  {num_hidden} more in summary.json; -v prints them"]


def _run_heading(name: str, summary: Mapping[str, float]) -> str:
    """Return the heading of a run's quantity; the time of a part is not that of the run."""
    if name == "duration" and "window_start" in summary:
        return COUNTED_TIME
    return heading(name)


def print_sweep(sweep_dir: Path, num_jobs: int, axes: Mapping[str, Any]) -> None:
    """Print and save a sweep's table, conclusion and picture (`axes` of `draw_sweep`)."""
    runs = load_runs(sweep_dir)
    if runs.empty:
        print_words(f"no finished runs in {sweep_dir}")
        return
    which = f"All {len(runs)} runs"
    if num_missing := num_jobs - int((~runs.is_baseline).sum()):
        which = f"The {len(runs)} finished runs, {num_missing} missing,"
    table = sweep_table(runs, f"{which} of this sweep")
    show([table, *notes_of(runs), *conclusion(runs)])
    print_place("table", _save_table(sweep_dir, runs))
    try:
        picture = save_picture(sweep_dir, runs, **axes)
    except UserError as error:  # a name that the finished runs lack
        print_words(f"  plot: {error}; drawn as without")
        picture = save_picture(sweep_dir, runs)
    print_place("figure", picture)
    print_place("results", sweep_dir)


def notes_of(runs: pd.DataFrame) -> list[str]:
    """List what a reader of a sweep's table must know beside its numbers."""
    return [*tile_note(runs), *unsteady_note(runs), *assumptions(runs)]


def unsteady_note(runs: pd.DataFrame) -> list[str]:
    """State how many runs under load are not steady, why, and what to do, a line for each cause."""
    if not {"is_steady", "is_overloaded"}.issubset(runs):
        return []
    swept = sweep_analysis.without_baselines(runs)
    others = runs.drop(index=swept.index)
    loads = set(swept["workload.arrivals"]) if "workload.arrivals" in swept else set()
    load = "workload.users" if loads == {"users"} else "workload.rate"
    is_overloaded, is_short = (swept["is_overloaded"] == 1, _are_too_short(swept))
    lines = []
    if is_overloaded.any():
        lines.append(
            f"{_share_of(is_overloaded)} overloaded ({UNSTEADY}): waits grow with the length of "
            f"the run; lower {load} or use task=capacity"
        )
    if is_short.any():
        lines.append(
            f"{_share_of(is_short)} too short ({UNSTEADY}): ever more requests are in service "
            "until the last one comes; raise workload.num_requests"
        )
    num_others = int((others["is_steady"] == 0).sum()) if len(others) else 0
    if num_others:
        lines.append(f"{num_others} of {len(others)} baselines are not steady ({UNSTEADY})")
    return lines


def _are_too_short(runs: pd.DataFrame) -> pd.Series:
    return (runs["is_steady"] == 0) & (runs["is_overloaded"] == 0)


def _share_of(is_so: pd.Series) -> str:
    number = int(is_so.sum())
    return f"{number} of {len(is_so)} runs {'is' if number == 1 else 'are'}"


def assumptions(runs: pd.DataFrame) -> list[str]:
    """List what runs had without its being stated: kinds of arrivals, and for each server's
    defaults the policies that have them.
    """
    if "assumed" not in runs:
        return []
    policies: dict[str, dict[str, None]] = {}  # by what was assumed
    for policy, words in runs[["policy", "assumed"]].dropna().itertuples(index=False):
        for part in words.replace(OF_ALL, "").split("; "):
            policies.setdefault(part, {})[policy] = None
    lines = []
    for part, named in policies.items():
        longer = [other for other in policies if other != part and other.endswith(f" {part}")]
        if longer:  # of policies that read the budget, too
            policies[longer[0]] |= named
    for part, named in policies.items():
        if not any(other != part and other.endswith(f" {part}") for other in policies):
            lines.append(f"assumed unless stated{_for_policies(list(named), runs)}: {part}")
    return lines


def _for_policies(policies: Sequence[str], runs: pd.DataFrame) -> str:
    """Name the policies, unless they are all of the sweep's."""
    if len(policies) == runs["policy"].nunique():
        return ""
    if len(policies) <= MOST_NAMED + 1:
        return f", for {', '.join(policies)}"
    shown = ", ".join(policies[:MOST_NAMED])
    return f", for {shown} and {len(policies) - MOST_NAMED} others"


def _save_table(folder: Path, runs: pd.DataFrame) -> Path:
    """Save sweep.csv without settings and versions that all runs share; returns its path."""
    places = [os.path.relpath(path, folder) for path in runs.path]
    dotted = [name for name in map(str, runs) if "." in name]
    same = [one for one in dotted if runs[one].nunique() < 2 or one.startswith("baselines.")]
    table = runs.assign(path=places).drop(columns=[*NOT_IN_CSV, *same], errors="ignore")
    table.to_csv(path := folder / "sweep.csv", index=False)
    return path


def save_picture(folder: Path, runs: pd.DataFrame, **axes: Any) -> Path:
    """Draw sweep.png and sweep.pdf (`draw_sweep`); returns the former's path. Raises UserError."""
    from sarathi_lab.results.plots.files import save_figure  # matplotlib takes a second
    from sarathi_lab.results.plots.sweeps import draw_sweep

    figure = draw_sweep(runs, **axes)
    figure.savefig(folder / "sweep.pdf")
    figure.set_layout_engine("none")  # it is laid out: once more takes as long as drawing
    path = folder / "sweep.png"
    save_figure(figure, path)
    return path


def sweep_table(runs: pd.DataFrame, title: str) -> DisplayTable:
    """Return a sweep's settings and main quantities in 80 columns: a row for all seeds and
    repetitions of the same settings (medians), baselines first, by the settings' values, without
    baselines that equal a swept run.
    """
    runs = sweep_analysis.in_order(runs.reset_index(drop=True)).reset_index(drop=True)
    runs = sweep_analysis.with_short_devices(runs)
    columns = {"throughput": "tokens/s"}
    is_over_time = arrive_over_time(runs)
    others = LOADED_COLUMNS if is_over_time else CLOSED_COLUMNS
    references = sweep_analysis.references(runs)
    for name in _compared_by_throughput(runs, references):
        runs = sweep_analysis.relative(runs, "throughput", name)
        columns[f"throughput_vs_{name}"] = f"x {name}".replace("_", "\n")
    by = _row_keys(runs)
    left_out = () if _has_room_for_decodes(by) else DECODES
    columns |= {name: words for name, words in others.items() if name not in left_out}
    known = [name for name in columns if name in runs]
    once, rows = sweep_analysis.without_repeated(runs, known), []
    table = sweep_analysis.medians(once, by, *known)
    num_samples = table["num_samples"].max()
    steady = sweep_analysis.are_steady(once, by)
    settings = {name: name.rpartition(".")[2].replace("_", "\n") for name in by[:-1]}
    for key, group in table.groupby(sweep_analysis.group_keys(table, by), sort=False):
        found, run = group.set_index("quantity").to_dict("index"), group.iloc[0]
        row = {words: sweep_analysis.text(run[name]) for name, words in settings.items()}
        row["policy"] += " *" if run["is_baseline"] else ""
        row["policy"] += "" if steady[key] else f" {UNSTEADY}"
        for name in known:
            scale, unit = _unit(name, runs[name])
            words = columns[name]
            if "_vs_" in name and num_samples > 1:
                words += "\nin pairs"
            heading = f"{words}{unit}\n{'v' if less_is_better(name) else '^'}"
            row[heading] = _median(name, found[name], scale) if name in found else "-"
        rows.append(row)
    signs = {
        f"medians of {num_samples}": num_samples > 1,
        IN_PAIRS: num_samples > 1 and bool(references),
        "*: baseline": once.is_baseline.any(),
        "equal runs once": len(once) < len(runs),
        "^ more, v less is better": True,
        "~: ratio within the noise": "~" in str(rows),
        f"{UNSTEADY}: not steady": not steady.all(),
        "with filling and draining": not is_over_time and _lacks_steady_part(runs),
    }
    notes = "; ".join(sign for sign, is_there in signs.items() if is_there)
    return DisplayTable(
        rows,
        left=["policy"],
        unbroken=["policy"],
        title=f"{title} ({notes})",
        keys=[*settings.values()],
    )


def _compared_by_throughput(runs: pd.DataFrame, references: Sequence[str]) -> Sequence[str]:
    """Return the policies that a sweep's table states the throughput over: where requests arrive
    over time, it follows from their rate, and an objective needs the room.
    """
    if not arrive_over_time(runs):
        return references
    return [] if "slo_attainment" in runs else references[:1]


def _row_keys(runs: pd.DataFrame) -> list[str]:
    """Return what the rows of a sweep's table differ in."""
    return list(dict.fromkeys(["policy", *sweep_analysis.varied(runs), "is_baseline"]))


def _has_room_for_decodes(row_keys: Collection[str]) -> bool:
    """Return whether settings leave room for the times of decodes."""
    return len(row_keys) <= 3


def tile_note(runs: pd.DataFrame) -> list[str]:
    """Name the runs on GPUs, real or simulated, in whose `decode adds` the products have a tile
    more than those of the chunk alone.
    """
    sizes = ["num_chunk_tokens", "num_piggybacked_decodes"]
    is_shown = _has_room_for_decodes(_row_keys(runs)) and not arrive_over_time(runs)
    if not is_shown or not {*sizes}.issubset(runs):
        return []
    measured = runs.dropna(subset=sizes)
    if "threads" in measured:
        measured = measured[measured.threads.isna()]  # products of a CPU have small tiles
    settings = sweep_analysis.varied(runs)
    names: dict[str, None] = {}
    for _, run in measured.iterrows():
        num_chunk, num_decodes = run[sizes]
        if added_tiles(num_chunk, num_decodes):
            values = [
                f"{name}={sweep_analysis.text(run[name])}" for name in settings if name != "policy"
            ]
            stated = [value for value in values if not value.endswith("=-")]
            name = " ".join([run.policy, *stated])
            names[f"{name} ({num_chunk:.0f} + {num_decodes:.0f} tokens)"] = None
    if not names:
        return []
    listed = ", ".join(list(names)[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return [f"decode adds includes a whole further tile of {TILE} tokens for {listed}{more}."]


def _lacks_steady_part(runs: pd.DataFrame) -> bool:
    """Return whether a run, of those that record their part that counts, counts all of it."""
    return "window_start" in runs and bool(runs.window_start.isna().any())


def _unit(name: str, values: pd.Series) -> tuple[float, str]:
    """Return the factor of values of this size, and the unit of times as a heading's end."""
    scale, _ = display_unit(name, float(values.max()))
    if factor(name) != MILLISECONDS:
        return scale, ""
    return scale, "\n[ms]" if scale == MILLISECONDS else "\n[s]"


def _median(name: str, row: Mapping[Any, Any], scale: float) -> str:
    if "_vs_" in name:
        return f"{'' if row['is_decided'] else '~'}{row['value']:.2f}"
    is_as_of_run = name == "slo_attainment" or (name == MARGINAL and row["value"] <= 0)
    return cell(name, row["value"]) if is_as_of_run else amount(row["value"] * scale)


def cell(name: str, value: float | None) -> str:
    """Format a quantity, or its ratio to a baseline."""
    if value is None or math.isnan(value):
        return "-"
    if "_vs_" in name:
        return f"{value:.2f}x"
    if name == MARGINAL and value <= 0:
        return "noise"  # a difference of two times that are equal within the noise
    number = value * factor(name)
    _, _, how = HEADINGS.get(name, (name, 1.0, "g"))
    return amount(number) if how.endswith("g") else format(number, how)


def operation_display(table: pd.DataFrame) -> DisplayTable:
    """Display an operation table, longest first."""
    rows = table.sort_values("seconds", ascending=False).drop(columns="roofline")
    rows = rows.rename(columns={"share": "of all", "time_over_roofline": "/ roofline"})
    formats = {"seconds": ".3f", "of all": ".1%", "/ roofline": ".2f"}
    return DisplayTable(rows.to_dict("records"), left=["operation"], formats=formats)

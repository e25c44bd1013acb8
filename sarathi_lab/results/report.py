"""Display of a run and of a sweep: device, cautions, tables, picture."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sarathi_lab.config.console import amount, counted, print_place, print_words, typed
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import sweep_analysis
from sarathi_lab.results.conclusion import arrive_over_time, conclusion, longer_run, name_of
from sarathi_lab.results.load import load_runs
from sarathi_lab.results.own_metrics import names_of_own
from sarathi_lab.results.result import DisplayTable, show
from sarathi_lab.results.table import (
    HEADINGS,
    MILLISECONDS,
    UNITS,
    Quantities,
    Row,
    Runs,
    Summary,
    display_unit,
    factor,
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
    "chunk_ridges": "chunk\n/ ridge",
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
    "duration",
    "num_failed",
    "throughput",
    "decode_throughput",
    "decode_speedup",
    "kv_reread_factor",
    "ttft_p50",
    "ttft_p99",
    "tbt_p50",
    "tbt_p99",
    "num_stalls",
    "request_gap_p99",
    "acceptance_rate",
    "tokens_per_decode",
    "slo_attainment",
    "goodput",
    "capacity",
    "bubble_fraction",
    "time_over_roofline",
)
COUNTED_TIME = "counted time [s]"
MOST_NAMED = 3  # runs in a sentence
NOT_IN_CSV = ("sweep", "status", "swept")
# Cautions that were printed, by sweep: its jobs run in this process, each with the same device.
_cautioned: defaultdict[str, set[str]] = defaultdict(set)
Labels = Mapping[str, str]  # headings of columns, by quantity or setting


class SweepAxes(TypedDict, total=False):
    """How a sweep is drawn, as the settings `plot` have it; None is chosen."""

    x: str | None
    hue: str | None
    col: str | None
    y: str | Sequence[str] | None
    kind: str | None


def print_device(
    context: RunContext,
    spec: ModelSpec,
    backend: Backend,
    policy: str,
) -> None:
    """Print the name of a run, its model, device and policy."""
    print_words(f"\n{context.name}", style="bold")
    model = describe_model(spec, backend)
    print_words(f"  {model} on {backend.device_name}, policy {policy}")
    cautions = backend.cautions(spec)
    print_cautions(cautions, context)


def describe_model(spec: ModelSpec, backend: Backend) -> str:
    """Describe a model as it is served, such as "llama3.1-8b (8,030M parameters, float16)"."""
    facts = [spec.size, backend.dtype_of(spec)]
    if spec.stored is not None:
        facts.append(f"weights in {spec.stored.name}")
    described = ", ".join(facts)
    return f"{spec.name} ({described})"


def print_cautions(cautions: Iterable[str], context: RunContext) -> None:
    """Print a device's cautions, or its peaks, once a sweep."""
    for caution in first_of_sweep(cautions, context):
        print_words(f"  {caution}")


def first_of_sweep(cautions: Iterable[str], context: RunContext) -> list[str]:
    """Return the cautions that no run of this sweep has shown, which count as shown from now on."""
    shown = _cautioned[context.group]
    new = [caution for caution in cautions if caution not in shown]
    shown.update(new)
    return new


def graph_use_lines(shares_by_kind: Mapping[str, Summary]) -> list[str]:
    """State how each kind of iteration was replayed as CUDA graphs (`metrics.graph_use_by_kind`),
    in one line; none without kinds.
    """
    if not shares_by_kind:
        return []
    kinds = []
    for kind, shares in shares_by_kind.items():
        uses = []
        for use, share in shares.items():
            described_use = GRAPH_USES[use]
            uses.append(f"{share:.0%} {described_use}")
        listed = ", ".join(uses)
        kinds.append(f"{ITERATION_KINDS[kind]} {listed}")
    described = "; ".join(kinds)
    return [f"  CUDA graphs: {described}"]


def summary_line(summary: Summary) -> str:
    """Summarise a baseline in a line."""
    quantities = []
    for name in LINE:
        if name in summary:  # outputs of one token have no TBT
            heading_of_line, value = _with_heading(name, summary[name])
            label, _, bracketed_unit = heading_of_line.partition(" [")
            unit = bracketed_unit.rstrip("]")
            quantity = f"{label} {value} {unit}"
            quantities.append(quantity.rstrip())
    listed = ", ".join(quantities)
    return f"  {listed}"


def summary_table(
    policy: str,
    summary: Summary,
    baselines: Collection[str] = (),
    *,
    is_whole: bool = False,
    own: Collection[str] = (),
) -> list[DisplayTable | str]:
    """Return one run's main quantities, or all (`is_whole`), and their ratios to the baselines.

    `own` are the names of a user's metrics.
    """
    main = {*MAIN, *own}
    rows = []
    num_hidden = 0
    # In the order of the headings, whatever the order in which they were computed.
    for name in (*HEADINGS, *own):
        if name not in summary:
            continue
        if not is_whole and name not in main:
            num_hidden += 1
            continue
        label, value = _with_heading(name, summary[name])
        if name == "duration" and "window_start" in summary:
            label = COUNTED_TIME  # the time of a part is not that of the run
        row = {"": label, policy: value}
        for baseline in baselines:
            ratio = f"{name}_vs_{baseline}"
            row[f"/ {baseline}"] = cell(ratio, summary.get(ratio))
        rows.append(row)
    table = DisplayTable(rows, left=[""])
    if not num_hidden:
        return [table]
    return [table, f"  {num_hidden} more in results.parquet; -v prints them"]


def _with_heading(name: str, value: float) -> tuple[str, str]:
    """Return the heading and the text of one value, a long time in seconds."""
    scale, label = display_unit(name, value)
    if scale == factor(name):
        return label, cell(name, value)
    return label, amount(value * scale)


def print_sweep(sweep_dir: Path, num_jobs: int, axes: SweepAxes) -> None:
    """Print and save a sweep's table, conclusion and picture (`axes` of `draw_sweep`)."""
    runs = load_runs(sweep_dir)
    if runs.empty:
        print_words(f"no finished runs in {sweep_dir}")
        return
    which = f"All {len(runs)} runs"
    is_job = ~runs.is_baseline
    num_missing = num_jobs - int(is_job.sum())
    if num_missing:
        finished = counted(len(runs), "finished run")
        which = f"The {finished}, {num_missing} missing,"
    table = sweep_table(runs, f"{which} of this sweep")
    notes = notes_of(runs)
    show([table, *notes, *conclusion(runs)])
    if runs.is_baseline.all():
        print_words("no run but the baselines has finished: table and figure show these alone")
    table_path = _save_table(sweep_dir, runs)
    print_place("table", table_path)
    try:
        picture_path = save_picture(sweep_dir, runs, **axes)
        print_place("figure", picture_path)
    except UserError as error:
        # The runs are done and tabled: an axis that they lack must not fail the sweep.
        print_words(f"  no figure: {error}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{typed('plot')} {sweep_dir} draws it") from None
    print_place("results", sweep_dir)


def notes_of(runs: Runs) -> list[str]:
    """List what a reader of a sweep's table must know beside its numbers."""
    return [
        *failed_note(runs),
        *unsteady_note(runs),
        *assumptions(runs),
    ]


def failed_note(runs: Runs) -> list[str]:
    """State how many requests of a sweep have no answer, and count in none of its columns."""
    if "num_failed" not in runs:
        return []
    num_failed = runs["num_failed"].fillna(0)
    total = int(num_failed.sum())
    if not total:
        return []
    num_runs = int(num_failed.gt(0).sum())
    all_runs = counted(len(runs), "run")
    failed = counted(total, "request")
    return [f"{failed} of {num_runs} of {all_runs} failed; the columns count the others"]


def unsteady_note(runs: Runs) -> list[str]:
    """State how many runs under load are not steady, why, and what to do, a line for each cause."""
    if not {"is_steady", "is_overloaded"}.issubset(runs):
        return []
    is_overloaded = runs["is_overloaded"] == 1
    is_unsteady = runs["is_steady"] == 0  # not of NaN: a run that was not judged
    is_short = is_unsteady & ~is_overloaded
    lines = []
    if is_overloaded.any():
        names = _names_of(runs, is_overloaded.to_numpy())
        remedy = _where_batch_is_full(runs[is_overloaded])
        lines.append(
            f"overloaded ({UNSTEADY}): {names}; requests come faster than they are served, so that "
            "times grow with the length of the run; lower workload.rate or workload.users, or use "
            f"task=capacity{remedy}"
        )
    if is_short.any():
        names = _names_of(runs, is_short.to_numpy())
        longer = longer_run(runs[is_short]) or "a longer run"
        lines.append(
            f"too short ({UNSTEADY}): {names}; whether requests come faster than they are served, "
            f"{longer} may show"
        )
    return lines


def _where_batch_is_full(overloaded: Runs) -> str:
    """State a higher batch as a remedy of runs whose sequences were all in use while the cache had
    room for more; "" of others.
    """
    if "fitting_sequences" not in overloaded:
        return ""
    num_fitting = overloaded["fitting_sequences"].min()
    if math.isnan(num_fitting):
        return ""
    return f"; the KV cache has room for about batch={num_fitting:.0f} (--max-num-seqs)"


def assumptions(runs: Runs) -> list[str]:
    """List what runs had without its being stated: kinds of arrivals, and for each server's
    defaults the policies, or their runs, that have them.
    """
    if "assumed" not in runs:
        return []
    indices = defaultdict(list)  # by what was assumed
    for index, assumed in runs["assumed"].dropna().items():
        for defaults in assumed.replace(OF_ALL, "").split("; "):
            indices[defaults].append(index)
    lines = []
    for defaults, of_runs in indices.items():
        is_meant = runs.index.isin(of_runs)
        stated_for = ""
        if not is_meant.all():
            names = _names_of(runs, is_meant)
            stated_for = f", for {names}"
        lines.append(f"assumed unless stated{stated_for}: {defaults}")
    return lines


def _names_of(runs: Runs, is_meant: NDArray[np.bool_]) -> str:
    """Name the runs that are meant, a policy by its name alone if all of its runs are."""
    settings = sweep_analysis.varied(runs)
    names: dict[str, None] = {}
    meant = runs[is_meant]
    for policy, of_policy in meant.groupby("policy", sort=False):
        num_runs = (runs["policy"] == policy).sum()
        if len(of_policy) == num_runs:
            names[str(policy)] = None
            continue
        for _, run in of_policy.iterrows():
            name = name_of(run, settings)
            names[name] = None
    listed = ", ".join(list(names)[:MOST_NAMED])
    num_others = len(names) - MOST_NAMED
    if num_others > 0:
        listed += f" and {num_others} others"
    return listed


def _save_table(folder: Path, runs: Runs) -> Path:
    """Save sweep.csv without settings and versions that all runs share; returns its path."""
    left_out = list(NOT_IN_CSV)
    for name in map(str, runs):
        if "." not in name:
            continue
        is_of_baselines = name.startswith("baselines.")
        if is_of_baselines or runs[name].nunique() < 2:
            left_out.append(name)
    folders = [os.path.relpath(path, folder) for path in runs.path]
    with_folders = runs.assign(path=folders)  # relative, so that the sweep can be moved
    table = with_folders.drop(columns=left_out, errors="ignore")
    path = folder / "sweep.csv"
    table.to_csv(path, index=False)
    return path


def save_picture(folder: Path, runs: Runs, **axes: Unpack[SweepAxes]) -> Path:
    """Draw sweep.png and sweep.pdf (`draw_sweep`); returns the former's path. Raises UserError."""
    from sarathi_lab.results.plots.files import save_figure  # matplotlib takes a second
    from sarathi_lab.results.plots.sweeps import draw_sweep

    figure = draw_sweep(runs, **axes)
    figure.savefig(folder / "sweep.pdf")  # of lines, for papers
    figure.set_layout_engine("none")  # it is laid out: once more takes as long as drawing
    path = folder / "sweep.png"
    save_figure(figure, path)
    return path


def sweep_table(runs: Runs, title: str) -> DisplayTable:
    """Return a sweep's settings and main quantities in 80 columns: a row for all seeds and
    repetitions of the same settings (medians), baselines first, by the settings' values, without
    baselines that equal a swept run.
    """
    # Rows of several sweeps may share labels, by which pandas would pair them.
    relabelled = runs.reset_index(drop=True)
    ordered = sweep_analysis.in_order(relabelled).reset_index(drop=True)
    shown = sweep_analysis.with_short_devices(ordered)
    references = sweep_analysis.references(shown)
    compared = _compared_by_throughput(shown, references)
    for name in compared:
        shown = sweep_analysis.relative(shown, "throughput", name)
    by = _row_keys(shown)
    columns = _columns(shown, compared, by)
    # Every job has its baselines beside it; equal ones would fill the table.
    once = sweep_analysis.without_repeated(shown, list(columns))
    medians = sweep_analysis.medians(once, by, *columns)
    num_samples = medians["num_samples"].max()
    headings, scales = _headings(shown, columns, num_samples)
    row_of_run = sweep_analysis.group_keys(once, by)
    is_unsteady = sweep_analysis.unsteady(once).groupby(row_of_run).any()
    settings = {}
    for name in by[:-1]:  # the last one, whether it is a baseline, is a sign at its policy
        settings[name] = _setting_heading(name)
    row_of_median = sweep_analysis.group_keys(medians, by)
    rows = []
    for key, of_row in medians.groupby(row_of_median, sort=False):
        row = _settings_of(of_row.iloc[0], settings)
        if is_unsteady[key]:
            row["policy"] += f" {UNSTEADY}"
        row |= _quantities_of(of_row, headings, scales)
        rows.append(row)
    is_sampled = num_samples > 1
    has_filling = not arrive_over_time(shown) and _lacks_steady_part(shown)
    signs = {
        f"medians of {num_samples}": is_sampled,
        IN_PAIRS: is_sampled and bool(compared),
        "*: baseline": once.is_baseline.any(),
        "equal runs once": len(once) < len(shown),
        "^ more, v less is better": True,
        "~: ratio within the noise": "~" in str(rows),
        f"{UNSTEADY}: not steady": is_unsteady.any(),
        "with filling and draining": has_filling,
    }
    shown_signs = []
    for sign, is_shown in signs.items():
        if is_shown:
            shown_signs.append(sign)
    notes = "; ".join(shown_signs)
    return DisplayTable(
        rows,
        left=["policy"],
        unbroken=["policy"],
        title=f"{title} ({notes})",
        keys=list(settings.values()),
    )


def _settings_of(run: pd.Series, headings: Labels) -> dict[str, str]:
    """Return a row's cells with its settings, which are those of `run`."""
    cells = {}
    for name, heading_of_setting in headings.items():
        cells[heading_of_setting] = sweep_analysis.text(run[name])
    if run["is_baseline"]:
        cells["policy"] += " *"
    return cells


def _quantities_of(
    medians: pd.DataFrame,
    headings: Labels,
    scales: Quantities,
) -> dict[str, str]:
    """Return a row's cells with its `medians`; "-" for a quantity that it lacks."""
    cells = {}
    median_of = medians.set_index("quantity").to_dict("index")
    for name, label in headings.items():
        cells[label] = "-"
        if name in median_of:
            cells[label] = _median(name, median_of[name], scales[name])
    return cells


def _headings(
    runs: Runs,
    columns: Labels,
    num_samples: int,
) -> tuple[Labels, Quantities]:
    """Return the heading of each quantity with unit and better side, and by what it is scaled."""
    headings = {}
    scales = {}
    for name, label in columns.items():
        # One factor for a column, or its numbers could not be compared by eye.
        scale, unit = _unit(name, runs[name])
        scales[name] = scale
        pairing = ""
        if "_vs_" in name and num_samples > 1:
            pairing = "\nin pairs"
        side = _better_side(name)
        headings[name] = f"{label}{pairing}{unit}\n{side}"
    return headings, scales


def _setting_heading(name: str) -> str:
    """Return the heading of a setting: the last part of its name, a word a line."""
    _, _, last = name.rpartition(".")
    return last.replace("_", "\n")


def _columns(
    runs: Runs,
    compared: Sequence[str],
    row_keys: Collection[str],
) -> dict[str, str]:
    """Return the headings of a sweep's quantities, of those that its runs have."""
    columns = {"throughput": "tokens/s"}
    for name in compared:
        label = f"x {name}"
        columns[f"throughput_vs_{name}"] = label.replace("_", "\n")
    columns |= LOADED_COLUMNS if arrive_over_time(runs) else CLOSED_COLUMNS
    if not _has_room_for_decodes(row_keys):
        for name in DECODES:
            columns.pop(name, None)
    for name in names_of_own(runs):
        columns[name] = name.replace("_", "\n")
    return {name: label for name, label in columns.items() if name in runs}


def _compared_by_throughput(runs: Runs, references: Sequence[str]) -> Sequence[str]:
    """Return the policies that a sweep's table states the throughput over: where requests arrive
    over time, it follows from their rate, and an objective needs the room.
    """
    if not arrive_over_time(runs):
        return references
    # Each baseline takes a column of 80.
    if "slo_attainment" in runs:
        return []
    return references[:1]


def _row_keys(runs: Runs) -> list[str]:
    """Return what the rows of a sweep's table differ in."""
    settings = sweep_analysis.varied(runs)
    target = "policy._target_"
    if target in settings:
        num_classes = runs.groupby("policy")[target].nunique()
        # The policy's name tells classes apart in fewer columns of text than their modules.
        if num_classes.max() == 1:
            settings.remove(target)
    keys = dict.fromkeys(["policy", *settings, "is_baseline"])
    return list(keys)


def _has_room_for_decodes(row_keys: Collection[str]) -> bool:
    """Return whether settings leave room for the times of decodes."""
    return len(row_keys) <= 3


def _lacks_steady_part(runs: Runs) -> bool:
    """Return whether a run was too short to have a part that counts alone."""
    if "window_start" not in runs:
        return False
    return bool(runs.window_start.isna().any())


def _unit(name: str, values: pd.Series) -> tuple[float, str]:
    """Return the factor of values of this size, and the unit of times as a heading's end."""
    largest = float(values.max())
    scale, _ = display_unit(name, largest)
    if factor(name) != MILLISECONDS:
        return scale, ""
    unit = "ms" if scale == MILLISECONDS else "s"
    return scale, f"\n[{unit}]"


def _better_side(name: str) -> str:
    """Return the sign of whether more or less of a quantity is better; "" of a user's own."""
    quantity, _, _ = name.partition("_vs_")
    if quantity not in UNITS:
        return ""
    return "v" if less_is_better(name) else "^"


def _median(name: str, row: Row, scale: float) -> str:
    value = row["value"]
    if "_vs_" in name:
        mark = "" if row["is_decided"] else "~"
        return f"{mark}{value:.2f}"
    is_below_noise = name == MARGINAL and value <= 0
    if name == "slo_attainment" or is_below_noise:
        return cell(name, value)
    return amount(value * scale)


def cell(name: str, value: float | None) -> str:
    """Format a quantity, or its ratio to a baseline."""
    if value is None or math.isnan(value):
        return "-"
    if "_vs_" in name:
        return f"{value:.2f}x"
    if name == MARGINAL and value <= 0:
        return "noise"  # a difference of two times that are equal within the noise
    number = value * factor(name)
    number_format = "g"
    if name in HEADINGS:
        _, _, number_format = HEADINGS[name]
    if number_format.endswith("g"):
        return amount(number)
    return format(number, f",{number_format}")


def operation_display(table: pd.DataFrame) -> DisplayTable:
    """Display an operation table, longest first."""
    longest_first = table.sort_values("seconds", ascending=False)
    rows = longest_first.drop(columns="roofline")
    rows = rows.rename(columns={"share": "of all", "time_over_roofline": "/ roofline"})
    formats = {"seconds": ".3f", "of all": ".1%", "/ roofline": ".2f"}
    return DisplayTable(rows.to_dict("records"), left=["operation"], formats=formats)

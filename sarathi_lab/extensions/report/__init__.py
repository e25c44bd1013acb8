"""`python -m sarathi_lab report`: what was run and found, on a page of HTML or in Markdown."""

from __future__ import annotations

import argparse
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import pandas as pd
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from sarathi_lab.config.console import print_place, progress_of, typed
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.config.paths import CONF, EXPERIMENTS, OUTPUTS, make_folder, read_object
from sarathi_lab.config.run_context import SweepRecord, as_command
from sarathi_lab.experiment.claims import HOLDS, HOLDS_WITHIN, in_words, kind_of, verdicts
from sarathi_lab.experiment.registry import FIGURES
from sarathi_lab.results import load, sweep_analysis
from sarathi_lab.results.conclusion import conclusion
from sarathi_lab.results.plots.files import as_png
from sarathi_lab.results.provenance import last_commit, provenance
from sarathi_lab.results.report import notes_of, sweep_table
from sarathi_lab.results.result import DisplayTable, markdown
from sarathi_lab.tasks.figures import draw

PAGE = "report.html"
CLAIMS_TITLE, EXPERIMENTS_TITLE = "Which claims hold", "Experiments and claims"
OTHERS = ("run.json", "failed.json", "hydra.yaml")  # files of runs, failures and Hydra's folders
MOST_ROWS = 200  # of a task's table on the page
CLAIMS = ["claim", "device", "verdict", "measured", "expected", "source", "note"]
DEVICE = ("device_name", "device")


@dataclass(frozen=True)
class Section:
    """A part of the page: conclusions, facts of the run by name, tables, and PNGs by title."""

    title: str
    sentences: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    tables: Sequence[DisplayTable] = ()


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=typed("report"),
        description="Write one page of HTML that needs no other file: what was run, what follows, "
        "tables that sort, pictures, claims with verdicts.",
    )
    text = "of a sweep, of a run, of any task or of several of these; or of recorded results, such "
    text += "as experiments or outputs/artifact. Without it: all recorded experiments of the lab"
    parser.add_argument("folder", nargs="?", type=Path, default=EXPERIMENTS, help=text)
    text = f"the page (default: {PAGE} in the folder, {OUTPUTS / PAGE} of the lab's experiments)"
    parser.add_argument("--out", type=Path, help=text)
    text = "print sentences and tables instead, to paste (a sweep's sweep.csv has all columns)"
    parser.add_argument("--markdown", action="store_true", help=text)
    options = parser.parse_args(args)
    work = partial(_print if options.markdown else _write, options.folder, options.out)
    return exit_code(work, "no page was written")


def _sections(folder: Path) -> list[Section]:
    """Return what is in `folder`. Raises UserError if there are no results."""
    runs = load.load_runs(folder)
    places = [] if runs.empty else list(runs.groupby("sweep"))
    places.sort(key=lambda pair: pair[1].started_at.max(), reverse=True)
    sections = [_of_sweep(Path(str(place)), rows, folder) for place, rows in places]
    tasks = sorted({path.parent for path in folder.rglob("config.yaml")}, reverse=True)
    tasks = [one for one in tasks if not any((one / name).exists() for name in OTHERS)]
    sections += [_of_task(place) for place in tasks if any(place.glob("*.csv"))]
    if not sections and load.recorded(folder):
        return _of_experiments(folder)
    if not sections:
        why = "has no finished run and no recorded result" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {why}; name the folder of a sweep, or none for all experiments")
    return sections


def _print(folder: Path, out: Path | None) -> int:
    if out is not None:
        raise UserError(f"--out {out} is for the page; send --markdown to a file by > {out}")
    for section in _sections(folder):
        print(f"## {section.title}\n", *section.sentences, sep="\n")
        for shown in filter(lambda shown: shown.rows, section.tables):
            print("", *filter(None, [shown.title]), "", markdown(shown.cells()), sep="\n")
    return 0


def _write(folder: Path, out: Path | None) -> int:
    """Write the page of what is in `folder`."""
    sections = _sections(folder)
    title = sections[0].title if len(sections) == 1 else f"{len(sections)} sweeps and runs"
    title = EXPERIMENTS_TITLE if sections[0].title == CLAIMS_TITLE else title
    is_records = folder.resolve() == EXPERIMENTS  # which a wheel's may not write to
    page = out or (OUTPUTS if is_records else folder) / PAGE
    make_folder(page.parent, "--out" if out else "the folder")
    write_page(title, sections, page)
    print_place("report", page)
    return 0


def write_page(title: str, sections: Sequence[Section], page: Path) -> None:
    """Write the file `page`, all texts escaped."""
    environment = Environment(
        loader=PackageLoader("sarathi_lab.extensions.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: b64encode(content).decode()
    template = environment.get_template("page.html")
    page.write_text(template.render(title=title, sections=sections, made=provenance()), "utf-8")


def _of_sweep(place: Path, runs: pd.DataFrame, folder: Path) -> Section:
    """A sweep, or a single run with its baselines; `folder` is what was asked for."""
    runs = runs.dropna(axis="columns", how="all")
    varying, swept = sweep_analysis.varied(runs), sweep_analysis.without_baselines(runs)
    title = f"Sweep of {', '.join(varying)}" if varying else str(swept.name.iloc[0])
    drawn = place / "sweep.png"  # maybe by axes that the user chose
    if drawn.is_file() and folder.resolve() in (place.resolve(), *place.resolve().parents):
        picture = drawn.read_bytes()
    else:
        from sarathi_lab.results.plots.sweeps import draw_sweep  # matplotlib takes a second

        picture = as_png(draw_sweep(runs))
    failed = _failed(place)
    return Section(
        title,
        sentences=[words.strip() for words in (*notes_of(runs), *conclusion(runs))],
        facts={**_facts(place, swept), "folder": str(place)},
        pictures={title: picture},
        tables=[sweep_table(runs, "Runs"), *([failed] if failed.rows else [])],
    )


def _of_task(place: Path) -> Section:
    """The tables and pictures that a task left, such as `task=advise` or an experiment."""
    given = _overrides(place)
    title = next((one for one in given if one.startswith(("task=", "experiment="))), place.name)
    tables = {path.name: pd.read_csv(path) for path in sorted(place.glob("*.csv"))}
    facts = {"command": as_command(given)} if given else {}
    return Section(
        title,
        facts={**facts, "folder": str(place)},
        pictures={path.stem: path.read_bytes() for path in sorted(place.glob("*.png"))},
        tables=[_shown(name, table) for name, table in tables.items() if len(table)],
    )


def _shown(name: str, table: pd.DataFrame) -> DisplayTable:
    texts = [*table.select_dtypes(exclude="number")]
    formats = dict.fromkeys(map(str, table.select_dtypes("float")), ".4g")
    title = name if len(table) <= MOST_ROWS else f"{name}, {MOST_ROWS} of {len(table)} rows"
    rows = table.head(MOST_ROWS).to_dict("records")
    return DisplayTable(rows, left=texts, formats=formats, title=title)


def _overrides(place: Path) -> list[str]:
    path = place / ".hydra" / "overrides.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else []


def _facts(place: Path, runs: pd.DataFrame) -> dict[str, str]:
    """What was run, where and with which versions, by the runs' labels and the sweep's record."""
    facts = {"runs": str(len(runs))}
    if (record := SweepRecord.find(place)) is not None:
        facts = {"command": record.command, "host": record.host}
        facts["runs"] = f"{len(runs)} of {record.num_jobs} finished"
    elif given := _overrides(place):  # a single run
        facts["command"] = as_command(given)
    facts |= {name: _all_of(runs, name) for name in ("device", "model", "dtype", "executor")}
    started = runs.started_at.dropna().map(datetime.fromisoformat)
    facts["started"] = f"{started.min():%Y-%m-%d %H:%M} UTC" if len(started) else ""
    facts["commit"] = _all_of(runs, "git_commit")
    packages = [str(name) for name in runs if str(name).startswith("versions.")]
    versions = (f"{name.partition('.')[2]} {_all_of(runs, name)}" for name in packages)
    facts["versions"] = ", ".join(versions)
    return {name: words for name, words in facts.items() if words}


def _all_of(runs: pd.DataFrame, name: str) -> str:
    return " or ".join(map(str, runs[name].dropna().unique())) if name in runs else ""


def _failed(place: Path) -> DisplayTable:
    found = {one.parent.name: read_object(one, load.AGAIN) for one in place.glob("*/failed.json")}
    rows = [{"run": run, "error": failure.get("error")} for run, failure in sorted(found.items())]
    return DisplayTable(rows, left=["run", "error"], title="Runs that failed")


def _of_experiments(root: Path) -> list[Section]:
    """The claims, then every experiment that has results."""
    judged = verdicts(root)
    ids = {kind: rows.id.nunique() for kind, rows in judged.groupby(judged.verdict.map(kind_of))}
    summary = f"Of {judged.id.nunique()} claims {ids.get(HOLDS, 0)} hold on at least one device, "
    summary += f"{ids.get(HOLDS_WITHIN, 0)} within a tolerance, "
    summary += f"simulated ones included, and {ids.get('fails', 0)} fail on at least one."
    counts = pd.crosstab(judged.device, judged.verdict).reset_index().to_dict("records")
    by_device = DisplayTable(counts, left=["device"], title="Verdicts by device")
    first = Section(CLAIMS_TITLE, [summary], tables=[by_device, _claims(judged)])
    folders = sorted({path.parent for path in root.glob("*/*/results")}, key=lambda path: path.name)
    sections = []
    with progress_of("drawing", len(folders)) as advance:
        for folder in folders:
            sections.append(_of_experiment(folder, root, judged))
            advance(1)
    return [first, *sections]


def _claims(judged: pd.DataFrame) -> DisplayTable:
    table = judged.assign(measured=[in_words(row) for row in judged.to_dict("records")])
    rows = table[CLAIMS].to_dict("records")
    return DisplayTable(rows, left=CLAIMS, title="In brackets the interval")


def _of_experiment(folder: Path, root: Path, judged: pd.DataFrame) -> Section:
    """What is recorded of an experiment, with the pictures beside it; drawn where there is none."""
    name, is_lab = folder.name, root.resolve() == EXPERIMENTS
    recorded = sorted((folder / "results").rglob("*.csv"))
    tables = {path: pd.read_csv(path).copy() for path in recorded}
    columns = {"policy", "is_baseline"}
    sweeps = {path: table for path, table in tables.items() if columns <= {*table}}
    has_settings = (CONF / "experiment" / f"{name}.yaml").is_file()
    named = [table[key] for table in tables.values() for key in DEVICE if key in table]
    facts = {
        "question": FIGURES[name].question if name in FIGURES else "",
        "command": f"python -m sarathi_lab.run experiment={name}" if has_settings else "",
        "devices": "; ".join(sorted({str(one) for column in named for one in column.dropna()})),
        "recorded": (is_lab and last_commit(folder)) or "",
    }
    files = sorted(folder.rglob("*.png"))
    pictures = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    if is_lab and not pictures and name in FIGURES:
        pictures = {name: as_png(draw(name))}
    claimed = judged[judged.experiment == name]
    devices = {path: path.parent.name for path in sweeps}
    return Section(
        name,
        sentences=[
            " ".join([f"{devices[path]}:", *conclusion(table)]) for path, table in sweeps.items()
        ],
        facts={name: words for name, words in facts.items() if words},
        pictures=pictures,
        tables=[
            *([_claims(claimed)] if len(claimed) else []),
            *(sweep_table(table, f"Runs on {devices[path]}") for path, table in sweeps.items()),
        ],
    )

"""`python -m sarathi_lab report`: what was run and its results, as a page or in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sarathi_lab.config.console import print_place, typed
from sarathi_lab.config.errors import UserError, exit_code
from sarathi_lab.config.paths import EXPERIMENTS, OUTPUTS, make_folder
from sarathi_lab.extensions.report.experiments import CLAIMS_TITLE, sections_of_experiments
from sarathi_lab.extensions.report.page import Section, write_page
from sarathi_lab.extensions.report.runs import sections_of_runs
from sarathi_lab.results import load
from sarathi_lab.results.result import markdown

PAGE = "report.html"
EXPERIMENTS_TITLE = "Experiments and claims"


def main(args: Sequence[str]) -> int:
    """Run a command line; returns 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=typed("report"),
        description="Write one page of HTML that needs no other file: what was run, what follows, "
        "tables that sort, pictures, claims with verdicts.",
    )
    text = "of a sweep, of a run or of several of these; or of recorded results, such as "
    text += "experiments or outputs/artifact. Without it: all recorded experiments of the lab"
    parser.add_argument("folder", nargs="?", type=Path, default=EXPERIMENTS, help=text)
    text = f"the page (default: {PAGE} in the folder, {OUTPUTS / PAGE} of the lab's experiments)"
    parser.add_argument("--out", type=Path, help=text)
    text = "print sentences and tables instead, to paste (a sweep's sweep.csv has all columns)"
    parser.add_argument("--markdown", action="store_true", help=text)
    options = parser.parse_args(args)
    make = _print if options.markdown else _write
    work = partial(make, options.folder, options.out)
    return exit_code(work, "no page was written")


def _sections(folder: Path) -> list[Section]:
    """Return what is in `folder`. Raises UserError if there are no results."""
    sections = sections_of_runs(folder)
    if sections:
        return sections
    if load.recorded(folder):
        return sections_of_experiments(folder)
    raise UserError(
        f"{folder} has no finished run and no recorded result; name the folder of a sweep, or none "
        "for all experiments"
    )


def _print(folder: Path, out: Path | None) -> int:
    if out is not None:
        raise UserError(f"--out {out} is for the page; send --markdown to a file by > {out}")
    for section in _sections(folder):
        print(f"## {section.title}\n", *section.sentences, sep="\n")
        for table in section.tables:
            if not table.rows:
                continue
            if table.title:
                print(f"\n{table.title}")
            print(f"\n{markdown(table.cells())}")
    return 0


def _write(folder: Path, out: Path | None) -> int:
    """Write the page of what is in `folder`."""
    sections = _sections(folder)
    title = f"{len(sections)} sweeps and runs"
    # Recorded experiments begin with their claims.
    if sections[0].title == CLAIMS_TITLE:
        title = EXPERIMENTS_TITLE
    elif len(sections) == 1:
        title = sections[0].title
    page = out
    setting = "--out"
    if page is None:
        # A wheel's records may be in a folder that its user can't write to.
        is_records = folder.resolve() == EXPERIMENTS
        parent = OUTPUTS if is_records else folder
        page = parent / PAGE
        setting = "the folder"
    make_folder(page.parent, setting)
    write_page(title, sections, page)
    print_place("report", page)
    return 0

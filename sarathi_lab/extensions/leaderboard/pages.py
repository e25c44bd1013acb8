"""Files of a board: tables (Markdown, CSV), pictures, and a page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from sarathi_lab.config.csv_files import write_csv
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.extensions.leaderboard import verdicts
from sarathi_lab.extensions.leaderboard.board import long_table, objectives
from sarathi_lab.extensions.leaderboard.picture import draw
from sarathi_lab.extensions.leaderboard.runs import CONTEST, SELECTION
from sarathi_lab.extensions.report.page import Section, write_page
from sarathi_lab.results.plots.files import as_png
from sarathi_lab.results.result import DisplayTable, markdown

SCORES = EXPERIMENTS / "lab" / "rankings" / "results" / "scores.csv"
RUNS = "runs.csv.gz"  # of a sweep, and recorded: ten thousand rows are large as text
PREDICTION = "rereads"  # that its README takes for the lab's
FEWEST_PAIRS = 30  # of a GPU, for a share that says something
SCORE = (
    "{row.called_right:.0f} of {row.called:.0f} called, of {row.pairs:.0f} ({row.gpu}; "
    "share {row.share_low:.2f} to {row.share_high:.2g}; a rule {row.rule_right_called:.0f})"
)
NOTES = (
    "Simulated, by operation times measured on the GPU and vLLM's host time; one engine.",
    "Group 1: the policies than which none is better by more than 1 % on the same requests; group "
    "2: the same among the rest, and so on. Any error among all pairs of a table's policies has a "
    "probability of 5 %. The order within a group has no meaning.",
    "1+: in group 1 or below, 2+: in group 2 or below. None of the group is distinguished from it "
    "as better, but it is further below the best of it than the median resolution (at least 10 %, "
    "at most 30 %); more seeds would decide.",
    "Resolution: how far below the best a policy of its noise must be to be distinguished from it.",
    "Budget: tokens of an iteration; of the default column the system's on this GPU, of rules of "
    "papers vLLM's; of the best column the one of the grid and the default with the highest "
    "goodput on other seeds than those shown. Policies without a budget have the same in both.",
    "Goodput: requests a second that are within the objective, the mean over the seeds. Latencies "
    "and slowdown: medians over the seeds, at the default budget.",
    "Slowdown, long / short: mean latency over that of the request alone, of long prompts by that "
    "of short ones; above 1 long prompts wait more.",
)


def write(ranked: pd.DataFrame, runs: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the files of a board into `folder`.

    They are runs.csv.gz, groups.csv (gzipped if it is long), a summary, a table and a picture a
    workload, and the page of all.

    Returns:
        The paths of the page and of the summary.
    """
    write_runs(runs.drop(columns="is_new"), folder)
    groups = long_table(ranked, runs)
    write_csv(folder / "groups.csv", groups.to_csv(index=False, float_format="%.5g"))

    # A page has facts by name.
    notes = {str(number): note for number, note in enumerate(NOTES, 1)}
    sections = [Section("How far to trust it", [score()], notes)]
    overview = [verdicts.first_groups(ranked)]
    for objective in objectives(runs):
        overview.append(verdicts.memberships(ranked, objective))
    summary = folder / "summary.md"
    _write_markdown(summary, "All contests", overview)
    sections.append(Section("All contests", tables=overview))

    for name, board in ranked.groupby("workload", sort=False):
        facts = facts_of(runs[runs.workload == name])
        sections.append(_write_workload(str(name), board, facts, folder))
    page = folder / "leaderboard.html"
    write_page("Leaderboard of policies", sections, page)
    return [page, summary]


def write_runs(runs: pd.DataFrame, folder: Path) -> None:
    """Write the runs that a board is made of."""
    # Without the time of day, the same runs are the same file.
    same_file = {"method": "gzip", "mtime": 0}
    runs.to_csv(folder / RUNS, index=False, float_format="%.5g", compression=same_file)


def _write_workload(
    name: str, board: pd.DataFrame, facts: Mapping[str, str], folder: Path
) -> Section:
    """Write table and picture of one workload, and return its section of the page."""
    picture = as_png(draw(board))
    file = folder / f"{name}.png"
    file.write_bytes(picture)
    tables = []
    for _, in_contest in board.groupby([*CONTEST, "objective"], sort=False):
        tables.append(verdicts.of_contest(in_contest))
    first_lines = [f"- {fact}: {text}" for fact, text in facts.items()]
    first_lines.append(f"![Goodput by policy]({name}.png)")
    _write_markdown(folder / f"{name}.md", name, tables, first_lines)
    return Section(name, facts=facts, pictures={name: picture}, tables=tables)


def _write_markdown(
    file: Path, title: str, tables: Sequence[DisplayTable], first_lines: Sequence[str] = ()
) -> None:
    paragraphs = [f"# {title}", score(), *first_lines]
    for table in tables:
        paragraphs.append(f"## {table.title}")
        paragraphs.append(markdown(table.cells()))
    text = "\n\n".join([*paragraphs, *NOTES])
    file.write_text(f"{text}\n")


def score() -> str:
    """Return how many pairs of real runs the simulator ranks rightly, by GPU with enough pairs: of
    those that it calls, with the interval of that share and what a rule without a simulator has.
    """
    table = pd.read_csv(SCORES)
    scores = table.query(f"prediction == '{PREDICTION}' and pairs >= {FEWEST_PAIRS}")
    sentences = []
    for row in scores.groupby("gpu").tail(1).itertuples():  # of all models, each GPU's last
        sentence = SCORE.format(row=row)
        sentences.append(sentence)
    return f"Pairs of real runs in their real order: {'; '.join(sentences)}; see lab/rankings."


def facts_of(runs: pd.DataFrame) -> dict[str, str]:
    """Return what the runs of one workload have in common, in words."""
    selection = runs[runs.role == SELECTION]
    evaluated = runs[runs.role != SELECTION]
    rates = []
    for device, rate in runs.groupby("device", sort=False).rate.first().items():
        rates.append(f"{rate:g} a second ({device})")
    commits = runs.git_commit.dropna().astype(str)
    return {
        "rate": ", ".join(rates),
        "seeds": _listed(evaluated.seed),
        "seeds that chose the best budgets": _listed(selection.seed) or "none",
        "budgets": _listed(selection.budget) or "the default",
        "commit": ", ".join(sorted(commits.unique())),
    }


def _listed(numbers: pd.Series) -> str:
    return ", ".join(f"{number:g}" for number in sorted(numbers.unique()))

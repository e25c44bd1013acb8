"""Tables and pictures of rankings: Markdown, CSV, HTML and PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sarathi_lab.config.console import amount
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.extensions.leaderboard.ranks import FAIRNESS, GOODPUT, PLACE
from sarathi_lab.extensions.report import Section, png, write_page
from sarathi_lab.results.result import DisplayTable, markdown
from sarathi_lab.results.table import factor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = EXPERIMENTS / "lab" / "rankings" / "results" / "scores.csv"
PREDICTION = "client"  # that its README takes for the lab's
HEADINGS = {
    "ttft_p99": "TTFT P99 [ms]",
    "tbt_p99": "TBT P99 [ms]",
    FAIRNESS: "slowdown, long / short",
    "throughput": "tokens/s",
    "joules_per_token": "J/token",
}
NOTES = (
    "Simulated, by operation times measured on the GPU and vLLM's host time; one engine.",
    "Medians over the seeds, in brackets the interval of the median (97 % of six seeds).",
    "Rank: 1 and the number of policies whose goodput is more than 1 % higher on the same "
    "requests, with all of the interval of the difference; equal ranks are ties.",
    "Goodput: requests a second that are within the objective.",
    "Slowdown, long / short: mean latency over that of the request alone, of long prompts by that "
    "of short ones; above 1 long prompts wait more.",
    "J/token: of prompts and outputs, by the power model in the GPU's file, without the host.",
)


def score() -> str:
    """Return how many pairs of real runs the simulator ranks rightly, by GPU."""
    table = pd.read_csv(SCORES)
    whole = table[table.prediction == PREDICTION].groupby("gpu").tail(1)  # all models come last
    pairs = [f"{one.right:.0f} of {one.pairs:.0f} ({one.gpu})" for one in whole.itertuples()]
    return f"Pairs of real runs in their real order: {', '.join(pairs)}; see lab/rankings."


def write(boards: Mapping[str, pd.DataFrame], runs: pd.DataFrame, folder: Path) -> list[Path]:
    """Write runs.csv, a table (Markdown, CSV) and a picture a workload, and the page of all."""
    for name, table in {"runs": runs, **boards}.items():
        kept = table.drop(columns="is_new")
        kept.to_csv(folder / f"{name}.csv", index=False, float_format="%.5g")
    sections = []
    for name, table in boards.items():
        group = runs[runs.workload == name]
        picture = png(draw(table, group))
        (folder / f"{name}.png").write_bytes(picture)
        shown = [display(rows) for _, rows in table.groupby(PLACE, sort=False)]
        facts = _facts(group)
        text = [f"# {name}", score(), *(f"- {key}: {words}" for key, words in facts.items())]
        text += [f"![Goodput by policy]({name}.png)"]
        text += [part for one in shown for part in (f"## {one.title}", markdown(one.cells()))]
        (folder / f"{name}.md").write_text("\n\n".join([*text, *NOTES]) + "\n")
        sections.append(Section(name, facts=facts, pictures={name: picture}, tables=shown))
    notes = {str(i): words for i, words in enumerate(NOTES, 1)}
    first = Section("How far to trust it", [score()], notes)
    write_page("Leaderboard of policies", [first, *sections], page := folder / "leaderboard.html")
    return [page, folder / "runs.csv"]


def _facts(runs: pd.DataFrame) -> dict[str, str]:
    rates = runs.groupby("device").rate.first()
    return {
        "rate": ", ".join(f"{rate:g} a second ({device})" for device, rate in rates.items()),
        "seeds": ", ".join(map(str, sorted(runs.seed.unique()))),
        "commit": ", ".join(sorted(map(str, runs.git_commit.dropna().unique()))),
    }


def places(boards: Mapping[str, pd.DataFrame]) -> DisplayTable:
    """Return the ranks of the sweep's policies beside recorded ones; of all the first five."""
    rows = list[dict[str, object]]()
    for board in boards.values():
        goodputs = board[board["quantity"].str.startswith(GOODPUT)]
        for place, table in goodputs.groupby([*PLACE, "quantity"], sort=False):
            new = table[table.is_new] if table.is_new.any() else table.nsmallest(5, "rank")
            for one in new.to_dict("records"):
                row = dict(zip(PLACE, place, strict=False)) | {"policy": one["policy"]}
                row |= {"objective": _objective(one["quantity"]), "goodput": _cell(one)}
                row |= {"best": f"{table.value.max():.3g}"}
                rows.append({**row, "rank": f"{one['rank']:.0f} of {len(table)}"})
    left = [*PLACE, "objective", "policy"]
    return DisplayTable(rows, left=left, title="Ranks by goodput [requests/s]")


def display(table: pd.DataFrame) -> DisplayTable:
    """Return one place's ranking, a row a policy."""
    rows = []
    for policy, group in table.groupby("policy", sort=False):
        found, row = group.to_dict("records"), dict[str, str]()
        for one in found:
            if one["quantity"].startswith(GOODPUT):
                row[f"rank, {_objective(one['quantity'])}"] = f"{one['rank']:.0f}"
        row["policy"] = f"{policy} (yours)" if one["is_new"] else str(policy)
        rows.append(row | {_heading(one["quantity"]): _cell(one) for one in found})
    return DisplayTable(
        rows, left=["policy"], title=f"{table.model.iloc[0]}, {table.device.iloc[0]}"
    )


def _heading(quantity: str) -> str:
    return HEADINGS.get(quantity, f"goodput, {_objective(quantity)} [requests/s]")


def _objective(quantity: str) -> str:
    return quantity.removeprefix(GOODPUT)


def _cell(one: Mapping[Any, Any]) -> str:
    scale = factor(one["quantity"])
    value, low, high = (amount(one[key] * scale) for key in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def draw(table: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Draw the goodput of each policy with its interval, a panel a place."""
    from sarathi_lab.results.plots import style  # matplotlib takes a second

    goodputs = table[table["quantity"].str.startswith(GOODPUT)]
    groups = list(goodputs.groupby(PLACE, sort=False))
    most = max(group.policy.nunique() for _, group in groups)
    figure, axes = style.panels(1, len(groups), (style.WIDTH, 1.5 + 0.17 * most))
    for ax, (place, group) in zip(axes, groups, strict=True):
        order = list(dict.fromkeys(group.policy))[::-1]
        for i, (name, rows) in enumerate(group.groupby("quantity", sort=False)):
            at = [order.index(one) + 0.25 * i for one in rows.policy]
            ends = [rows.value - rows.low, rows.high - rows.value]
            ax.errorbar(
                rows.value, at, xerr=ends, fmt=style.marker(i), ms=4, label=_objective(str(name))
            )
        ax.set_yticks(range(len(order)), order)
        ax.tick_params(axis="y", labelsize=7)
        rate = runs[runs.device == place[2]].rate.iloc[0]
        ax.set_title(f"{place[1]}, {place[2]}, {rate:g} a second", fontsize=9)
        ax.set(xlim=(0, None), xlabel="goodput [requests/s]")
    style.legend_below(figure, style.keys_of(axes))
    return style.finished(figure, f"{runs.workload.iloc[0]}: requests within the objective")

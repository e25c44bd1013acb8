"""`lab.load` and `Results`: tables of runs, of requests and of iterations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import OUTPUTS
from sarathi_lab.results import load as files
from sarathi_lab.results import sweep_analysis
from sarathi_lab.results.wandb_project import fetch_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("throughput", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "kv_reread_factor")
CLIENT_FILES = "sarathi_lab.extensions.replay.bench_files"  # the core imports no extension
CLIENT_SUFFIXES = (".json", ".jsonl", ".gz", ".db")
MOST_CURVES = 6  # in one picture
MOST_ROWS = 30  # of a table in a notebook
Reader = Callable[[], pd.DataFrame]


class Results:
    """Runs with their requests and iterations, read at first use.

    `runs` has a row a run, baselines included (`is_baseline`): settings by the names they are typed
    by, then quantities as in metrics.md, in SI units. `settings` are the columns of the former.
    `tables` has a reader a run for "requests" and "iterations".
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        settings: Collection[str],
        tables: Mapping[str, Sequence[Reader]] | None = None,
    ) -> None:
        self.runs = runs
        self.settings = [name for name in map(str, runs) if name in settings]
        self._tables = tables or {}

    def __repr__(self) -> str:
        number = len(sweep_analysis.without_baselines(self.runs))
        baselines, varied = len(self.runs) - number, ", ".join(self.varying) or "nothing"
        return f"Results({number} runs and {baselines} baselines; varying: {varied})"

    def _repr_html_(self) -> str | None:
        """Return the table and the sentence that the command line prints of a sweep, as HTML."""
        if not {"policy", "is_baseline", "throughput"} <= set(self.runs):
            return None
        from sarathi_lab.results.conclusion import conclusion
        from sarathi_lab.results.report import notes_of, sweep_table

        shown = sweep_table(self.runs, f"{len(self.runs)} runs")
        rows = pd.DataFrame(list(map(dict, shown.rows)))
        table = rows.to_html(index=False, border=0, max_rows=MOST_ROWS)
        return "\n".join(
            [f"<b>{shown.title}</b>", table, *notes_of(self.runs), *conclusion(self.runs)]
        )

    @cached_property
    def requests(self) -> pd.DataFrame:
        """Table with a row a request of every run, with the run's settings."""
        return self._tidy("requests")

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Table with a row an iteration of every run, with the run's settings."""
        return self._tidy("iterations")

    @property
    def varying(self) -> list[str]:
        """Settings in which the runs, without baselines, differ, seeds included; without those that
        follow from others.
        """
        return sweep_analysis.varied(self.runs, leaving=())

    @cached_property
    def names(self) -> list[str]:
        """Names of the runs by what varies, such as "sarathi, tiny, cpu, chunk 256"."""
        settings = [one for one in self.varying if one != "policy"]
        bare = sweep_analysis.IDENTITY
        short = ["" if one in bare else f"{one.rpartition('.')[2]} " for one in settings]
        names: list[str] = []
        runs = sweep_analysis.with_short_devices(self.runs)[["policy", *settings]]
        for policy, *values in runs.itertuples(index=False, name=None):
            pairs = zip(short, map(sweep_analysis.text, values), strict=True)
            name = ", ".join([policy, *(key + value for key, value in pairs if value != "-")])
            number = sum(one.partition(" (")[0] == name for one in names)
            names.append(f"{name} ({number + 1})" if number else name)
        return names

    def compare(
        self, to: str | Mapping[str, Any] = "orca", metrics: Sequence[str] = METRICS
    ) -> pd.DataFrame:
        """Return what varies, `metrics`, and their ratios `<metric>_vs_<to>` to the run of policy
        `to` (or with the settings in `to`) on the same work, a row a run.

        That run is one of the sweep, else a baseline; ratios without one are NaN. Raises UserError
        if there is none at all, or several for one run.
        """
        wanted = {"policy": to} if isinstance(to, str) else dict(to)
        name = "_".join(map(str, wanted.values()))
        keys = [one for one in sweep_analysis.same_work(self.runs) if one not in wanted]
        base, runs = self._matching(wanted), sweep_analysis.without_baselines(self.runs)
        shown = [one for one in metrics if one in self.runs]
        places = sweep_analysis.group_keys(base, keys)
        if not (twice := places[places.duplicated()]).empty:
            same = base[places == twice.iloc[0]]
            differ = [one for one in self.varying if same[one].map(str).nunique() > 1]
            raise UserError(
                f"to={to} is {len(same)} runs that differ in {', '.join(differ) or 'nothing'}; "
                f'name one, as in to={{"policy": ..., "chunk": 256}}'
            )
        ratios = sweep_analysis.ratios(runs, base, shown, keys)
        first = dict.fromkeys(["policy", *self.varying])
        return runs[[*first, *shown]].join(ratios.add_suffix(f"_vs_{name}"))

    def plot(
        self,
        x: str | None = None,
        hue: str | None = None,
        col: str | None = None,
        y: str | Sequence[str] | None = None,
        kind: str | None = None,
    ) -> Figure:
        """Draw the quantities `y` by settings on the x axis, as colours and as panels, by lines or
        as a heat map; what is not named is chosen. Raises UserError for unknown names.
        """
        from sarathi_lab.results.plots import sweeps  # matplotlib takes a second

        return sweeps.draw_sweep(self.runs, x=x, hue=hue, col=col, y=y, kind=kind)

    def plot_iterations(self, *names: str, x: str = "end") -> Figure:
        """Draw the iterations of runs (default: the best, and the reference) over time or, with
        x="iteration", by their number. Raises UserError for unknown names.
        """
        from sarathi_lab.results.plots.runs import curves

        if missing := [name for name in names if name not in self.names]:
            raise UserError(f"{missing[0]} is not one of the runs; use some of {self.names}")
        places = [self.names.index(name) for name in names] or self._best()
        if not (read := self._tables.get("iterations")):
            raise UserError("these runs have no tables of iterations; load them by their folders")
        shown = {self.names[place]: read[place]() for place in places}
        return curves(shown, x)

    def _best(self) -> list[int]:
        """Return the places of runs with most throughput, a policy each first, and a reference; of
        repetitions the best.
        """
        runs = self.runs.reset_index(drop=True).sort_values("throughput", ascending=False)
        is_base = runs["policy"] == sweep_analysis.reference(runs)
        others = sweep_analysis.without_baselines(runs[~is_base])
        settings = ["policy", *sweep_analysis.varied(others)]
        others = others[~sweep_analysis.group_keys(others, settings).duplicated()]
        order = [*others.drop_duplicates("policy").index, *others.index]
        return [*list(dict.fromkeys(order))[: MOST_CURVES - 1], *runs[is_base].index[:1]]

    def _matching(self, wanted: Mapping[str, Any]) -> pd.DataFrame:
        """Return the runs with these settings, or else the baselines."""
        for name in wanted:
            if name not in self.runs:
                raise UserError(f"{name} is not a setting of the runs; use some of {self.varying}")
        for runs in (sweep_analysis.without_baselines(self.runs), self.runs):
            matching = runs[(runs[list(wanted)] == pd.Series(wanted)).all(axis="columns")]
            if len(matching):
                return matching
        known = ", ".join(sorted(set(self.runs["policy"])))
        raise UserError(f"to={wanted} matches no run; their policies are {known}")

    def _tidy(self, kind: str) -> pd.DataFrame:
        tables = [read() for read in self._tables.get(kind, ())]
        if not tables:
            return pd.DataFrame()
        rows = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        whole = pd.concat(tables, ignore_index=True)
        settings = self.runs[[name for name in self.settings if name not in whole]]
        texts = settings.select_dtypes(exclude="number").columns  # repeated: kept once
        settings = settings.astype(dict.fromkeys(texts, "category"))
        return pd.concat([settings.take(rows).reset_index(drop=True), whole], axis="columns")


def load(*places: str | Path) -> Results:
    """Load runs below folders (default: `outputs`), of a project on W&B's server
    ("entity/project"), recorded of an experiment, such as "orca", or measured by a benchmark client
    (`extensions.replay.bench_files`).

    Projects and records have no tables of requests and iterations. Raises UserError for a
    place without runs.
    """
    parts = [_load(place) for place in places or (OUTPUTS,)]
    if len(parts) == 1:
        return parts[0]
    runs = pd.concat([part.runs for part in parts], ignore_index=True)
    tables: dict[str, list[Reader]] = {"requests": [], "iterations": []}
    for part, (kind, readers) in itertools.product(parts, tables.items()):
        readers += part._tables.get(kind, [pd.DataFrame] * len(part.runs))
    return Results(runs, [name for part in parts for name in part.settings], tables)


def _load(place: str | Path) -> Results:
    path = Path(place)
    if path.is_file() and path.suffix in CLIENT_SUFFIXES:
        benchmarks = import_module(CLIENT_FILES).read_benchmarks(path)
        runs = pd.DataFrame([{**one.labels, **one.summary} for one in benchmarks])
        requests = [partial(getattr, one, "requests") for one in benchmarks]
        return Results(runs, benchmarks[0].labels, {"requests": requests})
    if files.find_runs(path):
        runs = files.load_runs(path)
        if runs.empty:
            raise UserError(f"{place} holds no run that can be read; name another")
        readers = {"requests": files.load_requests, "iterations": files.load_iterations}
        tables = {
            kind: [partial(read, one) for one in runs["path"]] for kind, read in readers.items()
        }
        return Results(runs, runs.attrs["settings"], tables)
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(place)) and not path.exists():
        fetched = fetch_runs(str(place))
        runs = pd.DataFrame([{**settings, **summary} for settings, summary in fetched])
        return Results(runs, {name for settings, _ in fetched for name in settings})
    if path.exists() or str(place) not in files.recorded():
        raise UserError(
            f"{place} holds no finished run; name a folder such as outputs, a recorded experiment "
            "such as orca, or a project on W&B as entity/project"
        )
    table = files.load(str(place))
    return Results(table, [name for name in map(str, table) if sweep_analysis.is_setting(name)])

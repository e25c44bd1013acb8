"""`lab.load` and `Results`: tables of runs, of requests and of iterations."""

from __future__ import annotations

import re
from collections import Counter
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
        num_baselines = len(self.runs) - number
        varied = ", ".join(self.varying) or "nothing"
        return f"Results({number} runs and {num_baselines} baselines; varying: {varied})"

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
        settings = [name for name in self.varying if name != "policy"]
        names = []
        num_named: Counter[str] = Counter()
        for _, run in sweep_analysis.with_short_devices(self.runs).iterrows():
            values = [run["policy"]]
            for setting in settings:
                value = sweep_analysis.text(run[setting])
                if value == "-":
                    continue
                if setting not in sweep_analysis.IDENTITY:
                    value = f"{setting.rpartition('.')[2]} {value}"
                values.append(value)
            name = ", ".join(values)
            num_named[name] += 1
            if num_named[name] > 1:
                name += f" ({num_named[name]})"
            names.append(name)
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
        keys = [key for key in sweep_analysis.same_work(self.runs) if key not in wanted]
        base = self._matching(wanted)
        runs = sweep_analysis.without_baselines(self.runs)
        shown = [metric for metric in metrics if metric in self.runs]
        work = sweep_analysis.group_keys(base, keys)
        repeated = work[work.duplicated()]
        if not repeated.empty:
            same = base[work == repeated.iloc[0]]
            differ = [name for name in self.varying if same[name].map(str).nunique() > 1]
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

        for name in names:
            if name not in self.names:
                raise UserError(f"{name} is not one of the runs; use some of {self.names}")
        readers = self._tables.get("iterations")
        if not readers:
            raise UserError("these runs have no tables of iterations; load them by their folders")
        numbers = [self.names.index(name) for name in names] or self._best()
        return curves({self.names[number]: readers[number]() for number in numbers}, x)

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
        policies = ", ".join(sorted(set(self.runs["policy"])))
        raise UserError(f"to={wanted} matches no run; their policies are {policies}")

    def _tidy(self, kind: str) -> pd.DataFrame:
        tables = [read() for read in self._tables.get(kind, ())]
        if not tables:
            return pd.DataFrame()
        run_of_row = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        rows = pd.concat(tables, ignore_index=True)
        settings = self.runs[[name for name in self.settings if name not in rows]]
        texts = settings.select_dtypes(exclude="number").columns  # repeated: kept once
        settings = settings.astype(dict.fromkeys(texts, "category"))
        settings_of_rows = settings.take(run_of_row).reset_index(drop=True)
        return pd.concat([settings_of_rows, rows], axis="columns")


def load(*places: str | Path) -> Results:
    """Load runs below folders (default: `outputs`), of a project on W&B's server
    ("entity/project"), recorded of an experiment, such as "orca", or measured by a benchmark client
    (`extensions.replay.bench_files`).

    Projects and records have no tables of requests and iterations. Raises UserError for a
    place without runs.
    """
    loaded = [_load(folder) for folder in places or (OUTPUTS,)]
    if len(loaded) == 1:
        return loaded[0]
    runs = pd.concat([results.runs for results in loaded], ignore_index=True)
    settings: list[str] = []
    tables: dict[str, list[Reader]] = {"requests": [], "iterations": []}
    for results in loaded:
        settings += results.settings
        for kind, readers in tables.items():
            readers += results._tables.get(kind, [pd.DataFrame] * len(results.runs))
    return Results(runs, settings, tables)


def _load(place: str | Path) -> Results:
    path = Path(place)
    if path.is_file() and path.suffix in CLIENT_SUFFIXES:
        benchmarks = import_module(CLIENT_FILES).read_benchmarks(path)
        runs = pd.DataFrame([{**load.labels, **load.summary} for load in benchmarks])
        requests = [partial(getattr, load, "requests") for load in benchmarks]
        return Results(runs, benchmarks[0].labels, {"requests": requests})
    if files.find_runs(path):
        runs = files.load_runs(path)
        if runs.empty:
            raise UserError(f"{place} holds no run that can be read; name another")
        tables = {
            "requests": [partial(files.load_requests, folder) for folder in runs["path"]],
            "iterations": [partial(files.load_iterations, folder) for folder in runs["path"]],
        }
        return Results(runs, runs.attrs["settings"], tables)
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(place)) and not path.exists():
        fetched = fetch_runs(str(place))
        runs = pd.DataFrame([{**settings, **summary} for settings, summary in fetched])
        names: set[str] = set()
        for settings, _ in fetched:
            names |= settings.keys()
        return Results(runs, names)
    if path.exists() or str(place) not in files.recorded():
        raise UserError(
            f"{place} holds no finished run; name a folder such as outputs, a recorded experiment "
            "such as orca, or a project on W&B as entity/project"
        )
    table = files.load(str(place))
    return Results(table, [name for name in map(str, table) if sweep_analysis.is_setting(name)])

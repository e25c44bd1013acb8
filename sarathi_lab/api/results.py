"""`lab.load` and `Results`: tables of runs, of requests and of iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sarathi_lab.config.errors import UserError, suggestion
from sarathi_lab.config.instantiate import Values
from sarathi_lab.config.paths import OUTPUTS
from sarathi_lab.results import load as files
from sarathi_lab.results import sweep_analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("throughput", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "kv_reread_factor")
CLIENT_FILES = "sarathi_lab.extensions.replay.bench_files"  # the core imports no extension
CLIENT_SUFFIXES = (".json", ".jsonl", ".gz", ".db")
MOST_CURVES = 6  # in one picture
MOST_ROWS = 30  # of a table in a notebook
Reader = Callable[[], pd.DataFrame]
Tables = Mapping[str, Sequence[Reader]]  # by kind: "requests", "iterations"; a reader a run


class Results:
    """Runs with their requests and iterations, read at first use.

    `runs` has a row a run, baselines included (`is_baseline`): settings by the names they are typed
    by, then quantities as in metrics.md, in SI units. `settings` are the columns of the former.
    Of records there are no tables of requests and iterations.
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        settings: Collection[str],
        tables: Tables | None = None,
    ) -> None:
        self.runs = runs
        self.settings = [name for name in map(str, runs) if name in settings]
        # Readers of empty tables, so that every run has one.
        no_tables = [pd.DataFrame] * len(runs)
        self._tables: dict[str, Sequence[Reader]] = {}
        for kind in ("requests", "iterations"):
            self._tables[kind] = no_tables
        if tables is not None:
            self._tables.update(tables)

    def __repr__(self) -> str:
        runs = sweep_analysis.without_baselines(self.runs)
        num_runs = len(runs)
        num_baselines = len(self.runs) - num_runs
        varied = ", ".join(self.varying) or "nothing"
        counts = f"{num_runs} runs and {num_baselines} baselines"
        return f"Results({counts}; varying: {varied})"

    def _repr_html_(self) -> str | None:
        """Return the table and the sentence that the command line prints of a sweep, as HTML."""
        if not {"policy", "is_baseline", "throughput"} <= set(self.runs):
            return None
        from sarathi_lab.results.conclusion import conclusion
        from sarathi_lab.results.report import notes_of, sweep_table

        shown = sweep_table(self.runs, f"{len(self.runs)} runs")
        table = pd.DataFrame(list(map(dict, shown.rows)))
        lines = [
            f"<b>{shown.title}</b>",
            table.to_html(index=False, border=0, max_rows=MOST_ROWS),
            *notes_of(self.runs),
            *conclusion(self.runs),
        ]
        return "\n".join(lines)

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
        runs = sweep_analysis.with_short_devices(self.runs)
        names = []
        num_named: Counter[str] = Counter()
        for _, run in runs.iterrows():
            name = _name_of(run, self.varying)
            num_named[name] += 1
            number = num_named[name]
            if number > 1:
                name = f"{name} ({number})"
            names.append(name)
        return names

    def compare(self, to: str | Values = "orca", metrics: Sequence[str] = METRICS) -> pd.DataFrame:
        """Compare each run with another on the same work.

        Args:
            to: Policy of the other run, or its settings; one of the sweep, else a baseline.
            metrics: Quantities to show; those that no run has are left out.

        Returns:
            A row a run: what varies, `metrics`, and their ratios `<metric>_vs_<to>`, which are NaN
            where there is no other run.

        Raises:
            UserError: If there is no other run at all, or several for one run.
        """
        wanted: Values = {"policy": to}
        if not isinstance(to, str):
            wanted = to
        keys = []
        for key in sweep_analysis.same_work(self.runs):
            # A setting that the other run is chosen by can't agree between the two.
            if key not in wanted:
                keys.append(key)
        base = self._matching(wanted)
        self._refuse_several(base, keys, to)
        # A metric that no run has, such as waits of a closed batch, is left out.
        shown = []
        for name in metrics:
            if name in self.runs:
                shown.append(name)
        runs = sweep_analysis.without_baselines(self.runs)
        ratios = sweep_analysis.ratios(runs, base, shown, keys)
        # Of several settings all values, as in "throughput_vs_sarathi_256".
        values = map(str, wanted.values())
        ending = "_".join(values)
        named_ratios = ratios.add_suffix(f"_vs_{ending}")
        columns = dict.fromkeys(["policy", *self.varying, *shown])
        compared = runs[list(columns)]
        return compared.join(named_ratios)

    def _refuse_several(self, base: pd.DataFrame, keys: Sequence[str], to: object) -> None:
        """Raise UserError where several runs of `base` agree in `keys`."""
        work = sweep_analysis.group_keys(base, keys)
        is_repeated = work.duplicated(keep=False)
        if not is_repeated.any():
            return
        # As texts: lists can't be compared by pandas.
        values = base.loc[is_repeated, self.varying].map(str)
        varies = values.nunique() > 1
        differing = ", ".join(values.columns[varies]) or "nothing"
        raise UserError(
            f"to={to} is {len(values)} runs that differ in {differing}; name one, as in "
            'to={"policy": ..., "chunk": 256}'
        )

    def plot(
        self,
        x: str | None = None,
        hue: str | None = None,
        col: str | None = None,
        y: str | Sequence[str] | None = None,
        kind: str | None = None,
    ) -> Figure:
        """Draw quantities by settings; what is not named is chosen.

        Args:
            x: Setting on the x axis.
            hue: Setting that has colours.
            col: Setting that has panels.
            y: Quantities.
            kind: "line" or "heat".

        Raises:
            UserError: For unknown names.
        """
        from sarathi_lab.results.plots import sweeps  # matplotlib takes a second

        return sweeps.draw_sweep(self.runs, x=x, hue=hue, col=col, y=y, kind=kind)

    def plot_iterations(self, *names: str, x: str = "end") -> Figure:
        """Draw the iterations of runs (default: the best of each policy) over time or, with
        x="iteration", by their number. Raises UserError for unknown names.
        """
        from sarathi_lab.results.plots.runs import curves

        for name in names:
            if name not in self.names:
                similar = suggestion(name, self.names)
                raise UserError(f"{name} is not one of the runs{similar}; use some of {self.names}")
        numbers = list(map(self.names.index, names)) or self._best()
        readers = self._tables["iterations"]
        tables = {}
        for number in numbers:
            table = readers[number]()
            if table.empty:
                raise UserError(
                    "these runs have no tables of iterations; load them by their folders"
                )
            tables[self.names[number]] = table
        return curves(tables, x)

    def _best(self) -> list[int]:
        """Return the places of the runs with most throughput, one of each policy."""
        runs = self.runs.reset_index(drop=True)
        in_order = runs.sort_values("throughput", ascending=False)
        best_of_policies = in_order.drop_duplicates("policy")
        numbers = best_of_policies.index[:MOST_CURVES]
        return list(numbers)

    def _matching(self, wanted: Values) -> pd.DataFrame:
        """Return the runs with these settings, or else the baselines."""
        for name in wanted:
            if name not in self.runs:
                similar = suggestion(name, self.varying)
                raise UserError(
                    f"{name} is not a setting of the runs{similar}; use some of {self.varying}"
                )
        # A swept run counts before a baseline with the same settings.
        values = pd.Series(wanted)
        for runs in (sweep_analysis.without_baselines(self.runs), self.runs):
            is_equal = runs[list(wanted)] == values
            matching = runs[is_equal.all(axis="columns")]
            if len(matching):
                return matching
        of_runs = []
        for name in wanted:
            values_of_runs = self.runs[name].dropna().unique()
            of_runs.append(f"{name}: {', '.join(map(str, values_of_runs)) or 'none'}")
        raise UserError(f"to={wanted} matches no run; the runs have {'; '.join(of_runs)}")

    def _tidy(self, kind: str) -> pd.DataFrame:
        """Return the rows of all runs' tables of a kind, each beside its run's settings."""
        readers = self._tables[kind]
        tables = [read() for read in readers]
        rows = pd.concat(tables, ignore_index=True)
        # A column of the tables, such as the number of an iteration, counts before a setting.
        settings = self.runs[self.settings]
        settings = settings.drop(columns=list(rows), errors="ignore")
        # As categories, texts that millions of rows repeat take a byte each.
        texts = settings.select_dtypes(exclude="number")
        types = dict.fromkeys(texts, "category")
        settings = settings.astype(types)
        runs = np.arange(len(tables))
        num_rows = list(map(len, tables))
        run_of_row = np.repeat(runs, num_rows)
        settings_of_rows = settings.take(run_of_row)
        settings_of_rows = settings_of_rows.reset_index(drop=True)
        return pd.concat([settings_of_rows, rows], axis="columns")


def _name_of(run: pd.Series, varying: Sequence[str]) -> str:
    """Return a run's policy and the other settings in which it may differ from others."""
    values = [run["policy"]]
    for setting in varying:
        value = sweep_analysis.text(run[setting])
        if setting == "policy" or value == "-":  # "-": it does not read the setting
            continue
        if setting not in sweep_analysis.IDENTITY:
            short_name = setting.rpartition(".")[2]
            value = f"{short_name} {value}"
        values.append(value)
    return ", ".join(values)


def load(*places: str | Path) -> Results:
    """Load runs of one or several places.

    Args:
        places: Folders (default: `outputs`), recorded experiments such as "orca", and files of a
            benchmark client (`extensions.replay.bench_files`).

    Returns:
        All runs. Recorded experiments have no tables of requests and iterations.

    Raises:
        UserError: For a place without runs.
    """
    if not places:
        places = (OUTPUTS,)
    results = list(map(_load, places))
    if len(results) == 1:
        return results[0]
    runs = []
    settings = set()
    requests: list[Reader] = []
    iterations: list[Reader] = []
    for result in results:
        runs.append(result.runs)
        settings.update(result.settings)
        requests += result._tables["requests"]
        iterations += result._tables["iterations"]
    all_runs = pd.concat(runs, ignore_index=True)
    return Results(all_runs, settings, {"requests": requests, "iterations": iterations})


def _load(source: str | Path) -> Results:
    """Load one of the sources that `load` takes."""
    path = Path(source)
    name = str(source)
    if path.is_file() and path.suffix in CLIENT_SUFFIXES:
        return _load_benchmarks(path)
    if files.find_runs(path):
        return _load_folder(path)
    if path.exists() or name not in files.recorded():
        raise UserError(
            f"{name} holds no finished run; name a folder such as outputs, or a recorded "
            "experiment such as orca"
        )
    table = files.load(name)
    settings = filter(sweep_analysis.is_setting, map(str, table))
    return Results(table, list(settings))


def _load_benchmarks(path: Path) -> Results:
    """Load what a benchmark client measured."""
    reader = import_module(CLIENT_FILES)
    benchmarks = reader.read_benchmarks(path)
    runs = []
    requests = []
    for benchmark in benchmarks:
        runs.append({**benchmark.labels, **benchmark.summary})
        requests.append(partial(pd.DataFrame, benchmark.requests))
    settings = benchmarks[0].labels
    return Results(pd.DataFrame(runs), settings, {"requests": requests})


def _load_folder(path: Path) -> Results:
    """Load the runs below a folder."""
    runs = files.load_runs(path)
    if runs.empty:
        raise UserError(f"{path} holds no run that can be read; name another")
    folders = runs["path"]
    tables = {
        "requests": [partial(files.load_requests, folder) for folder in folders],
        "iterations": [partial(files.load_iterations, folder) for folder in folders],
    }
    return Results(runs, runs.attrs["settings"], tables)

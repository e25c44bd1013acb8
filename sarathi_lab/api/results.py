"""What runs found, as tables: of runs, of requests, of iterations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import OUTPUTS
from sarathi_lab.results import load as files
from sarathi_lab.results import sweep_analysis, wandb_runs
from sarathi_lab.results.bench_files import Benchmark, is_benchmark_file, read_benchmarks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("throughput", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "kv_reread_factor")
MOST_CURVES = 6  # that can be told apart in one picture
MOST_ROWS = 30  # of the table that a notebook shows


class Results:
    """Runs and what is known of them; tables are made when they are asked for first.

    `runs` has a row a run, baselines included (`is_baseline`): settings by the names they are typed
    by, then quantities as in METRICS.md, in SI units. `settings` are the columns of the former.
    `tables` reads a run's requests and iterations by its index; where it is None there are none.
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        settings: Collection[str],
        tables: Mapping[str, Sequence[Callable[[], pd.DataFrame]]] | None = None,
    ) -> None:
        self.runs = runs
        self.settings = [name for name in map(str, runs) if name in settings]
        self._tables = tables or {}

    def __repr__(self) -> str:
        own, varied = (
            len(sweep_analysis.without_baselines(self.runs)),
            ", ".join(self.varying) or "nothing",
        )
        return f"Results({own} runs and {len(self.runs) - own} baselines; varying: {varied})"

    def _repr_html_(self) -> str | None:
        """In a notebook, the table and the sentence that the command line prints of a sweep."""
        if not {"policy", "is_baseline", "throughput"} <= set(self.runs):
            return None
        from sarathi_lab.results.report import conclusion, sweep_table

        shown = sweep_table(self.runs, f"{len(self.runs)} runs")
        rows = pd.DataFrame(list(map(dict, shown.rows)))
        table = rows.to_html(index=False, border=0, max_rows=MOST_ROWS)
        return "\n".join([f"<b>{shown.title}</b>", table, *conclusion(self.runs)])

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request of every run, with the run's settings."""
        return self._tidy("requests")

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """One row per iteration of every run, with the run's settings."""
        return self._tidy("iterations")

    @property
    def varying(self) -> list[str]:
        """The settings in which the runs, baselines aside, differ, seeds included; none that others
        before it settle.
        """
        return sweep_analysis.varied(self.runs, leaving=())

    @cached_property
    def names(self) -> list[str]:
        """Each run by what tells it from the others, such as "sarathi, chunk 256"."""
        settings = [one for one in self.varying if one != "policy"]
        short = [one.rpartition(".")[2] for one in settings]
        found: list[str] = []
        for policy, *values in self.runs[["policy", *settings]].itertuples(index=False, name=None):
            told = zip(short, map(sweep_analysis.text, values), strict=True)
            name = ", ".join([policy, *(f"{key} {value}" for key, value in told if value != "-")])
            number = sum(one.partition(" (")[0] == name for one in found)
            found.append(f"{name} ({number + 1})" if number else name)
        return found

    def compare(
        self, to: str | Mapping[str, Any] = "orca", metrics: Sequence[str] = METRICS
    ) -> pd.DataFrame:
        """Every run beside that of the policy `to` (or with the settings in it) on the same work:
        what varies, each of `metrics`, and its ratio to that run's as `<metric>_vs_<to>`.

        That run is one of the sweep's own, else a baseline; ratios without one are NaN. Raises
        UserError if there is none at all, or several for one run.
        """
        wanted = {"policy": to} if isinstance(to, str) else dict(to)
        name = "_".join(map(str, wanted.values()))
        keys = [one for one in sweep_analysis.same_work(self.runs) if one not in wanted]
        base, own = self._matching(wanted), sweep_analysis.without_baselines(self.runs)
        shown = [one for one in metrics if one in self.runs]
        places = sweep_analysis.group_keys(base, keys)
        if not (twice := places[places.duplicated()]).empty:
            same = base[places == twice.iloc[0]]
            differ = [one for one in self.varying if same[one].map(str).nunique() > 1]
            raise UserError(
                f"to={to} is {len(same)} runs that differ in {', '.join(differ) or 'nothing'}; "
                f'name one, as in to={{"policy": ..., "chunk": 256}}'
            )
        ratios = sweep_analysis.ratios(own, base, shown, keys)
        first = dict.fromkeys(["policy", *self.varying])
        return own[[*first, *shown]].join(ratios.add_suffix(f"_vs_{name}"))

    def plot(
        self,
        x: str | None = None,
        hue: str | None = None,
        facet: str | None = None,
        y: str | Sequence[str] | None = None,
    ) -> Figure:
        """A picture of the runs by what varies: settings on the x axis, as colours and as panels,
        quantities `y`; what is not named is chosen. Raises UserError for names that there are not.
        """
        from sarathi_lab.results.plots import sweeps  # matplotlib takes a second

        return sweeps.draw_sweep(self.runs, x=x, hue=hue, facet=facet, y=y)

    def plot_iterations(self, *names: str, x: str = "end") -> Figure:
        """What the iterations of runs (of `names`) held and took, over time or, with x="iteration",
        by their number. If none is named, of some that serve most, and the reference. Raises
        UserError for names that there are not.
        """
        from sarathi_lab.results.plots import tasks

        if missing := [name for name in names if name not in self.names]:
            raise UserError(f"{missing[0]} is none of these runs; use some of {self.names}")
        places = [self.names.index(name) for name in names] or self._foremost()
        read = self._tables["iterations"]
        return tasks.curves({self.names[place]: read[place]() for place in places}, x=x)

    def _foremost(self) -> list[int]:
        """Where the runs are that serve most, the best of each policy first, and the reference."""
        runs = self.runs.reset_index(drop=True).sort_values("throughput", ascending=False)
        is_base = runs["policy"] == sweep_analysis.reference(runs)
        own = sweep_analysis.without_baselines(runs[~is_base])
        first = own.drop_duplicates("policy").index
        places = [*first, *own.index.difference(first, sort=False)][: MOST_CURVES - 1]
        return [*places, *runs[is_base].index[:1]]

    def _matching(self, wanted: Mapping[str, Any]) -> pd.DataFrame:
        """The runs with these settings, or else the baselines."""
        for name in wanted:
            if name not in self.runs:
                raise UserError(f"{name} is no setting of these runs; use some of {self.varying}")
        for runs in (sweep_analysis.without_baselines(self.runs), self.runs):
            is_one = pd.Series(True, runs.index)
            for name, value in wanted.items():
                is_one &= runs[name].eq(value)
            if is_one.any():
                return runs[is_one]
        known = ", ".join(sorted(set(self.runs["policy"])))
        raise UserError(f"to={wanted} is none of these runs; their policies are {known}")

    def _tidy(self, kind: str) -> pd.DataFrame:
        tables = [read() for read in self._tables.get(kind, ())]
        if not tables:
            return pd.DataFrame()
        number = [i for i, table in enumerate(tables) for _ in range(len(table))]
        whole = pd.concat(tables, ignore_index=True)
        names = [name for name in self.settings if name not in whole]
        # Text that is the same in many rows is kept once.
        settings = self.runs[names].astype(
            {
                name: "category"
                for name in names
                if not pd.api.types.is_numeric_dtype(self.runs[name])
            }
        )
        return pd.concat([settings.take(number).reset_index(drop=True), whole], axis="columns")


def load(*places: str | Path) -> Results:
    """Runs that are there already: below folders (`outputs` if nothing is named), in W&B's files
    (`.wandb`) and projects ("entity/project"), recorded of an experiment, such as "orca", or
    measured of a server by a benchmark client (`results.bench_files`).

    What is recorded has a row a point or a run and no tables of requests. Raises UserError for a
    place without runs.
    """
    parts = [_load(place) for place in places or (OUTPUTS,)]
    if len(parts) == 1:
        return parts[0]
    runs = pd.concat([part.runs for part in parts], ignore_index=True)
    settings = dict.fromkeys(name for part in parts for name in part.settings)
    tables = {
        kind: [
            one for part in parts for one in part._tables.get(kind, [pd.DataFrame] * len(part.runs))
        ]
        for kind in ("requests", "iterations")
    }
    return Results(runs, settings, tables)


def _load(place: str | Path) -> Results:
    path = Path(place)
    if is_benchmark_file(path):
        return _of_benchmarks(read_benchmarks(path))
    if files.find_runs(path):
        runs = files.load_runs(path)
        if runs.empty:
            raise UserError(f"{place} holds no run that can be read; name another")
        tables = {
            "requests": [partial(files.load_requests, one) for one in runs["path"]],
            "iterations": [partial(files.load_iterations, one) for one in runs["path"]],
        }
        return Results(runs, runs.attrs["settings"], tables)
    if not path.exists() and str(place) in files.recorded():
        table = files.load(str(place))
        return Results(table, [name for name in map(str, table) if sweep_analysis.is_setting(name)])
    found = wandb_runs.load(place)
    rows = [{"name": run.name, **run.settings, **run.summary} for run in found]
    settings = ["name", *(name for run in found for name in run.settings)]
    tables = {"iterations": [partial(getattr, run, "iterations") for run in found]}
    return Results(pd.DataFrame(rows), settings, tables)


def _of_benchmarks(benchmarks: Sequence[Benchmark]) -> Results:
    settings = dict.fromkeys(name for one in benchmarks for name in one.settings)
    rows = [{**one.settings, **one.summary} for one in benchmarks]
    tables = {"requests": [partial(getattr, one, "requests") for one in benchmarks]}
    return Results(pd.DataFrame(rows), settings, tables)

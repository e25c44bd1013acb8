"""What a figure declares: its points, sizes, paper's values, errors to stay within, and picture.

A figure is a function that lists groups of cases, under the decorator `figure`; its keyword
arguments are the sizes that `conf/experiment/NAME.yaml` gives for each set-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import read_yaml
from sarathi_lab.config.paths import CONF
from sarathi_lab.experiment.cases import Group
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.load import load_paper
from sarathi_lab.results.plots.look import Look

KEYS = ["panel", "series", "x"]
PROFILED = ("executor.cost_model=profiled",)  # by measured operation times
SETUPS = ("paper", "small", "dry")  # sizes: the paper's, a CPU's, and those that take seconds

Ints = Sequence[int]
Sizes = Mapping[str, Any]
# By level the error to stay within: mean and, unless None, largest absolute relative error.
Aims = Mapping[str, tuple[float, float | None]]


class Platform(NamedTuple):
    """What the paper ran a figure on; `num_devices` share a layer."""

    model: str
    hardware: str
    num_devices: int = 1


A6000 = Platform("13b", "a6000")


@dataclass(frozen=True)
class ErrorRow:
    """A row of the error table: the points that `where` (a pandas query) chooses, and the aims.

    `given` names the level whose profile was made from some of these points, `fitted` a level or
    hardware that has constants fitted to some of them, or chosen by them; a `formula` predicts
    nothing.
    """

    name: str
    where: str = "x == x"
    aims: Aims = field(default_factory=dict)
    given: str = ""
    fitted: str = ""
    is_formula: bool = False


@dataclass(frozen=True)
class Figure:
    """One experiment that makes points.

    `seconds` is how long a CPU measures it; half an interval wider than `max_spread` of the median
    leaves no number. `papers` are the platforms of the paper's own figure; `paper` makes its points
    of `files` whose `columns` were renamed, `at` the sizes at which `executor=simulated` has all of
    them. `kind` says what the function is: "units" lists groups of cases; "pipeline", "rounds" and
    "stages" are run by `pipeline`, `serving` and `real_pipeline`. Beside its keyword arguments
    there are sizes that it `needs` or `takes`.
    """

    name: str
    make: Callable[..., Any]
    question: str
    seconds: float
    look: Look | None = None
    kind: str = "units"
    papers: Sequence[Platform] = ()
    files: Sequence[str] = ("",)
    columns: Mapping[str, str] = field(default_factory=dict)
    paper: Callable[..., pd.DataFrame] = lambda points: points
    at: Callable[[pd.DataFrame], Sizes] | None = None
    errors: Sequence[ErrorRow] = ()
    is_counted: bool = False  # simulated by counting batches, too
    is_simulated: bool = False  # never measured
    is_chained: bool = False  # a round takes up what the one before found
    simulated: Sequence[str] = ()  # settings with which its simulation is recorded
    max_spread: float = 0.15
    needs: Sequence[str] = ()
    takes: Sequence[str] = ()

    @property
    def is_of_stages(self) -> bool:
        """Whether it is of real processes, with their simulation beside, in sets of requests
        however long these take: nothing to simulate apart.
        """
        return self.kind == "stages"

    @property
    def has_paper(self) -> bool:
        """Whether the paper's own points are there, beside which it is drawn."""
        return bool(self.columns)

    def paper_points(self, every: int = 1) -> pd.DataFrame:
        """The paper's points and what they were made with; of each line every n-th."""
        files = (
            load_paper(self.name + suffix).rename(columns=self.columns) for suffix in self.files
        )
        points = self.paper(*files)
        usual = {"panel": "", "unit": "ratio"}
        points = points.assign(**{name: usual[name] for name in usual if name not in points})
        rank = points.groupby(["panel", "series"]).cumcount()
        return points[rank % every == 0]

    def sizes(self, setup: str, own: Sizes | None = None) -> dict[str, Any]:
        """The sizes of a set-up, `own` or conf/experiment's. Raises UserError for others."""
        setups = sizes_of(self.name) if own is None else own
        require_one_of(f"task.sizes of {self.name}", setup, setups)
        sizes = dict(setups[setup])
        parameters = inspect.signature(self.make).parameters.values()
        named = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
        is_needed = named | dict.fromkeys(self.needs, True) | dict.fromkeys(self.takes, False)
        for name in sizes:
            require_one_of(f"task.sizes.{setup}", name, is_needed)
        if missing := [name for name, is_due in is_needed.items() if is_due and name not in sizes]:
            raise UserError(
                f"task.sizes.{setup} of {self.name} lacks {', '.join(missing)}; add what "
                f"conf/experiment/{self.name}.yaml has"
            )
        return sizes

    def paper_sizes(self, every: int = 1, own: Sizes | None = None) -> dict[str, Any]:
        """The paper's sizes with all its points, each n-th of long curves."""
        at = {} if self.at is None else self.at(self.paper_points(every))
        return {**self.sizes("paper", own), **at}

    def cases(self, spec: ModelSpec, sizes: Sizes) -> list[Group]:
        return list(self.make(spec, **sizes))


FIGURES: dict[str, Figure] = {}


def figure(**declared: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the figure of its name; `declared` are fields of `Figure`. The paper's
    figures are of an A6000 unless they say otherwise; a picture without a title has the question's.
    """
    if "columns" in declared:
        declared.setdefault("papers", [A6000])
    if declared.get("kind") != "rounds":  # those are drawn alike
        look = declared.get("look", Look())
        declared["look"] = replace(look, title=look.title or declared["question"])

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        FIGURES[make.__name__] = Figure(make.__name__, make, **declared)
        return make

    return register


def sizes_of(name: str) -> Sizes:
    overlay: Any = OmegaConf.to_container(read_yaml(CONF / "experiment" / f"{name}.yaml"))
    return overlay["task"]["sizes"]

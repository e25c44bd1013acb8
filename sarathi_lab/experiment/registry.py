"""Declarations of experiments: cases, sizes, the paper's points, errors to stay within, a picture.

An experiment is a function under the decorator `figure`; its keyword arguments are the sizes that
`conf/experiment/NAME.yaml` gives for each set-up, where `task.cases` names the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pandas as pd
import yaml
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import CONF, EXPERIMENTS
from sarathi_lab.engine.executor import Backend
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.tables import read_tables
from sarathi_lab.experiment.bench import CostBench, room_of
from sarathi_lab.experiment.points import Part, Point, predicted_table
from sarathi_lab.experiment.scenario import Room
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results.load import load_paper
from sarathi_lab.results.plots.spec import PlotSpec

if TYPE_CHECKING:
    from sarathi_lab.executor.measured_backend import MeasuredBackend
    from sarathi_lab.experiment.measure import Measured, Session

KEYS = ["panel", "series", "x"]
DTYPE = "float16"  # not stated in the paper; 2 bytes an element fit all its figures
COUNTED = "counted"  # the method of points that are counted instead of served
PROFILED = ("executor.cost_model=profiled",)  # by measured operation times
SETUPS = ("paper", "small", "dry")  # sizes: the paper's, a CPU's, and those that take seconds

Ints = Sequence[int]
Sizes = Mapping[str, Any]
# By level the error to stay within: mean and, unless None, largest absolute relative error.
Aims = Mapping[str, tuple[float, float | None]]


class Platform(NamedTuple):
    """Model and hardware of the paper's figure; `num_devices` share a layer."""

    model: str
    hardware: str
    num_devices: int = 1


A6000 = Platform("13b", "a6000")


@dataclass(frozen=True)
class ErrorRow:
    """A row of the error table: the points that `where` (a pandas query) chooses, and the aims.

    `given`: the level whose profile was made from some of these points. `fitted`: a level or a
    hardware file with constants that were fitted to some of them. `formula`: the row is arithmetic
    on the paper's numbers, not a prediction.
    """

    name: str
    where: str = "x == x"
    aims: Aims = field(default_factory=dict)
    given: str = ""
    fitted: str = ""
    is_formula: bool = False


@dataclass(frozen=True)
class Figure:
    """An experiment of batches and scenarios, whose function lists groups of cases.

    A CPU measures it in `seconds`; a point whose interval spans more than `max_spread` of its
    median on either side has no number. `papers` are the platforms of the paper's figure, `at`
    makes of its points the sizes at which `executor=simulated` has all of them.
    """

    name: str
    make: Callable[..., Any]
    question: str
    seconds: float
    look: PlotSpec = field(default_factory=PlotSpec)
    papers: Sequence[Platform] = ()
    at: Callable[[pd.DataFrame], Sizes] | None = None
    errors: Sequence[ErrorRow] = ()
    is_counted: bool = False  # simulated by counting batches, too
    is_simulated: bool = False  # never measured
    simulated: Sequence[str] = ()  # settings with which its simulation is recorded
    measured: Sequence[str] = ()  # settings with which it is measured
    max_spread: float = 0.15

    needs: ClassVar[Sequence[str]] = ()  # sizes beside the function's arguments
    takes: ClassVar[Sequence[str]] = ()
    is_partly_simulated: ClassVar[bool] = False  # with what was measured
    is_of_stages: ClassVar[bool] = False  # of a pipeline (executor.pipeline_parallel)
    has_own_bench: ClassVar[bool] = False  # else one for all figures on a simulated device
    is_in_rounds: ClassVar[bool] = False  # each round serves other requests under all policies
    is_chained: bool = False  # a round begins where the one before ended

    def __reduce__(self) -> Any:
        return load_figure, (f"{self.make.__module__}.{self.name}",)

    @property
    def has_paper(self) -> bool:
        """Whether the paper's points are there, beside which it is drawn."""
        return self.name in PAPERS

    def paper_points(self, every: int = 1) -> pd.DataFrame:
        """Return the paper's points; of each line every n-th."""
        points = load_paper(self.name)
        rank = points.groupby(["panel", "series"]).cumcount()
        return points[rank % every == 0]

    def sizes(self, setup: str, stated: Sizes | None = None) -> dict[str, Any]:
        """Return a set-up's sizes, `stated` or conf/experiment's. Raises UserError for others."""
        setups = sizes_of(self.name) if stated is None else stated
        require_one_of(f"task.sizes of {self.name}", setup, setups)
        sizes = dict(setups[setup])
        parameters = inspect.signature(self.make).parameters.values()
        named = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
        is_needed = dict.fromkeys(self.takes, False) | dict.fromkeys(self.needs, True) | named
        for name in sizes:
            require_one_of(f"task.sizes.{setup}", name, is_needed)
        if missing := [name for name, is_due in is_needed.items() if is_due and name not in sizes]:
            raise UserError(
                f"task.sizes.{setup} of {self.name} lacks {', '.join(missing)}; add what "
                f"conf/experiment/{self.name}.yaml has"
            )
        return sizes

    def paper_sizes(self, every: int = 1, stated: Sizes | None = None) -> dict[str, Any]:
        """Return the paper's sizes with all its points, each n-th of long curves."""
        at = {} if self.at is None else self.at(self.paper_points(every))
        return {**self.sizes("paper", stated), **at}

    def parts(self, spec: ModelSpec, sizes: Sizes) -> Sequence[Part]:
        """List what is run, each part once a round."""
        return list(self.make(spec, **sizes))

    def room(self, spec: ModelSpec, sizes: Sizes) -> Room:
        """Return the room that its largest part needs of a device."""
        return Room.largest(room_of(part) for part in self.parts(spec, sizes))

    def room_on(self, backend: MeasuredBackend, spec: ModelSpec, sizes: Sizes) -> Room:
        """Return the room that it takes on a real device."""
        return self.room(spec, sizes)

    def least_room(self, spec: ModelSpec, sizes: Sizes) -> int:
        """Return the tokens of cache without which nothing can be measured."""
        return self.room(spec, sizes).kv_tokens

    def check(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> None:
        """Raise UserError for a device without room, or a simulated one without a cost model. An
        iteration of measured kernels needs no room.
        """
        if isinstance(backend, SimulatedBackend) and backend.composes_kernels:
            backend.check(spec, 0)
            return
        if not (self.has_paper and isinstance(backend, SimulatedBackend)):
            backend.check(spec, self.least_room(spec, sizes))
            return
        weights, hardware = spec.weight_bytes(backend.dtype_bytes), backend.hardware
        memory = backend.num_devices * hardware.memory_bytes
        if weights > memory:
            raise UserError(
                f"{self.name} needs {weights / 1e9:.1f} GB for the weights of {spec.name} alone, "
                f"{backend.num_devices} x {hardware.name} have {memory / 1e9:.0f} GB; leave that "
                "GPU or figure out"
            )
        backend.check(spec, 0)

    def measure(self, session: Session) -> Measured:
        """Measure on a real device: the table of points, and others by the end of their name."""
        from sarathi_lab.experiment.measure import measure_parts  # torch takes seconds

        return measure_parts(self.name, self.parts(session.spec, session.sizes), session)

    def bench(self, job: Job) -> Any:
        """Return what evaluates its cases in simulation."""
        cost = job.backend.cost_of(job.spec)
        is_counting = job.method == COUNTED or job.backend.composes_kernels
        return CostBench(cost, is_counting=is_counting)

    def table(self, points_of_parts: Sequence[Sequence[Point]]) -> pd.DataFrame:
        """Return recorded points of predicted ones; what was not measured has no value."""
        return predicted_table(self.name, points_of_parts).dropna(subset="y").reset_index(drop=True)


@dataclass(frozen=True)
class Job:
    """A figure to simulate for a model on a backend, at `sizes`; policies are made by name and
    token budget. The `method` is COUNTED where batches are counted instead of served.
    """

    figure: Figure
    spec: ModelSpec
    backend: SimulatedBackend
    sizes: Mapping[str, Any]
    method: str = ""
    make_policy: Callable[[str, int], Policy | None] = lambda name, budget: None
    seed: int = 0

    @property
    def labels(self) -> dict[str, str]:
        on = self.backend
        names = {"hardware": on.hardware.name, "level": on.cost_model, "model": self.spec.name}
        return {**names, "dtype": on.dtype_name, "method": self.method}

    @property
    def device(self) -> str:
        """The device with the level, model and method."""
        words = [self.backend.device_name, self.backend.cost_model, self.spec.name, self.method]
        return ", ".join(filter(None, words))


def paper_jobs(
    figure: Figure,
    gpus: Sequence[str] | None = None,
    every: int = 1,
    sizes: Mapping[str, Any] | None = None,
) -> list[Job]:
    """List the paper's GPUs, or each of `gpus`, at every level that its file has for the model.
    `sizes` replace conf/experiment's; of long curves each n-th point is taken.
    """
    sizes = figure.paper_sizes(every, sizes)
    jobs = []
    on = [(model, gpu) for model, usual, _ in figure.papers for gpu in gpus or [usual]]
    for model, gpu in dict.fromkeys(on):
        spec, hardware = load_option("model", model), load_option("hardware", gpu)
        levels = ["profiled", "analytic"] if _is_profiled(hardware, spec) else ["analytic"]
        for method in ("", COUNTED) if figure.is_counted else ("",):
            backends = [SimulatedBackend(hardware, DTYPE, level) for level in levels]
            jobs += [Job(figure, spec, backend, sizes, method) for backend in backends]
    return jobs


def _is_profiled(hardware: Hardware, spec: ModelSpec) -> bool:
    """Whether the GPU's tables were measured with this very model."""
    if hardware.tables is None:
        return False
    tables = read_tables(hardware.tables, model=spec.name)
    return tables.is_model_specific and tables.is_of(spec)


class Experiments(Mapping[str, Figure]):
    """The experiments of conf/experiment with cases, by name; one is imported when asked for."""

    @cached_property
    def paths(self) -> dict[str, str]:
        """The functions, as module.function."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        files = sorted((CONF / "experiment").glob("*.yaml"))
        paths = {}
        for path in files:
            task = yaml.load(path.read_text(), loader).get("task")
            if isinstance(task, dict) and "cases" in task:
                paths[path.stem] = task["cases"]
        return paths

    def __getitem__(self, name: str) -> Figure:
        return load_figure(self.paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


FIGURES = Experiments()
# Those of the paper, which has a file of points for each.
PAPERS = tuple(sorted(path.stem for path in EXPERIMENTS.glob("sarathi/paper/*.csv")))


def load_figure(path: str) -> Figure:
    """Import an experiment by module.function. Raises UserError if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name).figure
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"task.cases={path} can't be imported ({error}); name a function under "
            "sarathi_lab.experiment.registry.figure as module.function"
        ) from None
    assert isinstance(found, Figure)
    return found


def figure(kind: type[Figure] = Figure, **declared: Any) -> Callable[[Any], Any]:
    """Make a function the experiment of its name; `declared` are fields of `kind`. The paper's
    figures are of an A6000 by default; a picture without a title has the question's.
    """

    def register(make: Any) -> Any:
        if make.__name__ in PAPERS:
            declared.setdefault("papers", [A6000])
        look = declared.get("look", PlotSpec())
        declared["look"] = replace(look, title=look.title or declared["question"])
        make.figure = kind(make.__name__, make, **declared)
        return make

    return register


def sizes_of(name: str) -> Sizes:
    overlay: Any = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{name}.yaml"))
    return overlay["task"]["sizes"]

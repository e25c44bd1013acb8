"""Declarations of experiments: points, sizes, the paper's values, a picture.

An experiment is a function under the decorator `experiment`; its keyword arguments are the sizes
that `conf/experiment/NAME.yaml` gives for each set-up, where `task.function` names the function.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import pandas as pd
import yaml
from omegaconf import OmegaConf

from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import imported, load_option, read_yaml
from sarathi_lab.config.paths import CONF
from sarathi_lab.engine.executor import Backend
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.drawn_times import AS_STATED, VARIANTS, CostVariant
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.tables import read_tables
from sarathi_lab.experiment.points import Part, Point, predicted_table
from sarathi_lab.experiment.scenario import Room
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.load import YAML_LOADER, load_paper
from sarathi_lab.results.plots.spec import PlotSpec

if TYPE_CHECKING:
    from sarathi_lab.executor.measured_backend import MeasuredBackend

KEYS = ["panel", "series", "x"]
DTYPE = "float16"  # not stated in the paper; 2 bytes an element fit all its figures
COUNTED = "counted"  # the method of points that are counted instead of served
PROFILED = ("executor.cost_model=profiled",)  # by measured operation times
SETUPS = ("paper", "small", "dry")  # sizes: the paper's, a CPU's, and those that take seconds
# The paper's figures and tables, each with a file of points in experiments/sarathi/paper.
PAPERS = (
    "fig03",
    "fig04",
    "fig07",
    "fig08",
    "fig09",
    "fig10",
    "fig11",
    "fig12",
    "fig13",
    "table2",
    "table4",
)

Ints = Sequence[int]
Sizes = Mapping[str, Any]  # arguments of the experiment's function, which states their types
Make = Callable[..., Iterable[Any]]  # of parts, or of the points of a round
Function = TypeVar("Function", bound=Make)
Declared = ParamSpec("Declared")
Measured = dict[str, pd.DataFrame]  # tables by the end of their name: of points (""), and others
COMPOSITIONS = "compositions"  # the end of the name of the table of batches and their operations
SERVING = "serving"  # of the table of what was served


class Platform(NamedTuple):
    """Model and hardware of the paper's figure; `num_devices` share a layer."""

    model: str
    hardware: str
    num_devices: int = 1


A6000 = Platform("13b", "a6000")


@dataclass(frozen=True)
class Experiment(ABC):
    """What is declared of an experiment, and how its kind is simulated and measured.

    A CPU measures it in `seconds`, without which it is simulated only. A point whose interval spans
    more than `max_spread` of its median on either side has no number. `papers` are the platforms of
    the paper's figure, `at` makes of its points the sizes at which `executor=simulated` has all of
    them.
    """

    name: str
    make: Make
    question: str
    seconds: float = 0.0
    look: PlotSpec = field(default_factory=PlotSpec)
    papers: Sequence[Platform] = ()
    at: Callable[[pd.DataFrame], Sizes] | None = None
    is_counted: bool = False  # simulated by counting batches, too
    simulated: Sequence[str] = ()  # settings with which its simulation is recorded
    measured: Sequence[str] = ()  # settings with which it is measured
    max_spread: float = 0.15
    is_chained: bool = False  # a round begins where the one before ended

    needs: ClassVar[Sequence[str]] = ()  # sizes beside the function's arguments
    takes: ClassVar[Sequence[str]] = ()
    shares_bench: ClassVar[bool] = False  # with others of its kind on a simulated device
    is_in_rounds: ClassVar[bool] = False  # each round serves other requests under all policies
    is_of_stages: ClassVar[bool] = False  # of a pipeline (executor.pipeline_parallel)

    def __reduce__(self) -> tuple[object, ...]:
        # By its name: a lambda, such as `at`, cannot be sent to a process that simulates.
        return load_experiment, (f"{self.make.__module__}.{self.name}",)

    @property
    def is_simulated(self) -> bool:
        """Whether it is simulated only: there are no seconds to measure it for."""
        return self.seconds == 0

    @property
    def has_paper(self) -> bool:
        """Whether it is a figure or a table of the paper, beside whose points it is drawn."""
        return self.name in PAPERS

    def settings_of(self, how: str) -> list[str]:
        """Return the settings with which it is recorded: "measured", or "simulated"."""
        if how == "measured":
            return list(self.measured)
        return ["executor=simulated", *self.simulated]

    def paper_points(self, every: int = 1) -> pd.DataFrame:
        """Return the paper's points; of each line every n-th."""
        points = load_paper(self.name)
        rank = points.groupby(["panel", "series"]).cumcount()
        return points[rank % every == 0]

    def sizes(self, setup: str, stated: Sizes | None = None) -> Sizes:
        """Return a set-up's sizes, `stated` or conf/experiment's. Raises UserError for others."""
        setups = sizes_of(self.name) if stated is None else stated
        require_one_of(f"task.sizes of {self.name}", setup, setups)
        sizes = dict(setups[setup])
        is_needed = dict.fromkeys(self.takes, False) | dict.fromkeys(self.needs, True)
        # The function states its own sizes as keywords; those with a default are optional.
        for parameter in inspect.signature(self.make).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                is_needed[parameter.name] = parameter.default is parameter.empty
        for name in sizes:
            require_one_of(f"task.sizes.{setup}", name, is_needed)
        missing = [name for name in is_needed if is_needed[name] and name not in sizes]
        if missing:
            raise UserError(
                f"task.sizes.{setup} of {self.name} lacks {', '.join(missing)}; add what "
                f"conf/experiment/{self.name}.yaml has"
            )
        return sizes

    def paper_sizes(self, every: int = 1, stated: Sizes | None = None) -> Sizes:
        """Return the paper's sizes with all its points, each n-th of long curves."""
        sizes = self.sizes("paper", stated)
        if self.at is None:
            return sizes
        return {**sizes, **self.at(self.paper_points(every))}

    @abstractmethod
    def parts(self, spec: ModelSpec, sizes: Sizes) -> Sequence[Part]:
        """List what is run on a bench, each part once a round."""

    @abstractmethod
    def room(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> Room:
        """Return the room that its largest part takes on a device."""

    def least_tokens(self, backend: Backend, spec: ModelSpec, sizes: Sizes) -> int:
        """Return the tokens of cache without which there is no point at all."""
        return self.room(backend, spec, sizes).kv_tokens

    def check_measured(self, backend: MeasuredBackend, spec: ModelSpec, sizes: Sizes) -> None:
        """Raise UserError for a device without room."""
        backend.check(spec, self.least_tokens(backend, spec, sizes))

    def check_simulated(self, backend: SimulatedBackend, spec: ModelSpec, sizes: Sizes) -> None:
        """Raise UserError for a device without room, or without a cost model."""
        if backend.composes_kernels:
            backend.check(spec, 0)  # iterations of measured kernels hold nothing
        elif self.has_paper:
            self._check_weights(backend, spec)
            backend.check(spec, 0)  # the paper's batches had room
        else:
            backend.check(spec, self.least_tokens(backend, spec, sizes))

    def _check_weights(self, backend: SimulatedBackend, spec: ModelSpec) -> None:
        weights = spec.weight_bytes(backend.dtype_bytes)
        hardware = backend.hardware
        memory = backend.num_devices * hardware.memory_bytes
        if weights > memory:
            raise UserError(
                f"{self.name} needs {weights / 1e9:.1f} GB for the weights of {spec.name} alone, "
                f"{backend.num_devices} x {hardware.name} have {memory / 1e9:.0f} GB; leave that "
                "GPU or figure out"
            )

    @abstractmethod
    def bench(self, job: SimulatedJob) -> object:
        """Return what its parts are evaluated on in simulation."""

    def table(self, points_of_parts: Sequence[Sequence[Point]]) -> pd.DataFrame:
        """Return the points of a simulation as they are recorded."""
        return predicted_table(self.name, points_of_parts)

    @abstractmethod
    def measure(self, job: MeasuredJob) -> Measured:
        """Measure on a real device: the table of points, and others by the end of their name."""

    def folder_of(self, device: str) -> str:
        """Return the folder of what was measured on a device, which states the points' source
        (`load.source_of`).
        """
        return device


@dataclass(frozen=True)
class SimulatedJob:
    """An experiment to simulate, with a model on a device.

    Attributes:
        method: COUNTED where batches are counted instead of served.
        is_varied: Requests that arrive over time are served in each of the `VARIANTS` of the cost
            model, too; single batches have all of them always.
    """

    experiment: Experiment
    spec: ModelSpec
    backend: SimulatedBackend
    sizes: Sizes
    method: str = ""
    seed: int = 0
    is_varied: bool = False

    @property
    def parts(self) -> list[Part]:
        """What is simulated: each part with the cost model as stated, then in its variants."""
        variants = [AS_STATED]
        if self.is_varied:
            variants += VARIANTS
        varied_parts = []
        for part in self.experiment.parts(self.spec, self.sizes):
            for variant in variants:
                varied_parts.append(replace(part, variant=variant))
        return varied_parts

    def in_variant(self, variant: CostVariant) -> Self:
        """Return the job in a variant of the cost model."""
        if variant == AS_STATED:
            return self
        backend = replace(self.backend, draw=variant.draw, slower_shape=variant.slower_shape)
        return replace(self, backend=backend)

    @property
    def labels(self) -> dict[str, str]:
        """The columns of what was simulated."""
        return {
            "hardware": self.backend.hardware.name,
            "level": self.backend.cost_model,
            "model": self.spec.name,
            "dtype": self.backend.dtype_of(self.spec),
            "method": self.method,
            "device": self.device,
            "device_name": self.backend.device_name,
        }

    @property
    def device(self) -> str:
        """The simulated device with the level, model and method."""
        backend = self.backend
        names = [backend.device_name, backend.cost_model, self.spec.name]
        if self.method:
            names.append(self.method)
        return ", ".join(names)


@dataclass(frozen=True)
class MeasuredJob:
    """An experiment to measure, with a model on a device.

    Attributes:
        seconds: To measure for, without loading, but for `FEWEST_PAIRS` rounds at least.
        max_spread: Of the interval of a point (`Experiment`).
        is_cut: Measure only as many parts, ends and middles first, as that many rounds fit the
            time for.
    """

    experiment: Experiment
    spec: ModelSpec
    backend: MeasuredBackend
    sizes: Sizes
    seed: int = 0
    seconds: float = 0.0
    max_spread: float = 0.15
    is_cut: bool = False

    @property
    def room(self) -> Room:
        """The room that the experiment takes on the device."""
        return self.experiment.room(self.backend, self.spec, self.sizes)


def paper_jobs(
    experiment: Experiment,
    cards: Sequence[Hardware] = (),
    every: int = 1,
    sizes: Sizes | None = None,
) -> list[SimulatedJob]:
    """List the paper's GPUs, or each of `cards`, at every level that its file has for the model.
    `sizes` replace conf/experiment's; of long curves each n-th point is taken.
    """
    sizes = experiment.paper_sizes(every, sizes)
    methods = [""]
    if experiment.is_counted:
        methods.append(COUNTED)
    pairs: list[tuple[str, Hardware]] = []
    for platform in experiment.papers:
        for hardware in cards or [load_option("hardware", platform.hardware)]:
            pairs.append((platform.model, hardware))
    jobs = []
    # Platforms of one model give the same pair for each of `cards`.
    for model, hardware in dict.fromkeys(pairs):
        spec = load_option("model", model)
        levels = ["analytic"]
        if _is_profiled(hardware, spec):
            levels = ["profiled", "analytic"]
        for method in methods:
            for level in levels:
                backend = SimulatedBackend(hardware, DTYPE, level)
                jobs.append(SimulatedJob(experiment, spec, backend, sizes, method))
    return jobs


def _is_profiled(hardware: Hardware, spec: ModelSpec) -> bool:
    """Whether the GPU's tables were measured with this very model."""
    if hardware.tables is None:
        return False
    tables = read_tables(hardware.tables, model=spec.name)
    return tables.is_model_specific and tables.is_of(spec)


class Catalog(Mapping[str, Experiment]):
    """The experiments of conf/experiment with a function; one is imported when asked for."""

    @cached_property
    def paths(self) -> dict[str, str]:
        """The functions, as module.function."""
        paths = {}
        for path in sorted((CONF / "experiment").glob("*.yaml")):
            task = yaml.load(path.read_text(), YAML_LOADER).get("task")
            if isinstance(task, dict) and "function" in task:
                paths[path.stem] = task["function"]
        return paths

    def __getitem__(self, name: str) -> Experiment:
        return load_experiment(self.paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


CATALOG = Catalog()


_DECLARED: dict[Make, Experiment] = {}  # by its function


def load_experiment(path: str) -> Experiment:
    """Import an experiment by module.function. Raises UserError if there is none."""
    kind = "a function under sarathi_lab.experiment.registry.experiment as module.function"
    function = imported(path, f"task.function={path}", kind)
    if function not in _DECLARED:
        raise UserError(f"task.function={path} is no experiment; name {kind}")
    return _DECLARED[function]


def experiment(
    kind: Callable[Concatenate[str, Make, Declared], Experiment],
    *arguments: Declared.args,
    **declared: Declared.kwargs,
) -> Callable[[Function], Function]:
    """Make a function the experiment of its name; `declared` are fields of `kind`. The paper's
    figures are of an A6000 by default; a picture without a title has the question's.
    """

    def register(make: Function) -> Function:
        # The constructor of its kind is the schema: a type checker knows what may be declared.
        stated = kind(make.__name__, make, *arguments, **declared)
        papers = stated.papers
        if stated.has_paper and not papers:
            papers = [A6000]
        look = replace(stated.look, title=stated.look.title or stated.question)
        _DECLARED[make] = replace(stated, papers=papers, look=look)
        return make

    return register


def sizes_of(name: str) -> Sizes:
    overlay = read_yaml(CONF / "experiment" / f"{name}.yaml")
    sizes = OmegaConf.to_container(overlay.task.sizes)
    assert isinstance(sizes, dict)
    return {str(setup): of_setup for setup, of_setup in sizes.items()}

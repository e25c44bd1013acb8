"""The task of one experiment: measured on a real device, computed with executor=simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.checked import checked, number, one_of, refuse_unread, whole
from sarathi_lab.config.console import print_place
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import (
    build,
    is_model_stated,
    load_option,
    name_of,
    require_kind,
)
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.drawn_times import NUM_DRAWS, VARIANTS
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.experiment.recorded import paper
from sarathi_lab.experiment.registry import (
    CATALOG,
    COMPOSITIONS,
    SETUPS,
    Experiment,
    Measured,
    MeasuredJob,
    Platform,
    SimulatedJob,
    Sizes,
    load_experiment,
    paper_jobs,
)
from sarathi_lab.experiment.simulate import by_folder, simulate
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results import load
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import panels
from sarathi_lab.results.provenance import device_folder
from sarathi_lab.results.result import DisplayTable, Result
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.figures import PROCESSES, counts, lines, recompute

if TYPE_CHECKING:  # torch, of what measures, takes seconds that a simulation need not wait for
    from matplotlib.figure import Figure

    from sarathi_lab.executor.measured_backend import MeasuredBackend

AUTO = "auto"
SPREAD = "use the share of the median, such as 0.15"
DEFAULT_SEED = 0
PAPERS_GPU = "a6000"  # the default of the hardware group
# Settings of the executor that a paper's figure has of its own.
OF_PAPER = ("dtype", "cost_model", "tensor_parallel", "pipeline_parallel", "weights")
OF_ERRORS = ("draw", "slower_shape", "slowdown")  # settings that show what errors may change
SIZES = "task.sizes."
Tables = Mapping[str, pd.DataFrame]


def all_draws_or_none(name: str, value: object) -> None:
    """Raise UserError unless `value` is 0 or `NUM_DRAWS`: the constants vary independently of each
    other only over all draws together.
    """
    if type(value) is not int or value not in (0, NUM_DRAWS):
        raise UserError(
            f"{name}={value} is not all draws of the cost model's constants, whose errors only "
            f"these show; use {NUM_DRAWS}, or 0 for intervals of seeds alone"
        )


class Prepared(NamedTuple):
    """The checked jobs of one run: those to measure, or those to simulate."""

    measured: Sequence[MeasuredJob] = ()
    simulated: Sequence[SimulatedJob] = ()


@dataclass(frozen=True)
class Measure(Task):
    """Make the points of `experiment`; its settings: `conf/task/measure.yaml`.

    Intervals wider than `max_spread` of the median leave a reason instead of a number. `stated` has
    the settings of the command line.
    """

    reads = ("executor", "model", "hardware", "device", "dtype", "seed")
    experiment: str
    function: str | None = None
    setup: str = one_of(AUTO, valid=(AUTO, *SETUPS))
    seconds: float | None = number(None, above=0, fix="use the seconds to measure for, such as 60")
    max_spread: float | None = number(None, above=0, fix=SPREAD)
    record: str | None = None
    every: int = whole(1, minimum=1, fix="use 1 for all points")
    sizes: Sizes | None = None
    processes: int | None = whole(None, minimum=1, fix=PROCESSES)
    draws: int = checked(all_draws_or_none, 0)
    stated: Sequence[str] = ()

    @cached_property
    def declared(self) -> Experiment:
        """The experiment: one of conf/experiment, or that of `function`."""
        name = self.experiment
        if self.function is None:
            require_one_of("task.experiment", name, CATALOG)
            return CATALOG[name]
        if name in CATALOG and self.function != CATALOG.paths[name]:
            raise UserError(
                f"task.function={self.function} is not of task.experiment={name}; name yours "
                f"otherwise, such as task.experiment=my_{name}, or drop it"
            )
        return load_experiment(self.function)

    @cached_property
    def _typed(self) -> Mapping[str, str]:
        """The settings of the command line, as they are typed, by their names."""
        return {name_of(setting): setting for setting in self.stated}

    def check(self, cfg: DictConfig) -> Prepared:
        """Refuse a model that does not fit the device, and settings without effect; return what is
        measured, a job a model, or simulated.
        """
        backend: Backend = build(cfg.executor)
        if backend.computes_tokens:
            from sarathi_lab.executor.measured_backend import MeasuredBackend

            measured = require_kind(backend, MeasuredBackend)
            return Prepared(measured=self._checked_measurements(cfg, measured))
        simulated = require_kind(backend, SimulatedBackend)
        return Prepared(simulated=self._checked_simulations(cfg, simulated))

    def _checked_simulations(
        self, cfg: DictConfig, backend: SimulatedBackend
    ) -> list[SimulatedJob]:
        self._refuse_unread_by_simulation(cfg, backend)
        self._refuse_unread_sizes(self._simulated_setup, self._simulated_sizes())
        declared = self.declared
        if self._is_as_paper(backend):
            self._check_as_paper(cfg, backend)
        if declared.is_of_stages:
            self._require_stages(backend)
        elif backend.num_stages > 1 and not (declared.is_in_rounds or backend.composes_kernels):
            raise UserError(
                f"executor.pipeline_parallel={backend.num_stages}: {declared.name} is for one "
                "batch at a time, not for a pipeline; use 1"
            )
        jobs = self.jobs(cfg, backend)
        for job in jobs:
            checked_job = job
            if job.is_varied:
                checked_job = job.in_variant(VARIANTS[0])  # which needs the errors of all kinds
            declared.check_simulated(checked_job.backend, job.spec, job.sizes)
        return jobs

    def _is_as_paper(self, backend: SimulatedBackend) -> bool:
        """Whether a figure of the paper is recomputed as the paper has it."""
        return self.declared.has_paper and not backend.composes_kernels

    def _refuse_unread_by_simulation(self, cfg: DictConfig, backend: SimulatedBackend) -> None:
        """Refuse settings that no simulation of the experiment reads."""
        declared = self.declared
        unread = ["seconds", "max_spread"]
        remedy = "drop it"
        if declared.is_in_rounds:
            remedy = f"use task.draws={NUM_DRAWS}"
        else:
            # The draws are further parts of each round; other points have all draws in any case.
            unread.append("draws")
            if cfg.seed != DEFAULT_SEED:
                raise UserError(
                    f"seed={cfg.seed} has no effect: the requests of {declared.name} are the same "
                    "in every simulation; drop it"
                )
        if declared.has_paper or declared.is_in_rounds:
            unread.append("setup")  # it has the paper's sizes
        if not declared.has_paper:
            unread.append("every")
        self._refuse(unread, "simulated")
        reason = f": {declared.name} shows the errors of the cost model itself; {remedy}"
        refuse_unread(backend, OF_ERRORS, reason, "executor.")

    def _refuse_unread_sizes(self, setup: str, used: Sizes) -> None:
        """Refuse sizes that are typed for another set-up than `setup`, or in whose place others are
        `used`.
        """
        experiment = self.declared.name
        stated = self.declared.sizes(setup, self.sizes)
        for name, typed in self._typed.items():
            if not name.startswith(SIZES):
                continue
            chosen, _, size = name.removeprefix(SIZES).partition(".")
            if chosen != setup:
                raise UserError(
                    f"{typed} has no effect: this run of {experiment} has the sizes of "
                    f"{SIZES}{setup}; state it of these, or choose another task.setup"
                )
            # By identity: a size of the paper's points may be a table.
            if used.get(size) is not stated.get(size):
                raise UserError(
                    f"{typed} has no effect: {experiment} is recomputed at the paper's points; "
                    "drop it"
                )

    def _check_as_paper(self, cfg: DictConfig, backend: SimulatedBackend) -> None:
        """Refuse settings of a paper's figure, which is recomputed with the paper's."""
        name = self.declared.name
        reason = (
            f": {name} is recomputed as the paper has it, at both levels of the cost model; drop it"
        )
        refuse_unread(backend, OF_PAPER, reason, "executor.")
        if is_model_stated(cfg):
            chosen = cfg.model.get("name") or cfg.model.get("path")
            raise UserError(
                f"model={chosen} has no effect: {name} is of the paper's models; drop it"
            )

    def _stated_card(self, cfg: DictConfig, backend: SimulatedBackend) -> Hardware | None:
        """Return the card that is stated; None: each model has the one that it has in the paper.
        Raises UserError for figures of no stated card.
        """
        # The group's default stands for the GPUs of the paper, unless it is typed.
        if "hardware" in self._typed or cfg.hardware.name != PAPERS_GPU:
            return backend.hardware
        figures = []
        for name, typed in self._typed.items():
            if name.startswith("hardware."):
                figures.append(typed)
        # An experiment's own file may state some, too.
        if figures or backend.hardware != load_option("hardware", PAPERS_GPU):
            stated = figures[0] if figures else f"a figure of hardware={PAPERS_GPU}"
            raise UserError(
                f"{stated} has no effect: the models of {self.declared.name} are on the GPUs of "
                f"the paper; choose a GPU, too, such as hardware={PAPERS_GPU} on the command line"
            )
        return None

    def _checked_measurements(self, cfg: DictConfig, backend: MeasuredBackend) -> list[MeasuredJob]:
        from sarathi_lab.executor.torch.checks import require_one_stage
        from sarathi_lab.experiment.measure import expect

        declared = self.declared
        if declared.is_simulated:
            raise UserError(f"{declared.name} is simulated only; add executor=simulated")
        if declared.is_of_stages:
            self._require_stages(backend)
        else:
            require_one_stage(backend, "task=measure")
        self._refuse(["every", "processes", "draws"], "measured")
        _, checkpoint = resolve_model(cfg, backend)
        if checkpoint is not None:
            raise UserError(f"task=measure takes random weights; drop model.path={cfg.model.path}")
        sizes = self._measured_sizes(backend)
        self._refuse_unread_sizes(self._setup(backend), sizes)
        specs = self._measured_specs(cfg, backend)
        # All before the first is announced: an engine is made for the largest of them.
        for spec in specs:
            self._check_room(backend, spec, sizes)
        jobs = []
        for spec in specs:
            jobs.append(self._measurement(cfg, backend, spec, len(specs)))
        for job in jobs:
            expect(job)
        return jobs

    def _check_room(self, backend: MeasuredBackend, spec: ModelSpec, sizes: Sizes) -> None:
        """Raise UserError for a device without room, with what helps an experiment."""
        from sarathi_lab.executor.memory import NoRoom

        try:
            self.declared.check_measured(backend, spec, sizes)
        except NoRoom as error:
            is_large = self._setup(backend) == "paper"
            advice = "use task.setup=small, or take" if is_large else "take"
            raise UserError(f"{error.reason}; {advice} a smaller model") from None

    def _measurement(
        self, cfg: DictConfig, backend: MeasuredBackend, spec: ModelSpec, num_models: int
    ) -> MeasuredJob:
        """Return how the experiment is measured with one of `num_models`."""
        declared = self.declared
        seconds = self.seconds or declared.seconds  # of all models together
        return MeasuredJob(
            declared,
            spec,
            backend,
            self._measured_sizes(backend),
            seed=int(cfg.seed),
            seconds=seconds / num_models,
            max_spread=declared.max_spread if self.max_spread is None else self.max_spread,
            is_cut=self._setup(backend) == "paper",
        )

    def _require_stages(self, backend: Backend) -> None:
        if backend.num_stages == 1:
            raise UserError(
                f"{self.experiment} is of a pipeline's stages; add executor=vllm "
                "executor.pipeline_parallel=2, or executor=simulated executor.pipeline_parallel=2"
            )

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Leave figure.parquet, a CSV by device, also recorded, and a picture."""
        prepared: Prepared = context.prepared or self.check(cfg)
        if prepared.measured:
            return self._measured(prepared.measured, context)
        tables = simulate(prepared.simulated, self.processes)
        if prepared.simulated[0].backend.composes_kernels:
            return self._composed(tables, context)
        if self.declared.has_paper:
            return self._recomputed(tables)
        return self._result(by_folder(tables), context, {})

    def _recomputed(self, tables: Sequence[pd.DataFrame]) -> Result:
        """Record a figure of the paper, also of points that were counted, with its errors."""
        tables_by_method = defaultdict(list)
        for table in tables:
            # Of a paper's figure the device is named with level, model and method.
            named = table.assign(device_name=table.device)
            tables_by_method[str(table.method.iloc[0])].append(named)
        recorded = {}
        for method, named_tables in tables_by_method.items():
            ending = f"-{method}" if method else ""
            folders = by_folder(named_tables)
            self._record(folders, ending)
            for folder, table in folders.items():
                recorded[f"{folder}{ending}"] = table
        result = recompute(tables)
        return replace(result, tables={**result.tables, **recorded}, float_format="%.6g")

    def _composed(self, tables: Sequence[pd.DataFrame], context: RunContext) -> Result:
        """Keep what measured kernels compose: no operation takes no time, so a zero has no kernel.
        Raises UserError where they compose nothing.
        """
        # A point of zero has an operation without a measured kernel.
        composed = [table[table.y > 0] for table in tables]
        if all(table.empty for table in composed):
            raise UserError(
                f"{self.declared.name} has no point at which all kernels were measured; use "
                "executor.cost_model=profiled"
            )
        return self._result(by_folder(composed), context, {})

    def _refuse(self, names: Sequence[str], how: str) -> None:
        """Refuse arguments of the task that it does not read for what is simulated or measured."""
        reason = f": {self.declared.name} does not read it where it is {how}; drop it"
        refuse_unread(self, names, reason, "task.")

    def _setup(self, backend: MeasuredBackend) -> str:
        """Return the set-up that was chosen, or the one that suits the device."""
        if self.setup != AUTO:
            return self.setup
        return "paper" if backend.uses_gpus else "small"

    def _measured_sizes(self, backend: MeasuredBackend) -> Sizes:
        return self.declared.sizes(self._setup(backend), self.sizes)

    def _simulated_sizes(self) -> Sizes:
        """Return the sizes of the chosen set-up, the paper's by default."""
        if self.declared.has_paper:
            return self.declared.paper_sizes(self.every, self.sizes)
        return self.declared.sizes(self._simulated_setup, self.sizes)

    @property
    def _simulated_setup(self) -> str:
        return "paper" if self.setup == AUTO else self.setup

    def _measured_specs(self, cfg: DictConfig, backend: MeasuredBackend) -> list[ModelSpec]:
        """Return the chosen model, or those that the experiment compares, or the usual one."""
        compared = self._measured_sizes(backend).get("models", ())
        if not compared or is_model_stated(cfg):
            spec, _ = resolve_model(cfg, backend)
            return [spec]
        specs = []
        for name in compared:
            spec = load_option("model", name)
            specs.append(backend.with_weights(spec, None))
        return specs

    def _measured(self, jobs: Sequence[MeasuredJob], context: RunContext) -> Result:
        tables_by_name = defaultdict(list)
        for job in jobs:
            for name, table in self.declared.measure(job).items():
                tables_by_name[name].append(table)
        joined: Measured = {}
        for name, tables in tables_by_name.items():
            joined[name] = pd.concat(tables, ignore_index=True)
        points = joined.pop("")
        first_job = jobs[0]
        device = self._folder(first_job.backend, first_job.spec.name)
        folder = self.declared.folder_of(device)
        return self._result({folder: points}, context, joined)

    def _folder(self, backend: MeasuredBackend, model: str) -> str:
        """Return the name of the results' folder: "cpu", "nvidia-h200", "vllm-cpu-pp2"."""
        from sarathi_lab.executor.device import device_description

        device = backend.torch_device
        names = [device_folder(device.type, device_description(device))]
        if backend.name != "torch":
            names.insert(0, backend.name)
        if backend.tensor_parallel > 1:
            names.append(f"tp{backend.tensor_parallel}")
        if backend.num_stages > 1:
            names.append(f"pp{backend.num_stages}")
        papers = self.declared.papers
        # The model of most records is not named.
        usual = papers[0].model if papers else backend.default_model
        if backend.uses_gpus and model != usual:
            names.append(model)
        return "-".join(names)

    def _result(self, tables: Tables, context: RunContext, others: Tables) -> Result:
        """`others` are further tables of the one device that was measured."""
        declared = self.declared
        self._record(tables)
        for name, rows in others.items():
            self._record(dict.fromkeys(tables, rows), f"-{name}")
        points_of_folders = []
        for folder, table in tables.items():
            device_and_model = table.device_name + ", " + table.model
            source = load.source_of(folder)
            labelled = table.assign(device=device_and_model, source=source)
            points_of_folders.append(labelled)
        points = pd.concat(points_of_folders, ignore_index=True)
        pictures = {}
        if points.y.notna().any():
            pictures[declared.name] = self._picture(points)
        # A map has too many cells for a line each.
        describe = counts if declared.look.kind == "heat" else lines
        shown: list[DisplayTable | str] = []
        for device, table in tables.items():
            shown.append(describe(device, table))
        if COMPOSITIONS in others:
            host_shares = others[COMPOSITIONS].host_share.fillna(0.0)
            shown += host_caution("some of these points", float(host_shares.max()))
        return Result(
            tables={POINTS: points, **tables, **others},
            figures=pictures,
            shown=shown,
            places={"points": context.run_dir / POINTS},
            tags=[declared.name, *tables],
            float_format="%.6g",
        )

    def _picture(self, points: pd.DataFrame) -> Figure:
        """Draw points beside those of the paper, if it has any."""
        declared = self.declared
        if declared.has_paper:
            points = pd.concat([paper(declared.name), points], ignore_index=True)
        return panels.draw(declared.look, points)

    def _record(self, tables: Tables, ending: str = "") -> None:
        """Record tables by device, in files that are called by the experiment and an `ending`."""
        if self.record is None:
            return
        root = Path(str(self.record))
        for device, table in tables.items():
            path = load.save(table, self.experiment, device, root, ending)
            print_place("record", path)

    def jobs(self, cfg: DictConfig, backend: SimulatedBackend) -> list[SimulatedJob]:
        """List the chosen model on the chosen device; without a choice those of the paper, each on
        as many devices as there, of the chosen kind (those of it, if it has any) or the paper's.
        """
        declared = self.declared
        if self._is_as_paper(backend):
            card = self._stated_card(cfg, backend)
            cards = [] if card is None else [card]
            return paper_jobs(declared, cards, self.every, self.sizes)
        sizes = self._simulated_sizes()
        if is_model_stated(cfg) or not declared.papers:
            spec, _ = resolve_model(cfg, backend)
            pairs = [(spec, backend)]
        else:
            pairs = self._on_platforms(cfg, backend)
        jobs = []
        for model, devices in pairs:
            job = SimulatedJob(
                declared,
                model,
                devices,
                sizes,
                seed=int(cfg.seed),
                is_varied=self.draws > 0,
            )
            jobs.append(job)
        return jobs

    def _on_platforms(
        self, cfg: DictConfig, backend: SimulatedBackend
    ) -> list[tuple[ModelSpec, SimulatedBackend]]:
        """Return the models of the paper, each on as many devices as there: of the stated card,
        then those that the paper has on it, if any, or of the paper's. Raises UserError for
        settings of devices that these models have of their own.
        """
        declared = self.declared
        if backend.tensor_parallel > 1:
            raise UserError(
                f"executor.tensor_parallel={backend.tensor_parallel} has no effect: the models of "
                f"{declared.name} have as many devices as it names; choose a model, too, such as "
                "model=yi-34b"
            )
        card = self._stated_card(cfg, backend)
        platforms: Sequence[Platform] = declared.papers
        if card is not None:
            on_card = [platform for platform in platforms if platform.hardware == card.name]
            platforms = on_card or platforms
        pairs = []
        for platform in platforms:
            hardware = card or load_option("hardware", platform.hardware)
            devices = replace(backend, hardware=hardware, tensor_parallel=platform.num_devices)
            pairs.append((load_option("model", platform.model), devices))
        return pairs

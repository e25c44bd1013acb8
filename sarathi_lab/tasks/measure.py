"""The task of one experiment: measured on a real device, computed with executor=simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.checked import number, one_of, refuse_unread, whole
from sarathi_lab.config.console import print_place
from sarathi_lab.config.errors import UserError, require_one_of
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.executor import Backend
from sarathi_lab.engine.single_iteration import host_caution
from sarathi_lab.executor.device import device_description
from sarathi_lab.executor.measured_backend import MeasuredBackend
from sarathi_lab.executor.memory import NoRoom
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.torch.checks import require_one_stage
from sarathi_lab.experiment.measure import COMPOSITIONS, Session
from sarathi_lab.experiment.recorded import as_points, paper
from sarathi_lab.experiment.registry import FIGURES, SETUPS, Figure, Job, load_figure, paper_jobs
from sarathi_lab.experiment.simulate import by_folder, simulate
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results import load
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import figures as plots
from sarathi_lab.results.provenance import device_folder
from sarathi_lab.results.result import Result
from sarathi_lab.results.table import rows_of_points
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.figures import PROCESSES, counts, lines, recompute
from sarathi_lab.tasks.plan import changed

AUTO = "auto"
SPREAD = "use the share of the median, such as 0.15"
PAPERS_GPU = "a6000"  # the default of the hardware group
STAGES = f"{load.SIMULATED}pipeline-"  # before the device whose iterations are the stages
Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Measure(Task):
    """Make the points of `experiment`; its settings: `conf/task/measure.yaml`.

    Intervals wider than `max_spread` of the median leave a reason instead of a number.
    """

    reads = ("executor", "model", "hardware", "device", "dtype", "seed")
    experiment: str
    cases: str | None = None
    setup: str = one_of(AUTO, valid=(AUTO, *SETUPS))
    seconds: float | None = number(None, above=0, fix="use the seconds to measure for, such as 60")
    max_spread: float | None = number(None, above=0, fix=SPREAD)
    record: str | None = None
    every: int = whole(1, minimum=1, fix="use 1 for all points")
    sizes: Mapping[str, Any] | None = None
    processes: int | None = whole(None, minimum=1, fix=PROCESSES)

    @cached_property
    def figure(self) -> Figure:
        """The experiment: one of conf/experiment, or that of `cases`."""
        if self.experiment not in FIGURES and self.cases is not None:
            return load_figure(self.cases)
        require_one_of("task.experiment", self.experiment, FIGURES)
        return FIGURES[self.experiment]

    def check(self, cfg: DictConfig) -> list[Session] | list[Job]:
        """Refuse a model that does not fit the device, and settings without effect; return what is
        measured, a session a model, or simulated.
        """
        backend = build(cfg.executor)
        if isinstance(backend, MeasuredBackend):
            return self._checked_sessions(cfg, backend)
        return self._checked_jobs(cfg, backend)

    def _checked_jobs(self, cfg: DictConfig, backend: SimulatedBackend) -> list[Job]:
        figure = self.figure
        for name in ("seconds", "max_spread"):
            self._refuse(name, "is for measuring, and executor=simulated computes")
        if figure.has_paper:
            why = "is for measuring: the paper's figures are recomputed at its sizes"
            self._refuse("setup", why)
            figure.sizes("paper", self.sizes)
            if not backend.composes_kernels:
                self._check_as_paper(cfg, backend)
        else:
            self._refuse("every", f"is for the paper's curves, and {figure.name} is none")
        if figure.is_in_rounds:
            self._refuse("setup", "is for measuring: what is simulated has the paper's sizes")
        elif figure.is_of_stages:
            self._require_stages(backend)
        elif backend.num_stages > 1 and not backend.composes_kernels:
            raise UserError(
                f"executor.pipeline_parallel={backend.num_stages}: {figure.name} is for one batch "
                "at a time, not for a pipeline; use 1"
            )
        has_platforms = is_usual_model(cfg) and bool(figure.papers)
        if has_platforms and backend.tensor_parallel > 1:
            raise UserError(
                f"executor.tensor_parallel={backend.tensor_parallel} has no effect: the models of "
                f"{figure.name} have as many devices as it names; choose a model, too, such as "
                "model=yi-34b"
            )
        jobs = self.jobs(cfg, backend)
        for job in jobs:
            figure.check(job.backend, job.spec, job.sizes)
        return jobs

    def _check_as_paper(self, cfg: DictConfig, backend: SimulatedBackend) -> None:
        """Refuse settings of a paper's figure, which is recomputed with the paper's."""
        names = ("dtype", "cost_model", "tensor_parallel", "pipeline_parallel")
        why = f": {self.figure.name} is recomputed as the paper has it, at both levels of the cost "
        refuse_unread(backend, names, f"{why}model; drop it", "executor.")
        self._require_usual_model(cfg, "is of the paper's models; drop it")

    def _checked_sessions(self, cfg: DictConfig, backend: MeasuredBackend) -> list[Session]:
        figure = self.figure
        if figure.is_simulated:
            raise UserError(f"{figure.name} is simulated only; add executor=simulated")
        if figure.is_of_stages:
            self._require_stages(backend)
        else:
            require_one_stage(backend, "task=measure")
        self._refuse("every", "is for the recomputed figures of executor=simulated")
        self._refuse("processes", "is for executor=simulated, and a measurement is alone")
        if resolve_model(cfg, backend)[1] is not None:
            raise UserError(f"task=measure takes random weights; drop model.path={cfg.model.path}")
        sizes = self._sizes(backend)
        specs = self._measured_specs(cfg, backend)
        for spec in specs:
            self._check_room(backend, spec, sizes)
        sessions = [self._session(cfg, backend, spec, len(specs)) for spec in specs]
        for session in sessions:
            session.expect()
        return sessions

    def _check_room(
        self, backend: MeasuredBackend, spec: ModelSpec, sizes: Mapping[str, Any]
    ) -> None:
        """Raise UserError for a device without room, with what helps an experiment."""
        try:
            self.figure.check(backend, spec, sizes)
        except NoRoom as error:
            is_large = self._setup(backend) == "paper"
            fix = "use task.setup=small, or take" if is_large else "take"
            raise UserError(f"{error.reason}; {fix} a smaller model") from None

    def _session(
        self, cfg: DictConfig, backend: MeasuredBackend, spec: ModelSpec, num_models: int
    ) -> Session:
        """Return how the experiment is measured with one of `num_models`."""
        figure = self.figure
        sizes = self._sizes(backend)
        seconds = self.seconds or figure.seconds
        return Session(
            backend,
            spec,
            sizes,
            room=figure.room_on(backend, spec, sizes),
            seconds=seconds / num_models,
            max_spread=figure.max_spread if self.max_spread is None else self.max_spread,
            make_policy=partial(policy_of, cfg),
            seed=int(cfg.seed),
            is_cut=self._setup(backend) == "paper",
        )

    def _require_stages(self, backend: Backend) -> None:
        if backend.num_stages == 1:
            raise UserError(
                f"{self.experiment} is of a pipeline's stages; add executor=vllm "
                "executor.pipeline_parallel=2, or executor=simulated executor.pipeline_parallel=2"
            )

    def _require_usual_model(self, cfg: DictConfig, why: str) -> None:
        if not is_usual_model(cfg):
            chosen = cfg.model.get("name") or cfg.model.get("path")
            raise UserError(f"model={chosen} has no effect: {self.experiment} {why}")

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """Leave figure.parquet, a CSV by device, also recorded, and a picture."""
        backend, figure = build(cfg.executor), self.figure
        prepared: Any = context.prepared or self.check(cfg)
        if isinstance(backend, MeasuredBackend):
            return self._measured(prepared, context)
        jobs: list[Job] = prepared
        tables = simulate(jobs, self.processes)
        if backend.composes_kernels:
            return self._composed(tables, context)
        if not figure.has_paper:
            return self._result(by_folder(tables), "simulated", context, {})
        result, kept = recompute(tables), dict[str, pd.DataFrame]()  # with errors
        for method in dict.fromkeys(job.method for job in jobs):
            named = [table.assign(device_name=table.device) for table in tables]
            recorded = by_folder(table for table in named if table.method.iloc[0] == method)
            self._record(recorded, f"{figure.name}-{method}" if method else None)
            kept |= {"-".join(filter(None, (name, method))): recorded[name] for name in recorded}
        return replace(result, tables={**result.tables, **kept}, float_format="%.6g")

    def _composed(self, tables: Sequence[pd.DataFrame], context: RunContext) -> Result:
        """Keep what measured kernels compose: no operation takes no time, so a zero has no kernel.
        Raises UserError where they compose nothing.
        """
        composed = [table[table.y > 0] for table in tables]
        if all(table.empty for table in composed):
            raise UserError(
                f"{self.figure.name} has no point at which all kernels were measured; use "
                "executor.cost_model=profiled"
            )
        return self._result(by_folder(composed), load.COMPOSED_SOURCE, context, {})

    def _refuse(self, name: str, why: str) -> None:
        refuse_unread(self, [name], f": it {why}; drop it", "task.")

    def _setup(self, backend: Any) -> str:
        """Return the set-up that was chosen, or the one that suits the device."""
        if self.setup != AUTO:
            return self.setup
        is_small = isinstance(backend, MeasuredBackend) and not backend.uses_gpus
        return "small" if is_small else "paper"

    def _sizes(self, backend: Any) -> Mapping[str, Any]:
        return self.figure.sizes(self._setup(backend), self.sizes)

    def _measured_specs(self, cfg: DictConfig, backend: MeasuredBackend) -> list[ModelSpec]:
        """Return the chosen model, or those that the experiment compares, or the usual one."""
        compared = self._sizes(backend).get("models", ())
        if compared and is_usual_model(cfg):
            specs = [load_option("model", name) for name in compared]
            return [backend.with_weights(spec, None) for spec in specs]
        return [resolve_model(cfg, backend)[0]]

    def _measured(self, sessions: Sequence[Session], context: RunContext) -> Result:
        figure, backend = self.figure, sessions[0].backend
        each = [figure.measure(session) for session in sessions]
        tables = {
            stem: pd.concat([one[stem] for one in each if stem in one], ignore_index=True)
            for stem in dict.fromkeys(chain.from_iterable(each))
        }
        device, source = self._folder(backend, sessions[0].spec.name), "measured"
        if figure.is_partly_simulated:
            device, source = STAGES + device, "simulated"
        return self._result({device: tables.pop("")}, source, context, tables)

    def _folder(self, backend: MeasuredBackend, model: str) -> str:
        """Return the name of the results' folder: "cpu", "nvidia-h200", "vllm-cpu-pp2"."""
        device = backend.torch_device
        parts = [device_folder(device.type, device_description(device))]
        if backend.name != "torch":
            parts.insert(0, backend.name)
        if (degree := backend.tensor_parallel) > 1:
            parts.append(f"tp{degree}")
        if (num_stages := backend.num_stages) > 1:
            parts.append(f"pp{num_stages}")
        usual = next((platform.model for platform in self.figure.papers), backend.default_model)
        if backend.uses_gpus and model != usual:
            parts.append(model)
        return "-".join(parts)

    def _result(self, tables: Tables, source: str, context: RunContext, others: Tables) -> Result:
        """`others` are further tables of the one device that was measured."""
        figure = self.figure
        self._record(tables)
        for name, rows in others.items():
            self._record(dict.fromkeys(tables, rows), f"{figure.name}-{name}")
        points = as_points(pd.concat(tables.values(), ignore_index=True), source)
        pictures = {}
        if points.y.notna().any():  # beside the paper's points
            shown = [paper(figure.name)] if figure.has_paper else []
            rows = rows_of_points(pd.concat([*shown, points], ignore_index=True))
            pictures[figure.name] = plots.draw(figure.look, rows)
        describe = counts if figure.look.kind == "heat" else lines
        return Result(
            tables={POINTS: points, **tables, **others},
            figures=pictures,
            shown=[
                *(describe(device, table) for device, table in tables.items()),
                *_host_shares(others.get(COMPOSITIONS)),
                *_operation_shares(others.get(COMPOSITIONS)),
            ],
            places={"points": context.run_dir / POINTS},
            tags=[figure.name, *tables],
            float_format="%.6g",
        )

    def _record(self, tables: Tables, stem: str | None = None) -> None:
        if self.record is None:
            return
        for device, table in tables.items():
            path = load.save(table, self.experiment, device, Path(str(self.record)), stem)
            print_place("record", path)

    def jobs(self, cfg: DictConfig, backend: SimulatedBackend) -> list[Job]:
        """List the chosen model on the chosen device; without a choice those of the paper, each on
        as many devices as there, of the chosen kind (those of it, if it has any) or the paper's.
        """
        figure, hardware = self.figure, str(cfg.hardware.name)
        # The group's default stands for the GPU that the paper used for each figure.
        gpu = None if hardware == PAPERS_GPU else hardware
        if figure.has_paper and not backend.composes_kernels:
            return paper_jobs(figure, gpu and [gpu], self.every, self.sizes)
        if is_usual_model(cfg) and figure.papers:
            on_gpu = [platform for platform in figure.papers if platform.hardware == gpu]
            platforms = on_gpu or figure.papers
            models = [load_option("model", platform.model) for platform in platforms]
            backends = [
                replace(
                    backend,
                    hardware=backend.hardware if gpu else load_option("hardware", usual),
                    tensor_parallel=num_devices,
                )
                for _, usual, num_devices in platforms
            ]
        else:
            models, backends = [resolve_model(cfg, backend)[0]], [backend]
        make_policy, sizes = partial(policy_of, cfg), self._sizes(backend)
        if figure.has_paper:
            sizes = figure.paper_sizes(self.every, self.sizes)
        return [
            Job(figure, spec, on, sizes, make_policy=make_policy, seed=int(cfg.seed))
            for spec, on in zip(models, backends, strict=True)
        ]


def _host_shares(compositions: pd.DataFrame | None) -> list[str]:
    """State how much of the single iterations that were timed is the host's work."""
    if compositions is None or compositions.host_share.isna().all():
        return []
    row = int(np.nanargmax(compositions.host_share))
    host_share = float(compositions.host_share.iloc[row])
    return [
        f"  of an iteration alone, the host's work is at most {host_share:.1%} "
        f"({compositions.composition.iloc[row]})",
        *host_caution("some of these points", host_share),
    ]


def _operation_shares(compositions: pd.DataFrame | None) -> list[str]:
    """Caution that operations timed by hooks are not all of an iteration."""
    if compositions is None or compositions.operation_share.isna().all():
        return []
    shares = compositions.operation_share
    return [
        f"  operations are timed by hooks, without graphs: they sum to {shares.min():.0%} to "
        f"{shares.max():.0%} of an iteration; what is between them counts as others"
    ]


def is_usual_model(cfg: DictConfig) -> bool:
    """Return whether no model is chosen, neither by its name nor by its files."""
    return "AutoModel" in str(cfg.model["_target_"]) and cfg.model.get("path") is None


def policy_of(cfg: DictConfig, name: str, budget: int) -> Policy | None:
    """The policy of `conf/policy/`, if there is one, with a token budget where it reads one."""
    path = CONF / "policy" / f"{name}.yaml"
    if not path.is_file():
        return None
    policy: Policy = build(changed(cfg, policy=OmegaConf.load(path), chunk=budget).policy)
    return policy

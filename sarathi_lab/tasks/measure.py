"""The task of one experiment: measured on the device with executor=torch, computed with
executor=simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.console import print_place
from sarathi_lab.config.errors import UserError, require_int, require_number, require_one_of
from sarathi_lab.config.instantiate import build, load_option
from sarathi_lab.config.paths import CONF
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.device import resolve_device
from sarathi_lab.experiment.figures import FIGURES, Figure, paper
from sarathi_lab.experiment.measure import Measured, least_room, measure, room_of
from sarathi_lab.experiment.registry import SETUPS
from sarathi_lab.experiment.serving import MakePolicy
from sarathi_lab.experiment.simulate import computed, recorded_tables, served
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.results import load
from sarathi_lab.results.load import POINTS
from sarathi_lab.results.plots import figures as plots
from sarathi_lab.results.plots import serving as serving_plots
from sarathi_lab.results.provenance import device_folder
from sarathi_lab.results.result import Result, Shown
from sarathi_lab.tasks.figures import Figures, recompute
from sarathi_lab.tasks.plan import resolve_model

AUTO = "auto"
# of the hardware group: its default, which stands for the GPU that the paper used for each figure
PAPERS_GPU = "a6000"
STAGES = f"{load.SIMULATED}pipeline-"  # before the device whose iterations are the stages


@dataclass(frozen=True)
class Measure:
    """Make the points of `experiment` at the `sizes` of `setup` (null: those of conf/experiment),
    for about `seconds` (null: those it needs on a CPU).

    Intervals wider than `max_spread` of the median (null: what the experiment states) leave a
    reason instead of a number. `record` names a folder such as experiments, where the table is kept
    as `<group>/<experiment>/results/<device>/<experiment>.csv`, too. `every` takes each n-th point
    of the paper's long curves in simulation.
    """

    reads: ClassVar[tuple[str, ...]] = ("executor", "model", "hardware", "device", "dtype", "seed")
    has_runs: ClassVar[bool] = False
    experiment: str
    setup: str = AUTO
    seconds: float | None = None
    max_spread: float | None = None
    record: str | None = None
    every: int = 1
    sizes: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require_one_of("task.experiment", self.experiment, FIGURES)
        require_one_of("task.setup", self.setup, (AUTO, *SETUPS))
        for name, fix in (
            ("seconds", "use the seconds to measure for, such as 60"),
            ("max_spread", "use the share of the median, such as 0.15"),
        ):
            if (value := getattr(self, name)) is not None:
                require_number(f"task.{name}", value, above=0, fix=fix)
        require_int("task.every", self.every, 1, "use 1 for all points")

    def check(self, cfg: DictConfig) -> None:
        """Refuse a model that does not fit the device, and settings that nothing here would
        read.
        """
        backend, own = build(cfg.executor), self._own
        if isinstance(backend, TorchBackend):
            self._refuse("every", "is for the recomputed figures of executor=simulated")
            spec, checkpoint = resolve_model(cfg, backend)
            if checkpoint is not None:
                raise UserError(
                    f"task=measure takes random weights; drop model.path={cfg.model.path}"
                )
            backend.check(spec, least_room(own, spec, self._sizes(backend)))
            return
        for name in ("seconds", "max_spread"):
            self._refuse(name, "is for measuring, and executor=simulated computes")
        if own.has_paper:
            self._check_papers(cfg, backend)
            return
        self._refuse("every", f"is for the paper's curves, and {self.experiment} is none")
        if own.kind == "rounds":
            self._refuse("setup", "is for measuring: what is simulated has the paper's own sizes")
            for model, platform in self._platforms(cfg, backend):
                spec = load_option("model", model)
                platform.check(spec, least_room(own, spec, self._sizes(backend)))
            return
        spec, _ = resolve_model(cfg, backend)
        backend.check(spec, room_of(own, spec, self._sizes(backend)).kv_tokens)
        if backend.parallel.num_devices > 1:
            raise UserError(
                f"task=measure simulates one device, not {backend.parallel.description}; leave "
                "that out"
            )

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        """figure.parquet, a CSV by device and a picture; the lines are printed, the tables
        recorded.
        """
        backend, own = build(cfg.executor), self._own
        if isinstance(backend, TorchBackend):
            return self._measured(cfg, backend, context)
        if own.has_paper:  # with its errors and pictures
            found = recompute([own.name], self._gpus(cfg), self.every, self.sizes)
            tables = recorded_tables(found.tables[POINTS])
            self._record(tables)
            return replace(found, tables={**found.tables, **tables}, float_format="%.6g")
        if own.kind == "rounds":
            sizes = self._sizes(backend)
            platforms = self._platforms(cfg, backend)
            tables = served(own, platforms, policy_maker(cfg), int(cfg.seed), sizes)
        else:
            spec, _ = resolve_model(cfg, backend)
            tables = computed(own, spec, backend, self._sizes(backend))
        return self._result(tables, "simulated", context)

    @property
    def _own(self) -> Figure:
        return FIGURES[self.experiment]

    def _refuse(self, name: str, why: str) -> None:
        if (value := getattr(self, name)) != getattr(type(self), name):
            raise UserError(f"task.{name}={value} has no effect: it {why}; drop it")

    def _setup(self, backend: Any) -> str:
        """The sizes that were asked for, or those that suit the device."""
        is_cpu = isinstance(backend, TorchBackend) and resolve_device(backend.device).type == "cpu"
        usual = "small" if is_cpu else "paper"
        return usual if self.setup == AUTO else self.setup

    def _sizes(self, backend: Any) -> Mapping[str, Any]:
        return self._own.sizes(self._setup(backend), self.sizes)

    # -- measured ----------------------------------------------------------------------------------

    def _measured(self, cfg: DictConfig, backend: TorchBackend, context: RunContext) -> Result:
        spec, _ = resolve_model(cfg, backend)
        own, setup = self._own, self._setup(backend)
        found = measure(
            own,
            backend,
            spec,
            self._sizes(backend),
            seconds=self.seconds or own.seconds,
            max_spread=own.max_spread if self.max_spread is None else self.max_spread,
            make_policy=policy_maker(cfg),
            seed=int(cfg.seed),
            is_cut=setup == "paper",
        )
        table, device, source = found.table, self._device(backend, spec), "measured"
        if own.kind == "pipeline":
            stages = self._sizes(backend)["stages"]
            name = f"simulated pipeline of {stages} stages, times measured on {backend.device_name}"
            table, device, source = table.assign(device_name=name), STAGES + device, "simulated"
        return self._result({device: table}, source, context, found)

    def _device(self, backend: TorchBackend, spec: ModelSpec) -> str:
        """The folder of recorded results; on a GPU another model than the figure's has its own."""
        device = device_folder(resolve_device(backend.device).type, backend.device_name)
        papers = self._own.papers
        usual = papers[0].model if papers else backend.default_model
        return device if device == "cpu" or spec.name == usual else f"{device}-{spec.name}"

    def _result(
        self,
        tables: Mapping[str, pd.DataFrame],
        source: str,
        context: RunContext,
        found: Measured | None = None,
    ) -> Result:
        self._record(tables)
        kept = dict(tables)
        for name in ("compositions", "serving"):
            rows = pd.DataFrame() if found is None else getattr(found, name)
            if len(rows):
                kept[name] = rows
                self._record(dict.fromkeys(tables, rows), f"{self.experiment}-{name}")
        points = pd.concat(
            [_as_figure(table, source) for table in tables.values()], ignore_index=True
        )
        pictures = self._picture(points)
        places = {"points": context.run_dir / POINTS}
        if pictures:
            places["figure"] = context.run_dir / f"{self.experiment}.png"
        return Result(
            tables={POINTS: points, **kept},
            figures=pictures,
            shown=[_lines(device, table) for device, table in tables.items()],
            places=places,
            tags=[self.experiment, *tables],
            float_format="%.6g",
        )

    def _picture(self, points: pd.DataFrame) -> dict[str, Any]:
        """A figure of the paper beside the paper's own points; none of what it does not show, or
        has no number.
        """
        own = self._own
        if own.kind == "rounds":
            return {own.name: serving_plots.draw(own.name, own.question, points)}
        if own.look is None or points.y.isna().all():
            return {}
        whole = pd.concat([paper(own.name), points.assign(uncertainty=math.nan)], ignore_index=True)
        return {own.name: plots.draw(own.look, whole)}

    def _record(self, tables: Mapping[str, pd.DataFrame], stem: str | None = None) -> None:
        if self.record is None:
            return
        for device, table in tables.items():
            path = load.save(table, self.experiment, device, Path(self.record), stem)
            print_place("record", path)

    # -- simulated ---------------------------------------------------------------------------------

    def _gpus(self, cfg: DictConfig) -> list[str] | None:
        """The paper's GPUs, or the one that was chosen."""
        hardware = str(cfg.hardware.name)
        return None if hardware == PAPERS_GPU else [hardware]

    def _platforms(
        self, cfg: DictConfig, backend: SimulatedBackend
    ) -> Sequence[tuple[str, SimulatedBackend]]:
        """The chosen model on the chosen device; where neither was chosen those of the paper."""
        if self._gpus(cfg) or "AutoModel" not in str(cfg.model["_target_"]):
            return [(resolve_model(cfg, backend)[0].name, backend)]
        return [
            (own.model, SimulatedBackend(load_option("hardware", own.hardware), tensor_parallel=n))
            for own in self._own.papers
            for n in [own.num_devices]
        ]

    def _check_papers(self, cfg: DictConfig, backend: SimulatedBackend) -> None:
        self._refuse(
            "setup", "is for measuring: the paper's figures are recomputed at its own sizes"
        )
        for name in ("dtype", "cost_model", "tensor_parallel", "pipeline_parallel"):
            if (value := getattr(backend, name)) != getattr(SimulatedBackend, name):
                raise UserError(
                    f"executor.{name}={value} has no effect: {self.experiment} is recomputed as "
                    "the paper has it, at both levels of the cost model; drop it"
                )
        if "AutoModel" not in str(cfg.model["_target_"]):
            raise UserError(
                f"model={cfg.model.name} has no effect: {self.experiment} is of the paper's "
                "models; drop it"
            )
        self._own.sizes("paper", self.sizes)
        Figures([self.experiment], self._gpus(cfg), self.every).check(cfg)


def policy_maker(cfg: DictConfig) -> MakePolicy:
    """Policies of `conf/policy/` by name, with a token budget where they read one; None where there
    is no such file.
    """

    def make(name: str, budget: int) -> Policy | None:
        path = CONF / "policy" / f"{name}.yaml"
        if not path.is_file():
            return None
        own: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
        own.policy, own.chunk = OmegaConf.load(path), budget
        return build(own.policy)

    return make


def _as_figure(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """In the columns of `figure.parquet`; the error is half the interval over the value."""
    error = (table.high - table.low) / 2 / table.y.abs()
    device = table.device_name + ", " + table.model
    return table.assign(source=source, device=device, uncertainty=error)


def _lines(device: str, table: pd.DataFrame) -> Shown:
    """Each line's least and most with their intervals, and what is missing."""
    rows = []
    for (panel, series), line in table.groupby(["panel", "series"], sort=False):
        known = line.dropna(subset="y").sort_values("y")
        least, most = [_in_words(known.iloc[i]) for i in (0, -1)] if len(known) else ["", ""]
        missing = line[line.y.isna()]
        rows.append(
            {
                "panel": str(panel),
                "line": str(series),
                "points": str(len(line)),
                "least": least,
                "most": most,
                "unit": str(line.unit.iloc[0]),
                "missing": f"{len(missing)}: {missing.reason.iloc[0]}" if len(missing) else "",
            }
        )
    is_measured = bool(table.num_pairs.max())
    what = (
        "medians, in brackets the 95 % interval"
        if is_measured
        else "in brackets the cost model's own error"
    )
    left = ("panel", "line", "unit", "missing")
    return Shown(rows, left=left, title=f"{table.figure.iloc[0]} on {device}: {what}")


def _in_words(row: pd.Series) -> str:
    return f"{row.y:.3g} ({row.low:.3g} to {row.high:.3g}) at {row.x:g}"

"""The registry of the paper's figures and tables: what predicts them, for which model on which
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import Level, make_cost_model
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.experiment import iterations, pipeline, throughput
from sarathi_lab.experiment.bench import Bench, Estimate, Point
from sarathi_lab.experiment.paper_points import KEYS, fig12_ratios, paper_points
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec

COLUMNS = ["figure", "panel", "series", "x", "y", "unit", "source", "device", "uncertainty"]
PIPELINE = pipeline.SYSTEMS["sarathi"].parallel
DTYPE = "float16"  # the paper does not say; 2 bytes an element fit all its figures

Predict = Callable[[Bench, ModelSpec, int], Iterable[Point]]


@dataclass(frozen=True)
class Part:
    """Points of a figure that one model on one GPU gives; `predict` makes them from a cost
    model.
    """

    figure: str
    model: str
    hardware: str
    predict: Predict
    method: str = ""  # where a figure is predicted in more than one way


@dataclass(frozen=True)
class Device:
    """A GPU and the level of its cost model."""

    hardware: str
    level: Level

    def name(self, part: Part) -> str:
        """How tables call it."""
        return f"simulated {self.hardware}, {self.level}, {part.model}" + (
            f", {part.method}" if part.method else ""
        )


def _whole(predict: Callable[[Bench, ModelSpec], Iterable[Point]]) -> Predict:
    """A figure of few points, which `every` leaves whole."""
    return lambda bench, spec, every: predict(bench, spec)


def _fig04(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    points = paper_points("fig04", every)
    return iterations.fig04(bench, spec, zip(points.panel, points.series, points.x, strict=True))


def _fig07(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    return iterations.fig07(bench, spec, sorted(set(paper_points("fig07", every).x)))


def _fig09(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    points = paper_points("fig09", every)
    return throughput.fig09(bench, spec, zip(points.panel, points.chunk, points.x, strict=True))


def _fig09_counted(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    points = paper_points("fig09", every)
    return throughput.fig09_counted(
        bench, spec, zip(points.panel, points.chunk, points.x, strict=True)
    )


def _fig11(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    by_pd = paper_points("fig11", every).query("panel == 'b'")
    yield from throughput.fig11a(bench, spec)
    yield from throughput.fig11b(bench, spec, zip(by_pd.series, by_pd.x, strict=True))


def _fig13(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    yield from iterations.fig13ab(bench, spec)
    yield from throughput.fig13c(bench, spec)


def _fig12(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    """The share by which a time may be off is taken from one typical micro-batch."""
    found = pipeline.fig12(spec, bench.hardware, pipeline.NUM_REQUESTS // every)
    curves = paper_points("fig12").query("panel != 'ratios'")
    table = pipeline.at_points(found, curves)
    typical = make_batch(prefill_tokens=230, start=1000, num_decodes=26, context=2000)
    micro_batch = Bench(
        make_cost_model("analytic", spec, bench.hardware, DTYPE_BYTES[DTYPE], PIPELINE),
        bench.hardware,
    )
    error = micro_batch.seconds(micro_batch.batch(typical)).error
    for panel, series, x, y in zip(table.panel, table.series, table.x, table.y, strict=True):
        yield Point(panel, series, x, Estimate(y, error))
    for name, ratio in fig12_ratios(table).items():
        yield Point("ratios", name, 0.0, Estimate(ratio, math.hypot(error, error)))


def _table4(bench: Bench, spec: ModelSpec, every: int) -> Iterable[Point]:
    return throughput.table4(bench, spec, throughput.TABLE_4[spec.name])


PARTS = (
    Part("fig03", "13b", "a6000", _whole(iterations.fig03)),
    Part("fig04", "13b", "a6000", _fig04),
    Part("fig07", "13b", "a6000", _fig07),
    Part("fig08", "13b", "a6000", _whole(iterations.fig08)),
    Part("fig09", "13b", "a6000", _fig09),
    Part("fig09", "13b", "a6000", _fig09_counted, "counted"),
    Part("fig10", "13b", "a6000", _whole(iterations.fig10)),
    Part("fig11", "13b", "a6000", _fig11),
    Part("fig12", "gpt3-175b", "a100", _fig12),
    Part("fig12", "gpt3-175b", "a100_fig12", _fig12),
    Part("fig13", "13b", "a6000", _fig13),
    Part("table2", "13b", "a6000", _whole(iterations.table2)),
    Part("table4", "13b", "a6000", _table4),
    Part("table4", "33b", "a100", _table4),
)
FIGURES = tuple(dict.fromkeys(part.figure for part in PARTS))


def devices_of(part: Part, gpus: Sequence[str] | None = None) -> list[Device]:
    """The paper's GPU, or each of `gpus`, at every level that its file has for the model."""
    devices = []
    for gpu in dict.fromkeys(gpus or [part.hardware]):
        levels: tuple[Level, ...] = ("profiled", "analytic")
        if part.model not in load_option("hardware", gpu).profiles:
            levels = ("analytic",)
        devices += [Device(gpu, level) for level in levels]
    return devices


def check_fits(part: Part, device: Device) -> None:
    """Raise UserError for a device that can't hold the model's weights, or whose file is not for
    its elements.
    """
    spec, hardware, dtype_bytes = (
        load_option("model", part.model),
        load_option("hardware", device.hardware),
        DTYPE_BYTES[DTYPE],
    )
    if hardware.dtype_bytes != dtype_bytes:
        raise UserError(
            f"task.gpus: hardware {device.hardware} holds the figures of "
            f"{hardware.dtype_bytes}-byte elements, the "
            f"paper's are {dtype_bytes} bytes; choose another"
        )
    for parallel in _spread(part):
        make_cost_model(device.level, spec, hardware, dtype_bytes, parallel)
        weights, memory = (
            spec.weight_bytes(dtype_bytes),
            parallel.num_devices * hardware.memory_bytes,
        )
        if weights > memory:
            raise UserError(
                f"task.gpus: {part.figure} needs {weights / 1e9:.1f} GB for the weights of "
                f"{part.model} alone, "
                f"{parallel.num_devices} x {device.hardware} have {memory / 1e9:.0f} GB; leave "
                "that GPU or figure out"
            )


def _spread(part: Part) -> list[Parallel]:
    """The devices that the part's systems are spread over."""
    return (
        [system.parallel for system in pipeline.SYSTEMS.values()]
        if part.figure == "fig12"
        else [Parallel()]
    )


def predict(part: Part, device: Device, every: int = 1) -> pd.DataFrame:
    """The part's points on `device`, in the columns of `figure.parquet`.

    `every` takes each n-th of the points along the long axes only. Raises UserError as
    `make_cost_model` does.
    """
    spec, hardware = load_option("model", part.model), load_option("hardware", device.hardware)
    bench = Bench(make_cost_model(device.level, spec, hardware, DTYPE_BYTES[DTYPE]), hardware)
    points = part.predict(bench, spec, every)
    rows = [(p.panel, p.series, float(p.x), p.y.value, p.y.error) for p in points]
    table = pd.DataFrame(rows, columns=[*KEYS, "y", "uncertainty"])
    return complete(table, part.figure, source="simulated", device=device.name(part))


def paper(figure: str) -> pd.DataFrame:
    """The paper's own points in the same columns."""
    points = paper_points(figure).astype({"x": float})
    return complete(points.assign(uncertainty=0.0), figure, source="paper", device="paper")


def complete(table: pd.DataFrame, figure: str, *, source: str, device: str) -> pd.DataFrame:
    """Points of a figure (`KEYS`, y, uncertainty) in all `COLUMNS`; units are the paper's unless
    there are any.
    """
    if "unit" not in table:
        units = (
            paper_points(figure)
            .drop_duplicates(["panel", "series"])
            .set_index(["panel", "series"])
            .unit
        )
        table = table.join(units, on=["panel", "series"])
    return table.assign(figure=figure, source=source, device=device)[COLUMNS]

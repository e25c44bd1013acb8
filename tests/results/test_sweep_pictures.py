"""Twenty shapes of sweeps that people make, each drawn once: axes, colours, dashes, legends."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import same_color, to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import REPOSITORY
from sarathi_lab.results.plots.choice import check_stated
from sarathi_lab.results.plots.maps import EXCLAMATION
from sarathi_lab.results.plots.plot import UNSTEADY
from sarathi_lab.results.plots.style import colours
from sarathi_lab.results.plots.sweeps import draw_sweep
from sarathi_lab.results.quantities import is_quantity

CHUNK: dict[str, list[Any]] = {"chunk": [128, 256, 512]}
PD: dict[str, list[Any]] = {"pd_ratio": [7, 14, 50]}
BATCH: dict[str, list[Any]] = {"batch": [4, 18]}
LENGTH: dict[str, list[Any]] = {"seq_len": [1024, 2048]}
POLICY: dict[str, list[Any]] = {"policy": ["sarathi", "vllm_v1"]}
HARDWARE: dict[str, list[Any]] = {"hardware": ["a100", "h100"]}
RATE: dict[str, list[Any]] = {"workload.rate": [2, 4, 8]}
BASELINES = ("orca", "request_level")
ONE_RUN: dict[str, object] = {"batch": 8, "pd_ratio": 31, "seq_len": 1024, "num_requests": 32.0}
ONE_RUN |= {"model": "13b", "device": "simulated a6000", "workload.arrivals": "closed"}


@dataclass(frozen=True)
class Shape:
    """What was swept, and how; `chosen` are the axes that the user names."""

    swept: dict[str, list[Any]]
    baselines: tuple[str, ...] = BASELINES
    rounds: int = 1
    is_measured: bool = False
    chosen: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "chunk": Shape(CHUNK),
    "chunk, no baselines": Shape(CHUNK, ()),
    "P:D": Shape(PD),
    "length": Shape(LENGTH, ("orca",)),
    "policies": Shape({"policy": ["sarathi", "vllm_v1", "orca", "transformers_prefill_first"]}, ()),
    "hardware": Shape(HARDWARE),
    "rates": Shape(RATE),
    "chunk, P:D": Shape(CHUNK | PD),
    "chunk, P:D, no baselines": Shape(CHUNK | PD, ()),
    "policy, chunk": Shape(POLICY | CHUNK),
    "policy, rate": Shape(POLICY | RATE),
    "rate, chunk": Shape(RATE | CHUNK),
    "hardware, chunk": Shape(HARDWARE | CHUNK),
    "policy, hardware": Shape(POLICY | HARDWARE),
    "length, chunk": Shape(LENGTH | CHUNK, ()),
    "chunk, P:D, batch": Shape(CHUNK | PD | BATCH),
    "chunk, P:D, batch, length": Shape(CHUNK | PD | BATCH | LENGTH),
    "hardware, policy, rate": Shape(HARDWARE | POLICY | RATE),
    "measured chunk": Shape(CHUNK, rounds=3, is_measured=True),
    "measured policy, chunk": Shape(POLICY | CHUNK, rounds=6, is_measured=True),
    "measured chunk, P:D, batch": Shape(CHUNK | PD | BATCH, is_measured=True),
    "four settings as lines": Shape(CHUNK | PD | BATCH | LENGTH, chosen={"kind": "line"}),
}


def runs_of(shape: Shape) -> pd.DataFrame:
    """Make up a run for each combination; baselines have no chunk, and what is equal of them is."""
    rows = []
    for values in product(*shape.swept.values()):
        settings = {
            "policy": "sarathi",
            "chunk": 256,
            **dict(zip(shape.swept, values, strict=True)),
        }
        rows.append({**settings, "is_baseline": False})
        for policy in shape.baselines:
            rows.append({**settings, "policy": policy, "chunk": None, "is_baseline": True})
    table = pd.DataFrame(rows).drop_duplicates(ignore_index=True)
    table = pd.concat([table.assign(repetition=i) for i in range(shape.rounds)], ignore_index=True)
    table = table.assign(**{name: value for name, value in ONE_RUN.items() if name not in table})
    place = pd.Series(0.0, table.index)
    for name, values in shape.swept.items():
        if name == "chunk":
            place += table["chunk"].fillna(0.0) / 256
        elif name != "policy":
            place += table[name].map(values.index)
    order = table.policy.map({"orca": 1, "request_level": 2}).fillna(4)
    table = table.assign(
        executor="torch" if shape.is_measured else "simulated",
        schedule=table.policy + place.map(str),
        swept=f"[{','.join(shape.swept)}]",
        throughput=900.0 + 40 * order + 13 * place + 7 * table.repetition,
        tbt_p99=0.02 * (1 + order) + 0.011 * place,
        ttft_p50=0.4 * order**3 * (1 + place) ** 2,
        decode_time_alone=0.004,
        kv_reread_factor=1 + 0.2 * (order == 4) * (1 + place),
    )
    if "workload.rate" in table:
        is_fast = table["workload.rate"] == 8
        table = table.assign(**{"workload.arrivals": "poisson", "is_steady": 1.0 - is_fast})
    return table


def lines_of(ax: Axes) -> list[Line2D]:
    """The lines of series, without the caps of intervals."""
    caps = {cap for bars in ax.containers for cap in _caps(bars)}
    return [line for line in ax.get_lines() if line not in caps]


def _caps(bars: object) -> tuple[Line2D, ...]:
    return bars[1] if isinstance(bars, ErrorbarContainer) else ()


def marks_of(ax: Axes) -> set[str]:
    """The marks of runs that are not steady: crosses, in maps an exclamation mark."""
    crosses = {UNSTEADY for text in ax.texts if text.get_text().endswith(EXCLAMATION)}
    return crosses | {str(line.get_marker()) for line in ax.get_lines()}


def legend_of(figure: Figure) -> dict[str, Any]:
    (legend,) = figure.legends or [None]
    if legend is None:
        return {}
    names = [" ".join(text.get_text().split()) for text in legend.get_texts()]
    return dict(zip(names, legend.legend_handles, strict=True))


def words_of(text: Text | str) -> str:
    content = text if isinstance(text, str) else text.get_text()
    return " ".join(content.split())


@pytest.mark.parametrize("name", SHAPES)
def test_no_shape_of_a_sweep_misleads(name):
    """Nothing is empty, cut off, overprinted or unexplained, and no amount begins above zero."""
    shape = SHAPES[name]
    figure = draw_sweep(runs_of(shape), **shape.chosen)
    panels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    assert all(ax.has_data() for ax in panels)
    assert len(panels) == len({tuple(ax.get_position().bounds) for ax in panels})
    legend = legend_of(figure)
    assert len(legend) <= 12
    is_heat = len(shape.swept) > 2 and not shape.chosen
    assert any(ax.collections and not ax.containers for ax in panels) == is_heat
    has_rounds = shape.rounds > 1
    assert any("interval" in label for label in legend) == has_rounds
    if not shape.is_measured:
        assert not any(label.startswith(("hollow", "~")) for label in legend)
        assert not any(
            to_hex(line.get_markerfacecolor()) == "#ffffff"
            for ax in panels
            for line in ax.get_lines()
        )
    is_fast = "workload.rate" in shape.swept
    assert any("not steady: waits depend" in label for label in legend) == is_fast
    assert any(UNSTEADY in marks_of(ax) for ax in panels) == is_fast
    if is_heat:
        check_heat(panels, figure)
    else:
        check_lines(panels, legend, shape)
    check_texts(figure, panels)


def check_heat(panels: list[Axes], figure: Figure) -> None:
    """Every cell has a number, every row of panels its quantity, every column its setting."""
    for ax in panels:
        cells = ax.collections[0].get_array()
        assert len(ax.texts) == cells.count()
    named = [ax.get_title(loc="left") for ax in panels if ax.get_title(loc="left")]
    assert all(any(word in name for word in ("throughput", "TBT", "TTFT")) for name in named)
    assert any(ax.get_title() for ax in panels)


def check_lines(panels: list[Axes], legend: dict[str, Any], shape: Shape) -> None:
    """Amounts begin at zero; what does not, and logarithms, are stated; the legend has all."""
    for ax in panels:
        is_listed = "better" in ax.get_xlabel()
        scale = ax.get_xscale() if is_listed else ax.get_yscale()
        start = (ax.get_xlim() if is_listed else ax.get_ylim())[0]
        label = words_of(ax.get_xlabel() if is_listed else ax.get_ylabel())
        if not label:
            continue  # of a shared axis
        assert ("log scale" in label) == (scale == "log")
        assert (start == 0) == ("log scale" not in label and "axis from" not in label)
        assert "axis from" not in label or " / " in label
        if not is_listed and ax.get_xlabel():
            assert ("log scale" in words_of(ax.get_xlabel())) == (ax.get_xscale() == "log")
        if not legend:
            continue
        for line in lines_of(ax):
            colour, is_dashed = line.get_color(), line.is_dashed()
            if is_dashed:
                keys = [key for label, key in legend.items() if label.endswith("(baseline)")]
                assert any(key.get_linestyle() == line.get_linestyle() for key in keys)
            elif line.get_linestyle() != "None":
                keys = [key for label, key in legend.items() if "baseline" not in label]
                assert any(same_color(key.get_color(), colour) for key in keys)
    swept = "policy" if "policy" in shape.swept else None
    for label, key in legend.items():
        policy = label.partition(" = ")[0].removesuffix(" (baseline)")
        if swept and policy in (*shape.swept["policy"], *shape.baselines) and len(shape.swept) < 3:
            assert same_color(key.get_color(), colours([policy])[policy])


def check_texts(figure: Figure, panels: list[Axes]) -> None:
    """Nothing is cut off, and no text lies on another."""
    figure.draw_without_rendering()
    titles = [text for text in figure.texts if text.get_text()]
    for ax in panels:
        titles += [ax.title, ax.xaxis.label, ax.yaxis.label]
        titles += [label for axis in (ax.xaxis, ax.yaxis) for label in labels_of(axis)]
    shown = [text for text in titles if text.get_text().strip() and text.get_visible()]
    boxes = [text.get_window_extent() for text in shown]
    every = [*boxes, *(legend.get_window_extent() for legend in figure.legends)]
    assert all(box.x0 > -1 and box.x1 < figure.bbox.x1 + 1 for box in every)
    assert all(box.y0 > -1 and box.y1 < figure.bbox.y1 + 1 for box in every)
    pairs = combinations(range(len(shown)), 2)
    overlapping = [
        (shown[a].get_text(), shown[b].get_text()) for a, b in pairs if _overlap(boxes[a], boxes[b])
    ]
    assert overlapping == []


def _overlap(a: Any, b: Any) -> bool:
    """By more than a pixel, which is rounding."""
    across = min(a.x1, b.x1) - max(a.x0, b.x0)
    upwards = min(a.y1, b.y1) - max(a.y0, b.y0)
    return across > 1 and upwards > 1


def labels_of(axis: Axis) -> list[Text]:
    """The visible labels of the ticks that lie within the axis."""
    low, high = sorted(axis.get_view_interval())
    labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
    return [label for at, label in labels if low <= at <= high and label.get_visible()]


def test_only_a_size_that_all_policies_share_is_in_the_title():
    runs = pd.DataFrame({"workload.rate": [1, 2] * 2, "throughput": [1.0, 2.0, 1.5, 2.5]})
    sizes = {"policy": ["sglang"] * 2 + ["vllm_v1"] * 2, "batch": [4096] * 2 + [256] * 2}
    runs = runs.assign(**sizes, is_baseline=[False] * 2 + [True] * 2, num_requests=128.0)
    assert draw_sweep(runs, y="throughput").get_suptitle() == "requests counted 128"


NO_AXES = dict.fromkeys(("x", "hue", "col", "y", "kind"))
MISTYPED = {
    "plot.y=thruput is no setting or quantity of these runs (did you mean thr": {"y": "thruput"},
    "plot.x=chnk is no setting or quantity of these runs (did you mean chunk?": {"x": "chnk"},
    "plot.y=ttft_p9x is no": {"y": ["throughput", "ttft_p9x"]},
    "use such as workload.rate, throughput": {"hue": "polices"},
    "plot.x=prompt_len is one of": {"x": "prompt_len"},
    "plot.kind=lines is unknown (did you mean line?)": {"kind": "lines"},
}


@pytest.mark.parametrize(("message", "axes"), MISTYPED.items())
def test_a_name_that_no_run_has_is_refused_beforehand(message, axes):
    settings = ["chunk", "policy", "workload.rate", "workload.prompt_len", "data.prompt_len"]
    with pytest.raises(UserError, match=re.escape(message)):
        check_stated(NO_AXES | axes, settings, ["workload.rate"], [])


def test_names_that_a_run_may_have_are_taken():
    names = ["ttft_p90", "slowdown_short_mean", "tbt_p99_vs_orca", "my_share", "throughput", "mfu"]
    axes = {"x": "rate", "hue": "policy", "y": names, "kind": "heat"}
    check_stated(NO_AXES | axes, ["policy", "workload.rate"], [], ["my_share"])


def test_every_documented_quantity_of_a_run_is_known():
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
    sections = re.split(r"^## ", page.partition("## Your own")[0], flags=re.MULTILINE)
    names = []
    for section in sections:
        if not section.startswith("Advice"):  # of searches, which no sweep draws
            for cell in re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE):
                names += re.findall(r"`(\w+)`", cell)
    assert len(names) > 80
    assert [name for name in names if not is_quantity(name)] == ["slowdown_long_to_short"]


def test_a_quantity_of_the_users_has_no_better_side():
    columns = {"chunk": [128, 256], "throughput": [1.0, 2.0], "my_share": [0.5, 0.6]}
    runs = pd.DataFrame(columns).assign(policy="sarathi", is_baseline=False)
    labels = [ax.get_ylabel() for ax in draw_sweep(runs, y=["throughput", "my_share"]).axes]
    assert ["better" in label for label in labels] == [True, False]

"""What all pictures share: colours of policies, text that can be read and does not overlap, and
axes that show what is in the tables.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pandas as pd
import pytest
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from sarathi_lab.config.paths import CONF
from sarathi_lab.experiment.recorded import points_of
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results.plots import sweeps
from sarathi_lab.results.plots.panels import draw
from sarathi_lab.results.plots.style import POLICIES, colours, finished, panels, tick_in_steps

PAGE = 830  # pixels to which a page shrinks a picture
SMALLEST = 8.0  # pixels of a font's height, there


def labels_in(figure: Figure) -> list[str]:
    return [" ".join(text.get_text().split()) for text in figure.legends[0].get_texts()]


def keys_by_label(figure: Figure) -> dict[str, Line2D]:
    """The lines in a sweep's legend by their labels."""
    return dict(zip(labels_in(figure), figure.legends[0].legend_handles, strict=True))


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """A made-up run of every policy, the slow ones a hundred times as slow."""
    rows = []
    for i, name in enumerate(POLICIES):
        slow = 100.0 if i % 9 == 0 else 1.0
        latencies = {"ttft_p50": 4.0 * slow + i / 50, "ttft_p99": 9.0 * slow, "tbt_p99": 0.1 * slow}
        rows.append({"policy": name, "name": name, "throughput": 6000.0 + 10 * i, **latencies})
    table = pd.DataFrame(rows).assign(model="13b", device="simulated a100", executor="simulated")
    return table.assign(decode_time_marginal=0.001, kv_reread_factor=1 + np.arange(len(table)) % 2)


@pytest.fixture(scope="module")
def pictures(runs) -> dict[str, Figure]:
    rates = pd.concat([runs.assign(**{"workload.rate": rate}) for rate in (1, 2)])
    twice = [runs.assign(name=runs.name + f" repetition={i}", repetition=i) for i in (0, 1)]
    return {
        "policies": sweeps.policies(pd.concat(twice)),
        "rates": sweeps.draw_sweep(rates[rates.policy.isin(["orca", "sarathi"])]),
        "fig11": drawn("fig11"),
    }


def drawn(name: str) -> Figure:
    return draw(CATALOG[name].look, points_of(name))


def texts_of(figure: Figure) -> list[Text]:
    hidden = [ax for ax in figure.axes if not ax.axison]
    shown = [text for text in figure.findobj(Text) if text.get_text().strip()]
    return [text for text in shown if text.get_visible() and text.axes not in hidden]


def labels_of(axis: Axis) -> list[Text]:
    """The visible labels of the ticks that lie within the axis."""
    low, high = sorted(axis.get_view_interval())
    labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)  # none: shared
    return [one for at, one in labels if low <= at <= high and one.get_visible()]


@pytest.mark.parametrize("name", ["policies", "rates", "fig11"])
def test_text_can_be_read_at_the_width_of_a_page(pictures, name):
    figure = pictures[name]
    width = figure.get_size_inches()[0]
    sizes = [text.get_fontsize() * PAGE / (72 * max(width, 8.3)) for text in texts_of(figure)]
    assert min(sizes) > SMALLEST


def test_no_name_or_number_lies_over_another_with_27_policies(pictures):
    figure = pictures["policies"]
    figure.draw_without_rendering()
    inner = [ax for ax in figure.axes if ax.axison]
    for ax in inner:
        rows, steps = labels_of(ax.yaxis), labels_of(ax.xaxis)
        for labels in (rows, steps):
            boxes = [label.get_window_extent() for label in labels]
            assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    titles = [ax.xaxis.label.get_window_extent() for ax in inner]
    assert not any(a.overlaps(b) for a, b in pairwise(titles))


def test_titles_and_legends_lie_within_the_picture():
    figure, _ = panels(1, 1, (5.0, 3.0))
    finished(figure, "30m on a cpu\nmedians of 3 repetitions; hollow: difference not significant")
    for one in (figure, drawn("long_prompts")):
        one.draw_without_rendering()
        titles = [*one.texts, *(ax.title for ax in one.axes)]
        boxes = [title.get_window_extent() for title in titles if title.get_text()]
        boxes += [legend.get_window_extent() for legend in one.legends]
        assert min(box.x0 for box in boxes) >= 0
        assert max(box.x1 for box in boxes) <= one.bbox.x1


def test_the_papers_marks_stand_beside_its_own_hardware():
    axes = [ax for ax in drawn("sarathi_serve_ablation").axes if ax.get_lines()]
    assert len(axes) == 4  # two datasets, two latencies
    assert all("a100" in ax.get_title() for ax in axes)


def test_every_policy_is_a_point_within_the_axes_in_its_own_colour(pictures, runs):
    figure = pictures["policies"]
    alone = colours(list(POLICIES))
    listed = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert runs.set_index("policy").tbt_p99[listed].is_monotonic_decreasing  # from below
    for ax in figure.axes:
        dots = [container[0] for container in ax.containers]
        names = [listed[int(dot.get_ydata()[0])] for dot in dots]
        assert sorted(names) == sorted(POLICIES)
        assert [to_hex(dot.get_color()) for dot in dots] == [alone[name] for name in names]
        low, high = ax.get_xlim()
        assert all(low < dot.get_xdata()[0] < high for dot in dots)


def test_a_policy_has_one_colour_everywhere(pictures):
    assert {path.stem for path in (CONF / "policy").glob("*.yaml")} == set(POLICIES)
    alone = {name: colours([name])[name] for name in POLICIES}
    assert colours(["mine", *reversed(POLICIES)]).items() >= alone.items()
    assert len(set(alone.values())) == len(POLICIES)
    several = ["vllm_v1, chunk 256", "SARATHI", "SARATHI, C = 64", "Orca, best case", "other"]
    shown = colours(several)
    assert len(set(shown.values())) == len(several)
    assert [shown[name] for name in (several[0], several[1], several[3])] == [
        alone[policy] for policy in ("vllm_v1", "sarathi", "orca")
    ]
    light = [
        sum(to_rgb(one)) for one in map(colours(["512", "64", "128"]).get, ("64", "128", "512"))
    ]
    assert light == sorted(light)
    for label, line in keys_by_label(pictures["rates"]).items():
        assert to_hex(line.get_color()) == alone[label]
    points = {"series": ["orca", "sarathi_serve"], "y": [1.0, 2.0], "unit": "s", "x": 0}
    points |= {"dataset": "d", "quantity": "capacity", "device": "cpu", "source": "measured"}
    table = pd.DataFrame(points).assign(low=np.nan, high=np.nan)
    bars = draw(CATALOG["sarathi_serve_capacity"].look, table).axes[0].patches
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [alone["orca"], alone["sarathi_serve"]]


def test_baselines_are_dashed_and_a_series_has_a_marker(runs):
    some = runs[runs.policy.isin(["orca", "sarathi"])]
    both = [
        some.assign(executor=executor, chunk=chunk, is_baseline=some.policy == "orca")
        for executor, chunk in product(("torch", "simulated"), (128, 256, 512))
    ]
    table = pd.concat(both, ignore_index=True)
    table = table.assign(throughput=table.throughput + table.index)
    keys = keys_by_label(sweeps.draw_sweep(table, y="throughput", hue="executor"))
    dashed = {name: line.is_dashed() for name, line in keys.items()}
    assert dashed == {"executor torch": False, "executor simulated": False, "orca (baseline)": True}
    swept = [line for name, line in keys.items() if "baseline" not in name]
    assert len({line.get_marker() for line in swept}) == len(swept)


def test_of_a_gpu_one_line_is_drawn_and_the_rest_on_demand():
    look = CATALOG["fig09"].look
    points = points_of("fig09").query("source != 'measured'")
    one, every = (draw(look, points, is_all=is_all) for is_all in (False, True))
    assert [len(ax.get_lines()) for ax in one.axes] == [6, 6, 6]  # the paper's and one a chunk
    assert [len(ax.get_lines()) for ax in every.axes] == [15, 15, 15]
    labels = " ".join(text.get_text() for text in one.legends[0].get_texts())
    assert "profiled" in labels
    assert "counted" not in labels


def test_a_panel_is_titled_by_what_it_shows():
    titles = {ax.get_title() for ax in drawn("fig07").axes}
    assert {"paper and simulated", "simulated\none token past full tiles"} <= titles
    assert not any("measured" in ax.get_title() for ax in drawn("real_bubbles").axes)  # both are


@pytest.mark.parametrize("wide", [1.2, 2.9, 3.1, 9.9])
@pytest.mark.parametrize("low", [0.0101, 2.01, 7.01])
def test_a_logarithmic_axis_within_a_decade_has_three_ticks_and_not_too_many(low, wide):
    ax = Figure((3.2, 2.5)).subplots()
    ax.set(yscale="log", ylim=(low, low * wide))
    tick_in_steps(ax.yaxis)
    assert 3 <= sum(low <= tick <= low * wide for tick in ax.get_yticks()) <= 8


def test_legends_have_the_order_of_numbers():
    texts = drawn("fig13").legends[0].get_texts()
    names = [text.get_text() for text in texts if text.get_text()[0].isdecimal()]
    assert names == ["256", "512", "1024", "2048", "3072"]

"""The one function that draws: each row of a table is where the table says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import Normalize, to_hex

from sarathi_lab.results.plots.plot import (
    UNSTEADY,
    HeatScale,
    Look,
    PanelLayout,
    column_of,
    distribution,
    plot,
    styled,
)

BLUE = Look("blue", "#0000ff", "--", "o")
RED = Look("red", "#ff0000", "", "s")
SIZE = (4.0, 3.0)


def table(look: Look = BLUE, panel: str = "a", **columns: list[float]) -> pd.DataFrame:
    return styled(pd.DataFrame(columns).assign(panel=panel), look)


def test_a_row_is_a_point_of_its_look_in_its_panel():
    rows = pd.concat([table(x=[1, 2], value=[3, 4]), table(RED, "b", x=[5], value=[6])])
    figure, axes = plot(rows, x="x", grid=PanelLayout(["a", None, "b"], 2, SIZE))
    assert list(axes) == ["a", "b"]
    assert [ax.axison for ax in figure.axes] == [True, False, True, False]
    (line,) = axes["a"].get_lines()
    assert line.get_xydata().tolist() == [[1, 3], [2, 4]]
    assert (to_hex(line.get_color()), line.get_marker()) == (BLUE.colour, "o")
    assert line.is_dashed()
    (points,) = axes["b"].get_lines()
    assert points.get_xydata().tolist() == [[5, 6]]
    assert points.get_linestyle() == "None"


def test_a_row_without_x_is_a_line_across_with_its_band():
    rows = table(x=[math.nan], value=[2.0], low=[1.0], high=[3.0])
    _, axes = plot(rows, x="x", grid=PanelLayout(["a"], 1, SIZE))
    (line,) = axes["a"].get_lines()
    assert set(line.get_ydata()) == {2.0}
    (band,) = axes["a"].patches
    assert (band.get_y(), band.get_height()) == (1.0, 2.0)


@pytest.mark.parametrize(("x", "y"), [("at", "value"), ("value", "at")])
def test_intervals_are_along_the_value(x, y):
    rows = table(at=[10, 20], value=[2, 3], low=[1, math.nan], high=[4, math.nan])
    _, axes = plot(rows, x=x, y=y, grid=PanelLayout(["a"], 1, SIZE))
    (bars,) = axes["a"].collections
    first, second = (segment.tolist() for segment in bars.get_segments())
    ends = [[10.0, 1.0], [10.0, 4.0]]
    assert first == (ends if x == "at" else [end[::-1] for end in ends])
    assert not np.isfinite(second).any()  # has no interval


def test_undecided_rows_are_hollow_and_unsteady_ones_are_crossed():
    rows = table(x=[1, 2, 3], value=[1, 2, 3]).assign(
        is_unsteady=[True, False, False], is_decided=[True, True, False]
    )
    _, axes = plot(rows, x="x", grid=PanelLayout(["a"], 1, SIZE))
    _, crosses, hollow = axes["a"].get_lines()
    assert (crosses.get_marker(), crosses.get_xdata().tolist()) == (UNSTEADY, [1])
    assert (hollow.get_markerfacecolor(), hollow.get_xdata().tolist()) == ("w", [3])


def test_only_a_look_that_is_thinned_leaves_out_markers():
    x = list(range(100))
    for look, every in ((BLUE, None), (replace(BLUE, is_thinned=True), 5)):
        _, axes = plot(table(look, x=x, value=x), x="x", grid=PanelLayout(["a"], 1, SIZE))
        (line,) = axes["a"].get_lines()
        assert line.get_markevery() == every
        assert len(line.get_xdata()) == 100


def test_a_bar_has_the_width_of_its_row_and_others_are_points():
    rows = table(x=[0, 1], value=[5, 6], low=[4, 5], high=[6, 7], width=[0.5, math.nan])
    _, axes = plot(rows, x="x", kind="bar", grid=PanelLayout(["a"], 1, SIZE))
    (bar,) = axes["a"].patches
    assert (bar.get_x(), bar.get_width(), bar.get_height()) == (-0.25, 0.5, 5)
    assert axes["a"].get_lines()[0].get_xydata().tolist() == [[1, 6]]


def test_a_cell_without_a_row_has_no_number():
    cells = pd.DataFrame({"x": [1, 2], "y": ["u", "v"], "shade": [0.2, 0.9], "text": ["a", "b"]})
    cells = cells.astype({"x": "category", "y": "category"}).assign(panel="map")
    scale = HeatScale(Normalize(0, 1), "Blues")
    cells["scale"] = column_of([scale] * 2, cells)
    grid = PanelLayout(["map"], 1, SIZE)
    _, axes = plot(cells, x="x", y="y", hue="scale", kind="heat", grid=grid)
    texts = {text.get_text(): text.get_position() for text in axes["map"].texts}
    assert texts == {"a": (0.5, 0.5), "b": (1.5, 1.5)}
    assert axes["map"].collections[0].get_array().count() == 2


def test_a_distribution_rises_from_nothing_to_all():
    rows = distribution(pd.Series([3.0, math.nan, 1.0]))
    assert rows.to_numpy().tolist() == [[1.0, 0.0], [1.0, 0.5], [3.0, 1.0]]
    assert distribution(pd.Series([math.nan])).empty

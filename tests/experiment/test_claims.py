"""Claims and their verdicts: by hand, from recorded tables, on the command line and in the
README.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_lab.__main__ import main
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import option_files, read_option
from sarathi_lab.config.paths import EXPERIMENTS, REPOSITORY
from sarathi_lab.executor.simulated.drawn_times import DEVIATION
from sarathi_lab.experiment import measured_cost
from sarathi_lab.experiment.claims import (
    COLUMNS,
    HOLDS_WITHIN,
    VERDICTS,
    Claim,
    Value,
    in_words,
    kind_of,
    load_claims,
    verdicts,
)
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load
from sarathi_lab.results.intervals import DEVIATIONS, LEVEL, ends_of_draws, ends_of_median
from sarathi_lab.tasks import claim_tables

GAIN = Claim(
    "gain", "it gains", "a paper", "fig08", "series == '1K'", 1.33, "at least", 0.1, "a GPU"
)
GAIN = replace(GAIN, neutral=1.0)
LOSS = replace(GAIN, direction="at most", expected=0.5, neutral=1.0)
NEAR = replace(GAIN, direction="near", expected=2.0, neutral=None)
NAN = math.nan
# Experiments whose waits were simulated in draws of the cost model's constants, too.
MOVED_WAITS = (
    *("sarathi_serve_stalls", "sarathi_serve_ablation", "long_prompts"),
    *("prefill_cadence", "proposed_gains", "p_pas_gain", "dynamic_chunks"),
)
PAIRS, CONFIDENCE = 9, 0.9609375  # of an interval that was recorded without samples


@pytest.mark.parametrize(
    ("claim", "interval", "verdict"),
    [
        (GAIN, (1.30, 1.50), "holds within 10 %"),
        (GAIN, (1.34, 1.50), "holds"),
        (GAIN, (1.10, 1.40), "direction holds"),
        (GAIN, (1.10, 1.25), "partly"),  # as claimed by the tolerance alone, and not all of it
        (GAIN, (1.05, 1.15), "partly"),
        (GAIN, (0.95, 1.15), "not as claimed"),  # maybe an effect, maybe none
        (GAIN, (0.95, 1.50), "undecided"),
        (GAIN, (0.75, 0.85), "fails"),
        (LOSS, (0.20, 9.00), "undecided"),
        (LOSS, (1.10, 1.30), "fails"),
        (NEAR, (2.00, 2.15), "holds within 10 %"),
        (replace(GAIN, expected=1.5, tolerance=0.2), (1.25, 1.45), "holds within 20 %"),
        (NEAR, (2.80, 3.20), "fails"),
        (replace(NEAR, neutral=1.0), (1.1, 1.7), "partly"),
        (replace(NEAR, neutral=1.0), (3.1, 1000.0), "partly"),  # the sign, not the amount
        (replace(NEAR, neutral=1.0), (1.1, 30.0), "direction holds"),
        (replace(NEAR, neutral=3.0), (1.1, 2.1), "direction holds"),
        (replace(LOSS, expected=1.0, tolerance=0.1), (1.01, 1.05), "fails"),  # no effect is no loss
        (replace(GAIN, neutral=None), (1.10, 1.19), "fails"),
        (replace(GAIN, neutral=None), (1.10, 1.25), "undecided"),  # maybe within the tolerance
        (replace(GAIN, neutral=None), (1.25, 1.40), "holds within 10 %"),
        (replace(GAIN, neutral=None), (1.10, 1.40), "undecided"),
    ],
)
def test_the_whole_interval_decides(claim, interval, verdict):
    found = Value(sum(interval) / 2, *interval, LEVEL)
    assert claim.judge(found) == verdict
    assert claim.judge(found._replace(confidence=NAN)) == verdict  # a cost model's own error
    assert claim.judge(found._replace(confidence=0.94)) == "undecided"
    assert claim.judge(Value()) == "not measured"


# Verdicts that a part of an interval with a verdict may have, beside the same one. A part of what
# is "partly" may be as claimed within the tolerance, which says more.
WITHIN = {
    HOLDS_WITHIN: {"holds", HOLDS_WITHIN},
    "direction holds": {"holds", HOLDS_WITHIN, "direction holds", "partly"},
    "partly": {"partly", HOLDS_WITHIN},
    "not as claimed": {"partly", "not as claimed", "fails", HOLDS_WITHIN},
    "undecided": {*VERDICTS} - {"not measured"},
}


def test_a_narrower_interval_never_contradicts_a_verdict():
    for claim in load_claims():
        shares = (-1, 0, 0.3, 0.9, 0.97, 1, 1.5, 3, 100)
        values = sorted({claim.expected * share for share in shares})
        ends = [(low, high) for low in values for high in values if low <= high]
        judged = {(a, b): kind_of(claim.judge(Value(a, a, b))) for a, b in ends}
        for (a, b), verdict in judged.items():
            within = {judged[c, d] for c, d in ends if a <= c and d <= b}
            assert within <= WITHIN.get(verdict, {verdict}), claim.id
        assert "fails" in judged.values()
        assert {"holds", HOLDS_WITHIN} & set(judged.values())


def table(*ys: float, series: str = "1K") -> pd.DataFrame:
    points = pd.DataFrame({"x": 2.0 * np.arange(1, len(ys) + 1), "y": ys})
    points = points.assign(low=points.y - 0.1, high=points.y + 0.1, series=series, panel="")
    known = {"num_pairs": PAIRS, "confidence": CONFIDENCE, "unit": "ratio", "model": "30m"}
    return points.assign(figure="fig08", **known, reason=None)


def found(root, **changes) -> dict[str, object]:
    (row,) = verdicts(root, [replace(GAIN, **changes)]).query("device == 'cpu'").to_dict("records")
    return row


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        ("max", (1.5, 1.4, 1.6)),
        ("min", (1.1, 1.0, 1.2)),
        ("x of max", (4.0, 2.0, 6.0)),  # the first one's reaches 1.4, too, and 6 is next to 4
        ("last / first", (1.1 / 1.3, 1.0 / 1.4, 1.2 / 1.2)),
        ("range", (1.3, 1.0, 1.6)),
    ],
)
def test_a_value_is_taken_with_its_interval(take, expected, tmp_path):
    load.save(table(1.3, 1.5, 1.1), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take=take)
    assert (row["measured"], row["low"], row["high"]) == pytest.approx(expected)
    assert row["confidence"] < CONFIDENCE  # of two points at once


def test_computed_points_within_each_others_error_may_all_be_best(tmp_path):
    load.save(table(1.2, 1.45, 1.5).assign(num_pairs=0, confidence=NAN), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take="x of max")
    assert (row["measured"], row["low"], row["high"]) == (6.0, 2.0, 6.0)


def test_a_best_x_is_known_to_the_next_ones_that_were_tried(tmp_path):
    clear = table(1.1, 1.2, 1.9, 1.2, 1.1)
    load.save(clear.assign(num_pairs=0, confidence=NAN), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take="x of max", direction="near", expected=6.0, neutral=None)
    assert (row["low"], row["high"], row["verdict"]) == (4.0, 8.0, "undecided")


def of_draws(*points: list[float], moved: str | None = None) -> pd.DataFrame:
    """Predicted points at x = 2, 4, ...: each a value and its draws, and what shapes move."""
    draws = [" ".join(map(str, drawn)) for _, *drawn in points]
    table_of_values = table(*(value for value, *_ in points))
    return table_of_values.assign(num_pairs=0, confidence=NAN, draws=draws, moved=moved)


def test_errors_that_points_share_cancel_in_what_is_taken_of_them(tmp_path):
    device = f"{load.SIMULATED}a6000"

    def interval(points, **changes):
        load.save(points, "fig08", device, tmp_path)
        (row,) = verdicts(tmp_path, [replace(GAIN, **changes)]).to_dict("records")
        return row["low"], row["measured"], row["high"]

    alike = of_draws([1.0, 0.5, 2.0], [2.0, 1.0, 4.0])
    assert interval(alike, take="last / first") == pytest.approx((2.0, 2.0, 2.0))
    low, _, high = interval(alike, take="max")
    assert low * high == pytest.approx(4.0)
    assert high > 4.0
    # In every draw the second is larger, whatever the intervals of both; the grid has a step.
    assert interval(alike, take="x of max") == (2.0, 4.0, 4.0)
    other = of_draws([1.0, 1.5, 1.0], [1.2, 1.1, 1.3])
    assert interval(other, take="x of max") == (2.0, 4.0, 4.0)
    half = of_draws([0.5, 0.25, 1.0], [1.0, 0.5, 2.0]).assign(series="own")
    both = pd.concat([alike, half], ignore_index=True)
    over = {"over": "series == 'own'", "match": ["x"], "take": "range"}
    assert interval(both, **over) == pytest.approx((2.0, 2.0, 2.0))
    # So do the errors of a shape that both have, and those of two shapes add up.
    of_one_shape = of_draws([1.0, 1.0], moved="a=2")
    of_others = of_draws([1.0, 1.0], moved="a=2 b=2").assign(series="own")
    pair = pd.concat([of_one_shape, of_others], ignore_index=True)
    assert interval(pair, **over | {"take": "max"}) == interval(of_one_shape, take="max")
    one_sided = math.log(interval(of_one_shape, take="max")[2])
    assert one_sided == pytest.approx(1.96 * math.log(2))
    of_two = interval(of_others, where="series == 'own'", take="max")[2]
    assert math.log(of_two) == pytest.approx(math.sqrt(2) * one_sided)


@pytest.mark.parametrize(("take", "share"), [("max", 1 / 1.1), ("max", 1.1), ("min", 1.1)])
def test_the_largest_of_two_that_are_nearly_equal_errs_as_one_of_them_at_least(
    take, share, tmp_path
):
    """An error that moves one alone leaves the other as the largest, to one side only."""
    moved = [f"a={1.5 * share}", f"b={1.499 * share}"]
    load.save(of_draws([1.5], [1.499]).assign(moved=moved), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take=take)
    factor = 1.1 ** (1.96 * math.sqrt(0.5 + 0.5))
    assert row["high"] / row["measured"] == pytest.approx(factor, rel=0.01)
    assert row["measured"] / row["low"] == pytest.approx(factor, rel=0.01)
    place = found(tmp_path, take="x of max")
    assert (place["low"], place["high"]) == (2.0, 4.0)


def test_an_error_that_is_unknown_or_of_one_side_alone_is_not_taken_for_none(tmp_path):
    unknown = of_draws([1.5, NAN, NAN])
    load.save(unknown, "fig08", "cpu", tmp_path)
    for take in ("max", "range", "x of max"):
        row = found(tmp_path, take=take)
        assert (row["measured"] > 1, row["verdict"]) == (True, "undecided")
        assert row["note"].startswith("no error of it is known")
    drawn = of_draws([1.5, 1.0, 2.25])
    exact = of_draws([1.0]).assign(series="own")
    over = {"over": "series == 'own'", "match": ["x"]}
    load.save(pd.concat([drawn, exact], ignore_index=True), "fig08", "cpu", tmp_path)
    low = found(tmp_path, **over)["low"]
    assert low < 1.0
    assert low == pytest.approx(found(tmp_path)["low"])
    load.save(pd.concat([unknown, exact], ignore_index=True), "fig08", "cpu", tmp_path)
    assert found(tmp_path, **over)["verdict"] == "undecided"


def of_samples(*points: list[float]) -> pd.DataFrame:
    """Points at x = 2, 4, ... whose samples were recorded, with intervals that are too narrow."""
    kept = [" ".join(map(str, samples)) for samples in points]
    medians = [float(np.nanmedian(samples)) for samples in points]
    return table(*medians).assign(samples=kept, confidence=0.5, low=medians, high=medians)


def test_intervals_are_those_of_the_samples(tmp_path):
    samples = [1.5, 1.4, 1.6, 1.45, 1.55, 1.52]
    load.save(of_samples(samples), "fig08", "cpu", tmp_path)
    row = found(tmp_path)
    assert (row["low"], row["high"], row["confidence"]) == (1.4, 1.6, 0.96875)
    load.save(of_samples(samples[:3]), "fig08", "cpu", tmp_path)
    assert found(tmp_path)["note"] == "the interval is one of 75%, not of 95%"
    load.save(of_samples([*samples, NAN][::-1]), "fig08", "cpu", tmp_path)
    assert found(tmp_path)["low"] == 1.4


def test_an_interval_is_no_narrower_than_recorded_and_samples_that_agree_show_none(tmp_path):
    on_a_grid = of_samples([1.5] * 6)
    load.save(on_a_grid.assign(low=1.4, high=1.6), "fig08", "cpu", tmp_path)
    row = found(tmp_path)
    assert (row["low"], row["high"], row["confidence"]) == (1.4, 1.6, 0.96875)
    load.save(on_a_grid.assign(low=NAN, high=NAN), "fig08", "cpu", tmp_path)
    row = found(tmp_path)
    assert (row["verdict"], in_words(row)) == ("undecided", "1.5")
    exact = table(1.5).assign(low=NAN, high=NAN, confidence=NAN, num_pairs=0)
    load.save(exact, "fig08", "cpu", tmp_path)
    row = found(tmp_path)
    assert (row["verdict"], in_words(row)) == ("holds", "1.5")


@pytest.mark.parametrize(
    ("hardware", "margin", "verdict"),
    [
        (None, 1.0, "holds"),  # no cost model's times
        ("h100", 1.08**2.4, "direction holds"),  # of normal errors, 5 % are beyond 2.46 means
        ("h100", 1.08**2.5, "holds"),
        ("a10", 1.36**2.4, "direction holds"),  # described by a datasheet
        ("a10", 1.36**2.5, "holds"),
        ("a40", 9.0, "undecided"),  # whose file does not know the error of attention
        ("no_such_card", 9.0, "undecided"),
    ],
)
def test_seeds_alone_decide_nothing_nearer_than_the_cost_models_error(
    hardware, margin, verdict, tmp_path
):
    least = 1.33 * margin
    shares = np.array([1, 1.03, 1.1, 1.01, 1.015, 1.02])
    rounds = of_samples([*(least * shares)]).assign(hardware=hardware)
    load.save(rounds, "fig08", f"{load.SIMULATED}{hardware}", tmp_path)
    (row,) = verdicts(tmp_path, [replace(GAIN, tolerance=0)]).to_dict("records")
    assert row["low"] == pytest.approx(least)  # as it is recorded
    assert row["verdict"] == verdict
    assert row["note"].startswith("no error of it is known") == (verdict == "undecided")


@pytest.mark.parametrize("samples", [None, "1.5 1.5 1.5 1.5 1.5 1.5"])
@pytest.mark.parametrize(
    ("level", "experiment", "verdict"),
    [
        ("analytic", "fig08", "direction holds"),
        ("analytic", "fig12", "undecided"),
        ("profiled", "fig08", "holds"),
    ],
)
def test_the_formulas_intervals_decide_as_wide_as_they_were_found_to_hold(
    level, experiment, verdict, samples, tmp_path
):
    """Of 1.96 deviations the end, 1.35, is above 1.33, of 2.4 it is not, of 6.3 below 1."""
    share = (1.5 / 1.35) ** (1 / 1.96)
    ends = {"low": 1.35, "high": 1.5**2 / 1.35, "samples": samples}
    points = of_draws([1.5, 1.5 * share, 1.5 / share]).assign(level=level, **ends)
    load.save(points, experiment, f"{load.SIMULATED}{level}", tmp_path)
    claim = replace(GAIN, tolerance=0, experiment=experiment, neutral=1.1)
    (row,) = verdicts(tmp_path, [claim]).to_dict("records")
    assert row["verdict"] == verdict
    assert in_words(row).startswith("1.5 (1.35 to 1.6")  # as it is recorded


def test_the_page_states_how_far_errors_move_waits():
    """In the tables with draws, by the power of 1 + e that is half of an interval."""
    medians = []
    files = option_files("hardware")
    stated_errors = cache(lambda name: read_option("hardware", files[name])["uncertainty"])
    for experiment in MOVED_WAITS:
        rows = load.load(experiment).query("is_simulated and draws.notna() and y > 0")
        powers = []
        for row in rows.to_dict("records"):
            draws = [float(draw) for draw in row["draws"].split()]
            moved = [float(shape.split("=")[1]) for shape in row["moved"].split()]
            low, high, _ = ends_of_draws(row["y"], draws, moved)
            error = max(stated_errors(row["hardware"]).values())
            powers.append(math.log(high / low) / 2 / math.log1p(error))
        medians.append(np.nanmedian(powers))
    page = (REPOSITORY / "docs/explanation/intervals.md").read_text()
    least, *others = sorted(medians)
    assert f"medians of {others[0]:.1f} to {others[-1]:.1f}" in page
    assert f"dynamic_chunks has {least:.1f}" in page
    assert f"{DEVIATIONS * DEVIATION:.2f}" in page


def test_a_share_of_none_stays_as_unknown_with_draws_and_lies_above_zero(tmp_path):
    none = table(0.0).assign(samples="0 0 0 0 0 0", unit="share", draws="0 0.001")
    load.save(none.assign(low=-0.001, high=0.03), "fig08", "cpu", tmp_path)
    row = found(tmp_path)
    assert (row["low"], row["high"]) == (0.0, pytest.approx(0.03))


def test_the_largest_of_many_points_is_corrected_for_the_choice(tmp_path):
    """All points are 1: the largest median is above that, its own interval too often as well."""
    random, own, num = np.random.default_rng(1), 0, 20
    for place in range(num):
        points = [list((1 + 0.1 * random.normal(size=15)).round(5)) for _ in range(24)]
        low, high, _ = ends_of_median(max(points, key=np.median), is_series=False)
        own += low <= 1 <= high
        load.save(of_samples(*points), "fig08", f"{load.SIMULATED}{place}", tmp_path)
    rows = verdicts(tmp_path, [GAIN])
    corrected = ((rows.low <= 1) & (rows.high >= 1)).mean()
    assert (rows.confidence >= LEVEL).all()
    assert corrected >= LEVEL > own / num


@pytest.mark.parametrize(
    ("take", "place", "verdict"),
    [
        ("max", 1, "not measured"),
        ("x of max", 1, "not measured"),
        ("last / first", 2, "not measured"),
        ("last / first", 1, "partly"),  # the middle of a line is not needed
    ],
)
def test_nothing_is_taken_from_what_is_left_of_refused_points(take, place, verdict, tmp_path):
    points = table(1.4, 1.5, 1.6)
    points["samples"] = [" ".join([f"{y}"] * 12) for y in points.y]
    points = points.assign(low=points.y, high=points.y)
    points.loc[place, ["y", "reason"]] = [NAN, "spread 40%"]
    load.save(points, "fig08", "cpu", tmp_path)
    row = found(tmp_path, take=take)
    assert row["verdict"] == verdict
    assert (row["note"] == "spread 40%") == (verdict == "not measured")


def test_a_refused_baseline_leaves_nothing_measured(tmp_path):
    both = pd.concat([table(1.4), table(3.0, series="own")], ignore_index=True)
    load.save(both, "fig08", "cpu", tmp_path)
    assert found(tmp_path, needs="series == 'own'")["verdict"] == "holds within 10 %"
    over = {"over": "series == 'own'", "match": ["x"], "direction": "at most"}
    assert found(tmp_path, **over)["measured"] == pytest.approx(1.4 / 3)
    load.save(both.assign(y=[1.4, NAN], reason=[None, "too few"]), "fig08", "cpu", tmp_path)
    for changes in ({"needs": "series == 'own'"}, over):
        row = found(tmp_path, **changes)
        assert (row["verdict"], row["note"]) == ("not measured", "too few")
    assert found(tmp_path, needs="series == 'none'")["note"] == "not in what was measured"


def test_what_is_simulated_with_fitted_constants_is_marked(tmp_path):
    for device in ("cpu", "simulated-a6000", "simulated-a100"):
        load.save(table(1.4), "fig08", device, tmp_path)
    fitted = replace(GAIN, fitted=["simulated-a6000", "cpu"])
    rows = verdicts(tmp_path, [fitted]).set_index("device")
    assert dict(rows.mark) == {"cpu": "†", "simulated-a100": "", "simulated-a6000": "†"}
    assert in_words(rows.loc["simulated-a6000"]).endswith(" †")


def test_every_measured_device_has_every_claim_and_simulated_ones_what_they_have(tmp_path):
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    load.save(table(1.4), "fig09", "simulated-a6000", tmp_path)
    rows = verdicts(tmp_path, [GAIN, replace(GAIN, id="other", experiment="fig09")])
    assert list(rows.columns) == COLUMNS
    assert list(zip(rows.id, rows.device, rows.verdict, strict=True)) == [
        ("gain", "cpu", "holds within 10 %"),
        ("other", "cpu", "not measured"),
        ("other", "simulated-a6000", "holds within 10 %"),
    ]
    assert rows.expected[0] == "at least 1.33"


def test_the_claims_are_well_written():
    claims = load_claims()
    assert len({claim.id for claim in claims}) == len(claims) > 15
    assert CATALOG.keys().isdisjoint(claim.id for claim in claims)  # both are named to the command
    for claim in claims:
        assert claim.experiment in CATALOG
        assert claim.caveat
        assert claim.source
        if claim.expected == 1 and claim.direction != "near":
            # Less than no effect is the other effect: no tolerance is a part of such a claim.
            assert (claim.neutral, claim.tolerance) == (1, 0), claim.id


@pytest.fixture(scope="module")
def recorded() -> pd.DataFrame:
    """The verdicts on all that is recorded."""
    return verdicts()


def test_fitted_devices_are_recorded(recorded):
    """So that no mark is lost with a folder's name."""
    measured = recorded[recorded.verdict != "not measured"]
    devices = measured.groupby("id").device.agg(set)
    for claim in load_claims():
        assert set(claim.fitted) <= devices[claim.id]


def test_every_claim_finds_its_rows_in_what_is_simulated_or_composed(recorded):
    """So that no query asks for a line that nothing draws."""
    rows = recorded[recorded.device.str.startswith((load.SIMULATED, load.COMPOSED))]
    known = rows[rows.verdict != "not measured"].id.unique()
    # What is counted in a kernel is of a device, and real stages are.
    of_devices = {"reread_bytes", "real_bubbles_shrink", "real_completion"}
    assert set(known) == {claim.id for claim in load_claims()} - of_devices


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {id: a, claim: b", "can't be read"),
        ("- {id: a, claim: b}", "claims.yaml: a: missing"),
        (
            "- {id: a, colour: red}",
            "a: got an unexpected keyword argument .colour.; correct it",
        ),
        (
            "- {id: a, claim: b, source: c, experiment: d, where: e, expected: 1, tolerance: 0, "
            "caveat: f}".replace("f}", "f, direction: up}"),
            "claims.yaml: a.direction=up is unknown; use one of at least, at most, near",
        ),
    ],
)
def test_a_claim_that_is_written_wrongly_is_refused(text, words, tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        load_claims(path)


def test_a_query_that_makes_no_sense_is_refused(tmp_path):
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    with pytest.raises(UserError, match=r"gain\.where can't be evaluated .*; correct the query"):
        found(tmp_path, where="colour == 'red'")


# -- what people see -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(recorded) -> list[tuple[Path, str, str]]:
    """The page, the name and the text of each table of claims."""
    return list(claim_tables.blocks(recorded))


def test_the_documents_show_what_is_recorded(blocks):
    for path, name, block in blocks:
        shown = claim_tables.between(path.read_text(), name)[1].strip()
        assert shown == block, f"{path}: run python -m sarathi_lab claims --readme"


def test_every_number_of_the_front_page_is_recorded(blocks):
    """But for those of its code and of versions, and what test_readme.py runs."""
    text = re.sub(r"(?s)```.*?```|`[^`]*`|\(http[^)]*\)", "", claim_tables.FRONT.read_text())
    others = {"3.11", "2308.16369", "2.0", "0.88", "4.24"}
    rows = load.load("fig12").query("panel == 'ratios'")  # by the fixed cost x
    others |= {f"{value:.3g}" for value in (*rows.x, *rows.y)}
    scores = pd.read_csv(EXPERIMENTS / "lab" / "rankings" / "results" / "scores.csv")
    shares = scores[scores.prediction == "rereads"].groupby("gpu").tail(1).share_low
    others |= {f"{share:.2f}" for share in shares}
    tables = " ".join(block for _, _, block in blocks)
    known = set(re.findall(r"\d+\.\d+", tables))
    assert set(re.findall(r"\d+\.\d+", text)) - others <= known


def test_both_levels_of_a_claim_are_shown_and_counted(recorded):
    """A claim has a verdict or none at each place where it was judged."""
    cells = claim_tables.readme_table(recorded)
    assert "a6000 profiled" in cells
    heading, _, *rows = claim_tables.count_table(recorded).splitlines()
    most = int(re.findall(r"\d+", heading)[0])
    for counts in (row.split(" | ")[1:] for row in rows):
        assert sum(int(re.findall(r"\d+", count)[0]) for count in counts) >= most


def test_a_verdict_by_fitted_values_alone_is_marked_where_claims_are_counted(tmp_path):
    for device in ("simulated-a6000", "simulated-a100"):
        load.save(table(1.5), "fig08", device, tmp_path)
    both = replace(GAIN, source="SARATHI", fitted=["simulated-a6000", "simulated-a100"])
    judged = verdicts(tmp_path, [both, replace(both, id="other", fitted=["simulated-a6000"])])
    assert "| holds |  |  | gain †, other |  |" in claim_tables.names_table(judged)
    assert "| simulated | 2 (1 †) | 0 |" in claim_tables.count_table(judged)


def test_a_page_is_rewritten_between_its_marks(tmp_path):
    for device, y in (
        ("cpu", 1.4),
        ("kernels-rtx-4090-llama3.1-8b", 1.45),
        ("simulated-a6000", 1.5),
        ("simulated-a6000-profiled", 1.15),
    ):
        load.save(table(y), "fig08", device, tmp_path)
    path, judged = tmp_path / "README.md", verdicts(tmp_path, [GAIN])
    marks = (claim_tables.BEGIN.format("claims"), "before", claim_tables.END.format("claims"))
    path.write_text("\n".join([*marks, "after\n"]))
    claim_tables.write_page(path, "claims", claim_tables.readme_table(judged))
    text = path.read_text()
    assert "before" not in text
    assert "after" in text
    assert claim_tables.readme_table(judged).splitlines()[2] == (
        "| it gains | a paper | at least 1.33 "
        "| **holds**: rtx-4090-llama3.1-8b 1.45 (1.35 to 1.55, 96 % of rounds) "
        "| **holds within 10 %**: 1.4 (1.3 to 1.5, 96 %) "
        "| **holds**: a6000 1.5 (1.4 to 1.6, 96 % of rounds); "
        "**partly**: a6000 profiled 1.15 (1.05 to 1.25, 96 % of rounds) |"
    )
    path.write_text("nothing")
    with pytest.raises(UserError, match=r"has no .*; put both on separate lines"):
        claim_tables.write_page(path, "claims", "")


def test_all_verdicts_have_notes_and_say_what_was_not_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")  # room for a note in a line
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    assert main(["claims", "--results", str(tmp_path), "fig08"]) == 0
    assert "not measured" not in capsys.readouterr().out
    assert main(["claims", "--results", str(tmp_path), "--long"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "1.4 (1.3 to 1.5, 96 %)" in line]
    caveats = {claim.id: claim.caveat for claim in load_claims()}
    assert f"partly {caveats['decode_tenfold']}"[:60] in " ".join(line.split())
    assert "not measured" in out


def test_without_names_claims_are_counted_and_those_that_fail_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sarathi_lab.tasks.claims.RECORDS", tmp_path)
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    load.save(table(0.5), "fig08", "simulated-a6000", tmp_path)
    assert main(["claims"]) == 0
    summary = capsys.readouterr().out
    assert re.search(r"^ partly +0 +1 +0 +0", summary, flags=re.MULTILINE)
    assert re.search(
        r"^ decode_tenfold +decodes that .* simulated-a6000", summary, flags=re.MULTILINE
    )
    (example,) = re.findall(r"such as .* claims (\w+)$", summary, flags=re.MULTILINE)
    for name in (example, "decode_tenfold"):
        assert main(["claims", name]) == 0
    assert "cheaper than alone" in capsys.readouterr().out


def test_an_empty_folder_of_results_is_no_summary(tmp_path, capsys):
    for names in ([], ["fig08"]):
        assert main(["claims", *names, "--results", str(tmp_path)]) == 2
        assert f"--results {tmp_path} has no recorded results" in capsys.readouterr().err


def test_a_claim_on_several_devices_is_a_table_of_devices(tmp_path, capsys):
    for device in ("cpu", "nvidia-h100"):
        load.save(table(1.4), "fig08", device, tmp_path)
    assert main(["claims", "--results", str(tmp_path), "--only", "fig08"]) == 0
    out = capsys.readouterr().out
    assert out.count("10 times cheaper than alone") == 1
    with_interval = r"1\.4 \(1\.3 to 1\.5, 96 %\)"
    assert re.search(rf"^ cpu +{with_interval} +partly", out, flags=re.MULTILINE)
    assert re.search(rf"^ nvidia-h100 +{with_interval} +partly", out, flags=re.MULTILINE)


def test_a_run_measures_and_simulates_first_and_resumes(tmp_path, capsys, monkeypatch):
    for name in ("ENOUGH", "REFERENCES", "ALTERNATED"):  # times are not judged here
        monkeypatch.setattr(measured_cost, name, 0)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # no worker processes
    small = ["model=tiny", "device=cpu", "task.setup=dry", "task.max_spread=50"]
    own = ["claims", "--run", "--simulate", "--only", "table2", "--results", str(tmp_path)]
    assert main([*own, "--seconds", "1", *small]) == 0
    out = capsys.readouterr().out
    assert "[1/2] table2, measured" in out
    assert "[2/2] table2, simulated" in out
    judged = pd.read_csv(tmp_path / "verdicts.csv").query("experiment == 'table2'")
    assert {"cpu", "simulated-a6000"} <= set(judged.device)
    assert main([*own, "--resume"]) == 0
    assert "table2, measured" not in capsys.readouterr().out


def test_an_experiment_that_fails_does_not_stop_the_others(tmp_path, capsys):
    only = ["--only", "table2", "--only", "kv_reread", "--results", str(tmp_path)]
    assert main(["claims", "--run", *only, "chunk=3"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("chunk=3 has no effect") == 2
    assert "failed: table2, measured\nfailed: kv_reread, measured" in captured.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume"], "--resume is for runs; add --run"),
        (["--simulate", "--seconds", "9"], "--seconds is for runs"),
        (["--simulate", "model=7b"], "model=7b is for runs"),
        (["decode_tenfol"], "(did you mean decode_tenfold?); use one of decode_tenfold, "),
        (["fig09"], "NAME=fig09 is unknown (did you mean fig10?); use one of decode_tenfold, "),
        (["--run", "crossover"], "crossover can't be measured here; use --simulate"),
        (["--run", "--seconds", "0"], "--seconds=0.0 must be a finite number above 0"),
        (["--readme", "--results", "elsewhere"], "--readme shows what is recorded, not"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, words, capsys):
    assert main(["claims", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1

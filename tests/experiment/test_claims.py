"""Claims and their verdicts: by hand, from recorded tables, on the command line and in the
README.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest

from sarathi_lab.__main__ import main
from sarathi_lab.config.errors import UserError
from sarathi_lab.experiment.claims import COLUMNS, Claim, load_claims, verdicts
from sarathi_lab.experiment.figures import FIGURES
from sarathi_lab.results import load
from sarathi_lab.tasks import claims

GAIN = Claim(
    "gain",
    "it gains",
    "a paper",
    "fig08",
    "series == '1K'",
    1.33,
    "at least",
    0.1,
    "a GPU",
    neutral=1.0,
)
LOSS = replace(GAIN, direction="at most", expected=0.5, neutral=1.0)
NEAR = replace(GAIN, direction="near", expected=2.0, neutral=None)
NAN = math.nan


@pytest.mark.parametrize(
    ("claim", "measured", "verdict"),
    [
        (GAIN, (1.40, 1.30, 1.50), "holds"),
        (GAIN, (1.20, 1.10, 1.25), "holds"),  # within the tolerance: 1.197
        (GAIN, (1.15, 1.05, 1.25), "partly"),  # in the direction, beyond the noise
        (GAIN, (1.30, 0.95, 1.60), "partly"),  # enough, but no effect is not excluded
        (GAIN, (1.05, 0.95, 1.15), "fails"),
        (GAIN, (0.80, 0.75, 0.85), "fails"),
        (GAIN, (NAN, NAN, NAN), "not measured"),
        (LOSS, (0.45, 0.40, 0.50), "holds"),
        (LOSS, (0.70, 0.60, 0.80), "partly"),
        (LOSS, (1.20, 1.10, 1.30), "fails"),
        (NEAR, (2.10, 2.00, 2.20), "holds"),
        (NEAR, (2.50, 2.10, 2.90), "partly"),  # the interval reaches it
        (NEAR, (3.00, 2.80, 3.20), "fails"),
        (NEAR, (2.10, 1.50, 2.70), "partly"),  # so wide that it decides nothing
        (replace(NEAR, neutral=1.0), (1.5, 1.4, 1.6), "partly"),
        (replace(GAIN, expected=1.0, tolerance=0.0), (1.2, 1.1, 1.3), "holds"),
        (replace(LOSS, expected=1.0, tolerance=0.0), (0.8, 0.7, 0.9), "holds"),
        (replace(LOSS, expected=1.0, tolerance=0.0), (0.98, 0.9, 1.1), "partly"),
    ],
)
def test_verdicts_by_hand(claim, measured, verdict):
    assert claim.judge(*measured) == verdict


def table(*ys: float, reason: str | None = None, series: str = "1K") -> pd.DataFrame:
    rows = [
        {
            "figure": "fig08",
            "panel": "",
            "series": series,
            "x": 2.0 * i,
            "y": y,
            "low": y - 0.1,
            "high": y + 0.1,
        }
        for i, y in enumerate(ys, 1)
    ]
    return pd.DataFrame(rows).assign(num_pairs=5, unit="ratio", reason=reason, model="30m")


def found(root, **changes) -> dict[str, object]:
    (row,) = verdicts(root, [replace(GAIN, **changes)]).query("device == 'cpu'").to_dict("records")
    return row


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        ("max", (1.5, 1.4, 1.6)),
        ("min", (1.1, 1.0, 1.2)),
        ("median", (1.3, 1.2, 1.4)),
        ("x of max", (4.0, 2.0, 4.0)),  # the first one's interval reaches 1.4, too
        ("last / first", (1.1 / 1.3, 1.0 / 1.4, 1.2 / 1.2)),
    ],
)
def test_a_value_is_taken_with_its_interval(take, expected, tmp_path):
    load.save(table(1.3, 1.5, 1.1), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take=take)
    assert (row["measured"], row["low"], row["high"]) == pytest.approx(expected)


def test_a_flat_top_is_as_wide_as_the_intervals_reach(tmp_path):
    load.save(table(1.2, 1.45, 1.5, 1.35, 1.0), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take="x of max")
    assert (row["measured"], row["low"], row["high"]) == (6.0, 4.0, 8.0)


def test_what_was_computed_has_one_best_place(tmp_path):
    load.save(table(1.2, 1.45, 1.5).assign(num_pairs=0), "fig08", "cpu", tmp_path)
    row = found(tmp_path, take="x of max")
    assert (row["measured"], row["low"], row["high"]) == (6.0, 6.0, 6.0)


def test_what_was_not_measured_says_why(tmp_path):
    load.save(table(math.nan, reason="spread 40%, more than 15%"), "fig08", "cpu", tmp_path)
    assert (found(tmp_path)["verdict"], found(tmp_path)["note"]) == (
        "not measured",
        "spread 40%, more than 15%",
    )
    assert found(tmp_path, where="series == '9K'")["note"] == "not in what was measured"
    assert found(tmp_path, experiment="fig09")["note"] == "no results of this device"


def test_every_measured_device_has_every_claim_and_simulated_ones_what_they_have(tmp_path):
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    load.save(table(1.4), "fig09", "simulated-a6000", tmp_path)
    rows = verdicts(tmp_path, [GAIN, replace(GAIN, id="other", experiment="fig09")])
    assert list(rows.columns) == COLUMNS
    assert list(zip(rows.id, rows.device, rows.verdict, strict=True)) == [
        ("gain", "cpu", "holds"),
        ("other", "cpu", "not measured"),
        ("other", "simulated-a6000", "holds"),
    ]
    assert rows.expected[0] == "at least 1.33"


def test_without_results_nothing_is_measured(tmp_path):
    assert set(verdicts(tmp_path).verdict) == {"not measured"}
    assert set(verdicts(tmp_path).device) == {"none"}


def test_the_claims_are_well_written():
    claims = load_claims()
    assert len({claim.id for claim in claims}) == len(claims) > 15
    for claim in claims:
        assert claim.experiment in FIGURES
        assert claim.caveat
        assert claim.source.startswith(
            ("SARATHI, ", "Sarathi-Serve, ", "vLLM manual, ", "ModelArts manual, ")
        )


def test_every_claim_finds_its_rows_in_what_is_simulated():
    """So that no query asks for a line that nothing draws."""
    rows = verdicts().query("device.str.startswith('simulated-')")
    known = rows[rows.verdict != "not measured"].id.unique()
    assert set(known) == {claim.id for claim in load_claims()}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {id: a, claim: b", "can't be read"),
        ("- {id: a, claim: b}", "claims.yaml: a: missing"),
        ("- {id: a, colour: red}", "claims.yaml: a=colour is unknown"),
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


def test_the_readme_shows_what_is_recorded():
    text = claims.README.read_text()
    between = text.partition(claims.BEGIN)[2].partition(claims.END)[0].strip()
    assert between == claims.readme_table(verdicts()), "run python -m sarathi_lab claims --readme"


def test_the_readme_is_rewritten_between_its_marks(tmp_path):
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    for device, y in (
        ("simulated-a6000", 1.5),
        ("simulated-a6000-profiled", 1.6),
        ("simulated-h100", 1.05),
        ("simulated-h200", 1.45),
    ):
        load.save(table(y), "fig08", device, tmp_path)
    path = tmp_path / "README.md"
    path.write_text(f"before\n{claims.BEGIN}\nold\n{claims.END}\nafter\n")
    claims.write_readme(verdicts(tmp_path, [GAIN]), path)
    assert path.read_text() == (
        f"before\n{claims.BEGIN}\n| claim | source | expected | cpu | simulated |\n| --- | --- "
        "| --- | --- | --- |\n"
        "| it gains | a paper | at least 1.33 | **holds**: 1.4 (1.3 to 1.5) | **holds**: "
        "a6000 1.5 (1.4 to 1.6), h200 1.45 (1.35 to 1.55); "
        f"**fails**: h100 1.05 (0.95 to 1.15) |\n{claims.END}\nafter\n"
    )
    path.write_text("nothing")
    with pytest.raises(UserError, match="has no place for the claims"):
        claims.write_readme(verdicts(tmp_path, [GAIN]), path)


def test_claims_are_printed_by_device(tmp_path, capsys):
    load.save(table(1.4), "fig08", "cpu", tmp_path)
    assert main(["claims", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "On cpu, in brackets the 95 % interval" in out
    assert "1.4 (1.3 to 1.5)" in out
    assert "not measured" in out


def test_a_run_measures_first(tmp_path, capsys):
    small = ["model=tiny", "device=cpu", "task.setup=dry", "task.max_spread=50"]
    arguments = [
        "--run",
        "--simulate",
        "--only",
        "kv_reread",
        "--seconds",
        "1",
        "--results",
        str(tmp_path),
        *small,
    ]
    assert main(["claims", *arguments]) == 0
    out = capsys.readouterr().out
    assert "[1/2] kv_reread, measured; 0 s gone, about" in out
    assert "[2/2] kv_reread, simulated" in out
    rows = verdicts(tmp_path).query("id == 'reread_bytes'")
    assert dict(zip(rows.device, rows.verdict, strict=True)) == {
        "cpu": "holds",
        "simulated-a6000": "holds",
    }


def test_an_experiment_that_fails_does_not_stop_the_others(tmp_path, capsys):
    arguments = [
        "--run",
        "--only",
        "table2",
        "--only",
        "kv_reread",
        "--results",
        str(tmp_path),
        "chunk=3",
    ]
    assert main(["claims", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("chunk=3 has no effect") == 2
    assert "failed: table2, measured\nfailed: kv_reread, measured" in captured.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "9"], "--seconds is for runs; add --run"),
        (["--only", "fig08"], "--only is for runs"),
        (["model=7b"], "settings is for runs"),
        (["--simulate", "--seconds", "9"], "--seconds and settings are for measuring"),
        (["--run", "--seconds", "0"], "--seconds=0.0 must be a finite number above 0"),
        (["--readme", "--results", "elsewhere"], "--readme shows what is recorded, not"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, words, capsys):
    assert main(["claims", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1

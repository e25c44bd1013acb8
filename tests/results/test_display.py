"""Tables in the terminal: what they leave out, and what they break, where they have no room."""

from __future__ import annotations

from sarathi_lab.results.result import DisplayTable, show

ROW = {"policy": "orca", "tokens/s": "1,234", "KV\nread\nv": "1.00", "TBT\nP99": "123"}
WIDTH = 29  # of all of it: 8, 10, 6 and 5


def table(optional: dict[str, str]) -> DisplayTable:
    return DisplayTable([ROW], left=["policy"], unbroken=["policy"], optional=optional)


def test_a_table_without_room_leaves_out_what_is_missed_least(capsys, monkeypatch) -> None:
    whole = table({"KV\nread\nv": "KV read", "tokens/s": "tokens/s"})
    assert whole.least_width() == WIDTH
    for width, left_out in ((29, []), (28, ["KV read"]), (22, ["KV read", "tokens/s"])):
        fitting, names = whole.fitting(width)
        assert names == left_out
        assert len(fitting.tables(width)) == 1
    monkeypatch.setenv("COLUMNS", "28")
    show([whole])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith("lack of room: KV read; COLUMNS=29 in front of the command shows all")


def test_columns_that_none_can_make_room_for_follow_in_a_further_table() -> None:
    needed = table({"KV\nread\nv": "KV read"})
    fitting, names = needed.fitting(20)
    assert (fitting, names) == (needed, [])
    assert len(fitting.tables(20)) > 1

"""Tables in the terminal: what follows in a further table where there is no room."""

from __future__ import annotations

import pytest

from sarathi_lab.results.result import DisplayTable, show

ROW = {"policy": "orca", "tokens/s": "1,234", "KV\nread\nv": "1.00", "TBT\nP99": "123"}
WIDTH = 29  # of all of it: 8, 10, 6 and 5


@pytest.mark.parametrize(("width", "num_tables"), [(WIDTH, 1), (WIDTH - 1, 2), (20, 2), (18, 3)])
def test_columns_without_room_follow_beside_the_names_of_their_rows(
    width, num_tables, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(max(width, 20)))
    table = DisplayTable([ROW], left=["policy"], unbroken=["policy"])
    assert len(table.tables(width)) == num_tables
    show([table])
    printed = capsys.readouterr().out.split()
    assert {"1,234", "1.00", "123"} <= set(printed)

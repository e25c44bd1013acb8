"""Recorded tables: text where they are short, gzipped where they are long."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from sarathi_lab.config.csv_files import LONGEST_TEXT, csv_file, csv_files, csv_name, write_csv
from sarathi_lab.config.paths import EXPERIMENTS

SHORT = "x\n1\n"
LONG = "x\n" + "1\n" * LONGEST_TEXT


def test_a_table_has_one_file_whose_form_follows_its_length(tmp_path):
    path = tmp_path / "rows.csv"
    assert write_csv(path, SHORT) == csv_file(path) == path
    gzipped = write_csv(path, LONG)
    assert gzipped == csv_file(path) == tmp_path / "rows.csv.gz"
    assert list(tmp_path.iterdir()) == [gzipped]
    assert len(pd.read_csv(gzipped)) == LONGEST_TEXT
    content = gzipped.read_bytes()
    assert write_csv(path, LONG).read_bytes() == content
    write_csv(path, SHORT)
    assert list(tmp_path.iterdir()) == [path]


def test_both_forms_are_found_by_name(tmp_path):
    for name, text in (("a", LONG), ("b", SHORT), ("c", LONG)):
        write_csv(tmp_path / f"{name}.csv", text)
    (tmp_path / "c.csv").write_text(SHORT)  # as after a merge: the text is what one reads
    paths = csv_files(tmp_path, "*.csv")
    assert [path.name for path in paths] == ["a.csv.gz", "b.csv", "c.csv"]
    assert [csv_name(path) for path in paths] == ["a", "b", "c"]


def test_no_recorded_table_is_there_twice():
    tables = Counter(path.with_name(csv_name(path)) for path in EXPERIMENTS.rglob("*.csv*"))
    assert [str(table) for table, number in tables.items() if number > 1] == []

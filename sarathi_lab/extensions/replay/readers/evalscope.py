"""Results of `evalscope perf`: `benchmark_data.db`, a database with a row a request, and
`benchmark_summary.json`. `benchmark_args.json` beside them has the model and the users. Versions
have worded the summary's headings differently, in up to three ways.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from pathlib import Path

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import readable
from sarathi_lab.extensions.replay.benchmark import Load, Row
from sarathi_lab.extensions.replay.clients import CLOCK, Client, client_of_rate
from sarathi_lab.extensions.replay.json_values import count_of, number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    fields_of,
    stated_numbers,
    stated_values,
)
from sarathi_lab.workload.recording import FAILED, FINISHED

DATABASE = b"SQLite format 3"
ARGUMENTS = "benchmark_args.json"
GAPS = "inter_token_latencies"


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    with readable(path, "name a client's file"), path.open("rb") as file:
        return file.read(len(DATABASE)) == DATABASE


def read_database(content: Content) -> Load:
    """Read the requests of a database. Raises UserError for one of another program."""
    columns = [field.path for field in fields_of("evalscope")]
    try:
        # Opened for reading only, so that nothing is made where none is.
        connection = sqlite3.connect(f"file:{content.path}?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        connection.execute(f"SELECT {', '.join(columns)} FROM result")
        rows = [dict(row) for row in connection.execute("SELECT * FROM result")]
        connection.close()
    except sqlite3.Error as error:
        raise UserError(
            f"{content.path} is a database without evalscope's table of results ({error}); name "
            "its benchmark_data.db"
        ) from None
    arguments = content.beside(ARGUMENTS)
    return Load(
        client_name="evalscope",
        rows=map(_row, rows),
        server=content.server(arguments.get("model")),
        client=_client_of(arguments.get("parallel"), arguments.get("rate")),
    )


def _row(row: Object) -> Row:
    gaps: tuple[float, ...] = ()  # of a list in JSON; none where that is damaged or missing
    with suppress(ValueError):
        gaps = numbers_of(json.loads(str(row.get(GAPS) or "[]")))
    return {
        **stated_values(row, "evalscope"),
        "gaps": gaps,
        "status": FINISHED if row.get("success", 1) else FAILED,
    }


def is_of_evalscope_summary(content: Content) -> bool:
    """Whether the file is evalscope's summary, each of which has a mean latency."""
    fields = fields_of("evalscope_summary")
    return any(field.path in content.first for field in fields if field.quantity == "latency")


def read_evalscope_summary(content: Content, summary: Object) -> Load:
    """Read means."""
    numbers = stated_numbers(summary, "evalscope_summary")
    return Load(
        client_name="evalscope",
        numbers=numbers,
        record="benchmark_data.db of the same run",
        client=_client_of(numbers.get("users"), numbers.get("rate")),
        server=content.server(content.beside(ARGUMENTS).get("model")),
    )


def _client_of(users: object, rate: object) -> Client:
    """Return the client of so many users, at a rate unless that is -1."""
    if number_of(rate) > 0:
        return client_of_rate(rate, users)
    return client_of_rate(None, users) if count_of(users) else CLOCK

"""Results of `evalscope perf`: `benchmark_data.db`, a database with a row a request, and
`benchmark_summary.json`, which its log has as well. `benchmark_args.json` beside them has the model
and the users.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import readable
from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import Client
from sarathi_lab.extensions.replay.json_values import count_of, number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    field,
    stated_numbers,
    stated_values,
)
from sarathi_lab.workload.recording import FAILED, FINISHED

DATABASE = b"SQLite format 3"
ARGUMENTS = "benchmark_args.json"
# Columns of the database.
REQUEST = {
    "arrival": field("start_time"),
    "latency": field("latency"),
    "first_token": field("first_chunk_latency"),
    "prompt_len": field("prompt_tokens"),
    "output_len": field("completion_tokens"),
}
GAPS = "inter_token_latencies"
# Headings of the summary, which its versions have worded differently.
NUMBERS = {
    "num_requests": field("Succeed requests", "Successful requests", "Success requests"),
    "num_failed": field("Failed requests"),
    "users": field("Number of concurrency", "Concurrency"),
    "rate": field("Request rate (req/s)", "Request Rate (req/s)"),
    "prompt_len": field("Average input tokens per request", "Avg Input Tokens"),
    "output_len": field("Average output tokens per request", "Avg Output Tokens"),
    "ttft": field("Average time to first token (s)", "Avg TTFT (s)"),
    "tpot": field("Average time per output token (s)", "Avg TPOT (s)"),
    "latency": field("Average latency (s)", "Avg Latency (s)"),
}
OF_SUMMARY = NUMBERS["latency"].paths  # headings that every summary has one of
# Objects of JSON in a log that may be summaries.
PRINTED = re.compile(r"\{[^{}]*\}")
# Of a table as newer versions print it: a heading and a value a line.
TABLE_ROW = re.compile(r"^\W*\|\s*([^|\n]+?)\s*\|\s*([^|\n]+?)\s*\|\s*$", re.MULTILINE)


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    with readable(path, "name a client's file"), path.open("rb") as file:
        return file.read(len(DATABASE)) == DATABASE


def read_database(content: Content) -> Load:
    """Read the requests of a database. Raises UserError for one of another program."""
    path = content.path
    try:
        # Opened for reading only, so that nothing is made where none is.
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM result")]
        connection.close()
    except sqlite3.Error as error:
        raise UserError(
            f"{path} is a database without evalscope's table of results ({error}); name its "
            "benchmark_data.db"
        ) from None
    columns = [column for field in REQUEST.values() for column in field.paths]
    if rows and not {*columns} <= {*rows[0]}:
        raise UserError(f"{path} lacks columns of evalscope's, such as {', '.join(columns)}")
    arguments = content.beside(ARGUMENTS)
    return RecordedLoad(
        client_name="evalscope",
        rows=_rows(rows),
        server=content.server(arguments.get("model")),
        client=_client_of(arguments.get("parallel"), arguments.get("rate")),
    )


def _rows(rows: Sequence[Object]) -> Iterator[dict[str, object]]:
    for row in rows:
        yield {
            **stated_values(row, REQUEST),
            "gaps": _gaps(row.get(GAPS)),
            "status": FINISHED if row.get("success", 1) else FAILED,
        }


def _gaps(text: object) -> tuple[float, ...]:
    """Read the seconds between tokens, a list of JSON; none where that is damaged or missing."""
    try:
        return numbers_of(json.loads(str(text or "[]")))
    except ValueError:
        return ()


def is_of_evalscope_summary(content: Content) -> bool:
    """Whether the file is evalscope's summary."""
    signs = ("Time taken for tests (s)", *NUMBERS["ttft"].paths, *OF_SUMMARY)
    return any(heading in content.first for heading in signs)


def is_of_evalscope_log(content: Content) -> bool:
    """Whether the file is evalscope's log."""
    return not content.objects and bool(logged_summaries(content))


def logged_summaries(content: Content) -> Sequence[Object]:
    """Return the summaries in a log, objects or tables, one a load."""
    if not any(heading in content.text for heading in OF_SUMMARY):
        return ()
    summaries = list[Object]()
    for printed in PRINTED.findall(content.text):
        with suppress(ValueError):  # another object that is no JSON
            summary = json.loads(printed)
            if any(heading in summary for heading in OF_SUMMARY):
                summaries.append(summary)
    return summaries or _printed_tables(content.text)


def _printed_tables(text: str) -> list[Object]:
    """Return the summaries that tables of a heading and a value a line have."""
    tables = list[dict[str, str]]()
    for heading, value in TABLE_ROW.findall(text):
        if not tables or heading in tables[-1]:
            tables.append({})
        tables[-1][heading] = value
    return [table for table in tables if any(heading in table for heading in OF_SUMMARY)]


def read_evalscope_summary(content: Content, summary: Object) -> Load:
    """Read means."""
    numbers = stated_numbers(summary, NUMBERS)
    return Summary(
        client_name="evalscope",
        numbers=numbers,
        record="benchmark_data.db of the same run",
        client=_client_of(numbers.get("users"), numbers.get("rate")),
        server=content.server(content.beside(ARGUMENTS).get("model")),
    )


def _client_of(users: object, rate: object) -> Client:
    """Return the client of so many users, at a rate unless that is -1."""
    limit = count_of(users) or None
    per_second = number_of(rate)
    if limit is None and not per_second > 0:
        return Client()
    return Client(limit, per_second if per_second > 0 else math.inf, "stated")

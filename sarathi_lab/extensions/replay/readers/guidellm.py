"""`benchmarks.json` of `guidellm benchmark run`, a load a rate, from 0.2 on, and its
`benchmarks.csv`, which has means.

It records no times between tokens. A file may have a sample of the requests only, or none of them
and means.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator

from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import client_of_strategy
from sarathi_lab.extensions.replay.json_values import list_of, number_of
from sarathi_lab.extensions.replay.readers.content import (
    MILLISECOND,
    Content,
    Object,
    field,
    stated_numbers,
    stated_values,
)
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.workload.recording import FAILED, FINISHED

# Lists of a load's requests, and what happened to those.
STATUSES = {"successful": FINISHED, "errored": FAILED, "incomplete": "incomplete"}
REQUEST = {
    "prompt_len": field("prompt_tokens"),
    "output_len": field("output_tokens"),
    "arrival": field("request_start_time", "start_time"),  # of 0.4 and newer, of older files
    "first_token": field("time_to_first_token_ms", unit=MILLISECOND),
    "latency": field("request_latency"),
    "cached_len": field("cached_tokens", "input_metrics.cached_tokens"),
    "session": field("conversation_id"),
    "turn": field("turn_index"),
}
# Of a load's finished requests.
WAITS = {
    "ttft": field("metrics.time_to_first_token_ms.successful.mean", unit=MILLISECOND),
    "latency": field("metrics.request_latency.successful.mean"),
}
NUM_REQUESTS = field(
    "metrics.request_totals.successful", "scheduler_metrics.requests_made.successful"
)
NUMBERS = {
    **WAITS,
    "num_requests": NUM_REQUESTS,
    "num_failed": field("metrics.request_totals.errored"),
    "num_incomplete": field("metrics.request_totals.incomplete"),
    "prompt_len": field("metrics.prompt_token_count.successful.mean"),
    "output_len": field("metrics.output_token_count.successful.mean"),
    # Without the first token, which GuideLLM's own time per output token counts in.
    "tpot": field("metrics.inter_token_latency_ms.successful.mean", unit=MILLISECOND),
}

# First columns of its CSV: of 0.4 and newer, whose header has three lines, and of older files.
CSV_GROUP, CSV_OF_ONE_LINE = "Run Info", "Run Id"
CSV_HEADER_LINES = 3
# Columns of its CSV, of newer and of older files.
COLUMNS = {
    "num_requests": field("Request Counts Successful"),
    "num_incomplete": field("Request Counts Incomplete"),
    "num_failed": field("Request Counts Errored"),
    "requests_a_second": field(
        "Server Throughput Successful Requests/Sec Mean",
        "Successful Requests per second mean",
    ),
    "duration": field("Timings Duration Sec", "Duration"),
    "prompt_len": field(
        "Token Metrics Successful Input Tokens Mean",
        "Successful Prompt token count mean",
    ),
    "output_len": field(
        "Token Metrics Successful Output Tokens Mean",
        "Successful Output token count mean",
    ),
    "latency": field("Request Latency Successful Sec Mean", "Successful Request latency mean"),
    "ttft": field(
        "Time to First Token Successful ms Mean",
        "Successful Time to first token ms mean",
        unit=MILLISECOND,
    ),
    "tpot": field(
        "Inter Token Latency Successful ms Mean",
        "Successful Inter token latency ms mean",
        unit=MILLISECOND,
    ),
}
STRATEGY = field("Benchmark Strategy", "Name")  # such as "concurrent@16"
CONFIGURED = ("Run Info Backend", "Runtime Info Arguments", "Worker", "Args")  # objects of JSON


def is_of_guidellm(content: Content) -> bool:
    """Whether the file is GuideLLM's."""
    return "benchmarks" in content.first


def loads_of_guidellm(content: Content) -> list[Object]:
    """Return the loads of a sweep."""
    return [as_object(load) for load in list_of(content.first["benchmarks"])]


def read_guidellm(content: Content, load: Object) -> Load:
    """Read one load. Raises KeyError for a damaged one."""
    requests = as_object(load.get("requests"))
    has_records = any(requests.get(name) for name in STATUSES)
    settings = as_object(load.get("config")) or as_object(load.get("args"))
    strategy = as_object(settings.get("strategy"))
    labels = {"workload.rate": strategy.get("rate")}
    server = content.server(_model_of(content, load, settings))
    client = client_of_strategy(strategy)
    if not has_records and as_object(load.get("metrics")):
        return Summary(
            client_name="guidellm",
            numbers=stated_numbers(load, NUMBERS),
            record="a benchmarks.json that has each request",
            labels=labels,
            server=server,
            client=client,
        )
    rows = list(_rows(as_object(load["requests"])))
    num_read = sum(row["status"] == FINISHED for row in rows)
    num_finished = number_of(NUM_REQUESTS.read(load))
    cautions = []
    means = dict[str, float]()
    if num_finished > num_read:
        cautions.append(
            f"the file has {num_read} of {num_finished:.0f} finished requests, a sample: the load "
            "is replayed with these alone; record all requests"
        )
    elif num_read:
        means = stated_numbers(load, WAITS)
    return RecordedLoad(
        client_name="guidellm",
        rows=rows,
        numbers=means,
        labels=labels,
        server=server,
        client=client,
        cautions=cautions,
    )


def _rows(requests: Object) -> Iterator[dict[str, object]]:
    for name, status in STATUSES.items():
        for entry in list_of(requests.get(name)):
            yield {**stated_values(as_object(entry), REQUEST), "status": status}
    requests["successful"]  # which every file has


def _model_of(content: Content, load: Object, settings: Object) -> object:
    backend = as_object(settings.get("backend")) or as_object(load.get("worker"))
    arguments = as_object(content.first.get("args"))
    return backend.get("model") or backend.get("backend_model") or arguments.get("model")


def is_of_csv(content: Content) -> bool:
    """Whether the file is GuideLLM's CSV."""
    if content.objects:
        return False
    columns = content.text.partition("\n")[0].split(",")
    return columns[0] == CSV_GROUP or CSV_OF_ONE_LINE in columns[:4]


def csv_loads(content: Content) -> list[Object]:
    """Return the cells of each load, by the words above them."""
    lines = list(csv.reader(io.StringIO(content.text)))
    num_header = CSV_HEADER_LINES if lines[0][0] == CSV_GROUP else 1
    columns = zip(*lines[:num_header], strict=False)
    headings = [" ".join(filter(None, levels)) for levels in columns]
    return [dict(zip(headings, cells, strict=False)) for cells in lines[num_header:] if cells]


def read_csv(content: Content, load: Object) -> Load:
    """Read the means of a load in CSV."""
    numbers = stated_numbers(load, COLUMNS)
    has_rate = {"requests_a_second", "duration"} <= {*numbers}
    if "num_requests" not in numbers and has_rate:  # as in older files
        numbers["num_requests"] = round(numbers["requests_a_second"] * numbers["duration"])
    # Such as "concurrent@16"; "sweep" has no number.
    kind, _, value = str(STRATEGY.read(load) or "").partition("@")
    settings = {"type_": kind}
    if not math.isnan(number_of(value)):
        settings |= {"streams": value, "rate": value}
    client = client_of_strategy(settings)
    return Summary(
        client_name="guidellm",
        numbers=numbers,
        record="benchmarks.json of the same run",
        labels={"workload.rate": value} if client.users is None else {},
        server=content.server(_model_in_csv(load)),
        client=client,
    )


def _model_in_csv(load: Object) -> object:
    for column in CONFIGURED:
        settings = as_object(load.get(column))
        backend = as_object(settings.get("backend"))
        for stated in (backend, settings):
            model = stated.get("model") or stated.get("backend_model")
            if model:
                return model
    return None

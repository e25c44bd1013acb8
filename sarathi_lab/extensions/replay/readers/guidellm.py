"""`benchmarks.json` of `guidellm benchmark run`, a load a rate, from 0.2 on, and its
`benchmarks.csv`, which has means.

It records no times between tokens. A file may have a sample of the requests only, or none of them
and means.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence

from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import client_of_strategy
from sarathi_lab.extensions.replay.json_values import count_of, list_of, number_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    nested,
)
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.workload.recording import FINISHED

# Lists of a load's requests, and what happened to those.
STATUSES = {"successful": FINISHED, "errored": "failed", "incomplete": "incomplete"}
# When a request was sent: of 0.4 and newer, and of older files.
SENT = ("request_start_time", "start_time")
MILLISECOND = 1e-3
# A load's mean waits, and the unit that each has.
WAITS = {"ttft": ("time_to_first_token_ms", MILLISECOND), "latency": ("request_latency", 1.0)}
# Without the first token, which GuideLLM's own time per output token counts in.
TIME_BETWEEN_TOKENS = ("inter_token_latency_ms", MILLISECOND)

# First columns of its CSV: of 0.4 and newer, whose header has three lines, and of older files.
CSV_GROUP, CSV_OF_ONE_LINE = "Run Info", "Run Id"
CSV_HEADER_LINES = 3
# Columns of its CSV, of newer and of older files.
COLUMNS: dict[str, Sequence[str]] = {
    "num_requests": ("Request Counts Successful",),
    "num_incomplete": ("Request Counts Incomplete",),
    "num_failed": ("Request Counts Errored",),
    "requests_a_second": (
        "Server Throughput Successful Requests/Sec Mean",
        "Successful Requests per second mean",
    ),
    "duration": ("Timings Duration Sec", "Duration"),
    "prompt_len": (
        "Token Metrics Successful Input Tokens Mean",
        "Successful Prompt token count mean",
    ),
    "output_len": (
        "Token Metrics Successful Output Tokens Mean",
        "Successful Output token count mean",
    ),
    "latency": ("Request Latency Successful Sec Mean", "Successful Request latency mean"),
    "ttft": (
        "Time to First Token Successful ms Mean",
        "Successful Time to first token ms mean",
    ),
    "tpot": (
        "Inter Token Latency Successful ms Mean",
        "Successful Inter token latency ms mean",
    ),
}
STRATEGY = ("Benchmark Strategy", "Name")  # such as "concurrent@16"
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
    if not has_records and as_object(load.get("metrics")):
        return _summary(content, load)
    rows = list(_rows(as_object(load["requests"])))
    settings = _settings_of(load)
    strategy = as_object(settings.get("strategy"))
    num_read = sum(row["status"] == FINISHED for row in rows)
    cautions = []
    num_finished = _num_finished(load)
    means = dict[str, float]()
    if num_finished > num_read:
        cautions.append(
            f"the file has {num_read} of {num_finished:.0f} finished requests, a sample: the load "
            "is replayed with these alone; record all requests"
        )
    elif num_read:
        means = _means(load, WAITS)
    return RecordedLoad(
        client_name="guidellm",
        rows=rows,
        means=means,
        labels={"workload.rate": strategy.get("rate")},
        server=content.server(_model_of(content, load, settings)),
        client=client_of_strategy(strategy),
        cautions=cautions,
    )


def _settings_of(load: Object) -> Object:
    return as_object(load.get("config")) or as_object(load.get("args"))


def _summary(content: Content, load: Object) -> Summary:
    """Read the means of a load whose requests are not recorded."""
    settings = _settings_of(load)
    strategy = as_object(settings.get("strategy"))
    totals = as_object(nested(load, "metrics", "request_totals"))
    num_incomplete = count_of(totals.get("incomplete"))
    cautions = []
    if num_incomplete:
        cautions.append(f"{num_incomplete} more requests were incomplete")
    return Summary(
        client_name="guidellm",
        num_requests=_num_finished(load),
        prompt_len=_mean(load, "prompt_token_count"),
        output_len=_mean(load, "output_token_count"),
        means=_means(load, {**WAITS, "tpot": TIME_BETWEEN_TOKENS}),
        num_failed=count_of(totals.get("errored")),
        labels={"workload.rate": strategy.get("rate")},
        server=content.server(_model_of(content, load, settings)),
        client=client_of_strategy(strategy),
        cautions=cautions,
    )


def _rows(requests: Object) -> Iterator[dict[str, object]]:
    for name, status in STATUSES.items():
        for entry in list_of(requests.get(name)):
            request = as_object(entry)
            sent = next((request[key] for key in SENT if request.get(key) is not None), None)
            first_token = number_of(request.get("time_to_first_token_ms"))
            yield {
                "prompt_len": request.get("prompt_tokens"),
                "output_len": request.get("output_tokens"),
                "arrival": sent,
                "first_token": MILLISECOND * first_token,
                "latency": request.get("request_latency"),
                "cached_len": _cached_tokens(request),
                "session": str(request.get("conversation_id") or ""),
                "turn": count_of(request.get("turn_index")),
                "status": status,
            }
    requests["successful"]  # which every file has


def _cached_tokens(request: Object) -> int:
    of_prompt = as_object(request.get("input_metrics"))
    return count_of(request.get("cached_tokens") or of_prompt.get("cached_tokens"))


def _num_finished(load: Object) -> float:
    """Return the finished requests that the file counts; NaN if it does not."""
    for keys in (("metrics", "request_totals"), ("scheduler_metrics", "requests_made")):
        number = number_of(nested(load, *keys, "successful"))
        if not math.isnan(number):
            return number
    return math.nan


def _mean(load: Object, key: str) -> float:
    return number_of(nested(load, "metrics", key, "successful", "mean"))


def _means(load: Object, waits: Mapping[str, tuple[str, float]]) -> dict[str, float]:
    """Return mean waits (seconds) that the file states of its finished requests."""
    means = dict[str, float]()
    for wait, (key, factor) in waits.items():
        mean = _mean(load, key)
        if not math.isnan(mean):
            means[wait] = factor * mean
    return means


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
    numbers = {}
    for name, columns in COLUMNS.items():
        numbers[name] = number_of(_first(load, columns))
    num_requests = numbers["num_requests"]
    if math.isnan(num_requests):  # older files have their rate and duration alone
        num_requests = float(round(numbers["requests_a_second"] * numbers["duration"]))
    waits = {
        "ttft": MILLISECOND * numbers["ttft"],
        "tpot": MILLISECOND * numbers["tpot"],
        "latency": numbers["latency"],
    }
    # Such as "concurrent@16"; "sweep" has no number.
    kind, _, value = str(_first(load, STRATEGY) or "").partition("@")
    settings = {"type_": kind}
    if not math.isnan(number_of(value)):
        settings |= {"streams": value, "rate": value}
    cautions = []
    num_incomplete = count_of(numbers["num_incomplete"])
    if num_incomplete:
        cautions.append(f"{num_incomplete} more requests were incomplete")
    client = client_of_strategy(settings)
    return Summary(
        client_name="guidellm",
        num_requests=num_requests,
        prompt_len=numbers["prompt_len"],
        output_len=numbers["output_len"],
        means={wait: mean for wait, mean in waits.items() if not math.isnan(mean)},
        num_failed=count_of(numbers["num_failed"]),
        labels={"workload.rate": value} if client.users is None else {},
        server=content.server(_model_in_csv(load)),
        client=client,
        cautions=cautions,
    )


def _first(load: Object, columns: Sequence[str]) -> object:
    """Return the first of these cells that has something."""
    return next((load[column] for column in columns if load.get(column)), None)


def _model_in_csv(load: Object) -> object:
    for column in CONFIGURED:
        settings = as_object(load.get(column))
        backend = as_object(settings.get("backend"))
        for stated in (backend, settings):
            model = stated.get("model") or stated.get("backend_model")
            if model:
                return model
    return None

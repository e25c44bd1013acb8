"""`benchmarks.json` of `guidellm benchmark run`, a load a rate, from 0.2 on.

It records no times between tokens. A file may have a sample of the requests only, or none of them
and means. Its own time per output token counts the first token in, so that its latency between
tokens is read instead. `request_start_time` is of 0.4 and newer, `start_time` of older files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sarathi_lab.extensions.replay.benchmark import Load, Row
from sarathi_lab.extensions.replay.clients import (
    CLOCK,
    EVEN,
    POISSON,
    Client,
    client_of_rate,
)
from sarathi_lab.extensions.replay.json_values import list_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    stated_numbers,
    stated_values,
)
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.workload.recording import FAILED, FINISHED

# Lists of a load's requests, and what happened to those.
STATUSES = {
    "successful": FINISHED,
    "errored": FAILED,
    "incomplete": "incomplete",
}
WAITS = ["ttft", "latency"]  # that records have as well
# Strategies of several users; others have a clock, even or at random.
OF_USERS = ("concurrent", "throughput")


def loads_of_guidellm(content: Content) -> list[Object]:
    """Return the loads of a sweep."""
    return [as_object(load) for load in list_of(content.first["benchmarks"])]


def read_guidellm(content: Content, load: Object) -> Load:
    """Read one load. Raises KeyError for a damaged one."""
    settings = as_object(load.get("config")) or as_object(load.get("args"))
    strategy = as_object(settings.get("strategy"))
    numbers = stated_numbers(load, "guidellm_summary")
    means = Load(
        client_name="guidellm",
        numbers=numbers,
        record="a benchmarks.json that has each request",
        labels={"workload.rate": strategy.get("rate")},
        server=content.server(_model_in(settings, load, as_object(content.first.get("args")))),
        client=_client_of(strategy),
    )
    requests = as_object(load.get("requests"))
    has_records = any(requests.get(name) for name in STATUSES)
    if not has_records and as_object(load.get("metrics")):
        return means
    rows = list(_rows(as_object(load["requests"])))
    num_read = sum(row["status"] == FINISHED for row in rows)
    num_finished = numbers.get("num_requests", num_read)
    if num_finished <= num_read:
        waits = {name: numbers[name] for name in WAITS if name in numbers}
        return replace(means, rows=rows, numbers=waits)
    caution = (
        f"the file has {num_read} of {num_finished:.0f} finished requests, a sample: the load is "
        "replayed with these alone; record all requests"
    )
    return replace(
        means,
        rows=rows,
        numbers={},
        cautions=[caution],
    )


def _rows(requests: Object) -> Iterator[Row]:
    for name, status in STATUSES.items():
        for entry in list_of(requests.get(name)):
            yield {**stated_values(as_object(entry), "guidellm"), "status": status}
    requests["successful"]  # which every file has


def _model_in(*settings: Object) -> object:
    """Return the first model that the settings of a run name."""
    models = [stated_values(node, "guidellm_server")["model"] for node in settings]
    return next(filter(None, models), None)


def _client_of(strategy: Object) -> Client:
    """Make the client of one of GuideLLM's strategies."""
    stated = stated_values(strategy, "guidellm_load")
    kind = stated["kind"]
    if kind == "synchronous":
        return client_of_rate(None, 1)
    if kind in OF_USERS:
        return client_of_rate(None, stated["users"])
    if not kind:
        return CLOCK
    return client_of_rate(stated["rate"], stated["limit"], POISSON if kind == "poisson" else EVEN)

"""Results of AIPerf and of genai-perf, which it was derived from.

- AIPerf's `profile_export.jsonl`, a request a line, with conversations and their turns;
- genai-perf's `profile_export.json`, times of responses without lengths, which the summary beside
  it has in the mean;
- the summaries of both, `profile_export_aiperf.json` and `profile_export_genai_perf.json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.benchmark import Load, Row
from sarathi_lab.extensions.replay.clients import (
    CLOCK,
    EVEN,
    Client,
    client_of_rate,
    cv_of_gamma,
)
from sarathi_lab.extensions.replay.json_values import count_of, list_of, number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    MILLISECOND,
    NANOSECOND,
    Content,
    Object,
    stated_numbers,
    stated_unit,
    stated_values,
    value_at,
)
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.workload.recording import FAILED, FINISHED

AIPERF_SUMMARY = "profile_export_aiperf.json"
GENAI_PERF_SUMMARY = "profile_export_genai_perf.json"
PROFILING = ("profiling", None)  # phases whose requests count
GAPS = "metrics.inter_chunk_latency.value"
END_OF_STREAM = "[DONE]"


def read_aiperf(content: Content, _: Object) -> Load:
    """Read all lines."""
    rows = [_row(record) for record in content.objects]
    if not any(count_of(row["turn"]) for row in rows):
        rows = [{**row, "session": ""} for row in rows]  # of one request each
    summary = content.beside(AIPERF_SUMMARY)
    return Load(
        client_name="aiperf",
        rows=rows,
        numbers=stated_numbers(summary, "aiperf_summary"),
        server=content.server(_model_of(summary)),
        client=_client_of(summary),
    )


def _row(record: Object) -> dict[str, object]:
    metadata = as_object(record.get("metadata"))
    gaps = numbers_of(value_at(record, GAPS))
    unit = stated_unit(record, GAPS, MILLISECOND)
    status = FINISHED
    if metadata.get("benchmark_phase") not in PROFILING:
        status = "of the warm-up"
    elif metadata.get("was_cancelled"):
        status = "cancelled"
    elif record.get("error"):
        status = FAILED
    return {
        **stated_values(record, "aiperf"),
        "gaps": tuple(unit * gap for gap in gaps),
        "status": status,
    }


def is_of_summary(content: Content) -> bool:
    """Whether the file is a summary of AIPerf's or genai-perf's."""
    metric = as_object(content.first.get("request_latency"))
    return "avg" in metric and "unit" in metric


def read_summary(content: Content, summary: Object) -> Load:
    """Read means."""
    load = Load(
        client_name="aiperf",
        numbers=stated_numbers(summary, "aiperf_summary"),
        record="profile_export.jsonl of the same run",
        client=_client_of(summary),
        server=content.server(_model_of(summary)),
    )
    config = as_object(summary.get("input_config"))
    if "perf_analyzer" in config:
        return replace(load, client_name="genai-perf", record="profile_export.json of the same run")
    return load


def _client_of(summary: Object) -> Client:
    """Read how requests were sent from the configuration in a summary, if it is there; of a rate
    that changes the mean of answers is taken.
    """
    load = _load_of(as_object(summary.get("input_config")))
    stated = stated_values(load, "aiperf_load")
    rate = stated["rate"]
    if rate is None and load.get("rate_series"):
        rate = "a series of rates"
    if not (rate or stated["users"]):
        return CLOCK  # as of a schedule
    # Without a pattern gaps are of a Poisson process, or of the stated shape.
    cv = EVEN if stated["pattern"] == "constant" else cv_of_gamma(stated["shape"])
    mean_rate = stated_numbers(summary, "aiperf_summary").get("request_throughput", math.nan)
    return client_of_rate(rate, stated["users"], cv, mean_rate=mean_rate)


def _load_of(config: Object) -> Object:
    """Return the settings of the load in a configuration; empty where they are not there."""
    phases = config.get("phases")
    if isinstance(phases, list):  # of AIPerf from 0.10 on
        objects = [as_object(phase) for phase in phases]
        measured = [phase for phase in objects if not phase.get("exclude_from_results")]
        return measured[0] if len(measured) == 1 else {}
    load = as_object(config.get("loadgen"))
    if load:
        return load
    # Even gaps are perf_analyzer's default, which genai-perf leaves as it is.
    return {**as_object(value_at(config, "perf_analyzer.stimulus")), "arrival_pattern": "constant"}


def _model_of(summary: Object) -> object:
    config = as_object(summary.get("input_config"))
    stated = config.get("model_names") or value_at(config, "endpoint.model_names")
    if isinstance(stated, str):
        return stated
    names = list_of(stated)
    if not names:
        # As newer versions write it.
        models = list_of(value_at(config, "models.items"))
        names = [as_object(model).get("name") for model in models]
    return next(iter(names), None)


def experiments(content: Content) -> Sequence[Object]:
    """Return genai-perf's experiments, a load each."""
    return [as_object(entry) for entry in list_of(content.first["experiments"])]


def read_genai_perf(content: Content, experiment: Object) -> Load:
    """Read one experiment. Raises UserError without the summary that has the prompts' lengths."""
    summary = content.beside(GENAI_PERF_SUMMARY)
    numbers = stated_numbers(summary, "aiperf_summary")
    if "prompt_len" not in numbers:
        raise UserError(
            f"{content.path} has no lengths of prompts; put {GENAI_PERF_SUMMARY} of the same run "
            "beside it"
        )
    prompt_len = max(1, round(numbers["prompt_len"]))
    requests = map(as_object, list_of(experiment["requests"]))
    mode = as_object(experiment.get("experiment"))
    client = CLOCK
    if mode.get("mode") == "concurrency":
        client = client_of_rate(None, mode.get("value"))
    elif mode.get("mode") == "request_rate":
        client = client_of_rate(mode.get("value"), None)
    caution = (
        "the file has no lengths: each response counts as a token, and prompts have the mean length"
    )
    return Load(
        client_name="genai-perf",
        rows=[_row_of_responses(request, prompt_len) for request in requests],
        server=content.server(_model_of(summary)),
        client=client,
        cautions=[caution],
    )


def _row_of_responses(request: Object, prompt_len: int) -> Row:
    sent = number_of(request.get("timestamp"))
    outputs = list_of(request.get("response_outputs"))
    times = [*numbers_of(request.get("response_timestamps"))]
    if len(times) == len(outputs) and END_OF_STREAM in str(outputs[-1:]):
        times.pop()
    row: dict[str, object] = {"prompt_len": prompt_len, "arrival": NANOSECOND * sent}
    if not times:
        return {**row, "status": FAILED}
    return {
        **row,
        "output_len": len(times),
        "first_token": NANOSECOND * (times[0] - sent),
        "latency": NANOSECOND * (times[-1] - sent),
        "gaps": tuple(NANOSECOND * (after - before) for before, after in pairwise(times)),
        "status": FINISHED,
    }

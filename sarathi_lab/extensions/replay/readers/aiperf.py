"""Results of AIPerf and of genai-perf, which it was derived from.

- AIPerf's `profile_export.jsonl`, a request a line, with conversations and their turns;
- the summaries of both, `profile_export_aiperf.json` and `profile_export_genai_perf.json`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sarathi_lab.extensions.replay.benchmark import Load
from sarathi_lab.extensions.replay.clients import (
    CLOCK,
    EVEN,
    Client,
    client_of_rate,
    cv_of_gamma,
)
from sarathi_lab.extensions.replay.json_values import count_of, list_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    MILLISECOND,
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
PROFILING = ("profiling", None)  # phases whose requests count
GAPS = "metrics.inter_chunk_latency.value"


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
        return replace(
            load, client_name="genai-perf", record="profile_export.jsonl of a run with AIPerf"
        )
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

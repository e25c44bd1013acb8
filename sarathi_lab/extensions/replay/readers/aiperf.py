"""Results of NVIDIA's clients.

- AIPerf's `profile_export.jsonl`, a request a line, with conversations and their turns;
- genai-perf's `profile_export.json`, times of responses without lengths, which the summary beside
  it has in the mean;
- the summaries of both, `profile_export_aiperf.json` and `profile_export_genai_perf.json`, and the
  same as CSV.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import (
    CLOCK,
    EVEN,
    POISSON,
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
    field,
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
REQUEST = {
    "prompt_len": field("metrics.input_sequence_length.value"),
    "output_len": field("metrics.output_sequence_length.value"),
    "arrival": field("metadata.request_start_ns", unit=NANOSECOND),
    # Also as the first versions called it.
    "first_token": field(
        "metrics.time_to_first_token.value", "metrics.ttft.value", unit=MILLISECOND
    ),
    "latency": field("metrics.request_latency.value", unit=MILLISECOND),
    "cached_len": field("metrics.usage_prompt_cache_read_tokens.value"),
    # The user's session: several may be of one conversation of the data set.
    "session": field("metadata.x_correlation_id", "metadata.conversation_id"),
    "turn": field("metadata.turn_index"),
}
GAPS = "metrics.inter_chunk_latency.value"
# Of a summary.
NUMBERS = {
    "ttft": field("time_to_first_token.avg", unit=MILLISECOND),
    "tpot": field("inter_token_latency.avg", unit=MILLISECOND),
    "latency": field("request_latency.avg", unit=MILLISECOND),
    "request_throughput": field("request_throughput.avg"),
    "output_throughput": field("output_token_throughput.avg"),
    "num_requests": field("request_count.avg"),
    "prompt_len": field("input_sequence_length.avg"),
    "output_len": field("output_sequence_length.avg"),
}
# Tokens that a server counts itself, in the last of its responses.
COUNTS = ("prompt_tokens", "completion_tokens")
COUNTED = {name: re.compile(rf'"{name}":\s*(\d+)') for name in COUNTS}
END_OF_STREAM = "[DONE]"
# First line and a metric of a summary as CSV, and the heading of a metric, such as "Request Latency
# (ms)".
CSV_HEADING = "Metric,avg"
CSV_METRIC = "Request Latency"
GENAI_PERFS_METRIC = "Time To First Token"  # which AIPerf writes with a small "to"
METRIC_HEADING = re.compile(r"([^(]+?)\s*(?:\((.*)\))?")


def is_of_aiperf(content: Content) -> bool:
    """Whether the file is AIPerf's of its requests."""
    return {"metadata", "metrics"} <= {*content.first}


def read_aiperf(content: Content, _: Object) -> Load:
    """Read all lines."""
    rows = [_row(record) for record in content.objects]
    if not any(count_of(row["turn"]) for row in rows):
        rows = [{**row, "session": ""} for row in rows]
    summary = content.beside(AIPERF_SUMMARY)
    return RecordedLoad(
        client_name="aiperf",
        rows=rows,
        numbers=stated_numbers(summary, NUMBERS),
        server=content.server(_model_of(summary)),
        client=_client_of_aiperf(summary),
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
        **stated_values(record, REQUEST),
        "gaps": tuple(unit * gap for gap in gaps),
        "status": status,
    }


def is_of_summary(content: Content) -> bool:
    """Whether the file is a summary of AIPerf's or genai-perf's."""
    metric = as_object(content.first.get("request_latency"))
    return "avg" in metric and "unit" in metric


def read_summary(content: Content, summary: Object) -> Load:
    """Read means."""
    is_of_genai = "perf_analyzer" in as_object(summary.get("input_config"))
    record = "profile_export.json" if is_of_genai else "profile_export.jsonl"
    return Summary(
        client_name="genai-perf" if is_of_genai else "aiperf",
        numbers=stated_numbers(summary, NUMBERS),
        record=f"{record} of the same run",
        client=_client_of_aiperf(summary),
        server=content.server(_model_of(summary)),
    )


def is_of_csv_summary(content: Content) -> bool:
    """Whether the file is a summary of AIPerf's or genai-perf's as CSV."""
    return content.text.startswith(CSV_HEADING) and CSV_METRIC in content.text


def csv_summaries(content: Content) -> Sequence[Object]:
    """Return the summary in CSV as the client's JSON has it: an average a metric."""
    summary = dict[str, Object]()
    for cells in csv.reader(io.StringIO(content.text)):
        if len(cells) < 2:
            continue
        heading = METRIC_HEADING.fullmatch(cells[0].strip())
        if heading is not None:
            name = heading[1].lower().replace(" ", "_")
            summary[name] = {"avg": number_of(cells[1].replace(",", "")), "unit": heading[2]}
    return [summary]


def read_csv_summary(content: Content, summary: Object) -> Load:
    """Read means of CSV."""
    load = read_summary(content, summary)
    if GENAI_PERFS_METRIC in content.text:
        return replace(load, client_name="genai-perf")
    return load


def _client_of_aiperf(summary: Object) -> Client:
    """Read how requests were sent from the configuration in a summary, if it is there."""
    config = as_object(summary.get("input_config"))
    phases = config.get("phases")
    mean_rate = stated_numbers(summary, NUMBERS).get("request_throughput", math.nan)
    if isinstance(phases, list):
        return _client_of_phases([as_object(phase) for phase in phases], mean_rate)
    load = as_object(config.get("loadgen"))
    cv = _cv_of_aiperf(load)
    if not load:
        load = as_object(value_at(config, "perf_analyzer.stimulus"))
        cv = EVEN  # perf_analyzer's default, which genai-perf leaves as it is
    if not (load.get("concurrency") or load.get("request_rate")):
        return CLOCK
    return client_of_rate(
        load.get("request_rate"), load.get("concurrency"), cv, mean_rate=mean_rate
    )


def _client_of_phases(phases: Sequence[Object], mean_rate: float) -> Client:
    """Read how requests of the measured phase were sent, as AIPerf writes it from 0.10 on; of a
    rate that changes the mean of answers is taken.
    """
    measured = [phase for phase in phases if not phase.get("exclude_from_results")]
    if len(measured) != 1:
        return CLOCK
    (phase,) = measured
    rate = phase.get("rate")
    if rate is None and phase.get("rate_series"):
        rate = "a series of rates"
    if rate is None and not phase.get("concurrency"):
        return CLOCK  # of a schedule
    cv = POISSON
    if phase.get("type") == "constant":
        cv = EVEN
    elif phase.get("type") == "gamma":
        cv = cv_of_gamma(phase.get("smoothness"))
    return client_of_rate(rate, phase.get("concurrency"), cv, mean_rate=mean_rate)


def _cv_of_aiperf(load: Object) -> float:
    """Read the coefficient of variation of gaps; without a pattern they are of a Poisson process,
    or of the gamma distribution whose shape is stated.
    """
    pattern = load.get("arrival_pattern") or load.get("request_rate_mode")
    if pattern == "constant":
        return EVEN
    if pattern == "poisson":
        return POISSON
    return cv_of_gamma(load.get("arrival_smoothness"))


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


def is_of_genai_perf(content: Content) -> bool:
    """Whether the file is genai-perf's of its requests."""
    return "experiments" in content.first


def read_genai_perf(content: Content, experiment: Object) -> Load:
    """Read one experiment. Raises UserError without lengths of prompts."""
    summary = content.beside(GENAI_PERF_SUMMARY)
    prompt_len = stated_numbers(summary, NUMBERS).get("prompt_len", math.nan)
    rows = list(_rows_of_responses(list_of(experiment["requests"]), prompt_len))
    if all(math.isnan(number_of(row["prompt_len"])) for row in rows):
        raise UserError(
            f"{content.path} has no lengths of prompts; put {GENAI_PERF_SUMMARY} of the same run "
            "beside it"
        )
    mode = as_object(experiment.get("experiment"))
    client = CLOCK
    if mode.get("mode") == "concurrency":
        client = client_of_rate(None, mode.get("value"))
    elif mode.get("mode") == "request_rate":
        client = client_of_rate(mode.get("value"), None)
    caution = (
        "the file has no lengths: each response counts as a token, and prompts have the mean length"
    )
    return RecordedLoad(
        client_name="genai-perf",
        rows=rows,
        server=content.server(_model_of(summary)),
        client=client,
        cautions=[caution],
    )


def _rows_of_responses(
    requests: Sequence[object], prompt_len: float
) -> Iterator[dict[str, object]]:
    for entry in requests:
        request = as_object(entry)
        sent = number_of(request.get("timestamp"))
        outputs = [json.dumps(output) for output in list_of(request.get("response_outputs"))]
        times = [*numbers_of(request.get("response_timestamps"))]
        if outputs and END_OF_STREAM in outputs[-1] and len(times) == len(outputs):
            times.pop()
        counts = {name: _counted(pattern, outputs) for name, pattern in COUNTED.items()}
        status = FINISHED if times else FAILED
        row: dict[str, object] = {"arrival": NANOSECOND * sent, "status": status}
        if times:
            row |= {
                "prompt_len": counts["prompt_tokens"] or round_or_nan(prompt_len),
                "output_len": counts["completion_tokens"] or len(times),
                "first_token": NANOSECOND * (times[0] - sent),
                "latency": NANOSECOND * (times[-1] - sent),
                "gaps": tuple(NANOSECOND * (after - before) for before, after in pairwise(times)),
            }
        else:
            row["prompt_len"] = round_or_nan(prompt_len)
        yield row


def round_or_nan(number: float) -> float:
    """Round a number to a whole one; NaN stays."""
    if math.isnan(number):
        return number
    return max(1, round(number))


def _counted(pattern: re.Pattern[str], outputs: Sequence[str]) -> int | None:
    """Return the last count in a server's responses."""
    for output in reversed(outputs):
        match = pattern.search(output.replace('\\"', '"'))
        if match is not None:
            return int(match[1])
    return None

"""`per_request_lifecycle_metrics.json` of inference-perf (kubernetes-sigs), a list of requests, and
its `summary_lifecycle_metrics.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import client_of_rate
from sarathi_lab.extensions.replay.json_values import count_of, number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    nested,
    stated_numbers,
)
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.workload.recording import FINISHED

MEANS = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "request_latency": "latency",
}
RATE_TOLERANCE = 0.05  # by which a rate may miss what was asked for
RATES = {"output_tokens_per_sec": "output", "requests_per_sec": "requests"}
INPUT_TOKENS = (
    ("request_metrics", "text", "input_tokens"),
    ("request_metrics", "input_tokens"),
    ("input_tokens",),
    ("prompt_tokens",),
)
OUTPUT_TOKENS = (
    ("output_tokens",),
    ("completion_tokens",),
    ("server_usage", "completion_tokens"),
)


def is_of_inference_perf(content: Content) -> bool:
    """Whether the file is inference-perf's of its requests."""
    return {"start_time", "end_time", "info"} <= {*content.first}


def read_inference_perf(content: Content, _: Object) -> Load:
    """Read all requests."""
    try:
        model = as_object(json.loads(str(content.first.get("request")))).get("model")
    except ValueError:
        model = None
    return RecordedLoad(
        client_name="inference-perf", rows=_rows(content), server=content.server(model)
    )


def _rows(content: Content) -> Iterator[dict[str, object]]:
    for request in content.objects:
        info = as_object(request.get("info"))
        # Newer versions have what was received in an object of its own.
        response = as_object(info.get("response_metrics")) or info
        sent = number_of(request.get("start_time"))
        times = numbers_of(response.get("output_token_times"))
        row: dict[str, object] = {
            "prompt_len": _input_tokens(info, response),
            "output_len": _output_tokens(response, len(times)),
            "arrival": sent,
            "latency": number_of(request.get("end_time")) - sent,
            "gaps": tuple(after - before for before, after in pairwise(times)),
            "cached_len": count_of(
                nested(response, "server_usage", "prompt_tokens_details", "cached_tokens")
            ),
            "status": "failed" if request.get("error") else FINISHED,
        }
        if times:
            row["first_token"] = times[0] - sent
        yield row


def _input_tokens(info: Object, response: Object) -> object:
    """Return the tokens of a prompt, by the names of several versions: beside those of images and
    sound in the newest files.
    """
    for keys in INPUT_TOKENS:
        value = nested(info, *keys)
        if value is not None:
            return value
    return nested(response, "server_usage", "prompt_tokens")


def _output_tokens(response: Object, num_times: int) -> object:
    """Return the tokens of an answer; where the file does not say, those that have a time."""
    for keys in OUTPUT_TOKENS:
        value = nested(response, *keys)
        if value is not None:
            return value
    return num_times or None


def is_of_inference_perf_summary(content: Content) -> bool:
    """Whether the file is a summary of inference-perf's."""
    return {"load_summary", "successes"} <= {*content.first}


def read_inference_perf_summary(content: Content, summary: Object) -> Load:
    """Read means. Raises UserError for what is no file of the client."""
    successes = as_object(summary.get("successes"))
    if "request_latency" in successes:
        raise UserError(
            f"{content.path} is what Prometheus had of the server; name the client's file beside "
            "it, *_lifecycle_metrics.json"
        )
    waits = as_object(successes.get("latency"))
    lengths = {
        name: number_of(nested(successes, f"{name}_len", "mean")) for name in ("prompt", "output")
    }
    # Newer files count tokens by the server; older ones may lack the mean of answers.
    rates = stated_numbers(as_object(successes.get("throughput")), RATES)
    if math.isnan(lengths["output"]) and rates.get("requests"):
        lengths["output"] = rates.get("output", math.nan) / rates["requests"]
    num_requests = number_of(successes.get("count"))
    if math.isnan(num_requests) and "failures" not in summary:
        num_requests = number_of(nested(summary, "load_summary", "count"))
    cautions = []
    rate = nested(summary, "load_summary", "requested_rate")
    achieved = number_of(nested(summary, "load_summary", "achieved_rate"))
    if rate is None or achieved < number_of(rate) * (1 - RATE_TOLERANCE):
        # A client that falls behind its schedule sends at its own pace.
        if rate is not None:
            cautions.append(f"of {rate}/s that were asked for, the client sent {achieved:.4g}/s")
        rate = None if math.isnan(achieved) else achieved
    if rate is None and rates.get("requests"):
        rate = rates["requests"]
        cautions.append("the file has no rate of sending: that of its answers is taken")
    return Summary(
        client_name="inference-perf",
        num_requests=num_requests,
        prompt_len=lengths["prompt"],
        output_len=lengths["output"],
        record="per_request_lifecycle_metrics.json of the same run",
        means=stated_numbers(waits, MEANS, statistic="mean"),
        client=client_of_rate(rate, None),
        num_failed=count_of(nested(summary, "failures", "count")),
        cautions=cautions,
    )

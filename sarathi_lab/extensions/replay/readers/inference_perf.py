"""`per_request_lifecycle_metrics.json` of inference-perf (kubernetes-sigs), a list of requests, and
its `summary_lifecycle_metrics.json`. Newer versions have text beside images and sound, and tokens
as the server counts them; older ones may lack the mean of answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.benchmark import Load, Row
from sarathi_lab.extensions.replay.clients import client_of_rate
from sarathi_lab.extensions.replay.json_values import number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    stated_numbers,
    stated_values,
    value_at,
)
from sarathi_lab.extensions.replay.server_arguments import as_object
from sarathi_lab.workload.recording import FAILED, FINISHED

RATE_TOLERANCE = 0.05  # by which a rate may miss what was asked for


def read_inference_perf(content: Content, first: Object) -> Load:
    """Read all requests."""
    try:
        model = as_object(json.loads(str(first.get("request")))).get("model")
    except ValueError:
        model = None
    return Load(
        client_name="inference-perf",
        rows=map(_row, content.objects),
        server=content.server(model),
    )


def _row(request: Object) -> Row:
    info = as_object(request.get("info"))
    # Newer versions have what was received in an object of its own.
    sent_and_received = {**info, **as_object(info.get("response_metrics"))}
    sent = number_of(request.get("start_time"))
    times = numbers_of(sent_and_received.get("output_token_times"))
    row = {
        **stated_values(sent_and_received, "inference_perf"),
        "arrival": sent,
        "latency": number_of(request.get("end_time")) - sent,
        "gaps": tuple(after - before for before, after in pairwise(times)),
        "status": FAILED if request.get("error") else FINISHED,
    }
    if times:
        row["first_token"] = times[0] - sent
        if row["output_len"] is None:
            row["output_len"] = len(times)
    return row


def read_inference_perf_summary(content: Content, summary: Object) -> Load:
    """Read means. Raises UserError for what is no file of the client."""
    if value_at(summary, "successes.request_latency") is not None:
        raise UserError(
            f"{content.path} is what Prometheus had of the server; name the client's file beside "
            "it, *_lifecycle_metrics.json"
        )
    numbers = stated_numbers(summary, "inference_perf_summary")
    answers_a_second = numbers.get("requests_a_second")
    # Newer files count tokens by the server; older ones may lack the mean of answers.
    if answers_a_second and "output_tokens_a_second" in numbers:
        numbers.setdefault("output_len", numbers["output_tokens_a_second"] / answers_a_second)
    if "failures" not in summary and "num_sent" in numbers:
        numbers.setdefault("num_requests", numbers["num_sent"])
    requested_rate = value_at(summary, "load_summary.requested_rate")
    rate, cautions = _rate_of_sending(requested_rate, numbers)
    return Load(
        client_name="inference-perf",
        numbers=numbers,
        record="per_request_lifecycle_metrics.json of the same run",
        client=client_of_rate(rate, None, mean_rate=answers_a_second or math.nan),
        cautions=cautions,
    )


def _rate_of_sending(requested: object, numbers: Mapping[str, float]) -> tuple[object, list[str]]:
    """Return the rate at which requests were sent (1/s; None: not stated), and cautions.

    Args:
        requested: The rate that was asked for, maybe a word.
        numbers: What the summary states.
    """
    achieved = numbers.get("achieved_rate")
    if requested is not None:
        is_behind = achieved is not None and achieved < number_of(requested) * (1 - RATE_TOLERANCE)
        if not is_behind:
            return requested, []
        # A client that falls behind its schedule sends at its own pace.
        caution = f"of {requested}/s that were asked for, the client sent {achieved:.4g}/s"
        return achieved, [caution]
    answers_a_second = numbers.get("requests_a_second")
    if achieved is None and answers_a_second:
        caution = "the file has no rate of sending: that of its answers is taken"
        return answers_a_second, [caution]
    return achieved, []

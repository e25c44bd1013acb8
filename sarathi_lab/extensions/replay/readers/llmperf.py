"""LLMPerf's `*_individual_responses.json`, a list of requests without times of sending, and its
`*_summary.json`. Lengths of a summary are those measured, else those that were asked for.
"""

from __future__ import annotations

from dataclasses import replace

from sarathi_lab.extensions.replay.benchmark import Load, Row
from sarathi_lab.extensions.replay.clients import client_of_rate
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    stated_numbers,
    stated_values,
)
from sarathi_lab.workload.recording import FAILED, FINISHED

DEFAULT_USERS = 10  # of its command line


def read_llmperf(content: Content, _: Object) -> Load:
    """Read all requests, with the number of users from the summary beside them."""
    summary = content.beside(content.path.name.replace("individual_responses", "summary"))
    means = read_llmperf_summary(content, summary)
    rows = map(_row, content.objects)
    return replace(means, rows=rows, numbers=stated_numbers(summary, "llmperf_summary"))


def _row(response: Object) -> Row:
    has_error = response.get("error_code") or response.get("error_msg")
    return {**stated_values(response, "llmperf"), "status": FAILED if has_error else FINISHED}


def read_llmperf_summary(content: Content, summary: Object) -> Load:
    """Read means. LLMPerf's `inter_token_latency_s` is no time per output token: it has the time to
    the first token in it. So that follows from the other means.
    """
    numbers = stated_numbers(summary, "llmperf_summary")
    num_gaps = numbers.get("output_len", 0.0) - 1
    if num_gaps > 0 and {"ttft", "latency"} <= {*numbers}:
        numbers["tpot"] = (numbers["latency"] - numbers["ttft"]) / num_gaps
    cautions = []
    if not numbers.get("users"):
        cautions.append(
            "nothing states how many requests were sent at a time: LLMPerf's default of "
            f"{DEFAULT_USERS} is taken; state workload.users"
        )
    return Load(
        client_name="llmperf",
        numbers=numbers,
        record="*_individual_responses.json of the same run",
        client=client_of_rate(None, numbers.get("users") or DEFAULT_USERS),
        cautions=cautions,
        server=content.server(summary.get("model")),
    )

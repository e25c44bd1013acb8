"""LLMPerf's `*_individual_responses.json`, a list of requests without times of sending, and its
`*_summary.json`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import Client
from sarathi_lab.extensions.replay.json_values import count_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    field,
    stated_numbers,
    stated_values,
)
from sarathi_lab.workload.recording import FAILED, FINISHED

USERS = "num_concurrent_requests"
DEFAULT_USERS = 10  # of its command line
REQUEST = {
    "prompt_len": field("number_input_tokens"),
    "output_len": field("number_output_tokens"),
    "first_token": field("ttft_s"),
    "latency": field("end_to_end_latency_s"),
}
MEANS = {
    "ttft": field("results_ttft_s_mean"),
    "latency": field("results_end_to_end_latency_s_mean"),
}
NUMBERS = {
    **MEANS,
    "num_requests": field("results_num_completed_requests"),
    "num_failed": field("results_number_errors"),
    # As measured, else as they were asked for.
    "prompt_len": field("results_number_input_tokens_mean", "mean_input_tokens"),
    "output_len": field("results_number_output_tokens_mean", "mean_output_tokens"),
}


def is_of_llmperf(content: Content) -> bool:
    """Whether the file is LLMPerf's of its requests."""
    return {"ttft_s", "number_input_tokens"} <= {*content.first}


def read_llmperf(content: Content, _: Object) -> Load:
    """Read all requests, with the number of users from the summary beside them."""
    summary = content.beside(content.path.name.replace("individual_responses", "summary"))
    return RecordedLoad(
        client_name="llmperf",
        rows=_rows(content),
        has_arrivals=False,
        numbers=stated_numbers(summary, MEANS),
        server=content.server(summary.get("model")),
        client=_client_of(summary),
        cautions=_cautions_of_users(summary),
    )


def _rows(content: Content) -> Iterator[dict[str, object]]:
    for response in content.objects:
        has_error = response.get("error_code") or response.get("error_msg")
        status = FAILED if has_error else FINISHED
        yield {**stated_values(response, REQUEST), "status": status}


def is_of_llmperf_summary(content: Content) -> bool:
    """Whether the file is LLMPerf's summary."""
    return "results_ttft_s_mean" in content.first


def read_llmperf_summary(content: Content, summary: Object) -> Load:
    """Read means."""
    numbers = stated_numbers(summary, NUMBERS)
    return Summary(
        client_name="llmperf",
        numbers=_with_time_per_token(numbers),
        record="*_individual_responses.json of the same run",
        client=_client_of(summary),
        cautions=_cautions_of_users(summary),
        server=content.server(summary.get("model")),
    )


def _with_time_per_token(numbers: dict[str, float]) -> dict[str, float]:
    """Add the mean time of the tokens after the first. LLMPerf's `inter_token_latency_s` is none:
    it has the time to the first token in it.
    """
    has_both = {"ttft", "latency"} <= {*numbers}
    num_gaps = numbers.get("output_len", 0.0) - 1
    if not has_both or num_gaps <= 0:
        return numbers
    return {**numbers, "tpot": (numbers["latency"] - numbers["ttft"]) / num_gaps}


def _cautions_of_users(summary: Object) -> list[str]:
    if count_of(summary.get(USERS)):
        return []
    return [
        "nothing states how many requests were sent at a time: LLMPerf's default of "
        f"{DEFAULT_USERS} is taken; state workload.users"
    ]


def _client_of(summary: Object) -> Client:
    return Client(count_of(summary.get(USERS)) or DEFAULT_USERS, source="stated")

"""LLMPerf's `*_individual_responses.json`, a list of requests without times of sending, and its
`*_summary.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import Client
from sarathi_lab.extensions.replay.json_values import count_of, number_of
from sarathi_lab.extensions.replay.readers.content import (
    Content,
    Object,
    stated_numbers,
)
from sarathi_lab.workload.recording import FINISHED

USERS = "num_concurrent_requests"
DEFAULT_USERS = 10  # of its command line
MEANS = {
    "results_ttft_s_mean": "ttft",
    "results_end_to_end_latency_s_mean": "latency",
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
        means=stated_numbers(summary, MEANS),
        server=content.server(summary.get("model")),
        client=_client_of(summary),
        cautions=_cautions_of_users(summary),
    )


def _rows(content: Content) -> Iterator[dict[str, object]]:
    for response in content.objects:
        has_error = response.get("error_code") or response.get("error_msg")
        yield {
            "prompt_len": response.get("number_input_tokens"),
            "output_len": response.get("number_output_tokens"),
            "first_token": response.get("ttft_s"),
            "latency": response.get("end_to_end_latency_s"),
            "status": "failed" if has_error else FINISHED,
        }


def is_of_llmperf_summary(content: Content) -> bool:
    """Whether the file is LLMPerf's summary."""
    return "results_ttft_s_mean" in content.first


def read_llmperf_summary(content: Content, summary: Object) -> Load:
    """Read means."""
    output_len = _mean_tokens(summary, "output")
    return Summary(
        client_name="llmperf",
        num_requests=number_of(summary.get("results_num_completed_requests")),
        prompt_len=_mean_tokens(summary, "input"),
        output_len=output_len,
        record="*_individual_responses.json of the same run",
        means=_with_time_per_token(stated_numbers(summary, MEANS), output_len),
        client=_client_of(summary),
        num_failed=count_of(summary.get("results_number_errors")),
        cautions=_cautions_of_users(summary),
        server=content.server(summary.get("model")),
    )


def _mean_tokens(summary: Object, kind: str) -> float:
    """Return mean tokens of prompts ("input") or answers: measured, else as they were asked for."""
    measured = number_of(summary.get(f"results_number_{kind}_tokens_mean"))
    if math.isnan(measured):
        return number_of(summary.get(f"mean_{kind}_tokens"))
    return measured


def _with_time_per_token(means: dict[str, float], output_len: float) -> dict[str, float]:
    """Add the mean time of the tokens after the first. LLMPerf's `inter_token_latency_s` is none:
    it has the time to the first token in it.
    """
    has_both = {"ttft", "latency"} <= {*means}
    if not has_both or not output_len > 1:
        return means
    return {**means, "tpot": (means["latency"] - means["ttft"]) / (output_len - 1)}


def _cautions_of_users(summary: Object) -> list[str]:
    if count_of(summary.get(USERS)):
        return []
    return [
        "nothing states how many requests were sent at a time: LLMPerf's default of "
        f"{DEFAULT_USERS} is taken; state workload.users"
    ]


def _client_of(summary: Object) -> Client:
    return Client(count_of(summary.get(USERS)) or DEFAULT_USERS, source="stated")

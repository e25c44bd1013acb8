"""Results of `vllm bench serve --save-result`, and of SGLang's `bench_serving`, which was derived
from it: an object, or one a line.

With `--save-detailed` and `--output-details` they have a list a quantity, with an entry a request;
else means of all of them. Only newer ones of vLLM have the times at which requests were sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sarathi_lab.extensions.replay.benchmark import Load, Row
from sarathi_lab.extensions.replay.clients import Client, client_of_rate, cv_of_gamma
from sarathi_lab.extensions.replay.first_engine import with_rules_of_version
from sarathi_lab.extensions.replay.json_values import list_of, number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import Content, Object, stated_numbers
from sarathi_lab.extensions.replay.server_arguments import (
    Statement,
    as_object,
    read_arguments,
    selected,
)
from sarathi_lab.extensions.replay.server_facts import sglang_description
from sarathi_lab.workload.recording import FAILED, FINISHED

LISTS = ("input_lens", "output_lens", "ttfts", "itls")  # that details have
# Further ones, which older versions do not have, and what stands for an entry of theirs.
NEWER_LISTS = {
    "errors": "",
    "latencies": None,
    "start_times": None,
    "cached_tokens": 0,
}
OF_SGLANG = "total_output_tokens_retokenized"
OF_CLIENT = ("backend", "model_id", OF_SGLANG)  # names that its results have one of


def is_of_vllm(content: Content) -> bool:
    """Whether the file is a result of vLLM's or SGLang's client."""
    return "completed" in content.first and any(name in content.first for name in OF_CLIENT)


def read_vllm(content: Content, result: Object) -> Load:
    """Read one result. Raises KeyError or ValueError for a damaged one."""
    backend = str(result.get("backend") or "")
    client_name = str(result.get("label") or backend or "vllm")
    record = "a file of vllm bench serve --save-result --save-detailed"
    if OF_SGLANG in result:
        client_name = "sglang"
        record = "a file of bench_serving --output-file FILE --output-details"
    info = as_object(result.get("server_info"))
    return Load(
        client_name=client_name,
        rows=_rows(result) if any(result.get(name) for name in LISTS) else None,
        record=record,
        numbers=_numbers(result),
        client=_client_of(result),
        labels={
            "model": result.get("model_id") or info.get("model_path"),
            "workload.rate": result.get("request_rate"),
            "batch": result.get("max_concurrency"),
        },
        server=[_server_of(content, result, info)],
        # The scheduler of the server that the client was told of.
        policy="sglang" if backend.startswith("sglang") else "vllm_v1",
    )


def _numbers(result: Object) -> dict[str, float]:
    """Return what a result states of all its requests, with mean lengths."""
    numbers = stated_numbers(result, "vllm")
    num_requests = numbers.get("num_requests", 0.0)
    for kind in ("prompt", "output"):
        num_tokens = numbers.get(f"num_{kind}_tokens")
        if num_requests > 0 and num_tokens is not None:
            numbers[f"{kind}_len"] = num_tokens / num_requests
    return numbers


def _rows(result: Object) -> list[Row]:
    """Return a row a request. Raises KeyError and ValueError for lists that are no records."""
    num_requests = len(list_of(result["input_lens"]))
    lists = {name: list_of(result[name]) for name in LISTS}
    for name, missing in NEWER_LISTS.items():
        lists[name] = list_of(result.get(name)) or [missing] * num_requests
    for name, entries in lists.items():
        if len(entries) != num_requests:
            raise ValueError(f"{name} has {len(entries)} entries, input_lens has {num_requests}")
    rows = []
    for number in range(num_requests):
        rows.append(_row({name: entries[number] for name, entries in lists.items()}))
    return rows


def _row(row: Mapping[str, object]) -> Row:
    """Make a row of one request's entries in the lists."""
    gaps = numbers_of(row["itls"])
    latency = number_of(row["latencies"])
    if math.isnan(latency):
        latency = number_of(row["ttfts"]) + sum(gaps)
    has_failed = row["errors"] or row["output_lens"] == 0
    return {
        "prompt_len": row["input_lens"],
        "output_len": row["output_lens"],
        "arrival": row["start_times"],
        "first_token": row["ttfts"],
        "latency": latency,
        "gaps": gaps,
        "cached_len": row["cached_tokens"],
        "status": FAILED if has_failed else FINISHED,
    }


def _client_of(result: Object) -> Client:
    """Read how requests were sent; of a ramp the mean rate is taken."""
    rate = result.get("request_rate")
    strategy = result.get("ramp_up_strategy")
    if strategy:
        rates = f"{result.get('ramp_up_start_rps')} to {result.get('ramp_up_end_rps')}/s"
        rate = f"a {strategy} ramp from {rates}"
    cv = cv_of_gamma(result.get("burstiness"))
    return client_of_rate(rate, result.get("max_concurrency"), cv, mean_rate=_mean_rate(result))


def _mean_rate(result: Object) -> float:
    """Return the answered requests per second of the whole run; NaN: not stated."""
    duration = number_of(result.get("duration"))
    if duration > 0:
        return number_of(result.get("completed")) / duration
    return number_of(result.get("request_throughput"))


def _server_of(content: Content, result: Object, info: Mapping[str, Any]) -> Statement:
    """Read what a result states of the server: SGLang's description of itself, or vLLM's model and
    what `--metadata` added.
    """
    if info or OF_SGLANG in result:
        return sglang_description(info, str(content.path))
    metadata = selected("vllm", result, is_typed=True)
    arguments = {"model": result.get("model_id"), **metadata}
    return with_rules_of_version(read_arguments("vllm", arguments, str(content.path)))

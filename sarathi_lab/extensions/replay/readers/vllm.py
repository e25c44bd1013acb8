"""Results of `vllm bench serve --save-result`, and of SGLang's `bench_serving`, which was derived
from it: an object, or one a line.

With `--save-detailed` and `--output-details` they have a list a quantity, with an entry a request;
else means of all of them. Only newer ones of vLLM have the times at which requests were sent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, cast, get_args

import pandas as pd

from sarathi_lab.extensions.replay.benchmark import Load, RecordedLoad, Summary
from sarathi_lab.extensions.replay.clients import (
    Client,
    Ramp,
    RampStrategy,
    client_of_ramp,
    client_of_rate,
    cv_of_gamma,
)
from sarathi_lab.extensions.replay.json_values import count_of, list_of, number_of, numbers_of
from sarathi_lab.extensions.replay.readers.content import (
    MILLISECOND,
    Content,
    Object,
    field,
    stated_numbers,
)
from sarathi_lab.extensions.replay.server_arguments import (
    Statement,
    as_object,
    read_arguments,
    selected,
    with_rules_of_version,
)
from sarathi_lab.extensions.replay.server_facts import sglang_description
from sarathi_lab.workload.recording import FAILED, FINISHED

LISTS = ("input_lens", "output_lens", "ttfts", "itls")  # that details have
# Further ones, which older versions do not have, and what stands for an entry of theirs.
NEWER_LISTS = {"errors": "", "latencies": None, "start_times": None, "cached_tokens": 0}
OF_SGLANG = "total_output_tokens_retokenized"
# What a result states of all its requests.
NUMBERS = {
    "num_requests": field("completed"),
    "num_failed": field("failed"),
    "num_prompt_tokens": field("total_input_tokens"),
    "num_output_tokens": field("total_output_tokens"),
    "duration": field("duration"),
    "request_throughput": field("request_throughput"),
    "output_throughput": field("output_throughput"),
    "ttft": field("mean_ttft_ms", unit=MILLISECOND),
    "tpot": field("mean_tpot_ms", unit=MILLISECOND),
    "latency": field("mean_e2el_ms", "mean_e2e_latency_ms", unit=MILLISECOND),
}


def is_of_vllm(content: Content) -> bool:
    """Whether the file is a result of vLLM's or SGLang's client."""
    names = {*content.first}
    return "completed" in names and not names.isdisjoint(("backend", "model_id", OF_SGLANG))


def read_vllm(content: Content, result: Object) -> Load:
    """Read one result. Raises KeyError or ValueError for a damaged one."""
    shared: dict[str, Any] = {
        "client_name": _client_name(result),
        "numbers": stated_numbers(result, NUMBERS),
        "client": _client_of(result),
        "labels": _labels(result),
        "server": [_server_of(content, result)],
        "policy": _policy_of(result),
    }
    if any(result.get(name) for name in LISTS):
        rows = _rows(result)
        return RecordedLoad(
            rows=rows,
            has_arrivals=any(row["arrival"] is not None for row in rows),
            **shared,
        )
    return Summary(record=_record_of(result), **shared)


def _record_of(result: Object) -> str:
    """Return how the client leaves a record of each request."""
    if OF_SGLANG in result:
        return "a file of bench_serving --output-file FILE --output-details"
    return "a file of vllm bench serve --save-result --save-detailed"


def _rows(result: Object) -> list[dict[str, object]]:
    number = len(list_of(result["input_lens"]))
    lists = {name: list_of(result[name]) for name in LISTS}
    for name, missing in NEWER_LISTS.items():
        lists[name] = list_of(result.get(name)) or [missing] * number
    for name, entries in lists.items():
        if len(entries) != number:
            raise ValueError(f"{name} has {len(entries)} entries, input_lens has {number}")
    requests = pd.DataFrame(lists)
    return [_row(row) for row in requests.to_dict("records")]


def _row(row: Mapping[Hashable, object]) -> dict[str, object]:
    """Make a row of one request's entries in the lists."""
    gaps = numbers_of(row["itls"])
    status = FINISHED
    if row["errors"] or row["output_lens"] == 0:
        status = FAILED
    latency = row["latencies"]
    if math.isnan(number_of(latency)):
        latency = number_of(row["ttfts"]) + sum(gaps)
    return {
        "prompt_len": row["input_lens"],
        "output_len": row["output_lens"],
        "arrival": row["start_times"],
        "first_token": row["ttfts"],
        "latency": latency,
        "gaps": gaps,
        "cached_len": row["cached_tokens"],
        "status": status,
    }


def _client_name(result: Object) -> str:
    if OF_SGLANG in result:
        return "sglang"
    return str(result.get("label") or result.get("backend") or "vllm")


def _policy_of(result: Object) -> str:
    """Return the scheduler of the server that the client was told to be SGLang's, or vLLM's."""
    backend = str(result.get("backend") or "")
    return "sglang" if backend.startswith("sglang") else "vllm_v1"


def _client_of(result: Object) -> Client:
    """Read how requests were sent."""
    rate = result.get("request_rate")
    users = result.get("max_concurrency")
    cv = cv_of_gamma(result.get("burstiness"))
    strategy = result.get("ramp_up_strategy")
    first_rate = number_of(result.get("ramp_up_start_rps"))
    last_rate = number_of(result.get("ramp_up_end_rps"))
    number = count_of(result.get("num_prompts")) or count_of(result.get("completed"))
    if strategy in get_args(RampStrategy) and number:
        ramp = Ramp(cast("RampStrategy", strategy), first_rate, last_rate)
        return client_of_ramp(ramp, number, users, cv)
    if strategy:
        rate = f"a {strategy} ramp from {first_rate:g} to {last_rate:g}/s"
    return client_of_rate(rate, users, cv, mean_rate=_mean_rate(result))


def _mean_rate(result: Object) -> float:
    """Return the answered requests per second of the whole run; NaN: not stated."""
    duration = number_of(result.get("duration"))
    if duration > 0:
        return number_of(result.get("completed")) / duration
    return number_of(result.get("request_throughput"))


def _labels(result: Object) -> dict[str, object]:
    info = as_object(result.get("server_info"))
    return {
        "model": result.get("model_id") or info.get("model_path"),
        "workload.rate": result.get("request_rate"),
        "batch": result.get("max_concurrency"),
    }


def _server_of(content: Content, result: Object) -> Statement:
    """Read what a result states of the server: SGLang's description of itself, or vLLM's model and
    what `--metadata` added.
    """
    info = as_object(result.get("server_info"))
    if info or OF_SGLANG in result:
        return sglang_description(info, str(content.path))
    metadata = selected("vllm", result, is_typed=True)
    arguments = {"model": result.get("model_id"), **metadata}
    return with_rules_of_version(read_arguments("vllm", arguments, str(content.path)))

"""The table that `vllm bench serve` and SGLang's `bench_serving` print, kept as text: means."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sarathi_lab.extensions.replay.json_values import number_of
from sarathi_lab.extensions.replay.literals import named_values
from sarathi_lab.extensions.replay.readers.content import Content, Object
from sarathi_lab.extensions.replay.readers.vllm import OF_SGLANG

HEADING = "Serving Benchmark Result"
# Of a table; the heading's own line has no break before it. A script may have it as a comment.
END = re.compile(r"\n[#\s]*=====")
SENT = ("request_rate", "max_concurrency")
# The client's own arguments, which older ones print above the table.
NAMESPACE = re.compile(r"Namespace\((.*)\)")
# Or its command, as notes have it, with these flags.
COMMAND = re.compile(r"(?:bench serve|benchmark_serving\S*|bench_serving\S*)\s((?:.*\\\n)*.*)")
FLAG = re.compile(r"--(model|request-rate|max-concurrency)[ =]([^\s\\$]+)")
NOT_STATED = "not stated"
LINE = re.compile(r"^[#\s]*([A-Z][^:\n]*?)\s*:\s+(\S+)\s*$", re.MULTILINE)
# What the clients' JSON has for a printed line.
NAMES = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Max request concurrency": "max_concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Traffic request rate": "request_rate",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Total generated tokens (retokenized)": OF_SGLANG,
    "Mean TTFT (ms)": "mean_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "Mean E2EL (ms)": "mean_e2el_ms",
    "Mean E2E Latency (ms)": "mean_e2e_latency_ms",
}


def is_printed(content: Content) -> bool:
    """Whether the file has a printed table."""
    return not content.objects and HEADING in content.text


def printed_runs(content: Content) -> Sequence[Object]:
    """Return an object a table, as the client's JSON would have it."""
    above, *tables = content.text.split(HEADING)
    runs = []
    stated: dict[str, object] = {}  # once, above the first table of those that a script prints
    for table in tables:
        own, *after_end = END.split(table, maxsplit=1)
        below = "".join(after_end)
        # Older clients print rate and concurrency above the heading.
        sent = {name: value for name, value in _numbers(above).items() if name in SENT}
        arguments = NAMESPACE.search(above)
        commands = COMMAND.findall(above)
        if arguments is not None:
            stated = {"model_id": named_values(arguments[1]).get("model")}
        elif commands:
            flags = {name.replace("-", "_"): value for name, value in FLAG.findall(commands[-1])}
            stated = {"model_id": flags.pop("model", None)}
            sent = {**{name: number_of(value) for name, value in flags.items()}, **sent}
        inside = _numbers(own)
        # Newer ones, which count failed requests, print a rate unless all are sent at once.
        is_told = stated or {*SENT, "failed"} & {*sent, *inside}
        of_rate = {} if is_told else {"request_rate": NOT_STATED}
        runs.append({**stated, **of_rate, **sent, **inside})
        above = below
    return runs


def _numbers(text: str) -> dict[str, object]:
    """Return the numbers of printed lines, by the JSON's names; the last of each."""
    numbers: dict[str, object] = {}
    for heading, value in LINE.findall(text):
        name = NAMES.get(heading)
        if name is not None:
            numbers[name] = number_of(value)
    return numbers

"""The table that `vllm bench serve` and SGLang's `bench_serving` print, kept as text: means."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sarathi_lab.extensions.replay.json_values import number_of
from sarathi_lab.extensions.replay.literals import named_values
from sarathi_lab.extensions.replay.readers.content import Content, Object, fields_of

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
        # Older clients print rate and concurrency above the heading.
        numbers_above = _numbers(above)
        sent = {name: numbers_above[name] for name in SENT if name in numbers_above}
        arguments = NAMESPACE.search(above)
        commands = COMMAND.findall(above)
        if arguments is not None:
            stated = {"model_id": named_values(arguments[1]).get("model")}
        elif commands:
            flags = dict(FLAG.findall(commands[-1]))
            stated = {"model_id": flags.get("model")}
            for name in SENT:
                value = flags.get(name.replace("_", "-"))
                if value is not None:
                    sent.setdefault(name, number_of(value))
        run = {
            **stated,
            **sent,
            **_numbers(own),
        }
        # Newer ones, which count failed requests, print a rate unless all are sent at once.
        if not any(name in run for name in (*SENT, "failed", "model_id")):
            run["request_rate"] = NOT_STATED
        runs.append(run)
        above = "".join(after_end)
    return runs


def _numbers(text: str) -> dict[str, object]:
    """Return the numbers of printed lines, by the JSON's names; the last of each."""
    names = {field.path: field.quantity for field in fields_of("vllm_printed")}
    numbers: dict[str, object] = {}
    for heading, value in LINE.findall(text):
        if heading in names:
            numbers[names[heading]] = number_of(value)
    return numbers

"""Files of benchmark clients: which reader a file has, and what is said of one that has none.

| client | file |
| --- | --- |
| `vllm bench serve --save-result` | a JSON object, or one a line, best with `--save-detailed` |
| SGLang's `bench_serving --output-file` | a JSON object a line, best with `--output-details` |
| `guidellm benchmark run` | `benchmarks.json`, a benchmark a rate |
| `aiperf profile` | `profile_export.jsonl`, or `profile_export_aiperf.json` |
| `genai-perf profile` | `profile_export_genai_perf.json` |
| LLMPerf | `*_individual_responses.json`, or `*_summary.json` |
| inference-perf | `per_request_lifecycle_metrics.json`, or `summary_lifecycle_metrics.json` |
| `evalscope perf` | `benchmark_data.db`, or `benchmark_summary.json` |
| the table that vLLM's or SGLang's client prints | text, with any number of tables |
| `benchmark_vLLM.py` of ppas-vllm | its output, with means of a run a line |

Files may be packed by gzip. Of a summary only means are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.benchmark import Benchmark, Load, benchmark_of
from sarathi_lab.extensions.replay.readers import (
    aiperf,
    evalscope,
    guidellm,
    inference_perf,
    llmperf,
    ppas,
    printed,
    vllm,
)
from sarathi_lab.extensions.replay.readers.content import Content, Object
from sarathi_lab.extensions.replay.server_facts import PERIODIC, find_facts
from sarathi_lab.workload.files import OUTPUT_LENGTHS, TURNS
from sarathi_lab.workload.text_files import json_rows, kind_of_text, read_text

CLIENTS = "vllm bench serve, SGLang's bench_serving, GuideLLM, AIPerf, genai-perf, LLMPerf"
FIX = f"name a file of {CLIENTS}, inference-perf, evalscope or ppas-vllm"


def all_objects(content: Content) -> Sequence[Object]:
    """Return the objects of a file, a load each."""
    return content.objects


def whole_file(content: Content) -> Sequence[Object]:
    """Return what stands for a file that is one load."""
    return [content.first]


def has_keys(*keys: str) -> Callable[[Content], bool]:
    """Return the test whether a file's first object has all of these keys."""
    return lambda content: all(key in content.first for key in keys)


@dataclass(frozen=True)
class Reader:
    """How the files of a client are recognised and read, load by load."""

    recognises: Callable[[Content], bool]
    loads: Callable[[Content], Sequence[Object]]
    read: Callable[[Content, Object], Load]


READERS = (
    Reader(ppas.is_of_ppas, ppas.runs_of_ppas, ppas.read_ppas),
    Reader(has_keys("metadata", "metrics"), whole_file, aiperf.read_aiperf),
    Reader(has_keys("benchmarks"), guidellm.loads_of_guidellm, guidellm.read_guidellm),
    Reader(vllm.is_of_vllm, all_objects, vllm.read_vllm),
    Reader(aiperf.is_of_summary, all_objects, aiperf.read_summary),
    Reader(has_keys("ttft_s", "number_input_tokens"), whole_file, llmperf.read_llmperf),
    Reader(has_keys("results_ttft_s_mean"), all_objects, llmperf.read_llmperf_summary),
    Reader(
        has_keys("start_time", "end_time", "info"), whole_file, inference_perf.read_inference_perf
    ),
    Reader(
        has_keys("load_summary", "successes"),
        all_objects,
        inference_perf.read_inference_perf_summary,
    ),
    Reader(printed.is_printed, printed.printed_runs, vllm.read_vllm),
    Reader(evalscope.is_of_evalscope_summary, all_objects, evalscope.read_evalscope_summary),
)
GENAI_PERF_SUMMARY = "profile_export_genai_perf.json"
# What a load that is damaged raises where it is read.
DAMAGE = (KeyError, TypeError, AttributeError, ValueError, SyntaxError, ArithmeticError)
# Columns or keys of traces, which are no results.
OF_TRACES = ("input_length", "ContextTokens", "num_prefill_tokens", "Request tokens", "hash_ids")


def read_benchmarks(path: Path) -> list[Benchmark]:
    """Read all loads in a client's file; one that can't be read does not refuse the others. Raises
    UserError for a file without any.
    """
    if evalscope.is_database(path):
        return [benchmark_of(evalscope.read_database(Content(path, "", ())), path, ())]
    text = read_text(path, str(path), FIX)
    rows = json_rows(text)
    content = Content(path, text, ())
    if rows is not None:
        content = Content(path, text, rows.objects, rows.damaged)
    for reader in READERS:
        if reader.recognises(content):
            return _read_loads(content, reader)
    raise UserError(f"{path} {_what_it_is(content)}")


def _read_loads(content: Content, reader: Reader) -> list[Benchmark]:
    """Read the loads of a file, and name those that are left out. Raises UserError if that is all
    of them.
    """
    benchmarks = list[Benchmark]()
    cautions = list[str]()
    # Of a file that is one load; others' loads are not known to lack anything.
    damaged = content.damaged if reader.loads is whole_file else ()
    try:
        loads = reader.loads(content)
    except DAMAGE as error:
        raise _as_user_error(error, content.path) from None
    for number, load in enumerate(loads, 1):
        try:
            benchmarks.append(benchmark_of(reader.read(content, load), content.path, damaged))
        except (UserError, *DAMAGE) as error:
            if len(loads) == 1:
                raise _as_user_error(error, content.path) from None
            reason = _reason_of(error, content.path)
            cautions.append(f"load {number} of {len(loads)} is left out: {reason}")
    if not benchmarks:
        reason = cautions[0] if cautions else "has no benchmark"
        raise UserError(f"{content.path} {reason}; {FIX}")
    first = benchmarks[0]
    benchmarks[0] = replace(first, cautions=[*first.cautions, *cautions])
    return benchmarks


def _as_user_error(error: Exception, path: Path) -> UserError:
    """Return a reader's error as one line with the file, the reason and the fix."""
    if isinstance(error, UserError):
        return error
    return UserError(f"{path} {_reason_of(error, path)}; {FIX}")


def _reason_of(error: Exception, path: Path) -> str:
    """Say what is wrong with a load of a file, without the file's name."""
    if isinstance(error, UserError):
        return str(error).removeprefix(f"{path}").lstrip(": ")
    if isinstance(error, KeyError):
        return f"lacks {error}"
    return f"is damaged ({error})"


def _what_json_it_is(content: Content) -> str:
    """Name what is in an object that no client writes as it is."""
    if _holds_prompts(content):
        remedy = f"serve them by workload=prompts workload.path={content.path}"
        return f"has prompts without results; {remedy}"
    keys = ", ".join(map(str, content.first))[:100]
    return f"has the keys {keys}, as of none of the known clients; {FIX}"


def _holds_prompts(content: Content) -> bool:
    """Return whether an object is a conversation, or a prompt with the length of its answer."""
    row = content.first
    if any(isinstance(row.get(name), list) for name in TURNS):
        return True
    return isinstance(row.get("prompt"), str) and any(name in row for name in OUTPUT_LENGTHS)


def _what_it_is(content: Content) -> str:
    """Describe a file that no reader is for, and what to do with it."""
    path = content.path
    if PERIODIC.search(content.text):
        return (
            f"is a server's log without iterations; name it as task.log={path} beside a client's "
            "file, or start the server with --enable-logging-iteration-details"
        )
    if not content.text.strip():
        return f"is empty and has no benchmark; {FIX}"
    if any(name in content.text[:2000] for name in OF_TRACES):
        return f"is a trace, which has no results; serve it by workload=trace workload.path={path}"
    if "experiments" in content.first:
        return f"has genai-perf's responses without lengths; name its {GENAI_PERF_SUMMARY}"
    results = [str(name) for name in content.first if "ttft" in str(name).lower()]
    if results:
        return (
            f"has results such as {results[0]}, but in the form of no known client; name the file "
            "of a known one, or write requests.jsonl and meta.json in a folder, as "
            "experiments/lab/real_servers/README.md states them"
        )
    if find_facts(path, content.text) is not None:
        return (
            "describes a server and has no requests; name it as task.log="
            f"{path} beside a client's file"
        )
    if content.damaged and not content.objects:
        return f"{content.damaged[0]}; {FIX}"
    kind = kind_of_text(content.text)
    if kind == "JSON":
        return _what_json_it_is(content)
    return f"is {kind}, which is not read; {FIX}, which write JSON of the same run"

"""What a server states of itself: in its log, in a description that it gives, in a file of
arguments, or in the command that started it (`server_commands`).

Everything goes through the table of arguments (`server_arguments`), whichever source it is from.
Logs of vLLM from 0.6 on and of SGLang from 0.4 on are read, as are `/server_info` of both and the
YAML files of their `--config`, scripts, and descriptions of containers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.argument_table import LOGGED_CACHE, Arguments
from sarathi_lab.extensions.replay.first_engine import with_rules_of_v0, with_rules_of_version
from sarathi_lab.extensions.replay.iteration_log import CACHE_TOKENS
from sarathi_lab.extensions.replay.json_values import count_of
from sarathi_lab.extensions.replay.literals import is_closed, named_values
from sarathi_lab.extensions.replay.server_arguments import (
    LoggedCache,
    Statement,
    arguments_of_sections,
    as_object,
    merged,
    read_arguments,
    selected,
)
from sarathi_lab.extensions.replay.server_commands import check_is_of_known_server, find_command
from sarathi_lab.workload.text_files import COLORS, LOG_LINE, kind_of_text

FIX = (
    "name a server's log with its start-up lines (vLLM's begin with non-default args or engine "
    "config, SGLang's with server_args=ServerArgs), its server_info or its arguments as YAML, or "
    "state its command as task.server='vllm serve MODEL ...'"
)
DEFAULT_BLOCK = 16  # tokens of a block of vLLM's
ROUNDED_BY = 0.006  # sequences of the longest context, of which vLLM logs two digits

# vLLM's lines: the arguments that differ from its defaults, all of them, and its configuration.
CHANGED_ARGUMENTS = re.compile(r"non-default args: \{(.*)")
ALL_ARGUMENTS = re.compile(r"\bargs: (?:Namespace|AsyncEngineArgs|EngineArgs)\((.*)")
ENGINE = re.compile(r"engine \(v[^)]*\)\s+with config:?\s+(.*)")
V0_ENGINE = re.compile(
    r"Initializing an? (?:V0 LLM engine|LLM engine \(v0\.[0-7]\.)"
    r"|\bllm_engine\.py:\d+\] Initializing an LLM engine \(vdev\)"
)
MISSING_COMMA = re.compile(r"(=(?:True|False)) (?=\w+=)")  # of some versions' first engine
CONCURRENCY = re.compile(r"Maximum concurrency for ([1-9][\d,]*) tokens per request: (\d+\.\d+)x")
# Of an attention's kernels, or so that a block is as large as a state.
BLOCK_SIZE = re.compile(r"(?:Setting|Forcing) (?:attention|kv cache) block size to (\d+)")
PERIODIC = re.compile(r"Avg prompt throughput")
# By argument, the line with what vLLM takes for it. Its configuration of graphs is no literal of
# Python.
RESOLVED = {
    "max_num_batched_tokens": r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)",
    "max_model_len": r"Using max model len (\d+)",
    "version": r"(?:version |engine \(v)(\d+\.\d+(?:\.\d+)?(?:\.dev\d+)?)",
    "device_name": r"device_name=([\w.-]+?)(?:,|\.json)",
    "async_scheduling": r"Asynchronous scheduling is (enabled|disabled)",
    "num_gpu_blocks": r"# (?:GPU|cuda) blocks: (\d+)",
    "cudagraph_mode": (r"with config.*cudagraph_mode['\"]?: (?:<CUDAGraphMode\.)?(\w+|\[\d, \d\])"),
    "cudagraph_capture_sizes": r"with config.*cudagraph_capture_sizes['\"]?: ?(\[[\d, ]+\])",
}

# SGLang's lines.
SGLANG_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\(|\{)(.*)")
SGLANG_SIZES = re.compile(r"max_total_num_tokens=\d+.*")
SGLANG_RESOLVED = {
    "max_total_num_tokens": r"KV Cache is allocated\..*?#tokens: (\d+)",
    "dtype": r"Load weight end\..*?dtype=([\w.]+)",
}
# What SGLang's scheduler states of itself.
MADE_BY_SGLANG = ("effective_max_running_requests_per_dp", "token_capacity", "max_total_num_tokens")
SGLANG_KEYS = ("model_path", "chunked_prefill_size")  # of its description

BEGINS_ARGUMENTS = re.compile(r"LLM engine \(v|non-default args|\bargs: \w+\(|server_args=")
BEGINS_LINE = re.compile(rf"{LOG_LINE.pattern}|\b(?:INFO|WARNING|ERROR|DEBUG)\b|^\s*$")
# Keys of descriptions of containers, of a sweep's rows, and of clients' results.
OTHER_KEYS = ("services", "apiVersion", "kind", "image", "commands", "run", "vllm_args", "backend")


def read_facts(path: Path, text: str) -> Statement:
    """Read what the text of a file states of a server.

    Args:
        path: The file, as messages name it.
        text: A log, a description in JSON, or arguments in YAML.

    Raises:
        UserError: For a file that states nothing, saying what it is.
    """
    facts = find_facts(path, text)
    if facts is not None:
        return facts
    check_is_of_known_server(text, f"task.log={path}")
    if PERIODIC.search(text):
        raise UserError(
            f"task.log={path} is a log without its start, which has the arguments; name "
            "one from the start on, or add task.server='vllm serve MODEL ...' as it was started"
        )
    kind = kind_of_text(text)
    raise UserError(f"task.log={path} is {kind} and states nothing of a server; {FIX}")


def find_facts(path: Path, text: str) -> Statement | None:
    """Read what the text of a file states of a server; None where it states nothing."""
    source = str(path)
    text = _joined(COLORS.sub("", text))
    is_json = text.lstrip().startswith("{")
    if not is_json:
        is_of_sglang = SGLANG_ARGUMENTS.search(text) or SGLANG_SIZES.search(text)
        log = _of_sglang_log(source, text) if is_of_sglang else _of_vllm_log(source, text)
        if log.settings:
            return _with_command(log, text)
    described = _of_description(source, text, is_json=is_json)
    return described or find_command(text, source)


def _joined(text: str) -> str:
    """Join the lines of arguments that a terminal has broken at its width, or a person by hand."""
    lines = list[str]()
    is_of_arguments = False
    for line in text.split("\n"):
        if is_of_arguments and BEGINS_LINE.search(line) is None:
            lines[-1] += line
            continue
        lines.append(line)
        is_of_arguments = BEGINS_ARGUMENTS.search(line) is not None
    return "\n".join(lines)


def _with_command(log: Statement, text: str) -> Statement:
    """Add the command that stands above a log, where the log has no arguments."""
    if log.is_complete:
        return log
    typed = [line for line in text.splitlines() if not LOG_LINE.match(line)]
    command = find_command("\n".join(typed), log.source)
    if command is None:
        return log
    # What the server made of its arguments counts, as of those it lists.
    return replace(merged(command, log), policy=log.policy or command.policy)


def _of_description(source: str, text: str, *, is_json: bool) -> Statement | None:
    """Read a server's description of itself, or arguments as --config takes them."""
    content = _object_in(text, is_json=is_json)
    if any(key in content for key in OTHER_KEYS):
        return None
    arguments = {str(name).replace("-", "_"): value for name, value in content.items()}
    is_of_sglang = any(key in arguments for key in SGLANG_KEYS)
    if is_json and is_of_sglang:
        return sglang_description(content, source)
    config = content.get("vllm_config")
    if isinstance(config, str):
        arguments = selected("vllm", named_values(config))
        return read_arguments("vllm", arguments, source, is_dump=True)
    if isinstance(config, Mapping):
        arguments = arguments_of_sections(config)
        return read_arguments("vllm", arguments, source, is_dump=True, is_complete=True)
    system = "sglang" if is_of_sglang else "vllm"
    if not selected(system, arguments, is_typed=is_json):
        return None
    return read_arguments(system, arguments, source, is_typed=True)


def _object_in(text: str, *, is_json: bool) -> Mapping[str, object]:
    """Return the object that JSON or YAML has; an empty one of other texts."""
    try:
        if is_json:
            return as_object(json.loads(text))
        if kind_of_text(text) == "YAML":
            return as_object(yaml.safe_load(text))
    except (ValueError, yaml.YAMLError):
        pass
    return {}


def sglang_description(info: Arguments, source: str) -> Statement:
    """Read SGLang's description of itself, as /server_info gives it and its client records it."""
    states = info.get("internal_states")
    made = dict[str, object]()
    if isinstance(states, list) and states:
        state = as_object(states[0])
        memory = as_object(state.get("memory_usage"))
        made = {**state, **memory}
    arguments = dict[str, object]()
    for name in MADE_BY_SGLANG:
        arguments[name] = made.get(name)
    # What was stated counts, and else what the server made of it.
    for name, value in info.items():
        if value is not None:
            arguments[name] = value
    return read_arguments("sglang", arguments, source, is_dump=True, is_complete=bool(info))


def _of_vllm_log(source: str, text: str) -> Statement:
    """Read a log of vLLM's."""
    changed = CHANGED_ARGUMENTS.search(text)
    listed = ALL_ARGUMENTS.search(text)
    typed = dict[str, object]()
    if changed is not None:
        typed = _bracketed_values(changed, source)
    elif listed is not None:
        # Defaults included, so that only names of the table are arguments of the engine.
        typed = selected("vllm", _bracketed_values(listed, source))
    is_complete = changed is not None or listed is not None
    resolved = _resolved_by_vllm(text, typed)
    statement = merged(
        read_arguments("vllm", typed, source, is_dump=changed is None, is_complete=is_complete),
        # What the server made of its arguments counts.
        read_arguments("vllm", resolved, source, is_dump=True),
    )
    engine = ENGINE.search(text)
    if engine is not None and engine.end() == len(text):  # no bracket closes its configuration
        raise _cut_off(source)
    if V0_ENGINE.search(text):
        return with_rules_of_v0(statement)
    if engine is None:  # which would tell
        statement = with_rules_of_version(statement)
    logged = CACHE_TOKENS.search(text)
    if logged is None:
        return statement
    tokens = _tokens(logged[1])
    cache = LoggedCache(tokens, _is_of_longest(text, tokens))
    return replace(statement, settings={**statement.settings, LOGGED_CACHE: cache})


def _bracketed_values(match: re.Match[str], source: str) -> dict[str, object]:
    """Read a server's arguments behind an opening bracket. Raises UserError where the log ends
    before the closing one.
    """
    if not is_closed(match[1]):
        raise _cut_off(source)
    return named_values(match[1])


def _cut_off(source: str) -> UserError:
    return UserError(
        f"{source} is cut off within the server's arguments, whose last value may be another; name "
        "the whole log, or state its command as task.server='vllm serve MODEL ...' instead"
    )


def _resolved_by_vllm(text: str, typed: Arguments) -> dict[str, object]:
    """Return what vLLM made of the arguments that were `typed`, defaults included, by its log."""
    resolved = dict[str, object]()
    concurrency = CONCURRENCY.search(text)
    if concurrency is not None:
        resolved["max_seq_len"] = _tokens(concurrency[1])
    engine = ENGINE.search(text)
    if engine is not None:
        resolved |= selected("vllm", named_values(MISSING_COMMA.sub(r"\1, ", engine[1])))
    resolved |= _matches(RESOLVED, text)
    block_sizes = BLOCK_SIZE.findall(text)
    if block_sizes:
        resolved["block_size"] = block_sizes[-1]  # of a state, after that of kernels
    tokens = CACHE_TOKENS.search(text)  # of one replica
    if tokens is not None:
        sizes = [count_of(stated.get("block_size")) for stated in (resolved, typed)]
        block_size = next(filter(None, sizes), DEFAULT_BLOCK)
        resolved["num_gpu_blocks"] = _tokens(tokens[1]) // block_size
    return resolved


def _matches(patterns: Mapping[str, str], text: str) -> dict[str, object]:
    """Return what patterns find in a log, by argument."""
    matches = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in matches.items() if match is not None}


def _is_of_longest(text: str, tokens: int) -> bool:
    """Return whether the logged tokens are those of as many of the longest sequences as fit, which
    vLLM rounds to two digits.
    """
    concurrency = CONCURRENCY.search(text)
    if concurrency is None:
        return False
    num_sequences = tokens / _tokens(concurrency[1])
    return abs(num_sequences - float(concurrency[2])) < ROUNDED_BY


def _tokens(text: str) -> int:
    """Read a number with commas."""
    return int(text.replace(",", ""))


def _of_sglang_log(source: str, text: str) -> Statement:
    """Read a log of SGLang's."""
    resolved = _matches(SGLANG_RESOLVED, text)
    sizes = SGLANG_SIZES.search(text)
    if sizes is not None:
        resolved |= selected("sglang", named_values(sizes[0]))
    statement = read_arguments("sglang", resolved, source, is_dump=True)
    stated = SGLANG_ARGUMENTS.search(text)
    if stated is None:
        return statement
    arguments = _bracketed_values(stated, source)
    described = read_arguments("sglang", arguments, source, is_dump=True, is_complete=True)
    # What the server made of its arguments counts, such as sequences that fit its cache.
    return merged(described, statement)

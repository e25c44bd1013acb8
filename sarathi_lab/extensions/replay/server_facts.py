"""What a server states of itself: in its log, in a description that it gives, in a file of
arguments, or in the command that started it (`server_commands`).

Everything goes through the table of arguments (`server_arguments`), whichever source it is from.
Logs of vLLM from 0.6 on and of SGLang from 0.4 on are read, as are `/server_info` of both and the
YAML files of their `--config`, scripts, and descriptions of containers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.iteration_log import CACHE_TOKENS
from sarathi_lab.extensions.replay.literals import CLOSING, OPENING, named_values
from sarathi_lab.extensions.replay.server_arguments import (
    LOGGED_CACHE,
    LoggedCache,
    Statement,
    arguments_of_sections,
    as_object,
    merged,
    read_arguments,
    selected,
    with_rules_of_v0,
    with_rules_of_version,
)
from sarathi_lab.extensions.replay.server_commands import (
    check_is_of_known_server,
    find_command,
)
from sarathi_lab.workload.text_files import COLORS, LOG_LINE, json_rows, kind_of_text

LOG_KEYS = ("log", "message", "msg", "textPayload")  # of Docker's, and of others
FIX = (
    "name a server's log with its start-up lines (vLLM's begin with non-default args or engine "
    "config, SGLang's with server_args=ServerArgs), its server_info or its arguments as YAML, or "
    "state its command as task.server='vllm serve MODEL ...'"
)
DEFAULT_BLOCK = 16  # tokens of a block of vLLM's
ROUNDED_BY = 0.006  # sequences of the longest context, of which vLLM logs two digits

# vLLM's lines.
CHANGED_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
ALL_ARGUMENTS = re.compile(r"\bargs: (?:Namespace|AsyncEngineArgs|EngineArgs)\((.*)\)")
# Over a fence where someone has set the arguments as code.
ENGINE = re.compile(r"engine \(v[^)]*\)\s+with config:?\s+(?:[~`]{3}\w*\s+)?(.*)")
V0_ENGINE = re.compile(
    r"Initializing an? (?:V0 LLM engine|LLM engine \(v0\.[0-7]\.)"
    r"|\bllm_engine\.py:\d+\] Initializing an LLM engine \(vdev\)"
)
MISSING_COMMA = re.compile(r"(=(?:True|False)) (?=\w+=)")  # of some versions' first engine
VERSION = re.compile(r"(?:version |engine \(v)(\d+\.\d+(?:\.\d+)?(?:\.dev\d+)?)")
BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
# Of an attention's kernels, or so that a block is as large as a state.
BLOCK_SIZE = re.compile(r"(?:Setting|Forcing) (?:attention|kv cache) block size to (\d+)")
CACHE_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d+)")
MODEL_LENGTH = re.compile(r"Using max model len (\d+)")
ASYNCHRONOUS = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
DEVICE_NAME = re.compile(r"device_name=([\w.-]+?)(?:,|\.json)")
# Of its configuration of graphs, which is no literal of Python.
GRAPH_MODE = re.compile(r"cudagraph_mode['\"]?: (?:<CUDAGraphMode\.)?(\w+|\[\d, \d\])")
GRAPH_SIZES = re.compile(r"cudagraph_capture_sizes['\"]?: ?\[([\d, ]+)\]")
ARGUMENTS = re.compile(r"LLM engine \(v|non-default args|\bargs: Namespace\(|server_args=")
SECOND_LINE = "with config"  # of vLLM's engine, where someone has broken its line
PERIODIC = re.compile(r"Avg prompt throughput")

# By argument, the line with what vLLM takes for it.
RESOLVED = {
    "max_num_batched_tokens": BUDGET,
    "max_model_len": MODEL_LENGTH,
    "version": VERSION,
    "device_name": DEVICE_NAME,
}

# SGLang's lines.
SGLANG_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\(|\{)(.*)")
SGLANG_SIZES = re.compile(r"max_total_num_tokens=\d+.*")
SGLANG_CACHE = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)")
SGLANG_DTYPE = re.compile(r"Load weight end\..*?dtype=([\w.]+)")

# What SGLang's scheduler states of itself.
MADE_BY_SGLANG = ("effective_max_running_requests_per_dp", "token_capacity", "max_total_num_tokens")
SGLANG_KEYS = ("model_path", "chunked_prefill_size")  # of its description
FLAGS_KEY = re.compile(r"(?:vllm|sglang|serve|server|engine)_?(?:args|flags|arguments)")

# Keys of files that describe containers, and of none that --config takes.
CONTAINER_KEYS = ("services", "apiVersion", "kind", "image", "commands", "run")


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
    kind = kind_of_text(text)
    if PERIODIC.search(text):
        raise UserError(
            f"task.log={path} is a log without its start, which has the arguments; name "
            "one from the start on, or add task.server='vllm serve MODEL ...' as it was started"
        )
    raise UserError(f"task.log={path} is {kind} and states nothing of a server; {FIX}")


def find_facts(path: Path, text: str) -> Statement | None:
    """Read what the text of a file states of a server; None where it states nothing."""
    text = _joined(COLORS.sub("", _unwrapped(text)))
    if text.lstrip()[:1] == "{":
        return _of_description(path, text) or find_command(text, str(path))
    if SGLANG_ARGUMENTS.search(text) or SGLANG_SIZES.search(text):
        return _with_command(_of_sglang_log(path, text), text)
    statement = _of_vllm_log(path, text)
    if statement.settings:
        return _with_command(statement, text)
    return _of_yaml(path, text) or find_command(text, str(path))


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


def _unwrapped(text: str) -> str:
    """Return the lines of a log that a container's runtime has kept as an object each."""
    rows = json_rows(text)
    if rows is None:
        return text
    for key in LOG_KEYS:
        lines = [str(entry[key]).rstrip() for entry in rows.objects if key in entry]
        if len(lines) > 1:
            return "\n".join(lines)
    return text


def _joined(text: str) -> str:
    """Join the lines of arguments that a terminal has broken at its width, as pasted logs are."""
    lines = list[str]()
    width = 0  # of the line of arguments that may go on; 0: none does
    for line in text.splitlines():
        begins = ARGUMENTS.search(line) is not None
        if begins:
            width = len(line)
        may_go_on = width > 0 and not begins and not LOG_LINE.match(line)
        # A whole line may end at any width: only a next one as wide, or what is open, tells.
        is_continued = may_go_on and (
            len(lines[-1]) > width or len(line) == width or _is_open(lines[-1])
        )
        if is_continued or (may_go_on and line.startswith(SECOND_LINE)):
            lines[-1] += line
        else:
            lines.append(line)
        if len(line) < width and not _is_open(line):
            width = 0
    return "\n".join(lines)


def _is_open(line: str) -> bool:
    """Return whether a line ends behind a comma, or within quotes or brackets."""
    if line.rstrip().endswith(","):
        return True
    is_within_brackets = any(
        line.count(opening) > line.count(closing)
        for opening, closing in zip(OPENING, CLOSING, strict=True)
    )
    return is_within_brackets or line.count("'") % 2 == 1


def _of_description(path: Path, text: str) -> Statement | None:
    """Read a server's description of itself, or an object of arguments."""
    try:
        content = as_object(json.loads(text))
    except ValueError:
        return None
    for key, value in content.items():
        if isinstance(value, list) and FLAGS_KEY.fullmatch(key):
            return _of_flags(path, content, key)
    if any(key in content for key in SGLANG_KEYS):
        return sglang_description(content, str(path))
    config = content.get("vllm_config")
    if isinstance(config, str):
        return read_arguments(
            "vllm", selected("vllm", named_values(config)), str(path), is_dump=True
        )
    if isinstance(config, Mapping):
        return read_arguments(
            "vllm", arguments_of_sections(config), str(path), is_dump=True, is_complete=True
        )
    arguments = selected("vllm", content, is_typed=True)
    if not arguments or "backend" in content:
        return None
    return read_arguments("vllm", arguments, str(path), is_typed=True)


def _of_flags(path: Path, content: Mapping[str, object], key: str) -> Statement | None:
    """Read a person's description of a server, with the words of its command under `key`."""
    system = "sglang" if "sglang" in f"{key} {content.get('image', '')}" else "vllm"
    model = str(content.get("model") or content.get("model_path") or "")
    program = {"vllm": ["vllm", "serve"], "sglang": ["sglang", "serve", "--model-path"]}
    words = [str(content.get("image", "")), *program[system], model, *_words(content[key])]
    command = find_command(shlex.join(words), str(path))
    others = selected(system, {name: value for name, value in content.items() if name != key})
    described = read_arguments(system, others, str(path), is_typed=True)
    return described if command is None else merged(described, command)


def _words(value: object) -> list[str]:
    assert isinstance(value, list), "asked for by the caller"
    return [str(word) for word in value]


def sglang_description(info: Mapping[str, object], source: str) -> Statement:
    """Read SGLang's description of itself, as /server_info gives it and its client records it."""
    states = info.get("internal_states")
    state: Mapping[str, object] = {}
    if isinstance(states, list) and states:
        state = as_object(states[0])
    memory = as_object(state.get("memory_usage"))
    # What the server made of arguments that were left to it comes first: those were stated.
    arguments = dict[str, object]()
    for part in (state, memory):
        arguments |= {name: part[name] for name in MADE_BY_SGLANG if part.get(name) is not None}
    arguments |= {name: value for name, value in info.items() if value is not None}
    return read_arguments("sglang", arguments, source, is_dump=True, is_complete=bool(info))


def _of_yaml(path: Path, text: str) -> Statement | None:
    """Read arguments as the --config of vLLM and SGLang takes them."""
    if kind_of_text(text) != "YAML":
        return None
    try:
        content = as_object(yaml.safe_load(text))
    except yaml.YAMLError:
        return None
    if any(key in content for key in CONTAINER_KEYS):
        return None
    arguments = {str(name).replace("-", "_"): value for name, value in content.items()}
    system = "sglang" if any(name in arguments for name in SGLANG_KEYS) else "vllm"
    if not selected(system, arguments):
        return None
    return read_arguments(system, arguments, str(path), is_typed=True)


def _of_vllm_log(path: Path, text: str) -> Statement:
    """Read a log of vLLM's."""
    resolved = _resolved_by_vllm(text)
    typed = dict[str, object]()
    changed = CHANGED_ARGUMENTS.search(text)
    listed = ALL_ARGUMENTS.search(text)
    if changed is not None:
        typed |= named_values(changed[1][1:-1])
    elif listed is not None:
        # Defaults included, so that only names of the table are arguments of the engine.
        typed |= selected("vllm", named_values(listed[1]))
    if not typed.get("model"):
        typed.pop("model", None)
    block_sizes = BLOCK_SIZE.findall(text)
    if block_sizes:
        typed["block_size"] = int(block_sizes[-1])  # of a state, after that of kernels
    blocks = _num_blocks(text, typed)
    if blocks is not None:
        resolved["num_gpu_blocks"] = blocks
        typed.pop("num_gpu_blocks_override", None)  # which that number follows from
    source = str(path)
    is_complete = changed is not None or listed is not None
    statement = merged(
        read_arguments("vllm", resolved, source, is_dump=True),
        read_arguments("vllm", typed, source, is_dump=changed is None, is_complete=is_complete),
    )
    if V0_ENGINE.search(text):
        return with_rules_of_v0(statement)
    if ENGINE.search(text) is None:  # which would tell
        statement = with_rules_of_version(statement)
    logged = CACHE_TOKENS.search(text)
    if logged is None:
        return statement
    cache = LoggedCache(_tokens(logged[1]), _is_of_longest(text, _tokens(logged[1])))
    return replace(statement, settings={**statement.settings, LOGGED_CACHE: cache})


def _resolved_by_vllm(text: str) -> dict[str, object]:
    """Return what vLLM made of its arguments, defaults included, by its log."""
    resolved = dict[str, object]()
    engine = ENGINE.search(text)
    if engine is not None:
        resolved |= selected("vllm", named_values(MISSING_COMMA.sub(r"\1, ", engine[1])))
        resolved |= _graphs(engine[1])
    for name, pattern in RESOLVED.items():
        match = pattern.search(text)
        if match is not None:
            resolved[name] = match[1]
    concurrency = CONCURRENCY.search(text)
    if concurrency is not None:
        resolved.setdefault("max_model_len", _tokens(concurrency[1]))
    scheduling = ASYNCHRONOUS.search(text)
    if scheduling is not None:
        resolved["async_scheduling"] = scheduling[1] == "enabled"
    return resolved


def _is_of_longest(text: str, tokens: int) -> bool:
    """Return whether the logged tokens are those of as many of the longest sequences as fit, which
    vLLM rounds to two digits.
    """
    concurrency = CONCURRENCY.search(text)
    if concurrency is None:
        return False
    return abs(tokens / _tokens(concurrency[1]) - float(concurrency[2])) < ROUNDED_BY


def _graphs(config: str) -> dict[str, object]:
    """Find the CUDA graphs in the text of vLLM's configuration."""
    graphs = dict[str, object]()
    mode = GRAPH_MODE.search(config)
    if mode is not None:
        graphs["cudagraph_mode"] = mode[1]
        if mode[1].startswith("["):
            graphs["cudagraph_mode"] = json.loads(mode[1])
    sizes = GRAPH_SIZES.search(config)
    if sizes is not None:
        graphs["cudagraph_capture_sizes"] = sorted(map(int, sizes[1].split(",")))
    return graphs


def _num_blocks(text: str, typed: Mapping[str, object]) -> int | None:
    """Find the blocks of vLLM's cache, which it logs as such or in tokens of one replica."""
    tokens = CACHE_TOKENS.search(text)
    if tokens is not None:
        block_size = int(str(typed.get("block_size") or DEFAULT_BLOCK))
        return _tokens(tokens[1]) // block_size
    blocks = CACHE_BLOCKS.search(text)
    return None if blocks is None else int(blocks[1])


def _tokens(text: str) -> int:
    """Read a number with commas."""
    return int(text.replace(",", ""))


def _of_sglang_log(path: Path, text: str) -> Statement:
    """Read a log of SGLang's."""
    arguments = dict[str, object]()
    for name, pattern in (("max_total_num_tokens", SGLANG_CACHE), ("dtype", SGLANG_DTYPE)):
        match = pattern.search(text)
        if match is not None:
            arguments[name] = match[1]
    made = SGLANG_SIZES.search(text)
    if made is not None:
        sizes = named_values(made[0])
        sizes["context_length"] = sizes.pop("context_len", None)
        arguments |= selected("sglang", sizes)
    stated = SGLANG_ARGUMENTS.search(text)
    source = str(path)
    statement = read_arguments("sglang", arguments, source, is_dump=True)
    if stated is None:
        return statement
    listed = named_values(stated[1])
    if listed.get("dtype") == "auto":
        listed.pop("dtype")
    described = read_arguments("sglang", listed, source, is_dump=True, is_complete=True)
    # What the server made of its arguments counts, such as sequences that fit its cache.
    return merged(described, statement)

"""What a server states of itself: in its log, in a description that it gives, in a file of
arguments, or in the command line that started it.

Everything goes through the table of arguments (`server_arguments`), whichever source it is from.
Logs of vLLM from 0.6 on and of SGLang from 0.4 on are read, as are `/server_info` of both and the
YAML files of `vllm serve --config`.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.extensions.replay.server_arguments import (
    FALSE,
    FLAGS,
    TRUE,
    Statement,
    as_object,
    find,
    merged,
    read_arguments,
    selected,
)
from sarathi_lab.policy.systems import WHOLE_PROMPT_TOKENS
from sarathi_lab.workload.text_files import COLORS, LOG_LINE, json_rows, kind_of_text

LOG_KEYS = ("log", "message", "msg", "textPayload")  # of Docker's, and of others
FIX = (
    "name a server's log with its start-up lines (vLLM's begin with non-default args or engine "
    "config, SGLang's with server_args=ServerArgs), its server_info or its arguments as YAML"
)
DEFAULT_BLOCK = 16  # tokens of a block of vLLM's
OPENING, CLOSING, QUOTES = "([{<", ")]}>", "'\""

# vLLM's lines.
CHANGED_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
ALL_ARGUMENTS = re.compile(r"\bargs: Namespace\((.*)\)")
ENGINE = re.compile(r"engine \(v[^)]*\) with config: (.*)")
V0_ENGINE = re.compile(r"Initializing an? (?:V0 LLM engine|LLM engine \(v0\.[0-7]\.)")
VERSION = re.compile(r"(?:version |engine \(v)(\d+\.\d+(?:\.\d+)?)")
BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
CACHE_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
CACHE_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d+)")
MODEL_LENGTH = re.compile(r"Using max model len (\d+)")
ASYNCHRONOUS = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
DEVICE_NAME = re.compile(r"device_name=(\w+?)(?:,|\.json)")
# Of its configuration of graphs, which is no literal of Python.
GRAPH_MODE = re.compile(r"cudagraph_mode['\"]?: (?:<CUDAGraphMode\.)?(\w+|\[\d, \d\])")
GRAPH_SIZES = re.compile(r"cudagraph_capture_sizes['\"]?: ?\[([\d, ]+)\]")
ARGUMENTS = re.compile(r"LLM engine \(v|non-default args|server_args=")
PERIODIC = re.compile(r"Avg prompt throughput")

# SGLang's lines.
SGLANG_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\(|\{)(.*)")
SGLANG_SIZES = re.compile(r"max_total_num_tokens=\d+.*")
SGLANG_CACHE = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)")
SGLANG_DTYPE = re.compile(r"Load weight end\..*?dtype=([\w.]+)")

# What SGLang's scheduler states of itself.
MADE_BY_SGLANG = ("effective_max_running_requests_per_dp", "token_capacity", "max_total_num_tokens")
SGLANG_KEYS = ("model_path", "chunked_prefill_size")  # of its description

# Commands that start a server, by what they contain.
SERVER_COMMANDS = {
    "sglang": ("sglang.launch_server", "sglang serve", "lmsysorg/sglang"),
    "vllm": ("vllm serve", "vllm.entrypoints", "vllm/vllm-openai", "vllm-openai"),
}
SHORT_FLAGS = {
    "vllm": {
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-q": "quantization",
        "-O": "optimization_level",
        "-cc": "compilation_config",
        "-ep": "enable_expert_parallel",
    },
    "sglang": {
        "--tp": "tp_size",
        "--pp": "pp_size",
        "--dp": "dp_size",
        "--ep": "ep_size",
        "--model": "model_path",
    },
}
UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1024, "M": 2**20, "G": 2**30}  # vLLM's
OPTIMIZATION = re.compile(r"^-O(\d)$")
SHELL = re.compile(r"\d?[<>|&;]")  # where a command ends
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
SCALED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")


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
        return _of_description(path, text)
    if SGLANG_ARGUMENTS.search(text) or SGLANG_SIZES.search(text):
        return _of_sglang_log(path, text)
    statement = _of_vllm_log(path, text)
    if statement.settings:
        return statement
    return _of_yaml(path, text)


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
        if may_go_on and (len(lines[-1]) > width or len(line) == width or _is_open(lines[-1])):
            lines[-1] += line
        else:
            lines.append(line)
        if len(line) < width:
            width = 0
    return "\n".join(lines)


def _is_open(line: str) -> bool:
    """Return whether a line ends within quotes or brackets."""
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
    if any(key in content for key in SGLANG_KEYS):
        return sglang_description(content, str(path))
    config = content.get("vllm_config")
    if isinstance(config, str):
        return read_arguments(
            "vllm", selected("vllm", named_values(config)), str(path), is_dump=True
        )
    arguments = selected("vllm", content, is_typed=True)
    if not arguments or "backend" in content:
        return None
    return read_arguments("vllm", arguments, str(path), is_typed=True)


def sglang_description(info: Mapping[str, Any], source: str) -> Statement:
    """Read SGLang's description of itself, as /server_info gives it and its client records it."""
    states = info.get("internal_states")
    state: Mapping[str, Any] = {}
    if isinstance(states, list) and states:
        state = as_object(states[0])
    memory = as_object(state.get("memory_usage"))
    # What the server made of arguments that were left to it comes first: those were stated.
    arguments = dict[str, Any]()
    for part in (state, memory):
        arguments |= {name: part[name] for name in MADE_BY_SGLANG if part.get(name) is not None}
    arguments |= {name: value for name, value in info.items() if value is not None}
    return read_arguments("sglang", arguments, source, is_dump=True, is_complete=bool(info))


def _of_yaml(path: Path, text: str) -> Statement | None:
    """Read arguments as vLLM's --config takes them."""
    if kind_of_text(text) != "YAML":
        return None
    try:
        content = as_object(yaml.safe_load(text))
    except yaml.YAMLError:
        return None
    arguments = {str(name).replace("-", "_"): value for name, value in content.items()}
    if not selected("vllm", arguments):
        return None
    return read_arguments("vllm", arguments, str(path), is_typed=True)


def _of_vllm_log(path: Path, text: str) -> Statement:
    """Read a log of vLLM's."""
    resolved = dict[str, Any]()  # with defaults
    engine = ENGINE.search(text)
    if engine is not None:
        resolved |= selected("vllm", named_values(engine[1]))
        resolved |= _graphs(engine[1])
    for name, pattern in (
        ("max_num_batched_tokens", BUDGET),
        ("max_model_len", MODEL_LENGTH),
        ("version", VERSION),
        ("device_name", DEVICE_NAME),
    ):
        match = pattern.search(text)
        if match is not None:
            resolved[name] = match[1]
    scheduling = ASYNCHRONOUS.search(text)
    if scheduling is not None:
        resolved["async_scheduling"] = scheduling[1] == "enabled"
    typed = dict[str, Any]()
    changed = CHANGED_ARGUMENTS.search(text)
    listed = ALL_ARGUMENTS.search(text)
    if changed is not None:
        typed |= named_values(changed[1][1:-1])
    elif listed is not None:
        # Defaults included, so that only names of the table are arguments of the engine.
        typed |= selected("vllm", named_values(listed[1]))
    if not typed.get("model"):
        typed.pop("model", None)
    blocks = _num_blocks(text, typed)
    if blocks is not None:
        resolved["num_gpu_blocks"] = blocks
        typed.pop("num_gpu_blocks_override", None)  # which that size follows from
    source = str(path)
    is_complete = changed is not None or listed is not None
    statement = merged(
        read_arguments("vllm", resolved, source, is_dump=True),
        read_arguments("vllm", typed, source, is_dump=changed is None, is_complete=is_complete),
    )
    if V0_ENGINE.search(text):
        return _with_rules_of_v0(statement)
    return statement


def _graphs(config: str) -> dict[str, Any]:
    """Find the CUDA graphs in the text of vLLM's configuration."""
    graphs = dict[str, Any]()
    mode = GRAPH_MODE.search(config)
    if mode is not None:
        graphs["cudagraph_mode"] = mode[1]
        if mode[1].startswith("["):
            graphs["cudagraph_mode"] = json.loads(mode[1])
    sizes = GRAPH_SIZES.search(config)
    if sizes is not None:
        graphs["cudagraph_capture_sizes"] = sorted(map(int, sizes[1].split(",")))
    return graphs


def _num_blocks(text: str, typed: Mapping[str, Any]) -> int | None:
    """Find the blocks of vLLM's cache, which it logs as such or in tokens of one replica."""
    tokens = CACHE_TOKENS.search(text)
    if tokens is not None:
        block_size = int(typed.get("block_size") or DEFAULT_BLOCK)
        return int(tokens[1].replace(",", "")) // block_size
    blocks = CACHE_BLOCKS.search(text)
    return None if blocks is None else int(blocks[1])


def _with_rules_of_v0(statement: Statement) -> Statement:
    """Let a server of vLLM's first engine have the rules of it: whole prompts, unless chunked."""
    settings = {"cache.prefix": False, **statement.settings}
    is_chunked = settings.pop("policy.enable_chunked_prefill", False)
    if is_chunked:
        return replace(statement, settings=settings, policy="vllm_v0_chunked")
    if "chunk" not in settings and "max_model_len" in settings:
        settings["chunk"] = max(settings["max_model_len"], WHOLE_PROMPT_TOKENS)
    if "chunk" in settings:
        settings["policy.max_num_batched_tokens"] = settings["chunk"]
    return replace(statement, settings=settings, policy="prefill_first")


def _of_sglang_log(path: Path, text: str) -> Statement:
    """Read a log of SGLang's."""
    arguments = dict[str, Any]()
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


def named_values(text: str) -> dict[str, Any]:
    """Read "a=1, b='x'" or "'a': 1, 'b': 'x'"; a value that is no literal of Python stays text."""
    values = dict[str, Any]()
    for part in _split(text):
        separated = re.match(r"\s*['\"]?([\w-]+)['\"]?\s*[:=]\s*(.*?)\s*$", part, re.DOTALL)
        if separated is None:
            continue
        name, value = separated.groups()
        values[name] = value
        with suppress(ValueError, SyntaxError):
            values[name] = ast.literal_eval(value)
    return values


def _split(text: str) -> list[str]:
    """Cut `text` at the commas outside brackets and quotes."""
    pieces = list[str]()
    depth = 0
    quote = ""
    start = 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
            if depth < 0:  # the end of what the text was cut out of
                return [*pieces, text[start:position]]
        elif character == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    return [*pieces, text[start:]]


def read_command(command: str) -> Statement:
    """Read the command line that started a server, as `task.server` states it.

    Args:
        command: Such as "vllm serve MODEL --max-num-seqs 128", or SGLang's; environment variables
            and a container's command may stand in front.

    Raises:
        UserError: For a command of no known server, and a misspelt argument.
    """
    system = _system_of(command)
    # A command that was copied over several lines.
    joined = command.replace("\\\n", " ")
    try:
        tokens = shlex.split(joined)
    except ValueError as error:
        raise UserError(f"task.server can't be read ({error}); close its quotes") from None
    arguments = dict(_arguments_of(system, _behind_command(system, tokens)))
    image = re.search(r"vllm-openai:v(\d+\.\d+(?:\.\d+)?)", command)
    if image is not None:
        arguments["version"] = image[1]
    return read_arguments(system, arguments, "task.server", is_typed=True, is_complete=True)


def _system_of(command: str) -> str:
    for system, signs in SERVER_COMMANDS.items():
        if any(sign in " ".join(command.split()) for sign in signs):
            return system
    raise UserError(
        f"task.server={command[:60]} starts no known server; use one such as "
        "'vllm serve MODEL --max-num-seqs 128' or 'python -m sglang.launch_server --model-path M'"
    )


def _behind_command(system: str, tokens: Sequence[str]) -> Sequence[str]:
    """Return the words behind the one that names the server."""
    signs = {part for sign in SERVER_COMMANDS[system] for part in sign.split()}
    last = 0
    for position, word in enumerate(tokens):
        is_image = any("/" in sign and sign in word for sign in signs)
        if word in signs or is_image or word.endswith(("launch_server", "api_server")):
            last = position
    behind = tokens[last + 1 :]
    return list(takewhile(lambda token: SHELL.match(token) is None, behind))


def _arguments_of(system: str, tokens: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a command, by the names of the table."""
    remaining = list(tokens)
    has_model = False
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-"):
            # vLLM takes the model without a flag; anything else has no name here.
            if system == "vllm" and not has_model:
                has_model = True
                yield "model", word
            continue
        word = OPTIMIZATION.sub(r"--optimization-level=\1", word)
        flag, has_value, value = word.partition("=")
        name, is_on = _name_of(system, flag)
        row = find(system, name)
        is_flag = row is not None and row.kind in FLAGS
        if has_value:
            yield name, _scaled(value)
        elif is_flag and not (remaining and remaining[0].lower() in (*TRUE, *FALSE)):
            yield name, is_on
        else:
            values = [_scaled(value) for value in _take_values(remaining)]
            is_list = row is not None and row.kind == "any" and len(values) > 1
            if is_list:
                yield name, [int(value) if value.isdigit() else value for value in values]
            else:
                yield name, values[0] if values else is_on
                # Such as a model behind a flag.
                remaining[:0] = values[1:]


def _name_of(system: str, flag: str) -> tuple[str, bool]:
    """Return the argument that a flag is of, and whether it switches it on."""
    name = SHORT_FLAGS[system].get(flag)
    if name is not None:
        return name, True
    name = flag.lstrip("-").replace("-", "_")
    positive = name.removeprefix("no_")
    if positive != name and find(system, name) is None and find(system, positive) is not None:
        return positive, False
    return name, True


def _take_values(remaining: list[str]) -> list[str]:
    """Take the words up to the next flag; a negative number is none."""
    values = list[str]()
    while remaining and (not remaining[0].startswith("-") or NEGATIVE.fullmatch(remaining[0])):
        values.append(remaining.pop(0))
    return values


def _scaled(value: str) -> str:
    """Write out a number with a unit, as vLLM takes it: 8k is 8000, 8K is 8192."""
    match = SCALED.fullmatch(value)
    if match is None:
        return value
    return str(int(float(match[1]) * UNITS[match[2]]))

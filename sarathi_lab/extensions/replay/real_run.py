"""A recorded run of a real server: its requests, and what all its sources state of the server.

Requests are those of a folder (`run_folder`) or of a client's file (`bench_files`); a log of
iterations (`iteration_log`) may stand beside them, or alone. The server's arguments are stated by
any of these, by a log, and by the command line that started it (`server_facts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import of_lab
from sarathi_lab.config.published_names import begins_with, option_of
from sarathi_lab.extensions.replay.argument_table import LOGGED_CACHE, SERVED_NAMES
from sarathi_lab.extensions.replay.argument_values import METHODS_OF_CHECKPOINTS
from sarathi_lab.extensions.replay.bench_files import read_benchmarks
from sarathi_lab.extensions.replay.benchmark import Benchmark
from sarathi_lab.extensions.replay.first_engine import CHUNKED_V0, WHOLE_PROMPTS_V0
from sarathi_lab.extensions.replay.iteration_log import NO_LOG, read_iterations
from sarathi_lab.extensions.replay.names import (
    FP4,
    ToldWeights,
    names_of_model,
    weights_in_names,
)
from sarathi_lab.extensions.replay.readers.evalscope import is_database
from sarathi_lab.extensions.replay.run_folder import (
    FIX,
    Surroundings,
    no_requests,
    read_folder,
    read_surroundings,
)
from sarathi_lab.extensions.replay.server_arguments import POLICIES, Statement, each_once
from sarathi_lab.extensions.replay.server_commands import read_command
from sarathi_lab.extensions.replay.server_facts import (
    FIX as LOG_FIX,
)
from sarathi_lab.extensions.replay.server_facts import (
    find_facts,
    read_facts,
)
from sarathi_lab.workload.text_files import read_text

BLOCK_SIZE = 16  # tokens, where no file states them
# What a replay needs to be stated: as it is called, and as it is typed.
NEEDED = {"model": ("model", "model=NAME"), "hardware": ("GPU", "hardware=NAME")}
SIZES = ["chunk", "batch"]
TYPED = "task.chunk and task.batch"  # the source of what the command line states of the run
# Of these, sources have longer and shorter ones: a client may call a model by part of its name.
NAMES = ("version", "model", "hardware")
# Further names of a model; the size of one cache that logs and descriptions count differently.
NOT_COMPARED = (SERVED_NAMES, LOGGED_CACHE)
WEIGHTS = "executor.weights"
NUM_BLOCKS = "cache.num_blocks"
VERSION_OF_RULES = "policy.version"
UNTOLD_WEIGHTS = tuple(f"quantization={method} " for method in METHODS_OF_CHECKPOINTS)
VLLM = "vllm_v1"
# Servers by their policies, each with versions of its own; other policies are vLLM's.
SERVERS = {POLICIES["sglang"]: "SGLang", POLICIES["trtllm"]: "TensorRT-LLM"}


@dataclass(frozen=True)
class ServerSettings:
    """What the sources state of a server, the last one first: settings by the lab's names."""

    statements: Sequence[Statement]

    @property
    def stated(self) -> dict[str, Any]:
        """Settings by the lab's names, and `server_arguments.OF_FILES`."""
        settings = self._settings()
        told = self._weights_by_name()
        if told.weights:
            settings[WEIGHTS] = told.weights
        return settings

    def _settings(self) -> dict[str, Any]:
        settings = dict[str, Any]()
        policy = self.policy
        for statement in self.statements:
            of_source = dict(statement.settings)
            if policy in SERVERS and statement.policy != policy:
                of_source.pop("version", None)  # of another server, whose run is replayed
            settings |= of_source
        return settings

    @property
    def is_complete(self) -> bool:
        """Whether a source has all arguments that are not the server's defaults."""
        return any(statement.is_complete for statement in self.statements)

    def tell(self, name: str) -> bool:
        """Return whether the sources tell a setting: one states it, or has all arguments, so that
        it is the server's default. What a server finds when it starts is no default, nor are the
        weights of a checkpoint, or a version.
        """
        if name == NUM_BLOCKS:
            return self.num_blocks is not None
        stated = self.stated
        if name == VERSION_OF_RULES:
            return "version" in stated
        if name in stated or not self.is_complete:
            return name in stated
        # Weights of a named type that can't be told or simulated are left to the user.
        methods = [name for name in self._not_simulated() if name.startswith("quantization")]
        return name != WEIGHTS or not (methods or self._weights_by_name().word)

    @property
    def policy(self) -> str:
        """The scheduler that a source states, by its name in conf/policy; "": none does."""
        policy = ""
        for statement in self.statements:
            if statement.policy:
                policy = statement.policy
            elif statement.is_complete and policy in ("", *SERVERS):
                policy = VLLM  # its second engine, as versions of the first have a policy stated
        return policy

    @property
    def num_blocks(self) -> int | None:
        """Blocks that requests can have."""
        stated = self.stated
        if NUM_BLOCKS in stated or "cache.tokens" not in stated:
            return stated.get(NUM_BLOCKS)
        return int(stated["cache.tokens"] // stated.get("cache.block_size", BLOCK_SIZE))

    def _weights_by_name(self) -> ToldWeights:
        """Find the type of weights in the model's names, if nothing else states it."""
        settings = self._settings()
        for argument in self._not_simulated():
            if argument.startswith("quantization") and not argument.startswith(UNTOLD_WEIGHTS):
                return ToldWeights()
        if WEIGHTS in settings:
            return ToldWeights()
        return weights_in_names(names_of_model(settings))

    def _not_simulated(self) -> list[str]:
        """Return the arguments of all sources that would change the times, each once."""
        return each_once(statement.not_simulated for statement in self.statements)

    def notes(self) -> list[str]:
        """Name what of the server's arguments the simulator has not, and where sources differ."""
        not_simulated = self._not_simulated()
        without_effect = each_once(statement.without_effect for statement in self.statements)
        notes = []
        if self.policy in (CHUNKED_V0, WHOLE_PROMPTS_V0):
            notes.append(f"policy={self.policy}, the rules of vLLM's first engine (V0)")
        told = self._weights_by_name()
        if told.weights:
            notes.append(f"{WEIGHTS}={told.weights}, as {told.told_by} tells")
            not_simulated = [name for name in not_simulated if not name.startswith(UNTOLD_WEIGHTS)]
        elif told.word:
            nearest = "nvfp4 or mxfp4" if told.word == FP4 else "int4 or int8"
            not_simulated.append(
                f"weights of {told.word} (as {told.told_by} tells; state "
                f"{WEIGHTS}={nearest}, whichever is nearer)"
            )
        if not_simulated:
            notes.append(f"not simulated: {', '.join(not_simulated)}")
        if without_effect:
            notes.append(f"the server's arguments without effect: {', '.join(without_effect)}")
        return [*notes, *self._differences()]

    def _differences(self) -> list[str]:
        """Name each setting that sources state differently, and which of them is taken."""
        values = dict[str, list[tuple[str, object]]]()  # with their sources, by setting
        for statement in self.statements:
            settings = dict(statement.settings)
            if statement.policy or statement.is_complete:
                settings["server"] = _server_name(statement.policy)
            for name, value in settings.items():
                values.setdefault(name, []).append((statement.source, value))
        run_settings = {**self._settings(), "server": _server_name(self.policy)}
        notes = []
        for name, of_sources in values.items():
            if name in NOT_COMPARED or name not in run_settings:
                continue
            if all(_agree(name, value, run_settings) for _, value in of_sources):
                continue
            stated = ", ".join(f"{source} {value}" for source, value in of_sources)
            notes.append(f"sources differ in {name} ({stated}): {run_settings[name]} counts")
        return notes


def _server_name(policy: str) -> str:
    """Name the server that has a policy; those without one of their own are vLLM's."""
    return SERVERS.get(policy, "vLLM")


def _agree(name: str, value: object, run_settings: Mapping[str, object]) -> bool:
    """Return whether a source states the same of a setting as the run has: of names, one may be
    part of the other's, and a model may have several.
    """
    if name != "model":
        return _is_same(name, value, run_settings[name])
    names_of_run = names_of_model(run_settings)
    for named in names_of_model({"model": value}):
        if any(_is_same("model", named.name, of_run.name) for of_run in names_of_run):
            return True
    return False


def _is_same(name: str, first: object, second: object) -> bool:
    if first == second or name not in NAMES:
        return first == second
    first_name = str(first)
    second_name = str(second)
    if name != "version":
        options = {option_of(name, first_name), option_of(name, second_name)}
        if options != {""}:
            return len(options) == 1
    return begins_with(first_name, second_name) or begins_with(second_name, first_name)


@dataclass(frozen=True, kw_only=True)
class RealRun(Benchmark):
    """A benchmark and its server's settings. `requests` may be empty, as may `timeline`
    (`run_folder.SERIES`, from about the first arrival on) and `logged`.
    """

    source: str
    version: str
    settings: ServerSettings
    hardware: str | None
    link: tuple[float, float] | None  # bytes/s and seconds
    timeline: pd.DataFrame
    name: str  # among several loads
    logged: pd.DataFrame  # iterations

    @property
    def longest(self) -> int:
        """Tokens of the longest request; 1 without any."""
        total = self.requests.prompt_len + self.requests.output_len
        return int(total.max()) if len(total) else 1


def read_runs(
    source: str | Path,
    log: str | None = None,
    command: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[RealRun]:
    """Read the run in a file or a folder, a load each, and what is stated of its server.

    Args:
        source: The file or folder.
        log: The server's log, or another description of it.
        command: The command line that started the server.
        settings: What the user states by the lab's names, which files need not have.

    Raises:
        UserError: For what can't be read, and what nothing states of the server.
    """
    path = of_lab(Path(source).expanduser())
    if not path.exists():
        raise UserError(f"task.run={path} is not a folder or a file; {FIX}")
    logs = list[Path]()
    if log is not None:
        logs.append(of_lab(Path(log).expanduser()))
    if _is_log_of_iterations(path):
        benchmarks = [no_requests()]
        logs.append(path)
    else:
        benchmarks = [read_folder(path)] if path.is_dir() else read_benchmarks(path)
    surroundings = read_surroundings(path)
    # In the order in which statements count, the last one most.
    statements = [*surroundings.statements]
    logged = NO_LOG
    for path_of_log in logs:
        logged, of_log = _read_log(path_of_log)
        statements += of_log
    if command is not None:
        statements.append(read_command(command))
    by_user = dict(settings or {})
    sizes = {name: by_user[name] for name in SIZES if name in by_user}
    if sizes:
        statements.append(Statement(TYPED, sizes))
    runs = []
    for number, benchmark in enumerate(benchmarks, 1):
        server = ServerSettings([*benchmark.server, *statements])
        run = _run(path, benchmark, server, surroundings, logged, number)
        files = f"{path} does not" if log is None else f"{path} and {log} do not"
        _check_needed(
            files,
            {
                "hardware": run.hardware,
                **server.stated,
                **by_user,
            },
        )
        runs.append(run)
    return runs


def _is_log_of_iterations(path: Path) -> bool:
    """Return whether a file is a server's log with its iterations, and no client's."""
    if path.is_dir() or is_database(path):
        return False
    return len(read_iterations(read_text(path, str(path), FIX))) > 0


def _read_log(path: Path) -> tuple[pd.DataFrame, list[Statement]]:
    """Read a server's log: its iterations, and what it states. Raises UserError without both."""
    text = read_text(path, f"task.log={path}", LOG_FIX)
    logged = read_iterations(text)
    facts = find_facts(path, text)
    if facts is not None:
        return logged, [facts]
    if logged.empty:
        read_facts(path, text)  # which says what the file is
    return logged, []


def _run(
    path: Path,
    benchmark: Benchmark,
    server: ServerSettings,
    surroundings: Surroundings,
    logged: pd.DataFrame,
    number: int,
) -> RealRun:
    """Join a load with what is stated of its server."""
    stated = server.stated
    name = f"{number}: {benchmark.labels.get('policy', '')}"
    rate = benchmark.labels.get("workload.rate")
    if rate:
        name += f" at {rate}/s"
    fields = vars(benchmark) | {"policy": server.policy or benchmark.policy}
    return RealRun(
        **fields,
        hardware=surroundings.hardware or stated.get("hardware"),
        link=surroundings.link,
        timeline=surroundings.timeline,
        source=str(path),
        version=str(stated.get("version", "")),
        settings=server,
        name=name,
        logged=logged,
    )


def _check_needed(source: str, stated: Mapping[str, object]) -> None:
    """Raise UserError for what nothing states, and no server has by default."""
    names = []
    flags = []
    for setting, (name, flag) in NEEDED.items():
        if not stated.get(setting):
            names.append(name)
            flags.append(flag)
    if names:
        missing = ", ".join(names)
        raise UserError(f"{source} state the server's {missing}; add {' '.join(flags)}")

"""A recorded run of a real server: its requests, and what all its sources state of the server.

Requests are those of a folder (`run_folder`) or of a client's file (`bench_files`); a log of
iterations (`iteration_log`) may stand beside them, or alone. The server's arguments are stated by
any of these, by a log, and by the command line that started it (`server_facts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
from sarathi_lab.extensions.replay.server_arguments import (
    CHUNKED_V0,
    POLICIES,
    WHOLE_PROMPTS_V0,
    Statement,
    is_of_v0,
)
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
        told = self._weights_by_name(settings)
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
        stated = self.stated
        if name == NUM_BLOCKS:
            return self.num_blocks is not None
        if name == VERSION_OF_RULES:
            return "version" in stated
        is_default = self.is_complete
        if name == WEIGHTS:
            is_default = is_default and not self._leave_weights_open()
        return name in stated or is_default

    def _leave_weights_open(self) -> bool:
        """Return whether weights have a type that is named, and can't be told or simulated."""
        told = self._weights_by_name(self._settings())
        is_untold = bool(told.word) and not told.weights
        return is_untold or any(name.startswith("quantization") for name in self._not_simulated())

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

    def _weights_by_name(self, settings: Mapping[str, object]) -> ToldWeights:
        """Find the type of weights in the model's names, if nothing else states it."""
        if WEIGHTS in settings or any(map(_states_weights, self._not_simulated())):
            return ToldWeights()
        return weights_in_names(names_of_model(settings))

    def _not_simulated(self) -> list[str]:
        """Return the arguments of all sources that would change the times, each once."""
        arguments = dict[str, None]()
        for statement in self.statements:
            arguments |= dict.fromkeys(statement.not_simulated)
        return [*arguments]

    def notes(self) -> list[str]:
        """Name what of the server's arguments the simulator has not, and where sources differ."""
        not_simulated = self._not_simulated()
        without_effect = dict[str, None]()
        for statement in self.statements:
            without_effect |= dict.fromkeys(statement.without_effect)
        notes = self._engine_notes()
        settings = self._settings()
        told = self._weights_by_name(settings)
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

    def _engine_notes(self) -> list[str]:
        """Say what chose the rules of vLLM's first engine, where a run has these."""
        policy = self.policy
        if policy not in (CHUNKED_V0, WHOLE_PROMPTS_V0):
            return []
        statement = [source for source in self.statements if source.policy == policy][-1]
        version = statement.settings.get("version", "")
        reason = f"{statement.source} states"
        if is_of_v0(version):
            reason = f"version {version} has by default"
        return [f"policy={policy}, the rules of vLLM's first engine (V0), as {reason}"]

    def _differences(self) -> list[str]:
        """Name each setting that sources state differently, and which of them is taken."""
        sources = dict[str, list[tuple[str, object]]]()
        for statement in self.statements:
            for name, value in statement.settings.items():
                if name not in NOT_COMPARED:
                    sources.setdefault(name, []).append((statement.source, value))
        notes = []
        run_settings = {**self._settings(), "server": _server_name(self.policy)}
        sources["server"] = [
            (statement.source, _server_name(statement.policy))
            for statement in self.statements
            if statement.policy or statement.is_complete
        ]
        for name, stated in sources.items():
            values = [value for _, value in stated]
            if name == "model":
                are_alike = _name_one_model(values, run_settings)
            else:
                are_alike = all(_is_same(name, value, values[-1]) for value in values)
            if are_alike or name not in run_settings:
                continue
            shown = ", ".join(f"{source} {value}" for source, value in stated)
            notes.append(f"sources differ in {name} ({shown}): {run_settings[name]} counts")
        return notes


def _server_name(policy: str) -> str:
    """Name the server that has a policy; those without one of their own are vLLM's."""
    return SERVERS.get(policy, "vLLM")


def _states_weights(argument: str) -> bool:
    """Return whether an argument that is not simulated states the weights' type by itself."""
    return argument.startswith("quantization") and not argument.startswith(UNTOLD_WEIGHTS)


def _name_one_model(values: Sequence[object], settings: Mapping[str, object]) -> bool:
    """Return whether each source's name is one that the run's model has, or part of it."""
    names_of_run = names_of_model(settings)
    for value in values:
        pairs = product(names_of_model({"model": value}), names_of_run)
        if not any(_is_same("model", of_source.name, of_run.name) for of_source, of_run in pairs):
            return False
    return True


def _is_same(name: str, first: object, second: object) -> bool:
    """Return whether two sources state the same: of names, one may be part of the other's."""
    if first == second:
        return True
    if name not in NAMES:
        return False
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


@dataclass(frozen=True)
class Stated:
    """What the user states of a run.

    Attributes:
        log: The server's log, or another description of it.
        command: The command line that started the server.
        settings: Values by the lab's names, which files need not have; None: not stated.
    """

    log: str | None = None
    command: str | None = None
    settings: Mapping[str, object] | None = None


def read_runs(source: str | Path, stated: Stated = Stated()) -> list[RealRun]:
    """Read the run in `source`, a load each, and what is stated of its server. Raises UserError."""
    path = of_lab(Path(source).expanduser())
    logged = NO_LOG
    statements = list[Statement]()
    if stated.log is not None:
        logged, statements = _read_log(of_lab(Path(stated.log).expanduser()))
    benchmarks, own_log = _read_requests(path)
    if own_log is not None:
        logged, of_own_log = own_log
        statements += of_own_log
    surroundings = read_surroundings(path)
    # In the order in which statements count, the last one most.
    if stated.command is not None:
        statements.append(read_command(stated.command))
    settings = {k: v for k, v in (stated.settings or {}).items() if v is not None}
    sizes: dict[str, object] = {n: settings[n] for n in ("chunk", "batch") if n in settings}
    if sizes:
        statements.append(Statement(TYPED, sizes))
    runs = []
    for number, benchmark in enumerate(benchmarks, 1):
        server = ServerSettings([*benchmark.server, *surroundings.statements, *statements])
        run = _run(path, benchmark, server, surroundings, number, logged)
        source = f"{path} does not"
        if stated.log is not None:
            source = f"{path} and {stated.log} do not"
        _check_needed(source, {"hardware": run.hardware, **server.stated, **settings})
        runs.append(run)
    return runs


Log = tuple[pd.DataFrame, list[Statement]]


def _read_log(path: Path) -> Log:
    """Read a server's log: its iterations, and what it states. Raises UserError without both."""
    text = read_text(path, f"task.log={path}", LOG_FIX)
    logged = read_iterations(text)
    if logged.empty:
        return logged, [read_facts(path, text)]
    facts = find_facts(path, text)
    return logged, [] if facts is None else [facts]


def _read_requests(path: Path) -> tuple[list[Benchmark], Log | None]:
    """Read a run's loads and, where it is a log of iterations alone, that log."""
    if path.is_dir():
        return [read_folder(path)], None
    if not path.is_file():
        raise UserError(f"task.run={path} is not a folder or a file; {FIX}")
    if not is_database(path) and len(read_iterations(read_text(path, str(path), FIX))):
        return [no_requests()], _read_log(path)
    return read_benchmarks(path), None


def _run(
    path: Path,
    benchmark: Benchmark,
    server: ServerSettings,
    surroundings: Surroundings,
    number: int,
    logged: pd.DataFrame,
) -> RealRun:
    """Join a load with what is stated of its server."""
    stated = server.stated
    rate = benchmark.labels.get("workload.rate")
    label = str(benchmark.labels.get("policy", ""))
    if rate:
        label += f" at {rate}/s"
    fields = vars(benchmark) | {"policy": server.policy or benchmark.policy}
    return RealRun(
        **fields,
        hardware=surroundings.hardware or stated.get("hardware"),
        link=surroundings.link,
        timeline=surroundings.timeline,
        source=str(path),
        version=str(stated.get("version", "")),
        settings=server,
        name=f"{number}: {label}",
        logged=logged,
    )


def _check_needed(source: str, stated: Mapping[str, object]) -> None:
    """Raise UserError for what nothing states, and no server has by default."""
    missing = [names for name, names in NEEDED.items() if not stated.get(name)]
    if missing:
        names = ", ".join(name for name, _ in missing)
        flags = " ".join(flag for _, flag in missing)
        raise UserError(f"{source} state the server's {names}; add {flags}")

"""What of a real server's run is replayed: load, engine, devices and host, as they were run
and with other settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.console import progress_of
from sarathi_lab.config.errors import UserError, require_int
from sarathi_lab.config.instantiate import build, class_of, option_files, read_option, resolved
from sarathi_lab.engine.config import SINGLE, EngineConfig
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.extensions.cluster.lockstep import Lockstep, LockstepBackend
from sarathi_lab.extensions.replay.comparison import Load
from sarathi_lab.extensions.replay.real_run import NULL_BLOCKS, RealRun, ServerSettings
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.policy import Policy, VllmV1
from sarathi_lab.tasks.plan import changed

AUTO = "auto"  # of hardware, host, model and dtype: as recorded in the run
KEYS = ("task", "executor", "model", "policy", "batch")  # of a replay


@dataclass(frozen=True)
class Replay:
    """A load of a real server and the settings of its replay."""

    run: RealRun
    backend: SimulatedBackend
    spec: ModelSpec
    engine: EngineConfig
    config: Mapping[str, Any]

    def executor(self) -> Executor:
        return self.backend.build(self.spec, None, self.engine.sizes())

    def load(self) -> Load:
        """Serve the run's requests and return both."""
        ledger = Ledger()
        total = int((self.run.requests.prompt_len + self.run.requests.output_len - 1).sum())
        with progress_of("replaying", total, "tokens") as advance:
            ledger.on_iteration = advance
            serve(requests_of(self.run), self.engine, self.executor(), ledger)
        return Load(self.run, ledger.iterations(), ledger.requests())

    def describe(self) -> list[str]:
        """List the settings taken from the run."""
        run, settings, host = self.run, self.run.settings, self.backend.host
        load = f"{len(run.logged)} logged iterations"
        if not run.requests.empty:
            load = f"{len(run.requests)} requests over {run.requests.arrival_time.max():.1f} s"
        lines = [
            f"{server_of(run)} {run.version or '(no version)'} with "
            f"{settings.max_num_batched_tokens} tokens and "
            f"{settings.max_num_seqs} sequences an iteration, host={host.name}"
            f"{', scheduled ahead of the device' if host.overlaps else ''}",
            f"{load}; cache {self.engine.num_blocks} x {settings.block_size} tokens"
            f"{'' if settings.num_gpu_blocks else ', as the hardware has room for'}"
            f"{', prefixes shared' if settings.enable_prefix_caching else ''}",
        ]
        if isinstance(self.backend, LockstepBackend):
            hardware, replicas = self.backend.hardware, self.backend.sharing.num
            lines.append(
                f"{replicas} replicas in lockstep, which share the experts; no table has their "
                f"exchange: {hardware.link_rate / 1e9:.3g} GB/s and "
                f"{hardware.link_latency * 1e6:.3g} µs a transfer are taken"
            )
        return lines + [run.caution] * bool(run.caution)


@dataclass(frozen=True)
class Case:
    """A load as it was run, and with the settings of the command line (None: the same)."""

    as_run: Replay
    what_if: Replay | None

    @property
    def run(self) -> RealRun:
        return self.as_run.run


def requests_of(run: RealRun) -> list[Request]:
    rows = run.requests[["arrival_time", "prompt_len", "output_len"]].itertuples(index=False)
    return [Request(i, *row) for i, row in enumerate(rows)]


def server_of(run: RealRun) -> str:
    """Name the serving system, as the files of conf/host begin."""
    return "sglang" if run.policy == "sglang" else "vllm"


def case_of(cfg: DictConfig, run: RealRun) -> Case:
    """Prepare both replays. Raises UserError for what can't be simulated."""
    settings, configured = run.settings, _configured(cfg, run)
    if (replicas := settings.data_parallel_size) > 1 and not settings.enable_expert_parallel:
        raise UserError(
            f"{run.source}: data_parallel_size={replicas} is simulated only "
            "where replicas share experts (enable_expert_parallel); take another run"
        )
    recorded = {"chunk": settings.max_num_batched_tokens, "batch": settings.max_num_seqs}
    named = {name: cfg[name] for name in recorded if cfg[name] is not None}
    policy = read_option("policy", option_files("policy")[run.policy])
    as_run = changed(configured, policy=policy, **recorded)
    if as_run.host.get("graphs") is not None:
        default = {"sizes": None, "largest": CudaGraphs().largest}
        as_run.host.graphs.update({**default, **settings.graphs})
    what_if = changed(configured, **recorded | named)
    graphs = what_if.host.get("graphs")
    if graphs is None or graphs.mode is None:
        if graphs is not None and (graphs.sizes or graphs.largest != CudaGraphs().largest):
            fix = "add host.graphs.mode=full_and_piecewise"
            raise UserError(f"host.graphs has sizes, but no mode, so that none is captured; {fix}")
        what_if = changed(what_if, host=as_run.host)
    if class_of(cfg, "policy") is VllmV1 and "chunk" not in named and run.policy != "vllm_v1":
        what_if = changed(what_if, policy=policy)
    is_named = cfg.hardware.name != AUTO
    first, other = (_replay(one, run, is_named=is_named) for one in (as_run, what_if))
    if (first.engine, first.backend) == (other.engine, other.backend):
        return Case(first, None)
    if run.requests.empty and first.engine != other.engine:
        raise UserError(
            f"{run.source} has no arrivals, so that only its schedule is simulated; drop policy, "
            f"chunk and batch, or name a client's file with task.log={run.source}"
        )
    return Case(first, other)


def _replay(cfg: DictConfig, run: RealRun, *, is_named: bool) -> Replay:
    backend = build(cfg.executor)
    if not isinstance(backend, SimulatedBackend):
        raise UserError(f"task=validate replays in simulation, executor={backend.name} is none")
    backend, settings = _of_run(backend, run, is_named=is_named), run.settings
    spec, _ = resolve_model(cfg, backend)
    backend.check(spec, 0)
    policy: Policy = build(cfg.policy, Policy)
    if policy.budget == AUTO:
        raise UserError("chunk=auto is chosen for a workload, not for a run; name tokens")
    requests = requests_of(run)
    longest = settings.max_model_len or max((one.total_len for one in requests), default=1)
    batch_size = require_int("batch", cfg.batch, 1, "use the most sequences at a time")
    engine = EngineConfig(
        policy.on_device(lambda: backend.predictor(spec), batch_size, longest),
        batch_size=batch_size,
        num_blocks=_num_blocks(settings, backend, spec),
        block_size=settings.block_size,
        max_model_len=longest,
        shares_prefixes=settings.enable_prefix_caching,
        state_tokens=backend.state_tokens(spec),
        cluster=getattr(backend, "sharing", SINGLE),
    )
    engine.check(requests)
    return Replay(run, backend, spec, engine, {key: resolved(cfg)[key] for key in KEYS})


def _configured(cfg: DictConfig, run: RealRun) -> DictConfig:
    """Return `cfg` with the run's settings in place of `AUTO`."""
    settings: dict[str, object] = {}
    if cfg.hardware.name == AUTO:
        given = {
            str(key): value
            for key, value in cfg.hardware.items()
            if key not in ("name", "_target_") and value is not None
        }
        settings["hardware"] = OmegaConf.merge(_matching("hardware", run.hardware, run), given)
        if cfg.hardware.tables is not None:
            settings["executor"] = OmegaConf.merge(cfg.executor, {"cost_model": "profiled"})
    if cfg.host.name == AUTO:
        settings["host"] = _host(run)
    if "path" in cfg.model and cfg.model.path is None:
        settings["model"] = _matching("model", run.settings.model.rpartition("/")[2], run)
    dtype = run.settings.dtype
    if cfg.dtype == AUTO and dtype != AUTO:
        if dtype not in DTYPE_BYTES:
            raise UserError(f"{run.source}: dtype={dtype} can't be simulated; add dtype=bfloat16")
        settings["dtype"] = dtype
    return changed(cfg, **settings)


def _matching(group: str, name: str | None, run: RealRun) -> DictConfig:
    """Read the option that `name` begins with (letters and digits only). Raises UserError."""
    files = option_files(group)
    plain = {one: re.sub(r"[^a-z0-9]", "", one.lower()) for one in (*files, name or "")}
    wanted = plain[name or ""].removeprefix("nvidia").removeprefix("geforce")
    fitting = [option for option in files if wanted.startswith(plain[option])]
    if not fitting:
        raise UserError(
            f"{run.source}: {group} {name or 'is not named and'} has no file in conf/{group}; add "
            f"{group}=NAME, one of {', '.join(option for option in files if option != AUTO)}"
        )
    return read_option(group, files[max(fitting, key=len)])


def _host(run: RealRun) -> DictConfig:
    """Choose the host of the server's version or the nearest one, with the run's `overlaps`."""

    def distance(name: str) -> list[int]:
        versions = (re.findall(r"\d+", one)[:2] for one in (name, run.version))
        return [abs(int(a) - int(b)) for a, b in zip(*versions, strict=False)]

    files = option_files("host")
    nearest = min((name for name in files if name.startswith(f"{server_of(run)}_")), key=distance)
    node = read_option("host", files[nearest])
    if run.settings.async_scheduling is not None:
        node.overlaps = run.settings.async_scheduling
    return node


def _of_run(backend: SimulatedBackend, run: RealRun, *, is_named: bool) -> SimulatedBackend:
    """Return `backend` with the run's devices, and their link unless the hardware is named."""
    hardware, settings = backend.hardware, run.settings
    if run.link is not None and not is_named:
        rate, latency = run.link
        hardware = replace(hardware, link_bytes_per_second=rate, link_latency=latency)
        hardware = replace(hardware, link_efficiency=1.0)
    backend = replace(backend, hardware=hardware, tensor_parallel=settings.tensor_parallel_size)
    if settings.data_parallel_size == 1:
        return backend
    captured = max(CudaGraphs(**settings.graphs).captured, default=0)
    sharing = Lockstep(num=settings.data_parallel_size, graph_tokens=captured)
    backend = replace(backend, host=replace(backend.host, graphs=None))  # `sharing` pads
    return LockstepBackend(**vars(backend), sharing=sharing)


def _num_blocks(settings: ServerSettings, backend: SimulatedBackend, spec: ModelSpec) -> int:
    """Return the run's number, else that of its share of memory beside the weights."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    usable = settings.gpu_memory_utilization * backend.hardware.memory_bytes
    backend = replace(backend, hardware=replace(backend.hardware, memory_bytes=usable))
    return backend.kv_blocks(spec, settings.block_size) - NULL_BLOCKS

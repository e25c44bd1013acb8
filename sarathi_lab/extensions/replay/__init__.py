"""The task `validate`: a recorded run of a real server beside its simulated replay."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.console import console, progress_of
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, option_files, read_option
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.config import SINGLE, EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.extensions.cluster.lockstep import Lockstep, LockstepBackend
from sarathi_lab.extensions.replay.real_run import (
    NULL_BLOCKS,
    RealRun,
    ServerSettings,
    mean_errors,
    over_time,
    read_run,
    validation_table,
)
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.policy import VllmV1
from sarathi_lab.results.plots.style import finished, panels
from sarathi_lab.results.report import print_cautions
from sarathi_lab.results.result import ITERATIONS, REQUESTS, DisplayTable, Result
from sarathi_lab.results.serving_metrics import waits
from sarathi_lab.tasks.base import Task
from sarathi_lab.tasks.plan import changed

SERVER = "vllm"
AUTO = "auto"  # of hardware, host, model and dtype: as recorded in the run
SHOWN = {"quantile": "", "unit": "", "real": ".4g", "simulated": ".4g", "error": "+.1%"}
STYLES: dict[str, dict[str, Any]] = {
    "real": {"color": "0.25"},
    "simulated": {"color": "C1", "linestyle": "--"},
}
WAITS = {
    "ttft": (1.0, "time to first token [s]"),
    "tpot": (1e3, "time per output token [ms]"),
    "latency": (1.0, "end to end [s]"),
}
IN_USE = {
    "running": "requests that run",
    "waiting": "requests that wait",
    "blocks": "KV blocks in use",
}


@dataclass(frozen=True)
class Replay:
    """A recorded run and the settings of its replay."""

    run: RealRun
    backend: SimulatedBackend
    spec: ModelSpec
    num_blocks: int

    def serve(self, ledger: Ledger) -> None:
        """Serve the run's requests, and record them in `ledger`."""
        settings = self.run.settings
        columns = ["arrival_time", "prompt_len", "output_len"]
        rows = self.run.requests[columns].itertuples(index=False)
        engine = EngineConfig(
            VllmV1(max_num_batched_tokens=settings.max_num_batched_tokens),
            batch_size=settings.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            shares_prefixes=settings.enable_prefix_caching,
            cluster=getattr(self.backend, "sharing", SINGLE),
            state_tokens=self.spec.state_tokens(self.backend.dtype_bytes),
        )
        executor = self.backend.build(self.spec, None, engine.sizes())
        serve([Request(i, *row) for i, row in enumerate(rows)], engine, executor, ledger)

    def describe(self) -> list[str]:
        """List the settings taken from the run."""
        run, settings, host = self.run, self.run.settings, self.backend.host
        lines = [
            f"{SERVER} {run.version} with {settings.max_num_batched_tokens} tokens and "
            f"{settings.max_num_seqs} sequences an iteration, host={host.name}"
            f"{', scheduled ahead of the device' if host.overlaps else ''}",
            f"{len(run.requests)} requests over {run.requests.arrival_time.max():.1f} s; cache "
            f"{self.num_blocks} x {settings.block_size} tokens"
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
        return lines


class Validate(Task):
    """Replay of the run in the folder `run` with the simulator's scheduler and cost model.

    Model, GPU, host, policy, sizes and arrivals are those of the run's files; hardware, host, model
    and dtype can be named instead.
    """

    reads = ("executor", "hardware", "host", "model", "dtype")

    def __init__(self, run: str | None = None) -> None:
        self._folder = run

    def check(self, cfg: DictConfig) -> Replay:
        if not self._folder:
            raise UserError("task=validate needs the folder of a real run; add task.run=FOLDER")
        run = read_run(self._folder)
        replicas = run.settings.data_parallel_size
        if replicas > 1 and not run.settings.enable_expert_parallel:
            raise UserError(
                f"{run.source}: data_parallel_size={replicas} is simulated only "
                "where replicas share experts (enable_expert_parallel); take another run"
            )
        configured = _configured(cfg, run)
        backend = build(configured.executor)
        if not isinstance(backend, SimulatedBackend):
            raise UserError(f"task=validate replays in simulation, executor={backend.name} is none")
        backend = _of_run(backend, run, is_named=cfg.hardware.name != AUTO)
        spec, _ = resolve_model(configured, backend)
        backend.check(spec, 0)
        return Replay(run, backend, spec, _num_blocks(run.settings, backend, spec))

    def run(self, cfg: DictConfig, context: RunContext) -> Result:
        replay: Replay = context.prepared or self.check(cfg)
        run, backend = replay.run, replay.backend
        where = f"{replay.spec.name} on {backend.device_name}"
        console().print(f"\nreplaying {run.source}: {where}", style="bold", soft_wrap=True)
        print_cautions(backend.cautions(replay.spec), context)
        for line in replay.describe():
            console().print(f"  {line}", soft_wrap=True)
        ledger = Ledger()
        total = int((run.requests.prompt_len + run.requests.output_len - 1).sum())
        with progress_of("replaying", total, "tokens") as advance:
            ledger.on_iteration = advance
            replay.serve(ledger)
        iterations, requests = ledger.iterations(), ledger.requests()
        table, both = validation_table(run, requests, iterations), over_time(run, iterations)
        title = f"{where}: {SERVER} {run.version}, real and simulated"
        return Result(
            tables={
                "validation": table,
                "over_time": both,
                ITERATIONS: iterations,
                REQUESTS: requests,
            },
            figures={"validation": validation(run, requests, both, title)},
            summary={f"error/{name}": error for name, error in mean_errors(table).items()},
            shown=[
                DisplayTable(
                    table.to_dict("records"), ["metric", "quantile", "unit"], formats=SHOWN
                )
            ],
            labels={"model": replay.spec.name, "device": backend.device_name},
            tags=["validate", replay.spec.name, backend.device_name],
        )


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
    wanted = _plain(name or "").removeprefix("nvidia").removeprefix("geforce")
    fitting = [option for option in files if wanted.startswith(_plain(option))]
    if not fitting:
        raise UserError(
            f"{run.source}: {group} {name or 'is not named and'} has no file in conf/{group}; add "
            f"{group}=NAME, one of {', '.join(option for option in files if option != AUTO)}"
        )
    return read_option(group, files[max(fitting, key=len)])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _host(run: RealRun) -> DictConfig:
    """Choose the host of the server's version or the nearest one, with the run's `overlaps` and
    CUDA graphs.
    """

    def distance(name: str) -> list[int]:
        versions = (re.findall(r"\d+", one)[:2] for one in (name, run.version))
        return [abs(int(a) - int(b)) for a, b in zip(*versions, strict=False)]

    files = option_files("host")
    nearest = min((name for name in files if name.startswith(f"{SERVER}_")), key=distance)
    node = read_option("host", files[nearest])
    if run.settings.async_scheduling is not None:
        node.overlaps = run.settings.async_scheduling
    node.graphs.update(run.settings.graphs)
    return node


def _of_run(backend: SimulatedBackend, run: RealRun, *, is_named: bool) -> SimulatedBackend:
    """Return `backend` with the run's devices, and their link unless the hardware is named."""
    hardware, settings = backend.hardware, run.settings
    if run.link is not None and not is_named:
        rate, latency = run.link
        hardware = replace(
            hardware, link_bytes_per_second=rate, link_latency=latency, link_efficiency=1.0
        )
    backend = replace(backend, hardware=hardware, tensor_parallel=settings.tensor_parallel_size)
    if settings.data_parallel_size == 1:
        return backend
    sharing = Lockstep(num=settings.data_parallel_size, graph_tokens=settings.graph_tokens)
    backend = replace(backend, host=replace(backend.host, graphs=None))  # `sharing` pads batches
    return LockstepBackend(**vars(backend), sharing=sharing)


def _num_blocks(settings: ServerSettings, backend: SimulatedBackend, spec: ModelSpec) -> int:
    """Return the run's number, else that of its share of memory beside the weights."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    usable = settings.gpu_memory_utilization * backend.hardware.memory_bytes
    backend = replace(backend, hardware=replace(backend.hardware, memory_bytes=usable))
    return backend.kv_blocks(spec, settings.block_size) - NULL_BLOCKS


def validation(run: RealRun, requests: pd.DataFrame, both: pd.DataFrame, where: str) -> Figure:
    """Draw distributions of waits above; below over time (`over_time`'s table) running and waiting
    requests, and blocks in use where they were recorded.
    """
    figure, axes = panels(2, 3, (12, 6.4))
    tables = {"real": run.requests, "simulated": requests}
    for whose, style in STYLES.items():
        for ax, (name, (factor, label)) in zip(axes[:3], WAITS.items(), strict=True):
            ax.ecdf(pd.Series(factor * waits(tables[whose])[name]).dropna(), label=whose, **style)
            ax.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
        for ax, (name, label) in zip(axes[3:], IN_USE.items(), strict=True):
            ax.plot(both.time, both[f"{whose}_{name}"], linewidth=1.2, **style)
            ax.set(xlabel="time [s]", ylabel=label, ylim=(0, None))
    axes[0].legend(fontsize="small")
    if both.real_blocks.isna().all():
        axes[5].set_title("the run did not record them", fontsize="small")
    return finished(figure, where)

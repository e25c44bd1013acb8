"""The task `validate`: a recorded run of a real server beside its simulated replay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
from sarathi_lab.extensions.replay.lockstep import Lockstep, LockstepBackend
from sarathi_lab.extensions.replay.real_run import (
    NULL_BLOCKS,
    RealRun,
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

AUTO = "auto"  # of hardware, host, model and dtype: as recorded in the run
MEMORY_SHARE = 0.9  # of the device, vLLM's default
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
    policy: VllmV1
    num_blocks: int
    shares_prefixes: bool

    @property
    def requests(self) -> list[Request]:
        columns = ["arrival_time", "prompt_len", "output_len"]
        rows = self.run.requests[columns].itertuples(index=False)
        return [Request(i, *row) for i, row in enumerate(rows)]

    def serve(self, ledger: Ledger) -> None:
        """Serve the run's requests, and record them in `ledger`."""
        run, spec = self.run, self.spec
        engine = EngineConfig(
            self.policy,
            batch_size=run.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=run.block_size,
            max_model_len=run.max_model_len,
            shares_prefixes=self.shares_prefixes,
            cluster=getattr(self.backend, "sharing", SINGLE),
        )
        executor = self.backend.build(spec, None, engine.sizes())
        serve(self.requests, engine, executor, ledger)

    def describe(self) -> list[str]:
        """List the settings taken from the run."""
        run, host = self.run, self.backend.host
        lines = [
            f"{run.server} {run.version} with {run.max_num_batched_tokens} tokens and "
            f"{run.max_num_seqs} sequences an iteration, host={host.name}"
            f"{', scheduled ahead of the device' if host.overlaps else ''}",
            f"{len(run.requests)} requests over {run.requests.arrival_time.max():.1f} s; cache "
            f"{self.num_blocks} x {run.block_size} tokens"
            f"{'' if run.num_gpu_blocks else ', as the hardware has room for'}"
            f"{', prefixes shared' if self.shares_prefixes else ''}",
        ]
        if isinstance(self.backend, LockstepBackend):
            hardware, replicas = self.backend.hardware, self.backend.sharing.replicas
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
        if run.data_parallel_size > 1 and not run.enable_expert_parallel:
            raise UserError(
                f"{run.source}: data_parallel_size={run.data_parallel_size} is simulated only "
                "where replicas share experts (enable_expert_parallel); take another run"
            )
        configured = _configured(cfg, run)
        backend = build(configured.executor)
        if not isinstance(backend, SimulatedBackend):
            raise UserError(f"task=validate replays in simulation, executor={backend.name} is none")
        backend = _of_run(backend, run, is_named=cfg.hardware.name != AUTO)
        spec, _ = resolve_model(configured, backend)
        backend.check(spec, 0)
        policy = VllmV1(max_num_batched_tokens=run.max_num_batched_tokens)
        shares = True if run.enable_prefix_caching is None else run.enable_prefix_caching
        return Replay(run, backend, spec, policy, _num_blocks(run, backend, spec), shares)

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
        title = f"{where}: {run.server} {run.version}, real and simulated"
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
        named = {key: cfg.hardware[key] for key in cfg.hardware if key not in ("name", "_target_")}
        settings["hardware"] = _matching("hardware", run.hardware, run.source, named)
        if cfg.hardware.tables is not None:
            settings["executor"] = OmegaConf.merge(cfg.executor, {"cost_model": "profiled"})
    if cfg.host.name == AUTO:
        settings["host"] = _host(run)
    if "path" in cfg.model and cfg.model.path is None:
        settings["model"] = _matching("model", run.model.rpartition("/")[2], run.source, {})
    if cfg.dtype == AUTO and run.dtype != AUTO:
        if run.dtype not in DTYPE_BYTES:
            raise UserError(
                f"{run.source}: dtype={run.dtype} can't be simulated; add dtype=bfloat16"
            )
        settings["dtype"] = run.dtype
    return changed(cfg, **settings)


def _matching(group: str, name: str | None, source: str, named: dict[object, object]) -> DictConfig:
    """Find the option that `name` begins with (letters and digits only) and merge the `named`
    settings that are not null. Raises UserError if there is none.
    """
    files = option_files(group)
    wanted = _plain(name or "").removeprefix("nvidia").removeprefix("geforce")
    fitting = [option for option in files if wanted.startswith(_plain(option))]
    if not wanted or not fitting:
        raise UserError(
            f"{source}: {group} {name or 'is not named and'} has no file in conf/{group}; add "
            f"{group}=NAME, one of {', '.join(option for option in files if option != AUTO)}"
        )
    node = read_option(group, files[max(fitting, key=len)])
    given = {str(key): value for key, value in named.items() if value is not None}
    return DictConfig(OmegaConf.merge(node, given))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _host(run: RealRun) -> DictConfig:
    """Choose the host of the server's version or the nearest one; `overlaps` is the run's."""
    files = {name: path for name, path in option_files("host").items() if "_" in name}
    same_server = [name for name in files if name.startswith(f"{run.server}_")]
    nearest = min(same_server, key=lambda name: _distance(_numbers(name), _numbers(run.version)))
    node = read_option("host", files[nearest])
    if run.async_scheduling is not None:
        node.overlaps = run.async_scheduling
    return node


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)[:2]]


def _distance(one: Sequence[int], other: Iterable[int]) -> list[int]:
    return [abs(a - b) for a, b in zip(one, other, strict=False)]


def _of_run(backend: SimulatedBackend, run: RealRun, *, is_named: bool) -> SimulatedBackend:
    """Return `backend` with the run's devices, and their link unless the hardware is named."""
    hardware = backend.hardware
    if run.link is not None and not is_named:
        rate, latency = run.link
        hardware = replace(
            hardware, link_bytes_per_second=rate, link_latency=latency, link_efficiency=1.0
        )
    backend = replace(backend, hardware=hardware, tensor_parallel=run.tensor_parallel_size)
    if run.data_parallel_size == 1:
        return backend
    sharing = Lockstep(run.data_parallel_size, run.graph_tokens)
    return LockstepBackend(**vars(backend), sharing=sharing)


def _num_blocks(run: RealRun, backend: SimulatedBackend, spec: ModelSpec) -> int:
    """Return the run's number, else that of its share of memory beside the weights."""
    if run.num_blocks is not None:
        return run.num_blocks
    share = run.gpu_memory_utilization or MEMORY_SHARE
    hardware = replace(backend.hardware, memory_bytes=share * backend.hardware.memory_bytes)
    return replace(backend, hardware=hardware).kv_blocks(spec, run.block_size) - NULL_BLOCKS


def validation(run: RealRun, requests: pd.DataFrame, both: pd.DataFrame, where: str) -> Figure:
    """Draw distributions of waits above; below over time (`over_time`'s table) running and waiting
    requests, and blocks in use where they were recorded.
    """
    figure, axes = panels(2, 3, (12, 6.4))
    found = {"real": waits(run.requests), "simulated": waits(requests)}
    for whose, style in STYLES.items():
        for ax, (name, (factor, label)) in zip(axes[:3], WAITS.items(), strict=True):
            values = found[whose][name]
            ordered = np.sort(factor * values[~np.isnan(values)])
            ax.plot(ordered, np.linspace(0, 1, len(ordered)), label=whose, **style)
            ax.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
        for ax, (name, label) in zip(axes[3:], IN_USE.items(), strict=True):
            ax.plot(both.time, both[f"{whose}_{name}"], linewidth=1.2, **style)
            ax.set(xlabel="time [s]", ylabel=label, ylim=(0, None))
    axes[0].legend(fontsize="small")
    if both.real_blocks.isna().all():
        note = "the run did not record them"
        axes[5].text(0.5, 0.03, note, transform=axes[5].transAxes, ha="center", fontsize="small")
    return finished(figure, where)

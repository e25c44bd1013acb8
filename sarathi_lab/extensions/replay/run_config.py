"""Configuration of a run as it was: devices, host, model and cache from what its files state."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, class_of, option_files, read_option
from sarathi_lab.config.published_names import (
    datasheet_of_card,
    nearest_option,
    option_of,
    positions_of,
    stands_for,
)
from sarathi_lab.engine.served_system import CacheRoom
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.executor.simulated.hardware import NO_HOST
from sarathi_lab.extensions.cluster.lockstep import Lockstep, LockstepBackend
from sarathi_lab.extensions.replay.argument_table import CACHE_BYTES, LOGGED_CACHE
from sarathi_lab.extensions.replay.names import (
    ModelName,
    has_size,
    is_hub_id,
    names_of_model,
)
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.extensions.replay.server_arguments import (
    CHUNKED_V0,
    POLICIES,
    WHOLE_PROMPTS_V0,
    LoggedCache,
)
from sarathi_lab.extensions.replay.settings import (
    SERVER_DEFAULTS,
    typed_settings,
    with_settings,
)
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.layers import CachedWindow
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.policy.systems import NULL_BLOCKS, setup_of, vllm_memory
from sarathi_lab.tasks.plan import changed
from sarathi_lab.tasks.run_cache import memory_share

AHEAD = "vllm_async"  # the host of a vLLM whose scheduling ahead leaves the device waiting
AUTO = "auto"  # of hardware, host, model and dtype: as recorded in the run


def server_of(run: RealRun) -> str:
    """Name the serving system, as the files of conf/host begin."""
    return run.policy if run.policy in POLICIES.values() else "vllm"


@dataclass
class FromFiles:
    """What the run's files name in place of `AUTO`.

    Attributes:
        settings: Nodes and values of the configuration.
        assumed: What nothing states.
        notes: What the user names otherwise than a file.
        has_run_cache: Whether the run's number of blocks is that of the named model.
    """

    settings: dict[str, object] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_run_cache: bool = True

    def note_named(self, name: str, value: object, stated: object) -> None:
        self.notes.append(f"{name}={value} as you state; the file states {stated}")


def configured(cfg: DictConfig, run: RealRun) -> tuple[DictConfig, FromFiles]:
    """Return `cfg` with the run's devices, host, model and type in place of `AUTO`, and what was
    from_files. Raises UserError for what no file of conf/ stands for.
    """
    from_files = FromFiles()
    _find_hardware(cfg, run, from_files)
    _find_host(cfg, run, from_files)
    _find_model(cfg, run, from_files)
    _find_dtype(cfg, run, from_files)
    return changed(cfg, **from_files.settings), from_files


# Each of these adds to `from_files` what the run has for an AUTO, or notes what the user names.


def _find_hardware(cfg: DictConfig, run: RealRun, from_files: FromFiles) -> None:
    typed = typed_settings(cfg)
    name = cfg.hardware.name
    if name == AUTO:
        option = _matching("hardware", run.hardware, run)
        from_files.settings["hardware"] = OmegaConf.merge(option, _parameters(cfg.hardware))
    elif run.hardware and not stands_for("hardware", name, run.hardware):
        from_files.note_named("hardware", name, run.hardware)
    has_tables = name == AUTO and cfg.hardware.tables is not None
    names_tables = has_tables or "hardware.tables" in typed
    if names_tables and "executor.cost_model" not in typed:
        profiled = {"cost_model": "profiled"}
        from_files.settings["executor"] = OmegaConf.merge(cfg.executor, profiled)


def _parameters(hardware: DictConfig) -> dict[str, object]:
    """Return what the user states of devices that a file names, such as the folder of tables."""
    parameters = dict[str, object]()
    for key, value in hardware.items():
        if key not in ("name", "_target_") and value is not None:
            parameters[str(key)] = value
    return parameters


def _find_host(cfg: DictConfig, run: RealRun, from_files: FromFiles) -> None:
    name = cfg.host.name
    if name == AUTO:
        name_of_degree = "executor.tensor_parallel"
        degree = run.settings.stated.get(name_of_degree, SERVER_DEFAULTS[name_of_degree])
        if not run.settings.tell(name_of_degree):
            degree = cfg.executor.tensor_parallel
        host = _host(run, is_on_several=_is_on_several(degree))
        from_files.settings["host"] = _with_typed_graphs(host, cfg)
        if not run.version:
            from_files.assumed.append(f"host={host.name}")
        return
    overlaps = run.settings.stated.get("host.overlaps")
    differs = overlaps is not None and cfg.host.overlaps != overlaps
    if differs and name != NO_HOST.name:
        from_files.note_named("host", name, f"async_scheduling={overlaps}")


def _with_typed_graphs(host: DictConfig, typed: DictConfig) -> DictConfig:
    """Return a run's host with the CUDA graphs that the user states. Raises UserError for a host
    that has none.
    """
    graphs = {name: value for name, value in typed.host.graphs.items() if value is not None}
    if not graphs:
        return host
    if host.get("graphs") is None:
        name = next(iter(graphs))
        raise UserError(
            f"host.graphs.{name}={graphs[name]} has no effect on host={host.name}, that of the "
            "run, whose launches take no time; drop it"
        )
    if "sizes" in graphs or "largest" in graphs:  # each stands for both
        graphs = {"sizes": None, "largest": CudaGraphs().largest, **graphs}
    return with_settings(host, {"graphs": OmegaConf.merge(host.graphs, graphs)})


def _find_model(cfg: DictConfig, run: RealRun, from_files: FromFiles) -> None:
    stated = run.settings.stated.get("model")
    names = names_of_model(run.settings.stated)
    is_auto = "path" in cfg.model and cfg.model.path is None
    if is_auto:
        # A name with a size is of its model, whatever else clients call it by. The error for
        # names that no option fits has the surest one.
        told = [named for named in names if option_of("model", named.name) or has_size(named.name)]
        chosen = next(iter(told or names), ModelName(""))
        model = _matching("model", chosen.name, run)
        positions = positions_of(chosen.name)
        if positions is not None:
            model = with_settings(model, {"max_position": positions})
        from_files.settings["model"] = model
        if chosen != names[0]:
            option = option_of("model", chosen.name)
            from_files.notes.append(f"model={option}, as the {chosen.kind} {chosen.name} tells")
        return
    name = cfg.model.get("name")
    if not name or name == AUTO or not stated:
        return
    is_of_run = any(stands_for("model", name, named.name) for named in names)
    if not is_of_run:
        from_files.note_named("model", name, stated)
        # A model of no option's name, as of one that was trained further, has the named shapes.
        from_files.has_run_cache = not any(option_of("model", named.name) for named in names)


def _find_dtype(cfg: DictConfig, run: RealRun, from_files: FromFiles) -> None:
    stated = run.settings.stated.get("dtype", AUTO)
    if cfg.dtype == AUTO and stated != AUTO:
        if stated not in DTYPE_BYTES:
            raise UserError(f"{run.source}: dtype={stated} can't be simulated; add dtype=bfloat16")
        from_files.settings["dtype"] = stated
    elif stated not in (AUTO, cfg.dtype):
        from_files.note_named("dtype", cfg.dtype, stated)


def _matching(group: str, name: str | None, run: RealRun) -> DictConfig:
    """Read the option that stands for `name`. Raises UserError."""
    nearest = nearest_option(group, name or "")
    if not nearest.option:
        unknown = name or "is not named and"
        by_file = _path_of_model(run) if group == "model" else ""
        raise UserError(
            f"{run.source}: {group} {unknown} has no file in conf/{group}; add "
            f"{by_file}{group}=NAME of those that --help {group} lists"
        )
    if nearest.differences:
        remedy = f"{_path_of_model(run)}model={nearest.option} if it has its shapes and weights"
        if group == "hardware":
            remedy = f"{datasheet_of_card(nearest)}, or hardware={nearest.option} if it is one"
        raise UserError(
            f"{run.source}: {group} {name} has no file in conf/{group} "
            f'(by "{" ".join(nearest.differences)}" it may be another than {nearest.option}); add '
            f"{remedy}"
        )
    return read_option(group, option_files(group)[nearest.option])


def _path_of_model(run: RealRun) -> str:
    """Say how the shapes of a run's model are named by its config.json."""
    stated = str(run.settings.stated.get("model", ""))
    if is_hub_id(stated):
        return f"model.path={stated}, whose config.json is fetched, or "
    return "model.path=FOLDER with its config.json, or "


def _is_on_several(degree: object) -> bool:
    """Return whether a degree is above 1; one that is no number is refused elsewhere, later."""
    return isinstance(degree, int) and degree > 1


def _host(run: RealRun, *, is_on_several: bool) -> DictConfig:
    """Choose the host of the server's version or the nearest one, with the run's `overlaps`.

    A vLLM that schedules ahead has a host of its own where that leaves the device waiting: on
    several devices, whose workers are processes, and in versions that do it only if asked to.
    """
    files = option_files("host")
    names = []
    for name in files:
        # Of a version: one with a front end (vllm_http) is the user's to name.
        has_version = any(_numbers(name))
        if has_version and name.startswith(f"{server_of(run)}_"):
            names.append(name)
    nearest = max(names, key=_numbers)  # the newest, where the version is not known
    if run.version:
        nearest = min(names, key=partial(_distance, run.version))
    node = read_option("host", files[nearest])
    overlaps = run.settings.stated.get("host.overlaps", node.overlaps)
    leaves_waiting = is_on_several or not node.overlaps
    if overlaps and leaves_waiting and server_of(run) == "vllm":
        return read_option("host", files[AHEAD])
    node.overlaps = overlaps
    return node


def _distance(version: str, host: str) -> list[int]:
    """Return by how much a host's version differs from another, in the major number first."""
    pairs = zip(_numbers(version), _numbers(host), strict=False)
    return [abs(number - number_of_host) for number, number_of_host in pairs]


def is_of_other_version(host: str, version: str) -> bool:
    """Return whether a host is that of another version of the server, both of which are known."""
    numbers = _numbers(host)
    return any(numbers) and bool(version) and numbers != _numbers(version)


def _numbers(version: str) -> list[int]:
    """Return the major and minor number of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def devices(cfg: DictConfig, run: RealRun, *, is_named: bool) -> tuple[SimulatedBackend, ModelSpec]:
    """Make the run's devices and its model's shapes."""
    backend: SimulatedBackend = build(cfg.executor, SimulatedBackend)
    backend = _of_run(backend, cfg, run, is_named=is_named)
    spec, _ = resolve_model(cfg, backend)
    return backend, spec


def _of_run(
    backend: SimulatedBackend, cfg: DictConfig, run: RealRun, *, is_named: bool
) -> SimulatedBackend:
    """Return `backend` with the run's link unless the hardware is named, and its replicas."""
    hardware = backend.hardware
    if run.link is not None and not is_named:
        rate, latency = run.link
        hardware = replace(hardware, link_bytes_per_second=rate, link_latency=latency)
        hardware = replace(hardware, link_efficiency=1.0)
        backend = replace(backend, hardware=hardware)
    replicas = shared_experts(cfg, run)
    if replicas is None:
        return backend
    # Replicas in lockstep pad their batches themselves, all to the size of the fullest.
    backend = replace(backend, host=replace(backend.host, graphs=None))
    return LockstepBackend(**vars(backend), sharing=replicas)


def shared_experts(cfg: DictConfig, run: RealRun) -> Lockstep | None:
    """Return the replicas of the run's server, which share experts; None: it has one engine."""
    num_replicas = run.settings.stated.get("cluster.num", 1)
    if num_replicas == 1:
        return None
    captured = max(CudaGraphs(**_graphs_of_run(cfg, run)).captured, default=0)
    return Lockstep(num=num_replicas, graph_tokens=captured)


def num_blocks(
    cfg: DictConfig, run: RealRun, backend: SimulatedBackend, spec: ModelSpec, num_sequences: int
) -> int:
    """Return the stated number, else what a server of the run's version leaves to a cache."""
    if isinstance(cfg.cache.num_blocks, int):
        number = int(cfg.cache.num_blocks)
        logged = run.settings.stated.get(LOGGED_CACHE)
        if logged is None or number != run.settings.num_blocks:
            return number
        window = backend.window_in_cache(spec, None)
        return _logged_blocks(cfg, logged, spec, window, number)
    held_back = NULL_BLOCKS
    if run.policy in (CHUNKED_V0, WHOLE_PROMPTS_V0):
        held_back = 0
    num_bytes = run.settings.stated.get(CACHE_BYTES)
    if num_bytes is not None:
        return backend.blocks_in(spec, cfg.cache.block_size, num_bytes) - held_back
    policy: Policy = build(cfg.policy, Policy)
    longest = cfg.max_model_len or spec.max_position
    setup = setup_of(policy, num_sequences, longest, memory_share(cfg))
    if server_of(run) == "vllm":
        setup = replace(setup, rule=vllm_memory(run.version))
    return backend.kv_blocks(spec, cfg.cache.block_size, setup) - held_back


def _logged_blocks(
    cfg: DictConfig,
    logged: LoggedCache,
    spec: ModelSpec,
    window: CachedWindow | None,
    number: int,
) -> int:
    """Return the blocks of a cache that vLLM logs in tokens: of a model with windows, groups of
    layers share them, each of which has its own for a token (`CachedWindow`).
    """
    if window is None or window.share == 0:
        return number
    block_size = cfg.cache.block_size
    if not logged.is_of_longest:
        return int(logged.tokens // block_size * (1 + window.share)) - NULL_BLOCKS
    longest = cfg.max_model_len or spec.max_position
    # By vLLM's rule a window holds the chunk that is computed beside what its first token sees, and
    # a block more where that does not begin with one.
    chunk = cfg.chunk or 0
    window_tokens = min(window.window.size - 1 + chunk, longest)
    window_blocks = math.ceil(window_tokens / block_size) + 1
    blocks_of_all = math.ceil(longest / block_size)  # of layers that see the whole context
    blocks_of_longest = blocks_of_all + math.ceil(window.share * window_blocks)
    num_longest = logged.tokens / longest  # sequences of the largest length that fit
    return int(num_longest * blocks_of_longest) - NULL_BLOCKS


def with_host_of_stages(cfg: DictConfig, typed: DictConfig) -> DictConfig:
    """Return `cfg` without a host where a pipeline has none, unless the user names one."""
    if cfg.executor.pipeline_parallel == 1 or typed.host.name != AUTO:
        return cfg
    files = option_files("host")
    host = _with_typed_graphs(read_option("host", files[NO_HOST.name]), typed)
    return with_settings(cfg, {"host": host})


def with_host_of_degrees(
    cfg: DictConfig, run: RealRun, as_run: DictConfig, typed: DictConfig
) -> DictConfig:
    """Return `cfg` with the host of its own devices, where they are split otherwise than `as_run`,
    unless the user names a host.
    """
    names = ("tensor_parallel", "pipeline_parallel")
    is_same = all(cfg.executor[name] == as_run.executor[name] for name in names)
    if is_same or typed.host.name != AUTO:
        return cfg
    host = _host(run, is_on_several=_is_on_several(cfg.executor.tensor_parallel))
    # The graphs are those that the run's own budget and sequences have captured.
    with_host = with_graphs(with_settings(as_run, {"host": host}), run)
    host = _with_typed_graphs(with_host.host, typed)
    return with_host_of_stages(with_settings(cfg, {"host": host}), typed)


def without_unknown_weights(
    cfg: DictConfig, run: RealRun, *, is_named: bool
) -> tuple[DictConfig, list[str]]:
    """Return `cfg` with weights of the dtype where the cost model has none of the stated type, and
    a note of that.
    """
    if "executor.weights" not in run.settings.stated:
        return cfg, []
    try:
        backend, spec = devices(cfg, run, is_named=is_named)
        if spec.quantisation is not None:  # by its config.json
            return with_settings(cfg, {"executor.weights": "auto"}), []
        backend.check(spec, 0)
    except UserError as error:
        plain = with_settings(cfg, {"executor.weights": "auto"})
        backend, spec = devices(plain, run, is_named=is_named)
        try:
            backend.check(spec, 0)
        except UserError:
            raise error from None  # no weights' fault, such as of too few devices
        return plain, [f"not simulated: executor.weights={cfg.executor.weights} ({error})"]
    return cfg, []


def without_idle_threshold(cfg: DictConfig, run: RealRun) -> DictConfig:
    """Return `cfg` without a limit of long prompts that none of the run reaches."""
    name = "long_prefill_token_threshold"
    longest = cfg.max_model_len or run.longest
    if name not in cfg.policy or cfg.policy[name] < longest:
        return cfg
    return with_settings(cfg, {f"policy.{name}": 0})


def with_server_defaults(
    cfg: DictConfig, run: RealRun, *, is_named: bool
) -> tuple[DictConfig, list[str]]:
    """Return `cfg` with the server's default budget and sequences where nothing states them, and
    what was assumed.
    """
    if cfg.chunk is not None and cfg.batch is not None:
        return cfg, []
    policy_class: Any = class_of(cfg, "policy")
    system = policy_class.system
    if system is None:
        raise UserError(
            f"{run.source} does not state the server's token budget and sequences; add "
            "task.chunk=TOKENS task.batch=SEQUENCES"
        )
    backend, spec = devices(cfg, run, is_named=is_named)
    device = backend.serving_device
    assumed = []
    if cfg.chunk is None:
        cfg = with_settings(cfg, {"chunk": system.token_budget(device)})
        assumed.append(f"chunk={cfg.chunk}")
    if cfg.batch is None:
        longest = cfg.max_model_len or spec.max_position
        # Where the number depends on the cache, the cache does not depend on the number.
        limit = system.num_sequences(device, CacheRoom(0, longest))
        blocks = num_blocks(cfg, run, backend, spec, limit)
        room = CacheRoom(blocks * cfg.cache.block_size, longest)
        # A batch has a token for each sequence, in servers as here.
        number = min(system.num_sequences(device, room), cfg.chunk)
        cfg = with_settings(cfg, {"batch": number})
        assumed.append(f"batch={cfg.batch}")
    sizes = " and ".join(assumed)
    return cfg, [f"{sizes} by default of {system.name}"]


def with_graphs(cfg: DictConfig, run: RealRun) -> DictConfig:
    """Return `cfg` with the CUDA graphs of the run's server, where its host has any."""
    if cfg.host.get("graphs") is None:
        return cfg
    settings = {}
    for name, value in _graphs_of_run(cfg, run).items():
        settings[f"host.graphs.{name}"] = value
    return with_settings(cfg, settings)


def with_graphs_of_user(cfg: DictConfig, configured: DictConfig) -> DictConfig:
    """Return `cfg` with the CUDA graphs that the user names, if any. Raises UserError."""
    graphs = configured.host.get("graphs")
    if graphs is None:
        return cfg
    if graphs.mode is None:
        build(graphs, CudaGraphs)  # which refuses sizes without a mode
        return cfg
    if graphs.sizes is None and graphs.largest == CudaGraphs().largest:
        return with_settings(cfg, {"host.graphs.mode": graphs.mode})  # the run's sizes stay
    return with_settings(cfg, {"host": configured.host})


def _graphs_of_run(cfg: DictConfig, run: RealRun) -> dict[str, Any]:
    """Return the settings of `CudaGraphs` of the run's server: sizes up to by default twice the
    sequences, but at most the token budget.
    """
    stated = run.settings.stated
    mode = stated.get("host.graphs.mode", "full_and_piecewise")
    most_by_default = CudaGraphs().largest
    # Neither is known yet where the server's defaults are looked up.
    token_budget = cfg.chunk or most_by_default
    num_sequences = cfg.batch or most_by_default
    sizes = [size for size in stated.get("host.graphs.sizes", ()) if size <= token_budget]
    if sizes:
        return {"mode": mode, "sizes": sizes, "largest": most_by_default}
    default = min(2 * num_sequences, most_by_default)
    largest = min(stated.get("host.graphs.largest", default), token_budget)
    return {"mode": mode, "sizes": None, "largest": largest}

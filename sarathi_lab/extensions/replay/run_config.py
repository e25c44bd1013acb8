"""Configuration of a run as it was, composed step by step from what its files state, what the user
states of it and its server's defaults; and with what the user asks besides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, class_of, option_files
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
from sarathi_lab.extensions.replay.first_engine import CHUNKED_V0, WHOLE_PROMPTS_V0
from sarathi_lab.extensions.replay.names import (
    ModelName,
    has_size,
    is_hub_id,
    names_of_model,
)
from sarathi_lab.extensions.replay.real_run import RealRun
from sarathi_lab.extensions.replay.server_arguments import POLICIES, LoggedCache
from sarathi_lab.extensions.replay.settings import (
    GRAPHS_BY_DEFAULT,
    ReplaySettings,
    Settings,
    option,
    typed_settings,
    with_settings,
)
from sarathi_lab.model.checkpoint import resolve_model
from sarathi_lab.model.spec import DTYPE_BYTES, ModelSpec
from sarathi_lab.policy import Policy
from sarathi_lab.policy.systems import NULL_BLOCKS, setup_of, vllm_memory
from sarathi_lab.tasks.run_cache import memory_share

AHEAD = "vllm_async"  # the host of a vLLM whose scheduling ahead leaves the device waiting
AUTO = "auto"  # of hardware, host, model and dtype: as recorded in the run
Graphs = Mapping[str, Any]  # fields of CudaGraphs
GRAPHS = ("mode", "sizes", "largest")
MOST_BY_DEFAULT = CudaGraphs().largest  # tokens of a CUDA graph
LONG_PROMPTS = "policy.long_prefill_token_threshold"
WHOLE_PROMPTS = "policy.max_num_batched_tokens"  # which have room for the longest request


def server_of(run: RealRun) -> str:
    """Name the serving system, as the files of conf/host begin."""
    return run.policy if run.policy in POLICIES.values() else "vllm"


def names_model(cfg: DictConfig) -> bool:
    """Return whether the user names a model, and does not leave it to the run's files."""
    return "path" not in cfg.model or cfg.model.path is not None


class RunConfig:
    """The configuration of a run as it was, which each step completes.

    Attributes:
        cfg: The configuration so far.
        assumed: What nothing states.
        notes: Where other settings are from, and what is not simulated.
    """

    def __init__(self, user: DictConfig, run: RealRun, settings: ReplaySettings) -> None:
        """Begin with what the `user` has configured. Raises UserError for what no file of conf/
        stands for, and for a run without the sizes that its server has no defaults of.
        """
        self.cfg = user
        self.assumed = [*settings.assumed]
        self.notes = list[str]()
        self._user = user
        self._run = run
        self._stated = run.settings.stated
        self._settings = settings
        self._find_hardware()
        self._find_model()
        self._find_dtype()
        self._set({"policy": settings.policy, **settings.as_run})
        self.notes += settings.notes
        self._refuse_cache_of_other_model()
        self._find_host()
        # The cache depends on weights and lengths, and the sequences on the cache.
        self._refuse_unknown_weights()
        self._make_room_for_answered()
        self._take_server_defaults()
        self._limit_batch()
        self.cfg = with_graphs(self.cfg, graphs_of(self.cfg, run))
        self._drop_idle_threshold()

    def what_if(self) -> DictConfig:
        """Return the configuration with what the user asks besides."""
        as_run = self.cfg
        asked = self._settings.config_what_if(self._user, as_run)
        is_split = False
        for degree in ("tensor_parallel", "pipeline_parallel"):
            if asked.executor[degree] != as_run.executor[degree]:
                is_split = True
        if is_split and self._user.host.name == AUTO:
            asked = with_settings(asked, {"host": host_of(asked, self._run)})
            # Graphs are those that the run's own budget and sequences have captured.
            asked = with_graphs(asked, graphs_of(as_run, self._run))
        asked = with_graphs(asked, self._graphs_of_user(asked))
        is_batch_assumed = "batch" not in {**self._stated, **self._settings.by_user}
        if is_batch_assumed and isinstance(asked.chunk, int):
            # As assumed: the server's default, but no more than its budget.
            batch = min(asked.batch, asked.chunk)
            asked = with_settings(asked, {"batch": batch})
        return asked

    def _set(self, settings: Settings) -> None:
        self.cfg = with_settings(self.cfg, settings)

    def _note_named(self, name: str, value: object, stated: object) -> None:
        self.notes.append(f"{name}={value} as you state; the file states {stated}")

    def _find_hardware(self) -> None:
        run = self._run
        user = self._user.hardware
        typed = typed_settings(self._user)
        names_tables = "hardware.tables" in typed
        if user.name == AUTO:
            names_tables = user.tables is not None
            hardware = matching_option("hardware", run.hardware, run)
            if names_tables:
                hardware = with_settings(hardware, {"tables": user.tables})
            self._set({"hardware": hardware})
        elif run.hardware and not stands_for("hardware", user.name, run.hardware):
            self._note_named("hardware", user.name, run.hardware)
        if names_tables and "executor.cost_model" not in typed:
            self._set({"executor.cost_model": "profiled"})

    def _find_model(self) -> None:
        names = names_of_model(self._stated)
        if not names_model(self._user):
            # A name with a size is of its model, whatever else clients call it by. The error for
            # names that no option fits has the surest one.
            told = [name for name in names if option_of("model", name.name) or has_size(name.name)]
            chosen = next(iter(told or names), ModelName(""))
            model = matching_option("model", chosen.name, self._run)
            positions = positions_of(chosen.name)
            if positions is not None:
                model = with_settings(model, {"max_position": positions})
            self._set({"model": model})
            if chosen != names[0]:
                option_of_name = option_of("model", chosen.name)
                self.notes.append(
                    f"model={option_of_name}, as the {chosen.kind} {chosen.name} tells"
                )
        elif not self._is_of_run(names):
            self._note_named("model", self._user.model.name, self._stated.get("model"))

    def _is_of_run(self, names: list[ModelName]) -> bool:
        """Return whether the model that the user names may be the one with these names."""
        name = self._user.model.get("name")
        if not name or name == AUTO or not names:
            return True
        return any(stands_for("model", name, named.name) for named in names)

    def _refuse_cache_of_other_model(self) -> None:
        """Leave out the run's number of blocks where the user names another model."""
        num_blocks = self._run.settings.num_blocks
        names = names_of_model(self._stated)
        # A model of no option's name, as of one that was trained further, has the named shapes.
        is_option = any(option_of("model", named.name) for named in names)
        if num_blocks is None or not names_model(self._user):
            return
        if is_option and not self._is_of_run(names):
            self.notes.append(
                f"the file's cache of {num_blocks} blocks is of another model, and not taken"
            )
            self._set({"cache.num_blocks": self._settings.by_user.get("cache.num_blocks")})

    def _find_dtype(self) -> None:
        stated = self._stated.get("dtype", AUTO)
        if self._user.dtype == AUTO and stated != AUTO:
            if stated not in DTYPE_BYTES:
                raise UserError(
                    f"{self._run.source}: dtype={stated} can't be simulated; add dtype=bfloat16"
                )
            self._set({"dtype": stated})
        elif stated not in (AUTO, self._user.dtype):
            self._note_named("dtype", self._user.dtype, stated)

    def _find_host(self) -> None:
        name = self._user.host.name
        overlaps = self._stated.get("host.overlaps", self._user.host.get("overlaps"))
        if name == AUTO:
            host = host_of(self.cfg, self._run)
            self._set({"host": host})
            if host.name == NO_HOST.name:
                self.notes.append("not simulated: the host's time in a pipeline")
            elif not self._run.version:
                self.assumed.insert(0, f"host={host.name}")
        elif name != NO_HOST.name and self._user.host.overlaps != overlaps:
            self._note_named("host", name, f"async_scheduling={overlaps}")

    def _refuse_unknown_weights(self) -> None:
        """Take weights of the dtype where the cost model has none of the stated type."""
        if "executor.weights" not in self._stated:
            return
        with_stated = self.cfg
        try:
            backend, spec = devices(with_stated, self._run)
            if spec.quantisation is None:
                backend.check(spec, 0)
                return
            self._set({"executor.weights": "auto"})  # by its config.json
        except UserError as error:
            self._set({"executor.weights": "auto"})
            backend, spec = devices(self.cfg, self._run)
            try:
                backend.check(spec, 0)
            except UserError:
                raise error from None  # no weights' fault, such as of too few devices
            weights = with_stated.executor.weights
            self.notes.append(f"not simulated: executor.weights={weights} ({error})")

    def _make_room_for_answered(self) -> None:
        """Make room for the longest request, which the server has answered: clients and servers
        count a prompt's template differently.
        """
        longest = self._run.longest
        stated_length = self._stated.get("max_model_len")
        if stated_length is None or stated_length >= longest:
            return
        note = (
            f"requests have up to {longest} tokens, more than max_model_len={stated_length}: "
            f"{longest} is taken"
        )
        self._set({"max_model_len": longest})
        if 0 < (self._stated.get(WHOLE_PROMPTS) or 0) < longest:
            self._set({WHOLE_PROMPTS: longest, "chunk": longest})
            note += ", and for the budget of whole prompts"
        self.notes.append(note)

    def _take_server_defaults(self) -> None:
        """Take the server's default budget and sequences where nothing states them."""
        cfg = self.cfg
        if cfg.chunk is not None and cfg.batch is not None:
            return
        system = cast("type[Policy]", class_of(cfg, "policy")).system
        if system is None:
            raise UserError(
                f"{self._run.source} does not state the server's token budget and sequences; add "
                "task.chunk=TOKENS task.batch=SEQUENCES"
            )
        backend, spec = devices(cfg, self._run)
        device = backend.serving_device
        sizes = []
        if cfg.chunk is None:
            self._set({"chunk": system.token_budget(device)})
            sizes.append(f"chunk={self.cfg.chunk}")
        if cfg.batch is None:
            longest = cfg.max_model_len or spec.max_position
            # Where the number depends on the cache, the cache does not depend on the number.
            limit = system.num_sequences(device, CacheRoom(0, longest))
            blocks = num_blocks(self.cfg, self._run, backend, spec, limit)
            room = CacheRoom(blocks * cfg.cache.block_size, longest)
            # A batch has a token for each sequence, in servers as here.
            number = min(system.num_sequences(device, room), self.cfg.chunk)
            self._set({"batch": number})
            sizes.append(f"batch={number}")
        self.assumed.append(f"{' and '.join(sizes)} by default of {system.name}")

    def _limit_batch(self) -> None:
        """Leave out sequences above the budget, as a batch has a token for each of them here."""
        batch = self.cfg.batch
        chunk = self.cfg.chunk
        if "batch" not in self._settings.by_user and batch > chunk:
            self.notes.append(f"not simulated: batch={batch} above chunk={chunk}")
            self._set({"batch": chunk})

    def _drop_idle_threshold(self) -> None:
        """Drop a limit of long prompts that none of the run reaches."""
        longest = self.cfg.max_model_len or self._run.longest
        threshold = OmegaConf.select(self.cfg, LONG_PROMPTS)
        if threshold is not None and threshold >= longest:
            self._set({LONG_PROMPTS: 0})

    def _graphs_of_user(self, cfg: DictConfig) -> Graphs:
        """Return the settings of CUDA graphs that the user states. Raises UserError for a host that
        has none.
        """
        graphs = dict[str, object]()
        for name, value in (self._user.host.get("graphs") or {}).items():
            if name in GRAPHS and value not in (None, MOST_BY_DEFAULT):
                graphs[name] = value
        if graphs and cfg.host.get("graphs") is None:
            name = next(iter(graphs))
            raise UserError(
                f"host.graphs.{name}={graphs[name]} has no effect on host={cfg.host.name}, that of "
                "the run, whose launches take no time; drop it"
            )
        if "sizes" in graphs or "largest" in graphs:  # each stands for both
            graphs = {
                "sizes": None,
                "largest": MOST_BY_DEFAULT,
                **graphs,
            }
        return graphs


def matching_option(group: str, name: str | None, run: RealRun) -> DictConfig:
    """Read the option that stands for `name`. Raises UserError."""
    nearest = nearest_option(group, name or "")
    path_of_model = ""
    if group == "model":
        # Its shapes are in its config.json.
        model = str(run.settings.stated.get("model", ""))
        path_of_model = "model.path=FOLDER with its config.json, or "
        if is_hub_id(model):
            path_of_model = f"model.path={model}, whose config.json is fetched, or "
    if not nearest.option:
        unknown = name or "is not named and"
        raise UserError(
            f"{run.source}: {group} {unknown} has no file in conf/{group}; add "
            f"{path_of_model}{group}=NAME of those that --help {group} lists"
        )
    if nearest.differences:
        remedy = f"{path_of_model}model={nearest.option} if it has its shapes and weights"
        if group == "hardware":
            remedy = f"{datasheet_of_card(nearest)}, or hardware={nearest.option} if it is one"
        raise UserError(
            f"{run.source}: {group} {name} has no file in conf/{group} "
            f'(by "{" ".join(nearest.differences)}" it may be another than {nearest.option}); add '
            f"{remedy}"
        )
    return option(group, nearest.option)


def host_of(cfg: DictConfig, run: RealRun) -> DictConfig:
    """Choose the host of the server's version or the nearest one, with the run's `overlaps`; none
    for a pipeline, of which none was measured.

    A vLLM that schedules ahead has a host of its own where that leaves the device waiting: on
    several devices, whose workers are processes, and in versions that do it only if asked to.
    """
    if cfg.executor.pipeline_parallel != 1:
        return option("host", NO_HOST.name)
    # Of a version: one with a front end (vllm_http) is the user's to name.
    begin = f"{server_of(run)}_"
    names = [name for name in option_files("host") if name.startswith(begin) and _numbers(name)]
    nearest = max(names, key=_numbers)  # the newest, where the version is not known
    if run.version:
        nearest = min(names, key=lambda name: _distance(run.version, name))
    host = option("host", nearest)
    overlaps = run.settings.stated.get("host.overlaps", host.overlaps)
    degree = cfg.executor.tensor_parallel  # one that is no number is refused later
    is_on_several = isinstance(degree, int) and degree > 1
    if overlaps and (is_on_several or not host.overlaps) and server_of(run) == "vllm":
        return option("host", AHEAD)
    host.overlaps = overlaps
    return host


def _distance(version: str, host: str) -> list[int]:
    """Return by how much a host's version differs from another, in the major number first."""
    distance = []
    for number, number_of_host in zip(_numbers(version), _numbers(host), strict=False):
        distance.append(abs(number - number_of_host))
    return distance


def is_of_other_version(host: str, version: str) -> bool:
    """Return whether a host is that of another version of the server, both of which are known."""
    numbers = _numbers(host)
    return bool(numbers) and bool(version) and numbers != _numbers(version)


def _numbers(version: str) -> list[int]:
    """Return the major and minor number of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def graphs_of(cfg: DictConfig, run: RealRun) -> Graphs:
    """Return the CUDA graphs of the run's server: sizes up to by default twice the sequences, but
    at most the token budget.
    """
    stated = run.settings.stated
    mode = stated.get("host.graphs.mode", GRAPHS_BY_DEFAULT)
    # Neither is known yet where the server's defaults are looked up.
    token_budget = cfg.chunk or MOST_BY_DEFAULT
    num_sequences = cfg.batch or MOST_BY_DEFAULT
    sizes = [size for size in stated.get("host.graphs.sizes", ()) if size <= token_budget]
    if sizes:
        return {
            "mode": mode,
            "sizes": sizes,
            "largest": MOST_BY_DEFAULT,
        }
    by_default = min(2 * num_sequences, MOST_BY_DEFAULT)
    largest = min(stated.get("host.graphs.largest", by_default), token_budget)
    return {
        "mode": mode,
        "sizes": None,
        "largest": largest,
    }


def with_graphs(cfg: DictConfig, graphs: Graphs) -> DictConfig:
    """Return `cfg` with CUDA graphs, where its host has any."""
    if cfg.host.get("graphs") is None:
        return cfg
    settings = {}
    for name, value in graphs.items():
        settings[f"host.graphs.{name}"] = value
    return with_settings(cfg, settings)


def devices(cfg: DictConfig, run: RealRun) -> tuple[SimulatedBackend, ModelSpec]:
    """Make the run's devices, with its link and its replicas, and its model's shapes."""
    backend: SimulatedBackend = build(cfg.executor, SimulatedBackend)
    if run.link is not None:
        rate, latency = run.link
        hardware = replace(
            backend.hardware,
            link_bytes_per_second=rate,
            link_latency=latency,
            link_efficiency=1.0,
        )
        backend = replace(backend, hardware=hardware)
    replicas = shared_experts(cfg, run)
    if replicas is not None:
        # Replicas in lockstep pad their batches themselves, all to the size of the fullest.
        backend = replace(backend, host=replace(backend.host, graphs=None))
        backend = LockstepBackend(**vars(backend), sharing=replicas)
    spec, _ = resolve_model(cfg, backend)
    return backend, spec


def shared_experts(cfg: DictConfig, run: RealRun) -> Lockstep | None:
    """Return the replicas of the run's server, which share experts; None: it has one engine."""
    num_replicas = run.settings.stated.get("cluster.num", 1)
    if num_replicas == 1:
        return None
    captured = max(CudaGraphs(**graphs_of(cfg, run)).captured, default=0)
    return Lockstep(num=num_replicas, graph_tokens=captured)


def num_blocks(
    cfg: DictConfig,
    run: RealRun,
    backend: SimulatedBackend,
    spec: ModelSpec,
    num_sequences: int,
) -> int:
    """Return the stated number, else what a server of the run's version leaves to a cache."""
    stated = run.settings.stated
    number = cfg.cache.num_blocks
    if isinstance(number, int):
        if LOGGED_CACHE in stated and number == run.settings.num_blocks:
            return _logged_blocks(cfg, stated[LOGGED_CACHE], backend, spec)
        return number
    held_back = NULL_BLOCKS
    if run.policy in (CHUNKED_V0, WHOLE_PROMPTS_V0):
        held_back = 0
    if CACHE_BYTES in stated:
        return backend.blocks_in(spec, cfg.cache.block_size, stated[CACHE_BYTES]) - held_back
    policy: Policy = build(cfg.policy, Policy)
    longest = cfg.max_model_len or spec.max_position
    setup = setup_of(policy, num_sequences, longest, memory_share(cfg))
    if server_of(run) == "vllm":
        setup = replace(setup, rule=vllm_memory(run.version))
    return backend.kv_blocks(spec, cfg.cache.block_size, setup) - held_back


def _logged_blocks(
    cfg: DictConfig,
    logged: LoggedCache,
    backend: SimulatedBackend,
    spec: ModelSpec,
) -> int:
    """Return the blocks of a cache that vLLM logs in tokens: of a model with windows, groups of
    layers share them, each of which has its own for a token (`CachedWindow`).
    """
    window = backend.window_in_cache(spec, None)
    if window is None or window.share == 0:
        return int(cfg.cache.num_blocks)
    block_size = cfg.cache.block_size
    if not logged.is_of_longest:
        return int(logged.tokens // block_size * (1 + window.share)) - NULL_BLOCKS
    longest = cfg.max_model_len or spec.max_position
    # By vLLM's rule a window holds the chunk that is computed beside what its first token sees, and
    # a block more where that does not begin with one.
    window_tokens = min(window.window.size - 1 + (cfg.chunk or 0), longest)
    window_blocks = math.ceil(window_tokens / block_size) + 1
    blocks_of_all = math.ceil(longest / block_size)  # of layers that see the whole context
    blocks_of_longest = blocks_of_all + math.ceil(window.share * window_blocks)
    num_longest = logged.tokens / longest  # sequences of the largest length that fit
    return int(num_longest * blocks_of_longest) - NULL_BLOCKS

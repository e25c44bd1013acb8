"""Which of vLLM's engine arguments a user may set (`executor.options`): those that its workers use.

Of vLLM only the workers run, under the lab's scheduler. What its scheduler, tokenizer and server
would do with an argument is not done, so that such an argument is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sarathi_lab.config.errors import UserError, suggestion
from sarathi_lab.executor.vllm import workers

SETTINGS = {  # of the lab, which set these arguments
    "async_scheduling": "executor.async_scheduling",
    "block_size": "cache.block_size",
    "dtype": "dtype",
    "enable_chunked_prefill": "policy",
    "enable_prefix_caching": "cache.prefix",
    "enforce_eager": "executor.eager",
    "kv_cache_dtype": "cache.dtype",
    "long_prefill_token_threshold": "policy.long_prefill_token_threshold",
    "max_model_len": "seq_len or the workload",
    "max_num_batched_tokens": "policy and chunk",
    "max_num_scheduled_tokens": "policy and chunk",
    "max_num_seqs": "batch",
    "model": "model.path",
    "num_gpu_blocks_override": "cache.num_blocks",
    "pipeline_parallel_size": "executor.pipeline_parallel",
    "prefill_schedule_interval": "policy.prefill_schedule_interval",
    "scheduler_cls": "policy",
    "scheduling_policy": "queue_order",
    "seed": "seed",
    "tensor_parallel_size": "executor.tensor_parallel",
    "watermark": "policy.watermark",
}
MERGED = ("hf_overrides",)  # of which the lab and a user set a part each
ABSENT = {  # by the beginning of arguments' names: what executor=vllm does not do
    "convert": "pooling",
    "data_parallel": "several engines (data parallel)",
    "dcp": "context parallel attention",
    "decode_context_parallel": "context parallel attention",
    "default_mm_loras": "LoRA",
    "ec_": "connectors",
    "enable_lora": "LoRA",
    "enable_tower_connector_lora": "LoRA",
    "fully_sharded_loras": "LoRA",
    "kv_events": "connectors",
    "kv_offloading": "swapping",
    "kv_transfer": "connectors",
    "lora": "LoRA",
    "max_cpu_loras": "LoRA",
    "max_lora": "LoRA",
    "pooler": "pooling",
    "prefill_context_parallel": "context parallel attention",
    "runner": "pooling (the model runner is executor.runner)",
    "spec_": "drafts",
    "specialize_active_lora": "LoRA",
    "speculative": "drafts",
}
OF_WORKERS = {
    # the model and its weights
    *("allow_deprecated_quantization", "code_revision", "config_format", "disable_cascade_attn"),
    *("disable_sliding_window", "download_dir", "hf_config_path", "hf_overrides", "hf_token"),
    *("ignore_patterns", "language_model_only", "limit_mm_per_prompt", "load_format"),
    *("max_parallel_loading_workers", "model_class_overrides", "model_impl"),
    *("model_loader_extra_config", "model_weights", "pt_load_map_location", "quantization"),
    *("quantization_config", "revision", "safetensors_load_strategy"),
    *("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads"),
    *("skip_mm_profiling", "trust_remote_code"),
    # memory
    *("calculate_kv_scales", "cpu_offload_gb", "cpu_offload_params", "enable_cumem_allocator"),
    *("gpu_memory_utilization", "kv_cache_dtype_skip_layers", "kv_cache_memory_bytes"),
    *("kv_sharing_fast_prefill", "offload_backend", "offload_group_size", "offload_num_in_group"),
    *("offload_params", "offload_prefetch_step"),
    # kernels, compilation and graphs
    *("attention_backend", "attention_config", "compilation_config", "cudagraph_capture_sizes"),
    *("enable_flashinfer_autotune", "ir_op_priority", "kernel_config", "linear_backend"),
    *("max_cudagraph_capture_size", "moe_backend", "monokernel", "optimization_level"),
    *("performance_mode", "sparse_indexer_topk_backend"),
    # several devices
    *("all2all_backend", "cpu_distributed_timeout_seconds", "disable_custom_all_reduce"),
    *("distributed_executor_backend", "distributed_timeout_seconds", "enable_expert_parallel"),
    *("enable_shm_tensor_arena", "expert_placement_strategy", "numa_bind", "numa_bind_cpus"),
    *("numa_bind_nodes", "worker_cls"),
    # for profilers
    *("enable_layerwise_nvtx_tracing", "ray_workers_use_nsight"),
}


def check_options(options: Mapping[str, object]) -> None:
    """Raise UserError for engine arguments that vLLM lacks, that the lab sets, or that no worker
    would use.
    """
    for name in options:
        reason = _refusal(name)
        if reason is not None:
            raise UserError(f"executor.options.{name} {reason}")


def _refusal(name: str) -> str | None:
    if name in SETTINGS:
        return f"is the lab's to set; use {SETTINGS[name]}"
    if name in workers.ALWAYS:
        return f"is {workers.ALWAYS[name]} in every run of the lab; drop it"
    names = workers.engine_arguments()
    if name not in names:
        return (
            f"is no engine argument of vLLM {workers.version()}{suggestion(name, names)}; "
            "`vllm serve --help=all` lists them"
        )
    for beginning, feature in ABSENT.items():
        if name.startswith(beginning):
            return f"is of {feature}, which executor=vllm does not have; drop it"
    if name not in OF_WORKERS:
        return (
            "is of vLLM's scheduler, tokenizer or server, of which none runs here, so that it "
            "would change nothing; drop it"
        )
    return None


def check_overrides(options: Mapping[str, object], model_keys: Collection[str]) -> None:
    """Raise UserError for changes of a model's config.json (`hf_overrides`) that the lab reads
    elsewhere: those of `model_keys`.
    """
    for name in mapping_of("hf_overrides", options):
        if name in model_keys:
            raise UserError(
                f"executor.options.hf_overrides.{name} would give vLLM another model than the lab; "
                "change it by model.*, or in the config.json of model.path"
            )


def with_options(
    arguments: Mapping[str, object], options: Mapping[str, object]
) -> dict[str, object]:
    """Return `arguments` of the lab with a user's options. Raises UserError where they contradict
    each other.
    """
    merged = {**arguments, **options}
    for name in MERGED:
        if name in arguments and name in options:
            needed = mapping_of(name, arguments)
            stated = mapping_of(name, options)
            merged[name] = _merged(name, needed, stated)
    return merged


def _merged(
    name: str, needed: Mapping[str, object], stated: Mapping[str, object]
) -> dict[str, object]:
    for key, value in stated.items():
        if needed.get(key, value) != value:
            raise UserError(
                f"executor.options.{name}.{key}={value}, but this run needs {needed[key]}; drop it"
            )
    return {**stated, **needed}


def mapping_of(name: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the option `name`, empty if it is not stated. Raises UserError for no mapping."""
    stated = options.get(name)
    if stated is None:
        return {}
    if not isinstance(stated, Mapping):
        raise UserError(f"executor.options.{name}={stated} is no mapping; use {{NAME: VALUE}}")
    return stated

"""What a server of vLLM can't do under a policy of the lab, asked of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.policy import Policy
from sarathi_lab.executor.vllm.workers import NEWEST, release_of
from sarathi_lab.extensions.vllm_server.settings import policy_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OLDEST = (0, 31)  # the first version whose schedulers were run; NEWEST is the last
OF_POLICIES = {  # what policies have settings for, and vLLM's values without it
    "enable_chunked_prefill": True,
    "watermark": 0,
    "long_prefill_token_threshold": 0,
    "max_num_active_seqs": None,
    "prefill_schedule_interval": 1,
}


def version_caution(version: str) -> str | None:
    """Return a line of warning for a version newer than those tested, or built from sources.

    Raises:
        UserError: for an older one, whose schedulers differ.
    """
    release = release_of(version)
    if release is not None and release < OLDEST:
        raise UserError(f"a policy of the lab needs vLLM {_shown(OLDEST)} or newer, not {version}")
    if release is not None and release <= NEWEST:
        return None
    return (
        f"policies of the lab are tested with vLLM {_shown(OLDEST)} to {_shown(NEWEST)}, not "
        f"{version}; a batch that differs from the policy's ends the server"
    )


def _shown(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def check_config(config: VllmConfig, is_async: bool) -> None:
    """Raise UserError for what a policy of the lab has no part in.

    Args:
        config: vLLM's configuration (`VllmConfig`), whose `additional_config` names the policy.
        is_async: Whether the scheduler is the one for async scheduling.
    """
    for feature, is_used in _features(config, is_async).items():
        if is_used:
            raise UserError(f"a policy of the lab can't run with {feature}; start vLLM without")
    scheduling = config.scheduler_config
    max_model_len = config.model_config.max_model_len
    settings = config.additional_config.get("sarathi_lab", {})
    policy = policy_of(settings, scheduling.max_num_seqs, max_model_len)
    most_tokens = scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens
    require_room(policy, most_tokens, scheduling.max_num_seqs, max_model_len)


def _features(config: VllmConfig, is_async: bool) -> dict[str, bool]:
    """Return what vLLM can do and a policy of the lab can't, and whether this server does it."""
    scheduling = config.scheduler_config
    model = config.model_config
    has_connector = config.kv_transfer_config is not None or config.ec_transfer_config is not None
    reads_more_than_text = model.is_encoder_decoder or model.supports_multimodal_inputs
    features = {
        "prefix caching (--no-enable-prefix-caching)": config.cache_config.enable_prefix_caching,
        "KV connectors": has_connector,
        "drafts": config.speculative_config is not None,
        "pipeline stages": config.parallel_config.pipeline_parallel_size > 1,
        "data parallel engines": config.parallel_config.data_parallel_size > 1,
        f"async_scheduling={scheduling.async_scheduling} and this class (take the other)": (
            is_async != bool(scheduling.async_scheduling)
        ),
        "LoRA": config.lora_config is not None,
        "encoders (--language-model-only)": reads_more_than_text,
        "pooling": model.runner_type == "pooling",
        "layers with states": model.has_inner_state,
    }
    for name, default in OF_POLICIES.items():
        features[name] = getattr(scheduling, name) != default
    return features


def require_room(policy: Policy, most_tokens: int, batch_size: int, max_model_len: int) -> None:
    """Raise UserError if a batch of `policy` may have more than `most_tokens` tokens."""
    cuts_prompts = policy.budget_field is not None
    num_beside = 0  # decodes beside prompts, which the budget does not bound
    if policy.decodes_on_top or not cuts_prompts:
        num_beside = batch_size
    # Without a budget a batch may have the longest prompt as a whole.
    needed = (policy.budget or max_model_len) + num_beside
    if needed > most_tokens:
        raise UserError(
            f"--max-num-batched-tokens={most_tokens} is below the {needed} tokens that a "
            f"batch of policy={policy.name} may have (max_model_len={max_model_len}, "
            f"{policy.budget_field}={policy.budget}); raise it, or lower these"
        )

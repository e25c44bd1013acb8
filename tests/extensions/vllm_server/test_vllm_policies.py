"""The policy of vLLM's server by its settings, and what its batches may be; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.request import Request
from sarathi_lab.extensions.vllm_server import Decider, policy_of
from sarathi_lab.extensions.vllm_server.limits import check_config, version_caution
from sarathi_lab.policy import Orca, Sarathi, VllmV1


def decider(policy, most_tokens: int, **sizes) -> Decider:
    sizes = {"batch_size": 4, "max_model_len": 40, "is_async": False, **sizes}
    return Decider(policy, BlockManager(100, 4), most_tokens=most_tokens, **sizes)


def served(found: Decider, *requests: tuple[int, int]) -> str:
    """Batches, until all requests are finished, as their tokens by request."""
    sequences, shown = [found.add(Request(i, 0.0, *one)) for i, one in enumerate(requests)], []
    while found.has_work:
        batch = found.schedule(0.0)
        shown.append(
            " ".join(f"{c.sequence.request.request_id}:{c.num_tokens}" for c in batch.chunks)
        )
        found.advance(batch)
        found.update(StepResult(batch, 0.0, 1.0, []))
        for one in [one for one in sequences if one.is_finished and one.is_running]:
            assert one.block_ids  # until vLLM has its output
            found.drop(one)
    assert found.blocks.num_free == 100
    return " | ".join(shown)


def test_settings_are_those_of_the_command_line():
    assert policy_of({"policy": "sarathi", "chunk": 512}, 8, 64) == Sarathi(chunk=512)
    settings = {"policy": "sarathi", "chunk": 64, "policy.max_prefills": None}
    assert policy_of(settings, 8, 64) == Sarathi(chunk=64, max_prefills=None)
    assert policy_of({"policy": "orca"}, 8, 64) == Orca()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "None is not a policy of"),
        ({"policy": "sarati"}, "(did you mean sarathi?); use one of"),
        (
            {"policy": "sarathi", "chnk": 512},
            "chnk is not a setting of policy=sarathi (did you mean chunk?); use one of",
        ),
        ({"policy": "orca", "chunk": 512}, "chunk is not a setting of policy=orca"),
        ({"policy": "slo_budget"}, "needs what a server of vLLM lacks"),
    ],
)
def test_other_settings_are_refused_in_a_line(settings, message):
    with pytest.raises(UserError) as error:
        policy_of(settings, 8, 64)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", [Orca(), VllmV1(44)])
def test_a_batch_that_may_be_too_large_is_refused(policy):
    with pytest.raises(UserError, match=r"--max-num-batched-tokens=43 .* raise it, or lower"):
        decider(policy, 43)


def test_batches_end_where_vllms_do():
    # Whole prompts wait for one another, beside a token for each that runs; a policy that cuts
    # prompts cuts them there where it would not.
    assert served(decider(Orca(None), 44), (30, 2), (10, 2), (10, 1)) == (
        "0:30 1:10 | 0:1 1:1 2:10"
    )
    assert served(decider(Sarathi(8), 20), (30, 2), (3, 1)) == "0:20 | 0:10 | 0:1 1:3"


def test_an_evicted_sequence_returns_later_if_its_token_is_on_its_way():
    found = decider(Sarathi(8), 40, is_async=True)
    sequence = found.add(Request(0, 0.0, 3, 2))
    found.advance(found.schedule(0.0))
    found.preempt(sequence)
    assert found.schedule(0.0) is None
    found.evicted.clear()
    found.admits = False
    assert found.schedule(0.0) is None
    found.admits = True
    assert [chunk.num_tokens for chunk in found.schedule(0.0).chunks] == [4]


def config_of(part: str = "", **settings: Any) -> SimpleNamespace:
    """A configuration of vLLM that a policy runs with, but for `settings` of a part."""
    parts: dict[str, Any] = {
        "scheduler_config": {
            "async_scheduling": False,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 300,
            "max_num_scheduled_tokens": None,
            "enable_chunked_prefill": True,
            "watermark": 0,
            "long_prefill_token_threshold": 0,
            "max_num_active_seqs": None,
            "prefill_schedule_interval": 1,
        },
        "model_config": {
            "max_model_len": 64,
            "is_encoder_decoder": False,
            "supports_multimodal_inputs": False,
            "runner_type": "generate",
            "has_inner_state": False,
        },
        "cache_config": {"enable_prefix_caching": False},
        "parallel_config": {"pipeline_parallel_size": 1, "data_parallel_size": 1},
    }
    if part:
        parts[part].update(settings)
    features = ("kv_transfer_config", "ec_transfer_config", "speculative_config", "lora_config")
    config = SimpleNamespace(
        additional_config={"sarathi_lab": {"policy": "sarathi", "chunk": 16}},
        **dict.fromkeys(features),
        **{name: SimpleNamespace(**fields) for name, fields in parts.items()},
    )
    if not part:
        vars(config).update(settings)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("cache_config", enable_prefix_caching=True), "prefix caching"),
        (config_of("parallel_config", pipeline_parallel_size=2), "pipeline stages"),
        (config_of("parallel_config", data_parallel_size=2), "data parallel engines"),
        (config_of("model_config", supports_multimodal_inputs=True), "encoders"),
        (config_of("model_config", has_inner_state=True), "layers with states"),
        (config_of("model_config", runner_type="pooling"), "pooling"),
        (config_of("scheduler_config", watermark=0.1), "watermark"),
        (config_of("scheduler_config", async_scheduling=True), "async_scheduling=True and this"),
        (config_of("scheduler_config", max_num_batched_tokens=8), "is below the 16 tokens"),
        (config_of(kv_transfer_config="a connector"), "KV connectors"),
        (config_of(speculative_config="ngram"), "drafts"),
        (config_of(lora_config="an adapter"), "LoRA"),
        (config_of(additional_config={}), 'not a policy of "sarathi_lab"'),
    ],
)
def test_a_configuration_is_refused_without_a_server(config, message):
    check_config(config_of(), is_async=False)
    with pytest.raises(UserError, match=message):
        check_config(config, is_async=False)


def test_versions():
    for version in ("0.31.0", "0.32.0", "0.33.1rc2"):
        assert version_caution(version) is None
    for version in ("0.34.0", "1.0.0", "dev", "main.abc"):
        assert "tested with vLLM 0.31 to 0.33" in version_caution(version)
    with pytest.raises(UserError, match=r"needs vLLM 0.31 or newer, not 0.30.1"):
        version_caution("0.30.1")

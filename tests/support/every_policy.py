"""Every policy with one or more settings of its parameters, small enough for queues of short
requests.
"""

from __future__ import annotations

from sarathi_lab.extensions.after_sarathi import (
    DynamicChunks,
    Lprs,
    Niyama,
    PPas,
    Ranked,
    SlidingServe,
    SloBudget,
)
from sarathi_lab.extensions.layered import LayeredPrefill
from sarathi_lab.policy import (
    TGI,
    Ascend,
    AscendDynamic,
    AscendV09,
    ChunkedOnly,
    FastDeploy,
    LightLLM,
    LlamaCpp,
    LMDeploy,
    LMDeployPytorch,
    NanoVllm,
    OpenVINO,
    Orca,
    PrefillFirst,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SarathiServeDynamic,
    SGLang,
    SplitFuse,
    TensorRTLLM,
    TransformersFIFO,
    TransformersPrefillFirst,
    VllmV0Chunked,
    VllmV1,
)
from sarathi_lab.policy.ascend import ProfileTable, Row

MAX_LEN = 40
# 8 tokens beside a decode, 6 beside up to two, nothing beside more.
TABLE = ProfileTable((Row(8, 1, 64, 10.0), Row(6, 2, 64, 10.0), Row(12, 4, 64, 20.0)))
# Of an adaptive budget: an iteration of 8 tokens takes 1.2 seconds.
TIMED = {"min_num_batched_tokens": 2, "step": 3, "times": (0.4, 0.1, 0.0)}
POLICIES = {
    "request_level": RequestLevel(),
    "request_level_prompt": RequestLevel(reserve="prompt"),
    "orca": Orca(),
    "orca_unlimited_prompt": Orca(max_prefills=None, reserve="prompt"),
    "prefill_first": PrefillFirst(max_num_batched_tokens=MAX_LEN, watermark=0.05),
    "prefill_first_delay": PrefillFirst(delay_factor=1.5),
    "sarathi": Sarathi(chunk=8, min_decodes=0),
    "sarathi_full_house": Sarathi(chunk=8, min_decodes=3, reserve="prompt"),
    "sarathi_paper": Sarathi(chunk=8),
    "sarathi_many_prompt": Sarathi(chunk=8, max_prefills=None, reserve="prompt"),
    "sarathi_serve": SarathiServe(chunk=8),
    "sarathi_serve_chunk": SarathiServe(chunk=8, reserve="chunk", watermark=0.0),
    "sglang": SGLang(chunked_prefill_size=8),
    "sglang_mixed_pages": SGLang(chunked_prefill_size=8, page_size=4, enable_mixed_chunk=True),
    "sglang_bold": SGLang(chunked_prefill_size=8, init_new_token_ratio=0.0, retract_decode_steps=2),
    "trtllm": TensorRTLLM(max_num_tokens=8, chunk_unit_size=4),
    "trtllm_turns_pausing": TensorRTLLM(8, "EQUAL_PROGRESS", 4, "MAX_UTILIZATION"),
    "trtllm_forced_static": TensorRTLLM(8, "FORCE_CHUNK", 4, "STATIC_BATCH"),
    "tgi": TGI(max_batch_prefill_tokens=8),
    "tgi_whole": TGI(MAX_LEN, chunking=False, max_waiting_tokens=3),
    "transformers_fifo": TransformersFIFO(max_batch_tokens=8),
    "transformers_prefill_first": TransformersPrefillFirst(8, safety_margin=0.3),
    "lightllm": LightLLM(batch_max_tokens=8),
    "lmdeploy": LMDeploy(max_prefill_token_num=6),
    "lmdeploy_pytorch": LMDeployPytorch(max_prefill_token_num=8),
    "layered_prefill": LayeredPrefill(chunk=4),
    "layered_prefill_cut": LayeredPrefill(8, max_num_batched_tokens=12, groups=3, reserve="chunk"),
    "openvino": OpenVINO(max_num_batched_tokens=8),
    "llama_cpp": LlamaCpp(n_ubatch=8, n_batch=20),
    "chunked_only": ChunkedOnly(chunk_size=8),
    "sarathi_serve_dynamic": SarathiServeDynamic(64, 32, chunk_schedule_max_tokens=20),
    "splitfuse": SplitFuse(max_ragged_batch_size=8),
    "vllm_v0_chunked": VllmV0Chunked(max_num_batched_tokens=8),
    "vllm_v0_chunked_partial": VllmV0Chunked(8, 3, 1, 6),
    "vllm_v1": VllmV1(max_num_batched_tokens=8),
    "vllm_v1_threshold": VllmV1(8, 3, scheduler_reserve_full_isl=False),
    "vllm_v1_whole": VllmV1(MAX_LEN, enable_chunked_prefill=False, watermark=0.1),
    "p_pas": PPas(max_num_batched_tokens=16),
    "nano_vllm": NanoVllm(max_num_batched_tokens=8),
    "fastdeploy": FastDeploy(max_num_batched_tokens=8),
    "fastdeploy_partial": FastDeploy(8, 3, 1, prealloc_dec_block_slot_num_threshold=2),
    "ascend_v0_9": AscendV09(max_num_batched_tokens=MAX_LEN),
    "ascend_long": Ascend(max_long_partial_prefills=1, long_prefill_token_threshold=5),
    "ascend_chunked": Ascend(256, enable_chunked_prefill=True, long_prefill_token_threshold=4),
    "ascend_dynamic": AscendDynamic(10, slo_limits_for_dynamic_batch=15, profile_table=TABLE),
    "ranked_ratio": Ranked(chunk=8),
    "ranked_shortest_chunk": Ranked(chunk=8, order="shortest", patience=4.0, reserve="chunk"),
    "ranked_slack": Ranked(chunk=8, order="slack", patience=2.0, seconds_per_token=0.125),
    "ranked_preflow": Ranked(chunk=8, order="preflow", patience=4.0, watermark=0.0),
    "ranked_short_first": Ranked(chunk=8, order="short_first", patience=6.0, short_len=6),
    "ranked_reserve": Ranked(chunk=8, order="fcfs", short_len=6, reserve_tokens=3),
    "dynamic_chunks": DynamicChunks(
        8, alignment=2, seconds_per_token=0.1, seconds_per_squared_token=0.01
    ),
    "slo_budget": SloBudget(10, **TIMED, tbt=1.2),
    "niyama": Niyama(10, **TIMED, ttft=8.0, tbt=1.2),
    "sliding_serve": SlidingServe(10, **TIMED, ttft=8.0, tbt=1.2),
    "lprs": Lprs(10, **TIMED, target_time=1.2),
}

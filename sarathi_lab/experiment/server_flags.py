"""A token budget as the flags of serving systems that chunk prompts, each system's rules kept.

The budget is `chunk` of the policies: tokens of one iteration, decodes included. Two rules are not
checks of the server but what its scheduler needs to move on: systems that cut prompts at whole
blocks run nothing of a prompt if fewer tokens than a block are left beside the decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from sarathi_lab.config.errors import UserError, require_int

ASCEND_UNIT = 256  # tokens; "at least 256 and a multiple of 256" in the source of that row


@dataclass(frozen=True)
class ServerFlag:
    """A server's settings: `flags` to type in order, and the tokens of one iteration they mean."""

    server: str
    flags: tuple[str, ...]
    effective_budget: int
    note: str
    source: str


@dataclass(frozen=True)
class Scenario:
    """Sequences of a batch, tokens of the longest sequence, and tokens of a cache page."""

    batch_size: int
    max_model_len: int
    page_size: int

    @property
    def num_decodes(self) -> int:
        """The most decodes beside a prompt: B - 1."""
        return self.batch_size - 1

    @property
    def all_tokens(self) -> int:
        """The most tokens of a batch: every sequence at full length."""
        return self.batch_size * self.max_model_len


Tokens = Callable[[Scenario], int]
BATCH: Tokens = attrgetter("batch_size")
PAGE: Tokens = attrgetter("page_size")
ALL_TOKENS: Tokens = attrgetter("all_tokens")


def _page_and_decodes(load: Scenario) -> int:
    return load.page_size + load.num_decodes


@dataclass(frozen=True)
class Server:
    """A server's flag templates, and the rule of its budget as bounds and a unit (tokens).

    `rule` states the bounds (inclusive) in words, `remark` what the flag counts, `source` where
    spelling and rule were read; these and `flags` may name `budget` and the fields of `load`.
    """

    name: str
    flags: tuple[str, ...]
    rule: str
    remark: str
    source: str
    minimum: Tokens
    unit: Tokens = lambda load: 1
    maximum: Tokens | None = None

    def budget(self, wanted: int, load: Scenario) -> int:
        """The least budget from `wanted` tokens on that the rule allows, or the most it allows."""
        unit = self.unit(load)
        budget = -(-max(wanted, self.minimum(load)) // unit) * unit
        return budget if self.maximum is None else min(budget, self.maximum(load) // unit * unit)

    def settings(self, wanted: int, load: Scenario) -> ServerFlag:
        """The row for a budget of `wanted` tokens; the note states a rule that moves it."""
        budget = self.budget(wanted, load)

        def filled(template: str) -> str:
            return template.format(budget=budget, load=load)

        moved = "rounded up" if budget > wanted else "lowered"
        why = (
            "" if budget == wanted else f"{moved} from {wanted} to {budget}: {filled(self.rule)}; "
        )
        flags = tuple(map(filled, self.flags))
        return ServerFlag(self.name, flags, budget, why + filled(self.remark), self.source)


LENGTH, RUNNING = "{load.max_model_len}", "{load.batch_size}"
VLLM_FLAGS = (
    "--enable-chunked-prefill",
    "--max-num-batched-tokens {budget}",
    f"--max-num-seqs {RUNNING}",
    f"--max-model-len {LENGTH}",
)
SGLANG_FLAGS = (
    "--page-size {load.page_size}",
    f"--max-running-requests {RUNNING}",
    f"--context-length {LENGTH}",
)

SERVERS: tuple[Server, ...] = (
    Server(
        name="vLLM",
        flags=VLLM_FLAGS,
        rule="at least max_num_seqs={load.batch_size}, and at most max_num_seqs x "
        "max_model_len={load.all_tokens}",
        remark="counts decodes",
        source="vllm-project/vllm vllm/config/scheduler.py verify_max_model_len, commit 01230b4: "
        "below is an error, above a warning",
        minimum=BATCH,
        maximum=ALL_TOKENS,
    ),
    Server(
        name="vllm-ascend",
        flags=VLLM_FLAGS,
        rule="at least 256, a multiple of 256, and at least max_num_seqs={load.batch_size}",
        remark="counts decodes; not together with prefix caching or a quantised KV cache; with "
        "ascend_scheduler_config enabled, add chunked_prefill_enabled there",
        source="Huawei Cloud ModelArts best practice, Chunked Prefill, table 1, pages 5901028 "
        "(2025-03-03: the rule) and 5910021 (2025-11-19: the scheduler)",
        minimum=lambda load: max(ASCEND_UNIT, load.batch_size),
        unit=lambda load: ASCEND_UNIT,
    ),
    Server(
        name="SGLang",
        flags=("--chunked-prefill-size {budget}", "--enable-mixed-chunk", *SGLANG_FLAGS),
        rule="a multiple of the page of {load.page_size}, and at least a page beside "
        "{load.num_decodes} decodes",
        remark="counts decodes, as --enable-mixed-chunk is set; a prompt is cut at whole pages of "
        "what they leave",
        source="sgl-project/sglang python/sglang/srt/server_args.py check_server_args (divisible "
        "by page_size) and managers/schedule_policy.py PrefillAdder; "
        "docs/advanced_features/server_arguments.md, commit 004813e",
        minimum=_page_and_decodes,
        unit=PAGE,
    ),
    Server(
        name="SGLang, unmixed",
        flags=("--chunked-prefill-size {budget}", *SGLANG_FLAGS),
        rule="a multiple of the page of {load.page_size}",
        remark="the server's default: counts prompt tokens only, and decodes run in iterations of "
        "their own",
        source="as SGLang; without enable_mixed_chunk no decode is subtracted from the chunk",
        minimum=PAGE,
        unit=PAGE,
    ),
    Server(
        name="TensorRT-LLM",
        flags=(
            "--enable_chunked_prefill",
            "--max_num_tokens {budget}",
            f"--max_batch_size {RUNNING}",
            f"--max_seq_len {LENGTH}",
        ),
        rule="a multiple of tokens_per_block={load.page_size}, and at least a block beside "
        "{load.num_decodes} decodes",
        remark="counts decodes; of trtllm-serve; tokens_per_block of kv_cache_config is "
        "{load.page_size} here, and a prompt is cut at whole blocks of what the decodes leave",
        source="NVIDIA/TensorRT-LLM docs/source/features/long-sequence.md, commit 1ec63b4 (a "
        "multiple of tokens_per_block); tensorrt_llm/commands/serve.py, commit 00209af; cpp "
        "microBatchScheduler.cpp (chunk unit)",
        minimum=_page_and_decodes,
        unit=PAGE,
    ),
    Server(
        name="TGI",
        flags=(
            "--max-batch-prefill-tokens {budget}",
            "--max-batch-total-tokens {load.all_tokens}",
            f"--max-total-tokens {LENGTH}",
        ),
        rule="more than the {load.num_decodes} tokens of the decodes, and at most "
        "max_batch_total_tokens={load.all_tokens}",
        remark="counts decodes; version 3, and a model for which it cuts prompts: else it must "
        "hold the longest prompt",
        source="huggingface/text-generation-inference backends/v3/src/main.rs, commit 13fe822 (at "
        "most max_batch_total_tokens; at least max_input_tokens unless support_chunking); "
        "docs/source/reference/launcher.md commit 032fc4c; that decodes count: the batching task "
        "as the router of predibase/lorax carries it",
        minimum=BATCH,
        maximum=ALL_TOKENS,
    ),
    Server(
        name="FastDeploy",
        flags=(*VLLM_FLAGS, "--block-size {load.page_size}"),
        rule="a multiple of block_size={load.page_size}, at least max_num_seqs={load.batch_size}, "
        "and at most max_num_seqs x max_model_len={load.all_tokens}",
        remark="counts decodes with the V1 scheduler; the older one cuts prompts at whole blocks, "
        "and max_num_seqs may not exceed 256",
        source="PaddlePaddle/FastDeploy fastdeploy/config.py check (at least max_num_seqs and "
        "block_size, at most max_num_seqs x max_model_len), engine/common_engine.py "
        "partial_chunked_tokens; docs/parameters.md, commit 0242c96",
        minimum=lambda load: max(load.page_size, load.batch_size),
        unit=PAGE,
        maximum=ALL_TOKENS,
    ),
    Server(
        name="DeepSpeed-MII",
        flags=(
            "max_ragged_batch_size={budget}",
            f"max_ragged_sequence_count={RUNNING}",
            f"max_tracked_sequences={RUNNING}",
            f"max_context={LENGTH}",
        ),
        rule="at least max_ragged_sequence_count={load.batch_size}",
        remark="counts decodes (Dynamic SplitFuse); arguments of DSStateManagerConfig, the "
        "state_manager of the RaggedInferenceEngineConfig that mii.serve takes as "
        "inference_engine_config",
        source="microsoft/DeepSpeed deepspeed/inference/v2/ragged/manager_configs.py (validators); "
        "microsoft/DeepSpeed-MII mii/batching/ragged_batching.py, commit 041a216 (the schedule)",
        minimum=BATCH,
    ),
)


def flags(
    budget: int, *, batch_size: int, max_model_len: int, page_size: int = 64
) -> list[ServerFlag]:
    """The settings of every server for iterations of `budget` tokens, decodes included.

    `page_size` is the tokens of a cache page or block of servers that let one choose it. Raises
    UserError for numbers below 1, and for sequences shorter than a page: no budget suits these.
    """
    require_int("budget", budget, 1, "use a number of tokens such as 256")
    require_int("batch_size", batch_size, 1, "use a number of sequences such as 8")
    require_int("page_size", page_size, 1, "use a number of tokens such as 64")
    require_int("max_model_len", max_model_len, 1, "use a number of tokens such as 4096")
    if max_model_len < page_size:
        raise UserError(
            f"max_model_len={max_model_len} is less than one page of {page_size}; use a smaller "
            "page_size"
        )
    load = Scenario(batch_size, max_model_len, page_size)
    return [server.settings(budget, load) for server in SERVERS]

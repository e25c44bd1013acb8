"""Published models by the facts of their config.json: sizes that their authors state, windows by
counting, quantised weights, and what is refused by its field.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.published_names import option_of
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.engine.served_system import ServerSetup
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.executor.simulated.hardware import Parallel
from sarathi_lab.executor.simulated.kernel_times import (
    QUERY_TILE,
    AttentionTimes,
    matmul_time,
    tiles_of,
)
from sarathi_lab.executor.simulated.kv_capacity import served_tokens
from sarathi_lab.experiment.scenario import Scenario, request_times
from sarathi_lab.model.checkpoint import find_checkpoint
from sarathi_lab.model.families import families
from sarathi_lab.model.layers import CachedWindow, Window
from sarathi_lab.model.published import published_spec, read_published
from sarathi_lab.model.quantised_config import read_quantisation
from sarathi_lab.model.roofline import roofline_time
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.policy import Sarathi, SGLang
from sarathi_lab.policy.systems import VLLM_MEMORY, setup_of

DATA = Path(__file__).parents[1] / "data" / "published_models.yaml"
PUBLISHED: dict[str, dict[str, Any]] = yaml.load(DATA.read_text(), yaml.CSafeLoader)
CASES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "models"
POSITIONS = {"max_position_embeddings": 8192}
H100 = load_option("hardware", "h100")
# Options of `model` that were made from the table.
BY_NAME = {
    "llama3.3-70b": "Llama-3.3-70B",
    "llama3.1-405b": "Llama-3.1-405B",
    "llama4-scout": "Llama-4-Scout",
    "llama4-maverick": "Llama-4-Maverick",
    "mistral-small-24b": "Mistral-Small-24B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen2.5-32b": "Qwen2.5-32B",
    "qwen2.5-72b": "Qwen2.5-72B",
    "qwen3-4b": "Qwen3-4B",
    "qwen3-14b": "Qwen3-14B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "qwen3-coder-480b-a35b": "Qwen3-Coder-480B-A35B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "kimi-k2": "Kimi-K2",
    "glm-4.5": "GLM-4.5",
    "glm-4.5-air": "GLM-4.5-Air",
    "minimax-m2": "MiniMax-M2",
    "gemma-3-12b": "Gemma-3-12B",
    "gemma-3-27b": "Gemma-3-27B",
    "phi-4-14b": "Phi-4",
    "llama3.2-1b": "Llama-3.2-1B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen2.5-14b": "Qwen2.5-14B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3.6-27b": "Qwen3.6-27B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "gemma-4-26b-a4b": "Gemma-4-26B-A4B",
    "gemma-4-31b": "Gemma-4-31B",
}
# 4 heads of 8, keys and values of 2, a window in two of three layers.
TOY_CONFIG = {
    "model_type": "cohere2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    **POSITIONS,
}
TOY = published_spec(TOY_CONFIG, "toy")


def published(name: str, **fields: Any) -> ModelSpec:
    return published_spec({**POSITIONS, **PUBLISHED[name]["config"], **fields}, name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_the_authors_state(name: str) -> None:
    spec = published(name)
    assert spec.num_params == pytest.approx(1e9 * PUBLISHED[name]["billions"], rel=0.02)
    assert spec.kv_bytes_per_token(2) == PUBLISHED[name]["kv_bytes"]


def test_published_names_are_those_of_options_with_the_same_shapes() -> None:
    named = set()
    for name, facts in PUBLISHED.items():
        option = option_of("model", facts["hub"].rpartition("/")[2])
        if option:
            spec = load_option("model", option)
            assert spec.num_params == pytest.approx(1e9 * facts["billions"], rel=0.02), name
            assert spec.kv_bytes_per_token(2) == facts["kv_bytes"], name
            named.add(option)
    assert named >= {*BY_NAME}


LETTERS = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
# Of the default configurations of transformers 5.23: kinds of layers, billions of parameters as it
# counts them, and bytes of a token's keys and values.
OF_TRANSFORMERS = [
    (
        {"model_type": "granite_swa", "hidden_size": 2560, "intermediate_size": 8192}
        | {"num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 100352}
        | {"sliding_window": 128, "tie_word_embeddings": True},
        "fsss" * 6,
        2.1445,
        49152,
    ),
    (
        {"model_type": "kolibri1", "hidden_size": 2560, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "num_local_experts": 384}
        | {"num_attention_heads": 48, "num_key_value_heads": 4, "head_dim": 128}
        | {"num_experts_per_tok": 6, "vocab_size": 128000, "sliding_window": 513},
        "ssssf" * 10,
        78.1031,
        102400,
    ),
    (
        {"model_type": "mistral4", "hidden_size": 4096, "moe_intermediate_size": 2048}
        | {"num_attention_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1}
        | {"vocab_size": 131072},
        "f" * 36,
        118.973,
        23040,
    ),
    (
        {"model_type": "muse_glimmer", "hidden_size": 6656, "intermediate_size": 19968}
        | {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128}
        | {"vocab_size": 202048, "sliding_window": 2048},
        "sssf" * 13,
        27.855,
        53248,
    ),
    (
        {"model_type": "bailing_hybrid", "hidden_size": 2560, "intermediate_size": 6144}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"num_attention_heads": 32, "linear_num_heads": 32, "linear_head_dim": 128}
        | {"num_experts": 512, "num_experts_per_token": 8, "moe_intermediate_size": 768}
        | {"num_shared_experts": 1, "first_k_dense_replace": 2, "vocab_size": 157184},
        "lllllf" * 7,
        124.4142,
        8064,
    ),
]


@pytest.mark.parametrize(
    ("config", "kinds", "billions", "kv_bytes"),
    OF_TRANSFORMERS,
    ids=[str(config["model_type"]) for config, *_ in OF_TRANSFORMERS],
)
def test_sizes_are_those_that_transformers_counts(
    config: dict[str, Any], kinds: str, billions: float, kv_bytes: int
) -> None:
    layer_types = [LETTERS[letter] for letter in kinds]
    layers = {"num_hidden_layers": len(kinds), "layer_types": layer_types}
    spec = published_spec({**POSITIONS, **config, **layers}, "made")
    assert spec.num_params == pytest.approx(1e9 * billions, rel=0.002)
    assert spec.kv_bytes_per_token(2) == kv_bytes


def test_no_iteration_is_faster_than_its_roofline() -> None:
    backend = SimulatedBackend(H100)
    for name in PUBLISHED:
        spec = published(name)
        predictor = backend.predictor(spec)
        for batch in (
            make_batch(prefill_tokens=512, start=30_000),
            make_batch(num_decodes=16, context=30_000),
        ):
            batch.window = spec.attention_window
            least = float(roofline_time(spec, batch, 2, backend.peaks()))
            seconds = sum(predictor.operation_times(batch).values())
            assert least < seconds < 4 * least, name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-235B-A22B", 22),
        ("Qwen3-Coder-480B-A35B", 35),
        ("Kimi-K2", 32.9),
        ("GLM-4.5", 32),
        ("DeepSeek-V2", 21),
        ("DeepSeek-V4-Pro", 49),
        ("Llama-4-Maverick", 17),
        ("ERNIE-4.5-300B-A47B", 47),
        ("dots.llm1", 14),
        ("Granite-4.0-H-Small", 9),
    ],
)
def test_parameters_of_a_token_are_those_stated(name: str, billions: float) -> None:
    spec = published(name)
    unused = spec.num_experts - spec.experts_per_token
    active = spec.num_params - spec.num_expert_params * unused // spec.num_experts
    assert active == pytest.approx(1e9 * billions, rel=0.06)


@pytest.mark.parametrize(("option", "name"), BY_NAME.items())
def test_models_by_name_are_those_of_the_files(option: str, name: str) -> None:
    by_name = load_option("model", option)
    fields = {"max_position_embeddings": by_name.max_position}
    if by_name.quantisation is not None:
        fields["quantization_config"] = {"quant_method": by_name.quantisation.name}
    assert replace(published(name, **fields), name=option) == by_name


def test_layers_with_parts_of_their_own() -> None:
    """Llama Nemotron's blocks: of three layers one has no attention, and one no FFN."""
    block = {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"ffn_mult": 12.0}}
    blocks = [
        block,
        {**block, "attention": {"no_op": True}},
        {**block, "ffn": {"no_op": True}},
    ]
    config = {
        "model_type": "nemotron-nas",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": None,
        "vocab_size": 100,
        "block_configs": blocks,
        **POSITIONS,
    }
    spec = published_spec(config, "toy")
    assert (spec.num_attention_layers, spec.num_ffn_layers, spec.num_kv_heads) == (2, 2, 2)
    assert spec.ffn_size == 512  # two thirds of 12 x 64
    attention = 64 * 64 + 2 * 64 * 16 + 64 * 64
    assert spec.num_params == 2 * attention + 2 * 3 * 64 * 512 + 2 * 64 * 100
    for change in ({"n_heads_in_group": 2}, {"replace_with_linear": True}):
        other = {**block, "attention": {**block["attention"], **change}}
        with pytest.raises(UserError, match="block_configs"):
            published_spec({**config, "block_configs": [block, other, block]}, "toy")


def test_an_index_limits_what_attention_sees_and_not_what_is_cached() -> None:
    """DeepSeek-V3.2: 64 heads of 128 score all tokens, and attention sees 2,048 of them."""
    spec = published("DeepSeek-V3.2")

    def decoded(context: int) -> Batch:
        batch = make_batch(num_decodes=1, context=context)
        batch.window = spec.attention_window
        return batch

    far, near = (decoded(context) for context in (9000, 8000))
    assert float(spec.flops(far)) - float(spec.flops(near)) == 1000 * 61 * 2 * 64 * 128
    read = spec.kv_read_bytes(far, 2) - spec.kv_read_bytes(near, 2)
    assert read == 1000 * 61 * 132
    window = spec.cached_window
    assert window is not None
    assert window.share == 0
    assert spec.cache_bytes_per_token(2) == spec.kv_bytes_per_token(2)
    predictor = SimulatedBackend(H100).predictor(spec)
    as_full = SimulatedBackend(H100).predictor(
        replace(spec, layers=replace(spec.layers, index=None))
    )
    long = decoded(100_000)
    assert (
        predictor.operation_times(long)["decode_attention"]
        < as_full.operation_times(long)["decode_attention"]
    )


def test_a_compressed_cache_grows_by_a_part_of_an_entry() -> None:
    """DeepSeek-V4-Flash: of 43 layers 21 have an entry for 4 tokens, and 20 one for 128."""
    spec = published("DeepSeek-V4-Flash")

    def decoded(context: int) -> Batch:
        batch = make_batch(num_decodes=1, context=context)
        batch.window = spec.attention_window
        return batch

    far, near = (decoded(context) for context in (9000, 8000))  # beyond 512 entries of 4 tokens
    pair_flops = 2 * 64 * (512 + 512)
    grown = 1000 * (21 * 2 * 64 * 128 / 4 + 20 * pair_flops / 128)
    assert float(spec.flops(far)) - float(spec.flops(near)) == grown
    grown = 1000 * (21 * 132 / 4 + 20 * 1024 / 128)
    assert spec.kv_read_bytes(far, 2) - spec.kv_read_bytes(near, 2) == grown
    window_bytes = 43 * 128 * 1024
    assert window_bytes < spec.state_bytes(2) < 2.5 * window_bytes
    predictor = SimulatedBackend(H100, tensor_parallel=8).predictor(spec)
    times = [predictor.operation_times(batch)["decode_attention"] for batch in (far, near)]
    assert times[0] > times[1]


def test_experts_may_have_fewer_bits_than_the_file_says() -> None:
    """DeepSeek-V4's instruct models: experts in 4 bits with a scale for 32, all else in 8."""
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = published(
        "DeepSeek-V4-Flash", quantization_config=quantisation, expert_dtype="fp4"
    ).stored
    assert stored is not None
    assert stored.part("experts").weight_bytes == 4.25 / 8
    assert stored.part("attention").weight_bytes == 1
    every = published("DeepSeek-V4-Flash", quantization_config=quantisation)
    assert every.stored is not None
    assert every.stored.part("experts").weight_bytes == 1


def test_the_lab_s_deepseek_v4_flash_is_the_published_one() -> None:
    fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    fields |= {"expert_dtype": "fp4", "max_position_embeddings": 2**20}
    preset = load_option("model", "deepseek-v4-flash")
    assert replace(published("DeepSeek-V4-Flash", **fields), name=preset.name) == preset
    assert hash(preset.quantisation) is not None


@pytest.mark.parametrize(
    ("fields", "num_layers"),
    [
        ({"indexer_types": ["full", "shared", "shared"] * 26}, 26),
        ({"indexer_types": ["full"] * 78}, 78),
    ],
    ids=str,
)
def test_layers_may_share_an_index(fields: dict[str, Any], num_layers: int) -> None:
    every = published("GLM-5")
    shared = published("GLM-5", **fields)
    assert shared.num_index_layers == num_layers
    saved = every.kv_bytes_per_token(2) - shared.kv_bytes_per_token(2)
    assert saved == (78 - num_layers) * 132
    assert every.num_params - shared.num_params == (78 - num_layers) * (
        2048 * 32 * 128 + 6144 * (128 + 32)
    )


def test_layers_with_a_window_may_have_heads_of_their_own() -> None:
    """Gemma 4: of 60 layers, 10 of the whole context, with fewer and wider heads."""
    spec = published("Gemma-4-31B")
    window = spec.layers.window
    assert window is not None
    assert window.num_layers == 50
    room = spec.cached_window
    assert room is not None
    assert room.share == 5 * 16 * 256 / (4 * 512)
    names = [linear.name for linear in spec.layer_linears]
    assert len(set(names)) == len(names)
    backend = SimulatedBackend(H100)
    operations = backend.predictor(spec).operation_times(make_batch(prefill_tokens=64))
    assert operations["window_qkv_proj"] > operations["qkv_proj"] > 0
    assert operations["overhead"] == H100.iteration_overhead


def test_states_of_kimi_linear() -> None:
    kda = published("Kimi-Linear-48B-A3B")
    assert kda.state_bytes(2) == 20 * 32 * (4 * 128 * 128 + 2 * 3 * 3 * 128)


@pytest.mark.parametrize("window", [Window(1, 6), Window(1, 6, "chunked")], ids=lambda w: w.kind)
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 4), (0, 20), (3, 1), (5, 9), (40, 13)])
def test_windows_count_what_each_token_sees(window: Window, start: int, num_tokens: int) -> None:
    def seen(position: int) -> range:
        first = max(0, position - 5) if window.kind == "sliding" else position - position % 6
        return range(first, position + 1)

    keys = [seen(position) for position in range(start, start + num_tokens)]
    assert window.pairs(start, num_tokens) == sum(map(len, keys))
    read = {key for of_token in keys for key in of_token}
    assert window.kv_tokens(start, num_tokens) == len(read)
    pieces = window.pieces(start, num_tokens)
    assert sum(number for _, number in pieces) == num_tokens


def test_work_of_a_batch_and_of_its_row_in_a_table_are_the_same() -> None:
    engine = EngineConfig(Sarathi(chunk=8), 2, 40, 4, window=TOY.cached_window)
    ledger = Ledger()
    batches = []

    def seconds(batch: Any) -> float:
        batches.append((TOY.flops(batch), TOY.min_bytes(batch, 2)))
        return 1.0

    requests = [Request(0, 0.0, 19, 3), Request(1, 0.0, 5, 9)]
    table = serve(requests, engine, SimulatedExecutor(seconds)).iterations()
    assert TOY.flops(table).tolist() == [flops for flops, _ in batches]
    assert TOY.min_bytes(table, 2).tolist() == [num_bytes for _, num_bytes in batches]
    assert "window_pairs" not in ledger.iterations()
    with pytest.raises(ValueError, match="window"):
        TOY.flops(make_batch(num_decodes=1, context=9))


def test_flops_of_a_decode_stop_growing_in_layers_with_a_window() -> None:
    def flops(context: int) -> float:
        batch = make_batch(num_decodes=1, context=context)
        batch.window = TOY.layers.window
        return float(TOY.flops(batch))

    # Of three layers one sees all: 4 heads of 8, for scores and values.
    assert flops(1000) - flops(900) == 100 * 1 * 4 * 32
    assert flops(6) - flops(5) == 1 * 3 * 4 * 32


@pytest.mark.parametrize("window", [1, 64, 100, 4096])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 300), (70, 64), (5000, 129)])
def test_tiles_in_a_window(window: int, start: int, num_tokens: int) -> None:
    tiles = tiles_of([(start, num_tokens)], window=window)
    before = [min(start + first, window) for first in range(0, num_tokens, QUERY_TILE)]
    within = [min(first, window) for first in range(0, num_tokens, QUERY_TILE)]
    assert tiles.query_tiles == len(before)
    assert tiles.dense_keys == sum(before) - sum(within)
    assert tiles.masked_tiles == len(before) + -(-sum(within) // QUERY_TILE)
    assert tiles.kv_tokens == Window(1, window).kv_tokens(start, num_tokens)


def test_attention_in_a_window_that_holds_all_is_attention_to_all() -> None:
    chunks = [(0, 100), (640, 64)]
    whole = AttentionTimes(H100, 8, 2, 128, 256.0)
    windowed = AttentionTimes(H100, 8, 2, 128, 256.0, window=4096)
    assert windowed.prefill(chunks) == whole.prefill(chunks)
    narrow = AttentionTimes(H100, 8, 2, 128, 256.0, window=64)
    assert narrow.prefill([(60_000, 2048)]) < whole.prefill([(60_000, 2048)]) / 10


@pytest.mark.parametrize("share", [0.5, 1.0, 5.2])
@pytest.mark.parametrize("state_blocks", [0, 3])
def test_blocks_of_a_window(share: float, state_blocks: int) -> None:
    """A window of 10 tokens touches four blocks of 4; `tokens_of` inverts `blocks_for`."""
    window = CachedWindow(Window(1, 10), share)
    blocks = BlockManager(100, 4, state_blocks=state_blocks, window=window)
    held = [blocks.blocks_for(tokens) for tokens in range(200)]
    assert held == sorted(held)
    assert held[199] - held[159] == 10  # beyond the window only the others grow
    for num_blocks in range(state_blocks, 60):
        tokens = blocks.tokens_of(num_blocks)
        assert blocks.blocks_for(tokens) <= num_blocks
        assert blocks.blocks_for(tokens + 4) > num_blocks


def test_room_of_windowed_layers_is_that_of_vllms_groups() -> None:
    """Gemma 3 27B: 52 layers with a window in groups of the 10 others, the last one not full."""
    gemma = published("Gemma-3-27B")
    window = gemma.cached_window
    assert window is not None
    assert window.share == 6
    assert window.num_blocks(16) == 65
    assert gemma.cache_bytes_per_token(2) * 62 == gemma.kv_bytes_per_token(2) * 10
    setup = ServerSetup(VLLM_MEMORY, 8192, 256)
    as_full = replace(gemma, layers=replace(gemma.layers, window=None))
    tokens = served_tokens(gemma, H100, 2, setup)
    assert tokens == pytest.approx(6.2 * served_tokens(as_full, H100, 2, setup), rel=1e-3)


def test_windows_may_have_a_pool_of_their_own() -> None:
    """SGLang's: 0.8 blocks for each of the others; of each sequence 4 of a window of 10 tokens."""
    window = CachedWindow(Window(1, 10), share=5.0, pool=0.8)
    blocks = BlockManager(10, 4, window=window)
    assert blocks.window_pool.num_free == 8
    assert blocks.blocks_for(40) == 10
    assert blocks.room_for(8) == 3
    first, second, third = (
        SequenceState(Request(number, 0.0, 8, 1), order=number) for number in range(3)
    )
    assert blocks.admit(first, 8)
    assert blocks.grow(first, 16)
    assert blocks.window_pool.num_free == 4
    assert blocks.grow(first, 20)  # beyond the window
    assert blocks.window_pool.num_free == 4
    assert blocks.admit(second, 12)
    assert blocks.num_free == 2
    assert not blocks.can_hold(8)
    assert not blocks.admit(third, 8)  # for one block of the window's pool is free
    blocks.free(first)
    assert blocks.window_pool.num_free == 5
    assert blocks.admit(third, 8)
    gemma = published("Gemma-3-27B")
    one_pool, two_pools = (
        served_tokens(gemma, H100, 2, ServerSetup(rule, 8192, 256))
        for rule in (VLLM_MEMORY, replace(VLLM_MEMORY, window_pool=0.8))
    )
    assert one_pool / two_pools == pytest.approx(1 + 0.8 * 5.2, rel=1e-3)


@pytest.mark.parametrize("tensor", [2, 8, 16])
def test_devices_hold_the_weights_and_heads_that_they_compute_with(tensor: int) -> None:
    """The memory of a device is what its products read, and its cache what its heads write."""
    parallel = Parallel(tensor)
    for name in PUBLISHED:
        spec = published(name)
        if spec.quantisation is not None or parallel.complaint(spec) is not None:
            continue
        operations = AnalyticOperations(spec, H100, 2, parallel)
        num_params = spec.num_expert_params / tensor
        for linear in spec.layer_linears:
            rows, columns = operations.shard_shape(linear)
            num_params += linear.count * rows * columns
        num_tables = 1 if spec.tie_embeddings else 2
        tables = num_tables * spec.lm_head.num_params
        num_params += tables / tensor
        held = parallel.device_weight_bytes(spec, 2)
        assert held == pytest.approx(2 * num_params, rel=1e-3), name
        on_device = parallel.with_heads_of_device(spec).kv_bytes_per_token(2)
        whole = spec.kv_bytes_per_token(2)
        assert whole / tensor <= on_device <= whole, name


def test_caches_of_devices_count_the_heads_of_each_kind_of_layer() -> None:
    """Gemma 4 31B: 10 layers with 4 KV heads of 512, 50 with a window and 16 of 256."""
    gemma = published("Gemma-4-31B")
    for tensor, of_full, of_window in ((4, 1, 4), (8, 1, 2), (16, 1, 1)):
        backend = SimulatedBackend(H100, tensor_parallel=tensor)
        full_bytes = 2 * 2 * 512 * of_full
        window_bytes = 2 * 2 * 256 * of_window
        on_device = backend.parallel.with_heads_of_device(gemma)
        assert on_device.kv_bytes_per_token(2) == 10 * full_bytes + 50 * window_bytes
        window = backend.window_in_cache(gemma, None)
        assert window is not None
        assert window.share == 5 * window_bytes / full_bytes


def test_the_first_stage_has_the_embedding() -> None:
    gemma = published("Gemma-3-27B")
    stage = gemma.layer_weight_bytes(2) / 5 + 2 * gemma.lm_head.num_params
    assert Parallel(1, 5).device_weight_bytes(gemma, 2) == pytest.approx(stage)


def test_a_stated_cache_has_the_servers_pool_of_windows() -> None:
    """What fits the memory by the server's rule fits as a stated size, and no more."""
    gemma = published("Gemma-3-27B")
    backend = SimulatedBackend(H100)
    rest = H100.memory_bytes - gemma.weight_bytes(2)
    for ratio in (0.8, 0.5):
        pool = setup_of(SGLang(swa_full_tokens_ratio=ratio), 256, 8192).rule.window_pool
        tokens = int(rest / (10 + 52 * ratio) * 62 / gemma.kv_bytes_per_token(2))
        backend.check(gemma, tokens, pool)
        with pytest.raises(UserError, match="for KV"):
            backend.check(gemma, tokens + 1, pool)


@pytest.mark.parametrize(
    ("settings", "weight_bytes", "product_type", "of"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1, "fp8", "layers"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            0.5 + 20 / 8 / 128,
            "model",
            "layers",
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1, "model", "layers"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": -1}, 0.5, "model", "layers"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5 / 8, "model", "layers"),
        ({"quant_method": "mxfp4"}, 17 / 32, "model", "experts"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 9 / 16, "fp4", "layers"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {
                            "num_bits": 4,
                            "strategy": "group",
                            "group_size": 32,
                            "scale_dtype": "torch.uint8",
                            "symmetric": True,
                        }
                    }
                },
            },
            17 / 32,  # MXFP4's
            "model",
            "layers",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
                        "input_activations": None,
                    }
                },
                "ignore": ["lm_head", "re:.*self_attn.*"],
            },
            0.5625,
            "model",
            "experts",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bytes_of_quantised_weights(
    settings: dict[str, Any], weight_bytes: float, product_type: str, of: str
) -> None:
    mixture = published("Qwen3-30B-A3B")
    stored = read_quantisation({"quantization_config": settings}, mixture)
    assert stored is not None
    assert (stored.weight_bytes, stored.product_type, stored.of) == (
        weight_bytes,
        product_type,
        of,
    )


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
INT4 = {"num_bits": 4, "strategy": "channel"}
GROUP = {"weights": INT4, "targets": ["Linear"]}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}


def attention_of(*layers: int) -> list[str]:
    """Names of modules of attention, one by one."""
    names = []
    for layer in layers:
        for product in "qkvo":
            names.append(f"model.layers.{layer}.self_attn.{product}_proj")
    return names


@pytest.mark.parametrize(
    ("name", "field", "ignored", "of"),
    [
        ("Llama-3.1-8B", "ignore", ["lm_head", "model.layers.3.input_layernorm"], "layers"),
        (
            "Qwen3-30B-A3B",
            "modules_to_not_convert",
            ["lm_head", "model.layers.0.mlp.gate"],
            "layers",
        ),
        ("Qwen3-30B-A3B", "ignore", ["re:.*mlp.gate$", "re:visual.*"], "layers"),
        ("Qwen3-30B-A3B", "exclude_modules", attention_of(*range(48)), "experts"),
        ("Qwen3-30B-A3B", "modules_to_not_convert", ["model.layers.*.self_attn"], "experts"),
        (
            "Kimi-K2",
            "ignore",
            [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                "model.layers.61.self_attn.q_a_proj",
                "model.layers.61.eh_proj",
            ],
            "experts",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_modules_that_are_ignored_leave_all_products_or_experts(
    name: str, field: str, ignored: list[str], of: str
) -> None:
    for settings in (NVFP4, COMPRESSED, {"quant_method": "fp8"}):
        spec = published(name, quantization_config={**settings, field: ignored})
        assert spec.quantisation is not None
        assert spec.quantisation.of == of


@pytest.mark.parametrize(
    ("name", "ignored", "quantised"),
    [
        ("Llama-3.1-8B", ["re:.*self_attn.*"], {"attention": 0, "FFNs": 1}),
        ("Llama-3.1-8B", ["re:.*mlp.*"], {"attention": 1, "FFNs": 0}),
        # Of queries, keys, values and outputs with 4, 1, 1 and 4 in 10 parameters of 32 layers.
        ("Llama-3.1-8B", ["layers.0.self_attn.q_proj"], {"attention": 1 - 0.4 / 32, "FFNs": 1}),
        ("Llama-3.1-8B", ["re:.*qkv_proj.*"], {"attention": 0.4, "FFNs": 1}),
        ("Llama-3.1-8B", attention_of(*range(31)), {"attention": 1 / 32, "FFNs": 1}),
        ("Llama-3.1-8B", ["re:.*gate_proj.*"], {"attention": 1, "FFNs": 2 / 3}),
        ("Llama-3.1-8B", ["re:.*gate_up_proj.*"], {"attention": 1, "FFNs": 1 / 3}),
        ("Qwen3-30B-A3B", ["experts"], {"attention": 1, "experts": 0}),
        (
            "Kimi-K2",
            ["re:.*self_attn.*"],
            {"attention": 0, "FFNs": 1, "shared experts": 1, "experts": 1},
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_modules_that_are_ignored_leave_shares_of_each_kind(
    name: str, ignored: list[str], quantised: dict[str, float]
) -> None:
    for field in ("ignore", "exclude_modules", "modules_to_not_convert"):
        stored = published(name, quantization_config={**NVFP4, field: ignored}).quantisation
        assert stored is not None
        assert stored.of == "parts"
        shares = {part.kind: part.share for part in stored.parts}
        assert shares == pytest.approx(quantised)


@pytest.mark.parametrize(
    ("name", "ignored", "named"),
    [
        ("Llama-3.1-8B", ["self_attn", "mlp"], "leave nothing quantised"),
        ("Llama-3.1-8B", ["c_attn"], "c_attn is none of the modules that are known"),
        ("Llama-3.1-8B", ["re:("], "is no regular expression"),
        ("Qwen3-30B-A3B", ["re:.*experts.0.*"], "names some of the experts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_modules_that_are_not_known_are_refused_by_name(
    name: str, ignored: list[str], named: str
) -> None:
    for field in ("ignore", "exclude_modules", "modules_to_not_convert"):
        with pytest.raises(UserError) as caught:
            published(name, quantization_config={**NVFP4, field: ignored})
        assert named in str(caught.value)
        assert f"quantization_config.{field}=" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_all_fields_of_ignored_modules_count_and_no_module_twice() -> None:
    fields = {"ignore": ["lm_head", "re:.*q_proj.*"], "exclude_modules": ["re:.*q_proj.*", "mlp"]}
    stored = published("Llama-3.1-8B", quantization_config={**NVFP4, **fields}).quantisation
    assert stored is not None
    shares = {part.kind: part.share for part in stored.parts}
    assert shares == pytest.approx({"attention": 0.6, "FFNs": 0})


@pytest.mark.parametrize(
    ("settings", "head_bytes"),
    [
        ({**GPTQ, "lm_head": True}, 0.5 + 20 / 8 / 128),
        ({**GPTQ, "lm_head": False}, 2),
        ({**GPTQ, "extra_config": {"lm_head": {"bits": 16}}}, 2),
        ({**COMPRESSED, "config_groups": {"group_0": {**GROUP, "targets": ["Linear"]}}}, 0.5),
        (
            {
                **COMPRESSED,
                "config_groups": {"group_0": {**GROUP, "targets": ["Linear"]}},
                "ignore": ["re:.*lm_head"],
            },
            2,
        ),
        (NVFP4, 9 / 16),
        ({**NVFP4, "exclude_modules": ["lm_head"]}, 2),
    ],
    ids=str,
)
def test_an_output_head_has_the_bytes_that_its_checkpoint_gives_it(
    settings: dict[str, Any], head_bytes: float
) -> None:
    spec = published("Llama-3.1-8B", quantization_config=settings)
    assert spec.head_bytes(2) == pytest.approx(head_bytes)
    tied = replace(spec, tie_embeddings=True)
    assert tied.head_bytes(2) == 2


def test_parts_that_are_quantised_count_with_their_bytes() -> None:
    plain = published("Llama-3.1-8B")
    ignored = {"ignore": ["re:.*self_attn.*", "lm_head"]}
    ffns = published("Llama-3.1-8B", quantization_config={**NVFP4, **ignored})
    in_ffns = 32 * 3 * 4096 * 14336
    assert plain.weight_bytes(2) - ffns.weight_bytes(2) == pytest.approx(in_ffns * (2 - 9 / 16))
    decode = make_batch(num_decodes=1, context=100)
    backend = SimulatedBackend(H100)
    before = backend.predictor(plain).operation_times(decode)
    after = backend.predictor(ffns).operation_times(decode)
    assert after["ffn_up"] < before["ffn_up"]
    assert after["qkv_proj"] == before["qkv_proj"]
    (caution,) = (each for each in backend.cautions(ffns) if "weights are read" in each)
    assert "0.562 bytes in 100% of the FFNs" in caution
    with pytest.raises(
        UserError, match=r"has modelopt nvfp4 on .*use executor.cost_model=analytic"
    ):
        SimulatedBackend(H100, cost_model="profiled").check(ffns, 0)


def test_modelopts_file_beside_the_config_counts(tmp_path: Path) -> None:
    config = {**POSITIONS, **PUBLISHED["Qwen3-8B"]["config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    stored = read_published(tmp_path).quantisation
    assert stored is not None
    assert (stored.of, stored.weight_bytes) == ("layers", 9 / 16)
    beside.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_published(tmp_path).quantisation is None


def test_a_cache_that_the_file_quantises_is_named_as_not_counted() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    settings = {**COMPRESSED, "kv_cache_scheme": scheme}
    spec = published("Llama-3.1-8B", quantization_config=settings)
    cautions = SimulatedBackend(H100).cautions(spec)
    assert any("kv_cache_scheme (the cache is stored by cache.dtype)" in each for each in cautions)
    assert published("Llama-3.1-8B", quantization_config=COMPRESSED).uncounted == ()


def test_quantised_weights_take_fewer_bytes_and_less_time() -> None:
    experts_only = published("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    plain = published("gpt-oss-20b")
    saved = plain.weight_bytes(2) - experts_only.weight_bytes(2)
    assert saved == pytest.approx(plain.num_expert_params * (2 - 17 / 32))
    # 12.8 GiB, as the authors state of the checkpoint.
    assert experts_only.weight_bytes(2) == pytest.approx(12.8 * 2**30, rel=0.01)
    decode = make_batch(num_decodes=1, context=100)
    times = [SimulatedBackend(H100).predictor(spec) for spec in (plain, experts_only)]
    slow, fast = (predictor.operation_times(decode) for predictor in times)
    assert fast["experts"] < slow["experts"]
    assert fast["qkv_proj"] == slow["qkv_proj"]
    assert matmul_time(1, 4096, 4096, H100, 2, 0.5) < matmul_time(1, 4096, 4096, H100, 2)


def test_8_bit_weights_run_in_16_bits_where_the_device_has_no_other() -> None:
    spec = published("Qwen3-8B", quantization_config={"quant_method": "fp8"})
    chunk = make_batch(prefill_tokens=4096)
    in_8_bits = SimulatedBackend(H100).predictor(spec).operation_times(chunk)["ffn_up"]
    without = replace(H100, fp8_flops_per_second=None)
    in_16_bits = SimulatedBackend(without).predictor(spec).operation_times(chunk)["ffn_up"]
    assert in_16_bits > 1.1 * in_8_bits
    kernels = SimulatedBackend(H100, cost_model="measured_kernels")
    with pytest.raises(UserError, match=r"measured_kernels.*Qwen3-8B are in fp8"):
        kernels.check(spec, 0)
    stated = SimulatedBackend(H100, weights="fp8")
    with pytest.raises(UserError, match=r"executor\.weights=fp8.*stored in fp8 already"):
        stated.check(spec, 0)


def test_weights_that_a_run_states_are_those_of_a_quantised_file() -> None:
    plain = published("gpt-oss-20b")
    stored = published("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    chunk = make_batch(prefill_tokens=64)
    stated = SimulatedBackend(H100, weights="mxfp4").predictor(plain).operation_times(chunk)
    assert stated == SimulatedBackend(H100).predictor(stored).operation_times(chunk)
    with pytest.raises(UserError, match=r"executor\.weights=mxfp4 is of experts"):
        SimulatedBackend(H100, weights="mxfp4").check(published("Qwen3-8B"), 0)
    with pytest.raises(UserError, match=r"executor\.weights=fp8 or nvfp4 or int4"):
        SimulatedBackend(H100).check(published("Llama-3.3-70B"), 0)


def test_weights_that_authors_publish_are_named_where_a_file_states_none() -> None:
    backend = SimulatedBackend(H100)
    with pytest.raises(UserError, match=r"as published by executor\.weights=mxfp4, take"):
        backend.check(published("gpt-oss-120b", quantization_config=None), 0)
    small = published("gpt-oss-20b", quantization_config=None)
    caution = "they are published in mxfp4: executor.weights=mxfp4"
    assert any(line.endswith(caution) for line in backend.cautions(small))
    stated = SimulatedBackend(H100, weights="mxfp4")
    assert not any(line.endswith(caution) for line in stated.cautions(small))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"model_type": "step3_text", "share_q_dim": 2048}, "share_q_dim=2048"),
        ({"sparse_attention_config": {"sparse_block_size": 128}}, "sparse_attention_config="),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios=[0, 4, 128]"),
        (
            {"model_type": "deepseek_v4", "compress_ratios": [4, 2, 128]},
            "compress_ratios: a layer of '2'",
        ),
        ({"model_type": "deepseek_v4", "compress_ratios": [4]}, "compress_ratios=[4] is no list"),
        ({"model_type": "deepseek_v4"}, "layer_types is missing"),
        (
            {"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp3"},
            "expert_dtype=fp3",
        ),
        ({"index_topk": 2048}, "index_n_heads is missing"),
        ({"index_topk_freq": 4}, "index_topk_freq=4"),
        ({"model_type": "hunyuan", "use_cla": True}, "use_cla=True"),
        ({"hidden_size": None, "n_embd": "wide"}, "n_embd='wide'"),
        ({"layer_types": ["conv", "full_attention", "conv"]}, "layer_types: a layer of 'conv'"),
        ({"layer_types": ["mamba", "full_attention", "mamba"]}, "linear_attention has no formula"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers=15"),
        ({"layer_types": ["full_attention", "cross", "cross"]}, "layer_types: a layer of 'cross'"),
        ({"model_type": "bamba"}, "layer_types is missing"),
        ({"swa_num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config"),
        (
            {
                "model_type": "laguna",
                "layer_types": ["full_attention"] * 3,
                "num_attention_heads_per_layer": [4, 4, 8],
            },
            "num_attention_heads_per_layer=[4, 4, 8]: heads of each layer",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types=['full_attention'] is no list of num_hidden_layers=3",
        ),
        ({"layer_types": ["linear_attention"] * 3}, "no layer has attention"),
        ({"word_embed_proj_dim": 16}, "word_embed_proj_dim=16"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ({"hidden_size": 30}, "hidden_size=30"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": None, "num_hidden_layer": 3}, "did you mean num_hidden_layers"),
        ({"num_hidden_layers": 2 * 10**9}, "num_hidden_layers=2000000000 exceeds 10000"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 0},
            "interleave_moe_layer_step=0",
        ),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method=aqlm"),
        *(
            ({"quantization_config": settings}, named)
            for settings, named in (
                ({"quant_method": "mxfp4"}, "mxfp4 is of experts"),
                ({"quant_method": "awq"}, "bits is missing"),
                ({"quant_method": "awq", "bits": 0}, "bits=0"),
                ({"quant_method": "auto-round", "bits": 8, "data_type": "fp"}, "data_type=fp"),
                ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size=0"),
                ({"quant_method": "gptq", "dynamic": {"-:.*attn.*": {}}}, "dynamic="),
                ({"quant_method": "auto-round", "extra_config": {"a": {}}}, "extra_config="),
                ({"quant_method": "fp8", "ignore": "lm_head"}, "ignore='lm_head' is not a list"),
                ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "store_dtype=mxfp4"),
                ({"bits": 4, "group_size": 64}, "by bits and group_size, without a quant_method"),
                ({**COMPRESSED, "config_groups": {"g": 5}}, "config_groups=[5]"),
                ({**COMPRESSED, "config_groups": {"g": {"weights": 5}}}, "weights=5"),
                ({**COMPRESSED, "config_groups": {"g": GROUP, "h": GROUP}}, "not one group"),
                (
                    {**COMPRESSED, "config_groups": {"g": {**GROUP, "targets": ["a"]}}},
                    "targets=['a'] names modules",
                ),
            )
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_has_no_formula_is_refused_by_its_field(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TOY_CONFIG, **fields}))
    with pytest.raises(UserError) as caught:
        read_published(tmp_path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_with_an_encoder_of_images_says_what_is_not_counted() -> None:
    text = {**TOY_CONFIG, "model_type": "gemma3_text", "head_dim": 8}
    spec = published_spec(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"a": 1}}, "toy"
    )
    assert spec.num_params == TOY.num_params
    cautions = SimulatedBackend(H100).cautions(spec)
    omni = {
        "thinker_config": {"text_config": text, "audio_config": {"a": 1}},
        "talker_config": {1: 2},
    }
    spec = published_spec({"model_type": "qwen3_omni_moe", **omni}, "toy")
    assert spec.num_params == TOY.num_params
    assert spec.uncounted == ("audio_config", "talker_config")
    assert any("vision_config is not counted" in caution for caution in cautions)
    assert any("2 of 3 layers see a window of 6 tokens" in caution for caution in cautions)


def test_a_window_that_a_model_by_name_has_is_said_to_be_left_out() -> None:
    backend = SimulatedBackend(H100)
    cautions = backend.cautions(load_option("model", "mistral-7b"))
    assert any("window of 4096 tokens spares" in caution for caution in cautions)


@pytest.mark.parametrize(
    ("fields", "stated", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "torch.bfloat16"}, "auto", "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "auto", "bfloat16"),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, "auto", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "float16", "float16"),
        ({"torch_dtype": "float32"}, "auto", "float16"),
        ({}, "auto", "float16"),
    ],
)
def test_the_type_of_a_files_elements_is_shown(
    fields: dict[str, Any], stated: str, dtype: str
) -> None:
    spec = published_spec({**TOY_CONFIG, **fields}, "toy")
    assert SimulatedBackend(H100, dtype=stated).dtype_of(spec) == dtype


@pytest.mark.skipif(not CASES.is_dir(), reason="config files of other models are not here")
def test_cases_are_read_or_refused_by_a_field() -> None:
    refused = set()
    for folder in sorted(CASES.iterdir()):
        try:
            assert read_published(folder).num_params > 1e8
        except UserError as error:
            refused.add((folder.name, "block_configs has 0 blocks" in str(error)))
    assert refused == {("Llama-3.3-Nemotron-Super-49B", True)}


def test_experiments_count_windows() -> None:
    spec = published("Gemma-3-12B")
    full = replace(spec, layers=replace(spec.layers, window=None))
    costs = [SimulatedBackend(H100).cost_of(of) for of in (spec, full)]
    scenario = Scenario("request_level", prompt_len=16_384, num_decodes=2, batch_size=1)
    windowed, whole = (request_times(cost.operation_times, scenario) for cost in costs)
    assert windowed["prefill_attention"] < whole["prefill_attention"] / 2
    assert windowed["qkv_proj"] == whole["qkv_proj"]


def test_every_family_is_one_word_of_config_files() -> None:
    assert all(name == name.lower() and not name.endswith("_text") for name in families())


def test_several_devices_share_windows_as_they_share_other_layers() -> None:
    gemma = published("Gemma-3-27B")
    setup = ServerSetup(VLLM_MEMORY, 8192, 256)
    one = served_tokens(gemma, H100, 2, setup)
    assert served_tokens(gemma, H100, 2, setup, Parallel(tensor=2)) > 2 * one


def test_the_path_of_a_config_json_is_that_of_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert find_checkpoint(str(path)) == tmp_path

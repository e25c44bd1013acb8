"""The C++ of a CPU: its operations against torch's, whole models against transformers', and what
happens without it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, greedy_tokens, make_checkpoint
from helpers import scheduler_for
from native_library import needs_library

from sarathi_kernels.attention.reference import Segment, make_segment, paged_attention
from sarathi_kernels.cpu import build, library
from sarathi_kernels.cpu.checks import check_model
from sarathi_kernels.cpu.packing import PANEL, pack_linear
from sarathi_kernels.runtime.testing import poisoned, relative_error
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch import backend
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.operations import NAN_TOKEN
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.model.transformer import KVCache
from sarathi_lab.model.weights import load_model
from sarathi_lab.policy import Sarathi, SarathiServe

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BOUND = 3e-6  # of sums in float32, whatever the inputs are
ROUNDED = 4e-3  # where bfloat16, with 8 bits, takes queries and weights of the softmax too
SPEC = ModelSpec(
    name="toy",
    num_layers=2,
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_size=12,
    ffn_size=80,
    vocab_size=97,
    activation="gelu_tanh",
)


@pytest.fixture(params=[True, False], ids=["amx", "avx512"])
def allows_amx(request) -> bool:
    library.start(2, allows_amx=request.param)
    yield request.param
    library.start(2)


# -- operations ------------------------------------------------------------------------------------


def test_what_a_compiler_is_given_compiles():
    """Else the engine would be plain torch, and every test of the C++ skipped."""
    try:
        library.load()
    except build.NotBuilt as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 48, 97), (33, 80, 31), (256, 352, 64)],
)
def test_products(allows_amx, dtype, rows, in_features, out_features):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    x = torch.randn(rows, in_features, generator=generator).to(dtype).float()
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert relative_error(library.linear(x, pack_linear(weight, bias)), expected.float()) < BOUND
    unbiased = expected - bias.double()
    assert relative_error(library.linear(x, pack_linear(weight, None)), unbiased.float()) < BOUND


@needs_library
@pytest.mark.parametrize("half", [16, 40])
def test_a_gated_weight_pairs_gates_with_what_they_scale(half):
    weight = torch.randn(2 * half, 9, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    pairs = library.linear(x, pack_linear(weight, None, is_gated=True)).view(3, -1, 2, PANEL // 2)
    gate, up = (part.flatten(1)[:, :half] for part in pairs.unbind(2))
    assert relative_error(torch.cat((gate, up), 1), x @ weight.T) < BOUND


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size", "window"),
    [(8, 4, 64, 16, None), (4, 4, 12, 4, 7), (4, 1, 80, 8, None), (2, 2, 256, 16, 33)],
)
def test_attention(allows_amx, dtype, num_heads, num_kv_heads, head_size, block_size, window):
    has_pairs = build.cpu_flags() & {"avx512_bf16", "amx_bf16"} == {"avx512_bf16"}
    is_rounded = (allows_amx or has_pairs) and dtype == torch.bfloat16 and head_size % 32 == 0
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        poisoned(60, block_size, num_kv_heads, head_size, device=CPU, dtype=dtype) for _ in range(2)
    )
    scattered = torch.randperm(60, generator=generator)
    for number, (num_queries, kv_len) in enumerate(
        [(1, 37), (5, 5), (100, 150), (1, 1), (33, 64), (129, 200), (3, 41)]
    ):
        num_blocks = -(-kv_len // block_size)
        blocks = slice(3, 3 + num_blocks) if number % 2 else scattered[:num_blocks]
        used = torch.arange(60)[blocks] if isinstance(blocks, slice) else blocks
        for cache in (keys, values):  # nothing beyond the context may be read
            rows = cache[used].flatten(0, 1)
            rows[:kv_len] = torch.randn(kv_len, num_kv_heads, head_size, generator=generator).to(
                dtype
            )
            cache[used] = rows.view(num_blocks, *cache.shape[1:])
        segments = [
            make_segment(
                0,
                num_queries,
                kv_len,
                blocks,
                sliding_window=window,
                device=CPU,
                dtype=torch.float64,
            )
        ]
        query = torch.randn(num_queries, num_heads, head_size, generator=generator)
        scale = head_size**-0.5
        found = library.attention(query, keys, values, segments, scale, window)
        expected = paged_attention(query.double(), keys.double(), values.double(), segments, scale)
        assert relative_error(found, expected.float()) < (
            ROUNDED if is_rounded and num_queries > 1 else BOUND
        )


@needs_library
def test_attention_to_scores_far_apart_is_exact():
    """The softmax keeps an old maximum until a new one is far above it."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 16, 2, 32, generator=generator) for _ in range(2))
    for growth in (0.0, 0.02, 0.3, 5.0):
        steep = keys * torch.exp(growth * torch.arange(40.0)).clamp(max=1e9)[:, None, None, None]
        query = torch.randn(70, 4, 32, generator=generator)
        segments = [
            make_segment(
                0, 70, 640, slice(0, 40), sliding_window=None, device=CPU, dtype=torch.float64
            )
        ]
        expected = paged_attention(query.double(), steep.double(), values.double(), segments, 0.2)
        found = library.attention(query, steep, values, segments, 0.2, None)
        assert found.isfinite().all()
        assert relative_error(found, expected.float()) < 2e-5, growth


@needs_library
def test_greedy_takes_the_first_of_the_largest_and_tells_of_nan():
    logits = torch.zeros(4, 37)
    logits[0, 36] = 1
    logits[1, 5] = float("nan")
    logits[3] = float("-inf")
    assert library.greedy(logits, NAN_TOKEN).tolist() == [36, NAN_TOKEN, 0, 0]


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    theirs = make_checkpoint(request.param, directory)
    return AutoModel(str(directory)).resolve("unused"), theirs


def requests() -> list[Request]:
    rng = np.random.default_rng(11)
    lengths = [(19, 6), (7, 9), (45, 3), (5, 1), (23, 5)]
    return [
        Request(i, 0.0, p, d, rng.integers(0, 97, p, dtype=np.int32))
        for i, (p, d) in enumerate(lengths)
    ]


def native_model(spec, directory, dtype=torch.float32):
    model = load_model(spec, directory, CPU, dtype, seed=0)
    backend.use_native(model)
    return model


@needs_library
def test_greedy_tokens_equal_generate(checkpoint):
    (spec, directory), theirs = checkpoint
    model = native_model(spec, directory)
    greedy = greedy_tokens(theirs, requests())
    for policy in (Sarathi(chunk=5), SarathiServe(chunk=16)):
        scheduler = scheduler_for(
            policy, batch_size=3, num_blocks=40, block_size=4, max_model_len=48
        )
        ledger = Ledger()
        run_engine(requests(), scheduler, TorchExecutor(model, num_blocks=40, block_size=4), ledger)
        table = ledger.requests()
        assert dict(zip(table.request_id, table.output_token_ids, strict=True)) == greedy, policy


def logits_of(model, num_tokens: int, emit_rows: list[int]) -> torch.Tensor:
    """Of a prompt in two chunks, poisoned beforehand; `emit_rows` of the second."""
    tokens = np.random.default_rng(0).integers(0, 97, 20 + num_tokens, dtype=np.int32)
    sequence = SequenceState(Request(0, 0.0, len(tokens), 1, tokens), order=0)
    BlockManager(40, 4).grow(sequence, len(tokens))
    executor = TorchExecutor(model, num_blocks=40, block_size=4)
    executor.cache = KVCache(model.spec, 40, 4, CPU, model.dtype)
    executor.cache.keys.fill_(float("nan"))
    executor.cache.values.fill_(float("nan"))
    for start, size in ((0, 20), (20, num_tokens)):
        batch = Batch()
        sequence.num_computed, sequence.in_flight = start, False
        batch.add(sequence, size)
        inputs = executor.packed(batch)
        if start:
            inputs = replace(inputs, emit_rows=torch.tensor(emit_rows, dtype=torch.int64))
        logits = model(inputs, executor.cache)
    return logits.float()


@needs_library
@pytest.mark.parametrize("emit_rows", [[], [0, 69], [5, 3, 5]], ids=str)
def test_logits_of_any_rows(emit_rows):
    expected = logits_of(load_model(SPEC, None, CPU, torch.float32, seed=0), 70, emit_rows)
    found = logits_of(native_model(SPEC, None), 70, emit_rows)
    assert found.shape == expected.shape
    assert not emit_rows or relative_error(found, expected) < BOUND


@needs_library
def test_bfloat16_is_as_near_to_float32_as_torch_is(allows_amx):
    rows = list(range(70))
    exact = logits_of(load_model(SPEC, None, CPU, torch.float32, seed=0), 70, rows)
    torchs = relative_error(
        logits_of(load_model(SPEC, None, CPU, torch.bfloat16, seed=0), 70, rows), exact
    )
    ours = relative_error(logits_of(native_model(SPEC, None, torch.bfloat16), 70, rows), exact)
    assert 0 < ours < 1.5 * torchs


@needs_library
def test_there_is_one_copy_of_the_weights():
    model = native_model(SPEC, None)
    held = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert held == SPEC.vocab_size * SPEC.hidden_size  # the embedding; others are packed


# -- what it is called with ------------------------------------------------------------------------


def called(model, **changes) -> torch.Tensor:
    """A prompt of six tokens in two blocks of four, by the decoder alone."""
    spec, steps = model.spec, torch.arange(6)
    shape = (spec.num_layers, 3, 4, spec.num_kv_heads, spec.head_size)
    arguments = {
        "token_ids": steps,
        "positions": steps,
        "slots": steps + 4,
        "emit_rows": steps[5:],
        "segments": [Segment(0, 6, 6, slice(1, 3), 0, None)],
        "keys": torch.zeros(shape),
        "values": torch.zeros(shape),
        "tables": (torch.ones(6, 1, spec.head_size // 2), torch.zeros(6, 1, spec.head_size // 2)),
    }
    return model.operations.decoder.forward(**{**arguments, **changes})


@needs_library
@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": torch.tensor([0, 1, 2, 3, 4, 97])},
        {"positions": torch.tensor([0, 1, 2, 3, 4, 6])},
        {"slots": torch.tensor([4, 5, 6, 7, 8, -1])},
        {"emit_rows": torch.tensor([6])},
        {"slots": torch.arange(5)},
        {"token_ids": torch.arange(6).int()},
        {"keys": torch.zeros(2, 3, 4, 2, 12).bfloat16()},
        {"values": torch.zeros(2, 3, 4, 2, 14)[..., :12]},
        {"keys": torch.zeros(2, 3, 4, 1, 12), "values": torch.zeros(2, 3, 4, 1, 12)},
        {"tables": (torch.ones(6, 1, 7), torch.zeros(6, 1, 7))},
        {"segments": [Segment(0, 6, 6, slice(2, 4), 0, None)]},  # beyond the cache
        {"segments": [Segment(0, 6, 6, slice(1, 2), 0, None)]},  # too short
        {"segments": [Segment(0, 6, 6, torch.tensor([1, 3]), 0, None)]},
        {"segments": [Segment(0, 5, 6, slice(1, 3), 0, None)]},
        {"segments": []},
    ],
    ids=str,
)
def test_what_lies_beyond_a_tensor_is_not_touched(changes):
    model = native_model(SPEC, None)
    assert called(model).shape == (1, 97)
    with pytest.raises(ValueError, match=r"."):
        called(model, **changes)


@needs_library
@pytest.mark.parametrize("name", ["qkv", "query_norm"])
def test_weights_of_other_sizes_are_refused_by_name(name):
    model = native_model(replace(SPEC, qk_norm=True), None)  # which the decoder points into
    struct = model.operations.decoder.struct
    check_model(struct)
    field = getattr(struct.layers[1], name)
    setattr(field, "size" if "norm" in name else "in_features", 13)
    with pytest.raises(ValueError, match=f"layer 1's {name}$"):
        check_model(struct)


# -- without it ------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """Nothing compiled so far, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.opened.cache_clear()
    backend.why_not_built.cache_clear()
    yield tmp_path
    library.opened.cache_clear()
    backend.why_not_built.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/no/such/compiler", "does not run"), ("/bin/false", "does not compile|gave no reason")],
)
def test_without_a_compiler_torch_computes_and_says_so(unbuilt, monkeypatch, compiler, reason):
    monkeypatch.setattr(build, "cpu_flags", lambda: build.NEEDED["avx2"])
    monkeypatch.setenv("CXX", compiler)
    (caution,) = TorchBackend(device="cpu").cautions(SPEC)
    assert "plain torch computes this" in caution
    with pytest.raises(UserError, match=reason):
        TorchBackend(device="cpu", kernels="native").check(SPEC, 16)
    assert not list(unbuilt.rglob("*.so"))


def test_float16_is_left_to_torch():
    (caution,) = TorchBackend(device="cpu", dtype="float16").cautions(SPEC)
    assert "float16" in caution
    assert TorchBackend(device="cpu", kernels="torch", dtype="float16").cautions(SPEC) == []
    with pytest.raises(UserError, match="float16"):
        TorchBackend(device="cpu", dtype="float16", kernels="native").check(SPEC, 16)


@pytest.fixture
def compiled(unbuilt, monkeypatch) -> list[Path]:
    """What was compiled so far, by a compiler that takes no time."""
    monkeypatch.setattr(build, "cpu_flags", lambda: build.NEEDED["avx2"])
    monkeypatch.setenv("CXX", "c++")
    made: list[Path] = []

    def run(command: list[str]) -> str:
        if "-o" in command:
            made.append(Path(command[-1]))
            made[-1].write_bytes(b"a library" * 100)
        return "version 1"

    monkeypatch.setattr(build, "run_compiler", run)
    return made


def test_a_second_load_compiles_nothing(compiled):
    assert build.build() == build.build()
    assert len(compiled) == 1


@pytest.mark.parametrize("keep", [0, 0.999])
def test_a_damaged_library_is_compiled_again(compiled, keep):
    library_file = build.build()
    content = library_file.read_bytes()
    library_file.write_bytes(content[: int(keep * len(content))])
    assert build.build().read_bytes() == content
    library_file.with_name(f"{library_file.name}.sha256").write_bytes(b"\xff")
    assert build.build().read_bytes() == content
    library_file.with_name(f"{library_file.name}.sha256").unlink()
    assert build.build().read_bytes() == content
    assert len(compiled) == 4


def test_a_library_that_cannot_be_loaded_leaves_all_to_torch(compiled):
    (caution,) = TorchBackend(device="cpu").cautions(SPEC)
    assert "plain torch computes this" in caution
    assert "can't be loaded" in caution

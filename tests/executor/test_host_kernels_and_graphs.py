"""What a host chooses: its attention kernel, and the batches that it has captured."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sarathi_lab import load_option
from sarathi_lab.config.csv_files import csv_file
from sarathi_lab.config.errors import UserError
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs, vllm_sizes
from sarathi_lab.executor.simulated.kernel_times import AttentionTimes

TABLES = Path("experiments/lab/cost_model/tables")


def cost(model="llama3.1-8b", cost_model="analytic", **of_host):
    host = replace(load_option("host", "none"), **of_host)
    hardware = load_option("hardware", "h100")
    return SimulatedBackend(hardware, host=host, cost_model=cost_model).cost_of(
        load_option("model", model)
    )


def test_flash_attention_2_on_an_h100_takes_as_long_as_measured_behind_contexts():
    rows = pd.read_csv(csv_file(TABLES / "h100-flash_attention_2" / "attention.csv"))
    errors = {}
    for kernel in (None, "flash_attention_2"):
        hardware = load_option("hardware", "h100").with_kernel(kernel)
        times = AttentionTimes(hardware, 16, 2, 128, 256)
        chunks = zip(rows.kv_prefill, rows.prefill_chunk, strict=True)
        predicted = [1e6 * times.prefill([chunk]) for chunk in chunks]
        errors[kernel] = (predicted / rows.time_us - 1).abs().mean()
    assert errors["flash_attention_2"] < 0.03 < 0.4 < errors[None]


def test_a_kernel_that_the_tables_do_not_have_is_computed_by_formula():
    batch = make_batch(prefill_tokens=512, start=1024)
    by_formula, by_tables = (
        cost(cost_model=level, attention_kernel="tensorrt_llm").operations.attention_times(batch)
        for level in ("analytic", "profiled")
    )
    assert by_formula == by_tables
    with pytest.raises(UserError, match="flash_attention_2, tensorrt_llm, null"):
        cost(attention_kernel="fa9")


@pytest.mark.parametrize(
    ("mode", "decodes", "mixed"),
    [
        ("full", (16, 0.0), (32, 0.0)),
        ("piecewise", (16, 1.0), (32, 1.0)),
        ("full_and_piecewise", (16, 0.0), (32, 1.0)),
        ("full_decode_only", (16, 0.0), (29, 3.0)),
        ("none", (9, 3.0), (29, 3.0)),
    ],
)
def test_a_batch_is_padded_and_launched_as_its_mode_has_it(mode, decodes, mixed):
    graphs = CudaGraphs(mode=mode, largest=64, layer_launch=3.0, piece_launch=1.0)
    assert graphs.launched(make_batch(num_decodes=9)) == decodes
    assert graphs.launched(make_batch(num_decodes=9, prefill_tokens=20)) == mixed
    assert graphs.launched(make_batch(num_decodes=9, prefill_tokens=56)) == (65, 3.0)


def test_sizes_are_vllms():
    assert vllm_sizes(4) == [1, 2, 4]
    assert vllm_sizes(300)[-4:] == [256, 272, 288, 300]
    assert CudaGraphs(mode="full", sizes=[8, 2]).captured == [2, 8]
    with pytest.raises(UserError, match=r"host\.graphs\.largest=64 has no effect"):
        CudaGraphs(mode="full", sizes=[8], largest=64)


@pytest.mark.parametrize("setting", ["visible", "visible_sequence"])
def test_what_a_host_leaves_visible_is_of_one_that_overlaps(setting):
    batch = make_batch(num_decodes=2)
    host = replace(load_option("host", "vllm_0_12"), overlaps=True)
    seen = replace(host, **{setting: 0.25})
    assert seen.exposed(batch, 9.0) > host.exposed(batch, 9.0)
    with pytest.raises(UserError, match=rf"host\.{setting}=0\.25 has no effect, as host\.overlaps"):
        replace(seen, overlaps=False)


@pytest.mark.parametrize("stated", [{"largest": 8}, {"sizes": [8]}])
def test_captured_sizes_need_a_mode(stated):
    with pytest.raises(UserError, match=r"has no effect, as no mode.*add host\.graphs\.mode"):
        CudaGraphs(**stated)


@pytest.mark.parametrize("stated", [{"sequence": 0.25}, {"overlaps": True}])
def test_a_pipeline_has_no_host(stated):
    hardware = load_option("hardware", "h100")
    host = replace(load_option("host", "none"), **stated)
    ((name, value),) = stated.items()
    words = rf"pipeline of 2 stages has no host, so that host\.{name}={value} \(host=none\)"
    with pytest.raises(UserError, match=words):
        SimulatedBackend(hardware, host=host, pipeline_parallel=2)


def test_the_longer_of_device_and_launches_counts():
    small, large = make_batch(num_decodes=4), make_batch(num_decodes=4, prefill_tokens=4096)
    free, eager = (
        cost(graphs=CudaGraphs(mode=mode, layer_launch=0.5e-3)) for mode in (None, "none")
    )
    layers = free.spec.num_layers
    assert eager.iteration_time(small) == pytest.approx(
        free.iteration_time(small) + layers * (0.5e-3 - free.layer_time(small))
    )
    assert eager.iteration_time(large) == free.iteration_time(large)
    for batch in (small, large):
        assert sum(eager.operation_times(batch).values()) == pytest.approx(
            eager.iteration_time(batch)
        )


def test_a_fused_kernel_takes_the_conversions_behind_it_and_an_all_reduce_its_norm():
    """Of llama3.1-8b on two devices: four conversions of 3 bytes an element, two norms of 8."""
    tokens, spec = 8, load_option("model", "llama3.1-8b")
    hardware = load_option("hardware", "h100")

    def layer(*fused):
        host = replace(load_option("host", "none"), fused=list(fused) or None)
        backend = SimulatedBackend(hardware, tensor_parallel=2, weights="fp8", host=host)
        return sum(backend.cost_of(spec).operations.times("layer", tokens).values())

    def moved(num_bytes):
        return hardware.kernel_launch + tokens * num_bytes / hardware.memory_rate

    hidden, ffn = spec.hidden_size, spec.ffn_size // 2
    assert layer() - layer("activation") == pytest.approx(moved(3 * ffn))
    assert layer() - layer("attention") == pytest.approx(moved(3 * hidden // 2))
    assert layer() - layer("norm") == pytest.approx(2 * moved(3 * hidden))
    both = 2 * moved(3 * hidden) + 2 * moved(8 * hidden)
    assert layer() - layer("all_reduce") == pytest.approx(both)
    with pytest.raises(UserError, match=r"host\.fused=rope is unknown; use one of attention"):
        layer("rope")


def test_attention_to_a_cache_in_8_bits_is_by_formula_beside_measured_products():
    batch = make_batch(prefill_tokens=512, start=1024)
    of = replace(load_option("model", "llama3.1-8b"), kv_dtype="fp8")
    both = (
        SimulatedBackend(load_option("hardware", "h100"), cost_model=level).cost_of(of)
        for level in ("analytic", "profiled")
    )
    formula, tables = (each.operations for each in both)
    assert tables.attention_times(batch) == formula.attention_times(batch)
    assert "attention" in tables.caution.split("no table has them: ")[1]
    assert tables.times("layer", 512)["ffn_up"] != formula.times("layer", 512)["ffn_up"]

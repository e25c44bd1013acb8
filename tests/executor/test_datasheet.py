"""Cards by figures of their datasheets: what they take over, what they assume, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import SPEC, TWO_LAYERS, batch_of

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import build, load_option, option_files
from sarathi_lab.config.sweeper import compose
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.datasheet import ASSUMED_ERROR, ERROR_OF_OTHER_MAKER, datasheet
from sarathi_lab.executor.simulated.hardware import Hardware

H100 = load_option("hardware", "h100")
UNMEASURED = (
    *("rtx-5090", "rtx-3090", "l4", "a10", "h20", "h100-pcie", "gb200", "b300", "mi300x", "gb10"),
)


def test_what_is_not_stated_is_that_of_the_base() -> None:
    card = datasheet("mine", "h100", bandwidth=2e12)
    assert isinstance(card, Hardware)
    assert (card.name, card.bytes_per_second, card.tables) == ("mine", 2e12, None)
    for figure in ("flops_per_second", "memory_bytes", "num_sms", "link_bytes_per_second"):
        assert getattr(card, figure) == getattr(H100, figure)
    assert card.with_kernel("flash_attention_2").hybrid_call
    assert card.l2_bytes == H100.l2_bytes
    assert datasheet("mine", "h100", l2=6e6).l2_bytes == 6e6
    half = datasheet("mine", "h100", peak=H100.flops_per_second / 2)
    assert half.num_sms == H100.num_sms / 2


def test_three_figures_are_enough_and_links_are_unknown() -> None:
    card = datasheet("mine", peak=1e14, bandwidth=1e12, memory=8e10)
    assert card.link_bytes_per_second is None
    assert card.matmul_efficiency == H100.matmul_efficiency
    with pytest.raises(UserError, match=r"no link_bytes_per_second.*hardware\.link"):
        SimulatedBackend(card, tensor_parallel=2).check(TWO_LAYERS, 0)


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({"peak": 1e14}, "hardware.bandwidth is not stated"),
        ({"base": "l4"}, "hardware.base=l4 is no card whose kernels were measured"),
        ({"base": "nothing"}, "hardware.base=nothing"),
        ({"base": "h100", "link": -1}, "hardware.link=-1"),
        ({"base": "h100", "peak": "fast"}, "hardware.peak=fast"),
        ({"base": "h100", "num_sms": 0}, "hardware.num_sms=0"),
        ({"base": "h100", "l2": 96}, "hardware.l2=96 is less than any card has"),
        ({"base": "h100", "error": 0}, "hardware.error=0"),
        ({"name": "", "base": "h100"}, "hardware.name="),
    ],
    ids=str,
)
def test_figures_that_are_refused(figures: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        datasheet(**{"name": "mine", **figures})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("peak", 500, "FLOP/s"),
        ("bandwidth", 2, "bytes/s"),
        ("link", 900, "bytes/s"),
        ("memory", 64, "bytes, such as 40e9"),
    ],
)
def test_a_figure_in_another_unit_is_refused(name: str, value: float, unit: str) -> None:
    refusal = rf"hardware\.{name}={value} is less than any card has; .* in {unit}"
    with pytest.raises(UserError, match=refusal):
        datasheet("mine", "h100", **{name: value})


@pytest.mark.parametrize("name", UNMEASURED)
def test_cards_by_their_datasheets_say_so_wherever_they_are_used(name: str) -> None:
    card = load_option("hardware", name)
    assert card.is_datasheet
    assert min(card.uncertainty.values()) >= ASSUMED_ERROR
    backend = SimulatedBackend(card)
    assert any("none was measured on it" in caution for caution in backend.cautions(SPEC))
    cost = backend.predictor(SPEC).operation_times(batch_of(chunk=64))
    assert all(seconds >= 0 for seconds in cost.values())
    fp8_peak = card.fp8_flops_per_second
    assert fp8_peak is None or fp8_peak > card.flops_per_second


def test_a_card_may_be_described_without_choosing_an_option() -> None:
    settings = ["executor=simulated", "hardware.base=h100", "hardware.name=x", "tracking=none"]
    (job,) = compose(settings).jobs
    card = build(job.cfg.hardware)
    assert (card.name, card.is_datasheet) == ("x", True)
    assert card.uncertainty["matmul"] == ASSUMED_ERROR
    with pytest.raises(UserError, match=r"hardware\.base"):
        compose([*settings, "hardware=h100"])


def test_an_error_that_is_stated_takes_the_place_of_the_assumed_one() -> None:
    stated = SimulatedBackend(datasheet("mine", "h100", error=0.5)).cost_of(SPEC).uncertainty
    assert set(stated.values()) == {0.5}
    of_other_maker = datasheet("mine", "h100", maker="amd")
    assert of_other_maker.uncertainty["matmul"] == ERROR_OF_OTHER_MAKER


def test_every_other_card_was_measured() -> None:
    others = {*option_files("hardware")} - {*UNMEASURED, "auto", "datasheet"}
    assert not any(load_option("hardware", name).is_datasheet for name in others)


def test_a_peak_of_fewer_bits_is_the_bases_only_with_its_other_peaks() -> None:
    base = load_option("hardware", "b200").int8_flops_per_second
    assert datasheet("mine", "b200", bandwidth=7e12).int8_flops_per_second == base
    assert datasheet("mine", "b200", fp8_peak=4e15).int8_flops_per_second is None
    assert datasheet("mine", "b200", peak=2e15).fp8_flops_per_second is None
    assert load_option("hardware", "a10").fp8_flops_per_second is None  # its base has one
    b300 = load_option("hardware", "b300")
    assert b300.int8_flops_per_second < b300.flops_per_second < b300.fp8_flops_per_second


def test_a_card_of_another_maker_has_none_of_its_bases_attention_backends() -> None:
    of_amd = datasheet("mine", "h100", maker="amd")
    assert of_amd.kernels == {}
    assert of_amd.matmul_efficiency == H100.matmul_efficiency
    assert not any("flash" in line for line in SimulatedBackend(of_amd).cautions(SPEC))
    assert datasheet("mine", "h100").kernels == H100.kernels
    unknown = datasheet("mine", peak=1e14, bandwidth=1e12, memory=8e10)
    assert unknown.maker is None
    assert not any("flash" in line for line in SimulatedBackend(unknown).cautions(SPEC))
    with pytest.raises(UserError, match=r"hardware\.maker=intel is unknown.*nvidia, amd"):
        datasheet("mine", "h100", maker="intel")


def test_a_host_of_another_maker_is_refused() -> None:
    card = load_option("hardware", "mi300x")
    with pytest.raises(UserError, match=r"host=trtllm_1_0 .*mi300x is of amd; use host=vllm_0_19"):
        SimulatedBackend(card, host=load_option("host", "trtllm_1_0"))
    SimulatedBackend(card, host=load_option("host", "vllm_0_19"))

"""Rates of a card itself, which scale the file of its kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.executor.simulated.kernel_times import at_measured_rates, lasting_product_rate

A100: Hardware = load_option("hardware", "a100")
SPEC = load_option("model", "llama3.1-8b")


def seconds(card: Hardware, **composition: int) -> float:
    return SimulatedBackend(card).cost_of(SPEC).iteration_time(make_batch(**composition))


def test_a_device_has_the_rates_that_were_measured() -> None:
    card = at_measured_rates(replace(A100, product_rate=150e12, cache_rate=1e12))
    assert lasting_product_rate(card) == pytest.approx(150e12, rel=0.01)
    assert card.kv_rate == pytest.approx(1e12)
    # As the file has them they change nothing.
    same = replace(A100, product_rate=lasting_product_rate(A100), cache_rate=A100.kv_rate)
    assert seconds(same, prefill_tokens=512) == pytest.approx(seconds(A100, prefill_tokens=512))


def test_each_rate_scales_what_it_bounds() -> None:
    slow_products = replace(A100, product_rate=lasting_product_rate(A100) / 2)
    slow_cache = replace(A100, cache_rate=A100.kv_rate / 2)
    prompt = {"prefill_tokens": 8192}
    decodes = {"num_decodes": 4, "context": 8192}
    assert seconds(slow_products, **prompt) == pytest.approx(2 * seconds(A100, **prompt), rel=0.1)
    assert seconds(slow_products, **decodes) == pytest.approx(seconds(A100, **decodes), rel=0.15)
    assert seconds(slow_cache, **decodes) == pytest.approx(2 * seconds(A100, **decodes), rel=0.15)


def test_no_rate_is_above_its_peak() -> None:
    with pytest.raises(UserError, match=r"hardware\.product_rate=4e\+14 is above the peak of a100"):
        replace(A100, product_rate=4e14)
    with pytest.raises(UserError, match=r"hardware\.cache_rate=3e\+12 is above the peak of a100"):
        replace(A100, cache_rate=3e12)


def test_tables_do_not_read_them() -> None:
    card = replace(A100, cache_rate=1e12)
    with pytest.raises(UserError, match=r"hardware\.cache_rate=1e\+12 scales the formulas"):
        SimulatedBackend(card, cost_model="profiled")

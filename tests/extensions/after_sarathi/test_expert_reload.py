"""What chunks of a prompt cost where they load experts again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.cost_model import make_cost_model
from sarathi_lab.experiment.bench import CostBench
from sarathi_lab.experiment.registry import CATALOG
from sarathi_lab.results import load
from sarathi_lab.run import main

TINY, H100 = load_option("model", "tiny"), load_option("hardware", "h100")
SIZES = {"prompt_len": 80, "chunks": [32], "decodes": [3], "context": 9}


class HandCost:
    """An FFN of 1 second and 0.1 a token, attention of 0.01 a token of context."""

    has_operations = True
    uncertainty = {"matmul": 0.0, "attention": 0.0}  # noqa: RUF012

    def operation_times(self, batch):
        read = batch.prefill_kv_tokens + batch.decode_kv_tokens
        return {"ffn": 1 + 0.1 * batch.num_tokens, "prefill_attention": 0.01 * read}


def points(bench, sizes=SIZES, spec=TINY):
    parts = CATALOG["expert_reload"].parts(spec, sizes)
    return {(p.panel, p.x): p.y for part in parts for p in part.points(bench)}


def test_ratios_by_hand():
    found = {place: y.value for place, y in points(CostBench(HandCost())).items()}
    read = 0.01 * (32 + 64 + 80)
    whole, decodes = 1 + 8 + 0.8, 1 + 0.3 + 0.27
    assert found == {
        ("FFN / whole", 32): pytest.approx((3 + 8) / 9),
        ("prefill / whole", 32): pytest.approx((3 + 8 + read) / whole),
        ("beside 3 decodes / apart", 32): pytest.approx(
            (3 + 8 + 0.9 + read + 3 * 0.27) / (whole + 3 * decodes)
        ),
        ("longest gap / whole", 32): pytest.approx((1 + 3.2 + 0.3 + 0.64 + 0.27) / whole),
    }


@pytest.mark.parametrize("level", ["analytic", "profiled"])
def test_experts_are_loaded_again_where_dense_products_are_not(level):
    sizes = {"prompt_len": 8192, "chunks": [512], "decodes": [8], "context": 1024}
    found = {
        name: points(CostBench(make_cost_model(level, load_option("model", name), H100, 2)), sizes)
        for name in ("qwen3-30b-a3b", "llama3.2-3b")
    }
    mixture, dense = (own["FFN / whole", 512].value for own in found.values())
    assert mixture > 4 > 1.3 > dense
    apart = [own["beside 8 decodes / apart", 512].value for own in found.values()]
    assert apart[0] > 1.3 > 1 > apart[1]


def test_an_interval_has_the_experts_own_error():
    spec = load_option("model", "qwen3-30b-a3b")

    def error(experts):
        known = {"matmul": 0.0, "attention": 0.0, "experts": experts}
        cost = make_cost_model("analytic", spec, replace(H100, uncertainty=known), 2)
        estimate = points(CostBench(cost))["FFN / whole", 32]
        ends = estimate.ends
        return ends.high / estimate.value - 1

    assert np.isnan(error(0.0))
    assert 0.1 < error(0.1) < error(0.2)
    dense = make_cost_model("analytic", TINY, H100, 2).uncertainty
    assert set(dense) == {"matmul", "attention"}


def test_its_models_are_simulated_together_on_as_many_devices_as_hold_them(tmp_path):
    args = ["experiment=expert_reload", "executor=simulated", "hardware=h200", "tracking=none"]
    args += ["task.processes=1"]
    dry = [f"task.sizes.paper={{{', '.join(f'{name}: {v}' for name, v in SIZES.items())}}}"]
    assert main([*args, *dry, f"output={tmp_path}/out", f"task.record={tmp_path}/records"]) == 0
    table = load.load("expert_reload", tmp_path / "records")
    own = CATALOG["expert_reload"].papers
    assert list(table.model.unique()) == [on.model for on in own]
    is_two = table.groupby("model").device_name.first().str.contains("2 x 1")
    assert dict(is_two) == {on.model: on.num_devices == 2 for on in own}

"""The power model, and the energy of a simulated run."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from composed import run

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.extensions.energy import PowerModel

POWER = PowerModel(idle_watts=100.0, limit_watts=500.0, compute_weight=2.0, exponent=0.5)


def test_power_rises_from_idle_to_the_limit_with_either_kind_of_work():
    shares = np.linspace(0, 1, 11)
    for watts in (POWER.watts(shares, 0.0), POWER.watts(0.0, shares), POWER.watts(shares, shares)):
        assert (np.diff(watts) >= 0).all()
        assert watts[0] == 100.0
        assert watts[-1] == 500.0
    assert POWER.watts(0.02, 0.0) == pytest.approx(100 + 400 * 0.2)  # by hand: sqrt(2 x 0.02)
    assert POWER.watts(0.0, 0.04) == pytest.approx(100 + 400 * 0.2)


def test_energy_is_that_of_the_iterations_and_of_idling_beside_them():
    """Two iterations of 1 s and 2 s in 10 s on 2 devices: 14 s of idle devices."""
    iterations = pd.DataFrame({"busy": [1.0, 2.0], "mfu": [0.02, 0.5], "mbu": [0.0, 0.5]})
    table = POWER.add_energy(iterations, num_devices=2)
    assert table.watts.tolist() == pytest.approx([180.0, 500.0])
    summary = {"duration": 10.0, "num_prompt_tokens": 90.0, "num_output_tokens": 10.0}
    found = POWER.metrics(table, summary, num_devices=2)
    joules = 2 * (180 * 1 + 500 * 2) + 14 * 100
    assert found["energy"] == pytest.approx(joules)
    assert found["joules_per_token"] == pytest.approx(joules / 100)
    assert found["joules_per_output_token"] == pytest.approx(joules / 10)
    assert found["mean_watts"] == pytest.approx(joules / 20)
    # The same iterations on two instances of a device each: one idles while the other works.
    both = POWER.metrics(POWER.add_energy(iterations, 1), summary, 2, num_instances=2)
    assert both["energy"] == pytest.approx(180 + 2 * 500 + 17 * 100)


@pytest.mark.parametrize("wrong", [{"idle_watts": 500.0}, {"exponent": 0.0}, {"limit_watts": -1}])
def test_constants_that_no_device_has_are_refused(wrong):
    with pytest.raises(UserError, match="correct the hardware file"):
        replace(POWER, **wrong)


@pytest.mark.parametrize("hardware", ["a100", "b200"])
def test_only_a_run_on_hardware_of_known_power_has_energy(hardware, tmp_path):
    small = (
        "task=serve",
        "model=tiny",
        "workload.num_requests=4",
        "seq_len=64",
        "baselines=[]",
        "chunk=32",
    )
    result = run(tmp_path, "executor=simulated", f"hardware={hardware}", *small)
    names = {"energy", "joules_per_token", "joules_per_output_token", "mean_watts"}
    power = load_option("hardware", hardware).power
    assert names & set(result.summary) == (names if power else set())
    iterations = result.tables["iterations.parquet"]
    assert {"watts", "energy"} & set(iterations) == ({"watts", "energy"} if power else set())
    if power:
        assert power.idle_watts < result.summary["mean_watts"] <= power.limit_watts

"""How far off are decodes of a model over two GPUs on PCIe, by the host that is assumed?

    python experiments/lab/real_servers/two_gpus.py

Prints the measured times of a token in two_gpus.csv (batches without prompts of a pinned run,
two_gpus.md) beside those by formula.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.backend import SimulatedBackend

HERE = Path(__file__).parent
HOSTS = ("vllm_0_19", "vllm_async")


def predicted(users: float, context: int, host: str) -> float:
    """Compute the milliseconds of a batch of decodes of Qwen3-32B on two RTX PRO 6000."""
    backend = SimulatedBackend(
        load_option("hardware", "rtx-pro-6000"),
        tensor_parallel=2,
        host=load_option("host", host),
    )
    predictor = backend.predictor(load_option("model", "qwen3-32b"))
    assert predictor is not None, "a simulated device has one"
    return 1e3 * predictor(make_batch(num_decodes=round(users), context=context))


def errors() -> pd.DataFrame:
    """Return the measured batches with a relative error by each host."""
    table = pd.read_csv(HERE / "two_gpus.csv")
    for host in HOSTS:
        times = []
        for row in table.itertuples():
            times.append(predicted(row.users, row.context, host))
        table[host] = times / table.token_ms - 1
    return table


if __name__ == "__main__":
    print(errors().to_string(index=False, formatters=dict.fromkeys(HOSTS, "{:+.1%}".format)))

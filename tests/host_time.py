"""What the host takes for an iteration on a GPU: `python tests/host_time.py`.

The device is stubbed: work is packed, copied and booked as on a GPU, two batches in flight and all
of them replayed, but nothing is computed or launched. Prints the lower decile of microseconds of
the parts of an iteration, decodes with a chunk beside them now and then.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.shapes import Limits, NoGraphs, Shape
from sarathi_lab.model.operations import PackedInputs
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.policy import SarathiServe

BATCHES, SEQ_LEN, BLOCK_SIZE = (18, 256), 1024, 16
PARTS = {
    Scheduler: ("schedule", "advance", "update"),
    TorchExecutor: ("submit", "collect"),
    Ledger: ("record",),
}


class Replayed(NoGraphs):
    """Says of everything that it was replayed."""

    def replay(self, shape: Shape) -> bool:
        return True


class Stubbed(TorchExecutor):
    """Computes nothing."""

    def _run(self, inputs: PackedInputs) -> None: ...


def main() -> None:
    for batch_size, found in microseconds().items():
        parts = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
        print(f"batch of {batch_size}: {sum(found.values()):.0f} us ({parts})")


def microseconds() -> dict[int, dict[str, float]]:
    """Return the microseconds of an iteration's parts by the size of its batch."""
    torch.set_num_threads(1)
    found = {}
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for cls, names in PARTS.items():
        for name in names:
            setattr(cls, name, timed(getattr(cls, name), seconds[name]))
    for batch_size in BATCHES:
        serve_stubbed(batch_size)
        found[batch_size] = {
            name: 1e6 * float(np.quantile(times, 0.1)) for name, times in seconds.items()
        }
        for times in seconds.values():
            times.clear()
    return found


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - start)
        return result

    return call


def serve_stubbed(batch_size: int) -> None:
    """As many requests as run at once, an eighth of their tokens prompt."""
    spec = load_option("model", "tiny")
    operations = SimpleNamespace(range=None)
    model = SimpleNamespace(
        spec=spec, device=torch.device("cpu"), dtype=torch.float32, operations=operations
    )
    num_blocks = batch_size * (SEQ_LEN // BLOCK_SIZE + 1)
    limits = Limits(spec, BLOCK_SIZE, num_sms=132)
    executor = Stubbed(
        cast(Transformer, model),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        limits=limits,
        capacity=2,
        graphs=Replayed(),
    )
    executor.warm_up(batch_size=batch_size, chunk_tokens=512, longest=SEQ_LEN)
    prompt = np.zeros(SEQ_LEN // 8, dtype=np.int32)
    requests = [
        Request(i, 0.0, len(prompt), SEQ_LEN - len(prompt) - i % 7, prompt)
        for i in range(batch_size)
    ]
    sizes = {"batch_size": batch_size, "num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    serve(requests, EngineConfig(SarathiServe(chunk=512), **sizes), executor)


if __name__ == "__main__":
    main()

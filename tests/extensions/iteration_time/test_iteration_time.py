"""The task that times iterations by their size: what it runs, what it leaves and prints, what it
refuses.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from composed import checked, run

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.single_iteration import SingleIteration
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.executor.torch.operation_probe import OperationProbe
from sarathi_lab.model.roofline import Peaks
from sarathi_lab.run import main

TASK = ["task=iteration_time", "model=tiny", "device=cpu", "executor.threads=1", "tracking=none"]
SIZES = ["task.tokens=[1,4,64]", "task.decodes=[1,3]", "task.contexts=[0,20]", "task.repetitions=2"]


def test_every_size_is_run_by_the_executor_and_recorded(tmp_path, monkeypatch, capsys):
    batches = []
    submit = TorchExecutor.submit
    monkeypatch.setattr(TorchExecutor, "warm_up", lambda *_, **__: None)
    monkeypatch.setattr(
        TorchExecutor, "submit", lambda self, batch: batches.append(batch) or submit(self, batch)
    )
    monkeypatch.setattr(TorchBackend, "peaks", lambda self: Peaks(1e12, 1e10, "given"))
    assert main([*TASK, *SIZES, f"output={tmp_path}"]) == 0
    rows = [[(chunk.start, chunk.num_tokens) for chunk in batch.chunks] for batch in batches]
    prompts = [[(context, tokens)] for tokens in (1, 4, 64) for context in (0, 20)]
    decodes = [[(context, 1)] * 3 for context in (0, 20)]  # one decode is a prompt of one token
    assert rows == 2 * [
        row for row in [*prompts, *decodes] for _ in range(2)
    ]  # one behind its like
    (path,) = tmp_path.rglob("iteration_time.csv")
    table = pd.read_csv(path)
    sizes = [("prefill", *size) for size in itertools.product((1, 4, 64), (0, 20))]
    sizes += [("decode", *size) for size in itertools.product((1, 3), (0, 20))]
    assert list(table[["kind", "tokens", "context"]].itertuples(index=False, name=None)) == sizes
    assert (table.seconds > 0).all()
    assert set(table.repetitions) == {2}
    assert np.allclose(table.time_over_roofline, table.seconds / table.roofline, rtol=1e-4)
    weights = load_option("model", "tiny").weight_bytes(4)
    assert (table.roofline * 1e10 > 0.5 * weights).all()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in (
        "tiny in float32 on cpu",
        "given: 1 TFLOP/s, 10 GB/s",
        "context 20",
        "decodes, one a sequence",
    ):
        assert word in printed


def test_times_are_medians_of_the_second_of_two(tmp_path, monkeypatch):
    """A first iteration that is slow, as caches and threads are those of another shape, does not
    count.
    """
    times = (SingleIteration(seconds, 0.0, None) for seconds in (9.0, 1.0, 9.0, 8.0, 9.0, 2.0))
    monkeypatch.setattr(OperationProbe, "iteration", lambda self, batch: next(times))
    one = ["task.tokens=[1]", "task.decodes=[1]", "task.contexts=[0]", "task.repetitions=3"]
    monkeypatch.setattr(TorchBackend, "peaks", lambda self: Peaks(1e12, 1e10, "given"))
    table = run(tmp_path, *TASK, *one).tables["iteration_time"]
    assert table.seconds.tolist() == [2.0, 2.0]  # a prompt of one token is one decode


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["executor=simulated"], "task=iteration_time measures a real device, executor=simulated"),
        (["task.contexts=[100000000]"], "GB for KV"),
    ],
)
def test_what_cannot_be_timed(args, reason):
    with pytest.raises(UserError, match=reason):
        checked("task=iteration_time", "model=tiny", *args)

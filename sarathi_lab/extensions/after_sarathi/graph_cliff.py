"""What batches outside the captured CUDA graphs cost, by token budget and largest captured size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypedDict, Unpack

from sarathi_lab.config.errors import require_one_of
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.arrivals import ClosedLoop
from sarathi_lab.engine.executor import Executor
from sarathi_lab.engine.executor import Sizes as BuildSizes
from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cuda_graphs import CudaGraphs
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.points import Point
from sarathi_lab.experiment.registry import PROFILED, Platform, experiment
from sarathi_lab.extensions.under_load.bench import (
    LoadExperiment,
    LoadSizes,
    ServingBench,
    compared,
    waited,
)
from sarathi_lab.policy import VllmV1
from sarathi_lab.results.plots.spec import by_device

MODE = "full_and_piecewise"  # vLLM's default
P99 = "P99 between tokens"
RATE = "output tokens/s"


class Steps(TypedDict):
    """What was timed of a server's steps.

    Attributes:
        labels: Of the server: hardware, level, model and the like, in place of the cost model's.
        device: Two pairs of tokens and seconds on the device, the line of all others.
        eager: Seconds in which the host launches a layer without graphs.
        piecewise: The same of a piece between two attentions, in piecewise graphs.
    """

    labels: Mapping[str, str]
    device: Sequence[Sequence[float]]
    eager: float
    piecewise: float


@experiment(
    LoadExperiment,
    question="What do batches cost that are larger than all captured CUDA graphs?",
    papers=[Platform("qwen3-30b-a3b", "b200", 4)],
    simulated=PROFILED,
    look=by_device("line", P99, x="token budget", log_x=True, legend="captured to", columns=2),
)
def graph_cliff(
    bench: ServingBench,
    seed: int,
    *,
    steps: Steps,
    host: str,
    servers: Mapping[str, Mapping[str, Sequence[int]]],
    turns: int,
    **sizes: Unpack[LoadSizes],
) -> Iterator[Point]:
    """Waits and throughput by token budget and largest captured size, also over those of the
    first such size, with `turns` requests of each user.

    `servers` have `users`, `budgets` and sizes `captured`. Steps of "timed" take the times of
    `steps`, those of "modelled" the cost model's, with the launches of the `host` file.
    """
    make: dict[str, Callable[[int], Executor]] = {  # by the largest captured size
        "timed": partial(of_steps, steps),
        "modelled": partial(of_cost_model, bench, host),
    }
    (dataset,) = sizes["datasets"]
    for server, settings in servers.items():
        require_one_of("task.sizes.paper.servers", server, make)
        captured = settings["captured"]
        executors = {size: make[server](size) for size in captured}
        for number, budget in product(settings["users"], settings["budgets"]):
            requests = bench.requests(dataset, turns * number, seed)
            values: dict[str, dict[str, float]] = {}
            policy = VllmV1(max_num_batched_tokens=budget)
            for size, executor in executors.items():
                ledger = replace(bench, executor=executor).run(ClosedLoop(requests, number), policy)
                table = ledger.requests()
                num_tokens = table.output_len.sum()
                seconds = table.finish_time.max()
                waits = waited(table, P99, "mean TTFT", "mean TPOT")
                values[f"{size} tokens"] = {**waits, RATE: float(num_tokens / seconds)}
            first = {f"captured to {captured[0]}": values[f"{captured[0]} tokens"]}
            panel = f"{server}, {number} users"
            for point in compared(panel, values, first, {RATE: "tokens/s"}, x=budget):
                labels = steps["labels"] if server == "timed" else {}
                yield point._replace(labels=(*point.labels, *labels.items()))


def of_steps(steps: Steps, largest: int) -> Executor:
    """Make the executor of a server that was timed, with graphs captured to `largest` tokens."""
    (few, seconds_of_few), (many, seconds_of_many) = steps["device"]
    per_token = (seconds_of_many - seconds_of_few) / (many - few)
    graphs = CudaGraphs(
        mode=MODE,
        largest=largest,
        layer_launch=steps["eager"],
        piece_launch=steps["piecewise"],
    )

    def seconds(batch: Batch) -> float:
        num_tokens, host = graphs.launched(batch)
        device = seconds_of_few + per_token * (num_tokens - few)
        return float(max(device, host))

    return SimulatedExecutor(seconds)


def of_cost_model(bench: ServingBench, name: str, largest: int) -> Executor:
    """Make the executor of the cost model with the launches of the host file `name`."""
    host = load_option("host", name)
    engine = bench.engine
    assert bench.backend is not None, "it is only simulated"
    # The host's launches, with graphs of this series' sizes.
    graphs = replace(host.graphs, mode=MODE, largest=largest)
    backend = replace(bench.backend, host=replace(host, graphs=graphs))
    sizes = BuildSizes(engine.num_blocks, engine.block_size, engine.batch_size)
    spec = load_option("model", bench.model)
    return backend.build(spec, None, sizes)

"""Short ways to make requests, schedulers and executors with scripted step times."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import StepResult
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Batch, Chunk, Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.executor.simulated.executor import SimulatedExecutor
from sarathi_lab.experiment.advise import predict
from sarathi_lab.policy import Policy
from sarathi_lab.results.serving_metrics import Slo

ChunkRow = tuple[int, int, int]  # request id, start, number of tokens


def requests_of(
    *lengths: tuple[int, int], arrivals: Sequence[float] | None = None
) -> list[Request]:
    """Requests of (prompt_len, output_len), all at time 0 unless `arrivals` says otherwise."""
    times = arrivals or [0.0] * len(lengths)
    return [
        Request(i, time, p, d) for i, ((p, d), time) in enumerate(zip(lengths, times, strict=True))
    ]


def predicted(
    requests: Sequence[Request],
    batch_size: int,
    iteration_time: Any,
    policy: Policy,
    slo: Slo | None = None,
) -> dict[str, float]:
    """What a run gives with a cache that is never short."""
    longest = max(request.total_len for request in requests)
    engine = EngineConfig(policy, batch_size, batch_size * longest, 16, longest)
    return predict(requests, engine, SimulatedExecutor(iteration_time), slo)


def rows(text: str) -> list[list[ChunkRow]]:
    """The batches of a schedule, such as "0:0+4 | 0:4+1 1:0+3": REQUEST:START+TOKENS."""
    chunks = [re.findall(r"(\d+):(\d+)\+(\d+)", batch) for batch in text.split("|")]
    return [[(int(one), int(at), int(size)) for one, at, size in batch] for batch in chunks]


def scheduler_for(
    policy: Policy,
    batch_size: int = 4,
    num_blocks: int = 1000,
    block_size: int = 4,
    max_model_len: int = 200,
    **kwargs: Any,
) -> Scheduler:
    blocks = BlockManager(num_blocks, block_size)
    return Scheduler(policy, blocks, batch_size=batch_size, max_model_len=max_model_len, **kwargs)


def tokens_of(chunk: Chunk) -> list[int]:
    """Return the tokens that a chunk's rows emit: 1000 times the request id plus the position."""
    first = 1000 * chunk.sequence.request.request_id + chunk.output_index - chunk.num_rows
    return [first + row + 1 for row in range(chunk.num_rows)]


class ScriptedExecutor:
    """A virtual clock whose iterations take what `seconds` says; keeps every batch's rows in
    `schedule`.

    With capacity n, batches are collected in order, each `seconds` after the previous one or its
    own submission.
    """

    def __init__(
        self,
        seconds: Callable[[Batch], float] = lambda batch: 1.0,
        capacity: int = 1,
        *,
        feeds_tokens: bool = False,
    ) -> None:
        self.capacity = capacity
        self.feeds_tokens = feeds_tokens
        self.num_blocks = None
        self.now = 0.0
        self.schedule: list[list[ChunkRow]] = []
        self._seconds = seconds
        self._in_flight: list[tuple[Batch, float, float]] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(self) -> None:
        self.now = 0.0

    def submit(self, batch: Batch) -> None:
        self.schedule.append(
            [(c.sequence.request.request_id, c.start, c.num_tokens) for c in batch.chunks]
        )
        start = max(self.now, self._in_flight[-1][2] if self._in_flight else 0.0)
        self._in_flight.append((batch, start, start + self._seconds(batch)))

    def collect(self) -> StepResult:
        batch, start, end = self._in_flight.pop(0)
        self.now = end
        token_ids = [token for c in batch.chunks if c.emits_token for token in tokens_of(c)]
        return StepResult(batch, start, end, token_ids)

    @property
    def next_end(self) -> float:
        return self._in_flight[0][2]

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)


def expect(policy: Policy, requests: str | Sequence[Request], batches: str, **sizes: Any) -> None:
    """Check the `batches`, as `rows` reads them, of requests such as "PROMPT+OUTPUT@ARRIVAL 6+2"; *
    is any batch, a last ... any further ones.
    """
    if isinstance(requests, str):
        numbers = re.findall(r"(\d+)\+(\d+)(?:@([\d.]+))?", requests)
        lengths = [(int(prompt), int(output)) for prompt, output, _ in numbers]
        requests = requests_of(*lengths, arrivals=[float(time or 0) for *_, time in numbers])
    served = serve(requests, scheduler_for(policy, **sizes)).schedule
    made = [" ".join(f"{one}:{at}+{size}" for one, at, size in batch) for batch in served]
    wanted = batches.split(" | ")
    if wanted[-1] == "...":
        made = [*made[: len(wanted) - 1], "..."]
    for index, batch in enumerate(wanted[: len(made)]):
        made[index] = "*" if batch == "*" else made[index]
    assert made == wanted, policy


def serve(
    requests: Sequence[Request], scheduler: Scheduler, executor: ScriptedExecutor | None = None
) -> ScriptedExecutor:
    """Serve to the end and return the executor with its schedule."""
    executor = executor or ScriptedExecutor()
    run_engine(requests, scheduler, executor, Ledger())
    return executor

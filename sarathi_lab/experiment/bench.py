"""A device on which the paper's figures are recomputed: a cost model with its error, and the
paper's set-up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sarathi_lab.engine.request import Batch
from sarathi_lab.executor.simulated.cost_model import KINDS, CostModel
from sarathi_lab.executor.simulated.hardware import Hardware
from sarathi_lab.experiment.steady_state import lengths, steady, together
from sarathi_lab.policy import Orca, Policy, RequestLevel, Sarathi

# Section 5: sequence length in tokens, and the largest batch of LLaMA-13B that one A6000 holds at
# it.
SEQ_LENS = {"1K": 1024, "2K": 2048, "3K": 3072}
LARGEST_BATCH = {"1K": 18, "2K": 10, "3K": 6}
CHUNK = 256  # tokens; of Figs 8 and 11a and Table 4

EVERYTHING = tuple(KINDS)
COMPUTE = tuple(kind for kind in KINDS if kind != "others")  # what Fig 7 and Table 2 time
FOUR = ("preproj", "attn", "postproj", "ffn")  # whose sum Fig 10 calls the total

Times = Counter[str]  # seconds by operation


class Estimate(NamedTuple):
    """A predicted value, and the share of it by which it may be off (from shapes held out of the
    fits).
    """

    value: float
    error: float

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two estimates, their errors taken as independent."""
        return Estimate(self.value / other.value, math.hypot(self.error, other.error))

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(self.value * factor, self.error)

    def inverse(self) -> Estimate:
        """One over the estimate."""
        return Estimate(1 / self.value, self.error)


class Point(NamedTuple):
    """A point of a figure: which line of which panel it is on, and where."""

    panel: str
    series: str
    x: float
    y: Estimate


@dataclass(frozen=True)
class Bench:
    """Times batches and requests by a cost model of `hardware`, with the error that the model
    states.
    """

    cost: CostModel
    hardware: Hardware

    def batch(self, *batches: Batch) -> Times:
        """Seconds by operation of `batches`, one after the other."""
        return weighted(*((1.0, Counter(self.cost.operation_times(batch))) for batch in batches))

    def seconds(self, times: Mapping[str, float], kinds: Iterable[str] = EVERYTHING) -> Estimate:
        """The sum of the operations of some kinds; matrix products and attention err in their own
        ways.
        """
        by_kind = {kind: sum(times.get(name, 0.0) for name in KINDS[kind]) for kind in kinds}
        total = sum(by_kind.values())
        off = sum(abs(seconds) * self._error(kind) for kind, seconds in by_kind.items())
        return Estimate(total, off / abs(total) if total else 0.0)

    def alone(self, policy: Policy, prompt_len: int, num_decodes: int, batch_size: int) -> Times:
        """Seconds by operation and request if a full batch starts and ends together."""
        return together(self.cost.operation_times, policy, prompt_len, num_decodes, batch_size)

    def steady(self, policy: Policy, prompt_len: int, num_decodes: int, batch_size: int) -> Times:
        """Seconds by operation and request while requests come as others go."""
        return steady(self.cost.operation_times, policy, prompt_len, num_decodes, batch_size)

    def sarathi(
        self, chunk: int, seq_len: int, pd_ratio: float, batch_size: int
    ) -> tuple[Times, Times]:
        """Seconds by operation and request of SARATHI and of the request-level baseline on the same
        requests.
        """
        prompt_len, num_decodes = lengths(seq_len, pd_ratio, chunk - (batch_size - 1))
        load = (prompt_len, num_decodes, batch_size)
        return self.steady(sarathi(chunk, batch_size), *load), self.alone(RequestLevel(), *load)

    def orca_best(self, seq_len: int, pd_ratio: float, batch_size: int) -> tuple[Times, Times]:
        """The same of Orca, one whole prompt joining the decodes."""
        load = (*lengths(seq_len, pd_ratio), batch_size)
        return self.steady(Orca(), *load), self.alone(RequestLevel(), *load)

    def orca_worst(self, seq_len: int, pd_ratio: float, batch_size: int) -> tuple[Times, Times]:
        """The same of Orca where all requests start and end together."""
        load = (*lengths(seq_len, pd_ratio), batch_size)
        return self.alone(Orca(max_prefills=None), *load), self.alone(RequestLevel(), *load)

    def gain(self, policy_and_baseline: tuple[Times, Times]) -> Estimate:
        """Throughput of a policy over that of the baseline."""
        policy, baseline = policy_and_baseline
        return self.seconds(baseline).over(self.seconds(policy))

    def _error(self, kind: str) -> float:
        """Streaming kernels and fixed costs are fitted with the products; communication was
        compared with nothing.
        """
        if kind == "communication":
            return 1.0
        return self.cost.uncertainty["attention" if kind == "attn" else "matmul"]


def sarathi(chunk: int, batch_size: int) -> Sarathi:
    """The paper's SARATHI: decodes ride in full batches of B - 1, the prompts left over run
    whole.
    """
    return Sarathi(chunk=chunk, min_decodes=batch_size - 1)


def best_pd_ratio(chunk: int, batch_size: int) -> float:
    """The P:D at which chunks and decodes run out together, C / (B - 1) (section 4.3.3)."""
    return chunk / (batch_size - 1)


def weighted(*parts: tuple[float, Times]) -> Times:
    """The sum of some times, each as often as its weight says; operations that cancel do so with
    their error.
    """
    total: Times = Counter()
    for weight, times in parts:
        for name, seconds in times.items():
            total[name] += weight * seconds  # type: ignore[assignment]  # a Counter of seconds
    return total

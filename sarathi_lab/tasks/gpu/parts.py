"""The parts of a campaign, in their order, and how the time is shared between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LIMIT_FACTOR, LIMIT_EXTRA = 1.5, 60.0  # a part that takes this much longer than its share is ended


@dataclass(frozen=True)
class Part:
    """One part: the function that measures it, as "module:function", and the seconds planned for it
    (H200, dry run).

    The function takes a `context.Context`. It minds its share of the time by itself: see
    `Context.is_over`.
    """

    name: str
    target: str
    seconds: float
    dry_seconds: float
    what: str
    is_always_run: bool = False  # also where it finished before

    def weight(self, *, is_dry: bool) -> float:
        """Its share of the time is this over the sum of all parts still to come."""
        return self.dry_seconds if is_dry else self.seconds


_HOME = "sarathi_lab.tasks.gpu"
PARTS = (
    Part("tests", f"{_HOME}.gpu_tests:run", 70, 6, "the tests that need a GPU"),
    Part("peaks", f"{_HOME}.peaks:measure", 15, 2, "matrix products and copies at best"),
    Part(
        "kernels", f"{_HOME}.kernel_benchmarks:measure", 80, 8, "each kernel against its references"
    ),
    Part(
        "calibrate", f"{_HOME}.calibration:measure", 60, 6, "operation times for executor=simulated"
    ),
    Part("figures-13b", f"{_HOME}.figures:measure_13b", 150, 10, "the paper's figures, 13B"),
    Part("figures-33b", f"{_HOME}.figures:measure_33b", 90, 6, "the paper's figures, 33B"),
    Part(
        "kv_reread", f"{_HOME}.kv_reread:measure", 20, 2, "attention of a prompt whole and by chunk"
    ),
    Part("peers", f"{_HOME}.peers:measure", 50, 8, "transformers on the same requests"),
    Part(
        "targets", f"{_HOME}.targets:judge", 5, 3, "what is wanted beside what was measured", True
    ),
)
NAMES = tuple(part.name for part in PARTS)


def share(parts: Sequence[Part], remaining: float, *, is_dry: bool) -> float:
    """Seconds for the first of `parts` if all of them are to end in `remaining` seconds."""
    return (
        max(0.0, remaining)
        * parts[0].weight(is_dry=is_dry)
        / sum(part.weight(is_dry=is_dry) for part in parts)
    )

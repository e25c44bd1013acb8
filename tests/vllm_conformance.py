"""How many random queues `vllm_v1` serves otherwise than the installed vLLM:

    PYTHONPATH=tests/support .venv-vllm/bin/python tests/vllm_conformance.py --queues 2000

Prints, for each kind of queue (`--kinds 1 2`: the first two), how many differ in any step, and the
first of them.
"""

from __future__ import annotations

import argparse

import vllm
from vllm_queues import Difference, Kind, cases, difference, is_recomputed
from vllm_scheduler import Case, lab_steps

from sarathi_lab.policy.vllm import rules_of

KINDS = (
    Kind(num_in_flight=1, is_scarce=True, shares=False),
    Kind(num_in_flight=2, is_scarce=True, shares=False),
    Kind(num_in_flight=1, is_scarce=False, shares=True),
    Kind(num_in_flight=2, is_scarce=False, shares=True),
    Kind(num_in_flight=1, is_scarce=True, shares=True),
    Kind(num_in_flight=2, is_scarce=True, shares=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queues", type=int, default=2000, help="of each kind")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--kinds", type=int, nargs="+", default=range(1, len(KINDS) + 1))
    options = parser.parse_args()
    print(f"vLLM {vllm.__version__}, rules of {rules_of(vllm.__version__)}, seed {options.seed}")
    for number in options.kinds:
        compare(KINDS[number - 1], options.seed, options.queues)


def compare(kind: Kind, seed: int, number: int) -> None:
    """Serve `number` queues of a kind, and print what was seen."""
    num_steps = num_recomputed = num_different = 0
    for i, tried in enumerate(cases(kind, seed, number)):
        steps = lab_steps(tried, kind.num_in_flight)
        num_steps += len(steps)
        num_recomputed += is_recomputed(steps, tried.requests)
        differs = difference(tried, kind)
        if differs is not None:
            num_different += 1
        if differs is not None and num_different == 1:
            show(i, tried, differs)
    print(
        f"{kind.describe()}: {num_different} of {number} queues differ "
        f"({num_steps} steps, evictions in {num_recomputed} queues)",
        flush=True,
    )


def show(number: int, tried: Case, differs: Difference) -> None:
    """Print where a queue was served differently."""
    engine = tried.engine
    print(f"  queue {number}, step {differs.step}: vLLM {differs.vllm}, the lab {differs.lab}")
    print(
        f"    {tried.policy}, {engine.queue_order}, {engine.num_blocks} blocks of "
        f"{engine.block_size}, {engine.batch_size} sequences"
    )


if __name__ == "__main__":
    main()

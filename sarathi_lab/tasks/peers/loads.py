"""The requests that all engines are given: equal ones, all there at the start, with seeded random
token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sarathi_lab.workload.base import random_prompt


@dataclass(frozen=True)
class Load:
    """`num_requests` prompts of `prompt_len` tokens, each answered by exactly `output_len`."""

    name: str
    num_requests: int
    prompt_len: int
    output_len: int

    @property
    def total_len(self) -> int:
        """Tokens of one sequence in the end."""
        return self.prompt_len + self.output_len

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Token ids, the same for the same seed."""
        found = [
            random_prompt(i, self.prompt_len, vocab_size, seed) for i in range(self.num_requests)
        ]
        return [prompt.tolist() for prompt in found if prompt is not None]


LOADS: Mapping[str, Load] = {
    load.name: load for load in (Load("A", 16, 512, 64), Load("B", 8, 1024, 16))
}

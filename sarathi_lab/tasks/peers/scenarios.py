"""What all engines are asked for: equal requests with seeded random token ids, all there at the
start.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_lab.workload.base import random_prompt


@dataclass(frozen=True)
class Scenario:
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


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("A", 16, 512, 64),
        Scenario("B", 8, 1024, 16),
        Scenario("gpu", 32, 960, 64),  # of the campaign
        Scenario("dry", 2, 24, 4),
    )
}

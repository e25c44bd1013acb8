"""transformers' continuous batching (`generate_batch`), with a manager that is kept between
runs.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import transformers_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from worker_protocol import serve

PAGE = 256  # tokens, its default


class ContinuousBatching:
    """A cache for `batch` sequences, iterations of `chunk` tokens, and no prompt remembered from
    the last run.
    """

    def load(self, settings: dict[str, Any]) -> str:
        """By itself it would take most of the memory for its cache."""
        self.model, version = transformers_model.load(settings)
        known = inspect.signature(ContinuousBatchingConfig).parameters
        wanted = {
            "num_blocks": settings["batch"] * (math.ceil(settings["longest"] / PAGE) + 1),
            "page_size" if "page_size" in known else "block_size": PAGE,
            "max_batch_tokens": settings["chunk"],
            "max_requests_per_batch": settings["batch"],
            "allow_block_sharing": False,
        }
        self.config = ContinuousBatchingConfig(
            **{name: value for name, value in wanted.items() if name in known}
        )
        return version

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """The outputs come back by request id, so they are put back in order by their prompts."""
        generation = GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found = self.model.generate_batch(
            inputs=prompts,
            generation_config=generation,
            continuous_batching_config=self.config,
            persistent_manager=True,
        )
        tokens = {
            tuple(output.prompt_ids): list(output.generated_tokens) for output in found.values()
        }
        return [tokens[tuple(prompt)] for prompt in prompts]


if __name__ == "__main__":
    serve(ContinuousBatching())

"""Made-up prompts that begin alike, as those behind a few system prompts do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sarathi_lab.config.checked import whole
from sarathi_lab.config.errors import UserError
from sarathi_lab.workload.base import random_prompt

# For prompts that nobody computes: prefixes are told apart by their tokens all the same.
ANY_VOCAB_SIZE = 1 << 15


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Every prompt begins with one of `num_prefixes` texts (None: one) of `shared_prefix_len`
    tokens, as the seed says.

    The prefix counts as part of the prompt's length; a shorter prompt is its beginning.
    """

    shared_prefix_len: int = whole(0, minimum=0, fix="use 0 for prompts that share nothing")
    num_prefixes: int | None = whole(
        None, minimum=1, fix="use null for one prefix that all prompts share"
    )

    def check_prefixes(self) -> None:
        """Raise UserError for a number without effect."""
        if self.num_prefixes is not None and not self.shared_prefix_len:
            raise UserError(
                f"workload.num_prefixes={self.num_prefixes} has no effect without a prefix; add "
                "workload.shared_prefix_len=512"
            )

    def prompt(
        self, request_id: int, prompt_len: int, vocab_size: int | None, seed: int
    ) -> NDArray[np.int32] | None:
        """Token ids [prompt_len] by seed and request only; None if nobody needs them."""
        if not self.shared_prefix_len:
            return random_prompt(request_id, prompt_len, vocab_size, seed)
        vocab_size = vocab_size or ANY_VOCAB_SIZE
        chosen = int(np.random.default_rng([seed, 10, request_id]).integers(self.num_prefixes or 1))
        texts = np.random.default_rng([seed, 11, chosen])
        prefix = texts.integers(0, vocab_size, self.shared_prefix_len, dtype=np.int32)[:prompt_len]
        own = random_prompt(request_id, prompt_len, vocab_size, seed)
        assert own is not None, "there is a vocabulary"
        return np.concatenate([prefix, own[len(prefix) :]])

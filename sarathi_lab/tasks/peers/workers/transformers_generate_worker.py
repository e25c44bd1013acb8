"""transformers' `generate` on batches of whole, equally long prompts."""

from __future__ import annotations

from typing import Any

import torch
import transformers_model
from worker_protocol import serve


class Generate:
    """A static batch at a time: the next one starts when the last sequence of this one has
    ended.
    """

    def load(self, settings: dict[str, Any]) -> str:
        """`batch` sequences make one batch."""
        self.model, version = transformers_model.load(settings)
        self.batch = settings["batch"]
        return version

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """Needs equally long prompts, so that there is no padding to skip."""
        tokens: list[list[int]] = []
        options = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False}
        for start in range(0, len(prompts), self.batch):
            ids = torch.tensor(prompts[start : start + self.batch], device=self.model.device)
            # A mask, as transformers would otherwise take a prompt's token 0 for padding.
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens += found[:, ids.shape[1] :].tolist()
        return tokens


if __name__ == "__main__":
    serve(Generate())

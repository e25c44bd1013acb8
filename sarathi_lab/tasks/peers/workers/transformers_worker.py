"""transformers' `generate` on static batches, or its continuous batching (`generate_batch`)."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import transformers
from worker_protocol import serve

PAGE = 256  # tokens, the default of its cache


class Transformers:
    """A Llama with the checkpoint's weights or random ones that are made on the device.

    `continuous` has a cache for `batch` sequences, iterations of `chunk` tokens, a manager that is
    kept between runs and no prompt remembered from the last one; else a batch starts when the last
    sequence of the one before has ended.
    """

    def load(self, settings: dict[str, Any]) -> str:
        torch.set_num_threads(settings["threads"])
        directory, dtype = settings["model_dir"], getattr(torch, settings["dtype"])
        kind = transformers.AutoModelForCausalLM
        if settings["has_weights"]:
            model = kind.from_pretrained(directory, dtype=dtype).to(settings["device"])
        else:
            config = transformers.AutoConfig.from_pretrained(directory)
            with torch.device(settings["device"]):
                model = kind.from_config(config, dtype=dtype)
        self.model, self.settings = model.eval(), settings
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        run = self._continuous if self.settings["continuous"] else self._static
        return run(prompts, output_len)

    @torch.inference_mode()
    def _static(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """Needs equally long prompts, so that there is no padding to skip."""
        tokens: list[list[int]] = []
        options = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False}
        batch = self.settings["batch"]
        for start in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[start : start + batch], device=self.model.device)
            # A mask, as transformers would otherwise take a prompt's token 0 for padding.
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens += found[:, ids.shape[1] :].tolist()
        return tokens

    def _continuous(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """By itself it would take most of the memory for its cache."""
        batch, longest = self.settings["batch"], self.settings["longest"]
        known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
        wanted = {
            "num_blocks": batch * (math.ceil(longest / PAGE) + 1),
            "page_size" if "page_size" in known else "block_size": PAGE,
            "max_batch_tokens": self.settings["chunk"],
            "max_requests_per_batch": batch,
            "allow_block_sharing": False,
        }
        config = {name: value for name, value in wanted.items() if name in known}
        found = self.model.generate_batch(
            inputs=prompts,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**config),
            persistent_manager=True,
        )
        # They come back by request id.
        tokens = {tuple(each.prompt_ids): list(each.generated_tokens) for each in found.values()}
        return [tokens[tuple(prompt)] for prompt in prompts]


if __name__ == "__main__":
    serve(Transformers())

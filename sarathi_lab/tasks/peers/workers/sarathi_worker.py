"""The lab's own engine, timed as the others are; the only worker that imports the lab."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from worker_protocol import serve as answer

from sarathi_lab.config.instantiate import build
from sarathi_lab.engine.config import EngineConfig
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.loop import serve
from sarathi_lab.engine.request import Request
from sarathi_lab.model.huggingface import read_spec
from sarathi_lab.results.provenance import provenance
from sarathi_lab.tasks.plan import CACHE_HEADROOM


class Sarathi:
    """The engine loop over a torch executor, as `task=serve` runs it; besides the common settings
    it takes `policy` and `executor` (config nodes) and `block_size` (tokens).
    """

    def load(self, settings: dict[str, Any]) -> str:
        torch.set_num_threads(settings["threads"])
        self.policy: Any = build(settings["policy"])
        chosen = {name: settings[name] for name in ("dtype", "device")}
        backend = build(OmegaConf.create({**settings["executor"], **chosen}))
        directory, has_weights = Path(settings["model_dir"]), settings["has_weights"]
        longest, block_size = settings["longest"], settings["block_size"]
        num_blocks = settings["batch"] * math.ceil(longest / block_size) / (1 - CACHE_HEADROOM)
        self.sizes = {
            "num_blocks": math.ceil(num_blocks),
            "block_size": block_size,
            "batch_size": settings["batch"],
            "max_model_len": longest,
        }
        sizes = Sizes(**self.sizes, chunk=self.policy.budget)
        spec, checkpoint = read_spec(directory), directory if has_weights else None
        self.executor = backend.build(spec, checkpoint, sizes)
        found = provenance()
        return f"sarathi_lab {found['git_commit']}, torch {found['versions']['torch']}"

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        requests = [Request(i, 0.0, len(ids), output_len, ids) for i, ids in enumerate(prompts)]
        found = serve(requests, EngineConfig(self.policy, **self.sizes), self.executor).requests()
        return [[int(token) for token in tokens] for tokens in found.output_token_ids]


if __name__ == "__main__":
    answer(Sarathi())

"""The lab's own engine; the only worker that imports the lab, so that it is timed as the others
are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from worker_protocol import serve

from sarathi_lab import __name__ as lab
from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.ledger import Ledger
from sarathi_lab.engine.loop import run_engine
from sarathi_lab.engine.request import Request
from sarathi_lab.engine.scheduler import Scheduler
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.results.provenance import provenance
from sarathi_lab.tasks.plan import CACHE_HEADROOM


class Sarathi:
    """The engine loop over a torch executor, as `task=serve` runs it."""

    def load(self, settings: dict[str, Any]) -> str:
        """Besides the common settings: `policy` and `executor` (config nodes) and `block_size`
        (tokens).
        """
        torch.set_num_threads(settings["threads"])
        self.policy: Any = instantiate(settings["policy"], _convert_="all")
        backend = instantiate(
            {**settings["executor"], "dtype": settings["dtype"], "device": "cpu"}, _convert_="all"
        )
        spec, directory = AutoModel(settings["model_dir"]).resolve(backend.default_model)
        self.batch, self.longest = settings["batch"], settings["longest"]
        block_size = settings["block_size"]
        sizes = Sizes(
            num_blocks=math.ceil(
                self.batch * math.ceil(self.longest / block_size) / (1 - CACHE_HEADROOM)
            ),
            block_size=block_size,
            batch_size=self.batch,
            max_model_len=self.longest,
            chunk=self.policy.budget,
        )
        self.executor = backend.build(spec, Path(str(directory)), sizes)
        self.num_blocks, self.block_size = sizes.num_blocks, block_size
        found = provenance()
        return f"{lab} {found['git_commit']}, torch {found['versions']['torch']}"

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """All requests are there at the start."""
        scheduler = Scheduler(
            self.policy,
            BlockManager(self.num_blocks, self.block_size),
            batch_size=self.batch,
            max_model_len=self.longest,
        )
        ledger = Ledger()
        requests = [Request(i, 0.0, len(ids), output_len, ids) for i, ids in enumerate(prompts)]
        run_engine(requests, scheduler, self.executor, ledger)
        found = ledger.requests().sort_values("request_id")
        return [[int(token) for token in tokens] for tokens in found.output_token_ids]


if __name__ == "__main__":
    serve(Sarathi())

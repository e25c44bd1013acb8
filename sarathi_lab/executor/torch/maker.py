"""What makes a model and its executor, here on one device."""

from __future__ import annotations

from typing import Any

from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.transformer import Transformer
from sarathi_lab.model.weights import load_model


class Maker:
    """Makes a model and its executor on one device; of several ranks each has another one."""

    is_whole = True  # whether C++ may compute whole iterations in one call

    def load(self, *args: Any) -> Transformer:
        return load_model(*args)

    def agreed(self, num_blocks: int) -> int:
        """The blocks that all ranks have room for."""
        return num_blocks

    def executor(self, model: Transformer, **settings: Any) -> TorchExecutor:
        return TorchExecutor(model, **settings)

"""A Llama of transformers, for the workers that run it."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def load(settings: dict[str, Any]) -> tuple[Any, str]:
    """The model in `dtype` on `device`, with the checkpoint's weights or random ones that are made
    there; and the version.
    """
    torch.set_num_threads(settings["threads"])
    directory, dtype = settings["model_dir"], getattr(torch, settings["dtype"])
    kind = transformers.AutoModelForCausalLM
    if settings["has_weights"]:
        model = kind.from_pretrained(directory, dtype=dtype).to(settings["device"])
    else:
        config = transformers.AutoConfig.from_pretrained(directory)
        with torch.device(settings["device"]):
            model = kind.from_config(config, dtype=dtype)
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return model.eval(), version

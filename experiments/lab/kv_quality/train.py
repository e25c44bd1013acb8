"""Trains a small Llama on bytes, so that quality can be asked of weights that mean something and
need no download.

    python experiments/lab/kv_quality/train.py            # a few minutes on 2 cores

Its text is that of the Python standard library's modules, in the interpreter's own folders; every
tenth file is held out. Leaves a checkpoint with `held_out.txt` in outputs/kv_quality/byte-llama.
The same Python, torch and kind of CPU give the same weights.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

OUT = Path("outputs") / "kv_quality" / "byte-llama"
HELD_OUT = 10  # every so many files
HELD_OUT_BYTES = 1 << 16  # of them that are kept beside the weights
CLIP = 1.0  # of the gradient's norm
WARM_UP = 0.05  # of the steps


@dataclass(frozen=True)
class Recipe:
    """The model's shape, and its training: `steps` of `batch` pieces of `length` bytes. `exact`
    trains in float64, which gives every CPU the same weights in float32.
    """

    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 3
    num_kv_heads: int = 1
    ffn_size: int = 512
    length: int = 256
    batch: int = 4
    steps: int = 1500
    learning_rate: float = 3e-3
    seed: int = 0
    exact: bool = False

    def config(self) -> LlamaConfig:
        """A byte a token."""
        return LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            intermediate_size=self.ffn_size,
            max_position_embeddings=4 * self.length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )


def library_text() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Bytes to train on, and bytes that are held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in files]
    held_out = parts[::HELD_OUT]
    return np.concatenate([part for i, part in enumerate(parts) if i % HELD_OUT]), np.concatenate(
        held_out
    )


def train(recipe: Recipe, directory: Path) -> float:
    """Train, and save the checkpoint and its held-out text in `directory`; returns the held-out
    loss in nats a byte.
    """
    text, held_out = library_text()
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config()).to(torch.float64 if recipe.exact else torch.float32)
    rounds = not recipe.exact and torch.cpu.get_capabilities().get("avx512_bw", False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=WARM_UP
    )
    rng, begun = np.random.default_rng(recipe.seed), time.perf_counter()
    model.train()
    for step in range(recipe.steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            loss = _loss(model, _pieces(text, recipe, rng))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(
                f"step {step + 1}/{recipe.steps}: {loss.item():.3f} nats a byte, "
                f"{time.perf_counter() - begun:.0f} s",
                flush=True,
            )
    model.eval()
    with torch.inference_mode():
        reached = float(_loss(model, _pieces(held_out, recipe, np.random.default_rng(1))))
    model.float().save_pretrained(directory)
    (directory / "held_out.txt").write_bytes(held_out[:HELD_OUT_BYTES].tobytes())
    return reached


def _pieces(text: NDArray[np.uint8], recipe: Recipe, rng: np.random.Generator) -> Tensor:
    """[batch, length + 1]"""
    starts = rng.integers(0, len(text) - recipe.length - 1, recipe.batch)
    return torch.from_numpy(
        np.stack([text[start : start + recipe.length + 1] for start in starts]).astype(np.int64)
    )


def _loss(model: LlamaForCausalLM, pieces: Tensor) -> Tensor:
    """In nats a byte."""
    logits = model(input_ids=pieces[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small model whose quality is compared.")
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"where the checkpoint goes (default {OUT})"
    )
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    options = parser.parse_args()
    recipe = Recipe(steps=options.steps)
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    reached = train(recipe, options.out)
    count = sum(
        weight.numel() for weight in LlamaForCausalLM.from_pretrained(options.out).parameters()
    )
    print(f"{count / 1e6:.2f} M parameters, {reached:.3f} nats a held-out byte; in {options.out}")


if __name__ == "__main__":
    main()

"""Prefill of the 30m shape: the lab's decoder against transformers' `generate`, one process, same
threads and weights.

    python experiments/lab/transformers_prefill/measure.py --requests 8 --prompt-len 512

Repetitions are interleaved; the ratio is that of the medians, with the quartiles of the paired
ratios beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.device import (
    device_description,
    prepare_memory,
    resolve_device,
    resolve_dtype,
)
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.checkpoint import AutoModel
from sarathi_lab.model.weights import load_model

BLOCK_SIZE = 16


def make_transformers_model(
    directory: Path, device: torch.device, dtype: torch.dtype
) -> LlamaForCausalLM:
    """A random model in the lab's own 30m shape, saved so that both sides read the same weights."""
    spec, _ = AutoModel().resolve("30m")
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        intermediate_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
    model.save_pretrained(directory)
    return model


def prefill_with_transformers(model: LlamaForCausalLM, prompts: np.ndarray) -> list[int]:
    """First greedy token of every prompt, prompts [requests, prompt_len] as one batch."""
    input_ids = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, -1].tolist()


def prefill_with_the_lab(executor: TorchExecutor, prompts: np.ndarray) -> list[int]:
    """The same through the executor, as one iteration."""
    blocks = BlockManager(executor.num_blocks, BLOCK_SIZE)
    batch = Batch()
    for i, prompt in enumerate(prompts):
        sequence = SequenceState(Request(i, 0.0, len(prompt), 1, prompt), order=i)
        blocks.grow(sequence, len(prompt))
        batch.add(sequence, len(prompt))
    executor.submit(batch)
    return executor.collect().token_ids


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()

    device = resolve_device(args.device)
    dtype_name, dtype = resolve_dtype(args.dtype, device)
    prepare_memory(device)
    prompts = np.random.default_rng(0).integers(
        0, 4096, (args.requests, args.prompt_len), dtype=np.int32
    )
    num_blocks = args.requests * -(-args.prompt_len // BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        theirs = make_transformers_model(Path(folder), device, dtype)
        spec, found = AutoModel(folder).resolve("30m")
        ours = TorchExecutor(
            load_model(spec, found, device, dtype, 0), num_blocks=num_blocks, block_size=BLOCK_SIZE
        )
    same = np.mean(
        np.equal(prefill_with_transformers(theirs, prompts), prefill_with_the_lab(ours, prompts))
    )
    pairs = [
        (
            timed(lambda: prefill_with_transformers(theirs, prompts)),
            timed(lambda: prefill_with_the_lab(ours, prompts)),
        )
        for _ in range(args.repetitions)
    ]
    their_times, our_times = np.array(pairs).T
    low, high = np.quantile(their_times / our_times, (0.25, 0.75))
    print(
        f"prefill of {args.requests} x {args.prompt_len} tokens, {dtype_name}, "
        f"{device_description(device)}"
    )
    print(f"  transformers generate {np.median(their_times) * 1e3:8.1f} ms")
    print(f"  sarathi_lab           {np.median(our_times) * 1e3:8.1f} ms")
    ratio = np.median(their_times) / np.median(our_times)
    print(
        f"  ratio {ratio:.2f} (quartiles of pairs {low:.2f} to {high:.2f}), same first tokens: "
        f"{same:.0%}"
    )


if __name__ == "__main__":
    main()

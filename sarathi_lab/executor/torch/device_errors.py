"""Errors of a device during a run: no memory, failed kernels, logits that are not numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sarathi_lab.config.errors import RunError
from sarathi_lab.engine.request import Batch
from sarathi_lab.model.operations import NAN_TOKEN
from sarathi_lab.model.transformer import Transformer

# Memory errors without a class in torch: of a CPU, the driver, and cuBLAS.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@contextmanager
def explain_device_errors(what: str) -> Iterator[None]:
    """Turn errors of memory, graphs and kernels during `what` into a RunError."""
    try:
        yield
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if is_memory or any(words in str(error) for words in OUT_OF_MEMORY):
            raise RunError(_memory_line(what, str(error))) from None
        line = next((line for line in str(error).splitlines() if line.strip()), "no message")
        if isinstance(error, RuntimeError) and "captur" in line.lower():  # CUDA's and torch's words
            raise RunError(
                f"{what} failed ({line.strip()}); use executor.cuda_graphs=false"
            ) from None
        if type(error).__module__.startswith("triton"):
            raise RunError(
                f"Triton can't compile or launch a kernel during {what} "
                f"({type(error).__name__}: {line.strip()}); use executor.kernels=torch"
            ) from None
        raise


def describe_batch(batch: Batch) -> str:
    return (
        f"an iteration of {batch.num_prefill_tokens} prompt tokens and "
        f"{batch.num_decode_tokens} decodes"
    )


def _memory_line(what: str, error: str) -> str:
    match = re.search(r"ried to allocate ([\d.]+ \w+)", error)
    wanted = f"{match[1] if match else 'some'} more were wanted"
    return (
        f"out of memory during {what} ({wanted}); lower batch, chunk, seq_len or cache.num_blocks"
    )


def nan_error(model: Transformer, batch: Batch, token_ids: list[int]) -> RunError:
    """Name the first request whose logits are not numbers."""
    emitting = [one for one in batch.chunks if one.emits_token for _ in range(one.num_rows)]
    chunk = emitting[token_ids.index(NAN_TOKEN)]
    is_half = model.dtype == torch.float16
    fix = "use dtype=bfloat16 or float32" if is_half else "check the model's weights"
    return RunError(
        f"request {chunk.sequence.request.request_id}: the logits of its token "
        f"{chunk.output_index} are not numbers; {fix}"
    )

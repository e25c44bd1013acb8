"""How a served system attends to a batch with prompts and decodes: in one call, or in two.

A hardware file states it for its kernel (`hybrid_call`), a host chooses another kernel
(`attention_kernel`). This module adds by backend what was read or measured of it, and how many
decodes may ride on a chunk before riding costs more than a batch of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.executor.simulated.hardware import Hardware, Host

FLASH_ATTENTION_2 = "flash_attention_2"
ROCM_ATTENTION = "rocm_attn"
MOST_DECODES = 1024  # beside a chunk, above which nothing is looked for
EXAMPLE_CHUNK = 960  # tokens of a prompt, which leave 64 decodes room in their last tile
EXAMPLE_CONTEXT = 4096  # tokens of a decode beside it


@dataclass(frozen=True)
class AttentionBackend:
    """Calls of one backend for prompts and decodes together, of which cards, and how it is known.

    `is_measured`: the cost of one call was measured on such a card. `maker`: of the cards that it
    is for.
    """

    name: str
    calls: int
    systems: str
    cards: str
    source: str
    is_measured: bool = False
    maker: str = "nvidia"


BACKENDS = {
    backend.name: backend
    for backend in (
        AttentionBackend(
            FLASH_ATTENTION_2,
            1,
            "vLLM to 0.33",
            "SM8x, and the RTX PRO 6000 (SM120)",
            "calls of vLLM 0.19.0 in experiments/lab/real_servers; vLLM pull request 58013 would "
            "split them, open in September 2026",
            is_measured=True,
        ),
        AttentionBackend(
            "flash_attention_3",
            1,
            "vLLM to 0.33",
            "SM90",
            "vLLM pull request 58013, description: tile-scheduled, left as it is",
        ),
        AttentionBackend(
            "flashinfer",
            2,
            "vLLM from 0.8.5",
            "any",
            "vLLM pull request 16684, merged in April 2025",
        ),
        AttentionBackend(
            "tensorrt_llm",
            2,
            "TensorRT-LLM 1.0",
            "any",
            "a context and a generation kernel, timed apart in aiconfigurator-core 0.12.0",
        ),
        AttentionBackend(
            ROCM_ATTENTION,
            2,
            "vLLM from 0.19",
            "AMD's",
            "vLLM 0.25, API reference of vllm.v1.attention.backends.rocm_attn (PagedAttention and "
            "Triton prefix prefill); default since 0.19 by vLLM-Omni's platforms.rocm",
            maker="amd",
        ),
    )
}


def backend_of(hardware: Hardware, host: Host) -> AttentionBackend | None:
    """Return the attention backend of a served system, None for one of which nothing is known."""
    name = host.attention_kernel or hardware.kernel
    if name is None:
        # The kernel of the hardware file itself is the one without figures in place of its own.
        for kernel, figures in hardware.kernels.items():
            if not figures:
                name = kernel
                break
    if name is None and hardware.maker == "amd":
        name = ROCM_ATTENTION
    if name is None and hardware.hybrid_call:
        name = FLASH_ATTENTION_2
    backend = BACKENDS.get(name or "")
    if backend is None or backend.maker != hardware.maker:
        return None
    return backend


def attention_calls(hardware: Hardware, host: Host) -> int | None:
    """Return 1 or 2, the attention calls for prompts and decodes together; None if unknown. What
    the hardware states, as a user may, comes before what is known of the backend.
    """
    stated = hardware.with_kernel(host.attention_kernel).hybrid_call
    if stated is not None:
        return 1 if stated else 2
    backend = backend_of(hardware, host)
    if backend is None:
        return None
    return backend.calls


def caution_of(hardware: Hardware, host: Host, cost: CostModel) -> str | None:
    """Say what a served system's single attention call means for a simulated run by `cost`.

    Returns:
        A line; None where the system makes two calls, or nothing is known of it.
    """
    if attention_calls(hardware, host) != 1:
        return None
    backend = backend_of(hardware, host)
    name = "the kernel that is stated"
    if backend is not None and backend.calls == 1:
        name = f"{backend.name} ({backend.systems})"
    if hardware.with_kernel(host.attention_kernel).hybrid_call is None:
        # The backend is known to make one call, but no figures say what that costs.
        return (
            f"attention: two calls for prompts and decodes are simulated; {name} makes one, of "
            "which no measurement was published"
        )
    caution = f"attention: prompts and decodes are in one call, by {name}"
    number = most_riding_decodes(cost, EXAMPLE_CHUNK, EXAMPLE_CONTEXT)
    if number == MOST_DECODES:
        return caution
    return (
        f"{caution}; beside {EXAMPLE_CHUNK:,} tokens of a prompt, more than {number} decodes of "
        f"{EXAMPLE_CONTEXT:,} cost more than in a batch of their own, by this cost model"
    )


@lru_cache(maxsize=32)  # every run of a sweep asks it of the same cost model
def most_riding_decodes(cost: CostModel, chunk: int, context: int, start: int = 0) -> int:
    """Return how many decodes of `context` tokens may ride on a chunk of `chunk` tokens, `start`
    behind, before riding takes longer than two batches; `MOST_DECODES` where it never does.

    Riding gets dearer with every decode, so the number is found by halving.
    """
    low = 0
    high = MOST_DECODES
    while low < high:
        number = (low + high + 1) // 2
        if _pays(cost, chunk, context, start, number):
            low = number
        else:
            high = number - 1
    return low


def _pays(cost: CostModel, chunk: int, context: int, start: int, number: int) -> bool:
    """Whether `number` decodes cost no more on the chunk than in a batch of their own."""
    prompt = make_batch(prefill_tokens=chunk, start=start)
    decodes = make_batch(num_decodes=number, context=context)
    both = make_batch(prefill_tokens=chunk, start=start, num_decodes=number, context=context)
    apart = cost.iteration_time(prompt) + cost.iteration_time(decodes)
    return cost.iteration_time(both) <= apart

"""How a served system attends to a batch with prompts and decodes: in one call, or in two.

A hardware file states it for its kernel (`hybrid_call`), a host chooses another kernel
(`attention_kernel`). This module says what one call means for a run, and how many decodes may ride
on a chunk before riding costs more than a batch of their own.
"""

from __future__ import annotations

from functools import lru_cache

from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.simulated.cost_model import CostModel
from sarathi_lab.executor.simulated.hardware import Hardware, Host

# Kernels that attend to prompts and decodes in one call, with the servers that have them.
ONE_CALL = {
    # Calls of vLLM 0.19.0 in experiments/lab/real_servers. Pull request 58013, open in September
    # 2026, would split them.
    "flash_attention_2": "vLLM to 0.33",
    # vLLM pull request 58013, description: tile-scheduled, left as it is.
    "flash_attention_3": "vLLM to 0.33",
}
MOST_DECODES = 1024  # beside a chunk, above which nothing is looked for
EXAMPLE_CHUNK = 960  # tokens of a prompt, which leave 64 decodes room in their last tile
EXAMPLE_CONTEXT = 4096  # tokens of a decode beside it


def kernel_of(hardware: Hardware, host: Host) -> str | None:
    """Return the attention kernel of a served system, None for one of which nothing is known."""
    stated = host.attention_kernel or hardware.kernel
    if stated is not None:
        return stated
    for kernel, figures in hardware.kernels.items():
        if not figures:  # those of the hardware file are its own
            return kernel
    return None


def caution_of(cost: CostModel, host: Host) -> str | None:
    """Say what a served system's single attention call means for a simulated run by `cost`.

    Returns:
        A line; None where the system makes two calls, or nothing is known of it.
    """
    hardware = cost.hardware
    kernel = kernel_of(hardware, host) or ""
    name = "the kernel that is stated"
    is_of_one_call = hardware.maker == "nvidia" and kernel in ONE_CALL
    if is_of_one_call:
        name = f"{kernel} ({ONE_CALL[kernel]})"
    makes_one_call = hardware.hybrid_call
    if makes_one_call is None and is_of_one_call:
        # No figures say what that costs.
        return (
            f"attention: two calls for prompts and decodes are simulated; {name} makes one, of "
            "which no measurement was published"
        )
    if not makes_one_call:
        return None
    caution = f"attention: prompts and decodes are in one call, by {name}"
    number = most_riding_decodes(cost, EXAMPLE_CHUNK, EXAMPLE_CONTEXT)
    if number == MOST_DECODES:
        return caution
    return (
        f"{caution}; beside {EXAMPLE_CHUNK:,} tokens of a prompt, more than {number} decodes of "
        f"{EXAMPLE_CONTEXT:,} cost more than in a batch of their own, by this cost model"
    )


@lru_cache(maxsize=32)  # every run of a sweep asks it of the same cost model
def most_riding_decodes(
    cost: CostModel,
    chunk: int,
    context: int,
    start: int = 0,
) -> int:
    """Return how many decodes of `context` tokens may ride on a chunk of `chunk` tokens, `start`
    behind, before riding takes longer than two batches; `MOST_DECODES` where it never does.

    Riding gets dearer with every decode, so the number is found by halving.
    """
    prompt = make_batch(prefill_tokens=chunk, start=start)

    def pays(number: int) -> bool:
        decodes = make_batch(num_decodes=number, context=context)
        both = make_batch(prefill_tokens=chunk, start=start, num_decodes=number, context=context)
        apart = cost.iteration_time(prompt) + cost.iteration_time(decodes)
        return cost.iteration_time(both) <= apart

    low = 0
    high = MOST_DECODES
    while low < high:
        number = (low + high + 1) // 2
        if pays(number):
            low = number
        else:
            high = number - 1
    return low

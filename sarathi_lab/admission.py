"""Which requests an engine can serve at all."""

from __future__ import annotations

from sarathi_lab.block_manager import BlockManager
from sarathi_lab.errors import UserError
from sarathi_lab.policy import Policy
from sarathi_lab.request import Request


def check_fits(request: Request, reserved: int, blocks: BlockManager, policy: Policy, max_model_len: int) -> None:
    """Raise UserError if `request` is longer than the model or the cache allows, alone on an idle engine.

    `reserved` is how many tokens of cache `policy` sets aside for it at most.
    """
    what = f"request {request.request_id} of {request.prompt_len} + {request.output_len} tokens"
    if request.total_len > max_model_len:
        raise UserError(f"{what} exceeds max_model_len={max_model_len}; raise it or shorten the request")
    needed = blocks.blocks_for(max(request.total_len, reserved)) + blocks.watermark_blocks(policy.watermark)
    if needed > blocks.num_blocks:
        raise UserError(
            f"{what} can never fit the KV cache: policy {policy.name} needs {needed} blocks of "
            f"{blocks.block_size} tokens, num_blocks={blocks.num_blocks}; raise cache.num_blocks"
        )

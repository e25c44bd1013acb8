"""How far one model's next-token distributions are from another's on the same text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Means over the tokens of a text, in nats where they have a unit.

    `nll` is the negative log-likelihood of the text's own next tokens, `nll_reference` the
    reference's; `kl` the divergence KL(reference || found), `max_kl` the largest of any token;
    `top1_agreement` the share of tokens behind which both have the same likeliest one.
    """

    num_tokens: int
    nll: float
    nll_reference: float
    kl: float
    max_kl: float
    top1_agreement: float

    @property
    def nll_increase(self) -> float:
        return self.nll - self.nll_reference


def agreement(found: Tensor, reference: Tensor, targets: Tensor) -> Agreement:
    """Of logits `found` with `reference`, both [tokens, vocab_size], before `targets` [tokens].

    Computed in float64: differences are far smaller than what they differ by. NaN logits make the
    means NaN. Raises ValueError for shapes that differ.
    """
    if found.shape != reference.shape or len(targets) != len(found):
        raise ValueError(
            f"logits {tuple(found.shape)}, {tuple(reference.shape)} and {len(targets)} targets "
            "differ"
        )
    ours, theirs = found.double().log_softmax(-1), reference.double().log_softmax(-1)
    kl = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    return Agreement(
        num_tokens=len(targets),
        nll=float(F.nll_loss(ours, targets)),
        nll_reference=float(F.nll_loss(theirs, targets)),
        kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    )


def joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Agreement:
    """`agreement` of several texts: means over all their tokens."""
    found, reference, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return agreement(found, reference, targets)

"""Memory that one iteration takes on a device beside weights and cache, as servers profile it.

The constants were fitted to the peaks that vLLM 0.19.0 logged for about ten models on an H100, with
8,192 tokens and 1,024 sequences (experiments/lab/cache_sizes): within 8 % of those that were
checked, mixtures included.
"""

from __future__ import annotations

from sarathi_lab.model.spec import ModelSpec

# Rows as wide as the hidden state at a layer's peak: its input, the residual, what a norm writes
# and queries, keys and values.
HIDDEN_ROWS = 4.3
# Bytes for each sequence and entry of the vocabulary: logits in 16 and in 32 bits, and what
# sampling makes of them. Every device of a layer samples all.
LOGIT_BYTES = 14.1
SAMPLER_BYTES = 0.18e9  # of sampling, for any number of sequences


def iteration_bytes(
    spec: ModelSpec,
    num_tokens: int,
    num_sequences: int,
    dtype_bytes: int,
    tensor: int = 1,
) -> float:
    """Compute the peak of an iteration's memory on one device, beside weights and cache.

    It is that of a layer or of sampling, which do not overlap, and the buffers of experts, which
    stay.

    Args:
        spec: The model.
        num_tokens: Tokens of the iteration, of prompts and decodes.
        num_sequences: The most sequences, each of which samples a token.
        dtype_bytes: Bytes of an activation (2 in 16 bits), also where weights or cache have 8 bits;
            logits have another size.
        tensor: Devices that share each layer. It divides the rows within FFNs and experts; rows as
            wide as the hidden state and the logits are whole on every device.

    Returns:
        Bytes.
    """
    num_sampled = min(num_sequences, num_tokens)
    logits = num_sampled * spec.vocab_size * LOGIT_BYTES
    sampling = SAMPLER_BYTES + logits
    layer = num_tokens * _layer_row_bytes(spec, dtype_bytes, tensor)
    experts = num_tokens * _expert_row_bytes(spec, dtype_bytes, tensor)
    return max(layer, sampling) + experts


def _layer_row_bytes(spec: ModelSpec, dtype_bytes: int, tensor: int) -> float:
    """Return the bytes of a token in a layer with an FFN: before and after its activation."""
    widest = max((width for width, _ in spec.activations), default=0)
    num_rows = 3 if spec.gated_ffn else 2
    hidden = HIDDEN_ROWS * spec.hidden_size
    activation = num_rows * widest / tensor
    return dtype_bytes * (hidden + activation)


def _expert_row_bytes(spec: ModelSpec, dtype_bytes: int, tensor: int) -> float:
    """Return the bytes of a token in the buffers of its experts: one holds what is before the
    activation, then the outputs, the other what is after the activation.
    """
    if not spec.num_experts:
        return 0.0
    width = spec.ffn_size / tensor
    num_rows = 2 if spec.gated_ffn else 1
    first = max(num_rows * width, spec.hidden_size)
    return dtype_bytes * spec.experts_per_token * (first + width)

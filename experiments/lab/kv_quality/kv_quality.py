"""Compare the logits of a trained model, cut into chunks and cached in several types, with those of
the same weights in float32, uncut, in plain torch.

    python experiments/lab/kv_quality/kv_quality.py outputs/kv_quality/byte-llama
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sarathi_lab.engine.block_manager import BlockManager
from sarathi_lab.engine.executor import Sizes
from sarathi_lab.engine.request import Batch, Request, SequenceState
from sarathi_lab.executor.torch.backend import TorchBackend
from sarathi_lab.executor.torch.executor import TorchExecutor
from sarathi_lab.model.checkpoint import text_encoder
from sarathi_lab.model.huggingface import read_spec
from sarathi_lab.results.provenance import provenance

Tokens = NDArray[np.int32]
BLOCK_SIZE = 16  # tokens
CHUNKS, OFFSETS, PREFIX_HITS, MATES = (16, 64, 256), (0, 5), (False, True), (0, 3)
KV_DTYPES = ("auto", "int8", "fp8")


@dataclass(frozen=True)
class Cuts:
    """Chunks of a prefill: a first one of `offset` tokens (0: none), then of `chunk` tokens.

    With `prefix_hit` the prefix cache holds the first half of the text, in whole blocks, of another
    sequence that has computed it in one piece; the chunks begin after it.
    """

    chunk: int
    offset: int = 0
    prefix_hit: bool = False

    def of(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield start and number of tokens of each chunk of the tokens `start` to `length`."""
        size = self.offset or self.chunk
        while start < length:
            num_tokens = min(size, length - start)
            yield start, num_tokens
            start, size = start + num_tokens, self.chunk


def blocks_needed(length: int, num_mates: int, block_size: int) -> int:
    """Return the blocks of a text of `length` tokens, the one whose prefix it shares, and mates."""
    return (2 + num_mates) * -(-length // block_size)


@torch.inference_mode()
def teacher_forced_logits(
    executor: TorchExecutor, tokens: Tokens, cuts: Cuts, mates: Sequence[Tokens] = ()
) -> Tensor:
    """Return logits [rows, vocab_size] in float32 after each token that is computed.

    Every batch also has the next token of each of the `mates`, texts of at least the same length
    that are prefilled to their first half, as a decode beside the chunk. Raises ValueError if the
    cache has fewer blocks than `blocks_needed`.
    """
    blocks = BlockManager(executor.num_blocks, executor.block_size, shares_prefixes=cuts.prefix_hit)
    half = len(tokens) // 2
    decodes = [_sequence(mate, number + 1, blocks) for number, mate in enumerate(mates)]
    for decode in decodes:
        _compute(executor, decode, half)
    if blocks.prefix is not None:
        num_tokens = half // executor.block_size * executor.block_size
        if num_tokens == 0:
            size = executor.block_size
            raise ValueError(f"the first half of {len(tokens)} tokens has no whole block of {size}")
        other = _sequence(tokens[:num_tokens], -1, blocks)
        _compute(executor, other, num_tokens)
        blocks.prefix.publish(other)
    text = _sequence(tokens, 0, blocks)
    rows = []
    for first, num_tokens in cuts.of(text.num_computed, len(tokens)):
        text.num_computed, text.in_flight = first, False
        batch = Batch()
        for decode in decodes:
            decode.in_flight = False
            batch.add(decode, 1)
        batch.add(text, num_tokens)
        rows.append(_logits(executor, batch, num_tokens))
        for decode in decodes:
            decode.num_computed = min(decode.num_computed + 1, len(tokens) - 1)
    return torch.cat(rows)


def _sequence(tokens: Tokens, number: int, blocks: BlockManager) -> SequenceState:
    request = Request(number, 0.0, len(tokens), 1, tokens)
    sequence = blocks.look_up(SequenceState(request, order=number))
    if not blocks.admit(sequence, len(tokens)):
        raise ValueError(
            f"the cache does not hold {len(tokens)} more tokens; it takes `blocks_needed`"
        )
    return sequence


def _compute(executor: TorchExecutor, sequence: SequenceState, num_tokens: int) -> None:
    batch = Batch()
    batch.add(sequence, num_tokens)
    _logits(executor, batch, 1)
    sequence.num_computed, sequence.in_flight = num_tokens, False


def _logits(executor: TorchExecutor, batch: Batch, num_rows: int) -> Tensor:
    """Return those of the last `num_rows` rows of `batch`."""
    inputs = executor.packed(batch)
    rows = torch.arange(batch.num_tokens - num_rows, batch.num_tokens, device=executor.model.device)
    return executor.model(replace(inputs, emit_rows=rows), executor.cache).float()


@dataclass(frozen=True)
class Agreement:
    """Means over the tokens of a text, in nats where they have a unit.

    `nll` is the negative log-likelihood of the text's next tokens, `nll_reference` the reference's;
    `kl` is KL(reference || found), `max_kl` the largest of any token; `top1_agreement` is the share
    of tokens after which both have the same likeliest one.
    """

    num_tokens: int
    nll: float
    nll_reference: float
    kl: float
    max_kl: float
    top1_agreement: float
    nll_increase: float


def agreement(found: Tensor, reference: Tensor, targets: Tensor) -> Agreement:
    """Compare logits, both [tokens, vocab_size], before `targets` [tokens], in float64."""
    ours, theirs = found.double().log_softmax(-1), reference.double().log_softmax(-1)
    kl = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    nll, nll_reference = float(F.nll_loss(ours, targets)), float(F.nll_loss(theirs, targets))
    return Agreement(
        num_tokens=len(targets),
        nll=nll,
        nll_reference=nll_reference,
        kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
        nll_increase=nll - nll_reference,
    )


def compare(
    executor: TorchExecutor, texts: Sequence[tuple[Tokens, Tensor]], cuts: Cuts, num_mates: int = 0
) -> Agreement:
    """Compare texts with their reference logits; the mates of a text are those that follow it."""
    parts = []
    for number, (text, reference) in enumerate(texts):
        mates = [texts[(number + 1 + mate) % len(texts)][0][:-1] for mate in range(num_mates)]
        found = teacher_forced_logits(executor, text[:-1], cuts, mates)
        targets = torch.from_numpy(text[-len(found) :].astype(np.int64)).to(found.device)
        parts.append((found, reference[-len(found) :], targets))
    return agreement(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def read_texts(checkpoint: Path, path: Path, number: int, length: int) -> list[Tokens]:
    """Read `number` pieces of `length` + 1 tokens, evenly spread over the file; bytes are the
    tokens of a model without a tokenizer.
    """
    content, encode = path.read_bytes(), text_encoder(checkpoint)
    tokens = np.frombuffer(content, dtype=np.uint8)
    if encode is not None:
        tokens = np.array(encode(content.decode(errors="replace")))
    step = len(tokens) // number
    starts = range(0, number * step, step)
    return [tokens[start : start + length + 1].astype(np.int32) for start in starts]


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Return a row for every type of model and cache, prefix hit, chunk, offset and mates."""
    checkpoint, device, length = options.checkpoint, options.device, options.length
    path = options.text or checkpoint / "held_out.txt"
    texts = read_texts(checkpoint, path, options.texts, length)
    spec = read_spec(checkpoint)
    num_blocks = blocks_needed(length, max(MATES), BLOCK_SIZE)
    sizes = Sizes(num_blocks, BLOCK_SIZE, batch_size=1 + max(MATES))
    exact = TorchBackend(device, "float32", kernels="torch").build(spec, checkpoint, sizes)
    pairs = [(text, teacher_forced_logits(exact, text[:-1], Cuts(length))) for text in texts]
    rows = []
    for dtype, kv_dtype in product(options.dtypes, KV_DTYPES):
        backend = TorchBackend(device, dtype, weights=options.weights)
        executor = backend.build(replace(spec, kv_dtype=kv_dtype), checkpoint, sizes)
        model = executor.model
        for hit, chunk, offset, num_mates in product(PREFIX_HITS, CHUNKS, OFFSETS, MATES):
            cuts = Cuts(chunk, offset, hit)
            row = {"dtype": dtype, "kv_dtype": kv_dtype, **asdict(cuts), "num_mates": num_mates}
            row["kv_bytes_per_token"] = model.spec.kv_bytes_per_token(model.dtype.itemsize)
            rows.append({**row, **asdict(compare(executor, pairs, cuts, num_mates))})
        print(f"{dtype}, cache in {kv_dtype}: mean KL {rows[-1]['kl']:.2e}", flush=True)
    return pd.DataFrame(rows).assign(
        model=spec.name,
        device=backend.device_name,
        weights=options.weights,
        git_commit=provenance()["git_commit"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkpoint", type=Path, help="such as train.py leaves it")
    parser.add_argument("--text", type=Path, help="default: held_out.txt of the checkpoint")
    parser.add_argument("--texts", type=int, default=4, help="pieces of the text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a piece")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--weights", default="auto", help="or fp8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/kv_quality/kv_quality.csv"))
    options = parser.parse_args(arguments)
    table = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out, index=False, float_format="%.6g")
    kinds = table.groupby(["dtype", "kv_dtype"], sort=False)
    columns = ["kv_bytes_per_token", "nll", "nll_increase", "kl", "top1_agreement"]
    print(kinds[columns].mean().to_string())


if __name__ == "__main__":
    main()

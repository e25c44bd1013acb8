"""At which lengths, batches and chunks the experiments run: the paper's on a GPU, smaller ones on a
CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sarathi_lab.experiment import iterations
from sarathi_lab.experiment.bench import CHUNK, LARGEST_BATCH, SEQ_LENS
from sarathi_lab.experiment.served_figures import Scale, paper_scale
from sarathi_lab.experiment.throughput import TABLE_4

Batches = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Setup:
    """Sizes of all experiments, in tokens and sequences. Panels and lines are called by their own
    sizes, so that nobody takes a small set-up's for the paper's.

    `served` is what requests are served at; its first chunk is the main one. `seq_len` is the
    length where a figure has one (Fig 3, Table 2), `decodes` the decodes of Table 2.
    """

    name: str
    served: Scale
    seq_len: int
    decodes: int
    fig03_batches: Sequence[int]
    fig04: Sequence[tuple[str, str, int]]  # panel, length, batch
    fig07_tokens: Sequence[int]
    tiles: Sequence[int]  # tokens that fill tiles of 128, and have one more added
    fig08_batches: Batches
    fig10_chunks: Sequence[int]
    fig13_lengths: Mapping[str, int]
    fig13_chunks: Sequence[int]
    reread_prompts: Sequence[int]
    reread_chunks: Sequence[int]
    lengths: Sequence[int]  # of `sequence_length`, at `batch`
    batch: int
    batches: Sequence[int]  # of `batch_size`, at the first length
    budgets: Sequence[int]  # of `token_budget`, the largest last

    @property
    def chunk(self) -> int:
        """The main chunk."""
        return self.served.chunks[0]

    @property
    def largest(self) -> int:
        """The most tokens that the cache has to hold at a time."""
        served, settings = self.served, self.served.table4
        sizes = [length * served.batches[name] for name, length in served.seq_lens.items()]
        sizes += [served.seq_lens[name] * batch for name, batch, _ in settings]
        sizes += [served.seq_lens[name] * max(own) for name, own in self.fig08_batches.items()]
        sizes += [int(length) * batch for _, length, batch in self.fig04]
        sizes += [self.seq_len * max((*self.fig03_batches, self.decodes + 1)), *self.reread_prompts]
        sizes += [
            max(self.lengths) * self.batch,
            self.first_length * max(self.batches),
            *self.fig07_tokens,
        ]
        return max(sizes)

    @property
    def first_length(self) -> int:
        """The shortest length that is served."""
        return next(iter(self.served.seq_lens.values()))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; prompts may be rounded up to whole chunks."""
        return max(2 * max(*self.served.seq_lens.values(), *self.lengths), *self.reread_prompts)

    @property
    def most_sequences(self) -> int:
        """The largest batch of any experiment."""
        some = [*self.served.batches.values(), *self.fig03_batches, *self.batches, self.batch]
        return max(
            *some,
            *(max(own) for own in self.fig08_batches.values()),
            *(batch for _, _, batch in self.fig04),
        )


def paper_setup(model: str) -> Setup:
    """The paper's own sizes; models that its Table 4 does not have take those of 13B."""
    return Setup(
        name="paper",
        served=paper_scale(model if model in TABLE_4 else "13b"),
        seq_len=1024,
        decodes=4,
        fig03_batches=iterations.FIG_03_BATCHES,
        fig04=_grid(("64", "128", "256", "512", "1024"), (1, 4, 16)),
        fig07_tokens=(2, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
        tiles=(128, 256, 512),
        fig08_batches=iterations.FIG_08_BATCHES,
        fig10_chunks=(CHUNK, 2 * CHUNK),
        fig13_lengths=SEQ_LENS,
        fig13_chunks=iterations.FIG_13_CHUNKS,
        reread_prompts=(2048, 8192),
        reread_chunks=(128, 256, 512, 1024, 2048),
        lengths=(512, 1024, 2048, 3072),
        batch=LARGEST_BATCH["3K"],
        batches=(2, 4, 6, 10, 14, 18),
        budgets=(128, 256, 512, 1024),
    )


def small_setup(model: str) -> Setup:
    """What two cores of a CPU measure with a model of 30M parameters, every experiment in about
    half a minute.
    """
    return Setup(
        name="small",
        served=Scale(
            {"256": 256, "512": 512},
            {"256": 6, "512": 4},
            (64, 128),
            (4.0, 40.0),
            [("256", 4, 20.0)],
        ),
        seq_len=256,
        decodes=4,
        fig03_batches=(1, 2, 4),
        fig04=_grid(("64", "256"), (1, 2, 4)),
        fig07_tokens=(2, 32, 64, 128, 192, 256, 384, 512),
        tiles=(128, 256),
        fig08_batches={"256": (2, 4, 8), "512": (2, 4, 8)},
        fig10_chunks=(64,),
        fig13_lengths={"1024": 1024},
        fig13_chunks=(64, 128, 256, 512),
        reread_prompts=(1024,),
        reread_chunks=(64, 128, 256, 512, 1024),
        lengths=(128, 256, 512),
        batch=4,
        batches=(2, 4, 8),
        budgets=(32, 64, 128, 256),
    )


def dry_setup(model: str) -> Setup:
    """Seconds in all with the tiny model: what is tried, not what is measured."""
    return Setup(
        name="dry",
        served=Scale({"48": 48}, {"48": 3}, (16,), (4.0,), [("48", 2, 8.0)]),
        seq_len=32,
        decodes=2,
        fig03_batches=(1, 2),
        fig04=_grid(("16",), (1, 2)),
        fig07_tokens=(2, 16),
        tiles=(16,),
        fig08_batches={"48": (2,)},
        fig10_chunks=(16,),
        fig13_lengths={"48": 48},
        fig13_chunks=(16, 24),
        reread_prompts=(64,),
        reread_chunks=(16, 32, 64),
        lengths=(32, 48),
        batch=2,
        batches=(2, 3),
        budgets=(16, 48),
    )


SETUPS: Mapping[str, Callable[[str], Setup]] = {
    "paper": paper_setup,
    "small": small_setup,
    "dry": dry_setup,
}


def _grid(lengths: Sequence[str], batches: Sequence[int]) -> list[tuple[str, str, int]]:
    """Both phases at each length and batch, as Fig 4a has them."""
    return [
        (phase, length, batch)
        for phase in ("prefill", "decode")
        for length in lengths
        for batch in batches
    ]

"""Three ways to compute a chunk and decodes, by all mixed calls of two servers' tables.

    python experiments/lab/piggyback_boundary/boundary.py

Prints what a batch takes over two batches, the shares of batches in which each way is the fastest,
what the tables' repeats and caches leave open, and draws map.png. A chunk of 2,048 tokens with
decodes has more tokens than any row of products: such batches count only in the columns "all",
where products grow with their tokens past the last row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.simulated.interpolation import curve
from sarathi_lab.executor.simulated.measured_kernels import (
    REACH,
    MeasuredExperts,
    MeasuredKernels,
    bends,
)
from sarathi_lab.executor.tables import TIME, OperationTables, read_tables
from sarathi_lab.results.plots.files import save_figure

SERVERS = EXPERIMENTS / "lab" / "real_servers"
SIZES = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
# Batches as servers have them: chunks from 256 tokens behind up to 4,096.
SERVED = "prefill_chunk >= 256 and kv_prefill <= 4096"
SHOWN_CONTEXTS = (512, 2048, 4096, 16384)
SHOWN_DECODES = (1, 16, 128)
MAPPED_CHUNKS = (256, 1024)
MAPPED_START = 1024  # cached tokens before the chunk
MOST_OF_ONE_CALL = 4.0  # the end of the map's colours
DARK = 2.0  # a ratio whose colour needs white letters
TITLE = (
    "Products and attention with one attention call, over the fastest of three ways.\n"
    "x: two batches are faster. Frame: the card's cache holds the batch."
)


class Card(NamedTuple):
    """A GPU, the model of its tables, and the tokens of cache that its server had."""

    hardware: str
    model: str
    folder: Path
    cache_tokens: int


CARDS = (
    # The cache of the pinned run's server, by its meta.json.
    Card("rtx-4090", "llama3.1-8b", SERVERS / "rtx-4090-llama-3.1-8b" / "tp1", 41_408),
    # vLLM's rule: nine tenths of 95 GiB, less 56.9 GiB of weights and 2 of activations, over 96 KiB
    # a token. The pinned run shares its experts with another card, and does not state its blocks.
    Card("rtx-pro-6000", "qwen3-30b-a3b", SERVERS / "rtx-pro-6000-qwen3-30b-a3b" / "tp1", 290_000),
)
Floats = NDArray[np.float64]
FALL = 0.05  # a larger call that takes less than that much of a smaller one's time was disturbed


@dataclass(frozen=True)
class Products:
    """Microseconds of one layer but its attention, by tokens: as measured, and past the last row
    as many more as there are more tokens.
    """

    measured: Callable[[int], float]
    extended: Callable[[int], float]


def main() -> None:
    figure, rows_of_axes = plt.subplots(
        len(CARDS), len(MAPPED_CHUNKS), figsize=(9, 6.8), layout="constrained"
    )
    for card, axes_of_card in zip(CARDS, rows_of_axes, strict=True):
        tables = read_tables(str(card.folder))
        batches = mixed_batches(card, tables)
        describe(card, batches)
        describe_tables(card, tables)
        for chunk, axes in zip(MAPPED_CHUNKS, axes_of_card, strict=True):
            draw_map(axes, card, chunk, batches)
    figure.suptitle(TITLE, fontsize=10)
    save_figure(figure, Path(__file__).parent / "map.png")


def products_of(card: Card, tables: OperationTables) -> Products:
    """Add up a layer's products, norms, activation and experts."""
    spec, hardware = load_option("model", card.model), load_option("hardware", card.hardware)
    kernels = MeasuredKernels(tables, AnalyticOperations(spec, hardware, 2))
    experts = MeasuredExperts(tables, spec) if spec.num_experts else None

    def measured(tokens: int) -> float:
        seconds = sum(kernels.times("layer", tokens).values())
        if experts is not None:
            seconds += experts.seconds(tokens)
        return 1e6 * seconds

    rows = sorted(set(tables.frames["dense"].tokens.astype(int)))
    beyond = curve(rows, [measured(size) for size in rows])

    def extended(tokens: int) -> float:
        return measured(tokens) if tokens <= rows[-1] else beyond(tokens)

    return Products(measured, extended)


def mixed_batches(card: Card, tables: OperationTables) -> pd.DataFrame:
    """Return the mixed calls with the microseconds of three ways, of attention and products:
    `one` call, `two` calls, two `batches`; whether all `is_measured`.
    """
    rows = tables.frames["attention"].rename(columns={TIME: "mixed"})
    calls = rows.query("prefill_chunk > 0 and n_decode > 0").reset_index(drop=True)
    prompt = attention_alone(rows.query("n_decode == 0"), calls, SIZES[:2])
    decodes = attention_alone(rows.query("prefill_chunk == 0"), calls, SIZES[2:])
    products = products_of(card, tables)
    together = calls.prefill_chunk + calls.n_decode
    linear = together.map(products.extended)
    linear_prompt = calls.prefill_chunk.map(products.measured)
    linear_decodes = calls.n_decode.map(products.measured)
    attention_apart = prompt + decodes
    ways = calls.assign(
        one=linear + calls.mixed,
        two=linear + attention_apart,
        batches=linear_prompt + linear_decodes + attention_apart,
    )
    cached = calls.prefill_chunk + calls.kv_prefill + calls.n_decode * calls.kv_decode
    return ways.assign(
        best=ways[["one", "two", "batches"]].min(axis=1),
        one_ratio=ways.one / ways.batches,
        two_ratio=ways.two / ways.batches,
        is_measured=together.map(products.measured).notna(),
        fits=cached <= card.cache_tokens,
    )


def attention_alone(rows: pd.DataFrame, calls: pd.DataFrame, sizes: list[str]) -> Floats:
    """Return the microseconds of each call's prompt, or of its decodes, in a call of its own."""
    by_size = rows.set_index(sizes).mixed
    wanted = pd.MultiIndex.from_frame(calls[sizes])
    return by_size.reindex(wanted).to_numpy()


def describe(card: Card, batches: pd.DataFrame) -> None:
    """Print the table of batches over two batches and the shares of batches."""
    served = batches.query(SERVED)
    print(f"\n{card.hardware}, {card.model}: over two batches, median of chunks (least to most)")
    for number in SHOWN_DECODES:
        of_number = served[served.n_decode == number].groupby("kv_decode")
        for way in ("one_ratio", "two_ratio"):
            cells = []
            for size in SHOWN_CONTEXTS:
                ratios = of_number[way].get_group(size)
                cells.append(f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})")
            print(f"  {number:3} decodes, {way}: {' / '.join(cells)}")
    for name, chosen in (
        ("all", served),
        ("measured", served[served.is_measured]),
        ("measured, fit the cache", served[served.is_measured & served.fits]),
    ):
        print(f"  {name}: {len(chosen)} batches")
        print(f"    one call costs more than two batches in {shares(chosen.one_ratio)}")
        print(f"    two calls cost more than two batches in {shares(chosen.two_ratio)}")
        print(f"    two calls are faster than one in {shares(chosen.one / chosen.two)}")
        slower = chosen.one / chosen.best
        tenth = slower.quantile(0.9)
        print(f"    one call over the best: at most {slower.max():.2f}, a tenth above {tenth:.2f}")


def shares(ratios: pd.Series) -> str:
    """Return the shares of ratios above one, and by more than the error of an attention row."""
    share_of_any = (ratios > 1).mean()
    share_beyond = (ratios > 1 + REACH).mean()
    return f"{share_of_any:.1%}, by more than {REACH:.2%} in {share_beyond:.1%}"


def describe_tables(card: Card, tables: OperationTables) -> None:
    """Print what repeats leave open, and whether decodes found their keys in cache."""
    products = tables.frames["dense"].query("tokens >= 256").sort_values("tokens")
    bends_of_rows: list[float] = []
    for _, rows_of_layer in products.groupby("layer"):
        sizes = rows_of_layer.tokens.to_numpy(float)
        bends_of_rows.extend(bends(sizes, rows_of_layer[TIME].to_numpy(float)))
    print(f"  half of the products' bends are below {np.median(np.abs(bends_of_rows)):.2%}")
    rows = tables.frames["attention"]
    mixed = rows.query("prefill_chunk > 0 and n_decode > 0")
    for size in SIZES:
        others = [name for name in SIZES if name != size]
        growth = mixed.sort_values([*others, size]).groupby(others)[TIME].pct_change().dropna()
        share = (growth < -FALL).mean()
        print(f"  calls that take {FALL:.0%} less than with fewer {size}: {share:.2%}")
    hardware = load_option("hardware", card.hardware)
    spec = load_option("model", card.model)
    token_bytes = 2 * spec.num_kv_heads * spec.kv_head_bytes(2)
    decodes = rows.query("prefill_chunk == 0")
    num_bytes = decodes.n_decode * decodes.kv_decode * token_bytes
    rate = num_bytes / (decodes[TIME] * 1e-6)
    is_cached = rate > hardware.bytes_per_second
    share = rate.max() / hardware.bytes_per_second
    print(f"  decodes faster than the memory: {is_cached.sum()} of {len(decodes)} calls")
    print(f"    the fastest reads at {share:.2f} of the memory's rate")
    if is_cached.any():
        print(f"    they have at most {num_bytes[is_cached].max() / 1e6:.0f} MB of keys and values")


def draw_map(axes: Axes, card: Card, chunk: int, batches: pd.DataFrame) -> None:
    """Colour one call over the best way; a cross where two batches are faster than one call, a
    frame where the card's cache holds the batch.
    """
    chosen = batches[(batches.prefill_chunk == chunk) & (batches.kv_prefill == MAPPED_START)]
    chosen = chosen[(chosen.kv_decode >= SHOWN_CONTEXTS[0]) & chosen.is_measured]
    # The finer grid of the second card has other contexts behind the same chunk.
    contexts = [size for size in sorted(set(chosen.kv_decode)) if size & (size - 1) == 0]
    chosen = chosen[chosen.kv_decode.isin(contexts)]
    ratios = (chosen.one / chosen.best).rename("ratio")
    table = chosen.assign(ratio=ratios).pivot(index="kv_decode", columns="n_decode", values="ratio")
    colours = LogNorm(1, MOST_OF_ONE_CALL)
    image = axes.imshow(table, origin="lower", aspect="auto", cmap="viridis_r", norm=colours)
    columns, rows = list(table.columns), list(table.index)
    for batch in chosen.itertuples():
        x, y = columns.index(batch.n_decode), rows.index(batch.kv_decode)
        ratio = batch.one / batch.best
        colour = "white" if ratio > DARK else "black"
        axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=7, color=colour)
        if batch.one > batch.batches:
            axes.text(x + 0.36, y + 0.3, "x", ha="center", va="center", fontsize=8, color="red")
        if batch.fits:
            frame = Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, lw=1.4, color="black")
            axes.add_patch(frame)
    axes.set_xticks(range(len(columns)), [str(size) for size in columns])
    axes.set_yticks(range(len(rows)), [f"{size:,}" for size in rows])
    axes.set_title(f"{card.hardware}, {card.model}: chunk of {chunk:,}", fontsize=9)
    axes.set(xlabel="decodes beside the chunk", ylabel="tokens of each")
    axes.figure.colorbar(image, ax=axes, ticks=[1, 1.5, 2, 3, 4], format="%g")


if __name__ == "__main__":
    main()

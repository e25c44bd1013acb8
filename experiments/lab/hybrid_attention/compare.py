"""Measured calls over a chunk and decodes, beside two calls and beside the formula of one.

    python experiments/lab/hybrid_attention/compare.py

The calls are those of the servers in experiments/lab/real_servers.
Prints the ratios and errors, and draws one_call.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.simulated.analytic import AnalyticOperations
from sarathi_lab.executor.tables import TIME, read_tables
from sarathi_lab.results.plots.files import save_figure

SERVERS = EXPERIMENTS / "lab" / "real_servers"
RUNS = {
    SERVERS / "rtx-4090-llama-3.1-8b" / "tp1": ("rtx-4090", "llama3-8b"),
    SERVERS / "rtx-pro-6000-qwen3-30b-a3b" / "tp1": ("rtx-pro-6000", "qwen3-30b-a3b"),
}
SIZES = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
# Batches as servers have them: chunks of 256 to 2,048 tokens, decodes of 512 to 4,096.
# The hardest for the formula, as keys no longer fit the L2 cache.
LONG = "n_decode >= 64 and kv_decode >= 2048"
SERVED = "prefill_chunk >= 256 and kv_prefill <= 4096 and 512 <= kv_decode <= 4096"


def main() -> None:
    figure, all_axes = plt.subplots(1, len(RUNS), figsize=(9, 3.4), sharey=True)
    for (folder, (gpu, model)), axes in zip(RUNS.items(), all_axes, strict=True):
        calls = mixed_calls(folder, gpu, model)
        describe(gpu, calls)
        draw(axes, gpu, calls.query(SERVED))
    all_axes[0].set_ylabel("one call / two calls")
    figure.tight_layout()
    save_figure(figure, Path(__file__).parent / "one_call.png")


def mixed_calls(folder: Path, gpu: str, model: str) -> pd.DataFrame:
    """Rows with prompts and decodes: `measured` and `two` calls measured, and both by formula."""
    rows = read_tables(str(folder)).frames["attention"].rename(columns={TIME: "measured"})
    alone = {kind: rows.query(f"{kind} == 0").set_index(SIZES).measured for kind in SIZES[::2]}
    calls = rows.query("prefill_chunk > 0 and n_decode > 0").reset_index(drop=True)
    prompts = pd.MultiIndex.from_frame(calls[SIZES].assign(n_decode=0, kv_decode=0))
    decodes = pd.MultiIndex.from_frame(calls[SIZES].assign(prefill_chunk=0, kv_prefill=0))
    two = alone["n_decode"].reindex(prompts).to_numpy()
    two = two + alone["prefill_chunk"].reindex(decodes).to_numpy()
    spec, hardware = load_option("model", model), load_option("hardware", gpu)
    seconds = AnalyticOperations(spec, hardware, 2).attention.uniform
    sizes = calls[SIZES].to_numpy(int).tolist()
    return calls.assign(
        two=two,
        one_formula=[1e6 * seconds(*one) for one in sizes],
        two_formula=[1e6 * (seconds(*one[:2]) + seconds(0, 0, *one[2:])) for one in sizes],
    )


def describe(gpu: str, calls: pd.DataFrame) -> None:
    ratio = calls.measured / calls.two
    served = ratio[calls.query(SERVED).index]
    print(f"{gpu}: {len(calls)} mixed calls; one takes more than two in {(ratio > 1).mean():.0%}")
    print(f"  one / two: median {ratio.median():.2f}, as served {served.median():.2f}")
    for name in ("one_formula", "two_formula", "two"):
        errors = calls[name] / calls.measured - 1
        means = [errors.abs().mean()]
        for rows in (SERVED, LONG):
            means.append(errors[calls.query(rows).index].abs().mean())
        of_all, of_served, of_long = means
        print(f"  error of {name}: {of_all:.1%}, as served {of_served:.1%}, long {of_long:.1%}")
    print(errors_by_decodes(calls).to_string())
    scaled = calls.two * calls.one_formula / calls.two_formula / calls.measured - 1
    print(f"  error of two measured calls times the formula's ratio: {scaled.abs().mean():.1%}")


def errors_by_decodes(calls: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute errors in percent of the formula, by decodes (rows) and their context."""
    errors = (calls.one_formula / calls.measured - 1).abs()
    contexts = pd.cut(calls.kv_decode, [0, 255, 1023, 2047, 4095, 16384]).rename("context")
    return (
        (100 * errors).groupby([calls.n_decode, contexts], observed=True).mean().unstack().round(1)
    )


def draw(axes: plt.Axes, gpu: str, calls: pd.DataFrame) -> None:
    """Medians by number and context of the decodes; dashed, by formula."""
    contexts = [512, 1024, 2048, 4096]
    for context, colour in zip(contexts, plt.cm.viridis(np.linspace(0, 0.85, 4)), strict=True):
        own = calls[calls.kv_decode == context]
        for top, bottom, style in (
            ("measured", "two", "-"),
            ("one_formula", "two_formula", "--"),
        ):
            median = (own[top] / own[bottom]).groupby(own.n_decode).median()
            label = f"{context:,} tokens each" if style == "-" else None
            label = "by formula" if context == contexts[-1] and style == "--" else label
            axes.plot(median.index, median, style, color=colour, label=label)
    axes.axhline(1, color="grey", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.set(title=gpu, xlabel="decodes beside a chunk")
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    sys.exit(main())

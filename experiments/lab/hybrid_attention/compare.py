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
    prompts_alone = alone["n_decode"].reindex(prompts).to_numpy()
    decodes_alone = alone["prefill_chunk"].reindex(decodes).to_numpy()
    operations = AnalyticOperations(load_option("model", model), load_option("hardware", gpu), 2)
    seconds = operations.attention.uniform
    one_formula = []
    two_formula = []
    for chunk, cached, num_decodes, context in calls[SIZES].to_numpy(int).tolist():
        of_prompt = seconds(chunk, cached)
        of_decodes = seconds(0, 0, num_decodes, context)
        one_formula.append(1e6 * seconds(chunk, cached, num_decodes, context))
        two_formula.append(1e6 * (of_prompt + of_decodes))
    return calls.assign(
        two=prompts_alone + decodes_alone, one_formula=one_formula, two_formula=two_formula
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
    percent = 100 * (calls.one_formula / calls.measured - 1).abs()
    contexts = pd.cut(calls.kv_decode, [0, 255, 1023, 2047, 4095, 16384]).rename("context")
    means = percent.groupby([calls.n_decode, contexts], observed=True).mean()
    return means.unstack().round(1)


def draw(axes: plt.Axes, gpu: str, calls: pd.DataFrame) -> None:
    """Medians by number and context of the decodes; dashed, by formula."""
    contexts = [512, 1024, 2048, 4096]
    for context, colour in zip(contexts, plt.cm.viridis(np.linspace(0, 0.85, 4)), strict=True):
        of_context = calls[calls.kv_decode == context]
        num_decodes = of_context.n_decode
        measured = (of_context.measured / of_context.two).groupby(num_decodes).median()
        formula = (of_context.one_formula / of_context.two_formula).groupby(num_decodes).median()
        axes.plot(measured.index, measured, color=colour, label=f"{context:,} tokens each")
        # One key stands for the formula of all contexts.
        key = "by formula" if context == contexts[-1] else None
        axes.plot(formula.index, formula, "--", color=colour, label=key)
    axes.axhline(1, color="grey", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.set(title=gpu, xlabel="decodes beside a chunk")
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    sys.exit(main())

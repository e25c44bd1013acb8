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
    """Return a row for each call over a chunk and decodes, with microseconds: `measured`, `two`
    (the sum of two measured calls), and `one_formula` and `two_formula` of the same by formula.
    """
    tables = read_tables(str(folder))
    rows = tables.frames["attention"].rename(columns={TIME: "measured"})
    calls = rows.query("prefill_chunk > 0 and n_decode > 0").reset_index(drop=True)
    sizes = calls[SIZES]
    prompts_alone = _measured_at(rows, sizes.assign(n_decode=0, kv_decode=0))
    decodes_alone = _measured_at(rows, sizes.assign(prefill_chunk=0, kv_prefill=0))

    model_spec = load_option("model", model)
    hardware = load_option("hardware", gpu)
    operations = AnalyticOperations(model_spec, hardware, dtype_bytes=2)
    seconds = operations.attention.uniform
    one_formula = []
    two_formula = []
    for chunk, cached, num_decodes, context in sizes.to_numpy(int).tolist():
        of_both = seconds(chunk, cached, num_decodes, context)
        of_prompt = seconds(chunk, cached)
        of_decodes = seconds(0, 0, num_decodes, context)
        one_formula.append(1e6 * of_both)
        two_formula.append(1e6 * (of_prompt + of_decodes))
    return calls.assign(
        two=prompts_alone + decodes_alone,
        one_formula=one_formula,
        two_formula=two_formula,
    )


def _measured_at(rows: pd.DataFrame, sizes: pd.DataFrame) -> np.ndarray:
    """Return the measured times of calls of these `sizes`; NaN where there is none."""
    measured = rows.drop_duplicates(SIZES).set_index(SIZES).measured
    wanted = pd.MultiIndex.from_frame(sizes)
    return measured.reindex(wanted).to_numpy()


def describe(gpu: str, calls: pd.DataFrame) -> None:
    ratio = calls.measured / calls.two
    is_dearer = ratio > 1
    served = calls.query(SERVED).index
    long = calls.query(LONG).index
    print(f"{gpu}: {len(calls)} mixed calls; one takes more than two in {is_dearer.mean():.0%}")
    print(f"  one / two: median {ratio.median():.2f}, as served {ratio[served].median():.2f}")
    for name in ("one_formula", "two_formula", "two"):
        error = _error(calls[name], calls)
        means = [f"{error.mean():.1%}"]
        means.append(f"as served {error[served].mean():.1%}")
        means.append(f"long {error[long].mean():.1%}")
        print(f"  error of {name}: {', '.join(means)}")
    print(errors_by_decodes(calls).to_string())
    ratio_by_formula = calls.one_formula / calls.two_formula
    scaled = _error(calls.two * ratio_by_formula, calls)
    print(f"  error of two measured calls times the formula's ratio: {scaled.mean():.1%}")


def _error(predicted: pd.Series, calls: pd.DataFrame) -> pd.Series:
    """Return the absolute error of predicted times, as a share of the measured ones."""
    return (predicted / calls.measured - 1).abs()


def errors_by_decodes(calls: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute errors in percent of the formula, by decodes (rows) and their context."""
    percent = 100 * _error(calls.one_formula, calls)
    contexts = pd.cut(calls.kv_decode, [0, 255, 1023, 2047, 4095, 16384])
    by = [calls.n_decode, contexts.rename("context")]
    means = percent.groupby(by, observed=True).mean()
    return means.unstack().round(1)


def draw(axes: plt.Axes, gpu: str, calls: pd.DataFrame) -> None:
    """Medians by number and context of the decodes; dashed, by formula."""
    contexts = [512, 1024, 2048, 4096]
    colours = plt.cm.viridis(np.linspace(0, 0.85, len(contexts)))
    with_ratios = calls.assign(
        measured_ratio=calls.measured / calls.two,
        formula_ratio=calls.one_formula / calls.two_formula,
    )
    for context, colour in zip(contexts, colours, strict=True):
        of_context = with_ratios[with_ratios.kv_decode == context]
        medians = of_context.groupby("n_decode").median()
        num_decodes = medians.index
        label = f"{context:,} tokens each"
        axes.plot(num_decodes, medians.measured_ratio, color=colour, label=label)
        axes.plot(num_decodes, medians.formula_ratio, "--", color=colour)
    # One key stands for the formula of all contexts.
    axes.lines[-1].set_label("by formula")
    axes.axhline(1, color="grey", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.set(title=gpu, xlabel="decodes beside a chunk")
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    sys.exit(main())

"""Makes operation tables of LLaMA-13B on an A6000 from Figs 3 and 7 of the paper, which it uses
alone.

python tools/cost_model/profile_from_figures.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.paths import EXPERIMENTS
from sarathi_lab.executor.tables import MICROSECOND, TIME, write_tables
from sarathi_lab.model.spec import ModelSpec
from sarathi_lab.results.load import load_paper

TABLES = EXPERIMENTS / "lab" / "cost_model" / "tables" / "a6000" / "13b"
SOURCE = "Figs 3 and 7 of the SARATHI paper (arXiv 2308.16369)"
TITLE = """\
# LLaMA-13B on an NVIDIA A6000, by tools/cost_model/profile_from_figures.py. A row is over
# all layers; cache writes and the last norm are part of others.
"""
# Mean errors of rows interpolated from the others, a tenth of them at a time.
UNCERTAINTY = {"matmul": 0.10158665903693012, "attention": 0.08021853881309461}
LENGTH = 1024  # tokens of each sequence in Fig 3
LOGIT_ROWS = (1, 64, 128)  # one tile: up to there the output head is read at the bandwidth of Fig 7


def main() -> None:
    spec = load_option("model", "13b")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLES
    meta = {"source": SOURCE, "dtype": "float16", "model": spec.name, "layers": spec.num_layers}
    meta |= {"included": ["kv_write", "norms"], "uncertainty": UNCERTAINTY}
    write_tables(folder, frames_of(pd.concat([_fig_07(), _fig_03(_logits_ms(spec))])), meta, TITLE)


def frames_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Split rows by operation, tokens and context of all tokens into tables by file name."""
    tokens = rows.num_tokens
    table = rows.assign(layer=rows.operation, tokens=tokens, sequences=tokens)
    table[TIME] = rows.seconds / MICROSECOND
    prompts = table[table.operation == "prefill_attention"]
    decodes = table[table.operation == "decode_attention"]
    is_attention = table.operation.str.endswith("_attention")
    is_logits = table.operation == "logits"
    chunks = {"prefill_chunk": prompts.tokens, "kv_prefill": prompts.kv_tokens - prompts.tokens}
    contexts = {"n_decode": decodes.tokens, "kv_decode": decodes.kv_tokens // decodes.tokens}
    calls = pd.concat([prompts.assign(**chunks), decodes.assign(**contexts)])
    calls = calls[[*chunks, *contexts, TIME]].fillna(0)
    return {
        "dense": table.loc[~is_attention & ~is_logits, ["layer", "tokens", TIME]],
        "per_sequence": table.loc[is_logits, ["layer", "sequences", TIME]],
        "attention": calls.astype(dict.fromkeys([*chunks, *contexts], int)),
    }


def _fig_07() -> pd.DataFrame:
    """One prompt of n tokens: the linear operations, and what is left of the total, in two parts.

    What grows with n squared, and the constant, is attention; what grows with n is element-wise
    work.
    """
    figure = _fig_07_by_operation()
    n = figure.x
    left = figure.total - figure.preproj - figure.postproj - figure.ffn
    powers = np.stack([np.ones(len(n)), n, n * (n + 1) / 2], axis=1)
    _, per_token, _ = np.linalg.lstsq(
        powers / left.to_numpy()[:, None], np.ones(len(n)), rcond=None
    )[0]
    return pd.concat(
        [
            _rows("qkv_proj", n, 0, figure.preproj),
            _rows("out_proj", n, 0, figure.postproj),
            _rows("ffn", n, 0, figure.ffn),
            _rows("elementwise", n, 0, per_token * n),
            _rows("prefill_attention", n, n, left - per_token * n),
        ]
    )


def _fig_07_by_operation() -> pd.DataFrame:
    """Milliseconds by tokens (x), a column per operation."""
    return load_paper("fig07").pivot(index="x", columns="series", values="y").reset_index()


def _logits_ms(spec: ModelSpec) -> float:
    """Neither figure shows the output head: its weights at the bandwidth of the layers' weights at
    2 tokens.
    """
    first = _fig_07_by_operation().iloc[0]
    layers_ms = first.preproj + first.postproj + first.ffn
    return float(layers_ms * spec.lm_head.num_params / spec.num_linear_params)


def _fig_03(logits_ms: float) -> pd.DataFrame:
    """Batches of 1 to 18: the attention of decodes, and the other operations of decodes and of
    whole prompts.
    """
    figure = load_paper("fig03")
    attention = figure[(figure.panel == "decode") & (figure.series == "attn")]
    others = figure[figure.series == "others"]
    tokens = others.x * others.panel.map({"prefill": LENGTH, "decode": 1})
    rows = pd.Series(LOGIT_ROWS)
    return pd.concat(
        [
            _rows(
                "decode_attention",
                attention.x,
                attention.x * LENGTH,
                attention.x * attention.y,
            ),
            _rows("logits", rows, 0, pd.Series(logits_ms, index=rows.index)),
            _rows("others", tokens, 0, tokens * others.y - logits_ms),
        ]
    )


def _rows(
    operation: str, num_tokens: pd.Series, kv_tokens: pd.Series | int, milliseconds: pd.Series
) -> pd.DataFrame:
    rows = pd.DataFrame(
        {"num_tokens": num_tokens, "kv_tokens": kv_tokens, "seconds": milliseconds / 1e3}
    )
    return rows.assign(operation=operation).sort_values("num_tokens")


if __name__ == "__main__":
    main()

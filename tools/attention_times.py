"""Predict attention calls by the formulas of the sarathi_lab that the path finds.

    PYTHONPATH=CHECKOUT python tools/attention_times.py CALLS.csv

Adds a column `predicted` (seconds) to CALLS.csv, whose columns are `hardware` (an option of the
group), `heads`, `kv_heads`, `head_size`, and the sizes of a call: `prefill_chunk`, `kv_prefill`,
`n_decode`, `kv_decode`. It runs with commits of November 2025 on: `before_and_after.py` runs it
with one of them and with today's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from sarathi_lab.config.instantiate import load_option
from sarathi_lab.executor.simulated.kernel_times import AttentionTimes

ELEMENT_BYTES = 2  # of keys and values in 16 bits
KIND = ["hardware", "heads", "kv_heads", "head_size"]
SIZES = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]


def predict(calls: pd.DataFrame) -> pd.DataFrame:
    """Return `calls` with the seconds of each by formula."""
    tables = []
    for (name, heads, kv_heads, head_size), rows in calls.groupby(KIND, sort=False):
        hardware = load_option("hardware", str(name))
        kv_head_bytes = int(head_size) * ELEMENT_BYTES
        times = AttentionTimes(hardware, int(heads), int(kv_heads), int(head_size), kv_head_bytes)
        seconds = []
        for sizes in rows[SIZES].itertuples(index=False, name=None):
            seconds.append(times.uniform(*sizes))
        tables.append(rows.assign(predicted=seconds))
    return pd.concat(tables)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    predict(pd.read_csv(path)).to_csv(path, index=False)

"""Judge what make gpu-hour has recorded of one GPU: each target, its value, and whether it is met.

python experiments/gpu/gpu_targets/targets.py            # after make gpu-hour (README.md)
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pandas as pd
import torch

from sarathi_lab.config.csv_files import csv_files
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.executor.device import device_description, measure_peaks
from sarathi_lab.experiment.registry import sizes_of
from sarathi_lab.model.roofline import Peaks, operation_rooflines, roofline_time
from sarathi_lab.results.provenance import device_folder

MODEL = "13b"
ITEM_SIZE = 2  # bytes of an element
SIZES = sizes_of("gpu_targets")["paper"]  # of the experiment that times the iterations
CONTEXT = SIZES["context"]
BESIDE = SIZES["beside"]
COMPARE = {"<=": operator.le, ">=": operator.ge}
# Attention, by the names of the benchmarks' operations, cases and implementations.
PREFILL, DECODE, HYBRID = "prefill_attention", "decode_attention", "hybrid_attention"
ALONE = ["chunk alone", "decodes alone"]
OURS = ["series", "streams", "fused"]
PAPERS_GRID = r"^mha .* \+ (?:17 x 1024|9 x 2048|5 x 3072)$"


class NotMeasured(Exception):
    """Reason for a value that is missing."""


@dataclass(frozen=True)
class Tables:
    """Recorded tables of the device `folder` below `root`, and the kernels' benchmarks.

    Methods raise NotMeasured where a table or its rows are missing.
    """

    root: Path
    folder: str
    kernels_csv: Path
    device: torch.device

    @cached_property
    def peaks(self) -> Peaks:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return measure_peaks(self.device, dtype)

    def read(self, pattern: str) -> pd.DataFrame:
        paths = csv_files(self.root, pattern.replace("DEVICE", self.folder))
        if not paths:
            raise NotMeasured(f"there is no {pattern}")
        return pd.concat(map(pd.read_csv, paths), ignore_index=True)

    def iteration(self, prefill_tokens: int, decodes: int) -> float:
        """Return the seconds of the whole iteration of a composition."""
        table = self.read("gpu/gpu_targets/results/DEVICE/gpu_targets-compositions.csv")
        wanted = {
            "operation": "iteration",
            "prefill_tokens": prefill_tokens,
            "decodes": decodes,
            "kv_tokens": prefill_tokens + decodes * CONTEXT,
        }
        is_wanted = (table[list(wanted)] == pd.Series(wanted)).all(axis="columns")
        composition = f"{prefill_tokens} prompt tokens and {decodes} decodes"
        rows = _some(table[is_wanted], f"{composition} were not timed")
        return float(rows.value.iloc[0]) / 1e3

    def kernels(self, operation: str) -> pd.DataFrame:
        """Return the benchmarks of one operation that have a time, in seconds."""
        if not self.kernels_csv.is_file():
            raise NotMeasured(f"there is no {self.kernels_csv}")
        table = pd.read_csv(self.kernels_csv)
        rows = table[(table.operation == operation) & table.median_seconds.notna()]
        return _some(rows, f"no times of {operation} in {self.kernels_csv}")


def _some(rows: pd.DataFrame, reason: str) -> pd.DataFrame:
    if rows.empty:
        raise NotMeasured(reason)
    return rows


@dataclass(frozen=True)
class Target:
    """Ratio that should be at most (<=) or at least (>=) a bound; `overlapped` is the ratio of an
    iteration to the roofline of all its operations at once, for comparison.
    """

    name: str
    relation: str
    bound: float
    measure: Callable[[Tables], float]
    overlapped: Callable[[Tables], float] | None = None

    def row(self, tables: Tables) -> dict[str, object]:
        """Return the value and by what share it misses the bound, or the reason for none."""
        row: dict[str, object] = {"target": self.name, "wanted": f"{self.relation} {self.bound:g}"}
        try:
            value = self.measure(tables)
        except NotMeasured as reason:
            return {**row, "met": "not measured", "reason": str(reason)}
        is_met = COMPARE[self.relation](value, self.bound)
        row |= {"value": value, "met": "yes" if is_met else "no"}
        row["missed_by"] = None if is_met else abs(value / self.bound - 1)
        return {**row, "overlapped": self.overlapped(tables) if self.overlapped else None}


def _over_roofline(tables: Tables, prefill: int, decodes: int, *, overlaps: bool) -> float:
    """Return the time of an iteration over the sum of its operations' rooflines, or over that of
    all at once, by measured peaks.
    """
    seconds = tables.iteration(prefill, decodes)
    spec = load_option("model", MODEL)
    batch = make_batch(prefill_tokens=prefill, num_decodes=decodes, context=CONTEXT)
    if overlaps:
        return seconds / float(roofline_time(spec, batch, ITEM_SIZE, tables.peaks))
    rooflines = operation_rooflines(spec, batch, ITEM_SIZE, tables.peaks)
    return seconds / sum(rooflines.values())


def _idle(tables: Tables) -> float:
    """Return the median share of the time in which the device is idle, of SARATHI's loads."""
    table = tables.read("*/*/results/DEVICE/*-serving.csv")
    rows = table[(table.quantity == "idle share") & (table.policy == "sarathi")]
    return float(_some(rows, "no load was served with SARATHI").value.median())


def _over_peer(tables: Tables, peer: str) -> float:
    table = tables.read("lab/peers/results/DEVICE/peers.csv")
    rows = table[table.peer == peer]
    reasons = "; ".join(map(str, rows.error.dropna())) or "it was not run"
    ratios = _some(rows.dropna(subset="ratio"), f"{peer}: {reasons}").ratio
    return float(ratios.iloc[0])


def _least_speed(tables: Tables, operation: str, ours: str, theirs: str) -> float:
    """Return their best time over ours, least of the cases with both; names are patterns."""
    rows = tables.kernels(operation)
    speeds = (_best_times(rows, theirs) / _best_times(rows, ours)).dropna()
    if speeds.empty:
        raise NotMeasured(f"no case of {operation} has times of {ours} and {theirs}")
    return float(speeds.min())


def _best_times(rows: pd.DataFrame, implementations: str) -> pd.Series:
    """Return the shortest time of each case by the implementations of a pattern."""
    is_chosen = rows.implementation.str.contains(implementations)
    return rows[is_chosen].groupby("case").median_seconds.min()


def _share_of_overlap(tables: Tables) -> float:
    """Return the longer of the two kernels alone, the least time with perfect overlap, over the
    best of OURS: least of the cases.
    """
    rows = tables.kernels(HYBRID)
    of_grid = rows[rows["case"].str.contains(PAPERS_GRID)]
    by_case = of_grid.pivot_table("median_seconds", "case", "implementation", "min")
    complete = by_case.reindex(columns=[*ALONE, *OURS]).dropna()
    times = _some(complete, f"no case has the two kernels alone and {', '.join(OURS)}")
    perfect = times[ALONE].max(axis="columns")
    best = times[OURS].min(axis="columns")
    return float((perfect / best).min())


def _share_of_bandwidth(tables: Tables, case: str) -> float:
    """Return the least of the head counts that were timed."""
    rows = tables.kernels(DECODE)
    rows = rows[rows["case"].str.endswith(case) & (rows.implementation == "paged")]
    rows = _some(rows, f"{DECODE} has no case{case}")
    return float(rows.bytes_per_second.min()) / tables.peaks.bytes_per_second


def _of_iteration(batch: str, prefill: int, decodes: int, bound: float) -> Target:
    """Make the target of an iteration of so many prompt tokens and decodes."""
    ratio = partial(_over_roofline, prefill=prefill, decodes=decodes)
    name = f"{batch}, {MODEL}: time / sum of the operations' rooflines"
    return Target(name, "<=", bound, partial(ratio, overlaps=False), partial(ratio, overlaps=True))


def targets() -> Iterator[Target]:
    for number in SIZES["decodes"]:
        yield _of_iteration(f"decode-only, batch {number} at context {CONTEXT}", 0, number, 1.12)
    for number in SIZES["prefills"]:
        yield _of_iteration(f"prefill of {number} tokens", number, 0, 1.15)
    for number in SIZES["chunks"]:
        batch = f"hybrid of {number} tokens, {BESIDE} of them decodes"
        yield _of_iteration(batch, number - BESIDE, BESIDE, 1.15)
    yield Target("device idle between iterations, steady state", "<=", 0.02, _idle)
    name = "prefill-chunk attention: speed over torch's best SDPA, least of all cases"
    speed = partial(_least_speed, operation=PREFILL, ours="^paged$", theirs="^sdpa")
    yield Target(name, ">=", 0.95, speed)
    for decodes, case in (("32 sequences of 2K", " 32 x 2048"), ("8 of 16K", " 8 x 16384")):
        name = f"decode attention, {decodes}: share of memory bandwidth"
        yield Target(name, ">=", 0.88, partial(_share_of_bandwidth, case=case))
    for variant, launches in (("streams", "on two streams"), ("fused", "in one launch")):
        name = f"hybrid attention: speed {launches} over in series, least of all cases"
        speed = partial(_least_speed, operation=HYBRID, ours=f"^{variant}$", theirs="^series$")
        yield Target(name, ">=", 0.98, speed)
    name = "hybrid attention: time of perfect overlap / ours, least of the paper's grid"
    yield Target(name, ">=", 0.75, _share_of_overlap)
    for operation, ours in (
        (PREFILL, "^paged$"),
        (DECODE, "^paged$"),
        (HYBRID, f"^(?:{'|'.join(OURS)})$"),
    ):
        name = f"{operation.replace('_', ' ')}: speed over FlashInfer, least of all cases"
        speed = partial(_least_speed, operation=operation, ours=ours, theirs="^flashinfer")
        yield Target(name, ">=", 1.0, speed)
    for method, peer in (("generate", "generate"), ("continuous batching", "cb")):
        measure = partial(_over_peer, peer=f"transformers_{peer}")
        yield Target(f"throughput over transformers {method}", ">=", 2.0, measure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("experiments"))
    parser.add_argument("--kernels", type=Path, default=Path("outputs/kernels.csv"))
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    folder = device_folder(device.type, device_description(device))
    if options.engine == "vllm":  # as task=measure names it
        folder = f"vllm-{folder}"
    tables = Tables(options.root, folder, options.kernels, device)
    table = pd.DataFrame([target.row(tables) for target in targets()])
    path = options.root / "gpu" / "gpu_targets" / "results" / folder / "targets.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False, float_format="%.6g")
    print(table.to_string(index=False, max_colwidth=90))


if __name__ == "__main__":
    main()

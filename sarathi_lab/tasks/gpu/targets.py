"""What the engine should reach beside what was measured, judged from the recorded tables alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from sarathi_lab.config.errors import RunError, UserError
from sarathi_lab.config.instantiate import load_option
from sarathi_lab.config.run_context import RunContext
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.experiment.registry import sizes_of
from sarathi_lab.model.roofline import Peaks, operation_rooflines, roofline_time
from sarathi_lab.tasks.gpu.part import Part, Work
from sarathi_lab.tasks.gpu.parts import PER

LEAST_COPY = 1024  # MiB: copies that no cache helps
MODEL, ITEM_SIZE = "13b", 2  # bytes of an element
SIZES = sizes_of("gpu_targets")["paper"]  # the experiment that times what is judged here
CONTEXT, BESIDE = SIZES["context"], SIZES["beside"]
COMPARE: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class NotMeasured(Exception):
    """Why a value is not there."""


class Tables:
    """The tables that the other parts recorded of one device, below `root`.

    All methods raise NotMeasured for what is not there; `missing` then names the tables.
    """

    def __init__(self, root: Path, device: str) -> None:
        self._root, self._device = root, device
        self.missing: set[str] = set()

    def read(self, home: str, name: str) -> pd.DataFrame:
        path = self._root / home / "results" / self._device / f"{name}.csv"
        if not path.is_file():
            self.missing.add(f"{name}.csv")
            raise NotMeasured(f"there is no {home}/{name}.csv: its part did not run or failed")
        return pd.read_csv(path)

    def peak(self, quantity: str) -> float:
        """FLOP/s of the best product, or bytes/s of the best large copy."""
        table = self.read("gpu/peaks", "peaks")
        rows = _some(table[table.quantity == quantity], f"no {quantity} in peaks.csv")
        if quantity == "copy":
            mib = rows["case"].str.removesuffix(" MiB").astype(int)
            rows = rows[mib >= min(LEAST_COPY, mib.max())]
        return float(rows.value.max()) * PER[str(rows.unit.iloc[0])]

    def iteration(self, prefill_tokens: int, decodes: int) -> float:
        """Seconds of the whole iteration of a composition."""
        table = self.read("gpu/gpu_targets", "gpu_targets-compositions")
        wanted = {
            "operation": "iteration",
            "prefill_tokens": prefill_tokens,
            "decodes": decodes,
            "kv_tokens": prefill_tokens + decodes * CONTEXT,
        }
        rows = table[(table[list(wanted)] == pd.Series(wanted)).all(axis="columns")]
        what = f"{prefill_tokens} prompt tokens and {decodes} decodes"
        return float(_some(rows, f"{what} were not timed").value.iloc[0]) / 1e3

    def peaks(self) -> Peaks:
        """Of the best product and the best large copy."""
        return Peaks(self.peak("matmul"), self.peak("copy"), "measured")

    def serving(self) -> pd.DataFrame:
        """Every load that was served on the engine."""
        paths = sorted(self._root.glob(f"*/*/results/{self._device}/*-serving.csv"))
        if not paths:
            self.missing.add("*-serving.csv")
            raise NotMeasured("there is no */*-serving.csv: no figure was served")
        return pd.concat(map(pd.read_csv, paths), ignore_index=True)

    def kernels(self, operation: str) -> pd.DataFrame:
        """Benchmarks of one operation that have a time."""
        table = self.read("gpu/kernels", "kernels")
        rows = table[(table.operation == operation) & table.value.notna()]
        return _some(rows, f"no times of {operation} in kernels.csv")


def _some(rows: pd.DataFrame, why: str) -> pd.DataFrame:
    if rows.empty:
        raise NotMeasured(why)
    return rows


@dataclass(frozen=True)
class Target:
    """A ratio that is wanted to be at most (<=) or at least (>=) a bound; of an iteration, the
    ratio to the `overlapped` roofline is shown beside it.
    """

    name: str
    relation: str
    bound: float
    measure: Callable[[Tables], float]
    overlapped: Callable[[Tables], float] | None = None

    def row(self, tables: Tables) -> dict[str, object]:
        """Wanted, measured, and by what share it is missed; or why it was not measured."""
        wanted = f"{self.relation} {self.bound:g}"
        row: dict[str, object] = {"target": self.name, "wanted": wanted, "unit": "ratio"}
        try:
            value = self.measure(tables)
        except NotMeasured as reason:
            found = {"value": None, "met": "not measured", "missed_by": None, "reason": str(reason)}
            return row | found
        is_met = COMPARE[self.relation](value, self.bound)
        missed = None if is_met else abs(value / self.bound - 1)
        met = "yes" if is_met else "no"
        overlapped = self.overlapped(tables) if self.overlapped else None
        judged = {"value": value, "met": met, "missed_by": missed, "reason": ""}
        return row | judged | {"overlapped": overlapped}


@dataclass(frozen=True)
class Targets(Part):
    """Leaves targets.csv; RunError without a part's table, so that a resumed campaign retries."""

    home = "gpu/gpu_targets"

    def check(self, cfg: DictConfig) -> None:
        if self.record is None:
            raise UserError(
                "task.record=null: task=targets judges what is recorded; name the folder, such "
                "as task.record=experiments"
            )
        super().check(cfg)

    def measure(self, cfg: DictConfig, context: RunContext, work: Work) -> None:
        assert self.record is not None
        assert work.folder is not None
        tables = Tables(Path(self.record), work.folder.name)
        rows = [target.row(tables) for target in TARGETS]
        work.keep("targets", rows)
        if work.is_dry:
            work.log("a dry run on a CPU: judged to see that it works, the values mean nothing")
        for row in rows:
            value = row["value"]
            found = f"{value:.3g} {row['unit']}" if isinstance(value, float) else row["reason"]
            work.log(f"{row['target']}: wanted {row['wanted']}, {found}: {row['met']}")
        if tables.missing:
            raise RunError(
                f"judged without {', '.join(sorted(tables.missing))}: run their parts, then "
                "task=targets again"
            )


# -- what is judged -------------------------------------------------------------------------------


def _over_roofline(tables: Tables, prefill: int, decodes: int, *, overlaps: bool) -> float:
    """The time of an iteration over the sum of its operations' rooflines, each alone on the device
    (or over that of all at once), by the measured peaks.
    """
    seconds, spec = tables.iteration(prefill, decodes), load_option("model", MODEL)
    batch = make_batch(prefill_tokens=prefill, num_decodes=decodes, context=CONTEXT)
    whole, peaks = (spec, batch, ITEM_SIZE), tables.peaks()
    if overlaps:
        return seconds / float(roofline_time(*whole, peaks))
    return seconds / sum(operation_rooflines(*whole, peaks).values())


def _idle(tables: Tables) -> float:
    """The median over SARATHI's loads."""
    table = tables.serving()
    rows = table[(table.quantity == "idle share") & (table.policy == "sarathi")]
    return float(_some(rows, "no load was served under SARATHI").value.median())


def _over_peer(tables: Tables, peer: str) -> float:
    table = tables.read("lab/peers", "peers")
    rows = table[table.peer == peer]
    reasons = "; ".join(map(str, rows.error.dropna())) or "it was not run"
    return float(_some(rows.dropna(subset="ratio"), f"{peer}: {reasons}").ratio.iloc[0])


# Attention, by the names that the benchmarks give to operations, cases and implementations.
PREFILL, DECODE, HYBRID = "prefill_attention", "decode_attention", "hybrid_attention"
OURS, SERIES, FUSED, FLASHINFER = "^paged$", "^series$", "^fused$", "^flashinfer"
SDPA = "^sdpa"  # any of its backends
ALONE = ("chunk alone", "decodes alone")
PAPERS_GRID = r"^mha .* \+ (?:17 x 1024|9 x 2048|5 x 3072)$"


def _least_speed(tables: Tables, operation: str, ours: str, theirs: str) -> float:
    """Their best time over ours, least of the cases that have both; names are patterns."""
    rows = tables.kernels(operation)
    best = {}
    for who in (ours, theirs):
        best[who] = rows[rows.implementation.str.contains(who)].groupby("case").value.min()
    speeds = (best[theirs] / best[ours]).dropna()
    if speeds.empty:
        missing = [f": none of {who}" for who in best if best[who].empty]
        raise NotMeasured(f"no case of {operation} has times of both{''.join(missing[:1])}")
    return float(speeds.min())


def _share_of_overlap(tables: Tables) -> float:
    """The longer of the two kernels alone, which nothing can be faster than that overlaps them,
    over the fused one: least of the cases that have all three.
    """
    rows = tables.kernels(HYBRID)
    rows = rows[rows["case"].str.contains(PAPERS_GRID)]
    times = rows.pivot_table(index="case", columns="implementation", values="value", aggfunc="min")
    names = (*ALONE, "fused")
    absent = [name for name in names if name not in times]
    why = f"no case has {', '.join(absent) or 'all'}"
    times = _some(times.reindex(columns=names).dropna(), why)
    return float((times[list(ALONE)].max(axis="columns") / times.fused).min())


def _share_of_bandwidth(tables: Tables, case: str) -> float:
    """The least of the head counts that were timed."""
    rows = tables.kernels(DECODE)
    rows = rows[rows["case"].str.endswith(case) & rows.implementation.str.contains(OURS)]
    rows = _some(rows, f"{DECODE} has no case{case}")
    return float(rows.bytes_per_second.min()) / tables.peak("copy")


def _targets() -> Iterator[Target]:
    iterations = [
        *((f"decode-only, batch {n} at context {CONTEXT}", 0, n, 1.12) for n in SIZES["decodes"]),
        *((f"prefill of {n} tokens", n, 0, 1.15) for n in SIZES["prefills"]),
        *(
            (f"hybrid of {n} tokens, {BESIDE} of them decodes", n - BESIDE, BESIDE, 1.15)
            for n in SIZES["chunks"]
        ),
    ]
    for words, prefill, decodes, bound in iterations:
        over = partial(_over_roofline, prefill=prefill, decodes=decodes)
        name = f"{words}, {MODEL}: time / sum of the operations' rooflines"
        yield Target(name, "<=", bound, partial(over, overlaps=False), partial(over, overlaps=True))
    yield Target("device idle between iterations, steady state", "<=", 0.02, _idle)
    name = "prefill-chunk attention: speed over torch's best SDPA, least of all cases"
    speed = partial(_least_speed, operation=PREFILL, ours=OURS, theirs=SDPA)
    yield Target(name, ">=", 0.95, speed)
    for words, case in (("32 sequences of 2K", " 32 x 2048"), ("8 of 16K", " 8 x 16384")):
        name = f"decode attention, {words}: share of copy bandwidth"
        yield Target(name, ">=", 0.88, partial(_share_of_bandwidth, case=case))
    name = "hybrid attention: speed over the two kernels in series, least of"
    speed = partial(_least_speed, operation=HYBRID, ours=FUSED, theirs=SERIES)
    yield Target(f"{name} all cases", ">=", 0.98, speed)
    name = "hybrid attention: time of perfect overlap / fused, least of the paper's grid"
    yield Target(name, ">=", 0.75, _share_of_overlap)
    for operation, ours in ((PREFILL, OURS), (DECODE, OURS), (HYBRID, FUSED)):
        name = f"{operation.replace('_', ' ')}: speed over FlashInfer, least of all cases"
        speed = partial(_least_speed, operation=operation, ours=ours, theirs=FLASHINFER)
        yield Target(name, ">=", 1.0, speed)
    for words, peer in (("generate", "generate"), ("continuous batching", "cb")):
        measure = partial(_over_peer, peer=f"transformers_{peer}")
        yield Target(f"throughput over transformers {words}", ">=", 2.0, measure)


TARGETS: Sequence[Target] = tuple(_targets())

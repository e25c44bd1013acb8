"""Tables of measured operation times: the folder of CSV files that cost models interpolate.

Every file has a column `time_us` (microseconds on one device) and columns that identify the
operation:

| file | columns | a row is |
| --- | --- | --- |
| `dense.csv` | layer, tokens | one call of a layer's operation over so many tokens (`LAYERS`) |
| `per_sequence.csv` | layer, sequences | an operation over the sequences that emit a token |
| `attention.csv` | prefill_chunk, kv_prefill, n_decode, kv_decode | one call: a chunk of so many \
tokens behind `kv_prefill` cached ones, and `n_decode` decodes of `kv_decode` tokens each |
| `products.csv` | dtype, tokens, in_features, out_features | a matrix product |
| `iterations.csv` | as attention.csv | one whole iteration, all layers and the rest |
| `communication.csv` | operation, devices, bytes | a collective over `bytes` on each device |
| `moe.csv` | tokens, activated_experts | a layer's experts |

`attention.csv` may add num_heads, num_kv_heads and head_size, and, as `iterations.csv`,
num_prefills (equal chunks in one call, default 1); `moe.csv` hidden_size, expert_size (on one
device), num_experts and top_k, for gated experts. Tables with such columns apply to any model:
interpolated between shapes, or taken from the nearest. Other tables apply to the model and the
tensor-parallel degree of the measurement: `meta.yaml`, in the folder or its parent, names the
model, and a folder `tpN` the degree. `meta.yaml` also states the source, the element type
(`dtype`), the number of layers that a row of dense.csv and attention.csv sums over (`layers`,
default 1), operations of the cost model that other rows contain (`included`), and mean relative
errors of held-out rows (`uncertainty`, by kind).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import yaml

from sarathi_lab.config.csv_files import csv_file, csv_name, write_csv
from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import REPOSITORY, readable, stated_beside
from sarathi_lab.engine.compositions import make_batch
from sarathi_lab.engine.request import Batch
from sarathi_lab.model.spec import ModelSpec

TIME = "time_us"
MICROSECOND = 1e-6
META = "meta.yaml"
SHAPE = ("num_heads", "num_kv_heads", "head_size")
EXPERT_SHAPE = ("hidden_size", "expert_size", "num_experts", "top_k")
ATTENTION = ("prefill_attention", "decode_attention")
DTYPE_SIZES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "fp8": 1}
# Bounds of a file's median in microseconds: no kernel ends within 0.2 µs, none takes a minute.
PLAUSIBLE_MEDIAN = (0.2, 6e7)
FIRST_LINE = 2  # of rows: the header is line 1
CORRECTION = "correct it, or drop the line"


Per = Literal["layer", "iteration", "emit"]


class Layer(NamedTuple):
    """Meaning of a table's `layer` for the cost model."""

    operation: str
    calls: int = 1  # per layer or iteration
    per: Per = "layer"  # or once: per "iteration" over all tokens, per "emit" over emitting rows
    replaces: Sequence[str] = ()  # further operations whose time it includes


class File(NamedTuple):
    """Columns of a file: names, and whole numbers with minima; `optional` ones may be missing."""

    counts: Mapping[str, int]
    names: Sequence[str] = ()
    optional: Mapping[str, int] = {}
    of_model: str | None = None  # the column without which rows are of the measured model alone

    def counts_of(self, table: pd.DataFrame) -> dict[str, int]:
        """Count columns of `table` with their minima."""
        present = {name: minimum for name, minimum in self.optional.items() if name in table}
        return {**self.counts, **present}


FACTS = stated_beside(__file__, "tables.yaml")
LAYERS = {name: Layer(**layer) for name, layer in FACTS["layers"].items()}
FILES = {name: File(**file) for name, file in FACTS["files"].items()}


@dataclass(frozen=True)
class OperationTables:
    """Checked tables of a folder by file name (`FILES`), and the content of its `meta.yaml`."""

    source: str
    frames: Mapping[str, pd.DataFrame]
    meta: Mapping[str, Any] = field(default_factory=dict)  # free text and numbers of who measured
    tensor: int = 1  # tensor-parallel degree of tables without shapes

    @property
    def num_layers(self) -> int:
        """Layers that a row of dense.csv or attention.csv sums over."""
        return int(self.meta.get("layers", 1))

    @property
    def dtype_bytes(self) -> int | None:
        """Element size of the measurement in bytes; None if not stated."""
        variant = self.meta.get("variant", "")
        name = str(self.meta.get("dtype", variant))
        return DTYPE_SIZES.get(name)

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether `meta.yaml` names this model, or a fine-tuned variant of it."""
        measured = str(self.meta.get("model", ""))
        return _plain(measured).startswith(_plain(spec.name))

    @property
    def origin(self) -> str:
        """Who measured the kernels of a value that is composed of them, with what and when."""
        meta = self.meta
        version = meta.get("vllm_version", "of an unstated version")
        engine = meta.get("engine", f"vLLM {version}")
        moment = str(meta.get("profiled_at", "date not stated"))
        date, _, _ = moment.partition("T")
        measured_by = meta.get("source", self.source)
        device = meta.get("device", meta.get("gpu", "an unstated device"))
        return f"composed of kernels measured by {measured_by} ({engine}, {date}) on {device}"

    @property
    def included(self) -> tuple[str, ...]:
        """Operations of the cost model that other rows contain; vLLM's attention writes the KV
        cache.
        """
        included = tuple(self.meta.get("included", ()))
        if "vllm_version" in self.meta:
            return ("kv_write", *included)
        return included

    @cached_property
    def layers(self) -> Mapping[str, tuple[Layer, pd.DataFrame]]:
        """Rows of each named layer, with columns `size` (tokens or sequences) and `seconds`."""
        sizes = {"dense": "tokens", "per_sequence": "sequences"}
        layers = {}
        for file, size in sizes.items():
            if file not in self.frames:
                continue
            frame = self.frames[file].rename(columns={size: "size"})
            for key, rows in frame.groupby("layer", sort=False):
                name = str(key)
                layer = LAYERS[name]
                num_layers = self.num_layers if layer.per == "layer" else 1
                seconds = layer.calls * rows[TIME] * MICROSECOND / num_layers
                by_size = rows.assign(seconds=seconds).sort_values("size")
                layers[name] = (layer, by_size[["size", "seconds"]])
        return layers

    @property
    def is_model_specific(self) -> bool:
        """Whether a table has no shapes and so applies only to the measured model."""
        for name, frame in self.frames.items():
            column = FILES[name].of_model
            if column is not None and column not in frame:
                return True
        return False


def _plain(model: str) -> str:
    """Strip organisation, case and punctuation from a model's name."""
    _, _, name = model.rpartition("/")
    return re.sub(r"[^a-z0-9]", "", name.lower())


def rows_of_heads(rows: pd.DataFrame, heads: Sequence[int]) -> pd.DataFrame:
    """Return the rows of attention.csv that are of a device's `heads` (`SHAPE`); all rows where
    they state none.
    """
    if SHAPE[0] not in rows:
        return rows
    has_heads = rows[list(SHAPE)] == list(heads)
    return rows[has_heads.all(axis="columns")]


def batches_of(rows: pd.DataFrame) -> list[Batch]:
    """Make the batches of the rows of attention.csv or iterations.csv."""
    batches = []
    for sizes in rows.to_dict("records"):
        batch = make_batch(
            prefill_tokens=sizes["prefill_chunk"],
            start=sizes["kv_prefill"],
            num_prefills=sizes.get("num_prefills", 1),
            num_decodes=sizes["n_decode"],
            context=sizes["kv_decode"],
        )
        batches.append(batch)
    return batches


def write_tables(
    folder: Path,
    frames: Mapping[str, pd.DataFrame],
    meta: Mapping[str, object],
    title: str = "",
) -> None:
    """Write the tables to `folder` with six significant digits, and `meta` under `title`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        write_csv(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g"))
    text = yaml.safe_dump(dict(meta), sort_keys=False)
    path = folder / META
    path.write_text(title + text)


def read_tables(folder: str, *, model: str = "", tensor: int = 1) -> OperationTables:
    """Read the tables of a folder.

    Args:
        folder: Relative to the current folder or the repository, or absolute.
        model: A subfolder of this name takes precedence.
        tensor: Tensor-parallel degree; a subfolder `tpN` takes precedence.

    Returns:
        The tables, all of one folder.

    Raises:
        UserError: There is no such folder, it has no tables, or a file can't be interpolated.
    """
    root = _folder_of(folder)
    if root is None:
        raise UserError(
            f"hardware.tables={folder} is not a folder; use the path of one with operation tables, "
            "relative to the current folder or the repository, or absolute"
        )
    chosen = _folder_of_model(root, model, tensor)
    if chosen is None:
        models = _models_in(root)
        available = ""
        if models:
            available = f" (available: {', '.join(models)})"
        raise UserError(
            f"hardware.tables={folder} has no tables of model {model}{available}; measure it on "
            "the device with task=calibrate, or use executor.cost_model=analytic"
        )
    frames = {csv_name(path): _read(path) for path in _files(chosen)}
    stated_tensor = 1
    degree = re.fullmatch(r"tp(\d+)", chosen.name)
    if degree is not None:
        stated_tensor = int(degree[1])
    return OperationTables(str(chosen), frames, _read_meta(chosen), stated_tensor)


def _models_in(root: Path) -> list[str]:
    """List the models that have tables of their own."""
    models = []
    for path in sorted(root.iterdir()):
        if path.is_dir() and _files(path):
            models.append(path.name)
    return models


def _folder_of_model(root: Path, model: str, tensor: int) -> Path | None:
    """Return the first folder with tables: of the model at this degree, of it, or of any."""
    folders = [root / f"tp{tensor}", root]
    if model:
        folders = [root / model / f"tp{tensor}", root / model, *folders]
    for folder in folders:
        if _files(folder):
            return folder
    return None


def _folder_of(tables: str) -> Path | None:
    """Return the folder that `tables` names; None without one."""
    path = Path(tables).expanduser()
    for folder in (path, REPOSITORY / path):
        if folder.is_dir():
            return folder
    return None


def newest_change(folder: str | None) -> int:
    """Return when a file below a folder of tables, as `read_tables` names it, was last changed
    [ns]; 0 without one.
    """
    root = None if folder is None else _folder_of(folder)
    if root is None:
        return 0
    return max(path.stat().st_mtime_ns for path in root.rglob("*"))


def _files(folder: Path) -> list[Path]:
    paths = [csv_file(folder / f"{name}.csv") for name in FILES]
    return [path for path in paths if path.is_file()]


def _read_meta(folder: Path) -> Mapping[str, object]:
    """Read `meta.yaml` in the folder or its parent; empty without one."""
    files = [path for path in (folder / META, folder.parent / META) if path.is_file()]
    if not files:
        return {}
    path, *_ = files
    with readable(path, "correct it", yaml.YAMLError):
        meta = yaml.safe_load(path.read_text())
    if not isinstance(meta, Mapping):
        raise UserError(f"{path} is not a mapping; write such as model: 13b")
    return meta


def _read(path: Path) -> pd.DataFrame:
    """Read the columns of a file. Raises UserError with the line, the problem and the fix."""
    with readable(path, "write comma-separated columns"):
        try:
            table = pd.read_csv(path, float_precision="round_trip")
        except pd.errors.EmptyDataError:
            raise UserError(f"{path} is empty; measure it again, or delete it") from None
    file = FILES[csv_name(path)]
    _require_rows(path, table, file)
    counts = file.counts_of(table)
    numbers = table[[*counts, TIME]].apply(pd.to_numeric, errors="coerce")
    for column, minimum in counts.items():
        values = numbers[column]
        is_whole = values % 1 == 0
        is_count = (values >= minimum) & is_whole  # neither for NaN
        problem = f"not a whole number from {minimum}; {CORRECTION}"
        _refuse(path, table[column], ~is_count, problem)
    _require_times(path, numbers[TIME])
    if "layer" in table:
        is_unknown = ~table.layer.isin(list(LAYERS))
        _refuse(path, table.layer, is_unknown, f"unknown; use one of {', '.join(LAYERS)}")
    _require_distinct(path, table[[*file.names, *counts]])
    return table[[*file.names]].join(numbers)


def _require_rows(path: Path, table: pd.DataFrame, file: File) -> None:
    needed = (*file.names, *file.counts, TIME)
    missing = [name for name in needed if name not in table]
    if missing:
        raise UserError(f"{path} has no column {missing[0]} of {', '.join(needed)}; add it")
    if table.empty:
        raise UserError(f"{path} has no rows; measure some, or delete it")


def _require_times(path: Path, times: pd.Series) -> None:
    is_time = (times > 0) & (times < math.inf)
    _refuse(path, times, ~is_time, f"not a time above 0; {CORRECTION}")
    median = float(times.median())
    shortest, longest = PLAUSIBLE_MEDIAN
    if not shortest <= median <= longest:
        raise UserError(
            f"{path}: the median of {TIME} is {median:g}, which is not plausible in microseconds; "
            "convert it from its unit"
        )


def _require_distinct(path: Path, sizes: pd.DataFrame) -> None:
    is_repeated = sizes.duplicated()
    if is_repeated.any():
        row = sizes[is_repeated].iloc[0]
        values = [f"{name}={value}" for name, value in row.items()]
        line = _line_of(is_repeated)
        raise UserError(f"{path} line {line} repeats {', '.join(values)}; keep one")


def _refuse(
    path: Path,
    column: pd.Series,
    is_bad: pd.Series,
    problem: str,
) -> None:
    """Raise UserError for the first bad value of a column."""
    if is_bad.any():
        value = column[is_bad].iloc[0]
        raise UserError(f"{path} line {_line_of(is_bad)}: {column.name}={value} is {problem}")


def _line_of(rows: pd.Series) -> int:
    """Return the line of the first true row."""
    return int(rows.to_numpy().argmax()) + FIRST_LINE

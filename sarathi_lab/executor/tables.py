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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import yaml

from sarathi_lab.config.errors import UserError
from sarathi_lab.config.paths import REPOSITORY, readable
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


Per = Literal["layer", "iteration", "emit"]


class Layer(NamedTuple):
    """Meaning of a table's `layer` for the cost model."""

    operation: str
    calls: int = 1  # per layer or iteration
    per: Per = "layer"  # or once: per "iteration" over all tokens, per "emit" over emitting rows
    replaces: tuple[str, ...] = ()  # further operations whose time it includes


LAYERS: Mapping[str, Layer] = {
    # The lab's names.
    **{name: Layer(name) for name in ("qkv_proj", "out_proj", "ffn_up", "ffn_down", "activation")},
    "layernorm": Layer("norms", calls=2),
    "qk_norm": Layer("qk_norm"),
    "rotary_emb": Layer("rotary"),
    "embedding": Layer("embedding", per="iteration"),
    "final_layernorm": Layer("final_norm", per="iteration"),
    "lm_head": Layer("lm_head", per="emit"),
    "sampling": Layer("sampling", per="emit"),
    # vLLM's, where they are others.
    "o_proj": Layer("out_proj"),
    "gate_up_proj": Layer("ffn_up"),
    "down_proj": Layer("ffn_down"),
    "act_fn": Layer("activation"),
    "sampler": Layer("sampling", per="emit"),
    # The paper's Fig 3 has a whole FFN, norms with residuals, and the remainder of an iteration.
    "ffn": Layer("ffn", replaces=("ffn_up", "ffn_down", "activation")),
    "elementwise": Layer("elementwise", replaces=("norms",)),
    "logits": Layer("logits", per="emit", replaces=("lm_head", "sampling")),
    "others": Layer("others", per="iteration"),
}


class File(NamedTuple):
    """Columns of a file: names, and whole numbers with minima; `optional` ones may be missing."""

    names: tuple[str, ...]
    counts: Mapping[str, int]
    optional: Mapping[str, int] = {}

    def counts_of(self, table: pd.DataFrame) -> dict[str, int]:
        """Count columns of `table` with their minima."""
        return {
            **self.counts,
            **{name: self.optional[name] for name in self.optional if name in table},
        }


COMPOSITION = dict.fromkeys(("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), 0)
FILES: Mapping[str, File] = {
    "dense": File(("layer",), {"tokens": 1}),
    "per_sequence": File(("layer",), {"sequences": 1}),
    "attention": File((), COMPOSITION, {**dict.fromkeys(SHAPE, 1), "num_prefills": 0}),
    "iterations": File((), COMPOSITION, {"num_prefills": 0}),
    "products": File(("dtype",), dict.fromkeys(("tokens", "in_features", "out_features"), 1)),
    "communication": File(("operation",), {"devices": 2, "bytes": 1}),
    "moe": File((), {"tokens": 1, "activated_experts": 1}, dict.fromkeys(EXPERT_SHAPE, 1)),
}
# Columns without which a file holds for the measured model alone; None: it always does.
SHAPED = dict.fromkeys(("dense", "per_sequence", "iterations")) | {
    "attention": SHAPE[0],
    "moe": EXPERT_SHAPE[0],
}


@dataclass(frozen=True)
class OperationTables:
    """Checked tables of a folder by file name (`FILES`), and the content of its `meta.yaml`."""

    source: str
    frames: Mapping[str, pd.DataFrame]
    meta: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1  # tensor-parallel degree of tables without shapes

    @property
    def num_layers(self) -> int:
        """Layers that a row of dense.csv or attention.csv sums over."""
        return int(self.meta.get("layers", 1))

    @property
    def dtype_bytes(self) -> int | None:
        """Element size of the measurement in bytes; None if not stated."""
        name = str(self.meta.get("dtype", self.meta.get("variant", "")))
        return DTYPE_SIZES.get(name)

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether `meta.yaml` names this model, or a fine-tuned variant of it."""
        return _plain(str(self.meta.get("model", ""))).startswith(_plain(spec.name))

    @property
    def origin(self) -> str:
        """Who measured the kernels of a value that is composed of them, with what and when."""
        meta = self.meta
        engine = meta.get("engine", f"vLLM {meta.get('vllm_version', 'of an unstated version')}")
        date = str(meta.get("profiled_at", "date not stated")).partition("T")[0]
        measured_by = meta.get("source", self.source)
        device = meta.get("device", meta.get("gpu", "an unstated device"))
        return f"composed of kernels measured by {measured_by} ({engine}, {date}) on {device}"

    @property
    def included(self) -> tuple[str, ...]:
        """Operations of the cost model that other rows contain; vLLM's attention writes the KV
        cache.
        """
        vllm = ("kv_write",) if "vllm_version" in self.meta else ()
        return vllm + tuple(self.meta.get("included", ()))

    @cached_property
    def layers(self) -> Mapping[str, tuple[Layer, pd.DataFrame]]:
        """Rows of each named layer, with columns `size` (tokens or sequences) and `seconds`."""
        layers = {}
        for file, size in (("dense", "tokens"), ("per_sequence", "sequences")):
            if (frame := self.frames.get(file)) is None:
                continue
            for name, rows in frame.rename(columns={size: "size"}).groupby("layer", sort=False):
                layer = LAYERS[str(name)]
                divided = self.num_layers if layer.per == "layer" else 1
                seconds = layer.calls * rows[TIME] * MICROSECOND / divided
                rows = rows.assign(seconds=seconds).sort_values("size")
                layers[str(name)] = layer, rows[["size", "seconds"]]
        return layers

    @property
    def is_model_specific(self) -> bool:
        """Whether a table has no shapes and so applies only to the measured model."""
        frames = self.frames.items()
        return any(name in SHAPED and SHAPED[name] not in frame for name, frame in frames)


def _plain(model: str) -> str:
    """Strip organisation, case and punctuation from a model's name."""
    return re.sub(r"[^a-z0-9]", "", model.rsplit("/", 1)[-1].lower())


def frames_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Split measured rows into tables by file name.

    `rows` has the columns operation (of `LAYERS` or `ATTENTION`), num_tokens (new tokens, or
    decodes), kv_tokens (total that attention reads, else 0) and seconds.
    """
    tokens, is_attention = rows.num_tokens, rows.operation.isin(ATTENTION)
    is_decode = rows.operation == "decode_attention"
    per_emit = rows.operation.isin([name for name in LAYERS if LAYERS[name].per == "emit"])
    rows = rows.assign(
        layer=rows.operation,
        tokens=tokens,
        sequences=tokens,
        prefill_chunk=tokens.where(~is_decode, 0),
        kv_prefill=(rows.kv_tokens - tokens).where(~is_decode, 0),
        n_decode=tokens.where(is_decode, 0),
        kv_decode=(rows.kv_tokens // tokens).where(is_decode, 0),
        **{TIME: rows.seconds / MICROSECOND},
    )
    places = {
        "dense": ~(is_attention | per_emit),
        "per_sequence": per_emit,
        "attention": is_attention,
    }
    frames = {}
    for name, place in places.items():
        columns = [*FILES[name].names, *FILES[name].counts, TIME]
        frames[name] = rows.loc[place, columns].reset_index(drop=True)
    return frames


def write_tables(
    folder: Path, frames: Mapping[str, pd.DataFrame], meta: Mapping[str, Any], title: str = ""
) -> None:
    """Write the tables to `folder` with six significant digits, and `meta` under `title`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    (folder / META).write_text(title + yaml.safe_dump(dict(meta), sort_keys=False))


def read_tables(folder: str, *, model: str = "", tensor: int = 1) -> OperationTables:
    """Read the tables in `folder` (relative to the current folder or the repository, or absolute).

    Subfolders named after `model` and `tpN` take precedence. Raises UserError for a folder without
    tables, and for a file that can't be interpolated.
    """
    root = _folder_of(folder)
    if root is None:
        raise UserError(
            f"hardware.tables={folder} is not a folder; use the path of one with operation tables, "
            "relative to the current folder or the repository, or absolute"
        )
    tops = [root / model, root] if model else [root]
    places = [place for top in tops for place in (top / f"tp{tensor}", top)]
    chosen = next((place for place in places if _files(place)), None)
    if chosen is None:
        others = sorted(place.name for place in root.iterdir() if place.is_dir() and _files(place))
        found = f" (available: {', '.join(others)})" if others else ""
        raise UserError(
            f"hardware.tables={folder} has no tables of model {model}{found}; measure it on the "
            "device with task=calibrate, or use executor.cost_model=analytic"
        )
    frames = {path.stem: _read(path) for path in _files(chosen)}
    degree = re.fullmatch(r"tp(\d+)", chosen.name)
    return OperationTables(str(chosen), frames, _read_meta(chosen), int(degree[1]) if degree else 1)


def _folder_of(tables: str) -> Path | None:
    """Return the folder that `tables` names; None without one."""
    given = Path(tables).expanduser()
    return next((folder for folder in (given, REPOSITORY / given) if folder.is_dir()), None)


def tables_stamp(folder: str | None) -> tuple[tuple[str, int, int], ...]:
    """Return the files below a folder of tables, as `read_tables` names it, with the time of their
    last change [ns] and their size [bytes]: equal as long as the tables are the same.
    """
    root = _folder_of(folder) if folder is not None else None
    if root is None:
        return ()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    states = [(path, path.stat()) for path in files]
    return tuple((str(path.absolute()), state.st_mtime_ns, state.st_size) for path, state in states)


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / f"{name}.csv").is_file()]


def _read_meta(folder: Path) -> Mapping[str, Any]:
    """Read `meta.yaml` in the folder or its parent; empty without one."""
    paths = (folder / META, folder.parent / META)
    if (path := next(filter(Path.is_file, paths), None)) is None:
        return {}
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
    file = FILES[path.stem]
    if (problem := next(_problems(table, file), None)) is not None:
        raise UserError(f"{path}{problem}")
    numeric = [*file.counts_of(table), TIME]
    return table[[*file.names, *numeric]].assign(**table[numeric].apply(pd.to_numeric))


def _problems(table: pd.DataFrame, file: File) -> Iterator[str]:
    needed = (*file.names, *file.counts, TIME)
    if missing := [name for name in needed if name not in table]:
        yield f" has no column {missing[0]} of {', '.join(needed)}; add it"
    if table.empty:
        yield " has no rows; measure some, or delete it"
    counts = file.counts_of(table)
    for column in (*counts, TIME):
        values = pd.to_numeric(table[column], errors="coerce")
        bad, problem = ~((values > 0) & (values < math.inf)), "not a time above 0"
        if column != TIME:
            bad = ~(values >= counts[column]) | (values % 1 != 0)
            problem = f"not a whole number from {counts[column]}"
        if bad.any():
            line = int(bad.to_numpy().argmax())
            value = f"{column}={table[column].iloc[line]}"
            yield f" line {line + 2}: {value} is {problem}; correct it, or drop the line"
    if "layer" in table and not (unknown := table[~table.layer.isin(list(LAYERS))]).empty:
        where = f"line {unknown.index[0] + 2}: layer={unknown.layer.iloc[0]}"
        yield f" {where} is unknown; use one of {', '.join(LAYERS)}"
    keys = [*file.names, *counts]
    if (again := table.duplicated(keys)).any():
        line = int(again.to_numpy().argmax())
        same = ", ".join(f"{key}={table[key].iloc[line]}" for key in keys)
        yield f" line {line + 2} repeats {same}; keep one"
    median, (low, high) = float(table[TIME].astype(float).median()), PLAUSIBLE_MEDIAN
    if not low <= median <= high:
        yield f": half of {TIME} is {'below' if median < low else 'above'} {median:g}, which is \
not plausible in microseconds; convert it from its unit"

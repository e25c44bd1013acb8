"""The compiled C++ and its calls, on torch's tensors of a CPU.

What is handed over is checked, here what tensors are, in `checks.py` whether sizes match, and in
`checks.h` the numbers in tensors: the C++ itself checks no address that it reads or writes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sarathi_kernels.attention.reference import Segment
from sarathi_kernels.cpu.build import NotBuilt, build
from sarathi_kernels.cpu.checks import check_heads, check_model
from sarathi_kernels.cpu.packing import DTYPES, PackedLinear
from sarathi_kernels.cpu.structures import (
    OPERATIONS,
    BatchStruct,
    LinearStruct,
    ModelStruct,
    NormStruct,
    SegmentStruct,
)

KV_TYPES = DTYPES  # numbered as in `structures.h`
FAULT = c_char_p  # what is wrong with the arguments, null for nothing

SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sarathi_start": (c_int32, (c_int32, c_int32)),
    "sarathi_place": (None, (POINTER(c_int32), POINTER(c_int32))),
    "sarathi_copy": (None, (c_void_p, c_void_p, c_int64)),
    "sarathi_make_decoder": (c_void_p, (POINTER(ModelStruct),)),
    "sarathi_free_decoder": (None, (c_void_p,)),
    "sarathi_forward": (FAULT, (c_void_p, POINTER(BatchStruct))),
    "sarathi_linear": (None, (POINTER(LinearStruct), c_int32, c_void_p, c_int64, c_void_p)),
    "sarathi_attention": (
        FAULT,
        (POINTER(ModelStruct), POINTER(BatchStruct), c_void_p, c_void_p),
    ),
    "sarathi_greedy": (None, (c_void_p, c_int64, c_int64, c_int64, c_void_p)),
}


_started_isa = "auto"  # the set of instructions of the last `start`


def load(isa: str | None = None) -> ctypes.CDLL:
    """The library for `isa` (see `build`), or for the one that was started last; compiled now
    unless it was before. Raises NotBuilt.
    """
    return opened(isa or _started_isa)


@cache
def opened(isa: str) -> ctypes.CDLL:
    """The library for `isa`, compiled and opened once. Raises NotBuilt."""
    path = build(isa)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(f"the compiled library can't be loaded: {error}") from None
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
        if result is FAULT:
            function.errcheck = _raise_fault
    return library


def _raise_fault(fault: bytes | None, function: object, arguments: object) -> None:
    if fault is not None:
        raise ValueError(fault.decode())


def start(num_threads: int, *, allows_amx: bool = True, isa: str = "auto") -> bool:
    """Start so many threads, before any other call, for what is called from now on to be computed
    by `isa`; returns whether bfloat16 is multiplied by AMX. Raises NotBuilt.
    """
    global _started_isa
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads compute nothing; use 1 or more")
    is_amx = bool(load(isa).sarathi_start(num_threads, allows_amx))
    _started_isa = isa
    return is_amx


def place(cores: Sequence[int], nodes: Sequence[int]) -> None:
    """Put each of the threads that were started on a core (below 0: any), and say which node of
    memory is near, from 0. Raises ValueError unless threads of a node follow each other.
    """
    if len(cores) != len(nodes) or list(nodes) != sorted(nodes) or nodes[0] != 0:
        raise ValueError(f"nodes {list(nodes)} of the cores {list(cores)} do not ascend from 0")
    numbers = c_int32 * len(cores)
    load().sarathi_place(numbers(*cores), numbers(*nodes))


def copy_by_thread(to: Tensor, source: Tensor) -> Tensor:
    """Copy between tensors of a kind, each in one piece, so that what a node's threads multiply
    lies there, if nothing was written to `to` before. Returns `to`.
    """
    load().sarathi_copy(to.data_ptr(), source.data_ptr(), source.nbytes)
    return to


def linear_struct(linear: PackedLinear) -> LinearStruct:
    """Valid as long as `linear`."""
    return LinearStruct(
        linear.weight.data_ptr(),
        address(linear.bias),
        linear.in_features,
        linear.out_features,
    )


def address(tensor: Tensor | None) -> int | None:
    """Where `tensor` lies in memory, null for none."""
    return None if tensor is None else tensor.data_ptr()


def norm_struct(weight: Tensor, bias: Tensor | None, epsilon: float) -> NormStruct:
    """RMSNorm, or LayerNorm with a `bias`; of float32. Valid as long as these are."""
    return NormStruct(weight.data_ptr(), address(bias), len(weight), epsilon, bias is not None)


class Decoder:
    """A whole model in C++, of `struct` and the `memory` that it points at, kept as long.

    Raises ValueError where sizes do not match.
    """

    def __init__(self, struct: ModelStruct, memory: Sequence[object]) -> None:
        check_model(struct)
        self.struct = struct
        self._memory = memory
        self._library = load()
        self._made = self._library.sarathi_make_decoder(byref(struct))
        weakref.finalize(self, self._library.sarathi_free_decoder, self._made)

    def forward(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        slots: Tensor,  # [num_tokens] int64
        emit_rows: Tensor,  # [num_emits] int64
        segments: Sequence[Segment],
        keys: Tensor,  # [num_layers, num_blocks, block_size, num_kv_heads, head_size]
        values: Tensor,
        tables: tuple[Tensor, Tensor],  # cosines and sines, [num_positions, ...] float32
        record: Callable[[str, float], None] | None = None,
    ) -> Tensor:
        """One iteration: writes keys and values; returns logits [num_emits, vocab_size] in float32.

        `record` gets the seconds of each operation in all layers, less what its threads waited for
        each other, which is "waiting"; attention of single tokens is attention_decode.

        Raises ValueError for tensors of other kinds, and for numbers beyond what they point into.
        """
        model = self.struct
        dtype = DTYPES[model.is_bf16]
        _check_cache(keys, values, (dtype,), model.num_kv_heads, model.head_size)
        num_layers, num_blocks, block_size = keys.shape[:-2]
        rows = (token_ids, positions, slots)
        if num_layers != model.num_layers or any(len(row) != len(token_ids) for row in rows):
            raise ValueError(f"{num_layers} layers in the cache, or rows of different lengths")
        if not all(map(_is_index, (*rows, emit_rows))):
            raise ValueError("tokens, positions, slots and rows are int64, each in one piece")
        num_positions = len(tables[0])
        for table in tables:
            is_whole = table.numel() == num_positions * model.rotary_half
            if not is_whole or not _is_floats(table, num_positions):
                raise ValueError(f"{tuple(table.shape)} is no table of {model.rotary_half} angles")
        logits = torch.empty(len(emit_rows), model.vocab_size)
        structs = segment_structs(segments)
        # Tensors are held by this function's names until the call returns: C++ has their addresses.
        batch = BatchStruct(
            *(tensor.data_ptr() for tensor in (*rows, emit_rows)),
            structs,
            len(token_ids),
            len(structs),
            len(emit_rows),
            keys.data_ptr(),
            values.data_ptr(),
            num_blocks,
            block_size,
            *(table.data_ptr() for table in tables),
            num_positions,
            logits.data_ptr(),
            KV_TYPES.index(dtype),
        )
        if record is None:
            self._library.sarathi_forward(self._made, byref(batch))
            return logits
        batch.nanoseconds = nanoseconds = (c_int64 * len(OPERATIONS))()
        self._library.sarathi_forward(self._made, byref(batch))
        for name, spent in zip(OPERATIONS, nanoseconds, strict=True):
            if spent:
                record(name, spent * 1e-9)
        return logits


def segment_structs(segments: Sequence[Segment]) -> ctypes.Array[SegmentStruct]:
    """Valid as long as `segments`. Raises ValueError for blocks that are not int64."""
    structs = (SegmentStruct * len(segments))()  # zeroed: a null `blocks` means neighbours
    for struct, segment in zip(structs, segments, strict=True):
        struct.start = segment.start
        struct.num_queries = segment.num_queries
        struct.kv_len = segment.kv_len
        if isinstance(segment.blocks, slice):
            struct.first_block = segment.blocks.start
            struct.num_blocks = segment.blocks.stop - segment.blocks.start
        elif _is_index(segment.blocks):
            struct.blocks = segment.blocks.data_ptr()
            struct.num_blocks = len(segment.blocks)
        else:
            raise ValueError(f"blocks of {segment.blocks.dtype} are not int64 in one piece")
    return structs


def linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """x [rows, in_features] times a packed weight; [rows, out_features] of x's dtype.

    Of a gated weight all columns of the panels: 16 gates and the 16 columns they scale, and so on.
    Sums are float32. A CPU that multiplies bfloat16 has x rounded to it if the weight is. Raises
    ValueError if sizes do not match.
    """
    if x.shape[1] != weight.in_features:
        raise ValueError(f"x {tuple(x.shape)} does not match {weight.in_features} inputs")
    rows = x.float().contiguous()
    struct = linear_struct(weight)
    if weight.is_gated:
        struct.out_features = weight.num_columns
    out = torch.empty(len(x), struct.out_features)
    load().sarathi_linear(byref(struct), weight.is_bf16, rows.data_ptr(), len(x), out.data_ptr())
    return out.to(x.dtype)


def attention(
    query: Tensor,  # [num_tokens, num_heads, head_size]
    keys: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size], float32 or bfloat16
    values: Tensor,
    segments: Sequence[Segment],
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """`attention.paged_attention`, without masks; [num_tokens, num_heads, head_size] of the query's
    dtype. Raises ValueError for other shapes.
    """
    if sliding_window == 0:
        raise ValueError("a sliding window of no tokens sees nothing")
    num_heads, head_size = query.shape[1:]
    num_blocks, block_size, num_kv_heads = keys.shape[:-1]
    _check_cache(keys, values, DTYPES, num_kv_heads, head_size)
    queries = query.float().contiguous()
    out = torch.empty_like(queries)
    model = ModelStruct(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    model.window = sliding_window or 0
    model.scale = scale
    model.is_bf16 = keys.dtype == torch.bfloat16
    check_heads(model)
    structs = segment_structs(segments)
    batch = BatchStruct(None, None, None, None, structs, len(query), len(structs), 0)
    batch.keys = keys.data_ptr()
    batch.values = values.data_ptr()
    batch.num_blocks = num_blocks
    batch.block_size = block_size
    batch.kv_type = KV_TYPES.index(keys.dtype)
    load().sarathi_attention(byref(model), byref(batch), queries.data_ptr(), out.data_ptr())
    return out.to(query.dtype)


def _check_cache(
    keys: Tensor, values: Tensor, dtypes: Sequence[torch.dtype], num_heads: int, head_size: int
) -> None:
    """Raise ValueError unless keys and values are alike, of such heads and one of `dtypes`, each in
    one piece.
    """
    for tensor in (keys, values):
        is_alike = tensor.shape == (*keys.shape[:-2], num_heads, head_size)
        is_alike &= tensor.dtype == keys.dtype
        if not (is_alike and tensor.is_contiguous() and tensor.dtype in dtypes):
            raise ValueError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not a cache of "
                f"{num_heads} heads of {head_size}, in one piece, of {dtypes}"
            )


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.ndim == 1 and tensor.is_contiguous()


def _is_floats(tensor: Tensor, length: int) -> bool:
    is_whole = tensor.is_contiguous() and tensor.device.type == "cpu"
    return is_whole and tensor.dtype == torch.float32 and len(tensor) == length


def greedy(logits: Tensor, nan_token: int) -> Tensor:
    """The likeliest token of each row of [rows, vocab_size] float32; `nan_token` where a logit is
    not a number.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits of {logits.dtype} are not contiguous float32")
    out = torch.empty(len(logits), dtype=torch.int64)
    load().sarathi_greedy(logits.data_ptr(), *logits.shape, nan_token, out.data_ptr())
    return out

"""Weights as the C++ reads them: 32 columns of the result together, so that a product reads memory
in one stream.

float32: [panels, in_features, 32]. bfloat16, for AMX: [panels, in_features / 32, 2, 16, 16, 2],
that is blocks of 32 inputs, two halves of 16 columns, and in each the inputs pair by pair. Sizes
are rounded up, with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_kernels.cpu.memory import use_huge_pages

PANEL = 32
CACHE_LINE = 64
KBLOCKS = {torch.float32: 1, torch.bfloat16: 32}  # inputs that AMX takes at a time
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class PackedLinear:
    """A packed weight; `bias` is float32 and as wide as the panels. `out_features` of a gated
    product are half. Raises ValueError if the tensors do not have the sizes that it says.
    """

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    is_gated: bool = False

    def __post_init__(self) -> None:
        rows_of_panel = PANEL // 2 if self.is_gated else PANEL
        panels = -(-self.out_features // rows_of_panel)
        shape: tuple[int, ...] = (panels, self.in_features, PANEL)
        kblock = KBLOCKS.get(self.weight.dtype, 1)
        if kblock > 1:
            num_blocks = -(-self.in_features // kblock)
            shape = (panels, num_blocks, 2, 16, 16, 2)
        is_sound = self.weight.dtype in KBLOCKS and self.weight.is_contiguous()
        if self.bias is not None:
            num_columns = panels * PANEL
            is_sound &= self.bias.dtype == torch.float32
            is_sound &= self.bias.shape == (num_columns,)
        if not is_sound or self.weight.shape != shape:
            raise ValueError(
                f"{tuple(self.weight.shape)} of {self.weight.dtype} is not the packed weight of "
                f"{self.in_features} inputs and {self.out_features} results"
            )

    @property
    def num_columns(self) -> int:
        """Of all panels."""
        return self.weight.shape[0] * PANEL

    @property
    def is_bf16(self) -> bool:
        """Else float32."""
        return self.weight.dtype == torch.bfloat16


def pack_linear(weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> PackedLinear:
    """Pack `weight` [out_features, in_features], and `bias` [out_features] where there is one.

    With `is_gated` the first half of the rows are gates of the second: each panel gets 16 of both.
    Raises ValueError for other dtypes.
    """
    if weight.dtype not in DTYPES:
        raise ValueError(f"weights of {weight.dtype} can't be packed; use float32 or bfloat16")
    out_features, in_features = weight.shape
    if is_gated:
        padded = _pair(weight)
        out_features //= 2
    else:
        missing_rows = -out_features % PANEL
        padded = F.pad(weight, (0, 0, 0, missing_rows))
    # Padded as the weight: the C++ adds whole panels without a look at the width.
    columns = None
    if bias is not None:
        columns = _columns(bias, is_gated)
    return PackedLinear(_panels(padded), columns, in_features, out_features, is_gated)


def _columns(values: Tensor, is_gated: bool) -> Tensor:
    """One for each row of a weight, as wide as its panels, in float32."""
    in_order = values
    if is_gated:
        as_weight = values[:, None]
        in_order = _pair(as_weight)[:, 0]
    num_missing = -len(in_order) % PANEL
    padded = F.pad(in_order.float(), (0, num_missing))
    return padded.contiguous()


def pack_together(
    packed: Iterator[PackedLinear],
    nbytes: int,
    copy: Callable[[Tensor, Tensor], Tensor] = Tensor.copy_,
) -> list[PackedLinear]:
    """Move the weights into one tensor of `nbytes` or more, on large pages where Linux gives them;
    `copy` touches them first.

    An iteration of few tokens reads all of them once: on small pages a good part of its time goes
    into finding those.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8)
    use_huge_pages(memory)  # before it is touched
    moved = []
    offset = 0
    for linear in packed:
        weight = linear.weight
        part = memory[offset : offset + weight.nbytes]
        target = part.view(weight.dtype).view(weight.shape)
        copied = copy(target, weight)
        moved.append(replace(linear, weight=copied))
        offset += _whole_lines(weight.nbytes)
    return moved


def packed_nbytes(weight: Tensor, *, is_gated: bool = False) -> int:
    """What `pack_together` needs for the packed form of `weight`."""
    rows, columns = weight.shape
    if is_gated:
        half_blocks = -(-rows // 2 // 16)
        rows = 2 * half_blocks * 16
    rows += -rows % PANEL
    columns += -columns % KBLOCKS[weight.dtype]
    return _whole_lines(rows * columns * weight.element_size())


def _whole_lines(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return num_bytes + -num_bytes % CACHE_LINE


def _pair(weight: Tensor) -> Tensor:
    """16 rows of the first half, 16 of the second, and so on: [2 half, in_features] to
    [2 ceil(half / 16) 16, in_features].
    """
    rows, columns = weight.shape
    half = rows // 2
    num_missing = -half % 16
    halves = weight.view(2, half, columns)
    padded = F.pad(halves, (0, 0, 0, num_missing))
    blocks = padded.view(2, -1, 16, columns)  # [gates and ups, blocks, rows, columns]
    return blocks.transpose(0, 1).reshape(-1, columns)


def _panels(weight: Tensor) -> Tensor:
    """Of rows that fill panels."""
    in_features = weight.shape[1]
    kblock = KBLOCKS[weight.dtype]
    if kblock == 1:
        panels = weight.view(-1, PANEL, in_features)
        return panels.transpose(1, 2).contiguous()
    num_missing = -in_features % kblock
    padded = F.pad(weight, (0, num_missing))
    num_blocks = padded.shape[1] // kblock
    # AMX multiplies bfloat16 pair by pair (VNNI): two inputs of a column lie side by side. The axes
    # are panel, half, column, block, pair, and the two of a pair.
    blocks = padded.view(-1, 2, 16, num_blocks, 16, kblock // 16)
    return blocks.permute(0, 3, 1, 4, 2, 5).contiguous()

"""The matrix product of chosen tiles, interpreted or on a GPU, against plain torch; both of its
paths.
"""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import BOUNDS, DEVICE, DTYPES, random, writes_beyond
from torch import Tensor

from sarathi_kernels.products.tiled_matmul import TILES, Tile, tiled_matmul
from sarathi_kernels.runtime.chip import CHIPS, assumed, chip_of
from sarathi_kernels.runtime.launch import recorded
from sarathi_kernels.runtime.testing import poisoned, relative_error

SMALL = Tile(16, 32, 16)
HAS_DESCRIPTORS = chip_of(DEVICE).capability >= 90  # assumed to be so in the interpreter


def inside_nan(x: Tensor) -> Tensor:
    """`x` as a view of a larger matrix of NaN, whose rows are aligned as `x` may need."""
    rows, columns = x.shape
    wide = poisoned(rows + 8, columns + 8, device=x.device, dtype=x.dtype)
    wide[:rows, :columns] = x
    return wide[:rows, :columns]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 16, 32), (33, 40, 100), (160, 7, 33)],
    ids=str,
)
def test_product_by_each_thread_s_loads(
    rows: int, depth: int, columns: int, dtype: torch.dtype
) -> None:
    a, b = (
        inside_nan(random(rows, depth, dtype=dtype)),
        inside_nan(random(depth, columns, dtype=dtype, seed=1)),
    )
    out = tiled_matmul(a, b, SMALL, use_descriptors=False)
    assert relative_error(out, a.double() @ b.double()) < BOUNDS[dtype]


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="needs sm_90 or later")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(3, 80, 8), (300, 8, 40)], ids=str)
@pytest.mark.parametrize("tile", [Tile(64, 32, 16), Tile(128, 16, 16)], ids=str)
def test_product_by_descriptors(
    tile: Tile, rows: int, depth: int, columns: int, dtype: torch.dtype
) -> None:
    a, b = (
        inside_nan(random(rows, depth, dtype=dtype)),
        inside_nan(random(depth, columns, dtype=dtype, seed=1)),
    )
    out = tiled_matmul(a, b, tile, use_descriptors=True)
    assert relative_error(out, a.double() @ b.double()) < BOUNDS[dtype]


def test_product_writes_nothing_behind_its_last_row() -> None:
    a, b = random(17, 16, dtype=torch.float16), random(16, 40, dtype=torch.float16, seed=1)
    assert not writes_beyond(lambda: tiled_matmul(a, b, SMALL, use_descriptors=False), output=2)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_study_s_tiles_beyond_their_edges(tile: Tile) -> None:
    a, b = random(130, 72, dtype=torch.float16), random(72, 264, dtype=torch.float16, seed=1)
    assert relative_error(tiled_matmul(a, b, tile), a.double() @ b.double()) < BOUNDS[torch.float16]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="for as many programs as the real chip has")
def test_a_persistent_program_goes_on_to_its_next_tile() -> None:
    a, b = random(100, 16, dtype=torch.float16), random(16, 96, dtype=torch.float16, seed=1)
    with assumed(type(CHIPS[90])(90, num_sms=3, shared_memory=CHIPS[90].shared_memory)):
        out = tiled_matmul(a, b, Tile(16, 16, 16), use_descriptors=True)
    assert relative_error(out, a.double() @ b.double()) < BOUNDS[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rows", [256, 257, 2048])
def test_large_products_on_a_gpu(tile: Tile, rows: int) -> None:
    a, b = (
        random(rows, 5120, dtype=torch.bfloat16),
        random(5120, 1096, dtype=torch.bfloat16, seed=1),
    )
    expected = a.double() @ b.double()
    for use_descriptors in (False, True) if HAS_DESCRIPTORS else (False,):
        out = tiled_matmul(a, b, tile, use_descriptors=use_descriptors)
        assert relative_error(out, expected) < BOUNDS[torch.bfloat16]


def test_the_path_follows_the_chip_the_dtype_and_the_alignment() -> None:
    def kernel(capability: int, columns: int, dtype: torch.dtype) -> str:
        with recorded(CHIPS[capability]) as recording:
            tiled_matmul(
                torch.empty(512, 64, device="meta", dtype=dtype),
                torch.empty(64, columns, device="meta", dtype=dtype),
                TILES[0],
            )
        return str(recording.launches[0].kernel.__name__)

    assert (
        kernel(90, 512, torch.bfloat16)
        == kernel(100, 512, torch.float16)
        == "persistent_matmul_kernel"
    )
    assert (
        kernel(80, 512, torch.bfloat16) == kernel(86, 512, torch.float16) == "tiled_matmul_kernel"
    )
    assert (
        kernel(90, 511, torch.bfloat16) == kernel(90, 512, torch.float32) == "tiled_matmul_kernel"
    )


def test_product_refuses_what_does_not_match() -> None:
    a, b = random(4, 16, dtype=torch.float16), random(16, 5, dtype=torch.float16)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        tiled_matmul(a, b[:15], SMALL)
    with pytest.raises(ValueError, match="one dtype"):
        tiled_matmul(a, b.float(), SMALL)
    with pytest.raises(ValueError, match="powers of two from 16 on, not 48x32x16"):
        tiled_matmul(a, b, Tile(48, 32, 16))
    with pytest.raises(ValueError, match="rows must be contiguous"):
        tiled_matmul(a, b.t().contiguous().t(), SMALL)
    with (
        assumed(CHIPS[90]),
        pytest.raises(ValueError, match=r"rows of \(16, 5\) are not aligned to 16 bytes"),
    ):
        tiled_matmul(a, b, SMALL, use_descriptors=True)
    with (
        assumed(CHIPS[86]),
        pytest.raises(ValueError, match="sm_86 has no tensor memory accelerator"),
    ):
        tiled_matmul(a, b, SMALL, use_descriptors=True)

"""α·A·Aᵀ + β·A, or α·A·B + β·A, of each matrix in a batch by its tiles on and below the diagonal: one GPU kernel."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Launch:
    """Tiles of `block` × `block`, summed `depth` columns at a time; warps per program, and stages of its pipeline."""

    block: int
    depth: int
    warps: int
    stages: int


# three stages take 96 KB, so that two programs share a Hopper multiprocessor: one multiplies while the other stores
LAUNCH = Launch(128, 64, 8, 3)


@triton.jit
def tile_of(number):
    """(i, j), j ≤ i, of tile `number` in a lower triangle counted row by row. The root is off by one at most."""
    i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    return i, number - i * (i + 1) // 2


@triton.jit
def rows_of(a, matrix, row, column, ACROSS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """BLOCK rows of A by DEPTH columns, where memory holds A, or Aᵀ (ACROSS); zeros beyond its end."""
    if ACROSS:
        tile = tl.trans(a.load([matrix, column, row]).reshape(DEPTH, BLOCK))
    else:
        tile = a.load([matrix, row, column]).reshape(BLOCK, DEPTH)
    return tile


@triton.jit
def triangle(
    a, b, term, out, columns, alpha, beta,
    ADD: tl.constexpr, ACROSS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of α·A·Bᵀ (+ β·term), and its mirror image. Neighbours in a row of tiles run together, and share it.

    A tile on the diagonal is mirrored within itself: the result is symmetric in whatever order products are summed.
    """
    i, j = tile_of(tl.program_id(0))
    matrix = tl.program_id(1)
    row, column = i * BLOCK, j * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, columns, DEPTH):
        left = rows_of(a, matrix, row, k, ACROSS, BLOCK, DEPTH)
        right = rows_of(b, matrix, column, k, ACROSS, BLOCK, DEPTH)
        acc = tl.dot(left, tl.trans(right), acc)
    acc *= alpha
    if ADD:
        acc += beta * term.load([matrix, row, column]).reshape(BLOCK, BLOCK).to(tl.float32)
    tile = acc.to(out.dtype)
    if i == j:
        within = tl.arange(0, BLOCK)
        tile = tl.where(within[:, None] >= within[None, :], tile, tl.trans(tile))
        out.store([matrix, row, row], tile.reshape(1, BLOCK, BLOCK))
    else:
        out.store([matrix, row, column], tile.reshape(1, BLOCK, BLOCK))
        out.store([matrix, column, row], tl.trans(tile).reshape(1, BLOCK, BLOCK))


def product(
    a: Tensor, alpha: float, beta: float = 0.0, other: Tensor | None = None, launch: Launch | None = None
) -> Tensor:
    """α·A·Aᵀ + β·A (n, rows, rows), symmetric to the bit; A is (n, rows, cols), and symmetric itself where β ≠ 0.

    other: B, for α·A·B + β·A. A and B are symmetric and commute, so that A·B is symmetric too; where rounding made it a
    little less so, the part below the diagonal counts.
    """
    launch = launch or LAUNCH
    kernel: Any = triangle  # the decorated function takes more than its signature says
    count, rows, columns = a.shape
    across = other is None and a.mT.is_contiguous() and not a.is_contiguous()
    source = a.mT if across else a.contiguous()
    out = a.new_empty(count, rows, rows)
    square, slab = [launch.block, launch.block], [launch.block, launch.depth]
    target, left = _descriptor(out, square), _descriptor(source, slab[::-1] if across else slab)
    right = left if other is None else _descriptor(other.contiguous(), slab)
    tiles = -(-rows // launch.block)
    with torch.cuda.device_of(a):
        kernel[tiles * (tiles + 1) // 2, count](
            left, right, _descriptor(source, square) if beta else target, target, columns, alpha, beta,
            ADD=beta != 0.0, ACROSS=across, BLOCK=launch.block, DEPTH=launch.depth,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return out


def _descriptor(tensor: Tensor, tile: list[int]) -> TensorDescriptor:
    """A descriptor that loads one tile of one matrix at a time."""
    _, rows, columns = tensor.shape
    return TensorDescriptor(tensor, list(tensor.shape), [rows * columns, columns, 1], [1, *tile])
